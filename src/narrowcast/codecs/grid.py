"""The grid of rows whose scales are known: numbers to codes, and codes to numbers.

`encode` chooses scales and codes together. A rounding that chooses the codes of a row one element after another has
its scales first. A `Grid` holds the scales and zero points of rows, as `Codec.split` gives them, and turns columns of
numbers into codes (the nearest ones; stochastic codecs too) and back. `Codec.join` makes rows of the codes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from narrowcast.codecs.base import Codec
from narrowcast.codecs.fields import Fields
from narrowcast.kernels.layout import FLT_MIN, Recipe, layout, scaling
from narrowcast.kernels.reference import casts, codes, search


class Grid(NamedTuple):
    """The scales and zero points [rows, blocks] of rows of `numel` elements; None where the codec has none."""

    codec: Codec
    numel: int
    scales: Tensor | None
    zero_points: Tensor | None

    @classmethod
    def of(cls, codec: Codec, fields: Fields) -> Grid:
        """The grid of rows that were split."""
        return cls(codec, fields.codes.shape[-1], fields.scales, fields.zero_points)

    def codes(self, x: Tensor, column: int) -> Tensor:
        """The codes of `x` [rows], the elements in one column of the rows, as int64."""
        if self.scales is None:
            return casts.cast_bits(x, self.codec.format.element).long()
        scale, zeros = self._block(column)
        return codes.quantize(x, scale, zeros, self._recipe(x), None).long()

    def values(self, chosen: Tensor, column: int) -> Tensor:
        """What codes [rows] of a column decode to, in fp32."""
        if self.scales is None:
            return casts.cast_value(chosen, self.codec.format.element)
        scale, zeros = self._block(column)
        return codes.dequantize(chosen, scale, zeros, self._recipe(chosen))

    def join(self, chosen: Tensor) -> Tensor:
        """Rows of bytes that hold codes [rows, numel]."""
        return self.codec.join(chosen, self.scales, self.zero_points)

    def with_scales(self, wanted: Tensor) -> Grid:
        """The same grid with the stored scales nearest to `wanted`; where there is none, scales stay as they are."""
        assert self.scales is not None
        format = self.codec.format
        stored = search.round_to_stored(wanted.float(), format.scale, scaling(format, self.codec.peak).limit)
        allowed = (stored.abs() if format.signed_scale else stored) >= FLT_MIN  # no NaN either
        return self._replace(scales=torch.where(allowed, stored, self.scales).contiguous())

    def _block(self, column: int) -> tuple[Tensor, Tensor]:
        assert self.scales is not None
        block = column // layout(self.codec.format, self.numel).block_size
        scale = self.scales[:, block]
        zeros = scale if self.zero_points is None else self.zero_points[:, block]
        return scale, zeros.long() if self.zero_points is not None else torch.zeros_like(scale, dtype=torch.int64)

    def _recipe(self, like: Tensor) -> Recipe:
        return self.codec.recipe(like.device)
