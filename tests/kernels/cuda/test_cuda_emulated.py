"""The kernels of kernels/cuda, run on a CPU (emulated/device.py): each cut of the work, against fp64.

Two kinds of numbers: small integers times powers of two, whose sums are exact in fp32, so that a result has but one
right value; and Gaussian ones, within the bound of sum_bound.py. Each launch runs with warps in order and in
reverse, on guarded memory, and must give the same bits.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import pytest
import torch
from torch import Tensor

import narrowcast as nc
from narrowcast.kernels.layout import ROW, SCALE_BYTES, Element, Recipe, Scale, layout

pytest.importorskip("triton", reason="Triton is not installed")

from emulated.device import COMPILER, Emulator, Guarded

from narrowcast.kernels import reference
from narrowcast.kernels.cuda import choose, nvrtc
from narrowcast.kernels.cuda.cuts import Cut, choose_cut, fits, tile_cut
from narrowcast.kernels.cuda.formats import KINDS, codes_of
from narrowcast.kernels.cuda.launch import launch_cut
from sum_bound import bound

if COMPILER is None:
    pytest.skip("g++ is not installed", allow_module_level=True)

Plan = TypeVar("Plan")
"""How a kernel divides its work."""

HALVES = (torch.float16, torch.bfloat16)
CPU = torch.device("cpu")
LARGE, LONG = 1 << 20, 1 << 16
"""Rows that make a layer large to `plan`, and columns that are too many for `dot`."""

UNITS = 2.0**11
"""Where sums have to be exact, levels are multiples of 2**-11: some of each table are."""

SPECS = (
    "int8:block=row",
    "int8",
    "int8:block=32",
    "int8:block=64,scale=fp16",
    "int8:block=256,scale=e8m0",
    "int4:block=row,scale=fp16",
    "int4",
    "int4:block=32,scale=fp32",
    "int4:block=128,scale=e8m0",
    "int4:block=256",
    "fp8_e4m3",
    "fp8_e4m3:block=row,scale=bf16",
    "fp8_e5m2:block=32,scale=fp16",
    "fp8_e4m3:block=128",
    "apot8:block=64,scale=e8m0",
    "nf4:block=row,scale=e8m0",
    "nf4",
    "apot4:block=32,scale=fp32",
    "nf4:block=128,scale=fp16",
    "pot4:block=256",
)


class Case(NamedTuple):
    """A codec, x and bias, the layer that `plan` is told of, and what a cut has other than that."""

    spec: str
    batch: int
    dtype: torch.dtype
    bias: torch.dtype | None = None
    layer: tuple[int, int] | None = None
    cut: dict[str, int] = {}  # noqa: RUF012

    def __str__(self) -> str:
        layer = [] if self.layer is None else ["x".join(map(str, self.layer))]
        return "-".join(
            [self.spec, str(self.batch), str(self.dtype)[6:], *layer, *(f"{k}{v}" for k, v in self.cut.items())]
        )


def planned(turn: int) -> list[Case]:
    """Each codec as `plan` cuts it, one row of x and several; turns 0 to 5 are all there is in fp16 and bf16."""
    return [
        Case(spec, batch, HALVES[(i + j + turn // 3) % 2], (None, torch.float32, *HALVES)[(i + j) % 4])
        for i, spec in enumerate(SPECS)
        for j, batch in enumerate((1, (3, 12, 27)[(i + turn) % 3]))
        if batch > 1 or turn % 3 == 0
    ]


DOT = [
    Case("int8:block=16,scale=bf16", 1, torch.float16),
    Case("int8:block=row", 1, torch.float32),
    Case("int8", 1, torch.float32, torch.bfloat16),
    Case("int8:block=32", 1, torch.float32, torch.float32),
    Case("int8:block=row", 1, torch.bfloat16, torch.float32, (LARGE, 1056)),
    Case("int8", 1, torch.float16, torch.float32, (LARGE, 1056)),
    Case("int8", 1, torch.float32, None, (LARGE, 1056)),
    Case("int8:block=48,scale=bf16", 1, torch.bfloat16, torch.float16, None, {"KS": 1}),
    Case("int8", 1, torch.bfloat16, None, None, {"KS": 4, "TEAMS": 2, "UNROLL": 2}),
]
LARGER = [
    Case("int8:block=row", 1, torch.float16, None, (LARGE, LONG)),
    Case("int8:block=32", 1, torch.bfloat16, torch.float16, (256, LONG)),
    Case("int8:block=16,scale=bf16", 1, torch.float16, None, (256, LONG)),
    Case("int4:block=row", 1, torch.float16, None, (LARGE, 4096)),
    Case("int4:block=32", 1, torch.bfloat16, torch.float32, (LARGE, 4096)),
    Case("int4:block=128", 1, torch.float16, torch.bfloat16, (LARGE, 4096)),
    Case("nf4", 1, torch.bfloat16, None, (20_000, 4096)),
    Case("nf4", 1, torch.float16, torch.float16, (LARGE, 4096)),
    Case("fp8_e4m3:block=128", 1, torch.bfloat16, None, (LARGE, 4096)),
    *(
        Case(spec, batch, dtype, None, (LARGE, 4096))
        for spec, batch, dtype in (
            ("int8:block=row", 8, torch.bfloat16),
            ("int8", 11, torch.float16),
            ("int4", 5, torch.float16),
            ("int4", 16, torch.bfloat16),
            ("nf4", 2, torch.float16),
            ("nf4", 9, torch.bfloat16),
            ("fp8_e4m3", 7, torch.bfloat16),
            ("fp8_e5m2:block=128", 16, torch.float16),
            ("int4", 32, torch.float16),
        )
    ),
]
OTHER = [
    Case("int4:block=32", 1, torch.float16, None, None, {"TALL": 2, "KS": 4}),
    Case("int4", 1, torch.bfloat16, None, None, {"WIDE": 8, "UNROLL": 2, "KS": 2}),
    Case("int4", 1, torch.float16, None, None, {"WIDE": 4, "KS": 8}),
    Case("nf4", 1, torch.float16, None, None, {"TALL": 2, "UNROLL": 2, "KS": 4}),
    Case("nf4:block=128", 3, torch.bfloat16, None, None, {"UNROLL": 2, "KS": 4, "WIDE": 4}),
    Case("int8:block=32", 4, torch.float16, None, None, {"UNROLL": 3, "KS": 2, "TALL": 2}),
    Case("int8", 12, torch.bfloat16, None, None, {"WIDE": 8, "UNROLL": 2, "KS": 1}),
    Case("fp8_e4m3:block=128", 30, torch.float16, None, None, {"TALL": 1, "KS": 8, "UNROLL": 2}),
    Case("apot8:block=64", 20, torch.bfloat16, None, None, {"WIDE": 8, "KS": 2, "UNROLL": 2}),
]


@pytest.fixture(scope="session")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Emulator:
    """Workers of pytest-xdist have one folder: each kernel is compiled by one of them."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "emulated"
    folder.mkdir(exist_ok=True)
    return Emulator(folder)


