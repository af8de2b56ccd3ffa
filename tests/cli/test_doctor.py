"""`narrowcast doctor`: what it says of this machine, and that it notices what is wrong."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import narrowcast as nc
from narrowcast.cli import app
from narrowcast.cli.doctor import agreement, health
from narrowcast.kernels.cpu.reinstall import reinstall_command
from narrowcast.kernels.layout import Recipe
from narrowcast.kernels.operators import Reference

CPU = torch.device("cpu")


def test_it_says_what_runs_here_and_that_the_bytes_agree() -> None:
    result = CliRunner().invoke(app, ["doctor", "--json"])
    found = json.loads(result.stdout)
    assert result.exit_code == 0, found["faults"]
    assert found["ok"]
    assert found["versions"]["narrowcast"] == nc.__version__
    assert found["versions"]["torch"] == torch.__version__
    assert found["backends"]["gloo"]
    assert list(found["kernels"]) == nc.list_codecs()
    kernel = nc.which_kernel("int8")
    assert {devices["cpu"] for devices in found["kernels"].values()} == {kernel}
    names = [check["kernel"] for check in found["checks"] if check["device"] == "cpu"]
    # Every instruction set up to the one that runs.
    assert names == ["native/plain", "native/avx2", "native/avx512"][: len(names)]
    assert names[-1] == kernel
    counts = len(agreement.specs()), len(nc.list_codecs())
    assert all(check["differ"] == [] for check in found["checks"])
    assert {(check["settings"], check["codecs"]) for check in found["checks"]} == {counts}


def test_the_table_says_the_same() -> None:
    result = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in result.stdout.splitlines() if "│" in line]
    lines = {row[0]: row[1] for row in rows}
    assert lines["narrowcast"] == nc.__version__
    assert lines[f"{nc.which_kernel('int8')} on cpu"] == " ".join(nc.list_codecs())
    assert lines[f"bytes of {nc.which_kernel('int8')}"] == (
        f"agrees in all {len(agreement.specs())} settings of {len(nc.list_codecs())} codecs with the reference"
    )
    assert result.stdout.splitlines()[-1] == "No faults."


@pytest.mark.parametrize(
    ("environment", "what", "fix"),
    [
        ({"NARROWCAST_KERNEL": "reference"}, "NARROWCAST_KERNEL=reference is set", "unset NARROWCAST_KERNEL"),
        ({"NARROWCAST_KERNEL": "native/mmx"}, "asks for native/mmx, and this CPU has", "unset NARROWCAST_KERNEL"),
        ({"NARROWCAST_CORE": __file__}, "the native core cannot be loaded", "unset NARROWCAST_CORE"),
    ],
)
def test_a_kernel_that_does_not_run_is_a_fault_with_its_cure(
    environment: dict[str, str], what: str, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    (fault,) = health._kernel_faults()
    assert what in fault.what
    assert fault.fix == fix


def test_a_fault_ends_with_1_and_all_else_is_said_all_the_same() -> None:
    # In a process of its own: the kernel is chosen once.
    environment = {**os.environ, "PYTHONPATH": str(Path(nc.__file__).parent.parent), "NARROWCAST_CORE": __file__}
    command = [sys.executable, "-m", "narrowcast.cli", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert (done.returncode, done.stderr) == (1, "")
    found = json.loads(done.stdout)
    assert not found["ok"]
    assert [fault["fix"] for fault in found["faults"]] == ["unset NARROWCAST_CORE"]
    assert found["kernels"]["int8"]["cpu"] == "broken"
    assert found["checks"] == []
    assert found["backends"]["gloo"]


@pytest.mark.parametrize(
    ("origin", "told"),
    [
        ({"url": "file:///a/my%20clone", "dir_info": {"editable": True}}, "--editable '/a/my clone'"),
        ({"url": "file:///a/clone", "dir_info": {}}, "/a/clone"),
        ({"url": "https://x/y.git", "vcs_info": {"vcs": "git", "commit_id": "0"}}, "git+https://x/y.git"),
        (None, "--no-binary narrowcast narrowcast"),
    ],
)
def test_the_command_that_builds_the_core_starts_from_where_it_was_installed_from(
    origin: dict[str, object] | None, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "importlib.metadata.PathDistribution.read_text", lambda self, name: origin and json.dumps(origin)
    )
    assert reinstall_command() == f"pip install --force-reinstall --no-deps --no-cache-dir {told}"


def test_a_core_that_was_not_built_is_a_fault_with_the_command_that_builds_it() -> None:
    why = (
        "its native core was not built when it was installed, because there was no C++ compiler. "
        f"Install one (g++ or clang++) and run: {reinstall_command()}"
    )
    what, fix = health._slow("cpu", why)
    assert fix == reinstall_command()
    assert what.endswith("there was no C++ compiler. Install one (g++ or clang++)")


# -- that it can notice ------------------------------------------------------------------------------------------------


class WrongCode(Reference):
    """The lowest bit of the first code of every row is wrong."""

    name = "wrong"

    def encode(self, out: Tensor, rows: Tensor, recipe: Recipe, seed: int) -> None:
        super().encode(out, rows, recipe, seed)
        out[:, 0] ^= 1


class WrongZero(Reference):
    """A decoder that loses the sign of zeros, which == does not see."""

    def decode(self, out: Tensor, data: Tensor, recipe: Recipe) -> None:
        super().decode(out, data, recipe)
        out[1] = -out[1]


class WrongSum(Reference):
    """A sum that forgets to divide."""

    def decode_sum(
        self, out: Tensor, data: Tensor, recipe: Recipe, own: Tensor | None, own_rank: int, divisor: int
    ) -> None:
        super().decode_sum(out, data, recipe, own, own_rank, 1)


@pytest.mark.parametrize(
    ("kernel", "what"), [(WrongCode(), "encoded bytes"), (WrongZero(), "decoded bits"), (WrongSum(), "bits of a sum")]
)
def test_a_kernel_that_is_wrong_is_noticed_in_every_codec(kernel: Reference, what: str) -> None:
    assert agreement.find_differences(kernel, CPU) == [(spec, what) for spec in agreement.specs()]


def test_the_reference_agrees_with_itself() -> None:
    steps: list[int] = []
    assert agreement.find_differences(Reference(), CPU, lambda: steps.append(1)) == []
    assert len(steps) == len(agreement.specs())


# -- that it knows the package -----------------------------------------------------------------------------------------


def test_it_knows_the_extras_and_the_oldest_torch_of_pyproject() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    for extra, (_, packages) in health.EXTRAS.items():
        (line,) = re.findall(rf"^{extra} = \[(.*)\]$", text, re.MULTILINE)
        assert re.findall(r'"([a-z-]+)[>=]', line) == list(packages)
    assert f'"torch>={".".join(map(str, health.OLDEST))}"' in text


def group_of(ranks: int, *words: str) -> subprocess.CompletedProcess[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [*torchrun, "--no-python", sys.executable, "-m", "narrowcast.cli", "doctor", "--group", *words]
    env = {**os.environ, "PYTHONPATH": str(Path(nc.__file__).parent.parent), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    return subprocess.run(command, capture_output=True, text=True, timeout=200, env=env)


def test_under_torchrun_one_rank_prints_a_matrix_of_all_pairs() -> None:
    done = group_of(2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("MB/s, from the rank of a line") == 1
    assert done.stdout.count("latency, ms one way") == 1
    assert f"{socket.gethostname()}: ranks 0, 1" in done.stdout
    assert "Two ranks have one link, and nothing to compare it with." in done.stdout


def test_without_torchrun_there_is_no_group_and_the_command_is_told() -> None:
    result = CliRunner().invoke(app, ["doctor", "--group"], env={"RANK": None, "WORLD_SIZE": None})
    assert result.exit_code == 2
    assert result.stderr.startswith("error: --group measures the links between ranks, and this is a single process.")
    assert "torchrun" in result.stderr
