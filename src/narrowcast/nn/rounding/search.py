"""Round with searched scales: each block takes the stored scale (and zero point) that loses least. It needs no data.

The loss and the order of the search are written in kernels/reference/search.py. No block loses more than with nearest
rounding under that loss. Errors of a column count by the mean square of its input where that is known
(random_tokens.py), and alike where it is not. A codec without scales (a plain cast) has nothing to search: its rows are
those of nearest.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from narrowcast.codecs import Codec
from narrowcast.codecs.payload import EncodedRows
from narrowcast.kernels.reference.search import GAIN
from narrowcast.nn.rounding.moments import InputMoments

LEAST = 0.1
"""What every column counts at least, where 1 is the average."""


def round_by_search(
    weight: Tensor, codec: Codec, lead: int, moments: InputMoments | None = None, gain: float = GAIN
) -> EncodedRows:
    """Rows whose scales were searched."""
    rows = weight.detach().reshape(*weight.shape[:lead], math.prod(weight.shape[lead:]))
    counts = column_counts(moments)
    if counts is None:
        data = codec.encode_searched(rows, gain=gain)
    else:
        parts = rows.reshape(len(counts), -1, rows.shape[-1])
        pairs = zip(parts, counts.to(rows.device), strict=True)
        data = torch.cat([codec.encode_searched(part, own, gain) for part, own in pairs])
        data = data.view(*weight.shape[:lead], -1)
    return EncodedRows(data, codec, weight.shape, weight.dtype)


def column_counts(moments: InputMoments | None) -> Tensor | None:
    """What errors of columns count, 1 on average: fp32 [groups, k]; None where nothing is known of inputs."""
    if moments is None or moments.total is None:
        return None
    squares = moments.total if moments.total.dim() == 2 else moments.total.diagonal(dim1=1, dim2=2)
    mean = squares.mean(-1, keepdim=True)
    counts = torch.where(mean > 0, squares / mean, torch.ones_like(squares))
    return counts.clamp(min=LEAST).float()
