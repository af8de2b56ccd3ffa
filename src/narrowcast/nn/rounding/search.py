"""Round with searched scales: each block takes the stored scale (and zero point) that loses least. It needs no data.

The loss and the order of the search are written in kernels/reference/search.py. No block loses more than with nearest
rounding under that loss. A codec without scales (a plain cast) has nothing to search: its rows are those of nearest.
"""

from __future__ import annotations

import math

from torch import Tensor

from narrowcast.codecs import Codec
from narrowcast.codecs.payload import EncodedRows
from narrowcast.kernels.reference.search import GAIN
from narrowcast.nn.rounding.moments import InputMoments


def round_by_search(
    weight: Tensor, codec: Codec, lead: int, moments: InputMoments | None = None, gain: float = GAIN
) -> EncodedRows:
    """Rows whose scales were searched; `moments` do not count."""
    rows = weight.detach().reshape(*weight.shape[:lead], math.prod(weight.shape[lead:]))
    return EncodedRows(codec.encode_searched(rows, gain=gain), codec, weight.shape, weight.dtype)
