"""Triton: a step of AdamW on moments that are held in rows, decode, update and encode of a tile in one.

kernels/moments.py says what it does. A tile holds whole blocks of both moments, which have the same elements. A program
reads all of its tile before it writes any of it; no byte belongs to two tiles.
"""

# Triton reads annotations: no `from __future__ import annotations` here. Its language is not one that mypy knows.
# mypy: ignore-errors
# ruff: noqa: RUF059
import torch
import triton
import triton.language as tl
from torch import Tensor

from narrowcast.kernels import moments
from narrowcast.kernels.layout import Recipe, Scale, layout
from narrowcast.kernels.moments import Step, second_format
from narrowcast.kernels.reference import draws
from narrowcast.kernels.triton import cuts
from narrowcast.kernels.triton.arguments import (
    OUTPUTS,
    encoding,
    ends,
    form_of,
    loadable,
    on,
    options,
    places,
    scale_size,
    seen,
)
from narrowcast.kernels.triton.codes import INF_BITS, INT, NAN_BITS, as_bits, as_float, mix64, to_output, uniform
from narrowcast.kernels.triton.cuts import cut, launches, tile_for
from narrowcast.kernels.triton.groups import group
from narrowcast.kernels.triton.kernels import _COUNTS, _OFFSETS, codes_place, product
from narrowcast.kernels.triton.scales import SCALE_NONE
from narrowcast.kernels.triton.tables import cells
from narrowcast.kernels.triton.tiles import decode_tile, encode_tile, load_floats, locate, store_floats
from narrowcast.kernels.triton.words import places as places_of

SHIFT, TOP = tl.constexpr(moments.SHIFT), tl.constexpr(moments.TOP)
BIAS = tl.constexpr((127 << moments.MANTISSA) - moments.TOP)
"""A level's leading bits, as fp32, less its code."""
DRAWN = tl.constexpr(2.0**moments.SHIFT)
LEAST, MOST = tl.constexpr(moments.LEAST_EXPONENT), tl.constexpr(moments.MOST_EXPONENT)


@triton.jit
def load_second(codes, exponents, limit, left, TILE: tl.constexpr, BLOCKS: tl.constexpr, WIDE: tl.constexpr):
    """The second moments of a tile, [BLOCKS, WIDE]."""
    place, real = places_of(TILE, 1)
    index = tl.arange(0, BLOCKS)
    code = tl.load(codes + place, mask=real & (place < limit), other=0).to(tl.int32)
    exponent = tl.load(exponents + index, mask=index < left, other=0).to(tl.int32)
    scale = as_float(tl.where(exponent == 255, NAN_BITS, exponent << 23))
    level = tl.where(code > 0, (code + BIAS) << SHIFT, 0)
    return as_float(level).reshape([BLOCKS, WIDE]) * scale[:, None]


@triton.jit
def store_second(v, codes, exponents, draw, limit, left, TILE: tl.constexpr, BLOCKS: tl.constexpr,
                 WIDE: tl.constexpr):  # fmt: skip
    """Round second moments [BLOCKS, WIDE] and store them; `draw` has a number in [0, 1) for each."""
    place, real = places_of(TILE, 1)
    index = tl.arange(0, BLOCKS)
    top = tl.max(as_bits(v) & 0x7FFFFFFF, 1)
    finite = top < INF_BITS
    exponent = tl.minimum(tl.maximum((top >> 23) + 1, LEAST), MOST)
    y = tl.where(finite[:, None], v, 0.0) * as_float((254 - exponent) << 23)[:, None]
    up = (draw.reshape([BLOCKS, WIDE]) * DRAWN).to(tl.int32)
    code = ((as_bits(y) + up) >> SHIFT) - BIAS
    code = tl.minimum(tl.maximum(code, 1), TOP)
    code = tl.where(finite[:, None] & (v > 0.0), code, 0).to(tl.uint8).reshape([BLOCKS * WIDE])
    tl.store(codes + place, code, mask=real & (place < limit))
    tl.store(exponents + index, tl.where(finite, exponent, 255).to(tl.uint8), mask=index < left)


_SECOND = ["second_seed", "second_bytes", "second_at", "second_groups"]


