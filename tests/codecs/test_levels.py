"""Tables of levels: the published grids, and the nearest level in exact arithmetic."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import pytest
import torch

import narrowcast as nc
from cases import CODECS, kernels, mixed
from narrowcast.codecs import APoT, Levels, PoT, apot_levels
from narrowcast.errors import SpecError
from narrowcast.kernels import reference

# Unsigned grids of additive powers of two with k = 2, as integers (arXiv 1909.13144, section 2.2 and FACTS.md 2).
GRID = {
    1: [0, 1],
    2: [0, 1, 2, 4],
    3: [0, 1, 2, 3, 4, 6, 8, 10],
}
MAXIMA = {2: 4, 3: 10, 4: 48, 5: 100, 6: 448}


def paper_grid(bits: int, k: int) -> list[Fraction]:
    """Equation 5 of the paper, for k that divides bits: n = bits / k terms, term i from {0, 2^-i, 2^-(i+n), ...}."""
    n = bits // k
    assert n * k == bits
    terms = [[Fraction(0)] + [Fraction(1, 2 ** (i + j * n)) for j in range(2**k - 1)] for i in range(n)]
    return sorted(sum(choice) for choice in itertools.product(*terms))


def as_fractions(levels: torch.Tensor) -> list[Fraction]:
    return [Fraction(level) for level in levels.tolist()]


def signed(grid: list[Fraction]) -> list[Fraction]:
    return sorted({-level for level in grid} | set(grid))


# -- grids ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("width", "grid"), GRID.items())
def test_apot_levels_are_these_integers(width: int, grid: list[int]) -> None:
    assert nc.codec(f"apot{width + 1}").levels.tolist() == [-level for level in grid[:0:-1]] + grid


@pytest.mark.parametrize(("width", "top"), MAXIMA.items())
def test_apot_levels_are_integers_with_the_published_maximum(width: int, top: int) -> None:
    levels = nc.codec(f"apot{width + 1}").levels.tolist()
    assert all(level == int(level) for level in levels)
    assert (levels[0], levels[-1]) == (-top, top)
    assert math.gcd(*(int(level) for level in levels)) == 1


@pytest.mark.parametrize("bits", range(2, 9))
def test_signed_apot_has_one_level_fewer_than_codes_and_mirrors_around_zero(bits: int) -> None:
    levels = nc.codec(f"apot{bits}").levels
    assert len(levels) == 2**bits - 1
    assert torch.equal(levels, -levels.flip(0))
    assert nc.codec("apot4").levels.numel() == 15


@pytest.mark.parametrize(
    ("bits", "k"), [(2, 1), (2, 2), (3, 1), (4, 1), (4, 2), (4, 4), (6, 2), (6, 3), (8, 2), (8, 4)]
)
def test_unsigned_levels_are_equation_5_of_the_paper(bits: int, k: int) -> None:
    grid = paper_grid(bits, k)
    found = apot_levels(bits, k, signed=False)
    assert found.dtype == torch.float64
    assert len(found) == 2**bits
    # The quotient by the largest level is rounded once, to fp64.
    assert found.tolist() == [float(level / grid[-1]) for level in grid]


@pytest.mark.parametrize(("bits", "k"), [(3, 2), (5, 2), (5, 4), (7, 2), (7, 3), (4, 3), (4, 1), (8, 1)])
def test_signed_levels_are_equation_5_with_a_sign_bit(bits: int, k: int) -> None:
    grid = paper_grid(bits - 1, k)
    assert apot_levels(bits, k).tolist() == [float(level / grid[-1]) for level in signed(grid)]


def test_an_odd_width_is_split_as_the_paper_splits_it() -> None:
    half, quarter, sixteenth, eighth = (Fraction(1, n) for n in (2, 4, 16, 8))
    grid = sorted(a + b for a in (0, half, quarter, sixteenth) for b in (0, eighth))
    assert apot_levels(4).tolist() == [float(level / grid[-1]) for level in signed(grid)]


@pytest.mark.parametrize("bits", range(2, 9))
def test_k_of_1_is_uniform(bits: int) -> None:
    top = 2 ** (bits - 1) - 1
    assert nc.codec(f"apot{bits}:k=1").levels.tolist() == list(range(-top, top + 1))
    assert apot_levels(bits, 1, signed=False).tolist() == [i / (2**bits - 1) for i in range(2**bits)]


@pytest.mark.parametrize("bits", range(2, 9))
def test_k_of_all_bits_is_powers_of_two(bits: int) -> None:
    powers = [2.0**-i for i in range(2 ** (bits - 1) - 1)]
    assert apot_levels(bits, bits).tolist() == sorted([0.0, *powers, *(-p for p in powers)])


@pytest.mark.parametrize("bits", range(2, 6))
def test_pot_is_apot_with_one_term(bits: int) -> None:
    levels = nc.codec(f"pot{bits}").levels
    assert torch.equal(levels, APoT(bits, k=bits).levels)
    positive = levels[levels > 0]
    assert torch.equal(positive[1:], 2 * positive[:-1])
    assert len(positive) == 2 ** (bits - 1) - 1
    assert PoT(bits) == nc.codec(f"pot{bits}")


def test_nf4_is_the_published_table() -> None:
    # QLoRA, appendix E; bitsandbytes functional.py has the same sixteen numbers.
    published = [
        *[-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635],
        *[-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725],
        *[0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0],
    ]
    assert nc.codec("nf4").levels.tolist() == published


def test_levels_are_a_copy_that_a_caller_may_change() -> None:
    codec = nc.codec("nf4")
    codec.levels.zero_()
    assert codec.levels[0] == -1.0


# -- the nearest level ----------------------------------------------------------------------------------------------

TABLES = {name: codec for name, codec in CODECS.items() if isinstance(codec, Levels)}


def codes_of(codec: nc.Codec, y: torch.Tensor) -> torch.Tensor:
    """The code of each y at a scale of exactly 1: a block holds y and, at its end, the peak of the table."""
    unit = Levels(codec.levels, block=8, scale="fp32")
    peak = float(codec.levels[codec.levels.abs().argmax()])
    blocks = torch.full((y.numel(), 8), peak)
    blocks[:, 0] = y
    decoded = nc.decode(nc.encode(blocks, unit))
    assert bool((decoded[:, 1:] == peak).all())
    return torch.searchsorted(codec.levels, decoded[:, 0].contiguous())


def nearest(y: float, levels: list[Fraction]) -> int:
    """The place of the nearest level, the lower of two that are equally near: by trying all, in exact arithmetic."""
    distances = [abs(Fraction(y) - level) for level in levels]
    return distances.index(min(distances))


def power_of_two_peak(codec: Levels) -> bool:
    # Then peak * fl(1 / peak) is exactly 1 and so the scale; else it may be an ulp beside it.
    peak = float(codec.levels.abs().max())
    return math.frexp(peak)[0] == 0.5


@pytest.mark.parametrize("name", [name for name, codec in TABLES.items() if power_of_two_peak(codec)])
def test_every_element_goes_to_the_nearest_level_and_ties_to_the_lower(name: str) -> None:
    codec = TABLES[name]
    levels = as_fractions(codec.levels)
    middles = torch.tensor([float((a + b) / 2) for a, b in itertools.pairwise(levels)])
    infinity = torch.tensor(math.inf)
    peak = float(codec.levels.abs().max())
    random = (torch.rand(300, generator=torch.Generator().manual_seed(2)) * 2 - 1) * peak
    near = [middles, torch.nextafter(middles, infinity), torch.nextafter(middles, -infinity), codec.levels, random]
    y = torch.cat([part[::3] if len(part) > 200 else part for part in near]).clamp(-peak, peak)
    assert codes_of(codec, y).tolist() == [nearest(value, levels) for value in y.tolist()]


@pytest.mark.parametrize("name", TABLES)
def test_thresholds_are_exact(name: str) -> None:
    # The kernels compare with one fp32 number per pair of levels: the largest that is not above the midpoint.
    codec = TABLES[name]
    levels = as_fractions(codec.levels)
    table = codec._table(torch.device("cpu"))
    assert table.shape == (2, 2**codec.bits)
    for i, (lower, upper) in enumerate(itertools.pairwise(levels)):
        threshold = table[1, i]
        middle = (lower + upper) / 2
        assert (
            Fraction(threshold.item()) <= middle < Fraction(torch.nextafter(threshold, torch.tensor(math.inf)).item())
        )
    assert bool(table[0, len(levels) :].isnan().all())
    assert bool(table[1, len(levels) - 1 :].isposinf().all())


def test_a_midpoint_that_fp32_cannot_hold_is_still_a_midpoint() -> None:
    lower, upper = 1.0, 1.0 + 2.0**-23  # neighbours in fp32: nothing lies between, the lower is its own side
    codec = Levels([0.0, lower, upper, 2.0], block=8, scale="fp32")
    x = torch.tensor([lower, upper, 2.0, 0.0, 0.5, 0.50000006, 1.5, 1.5000002])
    assert nc.decode(nc.encode(x, codec)).tolist() == [lower, upper, 2.0, 0.0, 0.0, lower, upper, 2.0]


def test_negative_elements_go_to_the_lowest_level_of_a_non_negative_table() -> None:
    codec = Levels([0.0, 0.5, 1.0], scale="fp32")
    assert nc.decode(nc.encode(torch.tensor([-1.0, -0.1, 0.2, 0.3, 1.0]), codec)).tolist() == [0, 0, 0, 0.5, 1.0]


def test_a_block_is_scaled_by_its_largest_magnitude_to_the_tables() -> None:
    codec = Levels([-1.0, 0.0, 4.0], block=8, scale="fp32")
    # |-8| is the largest magnitude and 4 the table's: scale 2. So -8 is clipped to -1 * 2.
    assert nc.decode(nc.encode(torch.tensor([-8.0, 3.0, 5.0, 0.5]), codec)).tolist() == [-2.0, 0.0, 8.0, 0.0]


# -- a user's own table ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "bits"), [(2, 1), (3, 2), (4, 2), (5, 3), (16, 4), (17, 5), (128, 7), (129, 8), (256, 8)]
)
def test_a_table_takes_the_fewest_bits_that_count_its_levels(count: int, bits: int) -> None:
    codec = Levels([i / 256 for i in range(count)])
    assert codec.bits == bits
    assert len(codec.levels) == count
    y = nc.decode(nc.encode(mixed(200).abs(), codec))
    assert bool(y.isfinite().all())


def test_a_table_may_be_a_list_a_tuple_a_tensor_or_a_spec() -> None:
    made = [
        Levels([-1, 0, 1]),
        Levels((-1.0, 0.0, 1.0)),
        Levels(torch.tensor([-1, 0, 1])),
        nc.codec("levels:table=-1|0|1"),
        nc.codec({"name": "levels", "table": [-1, 0, 1]}),
    ]
    assert len(set(made)) == 1
    assert made[0].spec == "levels:table=-1.0|0.0|1.0"


def test_levels_are_rounded_to_fp32_before_anything_else() -> None:
    codec = Levels([0.0, 0.1])
    assert codec.levels.tolist() == [0.0, torch.tensor(0.1).item()]
    assert nc.codec(codec.spec) == codec


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ([], "needs 2 to 256 levels, has 0"),
        ([1.0], "needs 2 to 256 levels, has 1"),
        ([float(i) for i in range(257)], "needs 2 to 256 levels, has 257"),
        ([0.0, math.nan], "must be finite"),
        ([0.0, math.inf], "must be finite"),
        ([-math.inf, 0.0], "must be finite"),
        ([1.0, 0.0], r"1.0 comes before 0.0.*sorted\(set\(table\)\)"),
        ([0.0, 1.0, 1.0], r"1.0 comes before 1.0.*sorted\(set\(table\)\)"),
        ([-0.0, 0.0], "ascend without repeats"),
        ([1.0, 1.0 + 2.0**-30], "ascend without repeats in fp32"),
        ([0.0, 1e-6], r"1e-06|9.99999.*divide the table by its largest magnitude"),
        ([0.0, 1e6], "1000000.0.*divide the table by its largest magnitude"),
        ([-1e39, 0.0, 1.0], "largest magnitude"),
        ("abc", "table"),
        (None, "table"),
        ([1.0, "x"], "table"),
        ([1.0, 2j], "table"),
    ],
    ids=str,
)
def test_a_table_that_cannot_be_is_refused(table: object, words: str) -> None:
    with pytest.raises(SpecError, match=words) as caught:
        Levels(table)  # type: ignore[arg-type]
    assert "levels" in str(caught.value)


@pytest.mark.parametrize("bits", [1, 9, 0, -4, 2.5, "4"])
def test_apot_levels_of_impossible_widths_are_refused(bits: object) -> None:
    with pytest.raises(SpecError, match=r"bits=.*2 to 8"):
        apot_levels(bits)  # type: ignore[arg-type]


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("k", [*range(-1, 10), True, 1.5, "two"], ids=repr)
def test_k_makes_a_grid_or_an_error_that_lists_those_that_do(bits: int, k: object) -> None:
    """The error may not offer a k that is itself refused."""
    refusal = ""
    try:
        codec = nc.codec({"name": f"apot{bits}", "k": k})
    except SpecError as error:
        refusal = str(error)
    if not refusal:
        assert len(codec.levels) == 2**bits - 1
        return
    assert f"k={k!r}" in refusal
    offered = refusal.split("k = ")[1].split(" (")[0].split(", ")
    assert str(k) not in offered
    assert all(nc.codec(f"apot{bits}:k={choice}").bits == bits for choice in offered)


@pytest.mark.parametrize("table", [[-1.0, 1.0], [-3.0, -1.0, 1.0, 3.0]])
def test_what_vanishes_over_the_scale_is_on_the_lower_side_of_a_threshold_at_zero(
    table: list[float], device: str
) -> None:
    codec = Levels(table, block="row", scale="fp32")
    row = torch.zeros(1, 128)
    row[0, 0], row[0, 1:] = 2.0 * table[-1], 2.0**-149
    recipe = codec.recipe(torch.device("cpu"))
    for kernel in kernels(device).values():
        out = torch.zeros(1, codec.row_bytes(128), dtype=torch.uint8, device=device)
        kernel.encode(out, row.to(device), codec.recipe(torch.device(device)), 0)
        assert torch.equal(out.cpu(), reference.encode(row, recipe, 0))
