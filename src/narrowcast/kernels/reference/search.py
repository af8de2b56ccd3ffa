"""Plain torch: rows with the scales that lose least.

`encode` takes the scale that reaches a block's largest magnitude. `encode_searched` tries others, all of them numbers
that the row can store, and keeps the one with the least loss. With e for the errors x - decoded of a block, it is

    sum(w e e) + gain sum(w e x)^2 / sum(w x x)

The weight w is 1, or `importance` of the element's place in its row. The second term is what the block's share of an
output loses or gains as a whole: the scale of least squared error makes all blocks a little smaller, which adds up
where single errors cancel out. Its rows are ordinary rows of the format.

Given its codes, the loss of a block is a parabola in its scale. With v for what a code stands for in units of the
scale, e is x - v scale, so that sum(w e x) = sum(w e e) + scale sum(w e v): a pass over the block takes three sums, of
w e e, w e v and w v v, whatever the gain. They also tell the scale that fits these codes best, and the loss with that
one, the floor. So a pass that measures a scale also tells a better one (`Blocks.choice`). The search, in order; a
candidate replaces the best one if it is smaller:

- the scale and zero point that `encode` takes;
- that scale times each factor (`candidates`), compared by their floors; for affine codes then the zero point one lower
  and one higher, at the best scale;
- REFINEMENTS times the stored scale nearest to the one that fits the codes of the last best;
- of the first, of the one with the lowest floor and of the refined ones, the one with the least loss is taken.

So no block loses more than `encode` loses on it, up to the rounding of the sums. Scales that are powers of two are far
from those that fit best, and are compared by their losses throughout. Sums run in fp32, in 64 lanes that are then
folded in halves: element i of a block is added to lane i % 64. Losses that are not finite never win. Codecs that round
stochastically are rounded to nearest here. A format without scales has nothing to search.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from narrowcast.kernels.layout import FLT_MIN, Element, Format, Recipe, Scale, layout, scaling, to_float32
from narrowcast.kernels.reference import casts
from narrowcast.kernels.reference.codes import dequantize, quantize
from narrowcast.kernels.reference.rows import as_blocks, encode, write_blocks
from narrowcast.kernels.reference.scales import block_sizes, choose_scale, zero_points

FACTORS = tuple(to_float32(factor) for factor in (0.95, 0.88, 1.07))
"""Candidates, in units of the scale that `encode` takes. On blocks of 64 of MiniLM's matrices squared errors are within
0.7 to 1.1% (nf4, int4, apot4), 1.9% (int5) and 2.8% (int3) of a search over 61 scales, of both signs where they have
one, each fitted three times. Scales of the other sign were tried and are not worth their time."""
POWERS = (0.5, 0.25)
"""The same for scales that are powers of two."""
REFINEMENTS = 1
GAIN = 4.0
"""The gain of a search that knows nothing of inputs (`rounding="search"`). Chosen on two models (docs/rounding.md):
without it, searched scales of a language model lose more than nearest ones."""
LANES = 64


class Choice(NamedTuple):
    """Scales and zero points that were tried, and what is known of them: [rows, blocks, 1] each."""

    scale: Tensor
    zeros: Tensor
    loss: Tensor
    floor: Tensor
    """The loss with the scale that fits these codes best."""
    fit: Tensor
    """That scale, before it is rounded to a stored one."""

    def or_better(self, other: Choice) -> Choice:
        """The one of two that loses less, for each block; this one where they are equal."""
        return self._or(other, other.loss < self.loss)

    def or_more_promising(self, other: Choice) -> Choice:
        """The one with the lower floor."""
        return self._or(other, other.floor < self.floor)

    def _or(self, other: Choice, taken: Tensor) -> Choice:
        return Choice(*(torch.where(taken, new, old) for new, old in zip(other, self, strict=True)))


class Blocks(NamedTuple):
    """Finite blocks [rows, blocks, size] of fp32, the weights of their elements, and what they are encoded in."""

    x: Tensor
    weights: Tensor | None
    inside: Tensor
    """Which elements are the row's: the last block may be short."""
    recipe: Recipe
    gain: float

    def share(self) -> Tensor | None:
        """The gain over sum(w x x), for each block; None for no gain."""
        if not self.gain:
            return None
        squares = self.total(self.x, self.x)
        return torch.full_like(squares, self.gain) / squares  # a number over a tensor is rounded twice

    def total(self, *factors: Tensor) -> Tensor:
        """The sum over each block of a weighted product."""
        product = factors[0] * factors[1]
        product = product if self.weights is None else product * self.weights
        return lane_sum(torch.where(self.inside, product, 0.0))

    def choice(self, scale: Tensor, zeros: Tensor) -> Choice:
        """Scales and zero points with what they lose.

        If the scale grows by d, e changes by -d v, and the loss to sum(w e e) - 2 d sum(w e v) + d^2 sum(w v v) +
        share (sum(w e x) - d sum(w v x))^2: least at d = `step`, where it is lower by slope * step.
        """
        codes = quantize(self.x, scale, zeros, self.recipe, None)
        error = self.x - dequantize(codes, scale, zeros, self.recipe)
        units = dequantize(codes, torch.ones_like(scale), zeros, self.recipe)
        loss, slope, bend = self.total(error, error), self.total(error, units), self.total(units, units)
        share = self.share()
        if share is not None:
            lacking, reached = loss + scale * slope, slope + scale * bend  # sum(w e x), sum(w v x)
            pull = share * lacking
            loss, slope, bend = loss + pull * lacking, slope + pull * reached, bend + share * reached * reached
        step = slope / bend
        powers = self.recipe.format.scale == Scale.E8M0
        return Choice(scale, zeros, loss, loss if powers else loss - slope * step, scale + step)

    def stored(self, wanted: Tensor, zeros: Tensor, instead: Tensor) -> Choice:
        """The same for the stored scales nearest to `wanted`. One below FLT_MIN, or NaN, loses infinitely much."""
        format = self.recipe.format
        scale = round_to_stored(wanted, format.scale, scaling(format, self.recipe.peak).limit)
        allowed = (scale.abs() if format.signed_scale else scale) >= FLT_MIN
        tried = self.choice(torch.where(allowed, scale, instead), zeros)
        infinite, none = torch.full_like(tried.loss, math.inf), torch.full_like(tried.fit, math.nan)
        return tried._replace(
            loss=torch.where(allowed, tried.loss, infinite),
            floor=torch.where(allowed, tried.floor, infinite),
            fit=torch.where(allowed, tried.fit, none),
        )


