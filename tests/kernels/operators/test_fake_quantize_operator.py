"""Fake quantization: what codecs decode, the gradients that the papers define, the same on every machine.

The Triton kernels run in Triton's interpreter, in a process of their own; see test_gpu.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from processes import in_interpreter
from torch import Tensor

import narrowcast as nc
from cases import DTYPES, same_bits
from narrowcast.codecs import Levels
from narrowcast.errors import DtypeError, GradientError, ShapeError
from narrowcast.kernels import operators, reference
from narrowcast.kernels.cpu import binding
from narrowcast.kernels.fake import Grid, fake_quantize
from narrowcast.kernels.operators import Kernel

ROOT = Path(__file__).parents[2]
INTERPRETER = os.environ.get("TRITON_INTERPRET") == "1"
CUDA = torch.cuda.is_available() and not INTERPRETER
CPU = torch.device("cpu")
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),
    # The operators are the same on any kernel: machines without a compiler check them on the reference.
    pytest.mark.filterwarnings("ignore::narrowcast.errors.KernelWarning"),
]

TABLES = {
    "apot4": nc.codec("apot4"),
    "apot3": nc.codec("apot3"),
    "apot6": nc.codec("apot6"),
    "apot8": nc.codec("apot8"),
    "pot4": nc.codec("pot4"),
    "pot5": nc.codec("pot5"),
    "nf4": nc.codec("nf4"),
    "no zero": Levels([-1.0, 1.0]),
    "unsigned": Levels([0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 10.0]),
    "far": Levels([40.0, 41.0, 43.0, 60.0]),
    "uneven": Levels([-3.0, -0.4, -0.0, 0.3, 1.7]),
    "200 levels": Levels([i * i / 100 - 30 for i in range(200)]),
}


def integers(low: int, high: int) -> Grid:
    levels = torch.arange(low, high + 1.0)
    return Grid(levels, levels[:-1] + 0.5, True)


def grid_of(codec: nc.Codec) -> Grid:
    assert isinstance(codec, Levels)
    return Grid(codec.levels, codec._tables[CPU][1, : len(codec.levels) - 1].clone(), False)


GRIDS = {
    **{name: grid_of(codec) for name, codec in TABLES.items()},
    "int4": integers(-8, 7),
    "int8": integers(-128, 127),
    "uint3": integers(0, 7),
    "2 integers": integers(0, 1),
}
SHAPES = ((1, 1, 1), (1, 1, 70), (3, 5, 7), (2, 3, 300), (70, 3, 1), (5, 150, 1), (2, 1, 64), (1, 130, 2))


def made(grid: Grid, shape: tuple[int, ...], dtype: torch.dtype, nan: bool) -> tuple[Tensor, Tensor, Tensor]:
    """x, grad and scales: normal numbers, ties, far ones, infinities, denormals, zeros of both signs."""
    random = torch.Generator().manual_seed(sum(shape))
    peak = float(grid.levels.abs().max())
    x = torch.randn(shape, generator=random).flatten()
    scale = torch.rand(shape[1], generator=random) + 0.5
    scale[0] = 0.5  # a power of two, so that ties are met exactly
    x[::3] *= peak / 2
    x[1::7] = grid.thresholds[torch.arange(len(x[1::7])) % len(grid.thresholds)] * scale[0]
    x[2::11] *= 1e-42
    x[5::13], x[8::17], x[9::19], x[4::23] = torch.inf, -torch.inf, 0.0, -0.0
    if nan and len(x) > 20:
        x[20] = torch.tensor(-0x3FF00F, dtype=torch.int32).view(torch.float32)  # a NaN with a sign and a payload
    grad = torch.randn(shape, generator=random)
    return x.view(shape).to(dtype), grad.to(dtype), scale


def assert_sums_agree(found: Tensor, wanted: Tensor, x: Tensor, grad: Tensor, scale: Tensor, grid: Grid) -> None:
    """Sums of the same fp32 terms in fp64, in another order: n of them err by less than n 2**-53 of their magnitudes,
    either way; rounding both to fp32 then adds half a unit in the last place each.
    """
    v, q = reference.nearest_level(x, scale, grid)
    outside = (v < grid.levels[0]) | (v > grid.levels[-1])
    magnitudes = (reference.to_float32(grad) * torch.where(outside, q, q - v)).double().abs().sum((0, 2))
    bound = x.numel() * 2.0**-52 * magnitudes + 2.0**-23 * wanted.double().abs() + 2.0**-149
    assert torch.equal(found.isnan(), wanted.isnan())
    assert ((found.double() - wanted.double()).abs() <= bound)[~wanted.isnan()].all()


def check(
    kernel: Kernel, grid: Grid, shape: tuple[int, ...], dtype: torch.dtype, nan: bool, device: str = "cpu"
) -> None:
    x, grad, scale = made(grid, shape, dtype, nan)
    there = Grid(grid.levels.to(device), grid.thresholds.to(device), grid.uniform)
    its_x, its_grad, its_scale = x.to(device), grad.to(device), scale.to(device)
    y = torch.full_like(its_x, 7)
    kernel.fake_quantize(y, its_x, its_scale, there)
    assert same_bits(y.cpu(), reference.fake_quantize(x, scale, grid)), (shape, dtype)
    dx, dscale = torch.full_like(its_x, 7), torch.full_like(its_scale, 7)
    kernel.fake_gradients(dx, dscale, its_grad, its_x, its_scale, there)
    want = reference.fake_quantize_backward(grad, x, scale, grid)
    assert same_bits(dx.cpu(), want[0]), (shape, dtype)
    assert_sums_agree(dscale.cpu(), want[1], x, grad, scale, grid)


@pytest.fixture(params=binding.ISAS)
def kernel(request: pytest.FixtureRequest) -> binding.Native:
    best, why = binding.load()
    assert best is not None, why
    if binding.ISAS.index(request.param) > binding.ISAS.index(best.name.removeprefix("native/")):
        pytest.skip(f"this CPU has no {request.param}")
    loaded, why = binding.load(request.param)
    assert loaded is not None, why
    return loaded


# -- every machine, the reference's bits ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GRIDS)
def test_every_instruction_set_gives_the_references_bits(kernel: binding.Native, name: str) -> None:
    for case, shape in enumerate(SHAPES):
        for dtype in DTYPES:
            check(kernel, GRIDS[name], shape, dtype, nan=case % 2 == 1)


@pytest.mark.parametrize("shape", [(1, 1, 200_000), (1, 2, 70_000), (3, 300, 300), (150, 5000, 1), (9000, 3, 5)])
def test_large_tensors_are_cut_into_tasks_without_a_seam(kernel: binding.Native, shape: tuple[int, ...]) -> None:
    check(kernel, GRIDS["apot4"], shape, torch.float32, nan=False)


@pytest.mark.parametrize("shape", [(1, 1, 600_000), (40, 3, 5000), (1200, 500, 1)])
def test_threads_and_instruction_sets_change_no_bit_of_a_scales_gradient(shape: tuple[int, ...]) -> None:
    x, grad, scale = made(GRIDS["nf4"], shape, torch.float32, nan=False)
    found = []
    before = torch.get_num_threads()
    for isa in binding.ISAS:
        loaded, _ = binding.load(isa)
        for threads in (1, 2, 5):
            if loaded is not None:
                torch.set_num_threads(threads)
                found.append(torch.empty_like(scale))
                loaded.fake_gradients(torch.empty_like(x), found[-1], grad, x, scale, GRIDS["nf4"])
    torch.set_num_threads(before)
    assert len(found) >= 3
    assert all(same_bits(found[0], other) for other in found)


def test_results_past_the_caches_are_whole(kernel: binding.Native) -> None:
    # 16 MB and more are written past them, in whole pieces; the odd sizes leave a part of one.
    check(kernel, GRIDS["int4"], (1, 1, (1 << 22) + 37), torch.float32, nan=False)
    check(kernel, GRIDS["int4"], (2049, 2051, 1), torch.float32, nan=False)
    check(kernel, GRIDS["int4"], (2046, 2064, 1), torch.float32, nan=False)  # rows that begin on a cache line


@pytest.mark.skipif(not (CUDA or INTERPRETER), reason="the interpreter runs this in a process of its own")
@pytest.mark.parametrize("name", GRIDS)
def test_triton_gives_the_references_bits(name: str) -> None:
    from narrowcast.kernels.triton.launch import Triton

    for case, shape in enumerate((*SHAPES[1:5], (1, 1, 5000), (1, 130, 2))):
        check(Triton(), GRIDS[name], shape, DTYPES[case % 4], case % 2 == 1, "cuda" if CUDA else "cpu")


@pytest.mark.skipif(CUDA or INTERPRETER, reason="this process runs the kernels itself")
@pytest.mark.timeout(300)
def test_triton_gives_the_references_bits_in_its_interpreter() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    assert "." * len(GRIDS) in in_interpreter(__file__, "-k", "triton_gives")


@pytest.mark.timeout(120)
def test_no_byte_beyond_the_tensors_is_touched(kernel: binding.Native) -> None:
    script = Path(__file__).with_name("guard_fake.py")
    run = subprocess.run(
        [sys.executable, str(script), kernel.name.removeprefix("native/")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.stdout == "228 calls\n", run.stdout + run.stderr


def test_the_integer_grid_and_the_search_agree(kernel: binding.Native) -> None:
    # A shift of every threshold by less than an element can tell keeps the codes and takes the grid's shortcut away.
    for name in ("apot3", "apot4", "apot6", "apot8"):
        grid = GRIDS[name]
        sought = grid._replace(thresholds=grid.thresholds + 2.0**-8)
        x = torch.arange(-4000.0, 4001.0).view(1, 1, -1) / 16
        scale = torch.ones(1)
        fast, slow = torch.empty_like(x), torch.empty_like(x)
        kernel.fake_quantize(fast, x, scale, grid)
        kernel.fake_quantize(slow, x, scale, sought)
        assert same_bits(fast, slow), name


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
    _, q = reference.nearest_level(x.view(1, 1, -1), scale.view(1), grid)

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
    check(operators.Reference(), GRIDS["apot4"], (3, 5, 7), torch.float32, nan=True)


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
