"""The reduction over a wire whose rows leave together: the real NCCL wire, over a stand-in for NCCL's group."""

from __future__ import annotations

import itertools

import faults
import nccl_stand_in
import pytest
import torch
import torch.distributed as dist
from by_hand import reduced_by_hand
from ranks import run

import narrowcast as nc
from narrowcast import distributed as ncd
from narrowcast.distributed.planning.link import measure_link
from narrowcast.distributed.protocols import together
from narrowcast.distributed.protocols.together import in_one_stage
from narrowcast.distributed.transport import nccl
from narrowcast.distributed.transport.group import group_for
from narrowcast.distributed.transport.nccl import NcclWire
from narrowcast.errors import MismatchError

pytestmark = pytest.mark.timeout(60)
SIZES = (0, 1, 127, 128, 129, 1000, 3 * 128, 5 * 128, 40_000, 3 * 128 * 50, 40_001)


def sample(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(100 * rank + numel)).to(dtype)


def _reduced(rank: int) -> None:
    nccl_stand_in.use()
    nccl.HALVED = 1000  # so that long rows go in two halves here
    together.SPARE_BYTES = 4000  # and not only small tensors in two stages
    together.PLAIN_BYTES = together.PLAIN_RAW_BYTES = 0  # and none as it is
    world = dist.get_world_size()
    group = group_for(dist.group.WORLD, torch.device("cpu"))
    for turn in range(2):  # the second time with what the first one prepared
        for codec, dtype in (("int8", torch.float32), ("int4", torch.bfloat16), ("raw", torch.float64), ("nf4", None)):
            for numel in SIZES:
                kind = dtype or torch.float32
                x = sample(rank, numel, kind)
                ncd.reset_stats()
                ncd.all_reduce(x, dist.ReduceOp.AVG, codec=codec)
                one = in_one_stage(nc.codec(codec).row_bytes(numel), world)
                everyone = [sample(peer, numel, kind) for peer in range(world)]
                right = reduced_by_hand(everyone, codec, world, one_stage=one)
                assert torch.equal(x, right), (codec, numel, turn)
        group.buffers.clear()  # memory that was given back is not used again
    y = sample(rank, 1 << 16, torch.float32).view(256, 256).t()  # not contiguous, and a sum
    ncd.all_reduce(y, codec="int8")
    everyone = [sample(peer, 1 << 16, torch.float32).view(256, 256).t().reshape(-1) for peer in range(world)]
    right = reduced_by_hand(everyone, "int8", 1, one_stage=in_one_stage(nc.codec("int8").row_bytes(1 << 16), world))
    assert torch.equal(y.reshape(-1), right)


@pytest.mark.parametrize("world", [2, 3, 5])
def test_sums_are_those_made_by_hand(world: int) -> None:
    run(world, _reduced, timeout=55)


def _counted(rank: int) -> int:
    nccl_stand_in.use()
    together.PLAIN_BYTES = 4 * 4095
    ncd.all_reduce(torch.ones(4096), codec="int8")
    ncd.reset_stats()
    ncd.all_reduce(torch.ones(4096), codec="int8")
    return ncd.stats()["all_reduce"].sent_bytes


def test_bytes_are_counted() -> None:
    row = 4096 + 4096 // 128 * 4  # codes, and an fp32 scale for each block of 128; a known call has no header
    assert run(2, _counted, timeout=55) == [row] * 2


# -- small tensors ----------------------------------------------------------------------------------------------------

LARGEST = together.PLAIN_BYTES // 4


def _as_it_is(rank: int) -> list[torch.Tensor]:
    """A small tensor is summed in its own numbers, whatever the codec; one element more, and it is quantized."""
    nccl_stand_in.use()
    world, sums = dist.get_world_size(), []
    dtypes = torch.float32, torch.float64, torch.float16, torch.bfloat16
    for nbytes, dtype in itertools.product((0, 8, 8000, together.PLAIN_BYTES), dtypes):
        numel = nbytes // max(4, dtype.itemsize)
        for codec, op in itertools.product(("sign", "int4:stochastic=true"), (dist.ReduceOp.SUM, dist.ReduceOp.AVG)):
            x = sample(rank, numel, dtype)
            ncd.reset_stats()
            ncd.all_reduce(x, op, codec=codec)
            terms = torch.stack([sample(peer, numel, dtype) for peer in range(world)]).double()
            right = terms.sum(0) / (1 if op == dist.ReduceOp.SUM else world)
            # A sum of `world` terms in fp32 (fp64) has `world - 1` roundings, of no more than the sum of magnitudes
            # each; then come those of the division and of the result's dtype.
            wide = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
            narrow = torch.finfo(dtype)
            half_step = narrow.eps / 2 * right.abs().clamp(narrow.tiny)  # below `tiny`, steps get no smaller
            bound = world * wide * terms.abs().sum(0) + half_step
            assert bool(((x.double() - right).abs() <= bound).all()), (numel, dtype, codec)
            told = ncd.stats()["all_reduce"]
            headers = 32 * (world - 1)  # each of these calls is the first of its kind
            width = max(4, x.element_size())
            assert told.sent_bytes == 2 * (world - 1) * width * numel // world + headers
            sums.append(x)
    y = torch.full((LARGEST + 1,), 1.0)
    y[0] = 1e-3  # of a block of ones: int4 makes it zero
    ncd.all_reduce(y, codec="int4")
    assert float(y[0]) == 0.0
    return sums


@pytest.mark.parametrize("world", [2, 3])
def test_a_small_tensor_goes_as_it_is_and_all_ranks_get_the_same_bits(world: int) -> None:
    first, *rest = run(world, _as_it_is, timeout=55)
    for sums in rest:
        assert all(torch.equal(a, b) for a, b in zip(first, sums, strict=True))


