"""Plain torch: rows with the scales that lose least.

`encode` takes the scale that reaches a block's largest magnitude. `encode_searched` tries others, all of them numbers
that the row can store, and keeps the one with the least loss, the sum over the block of w (x - decoded)^2. The weight w
is 1, or `importance` of the element's place in its row. Its rows are ordinary rows of the format.

The search, in order; a candidate replaces the best one if its loss is smaller:

- the scale and zero point that `encode` takes;
- that scale times each of FACTORS, and times their negatives where a scale has a sign;
- for affine codes, the zero point one lower and one higher, at the best scale;
- REFINEMENTS times, the scale that fits the best codes in the least-squares sense: sum(w x v) / sum(w v v), where v is
  what a code stands for in units of the scale.

So no block loses more than `encode` loses on it, up to the rounding of the sums. Sums run in fp32, in 64 lanes that
are then folded in halves: element i of a block is added to lane i % 64. Losses that are not finite never win. Codecs
that round stochastically are rounded to nearest here. A format without scales has nothing to search.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from narrowcast.kernels.layout import FLT_MIN, Element, Recipe, Scale, layout, scaling, to_float32
from narrowcast.kernels.reference import casts
from narrowcast.kernels.reference.codes import dequantize, quantize
from narrowcast.kernels.reference.rows import as_blocks, encode, write_blocks
from narrowcast.kernels.reference.scales import block_sizes, choose_scale, zero_points

FACTORS = tuple(to_float32(factor) for factor in (1.07, 0.95, 0.87, 0.78))
"""Candidates, in units of the scale that `encode` takes. With them and one refinement, squared errors of MiniLM's
matrices are within 1.4% of a search over up to 90 scales (int4, int3, nf4, apot4, zero points)."""
POWERS = (0.5, 0.25)
"""The same for scales that are powers of two."""
REFINEMENTS = 1
LANES = 64


class Choice(NamedTuple):
    """Scales, zero points and losses of blocks: [rows, blocks, 1] each."""

    scale: Tensor
    zeros: Tensor
    loss: Tensor

    def or_better(self, other: Choice, allowed: Tensor | bool = True) -> Choice:
        """The better of two for each block; this one where they are equal."""
        better = (other.loss < self.loss) & allowed
        return Choice(*(torch.where(better, new, old) for new, old in zip(other, self, strict=True)))


class Blocks(NamedTuple):
    """Finite blocks [rows, blocks, size] of fp32, the weights of their elements, and what they are encoded in."""

    x: Tensor
    weights: Tensor | None
    inside: Tensor
    """Which elements are the row's: the last block may be short."""
    recipe: Recipe

    def total(self, *factors: Tensor) -> Tensor:
        """The sum over each block of a weighted product."""
        product = factors[0] * factors[1]
        product = product if self.weights is None else product * self.weights
        return lane_sum(torch.where(self.inside, product, 0.0))

    def codes(self, scale: Tensor, zeros: Tensor) -> Tensor:
        return quantize(self.x, scale, zeros, self.recipe, None)

    def choice(self, scale: Tensor, zeros: Tensor) -> Choice:
        """Scales and zero points with what they lose."""
        error = self.x - dequantize(self.codes(scale, zeros), scale, zeros, self.recipe)
        return Choice(scale, zeros, self.total(error, error))

    def fitted(self, best: Choice) -> Tensor:
        """The scale that fits the codes of a choice best, before it is rounded to a stored one."""
        ones = torch.ones_like(best.scale)
        units = dequantize(self.codes(best.scale, best.zeros), ones, best.zeros, self.recipe)
        return self.total(units, self.x) / self.total(units, units)


