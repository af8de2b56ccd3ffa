"""`narrowcast plan`, as a user runs it: on paper, live under torchrun, and with arguments that make no sense."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import narrowcast as nc
from narrowcast.cli import app

PAPER = ("plan", "--params", "10M", "--ranks", "8")
WIDE = {"COLUMNS": "200", "RANK": None, "WORLD_SIZE": None}


def invoke(*words: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(words), env=WIDE)
    return result.exit_code, result.stdout, result.stderr


def test_on_paper_a_slow_link_gets_four_bits_and_the_bytes_are_those_of_the_codec() -> None:
    code, out, _ = invoke(*PAPER, "--bandwidth", "10mbit", "--json")
    assert code == 0
    found = json.loads(out)
    assert (found["chosen"], found["ranks"], found["params"], found["live"]) == ("int4", 8, 10_000_000, False)
    by_codec = {p["codec"]: p for p in found["predictions"]}
    assert list(by_codec) == ["none", "bf16", "int8", "int6", "int4"]
    encoded = sum(count * nc.codec("int4").row_bytes(numel) for numel, count in found["buckets"])
    # 7/8 of the encoded gradients, twice. That parts are whole units of 128, and headers, add less than a thousandth.
    assert by_codec["int4"]["bytes"] == pytest.approx(2 * 7 / 8 * encoded, rel=1e-3)
    assert by_codec["none"]["bytes"] == 2 * 7 * 10_000_000 * 4 // 8
    # 70 MB at 10 Mbit/s, of which 95% are left: no codec's speed matters beside it.
    assert by_codec["none"]["seconds"] == pytest.approx(70 / (1.25 * 0.95), rel=0.01)


def test_on_paper_hosts_send_what_one_rank_would() -> None:
    words = ("--bandwidth", "1gbit", "--codecs", "int8", "--json")
    of_hosts, of_ranks = (
        json.loads(invoke("plan", "--params", "10M", "--ranks", ranks, *hosts, *words)[1])["predictions"][1]
        for ranks, hosts in (("8", ("--hosts", "2", "--local-bandwidth", "400gbit")), ("2", ()))
    )
    assert of_hosts["bytes"] == pytest.approx(of_ranks["bytes"], rel=1e-2)
    code, out, _ = invoke(*PAPER, "--bandwidth", "1gbit", "--hosts", "2")
    assert code == 0
    assert "8 ranks on 2 hosts" in out
    assert "sent by a host" in out
    assert "within a host 1,250 MB/s" in out


def test_on_paper_a_fast_link_gets_none_and_the_table_says_so() -> None:
    code, out, _ = invoke(*PAPER, "--bandwidth", "100tbit", "--latency", "0us", "--dtype", "bf16")
    assert code == 0
    rows = [line.strip("│ ").split() for line in out.splitlines() if line.startswith("│")]
    assert [row[0] for row in rows] == ["none", "int8", "int6", "int4"]
    assert [row[0] for row in rows if row[-1] == "chosen"] == ["none"]
    assert "10,000,000 parameters, bf16 gradients" in out
    assert "on this machine" in out
    assert "none: no codec is faster." in out


def test_on_paper_the_time_of_none_follows_from_what_is_printed() -> None:
    code, out, _ = invoke("plan", "--params", "124M", "--ranks", "8", "--bandwidth", "1gbit", "--codecs", "none")
    assert code == 0
    words = r"(\d+) buckets.*: ([\d,]+) MB/s, (\d+) us a trip, (\d+) us a message for gloo's thread \(.*16 ranks\)"
    found = re.search(words, out, re.DOTALL)
    assert found, out
    buckets, rate, trip, message = (float(number.replace(",", "")) for number in found.groups())
    (row,) = (line.strip("│ ").split("│") for line in out.splitlines() if line.startswith("│"))
    by_hand = float(row[1]) / rate + buckets * 2 * 7 * (trip + message) * 1e-6
    assert float(row[2]) == pytest.approx(by_hand, rel=0.01)  # three digits are printed


def test_codecs_to_consider_may_have_several_options() -> None:
    code, out, _ = invoke(*PAPER, "--bandwidth", "1gbit", "--codecs", "none,int4:block=32,scale=fp32", "--json")
    assert code == 0
    assert [p["codec"] for p in json.loads(out)["predictions"]] == ["none", "int4:block=32,scale=fp32"]


def test_what_to_consider_and_the_margin_are_the_users() -> None:
    code, out, _ = invoke(*PAPER, "--bandwidth", "1mbit", "--codecs", "none,int8,sign", "--margin", "8", "--json")
    assert code == 0
    found = json.loads(out)
    assert [p["codec"] for p in found["predictions"]] == ["none", "int8", "sign"]
    assert found["chosen"] == "int8"  # sign is 7 times faster


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--params", "7Q", "--ranks", "2", "--bandwidth", "1gbit"), ["--params '7Q'", "k, m, b, t", "7B"]),
        (("--params", "0", "--ranks", "2", "--bandwidth", "1gbit"), ["--params '0'", "at least 1"]),
        (("--params", "1M", "--ranks", "0", "--bandwidth", "1gbit"), ["--ranks 0", "at least 2"]),
        (("--params", "1M", "--ranks", "4", "--bandwidth", "10gb"), ["--bandwidth '10gb'", "gbit", "10gbit"]),
        (("--params", "1M", "--ranks", "4", "--bandwidth", "10"), ["--bandwidth '10'", "a unit"]),
        (("--params", "1M", "--ranks", "4", "--bandwidth", "1gbit", "--latency", "5"), ["--latency '5'", "50us"]),
        (("--params", "1M", "--ranks", "4"), ["Add", "--bandwidth 10gbit"]),
        (("--params", "1M", "--bandwidth", "1gbit"), ["Add", "--ranks 16"]),
        (("--params", "1M"), ["torchrun", "--ranks 16 --bandwidth 10gbit"]),
        (("--params", "1M", "--ranks", "4", "--bandwidth", "1gbit", "--codecs", "int9"), ["int9", "int8"]),
        (("--params", "1M", "--ranks", "4", "--bandwidth", "1gbit", "--dtype", "int8"), ["--dtype 'int8'", "bf16"]),
        (("--params", "1M", "--ranks", "4", "--bandwidth", "1gbit", "--margin", "-1"), ["--margin -1", "10%"]),
        (("--params", "1M", "--ranks", "4", "--bandwidth", "1gbit", "--bucket-mb", "0"), ["--bucket-mb 0", "25"]),
        (
            ("--params", "1M", "--ranks", "4", "--bandwidth", "1gbit", "--hosts", "3"),
            ["--hosts 3", "4 ranks", "evenly"],
        ),
        (("--params", "1M", "--ranks", "4", "--bandwidth", "1gbit", "--local-bandwidth", "9gbit"), ["--hosts 8"]),
        (("--params", "1M", "--ranks", "4", "--bandwidth", "1gbit", "--device", "tpu"), ["--device 'tpu'", "cuda"]),
    ],
)
def test_bad_arguments_end_with_one_line_and_2(words: tuple[str, ...], said: list[str]) -> None:
    code, out, err = invoke("plan", *words)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert all(word in err for word in said)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused() -> None:
    code, _, err = invoke(*PAPER, "--bandwidth", "1gbit", "--device", "cuda")
    assert code == 2
    assert (
        err == "error: --device cuda: torch finds no GPU, and codecs are measured where they run. Use --device cpu.\n"
    )


def test_live_every_rank_measures_and_one_prints() -> None:
    source = str(Path(nc.__file__).parent.parent)
    program = [sys.executable, "-c", "from narrowcast.cli import app; app()"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "--no-python", *program, "plan", "--params", "100k", "--codecs", "int8", "--json"]
    env = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    found = json.loads(line)
    assert (found["live"], found["ranks"], found["buckets"]) == (True, 2, [[100_000, 1]])
    assert [p["codec"] for p in found["predictions"]] == ["none", "int8"]
