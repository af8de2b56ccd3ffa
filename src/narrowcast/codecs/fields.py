"""The fields of encoded rows: the codes, the scales and the zero points, taken apart and joined again.

No other module knows where in a row a field lies. `split` and `join` are inverses for every row that a codec encodes:
`join(*split(rows)) == rows`, byte for byte, and `split(join(*fields)) == fields`. Two kinds of bytes that no encoder
writes do not survive: padding that is not zero, and a NaN scale with other bits than the canonical NaN's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from narrowcast.codecs import checks
from narrowcast.errors import DtypeError, PayloadError, ShapeError
from narrowcast.kernels.layout import SCALE_BYTES, Element, Scale, layout
from narrowcast.kernels.reference import pack, scale_bits, scale_value, unpack

if TYPE_CHECKING:
    from narrowcast.codecs.base import Codec


class Fields(NamedTuple):
    """What rows [..., row_bytes] hold."""

    codes: Tensor
    """[..., numel]: int8 for `intN`, the bits of a float (int16, int32) for 16- and 32-bit casts, else uint8."""
    scales: Tensor | None
    """fp32 [..., blocks]; None for plain casts."""
    zero_points: Tensor | None
    """uint8 [..., blocks]; None without `zero_point=true`."""


def split(codec: Codec, rows: Tensor, numel: int) -> Fields:
    """The fields of `rows` [..., row_bytes(numel)]. 8-bit codes, fp32 scales and zero points are views."""
    checks.byte_rows(rows, codec, numel, "rows")
    where, lead = layout(codec.format, numel), rows.shape[:-1]
    matrix = checks.as_matrix(rows, "rows")
    codes = _codes(codec, matrix[:, : where.codes_bytes], numel).view(*lead, numel)
    scales, zero_points = split_scales(codec, matrix, numel)
    if scales is not None:
        scales = scales.view(*lead, where.blocks)
    if zero_points is not None:
        zero_points = zero_points.view(*lead, where.blocks)
    return Fields(codes, scales, zero_points)


def split_scales(codec: Codec, matrix: Tensor, numel: int) -> tuple[Tensor | None, Tensor | None]:
    """The scales and zero points of a matrix of rows that has been checked."""
    if codec.block is None:
        return None, None
    where = layout(codec.format, numel)
    scales = _read_scales(matrix[:, where.scales_offset : where.zeros_offset], codec.format.scale)
    if not codec.format.affine:
        return scales, None
    return scales, matrix[:, where.zeros_offset : where.zeros_offset + where.blocks]


def join(codec: Codec, codes: Tensor, scales: Tensor | None, zero_points: Tensor | None) -> Tensor:
    """Rows [..., row_bytes(numel)] that hold these fields; every value must be one that the row can store."""
    _check(codec, codes, scales, zero_points)
    lead, numel = codes.shape[:-1], codes.shape[-1]
    where = layout(codec.format, numel)
    out = torch.zeros(lead.numel(), where.row_bytes, dtype=torch.uint8, device=codes.device)
    if not codes.numel():
        return out.view(*lead, where.row_bytes)
    matrix = codes.reshape(lead.numel(), numel)
    if codec.bits == 8 and codec.format.element == Element.INT:
        matrix = matrix.to(torch.int8).view(torch.uint8)
    out[:, : where.codes_bytes] = pack(matrix, codec.bits)
    if scales is not None:
        stored = scale_bits(scales.float().reshape(lead.numel(), where.blocks), codec.format.scale)
        out[:, where.scales_offset : where.zeros_offset] = stored
    if zero_points is not None:
        end = where.zeros_offset + where.blocks
        out[:, where.zeros_offset : end] = zero_points.reshape(lead.numel(), where.blocks)
    return out.view(*lead, where.row_bytes)


def _codes(codec: Codec, stored: Tensor, numel: int) -> Tensor:
    bits, signed = codec.bits, codec.format.element == Element.INT
    dtype = {16: torch.int16, 32: torch.int32}.get(bits, torch.int8 if signed else torch.uint8)
    if not stored.numel():
        return stored.new_empty((len(stored), numel), dtype=dtype)
    if bits == 8:
        return stored.view(dtype)
    codes = unpack(stored, numel, bits)
    half = 1 << (bits - 1)  # of two's complement
    return ((codes ^ half) - half if signed else codes).to(dtype)


def _read_scales(stored: Tensor, kind: int) -> Tensor:
    if not stored.numel():
        return stored.new_empty((len(stored), stored.shape[1] // SCALE_BYTES[Scale(kind)]), dtype=torch.float32)
    aligned = stored.storage_offset() % 4 == 0 and stored.stride(0) % 4 == 0 and stored.stride(1) == 1
    return stored.view(torch.float32) if kind == Scale.FP32 and aligned else scale_value(stored, kind)


# -- parts of a long row: blocks from one element to another, which begin and end between blocks ----------------------


def regions(codec: Codec, row: Tensor, numel: int) -> tuple[Tensor, Tensor, Tensor]:
    """The bytes of one row [row_bytes(numel)]: codes, scales and zero points, as they are stored."""
    where = layout(codec.format, numel)
    end = where.zeros_offset + (where.blocks if codec.format.affine else 0)
    return row[: where.codes_bytes], row[where.scales_offset : where.zeros_offset], row[where.zeros_offset : end]


def new_end(codec: Codec, numel: int) -> tuple[Tensor, Tensor, Tensor]:
    """Zeros for all bytes of a row behind its codes; and the scales and zero points in them, to be filled in."""
    where = layout(codec.format, numel)
    end = torch.zeros(where.row_bytes - where.codes_bytes, dtype=torch.uint8, device="cpu")
    scales = end[where.scales_offset - where.codes_bytes : where.zeros_offset - where.codes_bytes]
    return end, scales, end[where.zeros_offset - where.codes_bytes :][: where.blocks if codec.format.affine else 0]


def read_part(codec: Codec, numel: int, start: int, stop: int, read: Callable[[int, int], Tensor]) -> Tensor:
    """The elements from `start` to `stop` of a row of `numel`, as a row of their own. `read` reads bytes of the row."""
    where, size = layout(codec.format, numel), SCALE_BYTES[Scale(codec.format.scale)]
    part = torch.zeros(codec.row_bytes(stop - start), dtype=torch.uint8, device="cpu")
    first = start // where.block_size if where.blocks else 0
    begins = start * codec.bits // 8, where.scales_offset + first * size, where.zeros_offset + first
    for stored, begin in zip(regions(codec, part, stop - start), begins, strict=True):
        if len(stored):
            stored.copy_(read(begin, begin + len(stored)))
    return part


# -- what `join` refuses ---------------------------------------------------------------------------------------------


def _check(codec: Codec, codes: Tensor, scales: Tensor | None, zero_points: Tensor | None) -> None:
    if codes.is_floating_point() or codes.is_complex() or codes.dim() == 0:
        raise DtypeError(f"codes: expected integers [..., numel], got {checks.describe(codes)}.")
    lowest, highest = _range_of_codes(codec)
    _check_range(codec, codes, "codes", lowest, highest)
    blocks = (*codes.shape[:-1], layout(codec.format, codes.shape[-1]).blocks)
    for values, name, wanted in (
        (scales, "scales", codec.block is not None),
        (zero_points, "zero_points", codec.format.affine),
    ):
        if (values is not None) != wanted or (values is not None and values.shape != blocks):
            expected = f"one for each block, {list(blocks)}" if wanted else "None"
            got = "None" if values is None else checks.describe(values)
            raise ShapeError(f"{name}: rows of codec {codec.spec!r} take {expected}, got {got}.")
    if scales is not None and scales.numel() and not scales.is_meta:
        stored = scale_bits(scales.float().reshape(-1, blocks[-1]), codec.format.scale)
        read = scale_value(stored, codec.format.scale).view(blocks)
        if not bool(((read == scales) | (read.isnan() & scales.isnan())).all()):
            raise PayloadError(
                f"scales: codec {codec.spec!r} stores scales in a format that cannot hold all of these. Round them "
                "first, or take a codec with scale=fp32."
            )
    if zero_points is not None:
        _check_range(codec, zero_points, "zero_points", 0, 2**codec.bits - 1)


def _range_of_codes(codec: Codec) -> tuple[int, int]:
    if codec.format.element == Element.INT or codec.bits > 8:
        half: int = 2 ** (codec.bits - 1)
        return -half, half - 1
    return 0, 2**codec.bits - 1


def _check_range(codec: Codec, values: Tensor, name: str, lowest: int, highest: int) -> None:
    if values.is_meta or not values.numel():
        return
    low, high = (int(extreme) for extreme in torch.aminmax(values))
    if low < lowest or high > highest:
        raise PayloadError(
            f"{name}: codec {codec.spec!r} stores integers from {lowest} to {highest}, got {low} to {high}."
        )
