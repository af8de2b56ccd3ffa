"""The data of a rounding: read once, checked, and run through a model without changing it.

`data` is an iterable of what the model takes: a tensor, a mapping of keywords, or a tuple whose first element is the
input. It is read whole before the model is touched, so that a generator will do, and so that whatever it raises leaves
the model as it was. A batch that is not finite is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from narrowcast.errors import CalibrationError

UNCHANGED = "The model was left as it was."


def read_batches(data: object) -> list[Any]:
    """Every batch of `data`, refused with the reason if it is no iterable of model inputs."""
    if data is None:
        raise CalibrationError(
            'data: rounding="gptq" needs inputs of the model, and got None. Pass a list of batches, as data=[tokens]; '
            f'without data there is rounding="search". {UNCHANGED}'
        )
    if isinstance(data, (Tensor, Mapping, str)) or not isinstance(data, Iterable):
        raise CalibrationError(
            f"data: expected an iterable of batches, got a {type(data).__name__}. Pass a list, data=[batch]. "
            f"{UNCHANGED}"
        )
    batches: list[Any] = []
    try:
        for batch in data:
            _check(batch, len(batches))
            batches.append(batch)
    except CalibrationError:
        raise
    except Exception as error:
        raise CalibrationError(
            f"data: it raised {type(error).__name__} after {len(batches)} batches: {error}. {UNCHANGED}"
        ) from error
    if not batches:
        raise CalibrationError(
            "data: it gave no batch. A generator is used up after one pass: make it anew, or pass a list. " + UNCHANGED
        )
    return batches


def _check(batch: Any, number: int) -> None:
    tensors = list(tensors_in(batch))
    if not tensors:
        raise CalibrationError(
            f"data: batch {number} holds no tensor, it is a {type(batch).__name__}. A batch is what the model takes: a "
            f"tensor, a mapping of keywords, or a tuple whose first element is the input. Tokenize text first. "
            f"{UNCHANGED}"
        )
    if not any(tensor.numel() for tensor in tensors):
        raise CalibrationError(f"data: batch {number} is empty: its tensors hold no element. {UNCHANGED}")
    for tensor in tensors:
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise CalibrationError(f"data: batch {number} holds an infinity or a NaN. {UNCHANGED}")


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors of a batch, or of a model's output."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)


def run_batch(model: nn.Module, batch: Any) -> Any:
    """One batch through a model, on the model's device."""
    batch = move(batch, device_of(model))
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(batch[0] if isinstance(batch, (tuple, list)) else batch)


def padding_mask(batch: Any) -> Tensor | None:
    """Which tokens [batch, length] of a batch are no padding; None if it does not say so."""
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    whole = not isinstance(mask, Tensor) or mask.dim() != 2 or mask.is_floating_point() or bool(mask.all())
    return None if whole or not bool(mask.any()) else mask.bool()  # type: ignore[union-attr]


def device_of(model: nn.Module) -> torch.device:
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def move(value: Any, device: torch.device) -> Any:
    """Every tensor of a batch on a device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {key: move(value[key], device) for key in value}
    if type(value) in (tuple, list):
        return type(value)(move(item, device) for item in value)
    return value


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Without dropout, gradients and caches of keys and values; modes, settings and buffers are back afterwards."""
    modes = {module: module.training for module in model.modules()}
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers() if buffer.device.type != "meta"]
    config = getattr(model, "config", None)
    cache = getattr(config, "use_cache", None)
    model.eval()
    try:
        if cache is not None:
            config.use_cache = False  # type: ignore[union-attr]
        with torch.no_grad():
            yield
    finally:
        if cache is not None:
            config.use_cache = cache  # type: ignore[union-attr]
        for module, training in modes.items():
            module.training = training
        for buffer, values in buffers:
            if not _same_bits(buffer, values):  # a model that counts its calls, say
                buffer.copy_(values)


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one, other) or bool(((one == other) | ((one != one) & (other != other))).all())
