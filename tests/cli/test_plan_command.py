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
    words = r"(\d+) buckets.*: ([\d,]+) MB/s, (\d+) us a trip, (\d+) us a message for gloo's threads \(.*ranks\)"
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
        (("--params", "9" * 400, "--ranks", "2", "--bandwidth", "1gbit"), ["--params '999", "finite"]),
        (
            ("--params", "1M", "--ranks", "2", "--bandwidth", "1gbit", "--latency", "9" * 400 + "s"),
            ["--latency '999", "finite"],
        ),
        (("--params", "1M", "--ranks", "0", "--bandwidth", "1gbit"), ["--ranks 0", "at least 2"]),
        (("--params", "1M", "--ranks", "4", "--bandwidth", "10gb"), ["--bandwidth '10gb'", "bits or bytes", "10gbit"]),
        (("--params", "1M", "--ranks", "4", "--bandwidth", "1GB/s"), ["--bandwidth '1GB/s'", "bits or bytes", "8gbit"]),
        (("--params", "1M", "--ranks", "4", "--bandwidth", "1GBps"), ["--bandwidth '1GBps'", "bits or bytes"]),
        (("--params", "1M", "--ranks", "4", "--bandwidth", "10parsec"), ["'10parsec'", "gbit", "gbps", "10gbit"]),
        (("--params", "1M", "--ranks", "2", "--bandwidth", "1gbit,2gbit,3gbit"), ["3 rates for 2 links", "slowest"]),
        (("--params", "1M", "--ranks", "4", "--bandwidth", "1gbit,"), ["--bandwidth ''", "10gbit"]),
        (("--params", "1M", "--hosts", "2", "--ranks-per-host", "0", "--bandwidth", "1gbit"), ["--ranks-per-host 0"]),
        (
            ("--params", "1M", "--hosts", "2", "--ranks-per-host", "4", "--ranks", "9", "--bandwidth", "1gbit"),
            ["--ranks 9", "2 hosts of 4 ranks are 8", "Leave --ranks out"],
        ),
        (
            ("--params", "1M", "--hosts", "0", "--ranks-per-host", "4", "--bandwidth", "1gbit"),
            ["--hosts 0", "at least 1"],
        ),
        (("--params", "1M", "--ranks-per-host", "4", "--bandwidth", "1gbit"), ["--ranks-per-host 4", "--hosts 8"]),
        (("--params", "9999T", "--ranks", "4", "--bandwidth", "1gbit"), ["buckets of 25 MB", "--bucket-mb", "7B"]),
        (("--params", "1M", "--hosts", "2", "--ranks-per-host", "4"), ["Add", "--bandwidth 10gbit"]),
        (
            ("--params", "1M", "--ranks", "4", "--bandwidth", "1gbit", "--device", "H100", "--codecs", "apot5"),
            ["apot5", "H100", "timed on a GPU", "int8"],
        ),
        (("--params", "1M", "--ranks", "4", "--bandwidth", "10"), ["--bandwidth '10'", "10gbit"]),
        (("--params", "1M", "--ranks", "4", "--bandwidth", "9" * 400 + "gbit"), ["--bandwidth '999", "1000 Tbit"]),
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
        (
            ("--params", "1M", "--ranks", "4", "--bandwidth", "1gbit", "--device", "tpu"),
            ["--device 'tpu'", "cuda", "H100"],
        ),
    ],
)
def test_bad_arguments_end_with_one_line_and_2(words: tuple[str, ...], said: list[str]) -> None:
    code, out, err = invoke("plan", *words)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert all(word in err for word in said)


@pytest.mark.parametrize("rate", ["1gbit", "1gbps", "1Gbit/s", "1000mbit", "1 Gbps", "1gbit/s"])
def test_rates_are_written_in_many_ways(rate: str) -> None:
    code, out, err = invoke(*PAPER, "--bandwidth", rate, "--codecs", "none", "--json")
    assert code == 0, err
    assert json.loads(out)["link"]["bandwidth_bytes_per_s"] == 0.95e9 / 8


