"""Which tensor of a checkpoint goes to which key of a model, and whether the model can take it.

A `Match` is the answer for one checkpoint and one model. Nothing here changes the model. Whether it can become what the
file has is tried on a twin of it without memory, so an error leaves the model as it was.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import nn

from narrowcast.checkpoint.companions import declared_weights
from narrowcast.checkpoint.placing import twin_of
from narrowcast.checkpoint.reading import Checkpoint
from narrowcast.checkpoint.selection import module_name
from narrowcast.codecs import checks
from narrowcast.codecs.payload import Encoding
from narrowcast.codecs.registry import codec_in_file
from narrowcast.errors import LoadWarning, ModelMismatchError, StateDictError
from narrowcast.nn import FakeQuantize, adopt, encodings
from narrowcast.nn.encodings import check_declared, stored_state
from narrowcast.nn.qat.input_grids import Inputs, adopt_inputs, input_keys, quantized_inputs
from narrowcast.nn.qat.state import observer_keys
from narrowcast.nn.state import KEY
from narrowcast.nn.survey import join, survey


class Match(NamedTuple):
    """How a checkpoint goes into a model."""

    sources: dict[str, str]
    """For each key of the model, the stored tensor that it gets."""
    encodings: dict[str, Encoding]
    """The keys that become encoded rows."""
    decoded: dict[str, Encoding]
    """The keys that are encoded in the file, and floats in the model."""
    inputs: Inputs
    """The layers that get a quantizer of their inputs."""


def match(file: Checkpoint, model: nn.Module, strict: bool) -> Match:
    """Match a checkpoint with a model; refused if it does not fit."""
    inputs = _new_inputs(file, model)
    sources = _tied_once(file, model, _sources(file, model, inputs, strict))
    new = _new_encodings(file, model, sources)
    decoded = _decoded(file, model, new, sources)
    matched = Match(sources, new, decoded, inputs)
    _check_fit(file, model, matched)
    if strict:
        _check_meta_buffers(model)
    return matched


def list_some(names: list[str]) -> str:
    """How many names there are, and the first five."""
    return f"{len(names)} keys ({', '.join(names[:5])}{', ...' if len(names) > 5 else ''})" if names else "none"


def _new_inputs(file: Checkpoint, model: nn.Module) -> Inputs:
    """The layers that need a quantizer of their inputs. A quantizer that a layer has must be the file's."""
    own, packed, modules = quantized_inputs(model), encodings(model), dict(model.named_modules(remove_duplicate=False))
    for layer, said in file.inputs.items():
        if own.get(layer, said) != said or (join(layer, "weight") in packed and layer not in own):
            here, there = (
                f"{which[layer][0].spec!r}, signed={which[layer][1]}" if layer in which else "not quantized"
                for which in (own, file.inputs)
            )
            raise ModelMismatchError(
                f"{file.path}: inputs of {layer!r} are {here} in the model, but {there} in the file. Load into the "
                "float model, which takes on what the file has. The model is as it was."
            )
    return {layer: said for layer, said in file.inputs.items() if layer in modules and layer not in own}


def _sources(file: Checkpoint, model: nn.Module, inputs: Inputs, strict: bool) -> dict[str, str]:
    """For each key of the model, the stored tensor that it gets."""
    present = stored_state(model, keep_vars=True)
    stored = {name: name for name in file.file_of} | file.tied
    keys = [*present, *(key for layer in inputs for key in input_keys(layer))]
    keys += [key for key in observer_keys(model, stored) if key not in present]
    sources = {key: stored[key] for key in keys if key in stored}
    # Other writers without ties store one name of a tensor: the model knows the others.
    by_tensor = {id(present[key]): source for key, source in sources.items() if key in present}
    sources |= {
        key: by_tensor[id(value)] for key, value in present.items() if id(value) in by_tensor and key not in stored
    }
    missing = [
        key for key in keys if key not in sources and key.rpartition(".")[2] != KEY
    ]  # earlier versions wrote none
    known = {*keys} | {join(name, KEY) for name, _ in model.named_modules(remove_duplicate=False)}
    known |= _made_by_model(file, model)
    unexpected = [name for name in stored if name not in known]
    if strict and (missing or unexpected):
        raise ModelMismatchError(
            f"{file.path} does not fit the model: {list_some(missing)} missing from the file, "
            f"{list_some(unexpected)} not in the model. {_usual_cause(file, unexpected)}; strict=False loads what both "
            "have. The model is as it was."
        )
    return sources


def _made_by_model(file: Checkpoint, model: nn.Module) -> set[str]:
    """Buffers that the model makes itself, and that earlier versions of it stored: BERT's position_ids, for one."""
    return {
        key
        for name, module in model.named_modules(remove_duplicate=False)
        for own in module._non_persistent_buffers_set
        if (key := join(name, own)) in file.stored and own in module._buffers
    }


def _tied_once(file: Checkpoint, model: nn.Module, sources: dict[str, str]) -> dict[str, str]:
    """One source for all keys that are one tensor in the model: writers without a notion of ties store each key."""
    first: dict[int, str] = {}
    keys = stored_state(model, keep_vars=True)
    for key, value in keys.items():
        if key not in sources:
            continue
        other = first.setdefault(id(value), key)
        if sources[key] != sources[other] and not file.same_bytes(sources[key], sources[other]):
            raise ModelMismatchError(
                f"{file.path}: {other!r} and {key!r} are one tied tensor in the model, but two different ones in the "
                "file. Untie them in the model, or store the one that counts. The model is as it was."
            )
    return {key: sources[first[id(keys[key])]] if key in keys else source for key, source in sources.items()}


