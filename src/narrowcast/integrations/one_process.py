"""Compressed gradients in a run of any number of processes, one included.

A trainer that runs with one process wraps no model, or wraps it in a DistributedDataParallel of one rank. Nothing is
sent then, and there is nothing to compress. A script that asks for compression runs all the same, with a warning: the
same script serves a laptop and a cluster. Its arguments are checked as with several processes.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch.distributed as dist
from torch import nn

from narrowcast.distributed import GradientCompression, compress_gradients
from narrowcast.distributed.collectives import AnyCodec
from narrowcast.errors import ModelKindError, SpecError


def compress(
    model: nn.Module, codec: AnyCodec | None, options: dict[str, Any], refusal: str
) -> tuple[GradientCompression, bool]:
    """Compress the gradients of `model`. Returns the compression, and whether anything is sent.

    With several processes, a model that exchanges no gradients is refused with `refusal`. With one, the compression is
    not attached to anything: its counts stay zero.
    """
    if any(options.get(name) is not None for name in _OF_LOOPS):
        raise SpecError(
            "sync_every: trainers save the model and the optimizer of the first rank, and between meetings each rank "
            "has its own. Use narrowcast.compress_gradients(ddp, ..., sync_every=, optimizer=) in a loop of your own."
        )
    try:
        compression = compress_gradients(model, codec, **options)
    except ModelKindError as error:
        if _ranks() > 1:
            raise ModelKindError(refusal) from error
        left_out = {"gather", *_OF_LOOPS}  # which belong to wrapped models alone
        options = {name: value for name, value in options.items() if name not in left_out}
        compression = GradientCompression(codec, model=model, **options)
    sends = _ranks(compression.process_group) > 1
    if not sends:
        warnings.warn(
            "narrowcast: this run has one process, so no gradient is sent and none is compressed. Start several with "
            "torchrun --nproc-per-node 2 script.py, for example.",
            UserWarning,
            stacklevel=3,
        )
    return compression, sends


_OF_LOOPS = ("sync_every", "outer_lr", "outer_momentum")


def _ranks(group: Any = None) -> int:
    return dist.get_world_size(group) if dist.is_initialized() else 1
