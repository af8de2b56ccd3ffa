"""What a rounding loses on a layer: the squared error of its output, relative to the squared output.

With moments of the inputs (moments.py) the error is that of the data, against the outputs of the unrounded model where
these are known. Without, it is what a search makes small, relative to the squares of the weights, both weighed by the
squares of inputs as far as these are guessed: the squared errors of each block, and what the block lacks as a whole
(kernels/reference/search.py).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from narrowcast.codecs.payload import EncodedRows, encode_rows
from narrowcast.codecs.tiles import tiles
from narrowcast.kernels.layout import layout
from narrowcast.kernels.reference.search import GAIN
from narrowcast.nn.noise import sqnr_of_rows
from narrowcast.nn.rounding.moments import InputMoments
from narrowcast.nn.rounding.search import column_counts


def relative_error(weight: Tensor, rows: EncodedRows, moments: InputMoments | None, gain: float = GAIN) -> float | None:
    """The relative squared output error of encoded rows of `weight`; None on the meta device."""
    if weight.device.type == "meta":
        return None
    if moments is None or moments.total is None or moments.total.dim() == 2:
        return _error_of_blocks(weight, rows, column_counts(moments), gain)
    inputs = moments.inputs(weight.device)
    size = len(inputs), -1, inputs[0].moments.shape[-1]
    pairs = zip(weight.detach().float().reshape(size), rows.decode(torch.float32).reshape(size), inputs, strict=True)
    noise = signal = 0.0
    for exact, rounded, own in pairs:
        signal += float(own.energy(exact).double().sum())
        noise += float(own.errors(exact, rounded).double().sum())
    return noise / signal if signal else float(noise > 0)


def _error_of_blocks(weight: Tensor, rows: EncodedRows, counts: Tensor | None, gain: float) -> float | None:
    counts = torch.ones(1, rows.numel, dtype=torch.float32, device=weight.device) if counts is None else counts
    noise = signal = 0.0
    flat = rows.data.flatten(0, -2)
    cut = flat.view(len(counts), -1, flat.shape[-1]), weight.detach().reshape(len(counts), -1, rows.numel)
    for data, exact, own in zip(*cut, counts.to(weight.device), strict=True):
        lost, whole = _sums_of_blocks(exact, data, rows, own, gain)
        noise, signal = noise + lost, signal + whole
    if 0 < signal < math.inf:
        return noise / signal
    sqnr = sqnr_of_rows(weight, rows)
    return None if sqnr is None else float(10 ** (-sqnr / 10))


def _sums_of_blocks(
    matrix: Tensor, flat: Tensor, rows: EncodedRows, counts: Tensor, gain: float
) -> tuple[float, float]:
    """The loss of a search on rows with columns that count so, and the squares of the weights, weighed the same."""
    size = layout(rows.codec.format, rows.numel).block_size or rows.numel
    noise = signal = 0.0
    for start, stop in tiles(*matrix.shape):
        exact = matrix[start:stop].float()
        error = exact - rows.codec.decode(flat[start:stop], rows.numel)
        parts = exact, error, counts.expand_as(exact)
        x, e, w = (pad(part, (0, -rows.numel % size)).double().view(-1, size) for part in parts)
        energy = (w * x * x).sum(-1)
        lacking = (w * e * x).sum(-1).square() / energy.clamp(min=torch.finfo(torch.float64).tiny)
        noise += float((w * e * e).sum() + gain * lacking.sum())
        signal += float(energy.sum())
    return noise, signal


def nearest_error(
    weight: Tensor, rows: EncodedRows, moments: InputMoments | None, wanted: Tensor, gain: float = GAIN
) -> float | None:
    """The same for nearest rounding of `weight` in the codec of `rows`, against what was wanted of it."""
    if weight.device.type == "meta":
        return None
    return relative_error(wanted, encode_rows(weight, rows.codec, lead=rows.data.dim() - 1), moments, gain)
