"""Signal to quantization noise: the energy of a weight over that of its error, in dB."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from narrowcast.codecs.payload import EncodedRows

TILE = 1 << 18
"""Elements that are compared at a time: about what stays in a cache."""

SAFE = 1e-20, 1e30
"""Energies of weights whose squares are far from where fp32 underflows and overflows."""


def sqnr(exact: Tensor, rounded: Tensor) -> float:
    """The ratio in dB between a tensor and its error: infinity where there is no error."""
    exact = exact.double()
    signal, noise = (float(torch.linalg.vector_norm(values)) ** 2 for values in (exact, exact - rounded.double()))
    return _decibels(signal, noise)


def sqnr_of_rows(floats: Tensor, rows: EncodedRows) -> float | None:
    """`sqnr` of a weight and of its encoded rows, a tile at a time; None on the meta device."""
    if floats.device.type == "meta":
        return None
    signal, noise = _energies(floats, rows, torch.float32)
    if not (SAFE[0] < noise and signal < SAFE[1]):  # squares that fp32 has no room for, or no error at all
        signal, noise = _energies(floats, rows, torch.float64)
    return _decibels(signal, noise)


def _decibels(signal: float, noise: float) -> float:
    if noise == 0.0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal else -math.inf


def _energies(floats: Tensor, rows: EncodedRows, sums: torch.dtype) -> tuple[float, float]:
    """The sums of squares of a weight and of its error; each row is summed in the dtype `sums`."""
    wide = torch.float64 if floats.dtype == torch.float64 else torch.float32
    flat = rows.data.flatten(0, -2)
    matrix = floats.reshape(len(flat), rows.numel)
    step = max(1, TILE // rows.numel)
    totals = torch.zeros(2, dtype=torch.float64, device=floats.device)
    for first in range(0, len(flat), step):
        exact = matrix[first : first + step].to(wide)
        error = rows.codec.decode(flat[first : first + step], rows.numel, wide).sub_(exact)
        for place, values in enumerate((exact, error)):
            norms = torch.linalg.vector_norm(values, dim=1, dtype=torch.promote_types(sums, wide))
            totals[place] += norms.double().square().sum()
    signal, noise = totals.tolist()
    return signal, noise
