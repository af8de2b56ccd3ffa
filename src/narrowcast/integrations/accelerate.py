"""Compressed gradients under Accelerate.

    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    compress_gradients(accelerator, model, "int4")

A prepared model is a DistributedDataParallel, so `narrowcast.compress_gradients(model, "int4")` works as well. This
function adds checkpoints: `accelerator.save_state` and `load_state` save and load the residuals, one file per rank.
(`accelerator.register_for_checkpointing` would save those of the first rank for all.)

Call `load_state` after `compress_gradients`. Called before, it loads the model, and the residuals start at zero.

With one process Accelerate leaves the model as it is, and nothing is sent: the function says so, the counts of what it
returns stay zero, and checkpoints are left alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from narrowcast.distributed import GradientCompression
from narrowcast.distributed.collectives import AnyCodec
from narrowcast.integrations import one_process, rank_states

try:
    from accelerate import Accelerator
except ImportError as error:
    raise ImportError(
        "narrowcast.integrations.accelerate needs the package accelerate. Run: pip install 'narrowcast[hf]'"
    ) from error

_numbers: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
"""How many models of each accelerator are compressed: checkpoints tell them apart by their order."""


def compress_gradients(
    accelerator: Accelerator,
    model: nn.Module,
    codec: AnyCodec | None = "int8",
    *,
    residuals: bool = True,
    **options: Any,
) -> GradientCompression:
    """Compress the gradients of a prepared model, and keep their state in the accelerator's checkpoints.

    `residuals=False` neither saves residuals nor loads them: they are as large as the gradients, on every rank.
    `options` are those of `narrowcast.compress_gradients`.
    """
    state, sends = one_process.compress(
        model,
        codec,
        options,
        f"model: {type(model).__name__} exchanges no gradients. Pass what accelerator.prepare(model) returns.",
    )
    if not sends:
        return state
    number = _numbers[accelerator] = _numbers.get(accelerator, -1) + 1

    def save(models: Sequence[nn.Module], weights: Sequence[dict[str, Tensor]], folder: str) -> None:
        rank_states.save(state, folder, residuals, number)

    def load(models: Sequence[nn.Module], folder: str) -> None:
        rank_states.load(state, folder, residuals, number)

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    return state
