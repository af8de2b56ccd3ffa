"""Compressed gradients where ranks share hosts: exact within a host, the codec between, residuals of a share."""

from __future__ import annotations

import pickle
from typing import Any

import faults
import nccl_stand_in
import pytest
import torch
import torch.distributed as dist
import trained
from hosted import HostExpected, in_phase, launched
from patience import within
from ranks import outcomes_of, run
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP
from trained import FEW, SHAPES, STEPS, Given, given

import narrowcast as nc
from cases import same_bits
from narrowcast.distributed.gradients import hosted, layout

pytestmark = pytest.mark.timeout(180)

MESHES = [(2, 2), (3, 2), (2, 3)]
# (codec, error feedback, dtype, options of DDP)
CASES: list[tuple[str, Any, torch.dtype, dict[str, Any]]] = [
    ("int4:block=row", True, torch.float32, {}),
    ("int4:block=row", True, torch.float32, {"bucket_cap_mb": FEW}),
    ("int8", False, torch.float32, {"bucket_cap_mb": FEW, "gradient_as_bucket_view": True}),
    ("int4", "owner", torch.float32, {}),
    ("int8", True, torch.bfloat16, {"bucket_cap_mb": FEW}),
    ("raw", False, torch.float64, {}),
]


def _in_chunks(elements: int) -> None:
    """Cut buckets into chunks of so many elements: phases follow each other chunk by chunk, side by side."""
    layout.CHUNK, layout.CHUNK_COLUMNS = elements, 1


def _trained(rank: int, hosts: int, local: int, chunk: int) -> Any:
    launched(rank, hosts, local)
    _in_chunks(chunk)
    found = []
    for codec, feedback, dtype, options in CASES:
        ddp = DDP(Given(SHAPES, dtype), **options)
        state = trained.compressed(ddp, codec, error_feedback=feedback)
        gradients = [trained.backward(ddp, given(SHAPES, rank, step, dtype)) for step in range(STEPS)]
        found.append((gradients, state.state_dict()))
    return found


@pytest.mark.parametrize("chunk", [layout.CHUNK, 1 << 12])
@pytest.mark.parametrize(("hosts", "local"), MESHES)
def test_every_rank_ends_with_the_bits_of_the_model_and_keeps_residuals_of_its_share(
    hosts: int, local: int, chunk: int
) -> None:
    found = run(hosts * local, _trained, hosts, local, chunk, timeout=150)
    for case, (codec, feedback, dtype, _) in enumerate(CASES):
        expected = HostExpected(nc.codec(codec), hosts, local, feedback)
        ranks = range(hosts * local)
        right = [expected.step([given(SHAPES, rank, step, dtype) for rank in ranks]) for step in range(STEPS)]
        for rank in ranks:
            gradients, state = found[rank][case]
            trained.agree(gradients, right)
            host, place = divmod(rank, local)
            holder = {"ranks": hosts * local, "rank": rank, "hosts": hosts, "host": host, "place": place}
            assert {name: state[name] for name in holder} == (holder if feedback else dict.fromkeys(holder, 0))
            sender, owner = expected.state_of(host, place) if feedback else ({}, {})
            for name, meant in (("sender", sender), ("owner", owner)):
                assert state[name].keys() == meant.keys()
                for parameter, residual in meant.items():
                    assert same_bits(state[name][parameter], residual), (rank, codec, name, parameter)


# -- the same by other ways -------------------------------------------------------------------------------------------


def _over_nccl(rank: int) -> Any:
    nccl_stand_in.use()
    launched(rank, 2, 2)
    ddp = DDP(Given(SHAPES))
    trained.compressed(ddp)
    return trained.steps(ddp, rank)


def test_over_nccl_the_bits_are_the_same() -> None:
    expected = HostExpected(nc.codec(trained.CODEC), 2, 2, True)
    right = [expected.step([given(SHAPES, rank, step) for rank in range(4)]) for step in range(STEPS)]
    for gradients in run(4, _over_nccl, timeout=150):
        trained.agree(gradients, right)


