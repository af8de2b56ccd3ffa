"""x W^T + b in tiles of decoded rows (AVX-512, AMX): right for all formats and batches, whatever is beside it."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import narrowcast as nc
from cases import same_bits
from narrowcast.codecs import Codec
from narrowcast.kernels.cpu import batches, binding

CPU = torch.device("cpu")
ROUNDING = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
SMALLEST = {torch.float32: 2.0**-149, torch.float16: 2.0**-24, torch.bfloat16: 2.0**-133}
INTEGERS = ("int8", "int8:block=row", "int8:block=32", "int8:scale=e8m0", "int4", "int4:block=128", "int4:block=640")
TABLES = ("nf4", "apot4", "apot8", "fp8_e4m3", "fp8_e5m2:block=32")
RARER = ("int4:zero_point=true", "int8:zero_point=true", "int6", "int3", "int2", "sign")
SPECS = (*INTEGERS, *TABLES, *RARER)
MANY = 48
"""Vectors of bf16 from which on weights are scaled before they are rounded: MANY_VECTORS of core/tile_x.h. In matrix
registers they always are."""
WAYS = {"vectors": (torch.float32, torch.float16, torch.bfloat16), "matrix": (torch.bfloat16,)}
NEVER = 1 << 30

each_way = pytest.mark.parametrize("way", WAYS)
each_dtype = pytest.mark.parametrize(("way", "dtype"), [(way, dtype) for way in WAYS for dtype in WAYS[way]])
each_wide_dtype = pytest.mark.parametrize(
    ("way", "dtype"), [("vectors", torch.float32), ("vectors", torch.bfloat16), ("matrix", torch.bfloat16)]
)


def has_amx() -> bool:
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.exists() and {"amx_tile", "amx_bf16"} <= set(cpuinfo.read_text().split())


@pytest.fixture
def kernel(way: str) -> binding.Native:
    """Tiles for every batch, and one way alone."""
    loaded, why = binding.load()
    assert loaded is not None, why
    if loaded.name != "native/avx512":
        pytest.skip("tiles are for AVX-512")
    if way == "matrix" and not has_amx():
        pytest.skip("this CPU has no AMX")
    loaded.tiles_from = dict.fromkeys(batches.TILES_FROM, NEVER if way == "matrix" else 1)
    loaded.max_batch = dict.fromkeys(batches.MAX_BATCH, 0)
    loaded.matrix_from = 1 if way == "matrix" else NEVER
    return loaded


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def multiplied(kernel: binding.Native, codec: Codec, x: Tensor, data: Tensor, bias: Tensor | None = None) -> Tensor:
    out = torch.full((len(x), len(data)), 7.0, dtype=x.dtype)
    assert kernel.linear(out, x, data, codec.recipe(CPU), bias), codec.spec
    return out


def limits(codec: Codec, x: Tensor, data: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """The exact result in fp64, and how far a product in tiles may lie from it.

    As for rows as they are (test_native_linear.py): numel + 8 roundings of fp32, and 2**-30 of the largest x times |w|
    for what bf16's instruction takes for zero. Where x is bf16, weights may be rounded to bf16 once, to nearest: 2**-8
    of each, times a little, for a scaled one was rounded to fp32 before.
    """
    numel = x.shape[1]
    weight, wide = codec.decode(data, numel).double(), x.double()
    exact, room = wide @ weight.t(), wide.abs() @ weight.abs().t()
    rounded = 1.01 * 2.0**-8 * room if x.dtype == torch.bfloat16 else 0.0
    fixed = wide.abs().amax(1, keepdim=True) * weight.abs().sum(1)
    if bias is not None:
        exact, room = exact + bias.double(), room + bias.double().abs()
    error = 1.01 * (numel + 8) * 2.0**-24 * room + 2.0**-30 * fixed + numel * 2.0**-140 + rounded
    return exact, error + ROUNDING[x.dtype] * (exact.abs() + error) + SMALLEST[x.dtype]


def check(kernel: binding.Native, codec: Codec, x: Tensor, data: Tensor, bias: Tensor | None) -> None:
    exact, room = limits(codec, x, data, bias)
    found = multiplied(kernel, codec, x, data, bias).double()
    worst = ((found - exact).abs() / room).max().item()
    assert worst <= 1, (codec.spec, tuple(x.shape), len(data), x.dtype, worst)


@pytest.mark.parametrize("spec", SPECS)
@each_dtype
def test_every_batch_is_within_the_bound(kernel: binding.Native, way: str, spec: str, dtype: torch.dtype) -> None:
    codec = nc.codec(spec)
    for batch in (*range(1, 10), 14, 15, 17, 33, MANY - 1, MANY, 511):
        rows, numel = 1 + batch * 5 % 70, (1000, 64, 4104, 129, 640)[batch % 5]
        bias = randn(rows, seed=9, dtype=(*ROUNDING, torch.float64)[batch % 4]) if batch % 3 else None
        data = codec.encode(randn(rows, numel, seed=batch), 1)
        check(kernel, codec, randn(batch, numel, seed=batch + 50, dtype=dtype), data, bias)


@pytest.mark.parametrize("way", ["vectors"])
@pytest.mark.parametrize("spec", ["fp8_e4m3:scale=none", "fp8_e5m2:scale=none"])
def test_rows_without_scales_are_left_to_others(kernel: binding.Native, spec: str) -> None:
    codec, x = nc.codec(spec), randn(9, 40)
    data, out = codec.encode(randn(7, 40), 1), torch.full((9, 7), 7.0)
    assert not kernel.linear(out, x, data, codec.recipe(CPU), None)
    assert out.eq(7.0).all()


@pytest.mark.parametrize("way", ["vectors"])
def test_integers_are_exact_in_bf16_up_to_many_vectors(kernel: binding.Native) -> None:
    for spec in ("int8", "int4", "int2", "sign", "int8:zero_point=true", "apot4", "fp8_e4m3"):
        codec = nc.codec(spec)
        data, x = codec.encode(randn(40, 256), 1), randn(MANY - 1, 256, dtype=torch.bfloat16)
        weight, wide = codec.decode(data, 256).double(), x.double()
        exact, room = wide @ weight.t(), wide.abs() @ weight.abs().t()
        error = 1.01 * (256 + 8) * 2.0**-24 * room + 2.0**-30 * wide.abs().amax(1, keepdim=True) * weight.abs().sum(1)
        off = (multiplied(kernel, codec, x, data).double() - exact).abs()
        assert off.le(error + 2.0**-8 * (exact.abs() + error)).all(), spec


@each_dtype
@pytest.mark.parametrize("count", [20, MANY + 10])
def test_a_vector_gives_the_same_bits_beside_any_others(
    kernel: binding.Native, way: str, dtype: torch.dtype, count: int
) -> None:
    most = 1e30 if dtype != torch.float16 else 1e3
    for spec in SPECS:
        codec = nc.codec(spec)
        data, x = codec.encode(randn(37, 320), 1), randn(count, 320, dtype=dtype)
        x[2] *= most
        together = multiplied(kernel, codec, x, data)
        least = 1 if count < MANY or way == "matrix" else MANY
        for first, end in ((0, least), (3, 3 + least + 4), (5, 5 + least)):
            assert same_bits(multiplied(kernel, codec, x[first:end], data), together[first:end].contiguous()), spec


@each_way
def test_rows_and_vectors_may_be_slices_of_larger_matrices(kernel: binding.Native, way: str) -> None:
    dtype = WAYS[way][0]
    for spec in SPECS:
        codec = nc.codec(spec)
        data, x, bias = codec.encode(randn(39, 200), 1), randn(9, 200, dtype=dtype), randn(39)
        wide = torch.full((39, data.shape[1] + 5), 0xA5, dtype=torch.uint8)
        wide[:, 3 : 3 + data.shape[1]] = data
        every_other = torch.full((18, 411), 9.0, dtype=dtype)
        every_other[::2, 1:401:2] = x
        out = torch.full((9, 50), 7.0, dtype=dtype)
        rows = wide[:, 3 : 3 + data.shape[1]]
        assert kernel.linear(out[:, 4:43], every_other[::2, 1:401:2], rows, codec.recipe(CPU), bias)
        expected = multiplied(kernel, codec, x, data, bias)
        assert same_bits(out[:, 4:43].contiguous(), expected), spec
        assert out[:, :4].eq(7).all(), spec
        assert out[:, 43:].eq(7).all(), spec
        part = multiplied(kernel, codec, x, data[4:37], bias[4:37])
        assert same_bits(part, expected[:, 4:37].contiguous()), spec


@each_dtype
@pytest.mark.parametrize("batch", [9, MANY])
def test_what_is_not_finite_spoils_its_own_results_alone(
    kernel: binding.Native, way: str, dtype: torch.dtype, batch: int
) -> None:
    for spec in SPECS:
        codec = nc.codec(spec)
        clean, x = randn(40, 512), randn(batch, 512, dtype=dtype)
        spoilt = clean.clone()
        spoilt[1, 5], spoilt[34, 511] = float("nan"), float("inf")
        expected = multiplied(kernel, codec, x, codec.encode(clean, 1))
        found = multiplied(kernel, codec, x, codec.encode(spoilt, 1))
        rest = [row for row in range(40) if row not in (1, 34)]
        assert not found[:, [1, 34]].isfinite().any(), spec
        assert same_bits(found[:, rest], expected[:, rest]), spec
        x[1, 7], x[8, 300] = float("inf"), float("nan")
        found = multiplied(kernel, codec, x, codec.encode(clean, 1))
        kept = [b for b in range(batch) if b not in (1, 8)]
        assert not found[[1, 8]].isfinite().any(), spec
        assert same_bits(found[kept], expected[kept]), spec


@each_wide_dtype
@pytest.mark.parametrize("magnitude", [0.0, 2.0**-140, 2.0**-110, 1e-30, 1e18, 1e30, 2.0**118])
def test_x_of_any_magnitude(kernel: binding.Native, way: str, dtype: torch.dtype, magnitude: float) -> None:
    for spec in SPECS:
        codec = nc.codec(spec)
        data = codec.encode(randn(5, 300) * (1e-4 if magnitude > 1 else 1e15), 1)
        for batch in (3, MANY):
            check(kernel, codec, (randn(batch, 300) * magnitude).to(dtype), data, None)


@each_wide_dtype
@pytest.mark.parametrize("magnitude", [0.0, 2.0**-140, 1e-30, 1e-12, 1e11, 1e25, 1e35])
def test_weights_of_any_magnitude_are_within_the_bound(
    kernel: binding.Native, way: str, dtype: torch.dtype, magnitude: float
) -> None:
    for spec in SPECS:
        codec = nc.codec(spec)
        weight = randn(35, 300)
        weight[::3] *= magnitude
        for batch, x_scale in ((3, 1e-3), (MANY, 1e-3), (5, 1e20 if magnitude < 1 else 1e-3)):
            check(kernel, codec, randn(batch, 300, dtype=dtype) * x_scale, codec.encode(weight, 1), None)


@each_dtype
@pytest.mark.parametrize("spec", ["apot3", "apot8:block=row", "int8", "fp8_e4m3"])
def test_scales_with_which_some_code_would_be_infinite_change_nothing_for_other_codes(
    kernel: binding.Native, way: str, dtype: torch.dtype, spec: str
) -> None:
    """No encoder writes such scales, but others may; code 0, the lowest level, is what lies past the end of a row."""
    codec, numel = nc.codec(spec), 50
    zeros = codec.encode(torch.zeros(35, numel))
    ones, format = codec.encode(torch.ones(35, numel)), codec.recipe(CPU).format
    scales = 4 * -(-numel * format.bits // 32)
    forged = torch.cat((zeros[:, :scales], ones[:, scales:]), 1)
    forged[::3, scales : scales + 4] = torch.tensor([3e38, 3e38]).bfloat16().view(torch.uint8)  # in fp32, too
    assert codec.decode(forged, numel).eq(0).all()
    for batch in (1, 3, 9, MANY):
        x = randn(batch, numel, dtype=dtype)
        assert multiplied(kernel, codec, x, forged).eq(0).all()


@each_way
def test_codes_without_a_level_stand_for_nan(kernel: binding.Native, way: str) -> None:
    tables = (("apot4", 0x0F), ("apot3", 0x07), ("levels:table=-1.0|0.0|0.5", 0x03))
    for spec, code in (*tables, ("fp8_e4m3", 0x7F), ("fp8_e5m2", 0x7F), ("fp8_e5m2:block=32", 0x7E)):
        codec = nc.codec(spec)
        data = codec.encode(randn(5, 256), 1)
        data[3, 40] |= code
        for dtype in WAYS[way]:
            for batch in (9, MANY):
                found = multiplied(kernel, codec, randn(batch, 256, dtype=dtype), data)
                assert found.isnan().tolist() == [[False, False, False, True, False]] * batch, spec


@each_dtype
def test_all_256_codes_of_a_byte_are_what_they_decode_to(kernel: binding.Native, way: str, dtype: torch.dtype) -> None:
    """In every place of a block, -128 included."""
    codec = nc.codec("int8:block=64")
    data = codec.encode(randn(33, 256), 1)
    data[:, :256] = torch.stack([torch.arange(256).roll(row) for row in range(33)])
    assert codec.decode(data, 256).eq(codec.decode(data, 256).amin()).any()
    for batch in (1, 8, MANY):
        check(kernel, codec, randn(batch, 256, seed=batch, dtype=dtype), data, None)


@each_way
def test_levels_that_bf16_cannot_hold_are_left_to_others(kernel: binding.Native, way: str) -> None:
    codec = nc.codec("levels:table=-1.0|0.0|1e-30|0.5")
    data = codec.encode(randn(5, 256), 1)
    x = randn(9, 256, dtype=torch.bfloat16)
    assert not kernel.linear(torch.empty(9, 5, dtype=torch.bfloat16), x, data, codec.recipe(CPU), None)
    if way == "vectors":
        check(kernel, codec, x.float(), data, None)


@each_way
def test_results_past_the_largest_half_are_infinite_as_in_torch(kernel: binding.Native, way: str) -> None:
    for dtype in WAYS[way]:
        magnitude = {torch.float32: 1.5e19, torch.float16: 300.0, torch.bfloat16: 1.5e19}[dtype]
        codec = nc.codec("int8:scale=fp32")
        x = torch.full((2, 64), magnitude, dtype=dtype)
        x[1] *= -1
        data = codec.encode(torch.full((1, 64), magnitude))
        assert multiplied(kernel, codec, x, data).flatten().tolist() == [float("inf"), -float("inf")]


@each_way
def test_the_number_of_threads_changes_no_bit(kernel: binding.Native, way: str) -> None:
    before = torch.get_num_threads()
    try:
        for spec in ("int8:block=row", "int4", "nf4"):
            codec = nc.codec(spec)
            data = codec.encode(randn(1030, 1024), 1)
            for dtype in WAYS[way]:
                x, results = randn(21, 1024, dtype=dtype), []
                for threads in (1, 2, 5):
                    torch.set_num_threads(threads)
                    results.append(multiplied(kernel, codec, x, data))
                assert all(same_bits(result, results[0]) for result in results), spec
    finally:
        torch.set_num_threads(before)


@each_way
def test_shapes_of_every_kind(kernel: binding.Native, way: str) -> None:
    """Blocks of vectors and panels of rows that are whole, one short and one over; rows cut into tiles anyhow; x that
    does not stay in the cache, so that panels share it."""
    shapes = [(batch, rows, 1100) for batch in (15, 16, 17, 31, 32, 33, 48, 49) for rows in (1, 15, 16, 17, 31, 32, 33)]
    shapes += [(130, 1000, 4100), (513, 700, 1030), (70, 300, 16384)]
    for spec in (
        "int8",
        "int4",
        "int4:block=32",
        "int4:block=512",
        "int2:block=256",
        "int3:block=row",
        "sign:block=512",
    ):
        codec = nc.codec(spec)
        for batch, rows, numel in shapes:
            data, bias = codec.encode(randn(rows, numel, seed=rows), 1), randn(rows, seed=1)
            check(kernel, codec, randn(batch, numel, seed=batch, dtype=torch.bfloat16), data, bias)


@pytest.mark.parametrize("way", ["matrix"])
def test_rows_without_scales_go_through_matrix_registers(kernel: binding.Native) -> None:
    for spec in ("fp8_e4m3:scale=none", "fp8_e5m2:scale=none"):
        codec = nc.codec(spec)
        check(kernel, codec, randn(9, 200, dtype=torch.bfloat16), codec.encode(randn(40, 200), 1), None)


@pytest.mark.parametrize("way", ["matrix"])
def test_matrix_registers_are_what_runs_where_there_are_some(kernel: binding.Native) -> None:
    """By what only they do with few vectors: weights are scaled, then rounded to bf16."""
    chosen, why = binding.load()
    assert chosen is not None, why
    codec = nc.codec("int8")
    data, x = codec.encode(randn(64, 256), 1), randn(8, 256, dtype=torch.bfloat16)
    found = multiplied(kernel, codec, x, data)
    assert same_bits(multiplied(chosen, codec, x, data), found)
    in_bf16 = codec.decode(data, 256).bfloat16().double()
    exact, room = x.double() @ in_bf16.t(), x.double().abs() @ in_bf16.abs().t()
    assert (found.double() - exact).abs().le(1.01 * 264 * 2.0**-24 * room + 2.0**-8 * 1.01 * exact.abs()).all()


@pytest.mark.parametrize("way", ["matrix"])
def test_torch_and_matrix_registers_leave_each_other_alone(kernel: binding.Native) -> None:
    """F.linear in bf16 uses them too, in other shapes."""
    codec = nc.codec("int4")
    data, x, w = codec.encode(randn(100, 512), 1), randn(40, 512, dtype=torch.bfloat16), randn(77, 512).bfloat16()
    ours, theirs = multiplied(kernel, codec, x, data), F.linear(x, w)
    for batch in (40, 3, 17, 40):
        assert same_bits(F.linear(x, w), theirs)
        assert same_bits(multiplied(kernel, codec, x[:batch], data), ours[:batch])


def in_a_child(out: multiprocessing.Queue[float]) -> None:
    codec = nc.codec("int4")
    out.put(codec.linear(torch.ones(16, 512, dtype=torch.bfloat16), codec.encode(torch.ones(64, 512))).sum().item())


@pytest.mark.parametrize("way", ["matrix"])
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_child_process_has_matrix_registers_too(kernel: binding.Native, method: str) -> None:
    multiplied(
        kernel,
        nc.codec("int4"),
        torch.ones(16, 512, dtype=torch.bfloat16),
        nc.codec("int4").encode(torch.ones(64, 512)),
    )
    context = multiprocessing.get_context(method)
    out = context.Queue()
    child = context.Process(target=in_a_child, args=(out,))
    child.start()
    assert out.get(timeout=60) == pytest.approx(16 * 64 * 512, rel=2.0**-6)
    child.join()
    assert child.exitcode == 0
