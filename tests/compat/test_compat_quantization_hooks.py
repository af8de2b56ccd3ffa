"""narrowcast.compat.quantization_hooks: averages of real DDP buckets on gloo, and PyTorch's formulas."""

# No `from __future__ import annotations`: DDP compares the annotations of hooks, some of which are defined here.

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import model
import pytest
import torch
import torch.distributed as dist
from ranks import run
from torch import Tensor, nn
from torch.ao.quantization import MinMaxObserver, PerChannelMinMaxObserver
from torch.distributed.algorithms.ddp_comm_hooks import quantization_hooks as theirs
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import narrowcast as nc
from narrowcast import distributed as ncd
from narrowcast import errors
from narrowcast.compat import quantization_hooks as ours
from narrowcast.compat.quantization_hooks import quantization_perchannel_hook, quantization_pertensor_hook
from narrowcast.distributed.transport.agreement import HEADER_BYTES

Hook = Callable[[Any, dist.GradBucket], torch.futures.Future[Tensor]]
CODECS: dict[Hook, str] = {
    quantization_pertensor_hook: "int8:block=row,zero_point=true",
    quantization_perchannel_hook: "int8:block=512,zero_point=true",
}


class Given(nn.Module):
    """A model whose gradients are whatever it is given."""

    def __init__(self, gradients: Sequence[Tensor]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients)

    def forward(self, gradients: Sequence[Tensor]) -> Tensor:
        terms = [(weight * gradient).sum() for weight, gradient in zip(self.weights, gradients, strict=True)]
        return torch.stack(terms).sum()


def averaged(
    hook: Hook, gradients: Sequence[Tensor], state: Any = None, steps: int = 1, **options: Any
) -> list[Tensor]:
    """The gradients that DDP leaves on this rank after a step, or the last of several."""
    ddp = DistributedDataParallel(Given(gradients), **options)
    ddp.register_comm_hook(state, hook)
    for _ in range(steps):
        ddp.zero_grad()
        ddp(gradients).backward()
    return [weight.grad for weight in ddp.module.weights]


def sample(rank: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank))


# -- scenes: what ranks do, and what they bring back. DDP takes a second to load, so ranks start once for all scenes ---


def exact(rank: int, world: int) -> None:
    for hook, codec in CODECS.items():
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            everyone = [sample(peer, 5003).to(dtype) for peer in range(world)]
            (found,) = averaged(hook, [everyone[rank]])
            expected = everyone[0] if world == 1 else model.all_reduce(nc.codec(codec), everyone, world)
            assert found.dtype == dtype
            assert torch.equal(found, expected), (codec, dtype)


