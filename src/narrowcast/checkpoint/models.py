"""Models in checkpoints: the one place where modules and files meet.

`save` writes a model's state dict, encoded weights as their bytes. `load` reads it back without quantizing again: a
float model, on a device or on meta, takes on the encodings of the file first, and its quantizers of inputs; a quantized
one must have them already. A weight that is encoded in the file, and that the model has no encoded form for, is
decoded, with a warning. No dtype changes: what the file has is what the model gets.

A model on meta gets tensors that are mapped from the disk: no copy on the CPU, one on its way to another device; names
that the file ties are one tensor again. A model with memory keeps its Parameters and what it ties: values are copied
into them (nn/placing.py). Only a weight that becomes rows is another Parameter than before.

Everything is checked before the model changes, on a twin of it that has no memory, so an error leaves it as it was.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch
from torch import Tensor, nn

from narrowcast.checkpoint.placing import check_whole_tensors, holders, load_modules, new_tensor, put, twin_of
from narrowcast.codecs.payload import EncodedRows, Encoding
from narrowcast.codecs.registry import codec_in_file
from narrowcast.errors import CheckpointError, LoadWarning, ModelMismatchError, StateDictError
from narrowcast.nn import FakeQuantize, adopt, encodings
from narrowcast.nn.encodings import check_said, stored_state
from narrowcast.nn.qat.input_grids import Inputs, adopt_inputs, input_keys, quantized_inputs
from narrowcast.nn.qat.state import observer_keys, take_stored
from narrowcast.nn.state import KEY
from narrowcast.nn.survey import join, survey

if TYPE_CHECKING:
    from narrowcast.checkpoint import Checkpoint

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
    from narrowcast import checkpoint

    given = model_or_state
    state, inputs = (state_of(given), quantized_inputs(given)) if isinstance(given, nn.Module) else (given, None)
    checkpoint.save_state(state, path, metadata=metadata, max_shard_size=max_shard_size, inputs=inputs)


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
    from narrowcast import checkpoint

    if model is None:
        return checkpoint.load_state(path, device=device, verify=verify)
    if not isinstance(model, nn.Module):
        raise CheckpointError(f"model: expected a torch.nn.Module, got {type(model).__name__}.")
    check_whole_tensors(model)
    found = checkpoint.read(path)
    inputs = _new_inputs(found, model)
    sources = _tied_once(found, model, _sources(found, model, inputs, strict))
    new = _new_encodings(found, model, sources)
    decoded = _decoded(found, model, new, sources)
    _check_fit(found, model, new, inputs, {key: source for key, source in sources.items() if key not in decoded})
    if strict:
        _check_meta_buffers(model)
    if verify:
        found.verify()
    before = dict(model.named_parameters())
    holding = holders(before[key] for key in new if key in before)
    if new or inputs:
        adopt(model, new)
        adopt_inputs(model, inputs)
    _assign(found, model, sources, decoded, device, {*new})
    if holding:
        warnings.warn(
            f"{found.path}: {_some([*new])} are rows now, which are not trained, but {' and '.join(holding)} still "
            "holds the float weights that they replace. Make optimizers and wrappers after narrowcast.load.",
            LoadWarning,
            stacklevel=2,
        )
    return model


def _new_inputs(found: Checkpoint, model: nn.Module) -> Inputs:
    """The layers that have to take on a quantizer of their inputs. One that a layer has must be the file's."""
    own, packed, modules = quantized_inputs(model), encodings(model), dict(model.named_modules(remove_duplicate=False))
    for layer, said in found.inputs.items():
        if own.get(layer, said) != said or (join(layer, "weight") in packed and layer not in own):
            here, there = (
                f"{which[layer][0].spec!r}, signed={which[layer][1]}" if layer in which else "not quantized"
                for which in (own, found.inputs)
            )
            raise ModelMismatchError(
                f"{found.path}: inputs of {layer!r} are {here} in the model, but {there} in the file. Load into the "
                "float model, which takes on what the file has. The model is as it was."
            )
    return {layer: said for layer, said in found.inputs.items() if layer in modules and layer not in own}