def _ways(rank: int) -> Any:
    launched(rank, 2, 2)
    mesh = init_device_mesh("cpu", (2, 2))
    found: dict[str, Any] = {}

    def by(name: str, ddp: DDP, **options: Any) -> None:
        state = trained.compressed(ddp, **options)
        found[name] = trained.steps(ddp, rank), state.state_dict()["hosts"]

    by("default", DDP(Given(SHAPES)))
    by("mesh", DDP(Given(SHAPES)), process_group=mesh)
    by("mesh of DDP's own", DDP(Given(SHAPES), process_group=dist.new_group()), process_group=mesh)
    by("world", DDP(Given(SHAPES)), process_group=dist.group.WORLD)
    by("another group", DDP(Given(SHAPES), process_group=dist.new_group()))
    by("4 x 1", DDP(Given(SHAPES)), process_group=init_device_mesh("cpu", (4, 1)))
    hooked = DDP(Given(SHAPES))
    state = nc.GradientCompression(trained.CODEC, error_feedback=True, model=hooked.module, seed=trained.SEED)
    hooked.register_comm_hook(state, nc.gradient_hook)
    found["hook"] = trained.steps(hooked, rank), state.state_dict()["hosts"]
    return found


def test_hosts_are_followed_by_default_and_as_a_mesh_but_not_in_a_group() -> None:
    expected = HostExpected(nc.codec(trained.CODEC), 2, 2, True)
    by_hosts = [expected.step([given(SHAPES, rank, step) for rank in range(4)]) for step in range(STEPS)]
    for found in run(4, _ways, timeout=150):
        for name in ("default", "mesh", "mesh of DDP's own", "hook"):
            trained.agree(found[name][0], by_hosts)
            assert found[name][1] == 2, name
        for name in ("world", "another group", "4 x 1"):
            trained.agree(found[name][0], trained.right(4))
            assert found[name][1] == 0, name


def _wrong_meshes(rank: int) -> list[str]:
    found = []
    for mesh in (init_device_mesh("cpu", (2, 2, 1)), init_device_mesh("cpu", (4,))):
        error, _ = faults.error_of(lambda mesh=mesh: nc.compress_gradients(DDP(Given(SHAPES)), process_group=mesh))
        found.append(str(error))
    all_of_them, others = (DeviceMesh("cpu", torch.tensor(ranks)) for ranks in ([[0, 1], [2, 3]], [[2], [3]]))
    alone = dist.new_group([0, 1])
    if rank < 2:
        ddp = DDP(Given(SHAPES), process_group=alone)
        for mesh in (all_of_them, others):
            error, _ = faults.error_of(lambda mesh=mesh: nc.compress_gradients(ddp, process_group=mesh))
            found.append(str(error))
    return found


def test_a_mesh_of_other_ranks_or_dimensions_is_refused() -> None:
    found = run(4, _wrong_meshes)
    for texts in found:
        assert "process_group: a mesh for compress_gradients has two dimensions, hosts x local, not 3" in texts[0]
        assert "not 1" in texts[1]
    for texts in found[:2]:
        assert "a mesh of ranks [0, 1, 2, 3], and the DistributedDataParallel is on ranks [0, 1]" in texts[2]
        assert "a mesh of ranks [2, 3], and the DistributedDataParallel is on ranks [0, 1]" in texts[3]


# -- steps that do not count ------------------------------------------------------------------------------------------


def _overflowing(rank: int) -> Any:
    """A step with an Inf on one rank is one that never was, as far as residuals are concerned; so is one that fails."""
    launched(rank, 2, 2)
    ddp, plain = (DDP(Given(SHAPES), bucket_cap_mb=FEW) for _ in range(2))
    state, _ = (trained.compressed(model) for model in (ddp, plain))
    found = []
    for step in range(4):
        gradients = given(SHAPES, rank, step)
        if step == 1:
            bad = {name: gradient.clone() for name, gradient in gradients.items()}
            bad["odd"].view(-1)[3] = float("inf") if rank == 3 else 1.0
            seen = trained.backward(ddp, bad)
            found.append(not bool(torch.isfinite(seen["odd"]).all()))
            state.load_state_dict({**state.state_dict(), "step": 1})
        one, two = trained.backward(ddp, gradients), trained.backward(plain, gradients)
        found.append(all(same_bits(one[name], two[name]) for name in one))
    return found


def test_a_step_that_overflows_on_one_rank_leaves_no_residuals_on_any() -> None:
    for found in run(4, _overflowing):
        assert found == [True] * 5


def _scheduled(rank: int) -> Any:
    launched(rank, 2, 2)
    ddp = DDP(Given(SHAPES))
    state = trained.compressed(
        ddp, warmup_steps=1, schedule=lambda step: {1: "int8", 2: None}.get(step, "int4"), exempt="odd"
    )
    found = [trained.backward(ddp, given(SHAPES, rank, step)) for step in range(4)]
    return found, state.stats().uncompressed