def many_buckets(rank: int, world: int) -> None:
    gradients = [torch.full((2000 + 100 * i,), float(i + rank)) for i in range(16)]
    for hook in CODECS:
        buckets = []

        def counting(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
            buckets.append(bucket.index())  # noqa: B023
            return hook(state, bucket)  # noqa: B023

        found = averaged(counting, gradients, steps=3, bucket_cap_mb=0.001)
        assert max(buckets) == 15
        for i, gradient in enumerate(found):
            # A part of a bucket holds one number c, and 0 at most besides: c is code 255, of a scale that is c / 255
            # but for two roundings. Each of two trips is off by 4 * 2**-24 of c at most.
            assert torch.allclose(gradient, torch.full_like(gradient, i + 1.0), rtol=8 * 2.0**-24, atol=0)


class Product(nn.Module):
    """What PyTorch's tests of these hooks train: 40 x 20 numbers, multiplied by powers of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(sample(0, 40, 20))

    def forward(self, x: Tensor, rank: int) -> Tensor:
        return self.p * x ** (1 + rank)


def registered_by_type(rank: int, world: int) -> None:
    group = dist.new_group([0, 1])
    kinds = ours.DDPCommHookType
    found = {}
    for kind in (None, kinds.ALLREDUCE, kinds.QUANTIZE_PER_TENSOR, kinds.QUANTIZE_PER_CHANNEL):
        ddp = DistributedDataParallel(Product(), process_group=group)
        if kind is not None:
            ours.register_ddp_comm_hook(comm_hook_type=kind, model=ddp, state=group)
        ddp(sample(1, 40, 20), rank).mean().backward()
        found[kind] = ddp.module.p.grad
    plain = found.pop(None)
    assert torch.equal(found.pop(kinds.ALLREDUCE), plain)
    for kind, gradient in found.items():
        assert not torch.equal(gradient, plain), kind  # it did travel in 8 bits
        torch.testing.assert_close(gradient, plain, rtol=1e-5, atol=1e-4)  # PyTorch's own tolerance


def in_blocks_of(rank: int, bucket_size: int) -> Tensor:
    def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        return quantization_perchannel_hook(state, bucket, bucket_size)

    return averaged(hook, [sample(rank, 1000)])[0]


def blocks_of_128(rank: int, world: int) -> Tensor:
    return in_blocks_of(rank, 128)


def blocks_of_any_size(rank: int, world: int) -> dict[int, Tensor]:
    return {size: in_blocks_of(rank, size) for size in (100, 3, 1, 10**9)}


def blocks_of_nothing(rank: int, world: int) -> Tensor:
    return in_blocks_of(rank, 0)


def tiny(rank: int, world: int) -> list[Tensor]:
    return [averaged(hook, [1e-8 * sample(rank, 2048)])[0] for hook in CODECS]


def with_an_infinity(rank: int, world: int) -> list[Tensor]:
    x = sample(rank, 4096)
    if rank == 0:
        x[600] = torch.inf
    return [averaged(hook, [x])[0] for hook in CODECS]


def outside_of_the_group(rank: int, world: int) -> None:
    averaged(quantization_pertensor_hook, [sample(rank, 10)], dist.new_group([0]))


def counted(rank: int, world: int) -> int:
    ncd.reset_stats()
    averaged(quantization_perchannel_hook, [sample(rank, world * 4 * 512)])
    return ncd.stats()["all_reduce"].sent_bytes


def pytorchs_pertensor(rank: int, world: int) -> None:
    averaged(theirs.quantization_pertensor_hook, [sample(rank, 1000)])


def pytorchs_perchannel(rank: int, world: int) -> None:
    averaged(theirs.quantization_perchannel_hook, [sample(rank, 1000)])


SCENES: dict[int, list[Callable[[int, int], Any]]] = {
    1: [exact, blocks_of_nothing],
    2: [exact, registered_by_type, blocks_of_128, blocks_of_any_size, tiny, with_an_infinity, outside_of_the_group],
    3: [exact, many_buckets, counted],
}


def play(rank: int, world: int, scenes: Sequence[Callable[[int, int], Any]]) -> dict[str, Any]:
    """What each scene returned, or the error it ended with."""
    found: dict[str, Any] = {}
    for scene in scenes:
        try:
            found[scene.__name__] = scene(rank, world)
        except Exception as error:
            found[scene.__name__] = error
        dist.barrier()
    return found


@pytest.fixture(scope="module")
def played() -> Callable[[int, Callable[[int, int], Any]], list[Any]]:
    """A scene's results on every rank of a world."""
    known: dict[int, list[dict[str, Any]]] = {}

    def of(world: int, scene: Callable[[int, int], Any]) -> list[Any]:
        if world not in known:
            known[world] = run(world, play, world, SCENES[world], timeout=200, group_timeout=100)
        return [rank[scene.__name__] for rank in known[world]]

    return of


Played = Callable[[int, Callable[[int, int], Any]], list[Any]]


# -- averages ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_bucket_ends_as_the_two_stage_average_bit_for_bit_in_its_own_dtype(world: int, played: Played) -> None:
    assert played(world, exact) == [None] * world


def test_many_buckets_are_in_flight_for_three_steps_and_none_is_taken_for_another(played: Played) -> None:
    assert played(3, many_buckets) == [None] * 3


def test_hooks_registered_by_type_are_as_close_as_pytorchs_tests_ask(played: Played) -> None:
    assert played(2, registered_by_type) == [None] * 2


@pytest.mark.skipif(
    "fut.wait()[0]" not in inspect.getsource(theirs.quantization_pertensor_hook),
    reason="this torch's hooks take one bucket on gloo (2.15 does)",
)
def test_pytorchs_own_hooks_crash_on_gloo() -> None:
    for found in run(2, play, 2, [pytorchs_pertensor, pytorchs_perchannel]):
        assert ["IndexError" in repr(error) for error in found.values()] == [True, True]


def test_a_bucket_size_is_the_block_of_the_codec(played: Played) -> None:
    everyone = [sample(peer, 1000) for peer in range(2)]
    expected = model.all_reduce(nc.codec("int8:block=128,zero_point=true"), everyone, 2)
    assert all(torch.equal(found, expected) for found in played(2, blocks_of_128))


def test_a_bucket_size_of_any_number_shares_a_scale_among_no_more(played: Played) -> None:
    everyone = [sample(peer, 1000) for peer in range(2)]
    one, other = played(2, blocks_of_any_size)
    for size, found in one.items():
        assert torch.equal(found, other[size])
        # A code is half a step from a number at most, twice; a step is the range of its block over 255, stretched to 0.
        blocks = torch.stack(everyone).abs().amax(0)
        bound = 2 * 2 * float(blocks.max()) / 255
        assert float((found - sum(everyone) / 2).abs().max()) <= bound
    exact = sum(everyone) / 2
    errors_of = {size: float((found - exact).square().mean()) for size, found in one.items()}
    assert errors_of[1] < errors_of[3] < errors_of[100]
    expected = model.all_reduce(nc.codec("int8:block=96,zero_point=true"), everyone, 2)
    assert torch.equal(one[100], expected)  # the next smaller block


def test_a_bucket_size_that_is_none_is_refused_by_its_name(played: Played) -> None:
    (error,) = played(1, blocks_of_nothing)
    assert isinstance(error, errors.SpecError)
    assert "bucket_size=0: " in str(error)


def test_the_list_for_a_gather_has_a_tensor_for_each_rank() -> None:
    like = torch.ones(2, 3, dtype=torch.uint8)
    found = ours._get_allgather_out_list(like, 3)
    assert [(each.dtype, each.tolist()) for each in found] == [(torch.uint8, [[0] * 3] * 2)] * 3
    assert len({each.data_ptr() for each in found}) == 3


def test_a_hook_with_a_group_that_the_rank_is_not_in_says_so(played: Played) -> None:
    inside, outside = played(2, outside_of_the_group)
    assert inside is None
    assert isinstance(outside, errors.CollectiveError)
    assert "process_group: this rank is not in it" in str(outside)
    assert "or with None" in str(outside)


# -- what PyTorch's hooks get wrong ------------------------------------------------------------------------------------


def test_a_rank_sends_two_parts_of_each_bucket_and_no_block_more_than_it_has(played: Played) -> None:
    # Each of 3 ranks owns 4 blocks of 512: codes, a scale of 4 bytes and a zero point for each, a multiple of 16 bytes.
    row = -(-(4 * 512 + 4 * 4 + 4) // 16) * 16
    assert played(3, counted) == [2 * 2 * row + 2 * HEADER_BYTES] * 3


def test_tiny_gradients_keep_their_eight_bits(played: Played) -> None:
    everyone = [1e-8 * sample(peer, 2048) for peer in range(2)]
    exact = (everyone[0] + everyone[1]) / 2
    for codec, found in zip(CODECS.values(), played(2, tiny)[0], strict=True):
        bound = model.all_reduce_bound(nc.codec(codec), everyone, 2)
        assert bool(((found - exact).abs() <= bound).all())
        assert bound.max() < exact.abs().max() / 100  # the bound says something


def test_pytorchs_formula_makes_zeros_of_tiny_gradients() -> None:
    x = 1e-8 * sample(0, 2048)
    observer = MinMaxObserver()
    observer(x)
    scale, zero_point = observer.calculate_qparams()
    codes = theirs._quantize_per_tensor_backend(x, scale, zero_point)
    assert theirs._dequantize_per_tensor_backend(codes, scale, zero_point).count_nonzero() == 0


def test_an_infinity_makes_nan_of_its_own_group_on_every_rank(played: Played) -> None:
    # Ranks own 2048 elements each: "per tensor" a group each, per channel in groups of 512.
    first, second = played(2, with_an_infinity)
    for here, there, group in zip(first, second, (2048, 512), strict=True):
        start = 600 // group * group
        assert bool(here[start : start + group].isnan().all())
        assert here.isnan().sum() == group
        assert torch.equal(here.isnan(), there.isnan())


# -- the same numbers --------------------------------------------------------------------------------------------------


def test_the_codecs_of_the_hooks_have_pytorchs_scales_zero_points_and_codes() -> None:
    x = sample(0, 64, 512) * torch.logspace(-3, 3, 64)[:, None] + 0.3
    observer = PerChannelMinMaxObserver()
    observer(x)
    scale, zero_point = observer.calculate_qparams()
    expected = theirs._quantize_per_channel_backend(x, scale, zero_point).flatten()

    data = nc.codec(CODECS[quantization_perchannel_hook]).encode(x.reshape(1, -1))[0]
    codes, scales, zeros, _ = data.split([x.numel(), 4 * 64, 64, len(data) - x.numel() - 5 * 64])
    # Three roundings on one side, two on the other, of 2**-24 each.
    assert torch.allclose(scales.view(torch.float32), scale, rtol=5 * 2.0**-24, atol=0)
    assert torch.equal(zeros, zero_point.to(torch.uint8))
    # So x / scale, at most 255, may differ by 8 roundings: a code by one, where that is nearly a half.
    ratio = (x.double() / scale.double()[:, None]).flatten()
    near_half = ((ratio - ratio.floor()) - 0.5).abs() < 255 * 8 * 2.0**-24
    assert torch.equal(codes[~near_half], expected[~near_half])
    assert bool(((codes.int() - expected.int()).abs() <= 1).all())
    assert near_half.sum() < 100


@pytest.mark.parametrize("shape", [(5, 7), (3, 512), (2, 3, 4), (1000, 300)])
def test_the_formulas_with_scales_given_are_pytorchs_bit_for_bit(shape: tuple[int, ...]) -> None:
    x = 3 * sample(1, *shape)
    scale = sample(2, shape[0]).abs() / 50 + 1e-3  # too small for some elements: those are clamped
    zero_point = torch.randint(0, 256, (shape[0],), generator=torch.Generator().manual_seed(3))
    for zeros in (zero_point, zero_point.float()):
        codes = ours._quantize_per_channel_backend(x, scale, zeros)
        assert torch.equal(codes, theirs._quantize_per_channel_backend(x, scale, zeros))
        back = ours._dequantize_per_channel_backend(codes, scale, zeros)
        assert torch.equal(back, theirs._dequantize_per_channel_backend(codes, scale, zeros))
        for one in ((scale[0], zeros[0]), (scale[:1], zeros[:1]), (scale[0].item(), zeros[0].item())):
            codes = ours._quantize_per_tensor_backend(x, *one)
            assert torch.equal(codes, theirs._quantize_per_tensor_backend(x, *one))
            back = ours._dequantize_per_tensor_backend(codes, *one)
            assert torch.equal(back, theirs._dequantize_per_tensor_backend(codes, *one))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_formulas_compute_other_dtypes_as_wide_as_fp32(dtype: torch.dtype) -> None:
    x, scale, zeros = (3 * sample(1, 40, 50)).to(dtype), torch.full((40,), 0.0261), torch.full((40,), 128.0)
    expected = theirs._quantize_per_channel_backend(x.double(), scale, zeros)
    found = ours._quantize_per_channel_backend(x, scale, zeros)
    assert bool(((found.int() - expected.int()).abs() <= 1).all())
    assert (found != expected).sum() <= 2  # exact ties of fp64 that fp32 rounds another way
    assert torch.equal(ours._quantize_per_tensor_backend(x, scale[0], zeros[0]), found)


class Count(TorchDispatchMode):
    """How many operations were called."""

    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["_quantize_per_channel_backend", "_dequantize_per_channel_backend"])
def test_no_loop_goes_over_channels(name: str) -> None:
    def calls(module: Any, channels: int) -> int:
        with Count() as count:
            getattr(module, name)(torch.ones(channels, 8), torch.ones(channels), torch.zeros(channels))
        return count.calls

    assert calls(ours, 300) == calls(ours, 3)
    assert calls(theirs, 300) > 50 * calls(theirs, 3)


def test_scales_that_are_not_one_per_channel_are_refused() -> None:
    with pytest.raises(errors.ShapeError, match=r"scale: x has 3 channels, scale 2\. Pass one for each\."):
        ours._quantize_per_channel_backend(torch.ones(3, 4), torch.ones(2), torch.ones(3))
    with pytest.raises(errors.ShapeError, match="zero_point: y has 3 channels, zero_point 4"):
        ours._dequantize_per_channel_backend(torch.ones(3, 4), torch.ones(3), torch.ones(4))
    with pytest.raises(errors.ShapeError, match=r"x: channels are along the first dimension.*x\.view\(1\)"):
        ours._quantize_per_channel_backend(torch.tensor(1.0), torch.ones(1), torch.ones(1))


# -- on a GPU ----------------------------------------------------------------------------------------------------------


def on_cuda(rank: int) -> None:
    for hook, codec in CODECS.items():
        for dtype in (torch.float32, torch.bfloat16):
            everyone = [sample(peer, 5003).to(dtype) for peer in range(2)]
            (found,) = averaged(hook, [everyone[rank].cuda()], steps=3)
            assert torch.equal(found.cpu(), model.all_reduce(nc.codec(codec), everyone, 2)), (codec, dtype)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_bucket_on_a_gpu_has_the_bits_of_one_on_the_cpu() -> None:
    run(2, on_cuda, timeout=200, group_timeout=100)
    x, scale, zeros = sample(0, 300, 512), sample(1, 300).abs() / 50 + 1e-3, torch.full((300,), 128)
    codes = ours._quantize_per_channel_backend(x, scale, zeros)
    assert torch.equal(ours._quantize_per_channel_backend(x.cuda(), scale.cuda(), zeros.cuda()).cpu(), codes)
