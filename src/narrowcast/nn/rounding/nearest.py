"""Round to nearest: every element goes to the level that is closest to it, with the scales that the codec chooses."""

from __future__ import annotations

from torch import Tensor

from narrowcast.codecs import Codec
from narrowcast.codecs.payload import EncodedRows, encode_rows
from narrowcast.nn.rounding.moments import InputMoments


def round_to_nearest(weight: Tensor, codec: Codec, lead: int, moments: InputMoments | None = None) -> EncodedRows:
    """The codec's own encoding; `moments` do not count."""
    return encode_rows(weight, codec, lead=lead)