def _sources(found: Checkpoint, model: nn.Module, inputs: Inputs, strict: bool) -> dict[str, str]:
    """For each key of the model, the stored tensor that it gets."""
    present = stored_state(model, keep_vars=True)
    stored = {name: name for name in found.file_of} | found.tied
    keys = [*present, *(key for layer in inputs for key in input_keys(layer))]
    keys += [key for key in observer_keys(model, stored) if key not in present]
    sources = {key: stored[key] for key in keys if key in stored}
    # Writers that know no ties leave all names of a tensor out but one: the model knows which those are.
    by_tensor = {id(present[key]): source for key, source in sources.items() if key in present}
    sources |= {
        key: by_tensor[id(value)] for key, value in present.items() if id(value) in by_tensor and key not in stored
    }
    missing = [key for key in keys if key not in sources and key.rpartition(".")[2] != KEY]  # new with this version
    known = {*keys} | {join(name, KEY) for name, _ in model.named_modules(remove_duplicate=False)}
    unexpected = [name for name in stored if name not in known]
    if strict and (missing or unexpected):
        raise ModelMismatchError(
            f"{found.path} does not fit the model: {_some(missing)} missing from the file, {_some(unexpected)} not in "
            f"the model. {_usual_cause(found, unexpected)}; strict=False loads what both have. The model is as it was."
        )
    return sources


def _tied_once(found: Checkpoint, model: nn.Module, sources: dict[str, str]) -> dict[str, str]:
    """The same sources, but one for all keys that are one tensor in the model: writers that know no ties store each."""
    first: dict[int, str] = {}
    keys = stored_state(model, keep_vars=True)
    for key, value in keys.items():
        if key not in sources:
            continue
        other = first.setdefault(id(value), key)
        if sources[key] != sources[other] and not found.same_bytes(sources[key], sources[other]):
            raise ModelMismatchError(
                f"{found.path}: {other!r} and {key!r} are one tied tensor in the model, but two different ones in the "
                "file. Untie them in the model, or store the one that counts. The model is as it was."
            )
    return {key: sources[first[id(keys[key])]] if key in keys else source for key, source in sources.items()}


def _usual_cause(found: Checkpoint, unexpected: list[str]) -> str:
    if any("input_quantizer." in name for name in unexpected) and not found.inputs:
        return (
            "It has quantized inputs, but does not say on which grid: it was saved from a state dict. Load it into a "
            "model that was prepared and converted the same way, or save the model itself"
        )
    return "It is a checkpoint of another model, or of a part of one (a prefix more or less)"


def _some(names: list[str]) -> str:
    return f"{len(names)} keys ({', '.join(names[:5])}{', ...' if len(names) > 5 else ''})" if names else "none"


def _new_encodings(found: Checkpoint, model: nn.Module, sources: Mapping[str, str]) -> dict[str, Encoding]:
    """What the model has to take on. An encoding that it has must be the file's."""
    own = encodings(model)
    theirs = found.encodings or _declared(found, model, sources)
    for key, source in sources.items():
        if key in own and own[key] != theirs.get(source):
            there = _words(theirs[source]) if source in theirs else "not encoded"
            raise ModelMismatchError(
                f"{found.path}: {key!r} is {_words(own[key])} in the model, but {there} in the file. Load into the "
                "float model, which takes on what the file has. The model is as it was."
            )
    return {key: theirs[source] for key, source in sources.items() if source in theirs and key not in own}


def _declared(found: Checkpoint, model: nn.Module, sources: Mapping[str, str]) -> dict[str, Encoding]:
    """The encodings of a folder that `save_pretrained` wrote: codecs in its config.json, all else as in the model."""
    from narrowcast.checkpoint import declared_weights, module_name

    weights, own, keys = declared_weights(found.path), encodings(model), model.state_dict()
    made: dict[str, Encoding] = {}
    for key, source in sources.items():
        spec = weights.get(source, weights.get(module_name(source)))
        if spec is not None and found.stored[source].dtype == torch.uint8:
            _, shape, dtype = own.get(key, (None, keys[key].shape, keys[key].dtype))
            made[source] = Encoding(codec_in_file(spec), shape, dtype)
            said = join(source.rpartition(".")[0], KEY)
            if said in found.file_of:
                check_said(made[source], source, found.tensor(said), f"{found.path}: ")
    return made


def _decoded(
    found: Checkpoint, model: nn.Module, new: dict[str, Encoding], sources: Mapping[str, str]
) -> dict[str, Encoding]:
    """What the file has encoded and the model cannot, taken out of `new`: `narrowcast quantize` sees no model."""
    if not new:
        return {}
    known = survey(model)
    leads = {key: weight.slots[0].lead for weight in known.weights for key in weight.names()}
    reasons = {skip.name: skip.reason for skip in known.skips}
    present = model.state_dict(keep_vars=True)
    decoded: dict[str, Encoding] = {}
    for key, encoding in [*new.items()]:
        own = present.get(key)
        fits = own is not None and own.is_floating_point() and own.shape == encoding.shape
        if fits and leads.get(key) != len(found.stored[sources[key]].shape) - 1:
            reasons.setdefault(key, "the file has other rows than the module")
            decoded[key] = new.pop(key)
    if decoded:
        why = [f"{key} ({reasons[key]})" for key in decoded]
        warnings.warn(
            f"{found.path}: weights that are encoded in the file are decoded, since the model has no encoded form for "
            f"them: {', '.join(why[:5])}{f' and {len(why) - 5} more' if len(why) > 5 else ''}.",
            LoadWarning,
            stacklevel=3,
        )
    return decoded