def test_warm_up_schedules_and_exemptions_hold_by_hosts() -> None:
    exact = HostExpected(nc.codec("int8"), 2, 2, True)
    for found, uncompressed in run(4, _scheduled):
        for step in range(4):
            right = [given(SHAPES, rank, step) for rank in range(4)]
            for name in SHAPES if step in (0, 2) else ("odd", "tiny"):
                assert same_bits(found[step][name], exact._exact([of_rank[name] for of_rank in right])), (step, name)
        assert uncompressed == {"warm-up": 1, "schedule": 1}


# -- resuming ---------------------------------------------------------------------------------------------------------


def _resumed(rank: int) -> Any:
    launched(rank, 2, 2)
    codec = "int4:stochastic=true"
    ddp = DDP(trained.mlp(width=40), bucket_cap_mb=FEW)
    state, optimizer = trained.compressed(ddp, codec), trained.sgd(ddp)
    trained.train(ddp, rank, range(3), optimizer)
    saved = state.state_dict(), ddp.module.state_dict(), optimizer.state_dict()
    saved = pickle.loads(pickle.dumps(saved))
    trained.train(ddp, rank, range(3, 6), optimizer)
    again = DDP(trained.mlp(seed=5, width=40))  # one bucket
    again.module.load_state_dict(saved[1])
    resumed, other = trained.compressed(again, codec, seed=99), trained.sgd(again)
    other.load_state_dict(saved[2])
    resumed.load_state_dict(saved[0])
    trained.train(again, rank, range(3, 6), other)
    there, here = trained.parameters_of(ddp), trained.parameters_of(again)
    same = all(same_bits(there[name], here[name]) for name in there)
    flat = trained.compressed(DDP(trained.mlp(width=40)), codec, process_group=dist.group.WORLD)
    refused = str(faults.error_of(lambda: flat.load_state_dict(saved[0]))[0])
    back = str(faults.error_of(lambda: resumed.load_state_dict(flat.state_dict()))[0])
    numels = {name: p.numel() for name, p in trained.mlp(width=40).named_parameters()}
    sizes = {name: (residual.numel(), numels[name]) for name, residual in saved[0]["sender"].items()}
    bad = {**saved[0], "sender": {**saved[0]["sender"], "3.weight": torch.zeros(1600)}}
    return same, refused, back, sizes, str(faults.error_of(lambda: resumed.load_state_dict(bad))[0])


def test_a_resumed_run_gives_the_bits_of_one_that_was_not_stopped_and_flat_states_do_not_fit() -> None:
    found = run(4, _resumed, timeout=150)
    for rank, (same, refused, back, _, bad) in enumerate(found):
        assert same
        where = f"rank {rank} of 4 (place {rank % 2} on host {rank // 2} of 2)"
        assert f"taken by {where}, loaded by rank {rank} of 4. Reduce over hosts as then" in refused
        assert "process_group=dist.group.WORLD" in refused
        assert f"taken by rank {rank} of 4, loaded by {where}" in back
        assert "3.weight" in bad
    for name, (_, numel) in found[0][3].items():
        assert sum(found[rank][3][name][0] for rank in (0, 1)) == numel  # the two of a host have all of it


# -- failures ---------------------------------------------------------------------------------------------------------


def _failing(rank: int, buckets: dict[str, Any], chunk: int) -> Any:
    launched(rank, 2, 2)
    _in_chunks(chunk)
    ddp = DDP(Given(SHAPES), **buckets)
    trained.compressed(ddp)
    expected = HostExpected(nc.codec(trained.CODEC), 2, 2, True)
    trained.agree([trained.backward(ddp, given(SHAPES, rank, 0))], [_step(expected, 0)])
    found = []
    for phase in (1, 2, 3):
        if phase == 3:  # what failed on all ranks has left no trace
            trained.agree([trained.backward(ddp, given(SHAPES, rank, 1))], [_step(expected, 1)])
        if rank == 1:
            in_phase(phase, faults.run_out_of_memory)
        error, _ = faults.error_of(lambda: trained.backward(ddp, given(SHAPES, rank, 1)))
        found.append(f"{type(error).__name__}: {error}")
    return found


