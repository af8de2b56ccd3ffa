"""The reductions, written out with the operations of a codec alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import narrowcast as nc


def reduced_by_hand(tensors: Sequence[Tensor], codec: str, divisor: int, *, one_stage: bool = False) -> Tensor:
    """The sum of flat tensors, one per rank, cut into one part per rank: its owner's own numbers are exact.

    In one stage, all of every tensor is quantized once.
    """
    coder, ranks, numel = nc.codec(codec), len(tensors), len(tensors[0])
    if one_stage:
        rows = torch.stack([coder.encode(x, 0) for x in tensors])
        return coder.decode_sum(rows, numel, tensors[0].dtype, divisor=divisor)
    each = -(-numel // (ranks * 128)) * 128
    sums = []
    for owner in range(ranks):
        parts = [x[owner * each : (owner + 1) * each] for x in tensors]
        count = len(parts[0])
        rows = torch.stack([coder.encode(part, 0) for part in parts])
        total = coder.decode_sum(rows, count, own=parts[owner], own_rank=owner, divisor=divisor)
        sums.append(coder.decode(coder.encode(total, 0), count, tensors[0].dtype))
    return torch.cat(sums)