@pytest.fixture(autouse=True)
def host(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    """choose.py as it is, with the emulator in the place of a GPU of two processors."""
    monkeypatch.setattr(nvrtc, "function", emulator.function)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(choose, "_compiles", lambda device: True)
    monkeypatch.setattr(choose, "_processors", lambda device: 2)
    monkeypatch.setattr(choose, "_chip", lambda device: (200 << 10, True))


def cut_of(case: Case, recipe: Recipe, n: int, k: int) -> Cut:
    """The cut of `choose_cut` for the case's layer, with what the case changes, for n rows of k."""
    codes = codes_of(recipe.format)
    assert codes is not None
    kind, bias = KINDS[case.dtype], -1 if case.bias is None else KINDS[case.bias]
    layer = case.layer or (n, k)
    cut = choose_cut(codes, recipe.format, case.batch, *layer, kind, bias, 2)
    assert cut is not None
    defines = dict(cut.defines) | case.cut
    if cut.name == "dot":
        teams, parts = defines["TEAMS"], defines["KS"]
        grid = min(cut.grid, -(-n // (teams * defines["ROWS"])))
        return Cut("dot", tuple(defines.items()), grid, 32 * teams * parts, -(-k // 512) * 2048)
    wide, tiles, *rest = [defines.pop(key) for key in ("WIDE", "TILES", "TALL", "KS", "RESIDENT")]
    assert fits(codes, defines["BLOCK"], tiles, wide)
    cut_again = tile_cut(defines, codes, wide, tiles, *rest, n, k, cut.grid)
    assert cut_again is not None
    return cut_again


def launch(cut: Cut, x: Tensor, data: Tensor, recipe: Recipe, bias: Tensor | None) -> Tensor:
    out = torch.empty(len(x), len(data), dtype=x.dtype)
    launch_cut(cut, out, x, data, recipe, bias)
    return out


def as_read(recipe: Recipe, dtype: torch.dtype) -> Recipe:
    """With levels rounded to x's dtype, as `tile` has them."""
    if recipe.table is None:
        return recipe
    return recipe._replace(table=torch.stack([recipe.table[0].to(dtype).float(), recipe.table[1]]))


def gaussian(case: Case, recipe: Recipe, n: int, k: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """x, W encoded and a bias."""
    generator = torch.Generator().manual_seed(n * k + case.batch)
    data = reference.encode(torch.randn(n, k, generator=generator), recipe, 0)
    x, bias = torch.randn(case.batch, k, generator=generator), torch.randn(n, generator=generator)
    return x.to(case.dtype), data, None if case.bias is None else bias.to(case.bias)


def levels(recipe: Recipe) -> Tensor:
    """What the one or two codes of each byte stand for, [256, 1 or 2]; numbers above 1 are NaN."""
    every = torch.zeros(256, 16, dtype=torch.uint8)
    every[:, 0], every[:, 1] = torch.arange(256), 127  # a scale of 1
    scaled = recipe._replace(format=recipe.format._replace(block=ROW, scale=Scale.E8M0))
    value = reference.decode(every, 8 // recipe.format.bits, torch.float64, scaled)
    return value.where(value.abs() <= 1, torch.nan)


def whole(case: Case, recipe: Recipe, n: int, k: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """x and a bias of small integers; W of integers or of levels in UNITS, scales of 1, 2 and 4.

    There are gaps between rows, and ones for padding behind the scales.
    """
    generator = torch.Generator().manual_seed(n * k + case.batch)
    format, place = recipe.format, layout(recipe.format, k)
    codes = torch.arange(256)
    if format.element != Element.INT:
        codes = codes[levels(as_read(recipe, case.dtype)).mul(UNITS).frac().eq(0).all(1)]
    data = torch.full((n, place.row_bytes + 32), 0xFF, dtype=torch.uint8)[:, : place.row_bytes]
    picked = torch.randint(len(codes), (n, place.codes_bytes), generator=generator)
    data[:, : place.codes_bytes] = codes[picked].to(torch.uint8)
    if format.scale:
        powers = torch.randint(0, 3, (n, place.blocks), generator=generator)
        kinds = {Scale.FP32: torch.float32, Scale.BF16: torch.bfloat16, Scale.FP16: torch.float16}
        scale = Scale(format.scale)
        stored = (
            (powers + 127).to(torch.uint8) if scale == Scale.E8M0 else powers.exp2().to(kinds[scale]).view(torch.uint8)
        )
        data[:, place.scales_offset : place.zeros_offset] = stored
    x = torch.full((case.batch, k + 8), torch.nan, dtype=case.dtype)[:, :k]
    x.copy_(torch.randint(-2, 3, x.shape, generator=generator))
    bias = torch.randint(-9, 10, (n,), generator=generator)
    return x, data, None if case.bias is None else bias.to(case.bias)


def exact(x: Tensor, data: Tensor, recipe: Recipe, bias: Tensor | None) -> Tensor:
    """The one right result: every sum, in any order, is a whole number of units that 24 binary digits hold."""
    weight = reference.decode(data.contiguous(), x.shape[1], torch.float64, as_read(recipe, x.dtype))
    units = 1.0 if recipe.format.element == Element.INT else UNITS
    assert (weight * units).frac().eq(0).all()
    assert ((x.double().abs() @ weight.abs().t()).max() + 9) * units < 2**24
    result = x.double() @ weight.t()
    return (result if bias is None else result + bias.double()).to(x.dtype)


def spoil(row: Tensor, recipe: Recipe, k: int) -> None:
    """NaN for the last scale of an encoded row, and for its codes where they are floats."""
    place, size = layout(recipe.format, k), SCALE_BYTES[Scale(recipe.format.scale)]
    row[place.zeros_offset - size : place.zeros_offset] = 0xFF
    if recipe.format.element in (Element.E4M3, Element.E5M2):
        row[: place.codes_bytes] = 0xFF


def check(case: Case) -> None:
    recipe = nc.codec(case.spec).recipe(CPU)
    hold(case, recipe, 40, lambda n, k: cut_of(case, recipe, n, k), launch, lambda cut: cut._replace(grid=1))


def hold(
    case: Case,
    recipe: Recipe,
    tallest: int,
    plan: Callable[[int, int], Plan],
    launch: Callable[[Plan, Tensor, Tensor, Recipe, Tensor | None], Tensor],
    in_few_blocks: Callable[[Plan], Plan],
    sizes: tuple[tuple[int, int], ...] = ((1, 288), (17, 2080), (0, 544), (70, 1056)),
) -> None:
    """What every plan of the work must do: exact sums, Gaussian ones within the bound, and NaNs in their rows."""
    for n, k in ((n or tallest, k) for n, k in sizes[:-1]):
        x, data, bias = whole(case, recipe, n, k)
        assert torch.equal(launch(plan(n, k), x, data, recipe, bias), exact(x, data, recipe, bias))
    n, k = sizes[-1]
    x, data, bias = gaussian(case, recipe, n, k)
    chosen = plan(n, k)
    clean = launch(chosen, x, data, recipe, bias)
    right, allowed = bound(x, reference.decode(data, k, torch.float64, recipe), bias)
    assert ((clean.double() - right).abs() <= allowed).all()
    # As few blocks as can do it all give the same bits, and a NaN stays in its row of W, or of x.
    spoiled = torch.zeros(case.batch, n, dtype=torch.bool)
    for row in (7, 23, 36):
        spoil(data[row], recipe, k)
        spoiled[:, row] = True
    if case.batch > 1:
        x[-1, -1] = torch.nan
        spoiled[-1] = True
    dirty = launch(in_few_blocks(chosen), x, data, recipe, bias)
    assert torch.equal(dirty.isnan(), spoiled)
    assert torch.equal(dirty[~spoiled], clean[~spoiled])


@pytest.mark.parametrize("case", DOT, ids=str)
def test_dot_is_exact_where_sums_are_and_nan_stays_in_its_row(case: Case) -> None:
    assert cut_of(case, nc.codec(case.spec).recipe(CPU), 40, 544).name == "dot"
    check(case)


@pytest.mark.parametrize("case", planned(0), ids=str)
def test_each_codec_is_exact_where_sums_are_and_nan_stays_in_its_row(case: Case) -> None:
    check(case)


@pytest.mark.soak
@pytest.mark.parametrize("case", [case for turn in range(1, 6) for case in planned(turn)], ids=str)
def test_each_codec_with_every_number_of_columns(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("case", LARGER, ids=str)
def test_the_cuts_of_large_layers_do_the_same(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("case", OTHER, ids=str)
def test_cuts_that_no_plan_has_do_the_same(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("spec", ["int8", "int4", "nf4:block=128", "fp8_e4m3:block=128"])
@pytest.mark.parametrize("batch", [1, 4])
def test_a_block_longer_than_the_row_is_one_scale_of_the_row(spec: str, batch: int) -> None:
    recipe = nc.codec(spec).recipe(CPU)
    case = Case(spec, batch, torch.float16, None)
    x, data, bias = whole(case, recipe, 19, 64)
    cut = cut_of(case, recipe, 19, 64)
    assert dict(cut.defines)["BLOCK"] == 0
    assert torch.equal(launch(cut, x, data, recipe, bias), exact(x, data, recipe, bias))


@pytest.mark.parametrize(
    ("spec", "batch"),
    [("int8", 1), ("int8", 16), ("int4", 65), ("int8", 33), ("nf4", 40), ("int4:block=96", 40), ("int8:block=row", 20)],
)
def test_a_call_is_launched_as_planned_in_parts_of_a_batch_too(spec: str, batch: int) -> None:
    recipe = nc.codec(spec).recipe(CPU)
    case = Case(spec, batch, torch.bfloat16, torch.float32)
    x, data, bias = whole(case, recipe, 35, 512)
    out = torch.empty(batch, 35, dtype=torch.bfloat16)
    # Guarded memory is aligned as CUDA's is; what torch has here need not be.
    x, data = (Guarded(x).tensor, Guarded(data).tensor)
    assert choose.linear(out, x, data, recipe, bias)
    assert torch.equal(out, exact(x, data, recipe, bias))


@pytest.mark.parametrize(("spec", "batch"), [("int8", 1), ("int4:block=row", 3), ("int4", 20), ("int8", 48)])
def test_a_bias_whose_elements_do_not_lie_side_by_side_is_added_as_it_reads(spec: str, batch: int) -> None:
    recipe = nc.codec(spec).recipe(CPU)
    x, data, _ = whole(Case(spec, batch, torch.float16), recipe, 40, 512)
    x, data = (Guarded(x).tensor, Guarded(data).tensor)
    apart = torch.full((40, 3), torch.nan)
    apart[:, 1] = torch.arange(40) - 20.0
    for bias in (apart[:, 1], torch.tensor(5.0).expand(40)):  # a column, and one number for all outputs
        out = torch.full((batch, 40), torch.nan, dtype=torch.float16)
        assert choose.linear(out, x, data, recipe, bias)
        assert torch.equal(out, exact(x, data, recipe, bias))


@pytest.mark.parametrize("room", [99 << 10, 163 << 10], ids=["consumer card", "A100"])
@pytest.mark.parametrize("spec", ["int8", "int4", "nf4", "fp8_e4m3"])
def test_a_long_row_asks_for_no_more_shared_memory_than_the_card_gives(
    spec: str, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choose, "_chip", lambda device: (room, False))
    recipe = nc.codec(spec).recipe(CPU)
    for batch, k in itertools.product((1, 3, 16), (4096, 28672, 53248, 1 << 17)):  # 28672: down_proj, 70B
        x, data = torch.empty(batch, k, dtype=torch.bfloat16), torch.empty(1, layout(recipe.format, k).row_bytes)
        cut = choose.cut_of(Guarded(x).tensor, Guarded(data.byte()).tensor, recipe, None)
        if cut is not None:  # else Triton multiplies
            assert cut.shared + (0 if spec in ("int8", "int4") else 32 << 10) < room
        elif batch > 1 or k < 30_000:
            pytest.fail(f"no cut for {batch} rows of {k}")
