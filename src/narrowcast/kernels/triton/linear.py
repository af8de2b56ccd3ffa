"""Triton: x W^T + bias for any format, a tile of rows of W at a time.

A program takes ROWS rows of W and all of x (padded to BATCH rows), and walks along them STEP elements at a time: codes
become numbers in registers, tensor cores multiply them by x in x's own dtype (fp32 x: in fp32), sums are fp32. Scales
are applied to sums where a step lies inside one block, and to the numbers, before they are rounded to x's dtype, where
it does not. W is read once and never written out.
"""

# Triton reads annotations: no `from __future__ import annotations` here. Its language is not one that mypy knows.
# mypy: ignore-errors
import torch
import triton
import triton.language as tl
from torch import Tensor

from narrowcast.kernels.layout import ROW, Recipe, layout
from narrowcast.kernels.triton.arguments import INTS, has_fp8, on, readable, scale_size
from narrowcast.kernels.triton.codes import (
    AFFINE,
    INT,
    INTERPRETED,
    LEVELS,
    NATIVE,
    SIGN,
    as_float,
    cast_value,
    to_float32,
    to_output,
)
from narrowcast.kernels.triton.levels import lookup
from narrowcast.kernels.triton.scales import SCALE_NONE, scale_value
from narrowcast.kernels.triton.tables import cells

OUTPUTS = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}

BATCH = 64
"""Rows of x that a program takes at most. For more, decoding W and cuBLAS are faster."""

TILES = {16: (16, 128, 4, 3), 32: (32, 128, 4, 3), 64: (64, 128, 4, 3)}
"""Rows, step, warps and stages for each padded batch: of six, about the best on an H200."""


