"""What a rounding loses on a layer: the squared error of its output, relative to the squared output.

With moments of the inputs (moments.py) the error is that of the data, against the outputs of the unrounded model where
these are known. Without, inputs are taken to contribute alike (codecs/columns.py), and it is the mean over columns of
their squared errors relative to their squares.
"""

from __future__ import annotations

import torch
from torch import Tensor

from narrowcast.codecs.payload import EncodedRows, encode_rows
from narrowcast.codecs.tiles import tiles
from narrowcast.nn.noise import sqnr_of_rows
from narrowcast.nn.rounding.moments import InputMoments
from narrowcast.nn.rounding.search import weights_of_columns


def relative_error(weight: Tensor, rows: EncodedRows, moments: InputMoments | None) -> float | None:
    """The relative squared output error of encoded rows of `weight`; None on the meta device."""
    if weight.device.type == "meta":
        return None
    if moments is None or moments.total is None:
        return _error_of_columns(weight, rows)
    inputs = moments.inputs(weight.device)
    size = len(inputs), -1, inputs[0].moments.shape[-1]
    pairs = zip(weight.detach().float().reshape(size), rows.decode(torch.float32).reshape(size), inputs, strict=True)
    noise = signal = 0.0
    for exact, rounded, own in pairs:
        signal += float(own.energy(exact).double().sum())
        noise += float(own.errors(exact, rounded).double().sum())
    return noise / signal if signal else float(noise > 0)


def _error_of_columns(weight: Tensor, rows: EncodedRows) -> float | None:
    flat = rows.data.flatten(0, -2)
    matrix = weight.detach().reshape(len(flat), rows.numel)
    columns = weights_of_columns(matrix)
    if columns is None:
        sqnr = sqnr_of_rows(weight, rows)
        return None if sqnr is None else float(10 ** (-sqnr / 10))
    sums = torch.zeros(2, dtype=torch.float64, device=matrix.device)
    for start, stop in tiles(*matrix.shape):
        exact = matrix[start:stop].float()
        error = rows.codec.decode(flat[start:stop], rows.numel).sub_(exact)
        for place, values in enumerate((error, exact)):
            energies = torch.linalg.vector_norm(values, dim=0, dtype=torch.float64).square_()
            sums[place] += energies @ columns.double()
    noise, signal = sums.tolist()
    return float(noise / signal)


def nearest_error(weight: Tensor, rows: EncodedRows, moments: InputMoments | None, wanted: Tensor) -> float | None:
    """The same for nearest rounding of `weight` in the codec of `rows`, against what was wanted of it."""
    if weight.device.type == "meta":
        return None
    return relative_error(wanted, encode_rows(weight, rows.codec, lead=rows.data.dim() - 1), moments)
