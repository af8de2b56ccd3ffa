"""Models in checkpoints: the one place where modules and files meet.

`save` writes a model's state dict, encoded weights as their bytes. `load` reads it back without quantizing again. A
float model, on a device or on meta, gets the encodings of the file first, and its quantizers of inputs; a quantized one
must have them already. A weight that is encoded in the file, and that the model has no encoded form for, is decoded,
with a warning. No dtype changes: the model gets the dtypes of the file.

A model on meta gets tensors that are mapped from the disk: no copy on the CPU, one on its way to another device. Names
that the file ties are one tensor again. A model with memory keeps its Parameters and its ties: values are copied into
them (placing.py). Only a weight that becomes rows is a new Parameter.

Everything is checked before the model changes (matching.py), so an error leaves it as it was.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, overload

import torch
from torch import Tensor, nn

from narrowcast.checkpoint.matching import Match, list_some, match
from narrowcast.checkpoint.placing import check_whole_tensors, holders, load_modules, new_tensor, put
from narrowcast.checkpoint.reading import Checkpoint, load_state, read
from narrowcast.checkpoint.saving import save_state
from narrowcast.codecs.payload import EncodedRows
from narrowcast.errors import CheckpointError, LoadWarning
from narrowcast.nn import adopt, encodings
from narrowcast.nn.encodings import stored_state
from narrowcast.nn.qat.input_grids import adopt_inputs, quantized_inputs
from narrowcast.nn.qat.state import take_stored
from narrowcast.nn.state import KEY

_LARGE = 1 << 20
"""Bytes of a tensor that is mapped by itself to be copied, so that its pages do not stay in memory beside the model."""
Model = TypeVar("Model", bound=nn.Module)
State = dict[str, Tensor | EncodedRows]


def save(
    model_or_state: nn.Module | Mapping[str, Tensor | EncodedRows],
    path: str | Path,
    *,
    metadata: Mapping[str, Any] | None = None,
    max_shard_size: int | str = "5GB",
) -> None:
    """Write a model or a state dict to "name.safetensors", or to a folder in files of up to `max_shard_size`.

    `metadata` is anything that JSON can say. The files appear when they are complete, or not at all.
    """
    given = model_or_state
    state, inputs = (state_of(given), quantized_inputs(given)) if isinstance(given, nn.Module) else (given, None)
    save_state(state, path, metadata=metadata, max_shard_size=max_shard_size, inputs=inputs)


def state_of(model: nn.Module) -> State:
    """A model's state dict, in which encoded weights say what they are."""
    known = encodings(model)
    state = stored_state(model)
    return {name: EncodedRows(value, *known[name]) if name in known else value for name, value in state.items()}


@overload
def load(path: str | Path, model: None = None, *, device: Any = None, verify: bool = True) -> State: ...
@overload
def load(path: str | Path, model: Model, *, device: Any = None, strict: bool = True, verify: bool = True) -> Model: ...
def load(
    path: str | Path,
    model: Model | None = None,
    *,
    device: torch.device | str | None = None,
    strict: bool = True,
    verify: bool = True,
) -> Model | State:
    """Load a file or folder into `model`, and return it; without a model, return {name: Tensor or EncodedRows}.

    `device`: where tensors go; by default where the model has them, or the CPU. `strict=False` leaves alone what only
    one side has. `verify=False` does not read the bytes to compare them with their checksums.
    """
    if model is None:
        return load_state(path, device=device, verify=verify)
    if not isinstance(model, nn.Module):
        raise CheckpointError(f"model: expected a torch.nn.Module, got {type(model).__name__}.")
    check_whole_tensors(model)
    file = read(path)
    matched = match(file, model, strict)
    if verify:
        file.verify()
    before = dict(model.named_parameters())
    holding = holders(before[key] for key in matched.encodings if key in before)
    if matched.encodings or matched.inputs:
        adopt(model, matched.encodings)
        adopt_inputs(model, matched.inputs)
    _assign(file, model, matched, device)
    if holding:
        warnings.warn(
            f"{file.path}: {list_some([*matched.encodings])} are rows now, which are not trained, but "
            f"{' and '.join(holding)} still holds the float weights that they replace. Make optimizers and wrappers "
            "after narrowcast.load.",
            LoadWarning,
            stacklevel=2,
        )
    return model


def _assign(file: Checkpoint, model: nn.Module, matched: Match, device: torch.device | str | None) -> None:
    """Give every key its tensor. Nobody holds the memory of keys that just became rows: mapped tensors replace it."""
    sources, decoded = matched.sources, matched.decoded
    take_stored(model, {key: file.tensor(source) for key, source in sources.items() if key.endswith(KEY)})
    keys, mapped = stored_state(model, keep_vars=True), file.mapped()
    replacing: dict[str, Tensor] = {}
    placed: dict[int, Tensor] = {}
    for key, source in sources.items():
        own = keys[key]
        if id(own) in placed:
            continue
        place = device or ("cpu" if own.is_meta else own.device)
        replaced = own.is_meta or key in matched.encodings
        if replaced and source in replacing:
            placed[id(own)] = replacing[source]
            continue
        tensor = mapped[source] if replaced or mapped[source].nbytes < _LARGE else file.tensor(source)
        tensor = EncodedRows(tensor, *decoded[key]).decode() if key in decoded else tensor
        if replaced:
            replacing[source] = new_tensor(own, tensor, place)
        placed[id(own)] = replacing[source] if replaced else put(own, tensor, place)
    load_modules(model, {key: placed[id(keys[key])] for key in sources})
    if device is not None:
        for module in model.modules():
            for name in module._non_persistent_buffers_set:
                module._buffers[name] = _moved(module._buffers.get(name), device)


def _moved(buffer: Tensor | None, device: torch.device | str) -> Tensor | None:
    """A buffer that files do not hold, on the device of those that they do. On meta it stays."""
    return buffer if buffer is None or buffer.is_meta else buffer.to(device)
