"""Round one column after another, and let the columns that are left make up for the error of those before.

As in GPTQ (Frantar et al., ICLR 2023): the squared error of a layer's output is d H d^T for each output, where d is the
error of its weights and H the sum of x x^T over the inputs (moments.py). Columns are rounded in order. The error of a
column is spread over the columns that are not rounded yet, so that the output changes least; the Cholesky factor of
H's inverse says how.

What is done differently here:

- Levels are any codec's, and scales are numbers that its rows store. They are searched (kernels/reference/search.py)
  with what the error of each column costs once the others have made up for it, 1 / diag(factor)^2: all at once with
  `act_order`, which rounds the columns with the largest inputs first, and for codecs with one scale a row; else for
  each block when its first column comes up.
- Inputs are those of the rounded model. Where the outputs in the unrounded model are known too, the weight is first
  moved to where it gives them best, and so makes up for the layers before it. If the output is only added to another
  tensor, as in a residual branch, the sum is what is wanted: it makes up for the other term too (sequence.py).
- H is damped: `damping` times its mean diagonal is added to the diagonal, ten times as much if the factorization fails
  nevertheless. An input that is always zero takes no part: its weights are rounded to nearest.
- Then scales are fitted to the codes, and codes are chosen once more, column by column, given all others (polish.py).
- At the end each output takes these codes, or those of a search, or the nearest ones, whichever has the least error
  against the unrounded model. So no output is worse than with nearest rounding on the data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from narrowcast.codecs import Codec
from narrowcast.codecs.payload import EncodedRows
from narrowcast.codecs.row_scales import RowScales
from narrowcast.errors import CalibrationError, SpecError
from narrowcast.nn.rounding.moments import InputMoments, Inputs
from narrowcast.nn.rounding.polish import polish

COLUMNS = 128
"""Columns whose errors are spread at once over those behind them."""
LARGEST_DAMPING = 1e6
PULL = 2.0
"""How much more weights are damped while they are moved to make up for the layers before them (bench/rounding.py)."""
ROWS = 8192
"""Outputs that are rounded at once: what a rounding needs beside the weight is bounded, whatever the vocabulary."""
FEWEST = 16
"""Inputs that an expert needs for second-order rounding; with fewer its scales are searched instead."""


@dataclass(frozen=True)
class GPTQ:
    """`rounding=GPTQ(...)`: second-order rounding with options; "gptq" is `GPTQ()`."""

    act_order: bool = True
    """Round the columns with the largest inputs first."""
    damping: float = 0.3
    """What is added to the diagonal of the moments, relative to its mean. On MiniLM, int4, calibrated on 60 sentences,
    the mean cosine on others was 0.981, 0.985, 0.988 and 0.989 with 0.01, 0.03, 0.1 and 0.3."""

    def __post_init__(self) -> None:
        if not isinstance(self.act_order, bool):
            raise SpecError(f"act_order={self.act_order!r}: expected True or False.")
        if not isinstance(self.damping, (int, float)) or not 0 < self.damping < LARGEST_DAMPING:
            raise SpecError(f"damping={self.damping!r}: expected a positive number, such as 0.01.")

    def __call__(self, weight: Tensor, codec: Codec, lead: int, moments: InputMoments | None = None) -> EncodedRows:
        """Rows of `weight`, rounded so that the layer's output changes least over the inputs of `moments`."""
        if moments is None or not moments.count:
            raise CalibrationError("moments: gptq needs the inputs of the layer, and there are none. Pass data.")
        inputs = moments.inputs(weight.device)
        rows = weight.detach().float().reshape(len(inputs), -1, inputs[0].moments.shape[-1])
        parts = []
        for part, own, count in zip(rows, inputs, moments.counts, strict=True):
            enough = count >= FEWEST or lead != 2  # of experts each has its own inputs
            parts.append(self.round_rows(part, codec, own) if enough else codec.encode_searched(part))
        return EncodedRows(torch.stack(parts).view(*weight.shape[:lead], -1), codec, weight.shape, weight.dtype)

    def round_rows(self, weight: Tensor, codec: Codec, inputs: Inputs) -> Tensor:
        """Encoded rows of `weight` [outputs, k]. An output with a weight that is not finite is rounded to nearest."""
        finite = weight.isfinite().all(1, keepdim=True)
        exact = torch.where(finite, weight, 0.0)
        target, metric = exact, None
        if float(inputs.moments.diagonal().sum()) > 0:
            target, metric = self._target(exact, inputs), Metric.of(inputs.moments, self)
        parts = []
        for first in range(0, len(weight), ROWS):
            part = slice(first, first + ROWS)
            candidates = [codec.encode(weight[part], 0)]
            if metric is not None:
                candidates += self._compensated(target[part], codec, metric)
            parts.append(_best(candidates, codec, exact[part], finite[part], inputs.of_outputs(part)))
        return torch.cat(parts)

    def _target(self, weight: Tensor, inputs: Inputs) -> Tensor:
        """The weight that gives the wanted outputs best on the rounded model's inputs.

        It is the least-squares fit of y by V x', pulled towards W by the damping: V = (Y + d W)(H + d)^-1.
        """
        if inputs.wanted is None:
            return weight
        damping = PULL * self.damping * (float(inputs.moments.diagonal().double().mean()) or 1.0)
        damped = inputs.moments.double()
        damped.diagonal().add_(damping)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if int(failed):
            return weight
        wanted = inputs.wanted.double() + damping * weight.double()
        fitted = torch.cholesky_solve(wanted.t(), lower).t()
        return fitted.float().contiguous() if bool(fitted.isfinite().all()) else weight

    def _compensated(self, weight: Tensor, codec: Codec, metric: Metric) -> list[Tensor]:
        """Rows with searched scales, and rows whose later columns make up for the earlier ones."""
        searched = codec.encode_searched(weight, metric.importance)
        row_scales = RowScales.of(codec, codec.split(searched, weight.shape[1]))
        dynamic = not self.act_order and codec.block not in (None, "row")
        columns = _Columns(weight[:, metric.order], metric.upper, row_scales, metric.order)
        rows = columns.round(metric.importance if dynamic else None)
        return [searched, rows, polish(weight, codec, rows, metric.damped)]