def _words(encoding: Encoding) -> str:
    return f"{encoding.codec.spec!r} of {str(encoding.dtype).removeprefix('torch.')} {list(encoding.shape)}"


def _check_fit(
    found: Checkpoint, model: nn.Module, new: dict[str, Encoding], inputs: Inputs, sources: Mapping[str, str]
) -> None:
    """Whether the model can become what the file has, and every tensor be what the model has then."""
    twin = model
    if new or inputs:
        twin = twin_of(model)
        try:
            adopt(twin, new)
            adopt_inputs(twin, inputs)
        except StateDictError as error:
            raise StateDictError(f"{found.path}: {error} The model is as it was.") from error
    keys, stored = stored_state(twin), found.stored
    grids = {key for name, module in twin.named_modules() for key in _checked_grid(found, module, name, sources)}
    grids |= {*observer_keys(twin, sources)}
    for key, source in sources.items():
        if key in grids:
            continue
        there, here = stored[source], keys[key]
        alike = there.dtype == here.dtype or (there.dtype.is_floating_point and here.dtype.is_floating_point)
        if not alike or there.shape != tuple(here.shape):
            raise ModelMismatchError(
                f"{found.path}: {key!r} is {there.dtype} {list(there.shape)} in the file and {here.dtype} "
                f"{list(here.shape)} in the model. It is a checkpoint of another model. The model is as it was."
            )


def _checked_grid(found: Checkpoint, module: nn.Module, name: str, sources: Mapping[str, str]) -> list[str]:
    """The keys that a quantizer accepts itself: it takes on the sign of the file's grid, and the file's observer."""
    if not isinstance(module, FakeQuantize):
        return []
    keys = [key for key in (join(name, "levels"), join(name, "alpha"), join(name, KEY)) if key in sources]
    try:
        fits = module.check_state({key: found.tensor(sources[key]) for key in keys}, join(name, ""))
    except StateDictError as error:
        raise ModelMismatchError(f"{found.path}: {error} The model is as it was.") from error
    return keys if fits else []


def _check_meta_buffers(model: nn.Module) -> None:
    known = {*model.state_dict()}
    known |= {join(name, own) for name, module in model.named_modules() for own in getattr(module, "made_on_load", ())}
    left = [name for name, value in model.named_buffers() if value.is_meta and value.numel() and name not in known]
    if left:
        raise ModelMismatchError(
            f"model: the buffers {left[:5]} are on meta, and files do not hold them: they are not persistent. Give "
            "them values first, make the model under accelerate.init_empty_weights(), which leaves buffers alone, or "
            "pass strict=False and fill them after. The model is as it was."
        )


def _assign(
    found: Checkpoint,
    model: nn.Module,
    sources: Mapping[str, str],
    decoded: Mapping[str, Encoding],
    device: torch.device | str | None,
    fresh: set[str],
) -> None:
    """Give every key its tensor. What is `fresh` has memory that nobody holds: mapped tensors take its place."""
    take_stored(model, {key: found.tensor(source) for key, source in sources.items() if key.endswith(KEY)})
    keys, mapped = stored_state(model, keep_vars=True), found.mapped()
    made: dict[str, Tensor] = {}
    placed: dict[int, Tensor] = {}
    for key, source in sources.items():
        own = keys[key]
        if id(own) in placed:
            continue
        place = device or ("cpu" if own.is_meta else own.device)
        stays = own.is_meta or key in fresh
        if stays and source in made:
            placed[id(own)] = made[source]
            continue
        tensor = mapped[source] if stays or mapped[source].nbytes < _LARGE else found.tensor(source)
        tensor = EncodedRows(tensor, *decoded[key]).decode() if key in decoded else tensor
        if stays:
            made[source] = new_tensor(own, tensor, place)
        placed[id(own)] = made[source] if stays else put(own, tensor, place)
    load_modules(model, {key: placed[id(keys[key])] for key in sources})
    if device is not None:
        for module in model.modules():
            for name in module._non_persistent_buffers_set:
                module._buffers[name] = _moved(module._buffers.get(name), device)


def _moved(buffer: Tensor | None, device: torch.device | str) -> Tensor | None:
    """A buffer that files do not hold, beside those that they do. On meta it has nothing to move."""
    return buffer if buffer is None or buffer.is_meta else buffer.to(device)
