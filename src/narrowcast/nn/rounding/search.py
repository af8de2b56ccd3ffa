"""Round with searched scales: each block takes the stored scale (and zero point) that loses least. It needs no data.

The loss and the order of the search are written in kernels/reference/search.py; how much errors count in which column,
in codecs/columns.py. No block loses more than with nearest
rounding under that loss. A codec without scales (a plain cast) has nothing to search: its rows are those of nearest.
"""

from __future__ import annotations

import math

from torch import Tensor

from narrowcast.codecs import Codec
from narrowcast.codecs.columns import GAIN, column_weights
from narrowcast.codecs.payload import EncodedRows
from narrowcast.nn.rounding.moments import InputMoments


def round_by_search(weight: Tensor, codec: Codec, lead: int, moments: InputMoments | None = None) -> EncodedRows:
    """Rows whose scales were searched; `moments` do not count."""
    rows = weight.detach().reshape(*weight.shape[:lead], math.prod(weight.shape[lead:]))
    weights = None if rows.device.type == "meta" else weights_of_columns(rows)
    return EncodedRows(codec.encode_searched(rows, weights, GAIN), codec, weight.shape, weight.dtype)


def weights_of_columns(rows: Tensor) -> Tensor | None:
    """How much errors count in each column of rows [..., numel], told by the rows alone."""
    matrix = rows.reshape(-1, rows.shape[-1]) if rows.numel() else rows.reshape(0, rows.shape[-1])
    count, columns = matrix.shape
    return column_weights(count, columns, lambda start, stop: matrix[start:stop])