def _step(expected: HostExpected, step: int) -> Any:
    return expected.step([given(SHAPES, rank, step) for rank in range(4)])


@pytest.mark.parametrize("chunk", [layout.CHUNK, 1 << 12])
@pytest.mark.parametrize("buckets", [{}, {"bucket_cap_mb": FEW}])
def test_a_rank_that_raises_in_any_phase_breaks_the_step_off_on_its_host_at_the_least(
    buckets: dict[str, Any], chunk: int
) -> None:
    found = run(4, _failing, buckets, chunk)
    for phase in range(3):
        assert "MemoryError: no room left for codes" in found[1][phase]
        told = range(4) if phase < 2 or buckets else range(2)
        for rank in told:
            if rank != 1:
                assert "CollectiveError" in found[rank][phase], (phase, rank, found[rank][phase])
                assert "rank 1 failed in it: MemoryError" in found[rank][phase]


def _without_memory(rank: int) -> Any:
    """One rank has no memory for its share of a bucket."""
    launched(rank, 2, 2)
    _in_chunks(1 << 12)
    ddp = DDP(Given(SHAPES))
    trained.compressed(ddp)
    expected = HostExpected(nc.codec(trained.CODEC), 2, 2, True)
    trained.agree([trained.backward(ddp, given(SHAPES, rank, 0))], [_step(expected, 0)])
    plain = hosted.Share.of
    if rank == 1:

        def no_room(*args: Any) -> Any:
            hosted.Share.of = plain  # type: ignore[method-assign]
            faults.run_out_of_memory()

        hosted.Share.of = no_room  # type: ignore[assignment,method-assign]
    error, _ = faults.error_of(lambda: trained.backward(ddp, given(SHAPES, rank, 1)))
    trained.agree([trained.backward(ddp, given(SHAPES, rank, 1))], [_step(expected, 1)])
    return repr(error)


def test_a_rank_without_memory_for_its_share_fails_the_step_on_all_and_the_next_one_counts() -> None:
    for rank, error in enumerate(run(4, _without_memory)):
        assert "MemoryError" in error
        assert rank == 1 or "rank 1 failed in it" in error


def _losing(rank: int, phase: int, chunk: int) -> Any:
    launched(rank, 2, 2)
    _in_chunks(chunk)
    ddp = DDP(Given(SHAPES), bucket_cap_mb=FEW)
    trained.compressed(ddp)
    trained.backward(ddp, given(SHAPES, rank, 0))
    if rank == 2:
        in_phase(phase, faults.die)
    error, seconds = faults.error_of(lambda: trained.backward(ddp, given(SHAPES, rank, 1)))
    return str(error), seconds


@pytest.mark.parametrize("chunk", [layout.CHUNK, 1 << 12])
@pytest.mark.parametrize("phase", [1, 2, 3, 5])
def test_a_rank_that_is_killed_in_any_phase_is_named_on_all_others_at_once(phase: int, chunk: int) -> None:
    outcomes = outcomes_of(4, _losing, phase, chunk, group_timeout=20)
    for rank in (0, 1, 3):
        assert outcomes[rank].error is None, outcomes[rank].trace
        text, seconds = outcomes[rank].value
        assert "rank 2 is gone" in text, (rank, text)
        assert seconds < within(3)


def _unlike(rank: int) -> Any:
    launched(rank, 2, 2)
    found = []
    for codec in ("int8", "int4"):
        ddp = DDP(Given(SHAPES))
        wrong = codec if rank == 3 else "int8"
        error, _ = faults.error_of(lambda ddp=ddp, wrong=wrong: nc.compress_gradients(ddp, wrong, error_feedback=False))
        found.append(str(error))
    ddp = DDP(Given(SHAPES))
    nc.compress_gradients(ddp, schedule=lambda step: "int8" if rank != 3 or step != 1 else "int4", seed=1)
    trained.backward(ddp, given(SHAPES, rank, 0))
    error, _ = faults.error_of(lambda: trained.backward(ddp, given(SHAPES, rank, 1)))
    return [*found, f"{type(error).__name__}: {error}"]


def test_ranks_that_are_configured_or_scheduled_unlike_are_told_so_on_every_host() -> None:
    found = run(4, _unlike)
    for texts in found:
        assert texts[0] == "None"
        assert texts[1] == found[0][1]
        assert "ranks disagree on a collective" in texts[1]
        assert "MismatchError: ranks disagree on a collective" in texts[2]
