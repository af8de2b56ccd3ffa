"""Exact convolutions of integers: the reference's bits on every machine."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import narrowcast as nc
from narrowcast.errors import DtypeError, ShapeError
from narrowcast.kernels import operators, reference
from narrowcast.kernels.cpu import binding
from narrowcast.kernels.layout import Grid
from narrowcast.kernels.operators import Kernel
from narrowcast.kernels.operators.integer import integer_conv
from narrowcast.kernels.windows import LONGEST, Window, from_words, to_words
from narrowcast.nn.qat.grids import codec_grid

# The operator is the same on any kernel: machines without a compiler check it on the reference.
pytestmark = pytest.mark.filterwarnings("ignore::narrowcast.errors.KernelWarning")

# images, channels, y, x; outputs; the kernel; strides, dilations, left, right, top, bottom, groups
CASES = [
    ((2, 3, 8, 8), 5, (3, 3), (1, 1, 1, 1, 1, 1, 1, 1, 1)),
    ((1, 16, 32, 32), 16, (3, 3), (1, 1, 1, 1, 1, 1, 1, 1, 1)),
    ((2, 8, 9, 7), 4, (3, 3), (2, 2, 1, 1, 1, 1, 1, 1, 1)),
    ((1, 6, 11, 13), 9, (2, 4), (3, 2, 2, 3, 2, 1, 0, 3, 3)),
    ((3, 4, 6, 5), 7, (1, 1), (2, 2, 1, 1, 0, 0, 0, 0, 1)),
    ((1, 4, 9, 9), 3, (2, 2), (4, 4, 2, 2, 1, 0, 3, 0, 1)),  # phases 1 and 3 of four are never read
    ((1, 5, 1, 40), 7, (1, 5), (1, 2, 1, 2, 3, 3, 0, 0, 1)),
    ((2, 4, 6, 6), 8, (3, 3), (1, 1, 1, 1, 1, 1, 1, 1, 4)),
    ((1, 1, 3, 3), 1, (3, 3), (5, 5, 1, 1, 0, 0, 0, 0, 1)),
    ((2, 2, 4, 100), 3, (1, 1), (1, 1, 1, 1, 0, 0, 0, 0, 1)),
    ((1, 4, 10, 10), 17, (3, 3), (3, 3, 2, 2, 4, 0, 5, 1, 1)),
]
GRIDS = [("int8", True), ("int8", False), ("apot4", False), ("apot3", True)]


def triton() -> Kernel:
    """What runs on CUDA, with the reference in place of the Triton kernel of fake quantization."""
    pytest.importorskip("triton", reason="Triton is not installed")
    if binding.load("avx512")[0] is None:
        pytest.skip("torch._int_mm saturates on CPUs without VNNI")
    from narrowcast.kernels.triton import integer
    from narrowcast.kernels.triton.launch import Triton

    class Emulated(Triton):
        def _integer_conv(self, out: Tensor, x: Tensor, scale: Tensor, grid: Grid, *rest: object) -> None:
            values = reference.fake_quantize(x.view(1, 1, -1), scale, grid).view_as(x)
            integer.integer_conv(out, (values / scale).round(), grid.levels[-1], *rest)  # type: ignore[arg-type]

    return Emulated()


@pytest.fixture(params=[*binding.ISAS, "triton"])
def kernel(request: pytest.FixtureRequest) -> Kernel:
    if request.param == "triton":
        return triton()
    loaded, why = binding.load(request.param)
    if loaded is None:
        pytest.skip(why)
    return loaded


def operands(case: tuple, signed: bool, top: float) -> tuple[Tensor, ...]:
    size, outputs, kernel_size, window = case
    torch.manual_seed(0)
    x = torch.randn(size) if signed else torch.rand(size) * 2
    weight = torch.randint(-128, 128, (outputs, size[1] // window[-1], *kernel_size), dtype=torch.int8)
    return x, torch.tensor([2.0 / top]), weight, torch.rand(outputs) / 100, torch.randn(outputs)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_reference_is_torchs_convolution_of_levels_in_fp64(case: tuple) -> None:
    grid, window = codec_grid("int8", False), Window(*case[3])
    x, scale, weight, factor, bias = operands(case, False, grid.top)
    levels = (reference.fake_quantize(x.view(1, 1, -1), scale, grid.kernel).view_as(x) / scale).round().double()
    padded = F.pad(levels, (window.left, window.right, window.top, window.bottom))
    sums = F.conv2d(padded, weight.double(), None, window[:2], 0, window[2:4], window.groups).float()
    wanted = sums * factor.view(-1, 1, 1) + bias.view(-1, 1, 1)
    found = reference.integer_conv(x, scale, grid.kernel, to_words(weight), factor, bias, window)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("unknown", [False, True])
def test_every_machine_gives_the_bits_of_the_reference(
    kernel: Kernel, case: tuple, grid: tuple[str, bool], unknown: bool
) -> None:
    levels, window = codec_grid(*grid), Window(*case[3])
    x, scale, weight, factor, bias = operands(case, grid[1], levels.top)
    if unknown:
        x[0, -1, x.shape[2] // 2, x.shape[3] // 2] = torch.nan
    arguments = x, scale, levels.kernel, to_words(weight), factor, None if unknown else bias, window
    wanted = reference.integer_conv(*arguments).contiguous()
    out = torch.full_like(wanted, 7.0)
    kernel.integer_conv(out, *arguments)
    assert torch.equal(out.view(torch.int32), wanted.view(torch.int32))


def test_windows_of_the_largest_products_are_exact_and_longer_ones_too(kernel: Kernel) -> None:
    grid = codec_grid("int8", False)
    for channels in (LONGEST // 4 * 4, LONGEST + 5):
        x, weight = torch.full((1, channels, 1, 1), 300.0), torch.full((1, channels, 1, 1), -128, dtype=torch.int8)
        out = torch.zeros(1, 1, 1, 1)
        ones = torch.ones(1)
        kernel.integer_conv(out, x, ones, grid.kernel, to_words(weight), ones, None, Window(*[1] * 4, *[0] * 4, 1))
        assert out.item() == torch.tensor(-128 * 255 * channels).float().item()


def test_weights_in_words_come_back_as_they_were() -> None:
    weight = torch.randint(-128, 128, (5, 6, 3, 2), dtype=torch.int8)
    assert to_words(weight).shape == (5, 2, 3, 2, 4)
    assert torch.equal(from_words(to_words(weight), 6), weight)
    assert to_words(weight)[:, 1, :, :, 2:].eq(0).all()


def test_the_operator_works_in_one_graph_and_passes_torchs_checks() -> None:
    grid, window = codec_grid("apot4", False), Window(*CASES[2][3])
    x, scale, weight, factor, bias = operands(CASES[2], False, grid.top)
    words = to_words(weight)
    numbers = (x, scale, *grid.kernel, words, factor, bias, list(window))
    result = torch.library.opcheck(torch.ops.narrowcast.integer_conv.default, numbers)
    assert set(result.values()) == {"SUCCESS"}

    def run(x: Tensor) -> Tensor:
        return integer_conv(x, scale, grid.kernel, words, factor, bias, window)

    assert torch.equal(torch.compile(run, fullgraph=True, backend="aot_eager")(x), run(x))


def test_wrong_operands_are_refused_by_name() -> None:
    grid, window = codec_grid("int8"), Window(*CASES[0][3])
    x, scale, weight, factor, bias = operands(CASES[0], True, grid.top)
    reference_kernel, words = operators.Reference(), to_words(weight)
    out = torch.zeros(2, 5, 8, 8)
    for changed, error, name in [
        ({"x": x.double()}, DtypeError, "x"),
        ({"x": x[:, :, ::2]}, ShapeError, "x"),
        ({"weight": words.float()}, DtypeError, "weight"),
        ({"weight": words[:, :, :, :, :3]}, ShapeError, "weight"),
        ({"factor": factor[:4]}, ShapeError, "factor"),
        ({"bias": bias.half()}, DtypeError, "bias"),
        ({"window": window._replace(stride_x=0)}, ShapeError, "window"),
        ({"window": window._replace(groups=2)}, ShapeError, "window"),
        ({"window": window._replace(dilation_y=9)}, ShapeError, "x"),
    ]:
        given = {"x": x, "scale": scale, "grid": grid.kernel, "weight": words, "factor": factor, "bias": bias}
        given = {**given, "window": window, **changed}
        with pytest.raises(error, match=f"^{name}: "):
            reference_kernel.integer_conv(out, *given.values())


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("spec", ["int8", "apot4"])
@pytest.mark.parametrize("largest", [1, 10, 64, 65, 127, -128])
def test_products_as_large_as_they_get_add_up_without_saturating(
    kernel: Kernel, spec: str, signed: bool, largest: int
) -> None:
    """On AVX2 products are added in int16 for as many words as those hold: none, one or many."""
    grid = codec_grid(nc.codec(spec), signed).kernel
    window = Window._make((1, 1, 1, 1, 1, 1, 1, 1, 1))
    x = torch.full((1, 64, 5, 7), 1e6)  # every level is the top one
    weight = torch.full((5, 64, 3, 3), largest, dtype=torch.int8)
    weight[1, ::2] = -127
    out = torch.empty(1, 5, 5, 7)
    scale, factor = torch.ones(1), torch.ones(5)
    kernel.integer_conv(out, x, scale, grid, to_words(weight), factor, None, window)
    levels = torch.full((1, 64, 5, 7), float(grid.levels[-1]), dtype=torch.float64)
    assert torch.equal(out.double(), F.conv2d(levels, weight.double(), padding=1).float().double())