def encode_searched(rows: Tensor, importance: Tensor | None, gain: float, recipe: Recipe) -> Tensor:
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
    inside = (places < numel).view(1, where.blocks, -1)
    best = search(Blocks(blocks, weights, inside, recipe, to_float32(gain)), numel)
    codes = quantize(blocks, best.scale, best.zeros, recipe, None)
    out = torch.zeros(count, where.row_bytes, dtype=torch.uint8, device=rows.device)
    write_blocks(out, codes, best.scale, best.zeros, finite, format, numel)
    return out


def search(blocks: Blocks, numel: int) -> Choice:
    """The best scales and zero points of blocks of rows of `numel` elements."""
    x, recipe = blocks.x, blocks.recipe
    format = recipe.format
    sizes = block_sizes(numel, x.shape[-1], x.shape[-2], x.device)
    nearest = choose_scale(x, sizes, recipe).unsqueeze(-1)
    first = best = blocks.choice(nearest, zero_points(x, nearest, format))
    for factor in candidates(format):
        best = best.or_more_promising(blocks.stored(nearest * factor, first.zeros, nearest))
    if format.affine:
        top = 2**format.bits - 1
        for step in (-1, 1):
            best = best.or_more_promising(blocks.choice(best.scale, (best.zeros + step).clamp(0, top)))
    least = first.or_better(best)
    for _ in range(REFINEMENTS):
        best = blocks.stored(best.fit, best.zeros, nearest)
        least = least.or_better(best)
    return least


def candidates(format: Format) -> tuple[float, ...]:
    """The factors that are tried, in units of the scale that `encode` takes."""
    if format.element == Element.SIGN:
        return ()  # one scale fits best, and is found at once
    return POWERS if format.scale == Scale.E8M0 else FACTORS


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