def encode_searched(rows: Tensor, importance: Tensor | None, recipe: Recipe) -> Tensor:
    """Encode each row of `rows` [rows, numel]; `importance` [numel] weighs the errors of a row's elements."""
    format = recipe.format
    count, numel = rows.shape
    where = layout(format, numel)
    if format.scale == Scale.NONE or rows.numel() == 0:
        return encode(rows, recipe, 0)
    blocks, finite = as_blocks(casts.to_float32(rows), where)
    weights = None
    if importance is not None:
        weights = pad(importance, (0, where.blocks * where.block_size - numel)).view(1, where.blocks, -1)
    places = torch.arange(where.blocks * where.block_size, dtype=torch.int64, device=rows.device)
    best = search(Blocks(blocks, weights, (places < numel).view(1, where.blocks, -1), recipe), numel)
    codes = quantize(blocks, best.scale, best.zeros, recipe, None)
    out = torch.zeros(count, where.row_bytes, dtype=torch.uint8, device=rows.device)
    write_blocks(out, codes, best.scale, best.zeros, finite, format, numel)
    return out


def search(blocks: Blocks, numel: int) -> Choice:
    """The best scales and zero points of blocks of rows of `numel` elements."""
    x, recipe = blocks.x, blocks.recipe
    format = recipe.format
    limit = scaling(format, recipe.peak).limit
    sizes = block_sizes(numel, x.shape[-1], x.shape[-2], x.device)
    first = choose_scale(x, sizes, recipe).unsqueeze(-1)
    best = blocks.choice(first, zero_points(x, first, format))
    if format.element != Element.SIGN:  # which has one scale that fits best
        for factor in candidates(format.scale):
            for signed in (factor, -factor) if format.signed_scale else (factor,):
                best = _try_scale(blocks, best, first * signed, limit)
    if format.affine:
        top = 2**format.bits - 1
        for step in (-1, 1):
            best = best.or_better(blocks.choice(best.scale, (best.zeros + step).clamp(0, top)))
    for _ in range(REFINEMENTS):
        best = _try_scale(blocks, best, blocks.fitted(best), limit)
    return best


def candidates(kind: int) -> tuple[float, ...]:
    """The factors that are tried for scales that are stored like this."""
    return POWERS if kind == Scale.E8M0 else FACTORS


def _try_scale(blocks: Blocks, best: Choice, wanted: Tensor, limit: float) -> Choice:
    """`best`, or the stored scale nearest to `wanted` where that is better. A scale below FLT_MIN never is."""
    format = blocks.recipe.format
    scale = round_to_stored(wanted, format.scale, limit)
    allowed = (scale.abs() if format.signed_scale else scale) >= FLT_MIN  # no NaN either
    scale = torch.where(allowed, scale, best.scale)
    return best.or_better(blocks.choice(scale, best.zeros), allowed)


def round_to_stored(scale: Tensor, kind: int, limit: float) -> Tensor:
    """The nearest number of the stored format, ties to even, its magnitude at most `limit`. NaN stays NaN."""
    magnitude = scale.abs().clamp(max=limit)
    bits = magnitude.view(torch.int32)
    if kind == Scale.BF16:
        magnitude = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16).view(torch.float32)
    elif kind == Scale.E8M0:
        magnitude = ((bits + 0x3FFFFF + ((bits >> 23) & 1)) >> 23 << 23).view(torch.float32)
    elif kind == Scale.FP16:
        magnitude = magnitude.half().float()
    magnitude = magnitude.clamp(max=limit)
    magnitude = torch.where(scale.isnan(), scale, magnitude)
    return torch.copysign(magnitude, scale)


def lane_sum(values: Tensor) -> Tensor:
    """The sum over the last dimension, kept with size 1, in a fixed order."""
    padded = pad(values, (0, -values.shape[-1] % LANES))
    lanes = padded.view(*values.shape[:-1], -1, LANES)
    total: Tensor = lanes[..., 0, :]
    for place in range(1, lanes.shape[-2]):
        total = total + lanes[..., place, :]
    while total.shape[-1] > 1:
        half = total.shape[-1] // 2
        total = total[..., :half] + total[..., half:]
    return total
