"""all_reduce of the default group follows the hosts that torchrun has started ranks on; an explicit group does not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import faults
import nccl_stand_in
import pytest
import ranks
import torch
import torch.distributed as dist
from hosted import in_phase, launched
from patience import within
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from cases import mixed, same_bits
from narrowcast import distributed as ncd
from narrowcast.distributed.protocols import mesh
from ports import free_port

pytestmark = pytest.mark.timeout(120)

HEADERS = "all_reduce within hosts", "all_reduce between hosts"


def _summed(rank: int, numel: int = 5000, **options: Any) -> Tensor:
    x = mixed(numel, seed=rank)
    work = ncd.all_reduce(x, codec="int4", **options)
    if work is not None:
        work.wait()
    return x


def _forms(rank: int, hosts: int, local: int) -> dict[str, Any]:
    launched(rank, hosts, local)
    mesh = init_device_mesh("cpu", (hosts, local))
    found = {
        "default": _summed(rank),
        "async": _summed(rank, async_op=True),
        "mesh": _summed(rank, group=mesh),
        "functional": ncd.functional.all_reduce(mixed(5000, seed=rank), codec="int4"),
    }
    ncd.reset_stats()
    found["world"] = _summed(rank, group=dist.group.WORLD)
    assert HEADERS[0] not in ncd.stats()
    found["copy"] = _summed(rank, group=dist.new_group())
    assert HEADERS[0] not in ncd.stats()
    _summed(rank)
    assert ncd.stats()[HEADERS[1]].calls == 1
    return found


@pytest.mark.parametrize(("hosts", "local"), [(2, 2), (3, 2), (2, 3)])
def test_by_default_the_sum_is_that_of_the_mesh_and_world_is_flat(hosts: int, local: int) -> None:
    found = ranks.run(hosts * local, _forms, hosts, local)
    for of_rank in found:
        for name in ("default", "async", "functional"):
            assert same_bits(of_rank[name], found[0]["mesh"]), name
        assert same_bits(of_rank["world"], found[0]["world"])
        assert same_bits(of_rank["world"], of_rank["copy"])
        assert not same_bits(of_rank["world"], of_rank["default"])


def _over_nccl(rank: int) -> None:
    nccl_stand_in.use()
    launched(rank, 2, 2)
    for numel in (1, 5000, 300_001):
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            for _ in range(2):  # as prepared, the second time
                x = torch.full((numel,), float(rank + 1), dtype=dtype)
                ncd.all_reduce(x, dist.ReduceOp.AVG, codec="raw")
                assert bool((x == 2.5).all()), (numel, dtype)
    assert HEADERS[0] in ncd.stats()


def test_over_nccl_sums_by_hosts_are_right_too() -> None:
    ranks.run(4, _over_nccl)


def _of_inference_mode(rank: int) -> None:
    launched(rank, 2, 2)
    mesh.CHUNK, mesh.HOST_CHUNK = 1 << 10, 1
    for numel in (0, 1, 9000):
        with torch.inference_mode():
            x = torch.full((numel,), float(rank))
        for group in (None, init_device_mesh("cpu", (2, 2))):
            ncd.all_reduce(x, dist.ReduceOp.AVG, group=group, codec="raw")
            assert bool((x == 1.5).all())


def test_tensors_of_inference_mode_are_summed_outside_of_it() -> None:
    ranks.run(4, _of_inference_mode)


def _uneven(rank: int, sizes: list[int]) -> tuple[bool, set[str]]:
    host = [host for host, size in enumerate(sizes) for _ in range(size)][rank]
    os.environ.update(LOCAL_WORLD_SIZE=str(sizes[host]), GROUP_RANK=str(host))
    same = same_bits(_summed(rank), _summed(rank, group=dist.group.WORLD))
    return same, set(ncd.stats())


@pytest.mark.parametrize("sizes", [[3, 2, 1], [4], [1, 1, 1, 1]])
def test_uneven_hosts_one_host_and_one_rank_a_host_are_flat(sizes: list[int]) -> None:
    for same, names in ranks.run(sum(sizes), _uneven, sizes):
        assert same
        assert not names & set(HEADERS)


def _among_others(rank: int, chunk: int) -> None:
    """Many in flight, and other collectives of the same group between them: one order, nothing paired off."""
    launched(rank, 2, 2)
    mesh.CHUNK, mesh.HOST_CHUNK = chunk, 1
    tensors = [torch.full((n,), float(i + rank)) for i, n in enumerate((10, 50_000, 300, 0, 7) * 3)]
    work: list[Any] = []
    for x in tensors:
        work.append(ncd.all_reduce(x, async_op=True, codec="raw"))
        output = torch.empty(4, 3)
        ncd.all_gather_into_tensor(output, torch.full((3,), float(rank)), codec="raw")
        assert torch.equal(output[:, 0], torch.arange(4.0))
    flat = torch.ones(9)
    ncd.all_reduce(flat, group=dist.group.WORLD, codec="raw")
    assert bool((flat == 4).all())
    for i, (x, one) in enumerate(zip(tensors, work, strict=True)):
        one.wait()
        assert bool((x == 4 * i + 6).all())


@pytest.mark.parametrize("chunk", [mesh.CHUNK, 1 << 10])
def test_sums_by_hosts_and_other_collectives_keep_one_order(chunk: int) -> None:
    ranks.run(4, _among_others, chunk)


# -- failures ---------------------------------------------------------------------------------------------------------

PHASES = {"within": 1, "between": 2, "gathering": 3}
SIDE_BY_SIDE = 1 << 15
"""Chunks of so many elements: phases follow each other chunk by chunk."""


def _right(rank: int) -> bool:
    x = torch.full((9000,), float(rank + 1))
    ncd.all_reduce(x, codec="raw")
    return bool((x == 10).all())


def _raising(rank: int, numel: int, chunk: int) -> list[tuple[str, str, bool]]:
    launched(rank, 2, 2)
    mesh.CHUNK, mesh.HOST_CHUNK = chunk, 1
    found = []
    for _ in range(2):  # the first call of all asks for hosts, too
        for phase in PHASES.values():
            if rank == 1:
                in_phase(phase, faults.run_out_of_memory, "after headers")
            error, _ = faults.error_of(lambda: ncd.all_reduce(torch.ones(numel)))
            found.append((type(error).__name__, str(error), _right(rank)))
    return found


@pytest.mark.parametrize(
    ("numel", "chunk"), [(600, mesh.CHUNK), (faults.NUMEL, mesh.CHUNK), (faults.NUMEL, SIDE_BY_SIDE)]
)
def test_a_rank_that_raises_in_any_phase_is_known_to_its_host_and_mostly_to_all(numel: int, chunk: int) -> None:
    found = ranks.run(4, _raising, numel, chunk)
    for turn, phase in enumerate([*PHASES] * 2):
        assert found[1][turn][0] == "MemoryError"
        for rank in (0, 2, 3):
            kind, text, _ = found[rank][turn]
            if phase != "gathering" or (rank == 0 and numel > 600):  # the others have their sum by then, or will
                assert kind == "CollectiveError", (phase, rank, text)
                assert "rank 1 failed in it: MemoryError" in text
        assert all(found[rank][turn][2] for rank in range(4)), phase


def _refusing(rank: int, numel: int) -> list[tuple[str, bool]]:
    launched(rank, 2, 2)
    mesh.CHUNK, mesh.HOST_CHUNK = SIDE_BY_SIDE, 1
    found = []
    for _ in range(3):
        x = torch.ones(numel, dtype=torch.int64 if rank == 2 else torch.float32)
        error, _ = faults.error_of(lambda x=x: ncd.all_reduce(x))
        found.append((str(error), _right(rank)))
        error, _ = faults.error_of(lambda: ncd.all_reduce(torch.ones(numel + (rank == 3))))
        found.append((f"{type(error).__name__}: {error}", _right(rank)))
    return found


@pytest.mark.parametrize("numel", [64, faults.NUMEL])
def test_a_call_that_a_rank_refuses_or_makes_otherwise_fails_on_all_also_as_the_first(numel: int) -> None:
    for found in ranks.run(4, _refusing, numel):
        for i, (text, right) in enumerate(found):
            assert right, i
            assert ("int64" if i % 2 == 0 else "MismatchError: ranks disagree on a collective") in text


def _killed(rank: int, phase: int, chunk: int) -> list[tuple[str, float]]:
    launched(rank, 2, 2)
    mesh.CHUNK, mesh.HOST_CHUNK = chunk, 1
    assert _right(rank)
    if rank == 3:
        in_phase(phase, faults.die, "after headers")
    found = []
    for _ in range(2):
        error, seconds = faults.error_of(lambda: ncd.all_reduce(torch.ones(faults.NUMEL)))
        found.append((str(error), seconds))
    return found


@pytest.mark.parametrize("chunk", [mesh.CHUNK, SIDE_BY_SIDE])
@pytest.mark.parametrize("phase", PHASES)
def test_a_rank_that_is_killed_in_any_phase_is_named_on_all_others_at_once(phase: str, chunk: int) -> None:
    outcomes = ranks.outcomes_of(4, _killed, PHASES[phase], chunk, group_timeout=20)
    for rank in range(3):
        assert outcomes[rank].error is None, outcomes[rank].trace
        told = outcomes[rank].value
        for text, seconds in told[1:] if phase == "gathering" and rank < 2 else told:
            assert "rank 3 is gone" in text, (phase, rank, text)
            assert seconds < within(3)


def _breaking(rank: int, phase: int, place: str, action: faults.Action, after: int) -> tuple[str, float, bool]:
    launched(rank, 2, 2)
    mesh.CHUNK, mesh.HOST_CHUNK = SIDE_BY_SIDE, 1
    assert _right(rank)
    if rank == 3:
        in_phase(phase, lambda: faults.at(place, action, in_this_thread=True, after=after), "after headers")
    error, seconds = faults.error_of(lambda: ncd.all_reduce(torch.ones(faults.NUMEL), codec="int8"))
    return f"{type(error).__name__}: {error}", seconds, action is faults.run_out_of_memory and _right(rank)


# Of 16 chunks, the eighth or so: others are on their way in the other phases.
PLACES = [
    (1, "stage one", 8),
    (2, "encoding", 8),
    (2, "stage one", 8),
    (2, "between stages", 8),
    (2, "stage two", 8),
    (2, "decoding", 8),
    (3, "stage one", 8),
]


@pytest.mark.parametrize(("phase", "place", "after"), PLACES)
def test_one_that_raises_while_phases_run_side_by_side_is_named_on_all(phase: int, place: str, after: int) -> None:
    for rank, (text, _, right) in enumerate(ranks.run(4, _breaking, phase, place, faults.run_out_of_memory, after)):
        assert right
        if rank == 3:
            assert text == "MemoryError: no room left for codes"
        elif phase < 3 or rank == 2:  # the other host may have its sum by then
            assert text.startswith("CollectiveError"), (rank, text)
            assert "rank 3 failed in it: MemoryError" in text


@pytest.mark.parametrize(("phase", "place", "after"), PLACES)
def test_a_rank_that_is_killed_while_phases_run_side_by_side_is_named_on_all(
    phase: int, place: str, after: int
) -> None:
    outcomes = ranks.outcomes_of(4, _breaking, phase, place, faults.die, after, group_timeout=20)
    for rank in range(3):
        assert outcomes[rank].error is None, outcomes[rank].trace
        text, seconds, _ = outcomes[rank].value
        if phase < 3 or rank == 2:
            assert "rank 3 is gone" in text, (rank, text)
        assert seconds < within(3)


def _stopping(rank: int) -> tuple[str, float]:
    launched(rank, 2, 2)
    mesh.CHUNK, mesh.HOST_CHUNK = SIDE_BY_SIDE, 1
    assert _right(rank)
    if rank == 3:
        in_phase(2, faults.stop, "after headers")
    error, seconds = faults.error_of(lambda: ncd.all_reduce(torch.ones(faults.NUMEL), codec="int8"))
    return str(error), seconds


def _wake(processes: list[Any]) -> None:
    faults.wait_until_stopped(processes[3].pid)
    time.sleep(within(6))
    os.kill(processes[3].pid, signal.SIGCONT)


def test_one_that_stops_while_phases_run_side_by_side_is_late_for_all() -> None:
    outcomes = ranks.outcomes_of(4, _stopping, group_timeout=3, meanwhile=_wake)
    for rank in range(3):
        assert outcomes[rank].error is None, outcomes[rank].trace
        text, seconds = outcomes[rank].value
        assert "rank 3 did not answer rank" in text, (rank, text)
        assert 2.4 < seconds < within(3.5)


# -- torchrun ---------------------------------------------------------------------------------------------------------

SCRIPT = """
import os, torch, torch.distributed as dist
import narrowcast as nc
from narrowcast import distributed as ncd
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
x = torch.arange(1000.0) * (dist.get_rank() + 1)
ncd.all_reduce(x, codec="int4")
torch.manual_seed(0)
ddp = DDP(torch.nn.Linear(64, 64))
compression = nc.compress_gradients(ddp, "int4", seed=1)
ddp(torch.ones(2, 64) * (dist.get_rank() + 1)).square().sum().backward()
state = compression.state_dict()
mine = [x.double().sum().item(), ddp.module.weight.grad.double().sum().item()]
everyone = [None] * dist.get_world_size()
dist.all_gather_object(everyone, mine)
assert all(other == mine for other in everyone), everyone
where = int(os.environ["GROUP_RANK"]), int(os.environ["LOCAL_RANK"])
assert (state["hosts"], state["host"], state["place"]) == (2, *where)
assert state["sender"]["weight"].numel() == 64 * 64 // 2
assert {"all_reduce between hosts", "gradients between hosts"} <= set(ncd.stats())
if dist.get_rank() == 0:
    print("by hosts:", *mine)
dist.destroy_process_group()
"""


def test_under_two_torchruns_of_two_ranks_sums_and_gradients_go_by_hosts(tmp_path: Path) -> None:
    script = tmp_path / "by_hosts.py"
    script.write_text(SCRIPT)
    port = free_port()
    runs = [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2", f"--node-rank={node}",
             "--master-addr=127.0.0.1", f"--master-port={port}", str(script)],
            env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for node in range(2)
    ]  # fmt: skip
    said = [run.communicate(timeout=100)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], said
    assert "by hosts:" in said[0]
