"""DDP's first bucket, small by default, travels with the second where it has few bytes: the bits are the same."""

from __future__ import annotations

from typing import Any

import faults
import pytest
import torch
import trained
from ranks import play, run
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP

import narrowcast as nc
from cases import same_bits
from narrowcast import distributed as ncd
from narrowcast.distributed.gradients import ddp as engine
from narrowcast.distributed.gradients import ddp_buckets

pytestmark = pytest.mark.timeout(180)

SHAPES: trained.Shapes = {**trained.SHAPES, "wide": (520, 520), "last": (11,), "large": (530, 520)}
"""Of `wide` and `large`, each has more than the 1 MB of a first bucket."""
HALF = {"bias", "even", "wide"}
STEPS = 4


def _given(rank: int, step: int, half: bool = False) -> trained.Named:
    gradients = trained.given(SHAPES, rank, step)
    return {name: g.bfloat16() if half and name in HALF else g for name, g in gradients.items()}


def _gradients(rank: int, *, half: bool = False, hosts: bool = False, **options: Any) -> Any:
    """The gradients of some steps, the number of buckets, and of collectives in the last step."""
    module = trained.Given(SHAPES)
    for name in HALF if half else ():
        module.register_parameter(name, torch.nn.Parameter(module.get_parameter(name).detach().bfloat16()))
    ddp = DDP(module, **options)
    mesh = init_device_mesh("cpu", (2, 2)) if hosts else None
    state = nc.compress_gradients(ddp, "int2", error_feedback=True, seed=trained.SEED, process_group=mesh)
    found = []
    for step in range(STEPS):
        ncd.reset_stats()
        found.append(trained.backward(ddp, _given(rank, step, half)))
    return found, len(state.stats().buckets), _calls()


def _calls() -> int:
    """Collectives of gradients; where ranks share hosts, of all phases."""
    return sum(counted.calls for op, counted in ncd.stats().items() if op.startswith("gradients"))


def _momentum(rank: int, **options: Any) -> Any:
    ddp = DDP(trained.Given(SHAPES), **options)
    optimizer = nc.optim.AdamW(ddp.parameters(), 1e-3)
    state = nc.compress_gradients(ddp, "sign", momentum=optimizer, warmup_steps=2, seed=trained.SEED)
    found = []
    for step in range(STEPS):
        ncd.reset_stats()
        found.append(trained.backward(ddp, _given(rank, step)))
        optimizer.step()
    return [*found, trained.parameters_of(ddp)], len(state.stats().buckets), _calls()


def held(rank: int) -> Any:
    return _gradients(rank)


def apart(rank: int) -> Any:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ddp_buckets, "MOST_HELD_BYTES", 0)
        return _gradients(rank)


def one_bucket(rank: int) -> Any:
    return _gradients(rank, bucket_cap_mb=25)


def views_held(rank: int) -> Any:
    return _gradients(rank, gradient_as_bucket_view=True)


def dtypes_held(rank: int) -> Any:
    return _gradients(rank, half=True)


def dtypes_apart(rank: int) -> Any:
    return _gradients(rank, half=True, bucket_cap_mb=25)


def momentum_held(rank: int) -> Any:
    return _momentum(rank)


def momentum_apart(rank: int) -> Any:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ddp_buckets, "MOST_HELD_BYTES", 0)
        return _momentum(rank)


def refused(rank: int) -> Any:
    """Rank 1 cannot hand over its second bucket: what every rank raises, and how often it made the call."""
    ddp = DDP(trained.Given(SHAPES))
    nc.compress_gradients(ddp, "int2", seed=trained.SEED)
    for step in range(2):
        trained.backward(ddp, _given(rank, step))
    check = engine._check

    def failing(state: Any, bucket: Any) -> None:
        if rank == 1 and bucket.index() == 1:
            raise ValueError("not this one")
        check(state, bucket)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(engine, "_check", failing)
        error, _ = faults.error_of(lambda: trained.backward(ddp, _given(rank, 2)))
    return type(error).__name__, str(error)


SCENES = {
    scene.__name__: scene
    for scene in (
        held,
        apart,
        one_bucket,
        views_held,
        dtypes_held,
        dtypes_apart,
        momentum_held,
        momentum_apart,
        refused,
    )
}


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run(3, play, SCENES, timeout=150)


@pytest.mark.parametrize(
    ("scene", "like", "buckets", "calls"),
    [
        ("held", "apart", 1, 1),
        ("apart", "one_bucket", 2, 2),
        ("views_held", "apart", 1, 1),
        ("momentum_held", "momentum_apart", 1, 1),
        ("momentum_apart", "momentum_held", 2, 2),
    ],
)
def test_a_first_bucket_that_waits_leaves_the_same_bits_in_one_collective(
    scene: str, like: str, buckets: int, calls: int, found: list[dict[str, Any]]
) -> None:
    for of_rank in found:
        assert of_rank[scene][1:] == (buckets, calls)
        _alike(of_rank[scene][0], of_rank[like][0])
        _alike(of_rank[scene][0], found[0][scene][0])


def test_buckets_of_two_dtypes_do_not_wait_for_each_other(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        _alike(of_rank["dtypes_held"][0], of_rank["dtypes_apart"][0])
        assert of_rank["dtypes_held"][1] > 1


def test_a_rank_that_refuses_the_second_bucket_refuses_the_one_that_waited(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        assert "not this one" in of_rank["refused"][1]


def _hosts_held(rank: int) -> Any:
    return _gradients(rank, hosts=True)


def _hosts_apart(rank: int) -> Any:
    return _gradients(rank, hosts=True, bucket_cap_mb=25)


def test_it_waits_where_ranks_share_hosts_too() -> None:
    for of_rank in run(4, play, {"held": _hosts_held, "apart": _hosts_apart}, timeout=150):
        assert of_rank["held"][1:] == (1, 3)
        _alike(of_rank["held"][0], of_rank["apart"][0])


def _alike(some: list[trained.Named], others: list[trained.Named]) -> None:
    for left, right in zip(some, others, strict=True):
        assert left.keys() == right.keys()
        assert all(same_bits(left[name], right[name]) for name in left)
