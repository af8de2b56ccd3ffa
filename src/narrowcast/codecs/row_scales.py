"""Rows whose scales are known: codes of columns, one after another.

`encode` chooses scales and codes together. A rounding that chooses the codes of a row one element after another has
its scales first. `RowScales` are the scales and zero points of rows, as `Codec.split` gives them. They turn columns of
numbers into codes (the nearest ones; stochastic codecs too). `Codec.join` makes rows of the codes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from narrowcast.codecs.base import Codec
from narrowcast.codecs.fields import Fields
from narrowcast.kernels.layout import FLT_MIN, layout, scaling
from narrowcast.kernels.operators.dispatch import kernel_for
from narrowcast.kernels.reference import search


class RowScales(NamedTuple):
    """The scales and zero points [rows, blocks] of rows of `numel` elements; None where the codec has none."""

    codec: Codec
    numel: int
    scales: Tensor | None
    zero_points: Tensor | None

    @classmethod
    def of(cls, codec: Codec, fields: Fields) -> RowScales:
        """Those of rows that were split."""
        return cls(codec, fields.codes.shape[-1], fields.scales, fields.zero_points)

    def round_columns(self, weight: Tensor, factor: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
        """Round these columns of the rows, `weight` [rows, columns], in order: codes, and errors over their factors.

        Each error changes the columns behind it by its factors [columns, columns]; see kernels/reference/columns.py.
        """
        kernel = kernel_for(weight.device.type)
        return kernel.round_columns(weight, factor, *self._under(columns), self.codec.recipe(weight.device))

    def choose_columns(self, values: Tensor, slope: Tensor, moments: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
        """Choose the codes of these columns in order, given all others: codes, and how much `values` changed."""
        kernel = kernel_for(values.device.type)
        return kernel.choose_columns(values, slope, moments, *self._under(columns), self.codec.recipe(values.device))

    def join(self, chosen: Tensor) -> Tensor:
        """Rows of bytes that hold codes [rows, numel]."""
        return self.codec.join(chosen, self.scales, self.zero_points)

    def with_scales(self, wanted: Tensor) -> RowScales:
        """The stored scales nearest to `wanted`; where there is none, scales stay as they are."""
        assert self.scales is not None
        format = self.codec.format
        stored = search.round_to_stored(wanted.float(), format.scale, scaling(format, self.codec.peak).limit)
        allowed = (stored.abs() if format.signed_scale else stored) >= FLT_MIN  # no NaN either
        return self._replace(scales=torch.where(allowed, stored, self.scales).contiguous())

    def _under(self, columns: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor]:
        """The scales, the zero points, and which of them belong to columns."""
        if self.scales is None:
            return None, None, columns  # which block does not matter
        return self.scales, self.zero_points, columns // layout(self.codec.format, self.numel).block_size