class Metric(NamedTuple):
    """What errors of a layer's weights cost, once for all of its rows."""

    damped: Tensor
    """The moments [k, k], damped."""
    order: Tensor
    """In which columns are rounded."""
    upper: Tensor
    """The factor of the inverse, in that order."""
    importance: Tensor
    """What the error of each column costs once the others have made up for it, 1 on average."""

    @classmethod
    def of(cls, moments: Tensor, options: GPTQ) -> Metric:
        order = torch.argsort(moments.diagonal(), descending=True, stable=True)
        order = order if options.act_order else torch.arange(len(order), dtype=torch.int64, device=order.device)
        upper = factor_of_inverse(moments[order][:, order], options.damping)
        importance = torch.empty_like(upper[0])
        importance[order] = upper.diagonal().square().reciprocal()
        damped = moments.clone()
        damped.diagonal().add_(options.damping * moments.diagonal().mean())
        return cls(damped, order, upper, importance / importance.mean())


def _best(candidates: Sequence[Tensor], codec: Codec, weight: Tensor, finite: Tensor, inputs: Inputs) -> Tensor:
    """For each output, the rows with the least error; the first ones where a weight is not finite."""
    decoded = [codec.decode(rows, weight.shape[1]) for rows in candidates]
    best = torch.stack([inputs.errors(weight, rounded) for rounded in decoded]).argmin(0)
    rows = candidates[0]
    for place, other in enumerate(candidates[1:], 1):
        rows = torch.where((best == place).unsqueeze(-1) & finite, other, rows)
    return rows


class _Columns:
    """The weights [outputs, k] of a layer in the order in which their columns are rounded."""

    def __init__(self, weight: Tensor, upper: Tensor, row_scales: RowScales, order: Tensor) -> None:
        self.weight, self.upper, self.row_scales, self.order = weight, upper, row_scales, order
        self.codes = torch.zeros(weight.shape, dtype=torch.int64, device=weight.device)
        if row_scales.scales is not None:  # a search of blocks writes into these
            zero_points = None if row_scales.zero_points is None else row_scales.zero_points.clone()
            self.row_scales = row_scales._replace(scales=row_scales.scales.clone(), zero_points=zero_points)

    def round(self, importance: Tensor | None) -> Tensor:
        """Rows of bytes. With `importance`, the scales of a block are searched when its first column comes up."""
        k, first = self.weight.shape[1], 0
        block = k if importance is None else int(self.row_scales.codec.block or k)
        while first < k:
            last = min(first + COLUMNS, first - first % block + block, k)
            if importance is not None and first % block == 0:
                self._search_block(first, min(first + block, k), importance)
            here = slice(first, last)
            part = self.weight[:, here].contiguous()
            codes, errors = self.row_scales.round_columns(part, self.upper[here, here], self.order[here])
            self.codes[:, self.order[here]] = codes
            self.weight[:, last:] -= errors @ self.upper[here, last:]
            first = last
        return self.row_scales.join(self.codes)

    def _search_block(self, first: int, last: int, importance: Tensor) -> None:
        """Choose the scales of the block of these columns, for its weights as they are by now."""
        codec, values = self.row_scales.codec, self.weight[:, first:last]
        fields = codec.split(codec.encode_searched(values, importance[first:last].contiguous()), last - first)
        scales, zero_points = self.row_scales.scales, self.row_scales.zero_points
        assert scales is not None
        assert fields.scales is not None
        block = first // int(codec.block or 1)
        scales[:, block] = fields.scales[:, 0]
        if zero_points is not None and fields.zero_points is not None:
            zero_points[:, block] = fields.zero_points[:, 0]


def factor_of_inverse(moments: Tensor, damping: float) -> Tensor:
    """The upper Cholesky factor of the inverse of damped moments [k, k]. Inputs that are always zero stand alone."""
    diagonal = moments.diagonal()
    dead = diagonal <= 0
    mean = float(diagonal.double().mean()) or 1.0
    while damping < LARGEST_DAMPING:
        damped = moments.double()
        damped.diagonal().add_(damping * mean)
        damped.diagonal().masked_fill_(dead, mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not int(failed):
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not int(failed) and bool(upper.isfinite().all()):
                factor: Tensor = upper.float()
                return factor
        damping *= 10
    raise CalibrationError("data: the moments of a layer's inputs cannot be factorized: are they finite?")
