"""One suite for every codec: each promise of codecs/base.py is an assertion here, whatever surrounds the call."""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

import narrowcast as nc
from cases import BLOCKED, CODECS, DTYPES, FLT_MAX, WITHOUT_ZERO, affine, block_size, mixed, same_bits, sections
from narrowcast import Codec

pytestmark = pytest.mark.ambient

SHAPES = [(), (0,), (1,), (2,), (7,), (64,), (65,), (3, 0), (0, 3), (5, 13), (2, 3, 4, 5), (1, 1, 1), (3, 129)]
SEED = 11
BAD = [float("nan"), float("inf"), float("-inf")]


def roundtrip(codec: Codec, x: Tensor) -> Tensor:
    return nc.decode(nc.encode(x, codec, seed=SEED))


# -- size -----------------------------------------------------------------------------------------------------------


def test_a_row_takes_its_codes_scales_and_zero_points_padded_to_16_bytes(codec: Codec) -> None:
    for numel in range(1100):
        *_, end = sections(codec, numel)
        assert codec.row_bytes(numel) == (end + 15) // 16 * 16
    for numel in (1, 25, 64, 129, 1000):
        assert codec.encode(mixed(numel), SEED).shape == (codec.row_bytes(numel),)


@pytest.mark.parametrize(
    ("spec", "numel", "row_bytes"),
    [
        ("raw", 1000, 4000),
        ("bf16", 1001, 2016),
        ("fp8_e4m3:scale=none", 1000, 1008),
        ("fp8_e4m3", 1024, 1024 + 8 * 4),
        ("sign", 1024, 1024 // 8 + 16 * 2),
        ("int2", 1024, 1024 // 4 + 16 * 2),
        ("int3", 1024, 1024 * 3 // 8 + 16 * 2),
        ("int4", 1000, 544),  # 500 codes, 16 scales of 2 bytes, 12 of padding
        ("int5", 1024, 1024 * 5 // 8 + 8 * 4),
        ("int6", 1024, 1024 * 6 // 8 + 8 * 4),
        ("int8", 1024, 1024 + 8 * 4),
        ("int8:zero_point=true", 2048, 2048 + 16 * 4 + 16),
        ("int8:scale=e8m0", 2048, 2048 + 16),
        ("int4:block=row", 1024, 512 + 16),
        ("apot7", 1024, 1024 * 7 // 8 + 8 * 4),
        ("nf4", 1024, 512 + 16 * 2),
    ],
)
def test_the_bytes_of_a_row_are_these(spec: str, numel: int, row_bytes: int) -> None:
    assert nc.codec(spec).row_bytes(numel) == row_bytes


def test_an_empty_row_takes_no_bytes(codec: Codec) -> None:
    assert codec.row_bytes(0) == 0


def test_bits_per_element_count_scales_and_padding(codec: Codec) -> None:
    numel = 1 << 20
    assert codec.bits_per_element() == 8 * codec.row_bytes(numel) / numel
    assert codec.bits <= codec.bits_per_element() <= codec.bits + 40 / block_size(codec, numel) + 128 / numel


def test_the_size_depends_on_numel_and_not_on_the_values_or_their_dtype(codec: Codec) -> None:
    for x in (mixed(100), torch.zeros(100), torch.full((100,), float("nan")), mixed(100, dtype=torch.float16)):
        assert codec.encode(x, SEED).numel() == codec.row_bytes(100)


# -- purity ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_inputs_are_never_changed(codec: Codec, dtype: torch.dtype, device: str) -> None:
    x = mixed(131, dtype=dtype).to(device)
    x[3], x[70] = float("nan"), float("-inf")
    before = x.clone()
    rows = codec.encode(x.view(1, -1), SEED)
    kept = rows.clone()
    codec.decode(rows, 131)
    codec.decode_sum(rows, 131, own=x)
    codec.decode_sum_encode(rows, 131, SEED, own=x)
    codec.max_error(x)
    assert same_bits(x, before)
    assert torch.equal(rows, kept)


def test_what_is_neither_code_nor_scale_nor_zero_point_is_zero(codec: Codec, device: str) -> None:
    for numel in (1, 3, 7, 25, 61, 131):
        # Both signs, and none near zero: a sign extension or a code that spills over would show.
        x = mixed(numel, seed=numel).to(device)
        row = codec.encode(x.sign() + x, SEED).cpu()
        codes, scales, _, end = sections(codec, numel)
        assert row[codes:scales].count_nonzero() == 0
        assert row[end:].count_nonzero() == 0
        used = numel * codec.bits % 8
        if used:
            assert int(row[codes - 1]) >> used == 0


def test_equal_rows_give_equal_bytes_whatever_was_in_out_before(codec: Codec, device: str) -> None:
    x = mixed(131).to(device)
    expected = codec.encode(x, SEED)
    out = torch.full_like(expected, 255)
    assert torch.equal(codec.encode(x, SEED, out=out), expected)


def test_two_threads_may_encode_and_decode_at_once(codec: Codec) -> None:
    inputs = [mixed(5000, seed=seed) for seed in range(4)]
    expected = [codec.decode(codec.encode(x, SEED), 5000) for x in inputs]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda x: codec.decode(codec.encode(x, SEED), 5000), inputs))
    assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True))


# -- the bound ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_error_keeps_the_bound(codec: Codec, dtype: torch.dtype, device: str) -> None:
    x = mixed(1300, dtype=dtype).to(device)
    bound = codec.max_error(x)
    assert bound.shape == x.shape
    assert bound.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert bool(((x.double() - roundtrip(codec, x).double()).abs() <= bound.double()).all())


def test_the_bound_is_infinite_exactly_where_a_block_is_not_finite(codec: Codec) -> None:
    size = 32 if codec.block is None else block_size(codec, 40)
    x = mixed(2 * size).view(2, size)
    x[0, 5] = float("nan")
    infinite = codec.max_error(x).isinf()
    if codec.block is None:
        assert infinite.nonzero().tolist() == [[0, 5]]
    else:
        assert infinite.all(-1).tolist() == infinite.any(-1).tolist() == [True, False]


def test_the_bound_of_nothing_is_nothing(codec: Codec) -> None:
    assert codec.max_error(torch.empty(3, 0)).shape == (3, 0)


# -- zeros ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_a_block_of_zeros_decodes_to_zeros(codec: Codec, zero: float, device: str) -> None:
    if codec.spec in WITHOUT_ZERO:
        pytest.skip("the table has no zero to decode to")
    for dtype in DTYPES:
        x = torch.full((130,), zero, dtype=dtype, device=device)
        assert torch.equal(roundtrip(codec, x), torch.zeros_like(x))


def test_a_block_of_zeros_among_others_decodes_to_zeros(codec: Codec) -> None:
    if codec.spec in WITHOUT_ZERO:
        pytest.skip("the table has no zero to decode to")
    size = 64 if codec.block is None else block_size(codec, 50)
    x = mixed(3 * size).view(3, size)
    x[1] = 0.0
    assert torch.equal(roundtrip(codec, x)[1], torch.zeros(size))


# -- not finite -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("name", BLOCKED)
def test_one_bad_element_poisons_its_block_and_no_other(name: str, bad: float, device: str) -> None:
    codec = BLOCKED[name]
    size = block_size(codec, 40)
    for dtype in DTYPES:
        clean = mixed(4 * size, dtype=dtype).view(4, size).to(device)
        expected = roundtrip(codec, clean)
        for place in (0, size // 2, size - 1):
            x = clean.clone()
            x[2, place] = bad
            found = roundtrip(codec, x)
            assert bool(found[2].isnan().all())
            keep = [0, 1, 3]
            assert same_bits(found[keep], expected[keep])


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("name", [name for name, codec in BLOCKED.items() if codec.block != "row"])
def test_a_short_last_block_is_poisoned_to_its_end(name: str, bad: float) -> None:
    codec = BLOCKED[name]
    size = block_size(codec, 0)
    x = mixed(size + 3)
    x[size + 1] = bad
    assert roundtrip(codec, x).isnan().tolist() == [False] * size + [True] * 3


@pytest.mark.parametrize("spec", ["raw", "fp16", "bf16", "fp8_e4m3:scale=none", "fp8_e5m2:scale=none"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_cast_keeps_infinity_and_nan_in_their_places(spec: str, dtype: torch.dtype, device: str) -> None:
    nan, inf = float("nan"), float("inf")
    x = torch.tensor([1.0, inf, -2.0, -inf, nan, 0.0], dtype=dtype, device=device)
    infinity = nan if spec == "fp8_e4m3:scale=none" else inf  # e4m3 has no infinity
    expected = torch.tensor([1.0, infinity, -2.0, -infinity, nan, 0.0], dtype=dtype, device=device)
    assert torch.allclose(roundtrip(nc.codec(spec), x), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("spec", "top"),
    [
        ("raw", FLT_MAX),
        ("fp16", 65504.0),
        ("bf16", 3.3895313892515355e38),
        ("fp8_e4m3:scale=none", 448.0),
        ("fp8_e5m2:scale=none", 57344.0),
    ],
)
def test_a_cast_saturates_finite_values(spec: str, top: float, device: str) -> None:
    x = torch.tensor([FLT_MAX, -FLT_MAX, top, -top], device=device)
    assert roundtrip(nc.codec(spec), x).tolist() == [top, -top, top, -top]
    beyond = torch.tensor([1e300, -1e300], dtype=torch.float64, device=device)
    assert roundtrip(nc.codec(spec), beyond).tolist() == [top, -top]


def test_raw_keeps_every_bit_even_of_nans(device: str) -> None:
    patterns = torch.tensor([0x7F800001, 0x7FC00000, 0x7FFFFFFF, 1, 0, 0x7F7FFFFF, -1, -(2**31)], dtype=torch.int32)
    x = patterns.view(torch.float32).to(device)
    assert same_bits(roundtrip(nc.codec("raw"), x), x)


def test_every_decoded_nan_has_one_bit_pattern(codec: Codec, device: str) -> None:
    if codec.name == "raw":
        pytest.skip("raw keeps the bits it was given")
    x = torch.tensor([0x7F800001, -1, 0x7FFFFFFF, 0x7FC00000], dtype=torch.int32, device=device).view(torch.float32)
    assert (roundtrip(codec, x).view(torch.int32) == 0x7FC00000).all()
    assert torch.equal(codec.encode(x, SEED), codec.encode(torch.full_like(x, float("nan")), SEED))


# -- any tensor -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_shape_dtype_and_device_come_back(codec: Codec, dtype: torch.dtype, device: str) -> None:
    for shape in SHAPES:
        x = mixed(int(torch.Size(shape).numel()), dtype=dtype).view(shape).to(device)
        payload = nc.encode(x, codec, seed=SEED)
        y = nc.decode(payload)
        assert (payload.shape, payload.dtype, payload.device, payload.codec) == (x.shape, dtype, x.device, codec)
        assert (y.shape, y.dtype, y.device, y.is_contiguous()) == (x.shape, dtype, x.device, True)
        assert bool(((x.double() - y.double()).abs() <= codec.max_error(x).double()).all())


def test_shape_does_not_matter_to_the_bytes_unless_rows_are_blocks(codec: Codec) -> None:
    x = mixed(6 * 35)
    whole, matrix = nc.encode(x, codec, seed=SEED).data, nc.encode(x.view(6, 35), codec, seed=SEED).data
    if codec.block == "row":
        assert torch.equal(matrix.view(6, -1), codec.encode(x.view(6, 35), SEED))
        assert matrix.numel() == 6 * codec.row_bytes(35)
    else:
        assert torch.equal(matrix, whole)


def layouts_of(x: Tensor) -> dict[str, Tensor]:
    """The same 24 x 35 values behind other strides, offsets and views."""
    padded = torch.zeros(x.numel() + 1, dtype=x.dtype, device=x.device)
    padded[1:] = x.flatten()
    wide = torch.zeros(24, 70, dtype=x.dtype, device=x.device)
    wide[:, ::2] = x
    tall = torch.zeros(30, 40, dtype=x.dtype, device=x.device)
    tall[3:27, 2:37] = x
    views = {
        "transposed": x.t().contiguous().t(),
        "strided": wide[:, ::2],
        "cut": tall[3:27, 2:37],
        "misaligned": padded[1:].view(24, 35),
        "channels last": x.view(1, 24, 5, 7).contiguous(memory_format=torch.channels_last).view(24, 35),
    }
    if x.dtype == torch.float32:
        views["negative"] = torch.complex(torch.zeros_like(x), -x).conj().imag
        assert views["negative"].is_neg()
    return views


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_strides_and_offsets_do_not_matter_to_the_bytes(codec: Codec, dtype: torch.dtype, device: str) -> None:
    x = mixed(24 * 35, dtype=dtype).view(24, 35).to(device)
    expected, rows = nc.encode(x, codec, seed=SEED).data, codec.encode(x, SEED)
    for name, view in layouts_of(x).items():
        assert torch.equal(view, x), name
        assert torch.equal(nc.encode(view, codec, seed=SEED).data, expected), name
        assert torch.equal(codec.encode(view, SEED), rows), name
        assert torch.equal(codec.max_error(view), codec.max_error(x)), name


def test_an_expanded_tensor_encodes_as_its_copy(codec: Codec, device: str) -> None:
    x = mixed(40).to(device).expand(3, 40)
    assert torch.equal(codec.encode(x, SEED), codec.encode(x.contiguous(), SEED))


@pytest.mark.parametrize("offset", [1, 2])
def test_bytes_may_lie_anywhere_in_memory(codec: Codec, offset: int, device: str) -> None:
    x = mixed(131).to(device)
    row = codec.encode(x, SEED)
    buffer = torch.zeros(row.numel() + offset, dtype=torch.uint8, device=device)
    placed = buffer[offset:]
    placed.copy_(row)
    expected = codec.decode(row, 131)
    assert same_bits(codec.decode(placed, 131), expected)
    assert same_bits(codec.decode_sum(placed.view(1, -1), 131), expected.where(~expected.isnan(), float("nan")))
    assert torch.equal(codec.decode_sum_encode(placed.view(1, -1), 131, SEED), codec.encode(expected, SEED))
    placed.zero_()
    assert torch.equal(codec.encode(x, SEED, out=placed), row)
    assert torch.equal(buffer[:offset], torch.zeros(offset, dtype=torch.uint8, device=device))


def test_strides_of_encoded_rows_do_not_matter(codec: Codec, device: str) -> None:
    rows = codec.encode(mixed(4 * 75).view(4, 75).to(device), SEED)
    strided = torch.zeros(8, rows.shape[1] + 3, dtype=torch.uint8, device=device)[::2, 3:]
    strided.copy_(rows)
    for view in (strided, rows.t().contiguous().t()):
        assert not view.is_contiguous() or rows.shape[1] == 1
        assert same_bits(codec.decode(view, 75), codec.decode(rows, 75))
        assert same_bits(codec.decode_sum(view, 75), codec.decode_sum(rows, 75))
        assert torch.equal(codec.decode_sum_encode(view, 75, SEED), codec.decode_sum_encode(rows, 75, SEED))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_inputs_encode_as_the_fp32_numbers_they_are(codec: Codec, dtype: torch.dtype, device: str) -> None:
    x = mixed(300, dtype=dtype).to(device)
    assert torch.equal(codec.encode(x, SEED), codec.encode(x.float(), SEED))


def test_fp64_encodes_as_the_nearest_fp32(codec: Codec, device: str) -> None:
    x = mixed(300, dtype=torch.float64).to(device)
    assert not torch.equal(x, x.float().double())
    assert torch.equal(codec.encode(x, SEED), codec.encode(x.float(), SEED))


def test_decoding_rounds_the_fp32_result_to_the_dtype_asked_for(codec: Codec, device: str) -> None:
    x = mixed(300).to(device)
    x[:64] *= 1e5  # beyond fp16: must saturate there, as every finite value does
    row = codec.encode(x, SEED)
    exact = codec.decode(row, 300)
    for dtype in DTYPES:
        top = torch.finfo(dtype).max
        assert same_bits(codec.decode(row, 300, dtype), exact.double().clamp(-top, top).float().to(dtype))


def test_a_tensor_that_requires_grad_is_encoded_by_value(codec: Codec) -> None:
    x = mixed(40)
    y = roundtrip(codec, x.clone().requires_grad_())
    assert not y.requires_grad
    assert same_bits(y, roundtrip(codec, x))


# -- out= -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_decode_writes_into_out_and_returns_it(codec: Codec, dtype: torch.dtype, device: str) -> None:
    x = mixed(6 * 35).view(6, 35).to(device)
    payload = nc.encode(x, codec, seed=SEED)
    expected = nc.decode(payload, dtype=dtype)
    for out in layouts_of_out(dtype, device).values():
        assert nc.decode(payload, out=out) is out
        assert same_bits(out, expected)


def layouts_of_out(dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    def fresh(*shape: int) -> Tensor:
        return torch.full(shape, 7.0, dtype=dtype, device=device)

    return {
        "contiguous": fresh(6, 35),
        "transposed": fresh(35, 6).t(),
        "strided": fresh(6, 70)[:, ::2],
        "misaligned": fresh(6 * 35 + 1)[1:].view(6, 35),
    }


@pytest.mark.parametrize("spec", ["raw", "bf16", "int4", "nf4"])
def test_negated_views_are_read_and_written_as_the_numbers_they_show(spec: str, device: str) -> None:
    codec = nc.codec(spec)
    row = codec.encode(mixed(61).to(device), SEED)
    assert torch.equal(codec.encode(torch._neg_view(-mixed(61).to(device)), SEED), row)
    out = torch._neg_view(torch.zeros(61, device=device))
    codec.decode(row, 61, out=out)
    assert torch.equal(out, codec.decode(row, 61))


def test_decode_leaves_the_memory_around_out_alone(codec: Codec, device: str) -> None:
    row = codec.encode(mixed(61).to(device), SEED)
    around = torch.full((63,), 7.0, device=device)
    codec.decode(row, 61, out=around[1:62])
    assert around[[0, 62]].tolist() == [7.0, 7.0]


def test_encode_writes_into_out_and_returns_it(codec: Codec, device: str) -> None:
    x = mixed(2 * 3 * 35).view(2, 3, 35).to(device)
    expected = codec.encode(x, SEED)
    width = expected.shape[-1]
    contiguous = torch.full((2, 3, width), 255, dtype=torch.uint8, device=device)
    strided = torch.full((2, 3, 2 * width), 255, dtype=torch.uint8, device=device)[..., ::2]
    for out in (contiguous, strided):
        assert codec.encode(x, SEED, out=out) is out
        assert torch.equal(out, expected)


def test_sums_write_into_out_and_return_it(codec: Codec, device: str) -> None:
    rows = codec.encode(mixed(3 * 35).view(3, 35).to(device), SEED)
    out, strided = torch.empty(35, device=device), torch.empty(70, device=device)[::2]
    assert codec.decode_sum(rows, 35, out=out) is out
    assert same_bits(out, codec.decode_sum(rows, 35))
    assert codec.decode_sum(rows, 35, out=strided) is strided
    assert same_bits(strided, out)
    data = torch.full((rows.shape[1],), 255, dtype=torch.uint8, device=device)
    assert codec.decode_sum_encode(rows, 35, SEED, out=data) is data
    assert torch.equal(data, codec.decode_sum_encode(rows, 35, SEED))


def test_every_operation_takes_empty_rows_with_and_without_out(codec: Codec, device: str) -> None:
    floats = torch.empty(3, 0, device=device)
    data = torch.empty(3, 0, dtype=torch.uint8, device=device)
    assert codec.encode(floats, SEED).shape == codec.decode(data, 0).shape == (3, 0)
    assert codec.decode_sum(data, 0).shape == codec.decode_sum_encode(data, 0, SEED).shape == (0,)
    assert codec.encode(floats, SEED, out=data) is data
    assert codec.decode(data, 0, out=floats) is floats
    assert codec.decode_sum(data, 0, out=floats[0]).shape == (0,)
    assert codec.decode_sum_encode(data, 0, SEED, out=data[0]).shape == (0,)


def test_no_rows_give_no_rows(codec: Codec, device: str) -> None:
    floats = torch.empty(0, 40, device=device)
    data = torch.empty(0, codec.row_bytes(40), dtype=torch.uint8, device=device)
    assert codec.encode(floats, SEED).shape == data.shape
    assert codec.decode(data, 40).shape == floats.shape
    assert codec.encode(floats, SEED, out=data) is data
    assert codec.decode(data, 40, out=floats) is floats


# -- rows -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("numel", [1, 64, 75])
def test_leading_dimensions_count_rows(codec: Codec, numel: int, device: str) -> None:
    x = mixed(6 * numel).view(2, 3, numel).to(device)
    rows = codec.encode(x, SEED)
    assert rows.shape == (2, 3, codec.row_bytes(numel))
    assert torch.equal(rows.view(6, -1), codec.encode(x.view(6, numel), SEED))
    assert codec.decode(rows, numel).shape == x.shape
    for i in range(6):
        row = rows.view(6, -1)[i]
        assert same_bits(codec.decode(rows, numel).view(6, -1)[i], codec.decode(row, numel))
        if i == 0 or not codec.stochastic:  # stochastic rounding draws anew for each row
            assert torch.equal(row, codec.encode(x.view(6, numel)[i], SEED))


def test_blocks_do_not_see_each_other(codec: Codec) -> None:
    if codec.block == "row" or codec.stochastic:
        pytest.skip("a row is one block, or the draws depend on the place in the row")
    size = 8 if codec.block is None else block_size(codec, 0)
    x = mixed(3 * size)
    y = codec.decode(codec.encode(x), 3 * size)
    for part in range(3):
        cut = x[part * size : (part + 1) * size]
        assert same_bits(codec.decode(codec.encode(cut), size), y[part * size : (part + 1) * size])


# -- sums -----------------------------------------------------------------------------------------------------------


def sum_in_order(terms: list[Tensor]) -> Tensor:
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def test_decode_sum_is_the_fp32_sum_of_the_rows_in_order(codec: Codec, device: str) -> None:
    for ranks in (1, 2, 3, 5, 8):
        rows = codec.encode(mixed(ranks * 150, seed=ranks).view(ranks, 150).to(device), SEED)
        terms = list(codec.decode(rows, 150))
        assert same_bits(codec.decode_sum(rows, 150), sum_in_order(terms))


def test_own_stands_exact_in_its_place_and_its_row_is_not_read(codec: Codec, device: str) -> None:
    rows = codec.encode(mixed(3 * 150).view(3, 150).to(device), SEED)
    terms = list(codec.decode(rows, 150))
    for rank, dtype in ((0, torch.float32), (1, torch.float16), (2, torch.bfloat16), (1, torch.float64)):
        own = mixed(150, seed=5, dtype=dtype).to(device)
        garbled = rows.clone()
        garbled[rank] = 255
        expected = sum_in_order([*terms[:rank], own.float(), *terms[rank + 1 :]])
        assert same_bits(codec.decode_sum(garbled, 150, own=own, own_rank=rank), expected)


def test_the_sum_is_divided_once_at_the_end(codec: Codec, device: str) -> None:
    rows = codec.encode(mixed(3 * 150).view(3, 150).to(device), SEED)
    total = sum_in_order(list(codec.decode(rows, 150)))
    for divisor in (2, 3, 7, 1000):
        expected = total / torch.tensor(float(divisor), device=device)
        assert same_bits(codec.decode_sum(rows, 150, divisor=divisor), expected)


def test_a_sum_is_rounded_to_its_dtype_once(codec: Codec, device: str) -> None:
    rows = codec.encode(mixed(3 * 150).view(3, 150).to(device) * 3e3, SEED)
    for dtype in DTYPES:
        top = torch.finfo(dtype).max
        expected = codec.decode_sum(rows, 150).double().clamp(-top, top).float().to(dtype)
        assert same_bits(codec.decode_sum(rows, 150, dtype), expected)


def test_a_poisoned_rank_poisons_its_block_of_the_sum(codec: Codec, device: str) -> None:
    x = mixed(3 * 40).view(3, 40).to(device)
    x[1, 0] = float("nan")
    rows = codec.encode(x, SEED)
    expected = codec.decode(rows, 40)[1].isnan()
    assert bool(expected[0])
    assert torch.equal(codec.decode_sum(rows, 40).isnan(), expected)


def test_a_sum_that_overflows_is_infinite_and_its_block_then_poisoned(device: str) -> None:
    codec = nc.codec("bf16")
    rows = codec.encode(torch.tensor([[3e38, 1.0], [3e38, 2.0]], device=device))
    assert codec.decode_sum(rows, 2).tolist() == [float("inf"), 3.0]
    blocked = nc.codec("int8")
    rows = blocked.encode(torch.full((2, 4), 3e38, device=device))
    assert bool(blocked.decode(blocked.decode_sum_encode(rows, 4), 4).isnan().all())


@pytest.mark.parametrize(("ranks", "numel"), [(1, 64), (2, 1), (5, 150)])
def test_decode_sum_encode_is_decode_sum_then_encode(codec: Codec, ranks: int, numel: int, device: str) -> None:
    x = mixed(ranks * numel, seed=ranks).view(ranks, numel).to(device)
    own = mixed(numel, seed=99).to(device)
    rows = codec.encode(x, SEED)
    for mine, divisor in ((None, 1), (own, 1), (own, ranks), (None, 3)):
        total = codec.decode_sum(rows, numel, own=mine, own_rank=ranks - 1, divisor=divisor)
        fused = codec.decode_sum_encode(rows, numel, 5, own=mine, own_rank=ranks - 1, divisor=divisor)
        assert torch.equal(fused, codec.encode(total, 5))


# -- names ----------------------------------------------------------------------------------------------------------


def test_a_codec_comes_back_from_its_spec_its_config_a_pickle_and_a_copy(codec: Codec) -> None:
    twins = [
        nc.codec(codec.spec),
        nc.codec(codec.config()),
        pickle.loads(pickle.dumps(codec)),
        copy.copy(codec),
        copy.deepcopy(codec),
    ]
    x = mixed(131)
    for twin in twins:
        assert twin == codec
        assert hash(twin) == hash(codec)
        assert (type(twin), twin.spec, twin.config()) == (type(codec), codec.spec, codec.config())
        assert torch.equal(twin.encode(x, SEED), codec.encode(x, SEED))
    assert nc.codec(codec) is codec
    assert str(codec) == codec.spec
    assert repr(codec) == f"codec({codec.spec!r})"


def test_codecs_are_equal_only_to_themselves() -> None:
    specs = [codec.spec for codec in CODECS.values()]
    assert len(set(specs)) == len(specs)
    codecs = list(CODECS.values())
    assert all((a == b) == (i == j) for i, a in enumerate(codecs) for j, b in enumerate(codecs))
    assert codecs[0] != codecs[0].spec


def test_the_properties_of_a_codec_are_those_of_its_spec(codec: Codec) -> None:
    config = codec.config()
    assert codec.stochastic == config.get("stochastic", False)
    if "block" in config:
        assert codec.block == config["block"]
    assert affine(codec) == (codec.row_bytes(1) > 0 and codec.format.affine)


# -- encoding what was decoded ------------------------------------------------------------------------------------

IDEMPOTENT = [
    # A plain cast gives numbers of its own format, and a number of the format rounds to itself.
    *["raw", "fp16", "bf16", "fp8_e4m3:scale=none", "fp8_e5m2:scale=none"],
    # Every element is plus or minus one stored scale: their mean, n * s / n, is exact in fp64 for n < 2**29.
    *["sign", "sign:block=8", "sign:block=24,scale=fp32", "sign:block=512,scale=fp16", "sign:block=row,scale=e8m0"],
    # intN with a signed scale: the largest element has the code -2**(N-1) as long as rounding the scale up (by at
    # most 2**-7 in bf16, 2**-10 in fp16) moves it by less than half a step, so it decodes to a power of two times
    # the scale, and the same scale is chosen again. N <= 6 with bf16; any N with fp32 or fp16.
    *["int2", "int3", "int4", "int5", "int6", "int8", "int8:block=8", "int8:block=row", "int8:scale=fp16"],
    *["int4:block=32,scale=fp32", "int4:block=row", "int5:scale=bf16", "int6:block=24,scale=fp16"],
    # Tables whose ends are plus and minus a power of two, with no other level within 2**-7 of them: as for intN.
    *["nf4", "nf4:block=24,scale=fp32", "pot2", "pot3", "pot4", "pot5", "apot2", "apot3"],
    "levels:table=-1.0|0.0|1.0",
]


@pytest.mark.parametrize("spec", IDEMPOTENT)
def test_encoding_what_was_decoded_gives_the_same_bytes(spec: str, device: str) -> None:
    codec = nc.codec(spec)
    size = 32 if codec.block is None else block_size(codec, 40)
    # Normal scales only: below FLT_MIN (2**-14 for fp16) the scale no longer follows the block.
    x = torch.randn(40, size, generator=torch.Generator().manual_seed(3)).to(device)
    x = x * 2.0 ** torch.arange(-6, 14, 0.5, device=device).unsqueeze(1)
    x[7] = 0.0
    x[11, 3] = float("nan")
    row = nc.encode(x, codec)
    again = nc.encode(nc.decode(row), codec)
    assert torch.equal(again.data, row.data)
