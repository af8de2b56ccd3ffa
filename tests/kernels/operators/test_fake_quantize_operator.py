"""Fake quantization as an operator: what codecs decode, and the gradients that the papers define."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import narrowcast as nc
from cases import DTYPES, same_bits
from grid_cases import GRIDS, assert_agrees, integers
from narrowcast.errors import DtypeError, GradientError, ShapeError
from narrowcast.kernels import operators
from narrowcast.kernels.layout import Grid
from narrowcast.kernels.operators.fake_quantize import fake_quantize
from narrowcast.kernels.reference.grids import nearest_level

# The operators are the same on any kernel: machines without a compiler check them on the reference.
pytestmark = pytest.mark.filterwarnings("ignore::narrowcast.errors.KernelWarning")


# -- what a codec decodes ---------------------------------------------------------------------------------------------


def decoded(spec: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """What a codec with one scale per row makes of x, and its scales."""
    codec = nc.codec(spec)
    data = codec.encode(x, 1)
    start = -(-x.shape[1] * codec.format.bits // 8 // 4) * 4
    scales = data[:, start : start + 4].contiguous().view(torch.float32).flatten()
    return codec.decode(data, x.shape[1], dtype=x.dtype), scales


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("spec", "grid"),
    [
        ("int8:block=row,scale=fp32", GRIDS["int8"]),
        ("int4:block=row,scale=fp32", GRIDS["int4"]),
        ("int2:block=row,scale=fp32", integers(-2, 1)),
        *((f"{name}:block=row,scale=fp32", GRIDS[name]) for name in ("apot3", "apot4", "apot8", "pot4", "nf4")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_fake_quantizing_with_a_codecs_scales_is_encoding_and_decoding(
    spec: str, grid: Grid, dtype: torch.dtype
) -> None:
    x = torch.randn(6, 96, generator=torch.Generator().manual_seed(1)).to(dtype)
    x[1] = (x[1] * 4).round() / 4
    x[2] *= 1e-3
    x[3, ::2] = -0.0
    wanted, scales = decoded(spec, x)
    assert same_bits(fake_quantize(x, scales, grid, 0), wanted)
    assert same_bits(fake_quantize(x.t(), scales, grid, -1), wanted.t())


# -- gradients --------------------------------------------------------------------------------------------------------


def test_gradients_by_hand() -> None:
    # Scale 2 on the grid -1, 0, 1, 3 with thresholds -0.5, 0.5, 2:
    #   x      -5     -1     0.5    4.5    9        v = x / 2
    #   v      -2.5   -0.5   0.25   2.25   4.5
    #   q      -1     -1     0      3      3        a tie at -0.5 goes to the lower level
    #   y      -2     -2     0      6      6
    #   inside no     yes    yes    yes    no       of dx: the gradient inside, 0 beyond
    #   term   q=-1   -0.5   -0.25  0.75   q=3      of dscale: q - v inside, q beyond, times the gradient
    #   grad   1      2      4      8      16
    #   sum    -1     -1     -1     +6     +48  = 51
    grid = Grid(torch.tensor([-1.0, 0.0, 1.0, 3.0]), torch.tensor([-0.5, 0.5, 2.0]), False)
    x = torch.tensor([-5.0, -1.0, 0.5, 4.5, 9.0], requires_grad=True)
    scale = torch.tensor(2.0, requires_grad=True)
    y = fake_quantize(x, scale, grid, None)
    assert y.tolist() == [-2.0, -2.0, 0.0, 6.0, 6.0]
    y.backward(torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0]))
    assert x.grad is not None
    assert x.grad.tolist() == [0.0, 2.0, 4.0, 8.0, 0.0]
    assert scale.grad is not None
    assert scale.grad.shape == ()
    assert scale.grad.item() == 51.0


@pytest.mark.parametrize("name", ["apot4", "nf4", "int4"])
def test_the_scales_gradient_is_the_slope_of_the_papers_surrogate(name: str) -> None:
    # The surrogate holds the rounding error of v still: f(s) = s (v + e) with v = clip(x / s), and e = q - v as it was.
    # Inside v = x / s, so f = x + s e is a line; beyond v is an end, so f = s q is one too. A difference of fp64 values
    # over a step of 2**-10 that moves no element across an end is then exact but for fp64's rounding.
    grid = GRIDS[name]
    low, high = float(grid.levels[0]), float(grid.levels[-1])
    x = torch.randn(400, generator=torch.Generator().manual_seed(2)) * high * 0.6
    scale = torch.tensor(0.75)
    v = x.double() / scale.double()
    x = x[((v.abs() - high).abs() > 0.1) & ((v.abs() + low).abs() > 0.1)]
    grad = torch.randn(len(x), generator=torch.Generator().manual_seed(3))
    _, q = nearest_level(x.view(1, 1, -1), scale.view(1), grid)

    def clipped(s: float) -> Tensor:
        return (x.double() / s).clamp(low, high)

    error = q.flatten().double() - clipped(0.75)

    def surrogate(s: float) -> float:
        return float((grad.double() * s * (clipped(s) + error)).sum())

    step = 2.0**-10
    slope = (surrogate(0.75 + step) - surrogate(0.75 - step)) / (2 * step)
    learned = scale.clone().requires_grad_()
    fake_quantize(x, learned, grid, None).backward(grad)
    assert learned.grad is not None
    # fp32 terms: v, q - v and the product round once each, by 2**-24 of |v|, |q - v| and |term| at most.
    v = clipped(0.75)
    bound = float((grad.double().abs() * (2 * v.abs() + 2 * error.abs() + q.flatten().double().abs())).sum()) * 2.0**-23
    assert abs(slope - learned.grad.item()) <= bound + 1e-9
    assert abs(slope) > 100 * bound  # the bound says something


def test_a_nan_is_never_silent() -> None:
    x = torch.randn(4, 40)
    x[2, 7] = torch.nan
    x.requires_grad_()
    scale = torch.full((4,), 0.25, requires_grad=True)
    y = fake_quantize(x, scale, GRIDS["apot4"], 0)
    assert y.isnan().nonzero().tolist() == [[2, 7]]
    y.sum().backward()
    assert scale.grad is not None
    assert scale.grad.isnan().tolist() == [False, False, True, False]


def test_gradients_of_gradients_are_refused() -> None:
    x, scale = torch.randn(8, requires_grad=True), torch.tensor(0.3, requires_grad=True)
    (first,) = torch.autograd.grad(fake_quantize(x, scale, GRIDS["int4"], None).sum(), x, create_graph=True)
    with pytest.raises(GradientError, match=r"differentiated twice.*create_graph=True.*detach\(\)"):
        first.sum().backward()


# -- shapes, layouts, torch's machinery -------------------------------------------------------------------------------


def layouts() -> Iterator[Tensor]:
    x = torch.randn(4, 6, 5, 3, generator=torch.Generator().manual_seed(4))
    yield x
    yield x.to(memory_format=torch.channels_last)
    yield x.permute(2, 0, 3, 1)
    yield x[:, ::2, 1:]
    yield x[:, :1].expand(4, 6, 5, 3)


@pytest.mark.parametrize("axis", [None, 0, 1, 2, 3, -1])
def test_every_axis_of_every_layout_is_the_slice_it_names(axis: int | None) -> None:
    for x in layouts():
        count = 1 if axis is None else x.shape[axis]
        scale = torch.linspace(0.1, 0.4, count)
        wide = scale if axis is None else scale.view([-1 if d == axis % 4 else 1 for d in range(4)])
        grad = torch.randn(x.shape)
        leaf, learned = x.detach().requires_grad_(), scale.clone().requires_grad_()
        y = fake_quantize(leaf, learned, GRIDS["int4"], axis)
        v = x * (1.0 / wide)
        q = v.round().clamp(-8, 7)
        assert torch.equal(y, q * wide + 0.0)
        assert y.stride() == torch.empty_like(x).stride()
        dx, dscale = torch.autograd.grad(y, (leaf, learned), grad)
        outside = (v < -8) | (v > 7)
        assert torch.equal(dx, torch.where(outside, 0.0, grad))
        terms = (grad * torch.where(outside, q, q - v)).double()
        others = [d for d in range(4) if axis is None or d != axis % 4]
        torch.testing.assert_close(dscale, terms.sum(others).float().view(count), rtol=2.0**-22, atol=1e-6)


def test_nothing_gives_nothing() -> None:
    for x, axis, count in ((torch.empty(0), None, 1), (torch.empty(3, 0), 0, 3), (torch.empty(0, 3), 1, 3)):
        leaf, scale = x.requires_grad_(), torch.ones(count, requires_grad=True)
        y = fake_quantize(leaf, scale, GRIDS["int4"], axis)
        y.sum().backward()
        assert y.shape == x.shape
        assert scale.grad is not None
        assert scale.grad.tolist() == [0.0] * count


def test_compiled_in_one_graph_it_is_the_same() -> None:
    x = torch.randn(5, 33, requires_grad=True)
    scale = torch.rand(5).add(0.1).requires_grad_()

    def loss(x: Tensor, scale: Tensor) -> Tensor:
        return (fake_quantize(x * 2, scale, GRIDS["apot4"], 0) ** 2).sum()

    plain = torch.autograd.grad(loss(x, scale), (x, scale))
    compiled = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(x, scale), (x, scale))
    assert same_bits(plain[0], compiled[0])
    assert same_bits(plain[1], compiled[1])


def test_the_operators_pass_torchs_own_checks() -> None:
    for x in (torch.randn(3, 4, 5), torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last)):
        grad, scale = torch.randn_like(x), torch.rand(x.shape[1]).add(0.1)
        backward = torch.ops.narrowcast.fake_quantize_backward.default
        result = torch.library.opcheck(backward, (grad, x, scale, *GRIDS["apot4"], 1))
        assert set(result.values()) == {"SUCCESS"}
        leaf, learned = x.requires_grad_(), scale.requires_grad_()
        result = torch.library.opcheck(torch.ops.narrowcast.fake_quantize.default, (leaf, learned, *GRIDS["apot4"], 1))
        assert set(result.values()) == {"SUCCESS"}


def test_autocast_leaves_dtypes_alone() -> None:
    x, scale = torch.randn(8, 8, requires_grad=True), torch.tensor(0.1, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert fake_quantize(x, scale, GRIDS["int4"], None).dtype == torch.float32
        assert fake_quantize(x.bfloat16(), scale, GRIDS["int4"], None).dtype == torch.bfloat16


def test_a_narrow_scale_gets_a_gradient_of_its_own_dtype() -> None:
    scale = torch.tensor(0.5, dtype=torch.bfloat16, requires_grad=True)
    fake_quantize(torch.ones(3), scale, GRIDS["int4"], None).sum().backward()
    assert scale.grad is not None
    assert scale.grad.dtype == torch.bfloat16


def test_a_profiler_sees_the_operator() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        fake_quantize(torch.ones(3), torch.ones(1), GRIDS["int4"], None)
    assert "narrowcast::fake_quantize" in {event.key for event in profile.key_averages()}


def test_the_reference_runs_where_it_is_asked_for() -> None:
    assert_agrees(operators.Reference(), GRIDS["apot4"], (3, 5, 7), torch.float32, nan=True)


# -- bad input --------------------------------------------------------------------------------------------------------


def test_an_axis_that_is_not_there_is_named() -> None:
    with pytest.raises(ShapeError, match=r"axis=2: x has 2 dimensions, shape \(3, 4\), so an axis is in \[-2, 2\)"):
        fake_quantize(torch.ones(3, 4), torch.ones(3), GRIDS["int4"], 2)


def test_scales_of_another_axis_are_counted() -> None:
    with pytest.raises(ShapeError, match=r"scale has 3 elements, shape \(3,\): axis=1 of x, shape \(3, 4\), needs 4"):
        fake_quantize(torch.ones(3, 4), torch.ones(3), GRIDS["int4"], 1)


def test_integers_are_refused() -> None:
    with pytest.raises(DtypeError, match=r"x has dtype torch\.int64.*x\.float\(\)"):
        fake_quantize(torch.ones(3, dtype=torch.int64), torch.ones(1), GRIDS["int4"], None)


def test_a_table_of_more_levels_than_codes_of_8_bits_is_refused() -> None:
    levels = torch.arange(300.0)
    with pytest.raises(ShapeError, match="300 levels, and a table has at most 256"):
        fake_quantize(torch.randn(10), torch.ones(1), Grid(levels, levels[:-1] + 0.5, False), None)