def _usual_cause(file: Checkpoint, unexpected: list[str]) -> str:
    if any("input_quantizer." in name for name in unexpected) and not file.inputs:
        return (
            "It has quantized inputs, but does not say on which grid: it was saved from a state dict. Load it into a "
            "model that was prepared and converted the same way, or save the model itself"
        )
    return "It is a checkpoint of another model, or of a part of one (a prefix more or less)"


def _new_encodings(file: Checkpoint, model: nn.Module, sources: Mapping[str, str]) -> dict[str, Encoding]:
    """The encodings that the model does not have yet. An encoding that it has must be the file's."""
    own = encodings(model)
    theirs = file.encodings or _declared(file, model, sources)
    for key, source in sources.items():
        if key in own and own[key] != theirs.get(source):
            there = _describe(theirs[source]) if source in theirs else "not encoded"
            raise ModelMismatchError(
                f"{file.path}: {key!r} is {_describe(own[key])} in the model, but {there} in the file. Load into the "
                "float model, which takes on what the file has. The model is as it was."
            )
    return {key: theirs[source] for key, source in sources.items() if source in theirs and key not in own}


def _declared(file: Checkpoint, model: nn.Module, sources: Mapping[str, str]) -> dict[str, Encoding]:
    """The encodings of a folder that `save_pretrained` wrote: codecs in its config.json, all else as in the model."""
    weights, own, keys = declared_weights(file.path), encodings(model), model.state_dict()
    declared: dict[str, Encoding] = {}
    for key, source in sources.items():
        spec = weights.get(source, weights.get(module_name(source)))
        if spec is not None and file.stored[source].dtype == torch.uint8:
            _, shape, dtype = own.get(key, (None, keys[key].shape, keys[key].dtype))
            declared[source] = Encoding(codec_in_file(spec), shape, dtype)
            extra = join(source.rpartition(".")[0], KEY)
            if extra in file.file_of:
                check_declared(declared[source], source, file.tensor(extra), f"{file.path}: ")
    return declared


def _decoded(
    file: Checkpoint, model: nn.Module, new: dict[str, Encoding], sources: Mapping[str, str]
) -> dict[str, Encoding]:
    """Remove from `new` what the model has no encoded form for: `narrowcast quantize` writes files without a model."""
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
        if fits and leads.get(key) != len(file.stored[sources[key]].shape) - 1:
            reasons.setdefault(key, "the file has other rows than the module")
            decoded[key] = new.pop(key)
    if decoded:
        why = [f"{key} ({reasons[key]})" for key in decoded]
        warnings.warn(
            f"{file.path}: weights that are encoded in the file are decoded, since the model has no encoded form for "
            f"them: {', '.join(why[:5])}{f' and {len(why) - 5} more' if len(why) > 5 else ''}.",
            LoadWarning,
            stacklevel=4,
        )
    return decoded


def _describe(encoding: Encoding) -> str:
    return f"{encoding.codec.spec!r} of {checks.dtype_name(encoding.dtype)} {list(encoding.shape)}"


def _check_fit(file: Checkpoint, model: nn.Module, matched: Match) -> None:
    """Refuse a file if the model cannot get its encodings, or if a tensor then has another shape or kind of dtype."""
    twin = model
    if matched.encodings or matched.inputs:
        twin = twin_of(model)
        try:
            adopt(twin, matched.encodings)
            adopt_inputs(twin, matched.inputs)
        except StateDictError as error:
            raise StateDictError(f"{file.path}: {error} The model is as it was.") from error
    sources = {key: source for key, source in matched.sources.items() if key not in matched.decoded}
    keys, stored = stored_state(twin), file.stored
    grids = {key for name, module in twin.named_modules() for key in _checked_grid(file, module, name, sources)}
    grids |= {*observer_keys(twin, sources)}
    for key, source in sources.items():
        if key in grids:
            continue
        there, here = stored[source], keys[key]
        alike = there.dtype == here.dtype or (there.dtype.is_floating_point and here.dtype.is_floating_point)
        if not alike or there.shape != tuple(here.shape):
            raise ModelMismatchError(
                f"{file.path}: {key!r} is {there.dtype} {list(there.shape)} in the file and {here.dtype} "
                f"{list(here.shape)} in the model. It is a checkpoint of another model. The model is as it was."
            )


def _checked_grid(file: Checkpoint, module: nn.Module, name: str, sources: Mapping[str, str]) -> list[str]:
    """The keys that a quantizer checks itself: it takes over the sign of the file's grid and the file's observer."""
    if not isinstance(module, FakeQuantize):
        return []
    keys = [key for key in (join(name, "levels"), join(name, "alpha"), join(name, KEY)) if key in sources]
    try:
        fits = module.check_state({key: file.tensor(sources[key]) for key in keys}, join(name, ""))
    except StateDictError as error:
        raise ModelMismatchError(f"{file.path}: {error} The model is as it was.") from error
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