@triton.jit
def unpacked(codes, first, numel, inside, BITS: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr):
    """Codes [ROWS, STEP] as integers, from element `first` on, of rows that start at pointers `codes` [ROWS]."""
    if BITS >= 8:
        place = tl.arange(0, STEP)
        values = tl.load(
            codes[:, None] + (first + place)[None, :], mask=inside[:, None] & (first + place < numel)[None, :], other=0
        )
    elif BITS & (BITS - 1) == 0:
        held: tl.constexpr = 8 // BITS
        place = first // held + tl.arange(0, STEP // held)
        there = inside[:, None] & (place * held < numel)[None, :]
        values = tl.load(codes[:, None] + place[None, :], mask=there, other=0).to(tl.int32)
        for level in tl.static_range(3):
            if (4 >> level) >= BITS:
                values = tl.join(values, values >> (4 >> level))
        values = (values & ((1 << BITS) - 1)).reshape([ROWS, STEP])
    else:
        # Eight codes in BITS bytes, of which the row's last may miss some.
        place = (first // 8 + tl.arange(0, STEP // 8)) * BITS
        kind = tl.int32 if BITS == 3 else tl.int64
        values = tl.zeros([ROWS, STEP // 8], kind)
        for byte in tl.static_range(BITS):
            there = inside[:, None] & ((place + byte) * 8 < numel * BITS)[None, :]
            loaded = tl.load(codes[:, None] + (place + byte)[None, :], mask=there, other=0)
            values = values | (loaded.to(kind) << (8 * byte))
        values = tl.join(values, values >> (4 * BITS))
        values = tl.join(values, values >> (2 * BITS))
        values = (tl.join(values, values >> BITS) & ((1 << BITS) - 1)).to(tl.int32).reshape([ROWS, STEP])
    return values


@triton.jit
def numbers(code, levels, ELEMENT: tl.constexpr, BITS: tl.constexpr, FP8: tl.constexpr):
    """What codes stand for, as fp32."""
    if ELEMENT == INT:
        half: tl.constexpr = 1 << (BITS - 1)
        value = ((code.to(tl.int32) ^ half) - half).to(tl.float32)
    elif ELEMENT == AFFINE:
        value = code.to(tl.float32)
    elif ELEMENT == SIGN:
        value = as_float((code << 31) | 0x3F800000)
    elif ELEMENT == LEVELS:
        value = as_float(lookup(levels, code.to(tl.int32), 1 << BITS))
    else:
        value = cast_value(code if BITS >= 16 else code.to(tl.int32), ELEMENT, FP8)
    return value


@triton.jit
def product(code, x, data, scales_of, zeros_of, levels, inside, wanted, place, numel, x_stride, block,
            ELEMENT: tl.constexpr, BITS: tl.constexpr, SCALE: tl.constexpr, PER: tl.constexpr, FP8: tl.constexpr,
            OUTPUT: tl.constexpr, BATCH: tl.constexpr):  # fmt: skip
    """Codes [ROWS, n] of the elements `place` [n] times the same elements of x: [ROWS, BATCH]."""
    value = numbers(code, levels, ELEMENT, BITS, FP8)
    there = inside[:, None] & (place < numel)[None, :]
    group = place // block
    if ELEMENT == AFFINE:
        value = value - tl.load(data + zeros_of[:, None] + group[None, :], mask=there, other=0).to(tl.float32)
    if PER == "element":
        value = value * scale_value(tl.load(scales_of[:, None] + group[None, :], mask=there, other=0), SCALE)
    # Codes past the row's end are zeros, which a table of levels may take for anything.
    value = tl.where(there, value, 0.0)
    column = tl.arange(0, BATCH).to(tl.int64)  # the last of long sequences lie far apart
    some = tl.load(x + column[None, :] * x_stride + place[:, None],
                   mask=wanted[None, :] & (place < numel)[:, None], other=0)  # fmt: skip
    if NATIVE and OUTPUT != "fp32":
        part = tl.dot(value.to(some.dtype), some)
    else:
        part = tl.dot(value, to_float32(some, False), input_precision="ieee")
    return part


@triton.jit
def linear_kernel(x, data, codes, scales, levels, bias, out, batch, rows, numel, x_stride, row_bytes, scales_at,
                  zeros_at, block, ELEMENT: tl.constexpr, BITS: tl.constexpr, SCALE: tl.constexpr,
                  CODE_SIZE: tl.constexpr, SCALE_SIZE: tl.constexpr, PER: tl.constexpr, FP8: tl.constexpr,
                  BIAS: tl.constexpr, OUTPUT: tl.constexpr, BATCH: tl.constexpr, ROWS: tl.constexpr,
                  STEP: tl.constexpr):  # fmt: skip
    """PER: what has one scale: the "row", a "step" (then inside one block), or each "element" looks up its own."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    start = row.to(tl.int64) * row_bytes
    column = tl.arange(0, BATCH)
    wanted = column < batch
    total = tl.zeros([ROWS, BATCH], tl.float32)
    codes_of = codes + start // CODE_SIZE
    scales_of = scales + (start + scales_at) // SCALE_SIZE
    for first in range(0, numel, STEP):
        code = unpacked(codes_of, first, numel, inside, BITS, ROWS, STEP)
        place = first + tl.arange(0, STEP)
        part = product(code, x, data, scales_of, start + zeros_at, levels, inside, wanted, place, numel, x_stride,
                       block, ELEMENT, BITS, SCALE, PER, FP8, OUTPUT, BATCH)  # fmt: skip
        if PER == "step":
            part = part * scale_value(tl.load(scales_of + first // block, mask=inside, other=0), SCALE)[:, None]
        total += part
    if PER == "row" and SCALE != SCALE_NONE:
        total = total * scale_value(tl.load(scales_of, mask=inside, other=0), SCALE)[:, None]
    if BIAS:
        total += to_float32(tl.load(bias + row, mask=inside, other=0), False)[:, None]
    place = column[None, :].to(tl.int64) * rows + row[:, None]
    tl.store(out + place, to_output(total, OUTPUT, True), mask=inside[:, None] & wanted[None, :])


def linear(out: Tensor, x: Tensor, data: Tensor, recipe: Recipe, bias: Tensor | None) -> bool:
    """Multiply, or return False: more rows of x than a program takes, or fp64."""
    if len(x) > BATCH or x.dtype not in OUTPUTS or (bias is not None and bias.dtype not in OUTPUTS):
        return False
    x = x if x.stride(1) == 1 and x.stride(0) * x.element_size() % 16 == 0 else x.contiguous()
    with on(x.device):
        launch(out, x, readable(data)[0], recipe, None if bias is None else bias.contiguous())
    return True


def launch(out: Tensor, x: Tensor, data: Tensor, recipe: Recipe, bias: Tensor | None) -> None:
    """Run the kernel: `out` is contiguous, the others' last dimensions are."""
    format = recipe.format
    numel = x.shape[1]
    where = layout(format, numel)
    block = numel if format.block in (0, ROW) else min(format.block, numel)
    columns = max(16, triton.next_power_of_2(len(x)))
    rows, step, warps, stages = TILES[columns]
    per = "row" if where.blocks <= 1 else "step" if block % step == 0 and format.element != AFFINE.value else "element"
    code_size = max(format.bits // 8, 1)
    given = x if bias is None else bias
    linear_kernel[(triton.cdiv(len(data), rows),)](
        _bits(x),
        data,
        data.view(INTS[code_size]),
        data.view(INTS[scale_size(format)]),
        data if recipe.table is None else cells(recipe.table).levels,
        _bits(given),
        out.view(INTS[out.element_size()]),
        len(x),
        len(data),
        numel,
        x.stride(0),
        data.stride(0),
        where.scales_offset,
        where.zeros_offset,
        block,
        ELEMENT=int(format.element),
        BITS=format.bits,
        SCALE=int(format.scale),
        CODE_SIZE=code_size,
        SCALE_SIZE=scale_size(format),
        PER=per,
        FP8=has_fp8(x.device) and format.bits == 8,
        BIAS=bias is not None,
        OUTPUT=OUTPUTS[x.dtype],
        BATCH=columns,
        ROWS=rows,
        STEP=step,
        num_warps=warps,
        num_stages=stages,
    )


def _bits(tensor: Tensor) -> Tensor:
    """numpy, behind the interpreter, knows no bf16."""
    return tensor.view(torch.int16) if INTERPRETED and tensor.dtype == torch.bfloat16 else tensor
