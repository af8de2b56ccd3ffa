"""Rows that are good already, made better: scales fitted to codes, and codes chosen again.

The error of an output is d H d^T, as in gptq.py. Given the codes of a row, it is a quadratic function of the row's
scales: the best ones solve a small linear system, and are rounded to stored ones. Given the scales and all other codes,
the best number for a column is known, and the nearest level to it is taken, one column after another (coordinate
descent). A row keeps what it had where that is better.
"""

from __future__ import annotations

import torch
from torch import Tensor

from narrowcast.codecs import Codec
from narrowcast.codecs.row_scales import RowScales
from narrowcast.kernels.layout import layout

COLUMNS = 128
"""Columns whose changes are applied at once to those outside of them."""
SWEEPS = 2
SYSTEMS = 1 << 25
"""Numbers, in fp64, of the systems that are solved at once for the scales of rows: 256 MB."""


def polish(weight: Tensor, codec: Codec, rows: Tensor, moments: Tensor) -> Tensor:
    """Better rows for `weight` [outputs, k] under the moments [k, k], which are positive definite."""
    best = _fit_scales(weight, codec, rows, moments)
    best = _better(weight, codec, best, _choose_codes(weight, codec, best, moments), moments)
    return _fit_scales(weight, codec, best, moments)


def _better(weight: Tensor, codec: Codec, rows: Tensor, other: Tensor, moments: Tensor) -> Tensor:
    errors = []
    for some in (rows, other):
        difference = weight - codec.decode(some, weight.shape[1])
        errors.append(((difference @ moments) * difference).sum(-1, keepdim=True))
    return torch.where(errors[1] < errors[0], other, rows)


def _fit_scales(weight: Tensor, codec: Codec, rows: Tensor, moments: Tensor) -> Tensor:
    """Rows with the same codes and the scales that fit them best; some rows at a time, since each has a system."""
    at_once = max(1, SYSTEMS // max(layout(codec.format, weight.shape[1]).blocks, 1) ** 2)
    parts = [slice(first, first + at_once) for first in range(0, len(weight), at_once)]
    return torch.cat([_fit_some_scales(weight[part], codec, rows[part], moments) for part in parts])


def _fit_some_scales(weight: Tensor, codec: Codec, rows: Tensor, moments: Tensor) -> Tensor:
    count, k = weight.shape
    fields = codec.split(rows, k)
    if fields.scales is None:
        return rows
    ones = codec.join(fields.codes, torch.ones_like(fields.scales), fields.zero_points)
    units = codec.decode(ones, k)
    where = layout(codec.format, k)
    padding = where.blocks * where.block_size - k
    system = torch.empty(count, where.blocks, where.blocks, dtype=torch.float64, device=weight.device)
    wanted = torch.empty(count, where.blocks, dtype=torch.float64, device=weight.device)
    for block in range(where.blocks):
        part = slice(block * where.block_size, min((block + 1) * where.block_size, k))
        product = units[:, part] @ moments[part]
        sums = torch.nn.functional.pad(product * units, (0, padding)).view(count, where.blocks, -1).sum(-1)
        system[:, block] = sums.double()
        wanted[:, block] = (product * weight).sum(-1).double()
    diagonal = system.diagonal(dim1=1, dim2=2)
    diagonal += 1e-6 * diagonal.mean(-1, keepdim=True) + torch.finfo(torch.float32).tiny  # a block of zeros has none
    scales, _ = torch.linalg.solve_ex(system, wanted)
    fitted = RowScales.of(codec, fields).with_scales(scales)
    return _better(weight, codec, rows, fitted.join(fields.codes), moments)


def _choose_codes(weight: Tensor, codec: Codec, rows: Tensor, moments: Tensor) -> Tensor:
    """Rows with the same scales, in which each code is the best one given the others."""
    k = weight.shape[1]
    fields = codec.split(rows, k)
    row_scales, codes = RowScales.of(codec, fields), fields.codes.long()
    columns = torch.arange(k, dtype=torch.int64, device=weight.device)
    values = codec.decode(rows, k)
    slope = (values - weight) @ moments
    for _ in range(SWEEPS):
        for first in range(0, k, COLUMNS):
            last = min(first + COLUMNS, k)
            here = slice(first, last)
            codes[:, here], changes = row_scales.choose_columns(
                values[:, here], slope[:, here], moments[here, here], columns[here]
            )
            slope[:, :first] += changes @ moments[here, :first]
            slope[:, last:] += changes @ moments[here, last:]
    return row_scales.join(codes)