def test_where_links_differ_the_slowest_decides_and_that_is_said() -> None:
    words = (*PAPER, "--codecs", "none")
    mixed, slow = (invoke(*words, "--bandwidth", rate, "--json")[1] for rate in ("10gbit,1gbit,10gbit", "1gbit"))
    assert json.loads(mixed)["predictions"] == json.loads(slow)["predictions"]
    assert (
        "119 MB/s (the slowest of 3 links: every rank waits for it)"
        in invoke(*words, "--bandwidth", "10gbit,1gbit,1tbit")[1]
    )
    assert "slowest" not in invoke(*words, "--bandwidth", "1gbit,1gbit")[1]


def test_hosts_times_ranks_of_a_host_are_the_ranks() -> None:
    words = ("plan", "--params", "10M", "--hosts", "4", "--bandwidth", "10gbit", "--codecs", "none", "--json")
    one, other = (json.loads(invoke(*words, *more)[1]) for more in (("--ranks-per-host", "8"), ("--ranks", "32")))
    assert one == other
    assert (one["ranks"], one["hosts"]) == (32, 4)


@pytest.mark.parametrize("name", ["H100", "h100", "NVIDIA H100", "H100 SXM"])
def test_a_gpu_is_planned_for_by_its_name_where_there_is_none(name: str) -> None:
    code, out, err = invoke(*PAPER, "--bandwidth", "10gbit", "--device", name, "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found["device"] == "H100"
    assert found["link"]["message_s"] == 5e-6  # NCCL's
    code, out, _ = invoke(*PAPER, "--bandwidth", "10gbit", "--device", name)
    assert "coding on H100: not measured, but derived from its published memory bandwidth of 3,350 GB/s" in out
    assert "on this machine" not in out


def test_only_the_gpu_that_was_measured_is_said_to_be_measured() -> None:
    out = invoke(*PAPER, "--bandwidth", "10gbit", "--device", "H200")[1]
    assert "coding, measured on an H200" in out
    assert "not measured" not in out


def test_where_messages_eat_the_gain_larger_buckets_and_fewer_meetings_are_suggested_with_figures() -> None:
    words = (
        "plan",
        "--params",
        "100M",
        "--ranks",
        "512",
        "--bandwidth",
        "100gbit",
        "--device",
        "T4",
        "--codecs",
        "int4",
    )
    code, out, _ = invoke(*words, "--json")
    assert code == 0
    found = json.loads(out)
    advice = found["advice"]
    assert found["chosen"] == "int4"
    now = found["predictions"][1]["seconds"]
    assert advice["bucket_mb"] > 25
    assert advice["bucket_seconds"] < 0.9 * now
    assert advice["micro_batch_seconds"] == advice["bucket_seconds"] / advice["micro_batches"]
    out = invoke(*words)[1]
    assert "bucket_cap_mb=" in out
    assert "no_sync()" in out
    calm = invoke(*PAPER, "--bandwidth", "10mbit", "--codecs", "int4", "--device", "T4")[1]
    assert "bucket_cap_mb" not in calm


def test_live_a_named_gpu_is_refused() -> None:
    result = CliRunner().invoke(
        app, ["plan", "--params", "1M", "--device", "H100"], env={**WIDE, "RANK": "0", "WORLD_SIZE": "2"}
    )
    assert result.exit_code == 2
    assert result.stderr.startswith("error: --device H100: live, codecs are measured where they run.")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused() -> None:
    code, _, err = invoke(*PAPER, "--bandwidth", "1gbit", "--device", "cuda")
    assert code == 2
    assert err == (
        "error: --device cuda: torch finds no GPU, and codecs are measured where they run. Name the GPU to plan for it "
        "on paper (--device H100), or use --device cpu.\n"
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
