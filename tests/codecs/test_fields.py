"""`split` and `join`, for every codec: exact inverses, whose fields mean what docs/format.md says."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import narrowcast as nc
from cases import BLOCKED, PLAIN, affine, block_size, mixed, same_bits, sections
from narrowcast import Codec
from narrowcast.errors import DtypeError, PayloadError, ShapeError

pytestmark = pytest.mark.ambient

SHAPES = [(0,), (1,), (7,), (64,), (131,), (3, 0), (0, 13), (5, 13), (2, 3, 65)]
FLOATS = {"raw": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
FLOATS |= {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


def rows_of(codec: Codec, shape: tuple[int, ...], device: str) -> Tensor:
    x = mixed(torch.Size(shape).numel()).to(device).view(shape)
    if x.numel() > 40:
        x.view(-1)[3], x.view(-1)[40] = float("nan"), float("-inf")
    return codec.encode(x, 11)


def test_join_gives_back_the_bytes_that_split_took_apart(codec: Codec, device: str) -> None:
    for shape in SHAPES:
        rows = rows_of(codec, shape, device)
        before = rows.clone()
        joined = codec.join(*codec.split(rows, shape[-1]))
        assert torch.equal(joined, before)
        assert joined.device == rows.device
        assert torch.equal(rows, before)


def test_split_gives_back_the_fields_that_were_joined(codec: Codec, device: str) -> None:
    fields = codec.split(rows_of(codec, (3, 131), device), 131)
    again = codec.split(codec.join(*fields), 131)
    for field, other in zip(fields, again, strict=True):
        assert (field is None) == (other is None)
        if field is not None:
            same = same_bits(field, other) if field.is_floating_point() else torch.equal(field, other)
            assert same
            assert field.dtype == other.dtype


def test_a_field_is_absent_exactly_where_the_row_has_no_bytes_for_it(codec: Codec, device: str) -> None:
    numel = 131
    codes, scales, zero_points = codec.split(rows_of(codec, (2, numel), device), numel)
    blocks = -(-numel // block_size(codec, numel))
    _, first_scale, first_zero_point, end = sections(codec, numel)
    assert codes.shape == (2, numel)
    assert (scales is not None) == (first_zero_point > first_scale)
    assert (zero_points is not None) == (end > first_zero_point)
    assert scales is None or (scales.shape, scales.dtype) == ((2, blocks), torch.float32)
    assert zero_points is None or (zero_points.shape, zero_points.dtype) == ((2, blocks), torch.uint8)


def test_fields_decode_to_what_the_row_decodes_to(codec: Codec, device: str) -> None:
    numel = 131
    # No denormals: torch may flush them on this thread, which decoding does not.
    x = torch.linspace(-3.0, 5.0, 3 * numel, dtype=torch.float32, device="cpu").view(3, numel).to(device)
    rows = codec.encode(x, 11)
    codes, scales, zero_points = codec.split(rows, numel)
    values = numbers(codec, codes)
    if scales is not None:
        size = block_size(codec, numel)
        if zero_points is not None:
            values = values - zero_points.float().repeat_interleave(size, -1)[:, :numel]
        values = values * scales.repeat_interleave(size, -1)[:, :numel]
    assert torch.equal(values, codec.decode(rows, numel))  # -0.0 equals 0.0


def numbers(codec: Codec, codes: Tensor) -> Tensor:
    """What codes stand for, in units of the scale."""
    if codec.name in FLOATS:
        return codes.contiguous().view(FLOATS[codec.name]).float()
    if codec.name == "sign":
        return 1.0 - 2.0 * codes.float()
    if codec.name.startswith("int"):
        assert codes.dtype == (torch.uint8 if affine(codec) else torch.int8)
        return codes.float()
    return codec.levels.to(codes.device)[codes.long()]  # type: ignore[attr-defined, no-any-return]


def test_rows_that_start_at_any_byte_are_taken_apart(device: str) -> None:
    codec = nc.codec("int8:block=row")
    rows = rows_of(codec, (3, 64), device)
    shifted = torch.zeros(rows.numel() + 1, dtype=torch.uint8, device=device)[1:].view(rows.shape).copy_(rows)
    for field, other in zip(codec.split(rows, 64)[:2], codec.split(shifted, 64)[:2], strict=True):
        assert field is not None
        assert other is not None
        assert torch.equal(field.nan_to_num(), other.nan_to_num())


@pytest.mark.parametrize(
    ("spec", "code"),
    [("int8", 128), ("int8", -129), ("int4", 8), ("int4", -9), ("sign", 2), ("nf4", 16), ("nf4", -1), ("raw", 2**31)],
)
def test_a_code_that_the_row_cannot_store_is_refused(spec: str, code: int) -> None:
    codec = nc.codec(spec)
    codes = torch.zeros(2, 8, dtype=torch.int64, device="cpu")
    codes[1, 3] = code
    scales = None if codec.block is None else torch.ones(2, 1, dtype=torch.float32, device="cpu")
    with pytest.raises(PayloadError, match=r"codes: codec .* stores integers from .* to .*, got"):
        codec.join(codes, scales)


@pytest.mark.parametrize(("scale", "value"), [("bf16", 1.001), ("fp16", 1e-9), ("e8m0", 3.0), ("e8m0", -1.0)])
def test_a_scale_that_its_format_rounds_is_refused(scale: str, value: float) -> None:
    codes = torch.zeros(1, 8, dtype=torch.int8, device="cpu")
    with pytest.raises(PayloadError, match="cannot hold all of these"):
        nc.codec(f"int8:scale={scale}").join(codes, torch.tensor([[value]], dtype=torch.float32, device="cpu"))


def test_fields_that_the_codec_does_not_have_or_of_another_shape_are_refused() -> None:
    codes = torch.zeros(2, 8, dtype=torch.int8, device="cpu")
    ones = torch.ones(2, 1, dtype=torch.float32, device="cpu")
    zeros = torch.zeros(2, 1, dtype=torch.uint8, device="cpu")
    for codec in BLOCKED.values():
        with pytest.raises(ShapeError, match=r"scales: .* take one for each block, \[2, 1\], got None"):
            codec.join(codes, None)
        with pytest.raises(ShapeError, match="zero_points: "):
            codec.join(codes, ones, None if affine(codec) else zeros)
    for codec in PLAIN.values():
        with pytest.raises(ShapeError, match=r"scales: .* take None, got float32 \[2, 1\]"):
            codec.join(codes, ones)
    with pytest.raises(ShapeError, match=r"got float32 \[1, 1\]"):
        nc.codec("int8").join(codes, ones[:1])
    with pytest.raises(DtypeError, match=r"codes: expected integers .*, got float32"):
        nc.codec("int8").join(codes.float(), ones)


def test_rows_of_another_length_are_refused() -> None:
    with pytest.raises(PayloadError, match="takes 80 bytes"):
        nc.codec("int8").split(torch.zeros(3, 96, dtype=torch.uint8, device="cpu"), 64)
