"""x W^T + b on encoded rows, in the compiled core: right on every instruction set, whatever stands beside a vector."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import narrowcast as nc
from cases import same_bits
from narrowcast.codecs import Codec
from narrowcast.kernels.cpu import batches, binding
from processes import calls_that_survived, holds_in_a_fork

CPU = torch.device("cpu")
ROUNDING = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
SMALLEST = {torch.float32: 2.0**-149, torch.float16: 2.0**-24, torch.bfloat16: 2.0**-133}
FAST = ("int8:block=row", "int8", "int4", "int4:block=128", "int4:zero_point=true", "int3", "int2", "sign", "apot4")
FLOATS = ("nf4", "apot8", "fp8_e4m3", "fp8_e5m2:block=32", "bf16", "fp16", "raw")
PLAIN = ("int8:block=24", "int4:block=24,scale=e8m0", "sign:block=8")


def available() -> tuple[str, ...]:
    kernel, why = binding.load()
    assert kernel is not None, why
    return binding.ISAS[: binding.ISAS.index(kernel.name.removeprefix("native/")) + 1]


ISAS = available()


@pytest.fixture(params=ISAS)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> binding.Native:
    """Rows as they are, never tiles, with the largest batches that any instruction set takes."""
    loaded, why = binding.load(request.param)
    assert loaded is not None, why
    monkeypatch.setattr(loaded, "max_batch", batches.MAX_BATCH)
    monkeypatch.setattr(loaded, "tiles_from", dict.fromkeys(batches.MAX_BATCH, 1 << 30))
    monkeypatch.setattr(loaded, "matrix_from", 1 << 30)
    return loaded


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def multiplied(kernel: binding.Native, codec: Codec, x: Tensor, data: Tensor, bias: Tensor | None = None) -> Tensor:
    out = torch.full((len(x), len(data)), 7.0, dtype=x.dtype)
    assert kernel.linear(out, x, data, codec.recipe(CPU), bias)
    return out


def limits(codec: Codec, x: Tensor, data: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """The exact result in fp64, and how far an fp32 sum of it, rounded to x's dtype, may lie from it.

    A product of x and a code passes its own rounding, at most numel additions (lanes, groups, lanes again), the
    product with the scale, and the bias; the decoded weight that `exact` is made of was rounded once. Each changes it
    by at most 2**-24 of what it stands in, so numel + 8 of them by gamma = (numel + 8) 2**-24, times what second
    orders add, less than 1%. Integers may take x as fixed point of 31 bits: 2**-30 of its largest, times |w|.
    """
    numel = x.shape[1]
    weight, wide = codec.decode(data, numel).double(), x.double()
    exact = wide @ weight.t()
    room = wide.abs() @ weight.abs().t()
    if bias is not None:
        exact, room = exact + bias.double(), room + bias.double().abs()
    fixed = wide.abs().amax(1, keepdim=True) * weight.abs().sum(1)
    error = 1.01 * (numel + 8) * 2.0**-24 * room + 2.0**-30 * fixed + numel * 2.0**-140
    return exact, error + ROUNDING[x.dtype] * (exact.abs() + error) + SMALLEST[x.dtype]


def check(kernel: binding.Native, codec: Codec, x: Tensor, data: Tensor, bias: Tensor | None) -> None:
    exact, room = limits(codec, x, data, bias)
    found = multiplied(kernel, codec, x, data, bias).double()
    assert (found - exact).abs().le(room).all(), (codec.spec, tuple(x.shape), len(data), x.dtype)


CASES = [(1, 1, 2), (3, 7, 3), (17, 100, 8), (2, 4104, 1), (6, 512, 31), (5, 640, 32), (1, 65, 1), (4, 2048, 4)]


def test_every_codec_is_within_the_bound_of_fp32_sums(kernel: binding.Native, codec: Codec) -> None:
    dtypes = list(ROUNDING)
    for case, (rows, numel, batch) in enumerate(CASES):
        data = codec.encode(randn(rows, numel, seed=case), 1)
        dtype = dtypes[case % 3]
        bias = None if case % 2 else randn(rows, seed=9, dtype=(*dtypes, torch.float64)[case % 4])
        check(kernel, codec, randn(batch, numel, seed=case + 50, dtype=dtype), data, bias)


@pytest.mark.parametrize("spec", [*FAST, *FLOATS, *PLAIN])
@pytest.mark.parametrize("dtype", ROUNDING)
def test_every_dtype_and_batch_is_within_the_bound(kernel: binding.Native, spec: str, dtype: torch.dtype) -> None:
    codec = nc.codec(spec)
    data = codec.encode(randn(7, 1000), 1)
    for batch in (1, 2, 3, 8, 31, 32):
        check(kernel, codec, randn(batch, 1000, seed=batch, dtype=dtype), data, randn(7))


def test_rows_and_vectors_may_be_slices_of_larger_matrices(kernel: binding.Native) -> None:
    for spec in (*FAST, *FLOATS, *PLAIN):
        codec = nc.codec(spec)
        data, x, bias = codec.encode(randn(9, 200), 1), randn(3, 200), randn(9)
        wide = torch.full((9, data.shape[1] + 5), 0xA5, dtype=torch.uint8)
        wide[:, 3 : 3 + data.shape[1]] = data
        every_other = torch.full((6, 411), 9.0)
        every_other[::2, 1:401:2] = x
        expected = multiplied(kernel, codec, x, data, bias)
        strided = multiplied(
            kernel, codec, every_other[::2, 1:401:2], wide[:, 3 : 3 + data.shape[1]], bias.repeat_interleave(2)[::2]
        )
        assert same_bits(strided, expected), spec
        part = multiplied(kernel, codec, x, data[4:7], bias[4:7])
        assert same_bits(part, expected[:, 4:7].contiguous()), spec


def test_a_vector_gives_the_same_bits_alone_and_in_any_batch(kernel: binding.Native, codec: Codec) -> None:
    data, x = codec.encode(randn(6, 300), 1), randn(7, 300, dtype=torch.bfloat16)
    x[2] *= 1e30  # another magnitude beside it changes nothing either
    together = multiplied(kernel, codec, x, data)
    for i in range(7):
        assert same_bits(multiplied(kernel, codec, x[i : i + 1], data)[0], together[i]), i


def test_the_number_of_threads_changes_no_bit() -> None:
    before = torch.get_num_threads()
    try:
        for spec in ("int8:block=row", "int4", "nf4", "int8:block=24"):
            codec = nc.codec(spec)
            data, x = codec.encode(randn(1030, 1024), 1), randn(3, 1024)
            results = []
            for threads in (1, 2, 5):
                torch.set_num_threads(threads)
                results.append(codec.linear(x, data))
            assert all(same_bits(result, results[0]) for result in results), spec
    finally:
        torch.set_num_threads(before)


def test_a_forked_child_multiplies_with_threads_of_its_own() -> None:
    # The team of OpenMP that the parent multiplies with is dead in a child: waiting for it would never end.
    codec, before = nc.codec("int4"), torch.get_num_threads()
    data, x = codec.encode(randn(1030, 1024), 1), randn(3, 1024)
    torch.set_num_threads(3)
    try:
        expected = bytes(codec.linear(x, data).numpy())
        holds_in_a_fork(lambda: bytes(codec.linear(x, data).numpy()) == expected, 30)
    finally:
        torch.set_num_threads(before)


def test_a_block_that_is_not_finite_spoils_its_own_output_alone(kernel: binding.Native) -> None:
    for spec in (*FAST, *FLOATS, *PLAIN):
        codec = nc.codec(spec)
        clean = randn(6, 512)
        spoilt = clean.clone()
        spoilt[1, 5], spoilt[4, 511] = float("nan"), float("inf")
        x = randn(3, 512)
        expected = multiplied(kernel, codec, x, codec.encode(clean, 1))
        found = multiplied(kernel, codec, x, codec.encode(spoilt, 1))
        assert not found[:, [1, 4]].isfinite().any(), spec
        assert same_bits(found[:, [0, 2, 3, 5]], expected[:, [0, 2, 3, 5]]), spec


def test_x_that_is_not_finite_spoils_its_own_vector_alone(kernel: binding.Native) -> None:
    for spec in (*FAST, *FLOATS, *PLAIN):
        codec = nc.codec(spec)
        data, x = codec.encode(randn(5, 300), 1), randn(5, 300)
        expected = multiplied(kernel, codec, x, data)
        x[1, 7], x[3, 299] = float("inf"), float("nan")
        found = multiplied(kernel, codec, x, data)
        assert not found[[1, 3]].isfinite().any(), spec
        assert same_bits(found[[0, 2, 4]], expected[[0, 2, 4]]), spec


@pytest.mark.parametrize("magnitude", [0.0, 2.0**-140, 2.0**-110, 1e-30, 1e18, 1e30, 2.0**118])
def test_x_of_any_magnitude_is_within_the_bound(kernel: binding.Native, magnitude: float) -> None:
    # Codes times x may pass the largest number, or lose digits below the smallest, where weights times x do not.
    for spec in (*FAST, *FLOATS, *PLAIN):
        codec = nc.codec(spec)
        data = codec.encode(randn(5, 300) * (1e-4 if magnitude > 1 else 1e15), 1)
        check(kernel, codec, randn(2, 300) * magnitude, data, None)


@pytest.mark.parametrize("magnitude", [0.0, 2.0**-140, 1e-30, 1e25, 1e35])
def test_weights_of_any_magnitude_are_within_the_bound(kernel: binding.Native, magnitude: float) -> None:
    for spec in (*FAST, *FLOATS, *PLAIN, "int4:zero_point=true,block=24"):
        codec = nc.codec(spec)
        data = codec.encode(randn(5, 300) * magnitude, 1)
        check(kernel, codec, randn(2, 300) * 1e-3, data, None)


def test_affine_weights_past_the_largest_number_are_cut_as_decoding_cuts_them(kernel: binding.Native) -> None:
    codec = nc.codec("int4:zero_point=true,scale=fp32")
    weight = torch.full((1, 64), torch.finfo(torch.float32).max)
    weight[0, ::2] *= -1
    x = torch.zeros(1, 64)
    x[0, 1] = 0.5
    check(kernel, codec, x, codec.encode(weight, 1), None)


def test_codes_without_a_level_stand_for_nan(kernel: binding.Native) -> None:
    for spec, code in (("apot4", 0x0F), ("apot3", 0x07), ("levels:table=-1.0|0.0|0.5", 0x03)):
        codec = nc.codec(spec)
        data = codec.encode(randn(5, 256), 1)
        data[3, 40] |= code
        found = multiplied(kernel, codec, randn(2, 256), data)
        assert found.isnan().tolist() == [[False, False, False, True, False]] * 2, spec


def test_infinite_codes_of_e5m2_stay_infinite(kernel: binding.Native) -> None:
    codec = nc.codec("fp8_e5m2:scale=none")
    weight = randn(5, 256)
    weight[2, 100] = -float("inf")
    x = randn(1, 256).abs()
    assert multiplied(kernel, codec, x, codec.encode(weight, 1))[0, 2] == -float("inf")


def test_results_past_the_largest_half_are_infinite_as_in_torch(kernel: binding.Native) -> None:
    for dtype, magnitude in ((torch.float16, 300.0), (torch.bfloat16, 1.5e19)):
        weight, x = torch.full((1, 64), magnitude), torch.full((2, 64), magnitude, dtype=dtype)
        x[1] *= -1
        data = nc.codec("raw").encode(weight)
        assert multiplied(kernel, nc.codec("raw"), x, data).flatten().tolist() == [float("inf"), -float("inf")]


def test_larger_batches_and_fp64_are_left_to_tiles(kernel: binding.Native) -> None:
    codec = nc.codec("int4")
    data, recipe = codec.encode(randn(3, 100)), codec.recipe(CPU)
    beyond = [randn(most + 1, 100, dtype=dtype) for dtype, most in batches.MAX_BATCH.items()]
    for x in (*beyond, randn(1, 100).double()):
        assert not kernel.linear(torch.empty(len(x), 3, dtype=x.dtype), x, data, recipe, None)
        found = codec.linear(x, data).double()
        weight = codec.decode(data, 100, torch.float64)
        exact = x.double() @ weight.t()
        # fp32 sums of 100 products, then the rounding of weights and result in x's dtype.
        rounding = ROUNDING.get(x.dtype, 0.0)
        room = (100 * 2.0**-24 + rounding) * (x.double().abs() @ weight.abs().t()) + rounding * exact.abs()
        assert (found - exact).abs().le(1.01 * room).all(), x.dtype


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("batch", [16, 17, 24, 25, 32, 33, 64, 65])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_tiles_of_its_own_avx2_decodes_from_smaller_batches_on(
    isa: str, batch: int, dtype: torch.dtype
) -> None:
    kernel, _ = binding.load(isa)
    assert kernel is not None
    most = {"avx2": 16, "other": 64} if dtype == torch.float32 else {"avx2": 24, "other": 32}
    for spec, has_tiles in (("int4", isa == "avx512"), ("int4:block=24", False), ("raw", False)):
        codec, x, out = nc.codec(spec), randn(batch, 128, dtype=dtype), torch.empty(batch, 3, dtype=dtype)
        takes = kernel.linear(out, x, codec.encode(randn(3, 128)), codec.recipe(CPU), None)
        assert takes == (has_tiles or batch <= most["avx2" if isa == "avx2" else "other"]), spec


@pytest.mark.parametrize("spec", ["int8", "int4", "nf4", "apot4", "bf16", "int8:block=24"])
def test_rows_that_are_one_and_the_same_are_multiplied_alike(kernel: binding.Native, spec: str) -> None:
    codec, dtype = nc.codec(spec), torch.bfloat16
    data = codec.encode(randn(1, 500)).expand(21, -1)
    for batch in (1, 3):
        x = randn(batch, 500, dtype=dtype)
        assert torch.equal(multiplied(kernel, codec, x, data), multiplied(kernel, codec, x, data.contiguous()))


def test_nothing_to_multiply_leaves_the_bias() -> None:
    codec, bias = nc.codec("int8"), randn(4)
    assert torch.equal(codec.linear(torch.empty(3, 0), codec.encode(torch.empty(4, 0)), bias), bias.expand(3, 4))
    assert codec.linear(torch.empty(0, 8), codec.encode(randn(4, 8)), bias).shape == (0, 4)
    assert codec.linear(randn(3, 8), codec.encode(torch.empty(0, 8))).shape == (3, 0)


def test_nothing_outside_the_tensors_is_touched() -> None:
    assert calls_that_survived("guard_linear.py", *ISAS) >= 200 * len(ISAS)
