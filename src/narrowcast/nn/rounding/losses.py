"""What a rounding loses on a layer: the squared error of its output, relative to the squared output.

With moments of the inputs (moments.py) the error is that of the data, against the outputs of the unrounded model where
these are known. Without, inputs have no preferred direction, and
it is the squared error of the weight relative to the squared weight.
"""

from __future__ import annotations

import torch
from torch import Tensor

from narrowcast.codecs.payload import EncodedRows, encode_rows
from narrowcast.nn.noise import sqnr_of_rows
from narrowcast.nn.rounding.moments import InputMoments


def relative_error(weight: Tensor, rows: EncodedRows, moments: InputMoments | None) -> float | None:
    """The relative squared output error of encoded rows of `weight`; None on the meta device."""
    if weight.device.type == "meta":
        return None
    if moments is None or moments.total is None:
        sqnr = sqnr_of_rows(weight, rows)
        return None if sqnr is None else float(10 ** (-sqnr / 10))
    inputs = moments.inputs(weight.device)
    size = len(inputs), -1, inputs[0].moments.shape[-1]
    pairs = zip(weight.detach().float().reshape(size), rows.decode(torch.float32).reshape(size), inputs, strict=True)
    noise = signal = 0.0
    for exact, rounded, own in pairs:
        signal += float(own.energy(exact).double().sum())
        noise += float(own.errors(exact, rounded).double().sum())
    return noise / signal if signal else float(noise > 0)


def nearest_error(weight: Tensor, rows: EncodedRows, moments: InputMoments | None, wanted: Tensor) -> float | None:
    """The same for nearest rounding of `weight` in the codec of `rows`, against what was wanted of it."""
    if weight.device.type == "meta":
        return None
    return relative_error(wanted, encode_rows(weight, rows.codec, lead=rows.data.dim() - 1), moments)
