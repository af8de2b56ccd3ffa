"""Exact convolutions on CPUs: every way that outputs fill vectors, rows fall into bands, and floats become bytes."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import narrowcast as nc
from narrowcast.kernels import reference
from narrowcast.kernels.cpu import binding
from narrowcast.kernels.layout import Grid
from narrowcast.kernels.windows import Window, to_words
from narrowcast.nn.qat.grids import codec_grid


@pytest.fixture(params=binding.ISAS)
def kernel(request: pytest.FixtureRequest) -> binding.Native:
    loaded, why = binding.load(request.param)
    if loaded is None:
        pytest.skip(why)
    return loaded


def assert_exact(kernel: binding.Native, x: Tensor, grid: Grid, weight: Tensor, window: Window, scale: float) -> None:
    """The kernel's bits are the reference's."""
    outputs = len(weight)
    factor, bias = torch.rand(outputs) / 100, torch.randn(outputs)
    arguments = x, torch.tensor([scale]), grid, to_words(weight), factor, bias, window
    wanted = reference.integer_conv(*arguments).contiguous()
    out = torch.full_like(wanted, 7.0)
    kernel.integer_conv(out, *arguments)
    assert torch.equal(out.view(torch.int32), wanted.view(torch.int32)), (x.shape, weight.shape, window)


def codes(*size: int) -> Tensor:
    return torch.randint(-128, 128, size, dtype=torch.int8)


@pytest.mark.parametrize("side", [1, 3])
def test_rows_of_any_width_and_number_fill_vectors(kernel: binding.Native, side: int) -> None:
    """Narrow ones run on over their ends, wide ones end in a vector that lies over the one before."""
    torch.manual_seed(0)
    grid = codec_grid("apot4", False).kernel
    for width in range(1, 36):
        for stride in (1, 2):
            window = Window(stride, stride, 1, 1, *[side // 2] * 4, 1)
            x = torch.rand(2, 5, 1 + width % 7, width)
            assert_exact(kernel, x, grid, codes(3, 5, side, side), window, 0.02)


def random_cases(count: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], Window]]:
    """Sizes of x and of the weight, and a window that fits."""
    draw = random.Random(17)
    while count:
        groups, each, images = draw.choice([1, 1, 2, 3]), draw.randint(1, 9), draw.randint(1, 3)
        height, width, high, wide = (draw.randint(1, most) for most in (14, 40, 4, 4))
        steps, around = [draw.randint(1, 3) for _ in range(4)], [draw.randint(0, 3) for _ in range(4)]
        window = Window(*steps, *around, groups)
        if min(window.outputs(height, width, (high, wide))) > 0:
            count -= 1
            yield (images, groups * each, height, width), (groups * draw.randint(1, 10), each, high, wide), window


@pytest.mark.parametrize("spec", [("int8", False), ("int4", True), ("apot4", False), ("apot6", True)], ids=str)
def test_windows_of_any_stride_dilation_padding_and_groups(kernel: binding.Native, spec: tuple[str, bool]) -> None:
    torch.manual_seed(0)
    grid = codec_grid(*spec)
    for size, shape, window in random_cases(40):
        assert_exact(kernel, torch.randn(size), grid.kernel, codes(*shape), window, 2 / grid.top)


@pytest.mark.parametrize("groups", [2, 3, 4, 6, 7, 8])
@pytest.mark.parametrize("each", [1, 2, 3])
def test_groups_of_few_channels_share_words(kernel: binding.Native, groups: int, each: int) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(2, groups * each, 7, 11), codes(groups * 2, each, 3, 3)
    assert_exact(kernel, x, codec_grid("int8").kernel, weight, Window(1, 1, 1, 1, 1, 1, 1, 1, groups), 2 / 127)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("stride", [1, 2])
def test_bands_of_a_tall_image_meet_without_a_seam(kernel: binding.Native, threads: int, stride: int) -> None:
    torch.manual_seed(0)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        window = Window(stride, stride, 1, 1, 1, 1, 1, 1, 1)
        x = torch.rand(2, 64, 110, 38)  # 16 words of 40 columns in a row: a band has at most 51 rows
        assert_exact(kernel, x, codec_grid("int8", False).kernel, codes(5, 64, 3, 3), window, 1 / 255)
    finally:
        torch.set_num_threads(before)


TABLES = [
    [0.0, 1.0, 2.0, 5.0, 9.0, 48.0],
    [-100.0, -7.0, -1.0, 0.0, 3.0, 90.0, 127.0],  # 455 halves: more than a byte counts
    [-128.0, 0.0, 127.0],
    [0.0, 1.0, 254.0, 255.0],
    [0.0],
]


@pytest.mark.parametrize("levels", TABLES, ids=str)
@pytest.mark.parametrize("scale", [1.0, 0.75, 2.0**-64])
def test_floats_beside_every_threshold_go_to_the_level_of_the_reference(
    kernel: binding.Native, levels: list[float], scale: float
) -> None:
    table = torch.tensor(levels)
    middle = (table[1:] + table[:-1]) / 2
    assert_at_thresholds(kernel, Grid(table, middle, False), middle, scale)


@pytest.mark.parametrize("spec", [("int8", False), ("int8", True), ("int4", True), ("int2", False)], ids=str)
def test_ties_between_consecutive_integers_go_to_the_even_one(kernel: binding.Native, spec: tuple[str, bool]) -> None:
    grid = codec_grid(*spec).kernel
    assert_at_thresholds(kernel, grid, grid.thresholds, 0.5)


def test_a_table_with_other_thresholds_is_left_to_the_reference(kernel: binding.Native) -> None:
    thresholds = torch.tensor([0.3, 1.25])
    assert_at_thresholds(kernel, Grid(torch.tensor([0.0, 1.0, 2.0]), thresholds, False), thresholds, 1.0)


def assert_at_thresholds(kernel: binding.Native, grid: Grid, thresholds: Tensor, scale: float) -> None:
    """A pixel is one channel times 1: outputs are levels."""
    up, down = (torch.nextafter(thresholds, torch.tensor(end)) for end in (torch.inf, -torch.inf))
    ends = torch.tensor([0.0, -0.0, 1e-45, -1e-45, 1e-30, 3e38, -3e38, torch.inf, -torch.inf])
    x = torch.cat([thresholds * scale, up * scale, down * scale, ends, torch.randn(20) * 300 * scale])
    for channels in (1, 2, 3, 4):
        image = x.repeat(channels).view(1, channels, 1, -1)
        weight = torch.ones(1, channels, 1, 1, dtype=torch.int8)
        assert_exact(kernel, image, grid, weight, Window(*[1] * 4, *[0] * 4, 1), scale)


@pytest.mark.parametrize("spec", [("int8", False), ("int8", True), ("apot5", False), ("int4", True)], ids=str)
def test_outermost_codes_of_both_signs_do_not_saturate(kernel: binding.Native, spec: tuple[str, bool]) -> None:
    """Levels and weights of the largest magnitude only: pairs of their products pass what an int16 holds."""
    torch.manual_seed(0)
    grid = codec_grid(*spec).kernel
    for largest in (1, 2, 7, 10, 63, 64, 65, 100, 127):
        x = torch.where(torch.rand(1, 24, 9, 17) < 0.8, 1e6, -1e6)
        weight = torch.where(torch.rand(5, 24, 3, 3) < 0.8, largest, -largest - (largest == 127)).to(torch.int8)
        assert_exact(kernel, x, grid, weight, Window(*[1] * 8, 1), 1.0)


@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
def test_a_module_pads_in_every_mode(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    x = torch.rand(2, 6, 9, 13)
    layer = torch.nn.Conv2d(6, 8, 3, (2, 1), (2, 1), groups=2, padding_mode=mode)
    nc.prepare_qat_(layer, "apot4", "int8")
    nc.calibrate_(layer, [x])
    nc.convert_(layer.eval())
    assert isinstance(layer, nc.nn.IntegerConv2d)
    with torch.no_grad():
        found = layer(x)
        monkeypatch.setattr("narrowcast.nn.qat.integer.integer_conv", reference.integer_conv)
        assert torch.equal(found, layer(x))