def _halves(rank: int) -> None:
    nccl_stand_in.use()
    x = torch.full((64,), 40_000.0, dtype=torch.float16)
    ncd.all_reduce(x, dist.ReduceOp.AVG)
    assert torch.equal(x, torch.full_like(x, 40_000.0))  # the sum is more than fp16 holds
    with torch.inference_mode():
        y = torch.full((64,), 3.0)
    ncd.all_reduce(y, dist.ReduceOp.AVG)  # outside, where torch writes to no tensor of inference mode
    work = ncd.all_reduce(z := torch.full((64,), float(rank)), async_op=True)
    assert work is not None
    work.wait()
    assert float(y[5]) == 3.0
    assert float(z[5]) == 1.0


def _too_large_for_fp16(rank: int) -> list[float]:
    nccl_stand_in.use()
    results = []
    for numel in (8, 40_000):  # as it is, and in rows
        x = torch.full((numel,), 40_000.0, dtype=torch.float16)
        x[1] = float("inf")
        x[2] = -40_000.0
        ncd.all_reduce(x, codec="fp16")
        results.append(x[:3].tolist())
    assert results[0] == results[1]
    return results[0]


def test_sums_that_fp16_cannot_hold_are_its_largest_number_however_small_the_tensor_is() -> None:
    assert run(2, _too_large_for_fp16) == [[65504.0, float("inf"), -65504.0]] * 2


def _link(rank: int) -> int:
    nccl_stand_in.use()
    sums, plain = [], NcclWire.add_up
    NcclWire.add_up = lambda self, tensor: (sums.append(len(tensor)), plain(self, tensor))[1]  # type: ignore[method-assign]
    measure_link()
    return len(sums)


def test_a_link_is_measured_with_rows_as_gradients_are_sent() -> None:
    assert run(2, _link) == [0, 0]


def test_small_halves_add_up_in_fp32_and_tensors_of_inference_mode_too() -> None:
    run(2, _halves, timeout=55)


def _at_the_edge(rank: int) -> str:
    """Ranks of which one would send its tensor as it is, and the other a row."""
    nccl_stand_in.use()
    ncd.all_reduce(torch.ones(LARGEST), codec="int8")
    error, _ = faults.error_of(lambda: ncd.all_reduce(torch.ones(LARGEST + 1 + rank)[rank:], codec="int8"))
    assert error is None  # both have one element more than goes as it is
    error, _ = faults.error_of(lambda: ncd.all_reduce(torch.ones(LARGEST + 1 - rank), codec="int4"))
    assert type(error) is MismatchError
    other, _ = faults.error_of(lambda: ncd.all_reduce(torch.ones(500), codec=("int8", "int4")[rank]))
    assert type(other) is MismatchError
    x = torch.ones(LARGEST)
    ncd.all_reduce(x, codec="int8")
    assert float(x[3]) == 2.0
    return f"{error} {other}"


def test_ranks_that_disagree_about_a_small_tensor_are_told() -> None:
    first, second = run(2, _at_the_edge, timeout=55, group_timeout=20)
    assert first == second
    assert f"numel={LARGEST + 1}" in first
    assert "codec=int4" in first


def _drawn(rank: int) -> float:
    nccl_stand_in.use()
    torch.manual_seed(5)
    ncd.all_reduce(torch.ones(300), codec="int4:stochastic=true")
    return float(torch.rand(()))


def _drawn_over_gloo(rank: int) -> float:
    torch.manual_seed(5)
    ncd.all_reduce(torch.ones(300), codec="int4:stochastic=true")
    return float(torch.rand(()))


def test_a_stochastic_codec_draws_its_seed_for_a_small_tensor_too() -> None:
    assert run(2, _drawn, timeout=55) == run(2, _drawn_over_gloo, timeout=55)


def _raw(rank: int) -> list[int]:
    """How many elements each sum had, of tensors that go in one and in two."""
    nccl_stand_in.use()
    together_of, sums = nccl_stand_in.StandIn.allreduce, []

    def allreduce(self: nccl_stand_in.StandIn, tensors: list[torch.Tensor], options: object = None) -> object:
        sums.append(tensors[0].numel())
        return together_of(self, tensors, options)

    ncd.all_reduce(torch.ones(1), codec="raw")  # ranks have met
    nccl_stand_in.StandIn.allreduce = allreduce  # type: ignore[method-assign]
    largest = nccl.HALVED_SUM // 4
    for numel, dtype in ((largest, torch.float32), (largest + 1, torch.float32), (3 * largest, torch.bfloat16)):
        x = torch.arange(numel, dtype=torch.float32).remainder_(250).add_(float(rank)).to(dtype)
        right = torch.arange(numel, dtype=torch.float32).remainder_(250).add_(0.5).to(dtype)
        ncd.all_reduce(x, dist.ReduceOp.AVG, codec="raw")
        assert torch.equal(x, right) or dtype == torch.bfloat16, numel
        assert torch.allclose(x.float(), right.float(), rtol=2**-7), numel  # two roundings of bf16
    ncd.all_reduce(torch.ones(largest, dtype=torch.float64), codec="raw")  # in rows
    return sums


def test_raw_goes_as_it_is_and_in_two_halves_where_it_is_large() -> None:
    largest = nccl.HALVED_SUM // 4
    halves = [largest // 2, largest - largest // 2]  # whichever comes first
    for sums in run(2, _raw, timeout=55):
        assert sums[0] == largest
        assert sorted(sums[1:3]) == [halves[0], halves[1] + 1]
        assert sorted(sums[3:]) == [3 * largest // 2] * 2