@triton.jit(do_not_specialize=[*_COUNTS, *_OFFSETS, *_SECOND, *Step._fields])
def adamw_kernel(parameter, to_parameter, grad, codes, to_codes, scales, out, second, levels, cells, row_bytes, numel,
                 tiles, first_tile, block, groups, last_size, scales_at, zeros_at, step, top_scale, seed, slope, middle,
                 bend, reach, second_seed, second_bytes, second_at, second_groups, beta1, take1, beta2, take2,
                 correction, eps, decay, size, FORM: tl.constexpr, TILE: tl.constexpr, SEARCH: tl.constexpr,
                 READ: tl.constexpr, TAKES_MOMENTUM: tl.constexpr, OUTPUT: tl.constexpr):  # fmt: skip
    """`codes`, `to_codes`, `scales` and `out` are the rows of the first moment, seen as the integers each needs."""
    row, tile, group, start, limit = locate(tiles, first_tile, 1, block, numel, TILE, False)
    blocks: tl.constexpr = READ.blocks
    wide: tl.constexpr = READ.wide
    shape: tl.constexpr = [TILE.groups, TILE.width]
    base = row * row_bytes
    codes_at = base + codes_place(start, FORM, TILE)
    scales_from = (base + scales_at) // FORM.scale_size + group
    zeros = out + base + zeros_at + group
    second_codes = second + row * second_bytes + start
    second_group = group if FORM.scale != SCALE_NONE else start // READ.block
    exponents = second + row * second_bytes + second_at + second_group
    p = load_floats(parameter + row * numel + start, limit, TILE, False)
    g = load_floats(grad + row * numel + start, limit, TILE, False)
    v = load_second(second_codes, exponents, limit, second_groups - second_group, TILE, blocks, wide).reshape(shape)
    m = g
    if not TAKES_MOMENTUM:
        value, scale = decode_tile(codes + codes_at // READ.code_size, scales + scales_from, zeros, levels, limit,
                                   groups - group, FORM, TILE, READ.words, False)  # fmt: skip
        if FORM.scale != SCALE_NONE:
            value = product(value, scale, FORM.element)
        if FORM.element == INT:
            value = value + 0.0
        m = value * beta1 + g * take1
        v = v * beta2 + (g * take2) * g
    p = p * decay - tl.div_rn(m, tl.sqrt_rn(v) * correction + eps) * size
    m = as_float(tl.where(m != m, NAN_BITS, as_bits(m)))
    place, real = places_of(TILE, 1)
    if TILE.masked:
        m = tl.where((real & (place < limit)).reshape(shape), m, 0.0)
        v = tl.where((real & (place < limit)).reshape(shape), v, 0.0)
    tl.debug_barrier()  # every thread has read what another is about to overwrite
    store_floats(to_parameter + row * numel + start, to_output(p, OUTPUT, False), limit, TILE)
    if not TAKES_MOMENTUM:
        draw = uniform(mix64((second_seed + row).to(tl.uint64)), start, place)
        store_second(v.reshape([blocks, wide]), second_codes, exponents, draw, limit, second_groups - second_group,
                     TILE, blocks, wide)  # fmt: skip
    encode_tile(m, to_codes + codes_at // READ.to_size, scales + scales_from, zeros, 0, 0, row, start, limit,
                groups - group, block, last_size, step, top_scale, seed, cells, slope, middle, bend, reach, FORM, TILE,
                SEARCH, False)  # fmt: skip


def adamw(parameter: Tensor, first: Tensor, second: Tensor, grad: Tensor, recipe: Recipe, seed: int,
          takes_momentum: bool, step: Step) -> None:  # fmt: skip
    """One step, in place. Rows start at multiples of 16 bytes; what pads them is not written."""
    format, (count, numel) = recipe.format, parameter.shape
    tile = tile_for("adamw", format)
    tiles = cut(format, numel, tile.elements, cuts.ONE_PASS)
    where = layout(second_format(format), numel)
    words = tiles.words(format.bits)
    plain = format.scale == Scale.NONE
    wide = min(tiles.width, where.block_size) if plain else tiles.width
    size = max(format.bits // 8, 1)
    read = group(words=words, code_size=4 if words else size, to_size=size, block=where.block_size,
                 blocks=tiles.groups * tiles.width // wide, wide=wide)  # fmt: skip
    mixed = draws.mix64(torch.tensor(~seed, dtype=torch.int64, device="cpu"))
    with on(parameter.device):
        for launch in launches(tiles):
            adamw_kernel[(launch["tiles"] * count,)](
                parameter=loadable(parameter),
                to_parameter=seen(parameter, parameter.element_size()),
                grad=loadable(grad),
                codes=seen(first, 4 if words else size),
                to_codes=seen(first, size),
                scales=seen(first, scale_size(format)),
                out=first,
                second=second,
                levels=first if recipe.table is None else cells(recipe.table).levels,
                second_seed=int(mixed),
                second_bytes=where.row_bytes,
                second_at=where.scales_offset,
                second_groups=where.blocks,
                FORM=form_of(format, parameter.device),
                READ=read,
                TAKES_MOMENTUM=takes_momentum,
                OUTPUT=OUTPUTS[parameter.dtype],
                **step._asdict(),
                **launch,
                **places(format, numel),
                row_bytes=layout(format, numel).row_bytes,
                last_size=ends(format, numel)["last_size"],
                **encoding(recipe, seed, first),
                **options(tiles, tile),
            )
