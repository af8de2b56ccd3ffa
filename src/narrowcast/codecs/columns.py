"""How much errors count in each column of a weight, told by the weight alone.

A search of scales weighs the squared errors of a row's elements. Without data nothing is known of the inputs that the
columns are multiplied with. If all inputs were alike, every column would count the same. Here the inputs are taken to
contribute alike to the output: a column of small weights then has large inputs, and its errors count more, in inverse
proportion to its mean square. The loss is the sum over columns of their relative squared errors, which stays the same
when a norm, or the layer before, scales an input and the column makes up for it.

Few rows tell little of a column: one row's element may be near zero by chance. So a column's energy is taken with that
of `PRIOR` more rows of average energy. (Without them, searched scales of layers with one to eight outputs lost up to
half more than nearest ones on random inputs; on MiniLM int4 is a little better with them.)

The weights come from one pass over the rows, a tile at a time, summed in fp64 and rounded to 8 bits: so that
`quantize_` and `narrowcast quantize`, which never hold a whole checkpoint, give the same bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from narrowcast.codecs import tiles

GAIN = 4.0
"""How much it counts in a search that a block becomes smaller as a whole; see kernels/reference/search.py."""
PRIOR = 16
"""Rows of average energy that are added to a column's own. An error counts (rows + PRIOR) / PRIOR times at most."""


def column_weights(rows: int, columns: int, read: tiles.Read) -> Tensor | None:
    """fp32 [columns], or None: all columns count alike.

    So it is for a weight of zeros, one that is not finite, and one whose rows are longer than a tile.
    `read(start, stop)` returns rows as floats [stop - start, columns].
    """
    if columns > tiles.TILE:
        return None
    energy: Tensor | None = None
    for start, stop in tiles.tiles(rows, columns):
        norms = torch.linalg.vector_norm(read(start, stop).detach(), dim=0, dtype=torch.float64)
        energy = norms.square_() if energy is None else energy.add_(norms.square_())
    if energy is None:
        return None
    mean = energy.mean()
    if not 0 < float(mean) < float("inf"):
        return None
    prior = mean * PRIOR / rows
    return ((mean + prior) / (energy + prior)).to(torch.bfloat16).float()
