"""Which keys of a model's state dict are encoded rows, and a model made so that these keys are.

`encodings(model)` describes a quantized model; `adopt(model, encodings)` gives a float model (on the meta device, as
a rule) the same encoded keys, with rows that are still to be loaded. Together they carry a quantized model through a
file: nothing is quantized again.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor, nn

from narrowcast.codecs.payload import EncodedRows, Encoding
from narrowcast.errors import StateDictError
from narrowcast.nn.modules.base import Encoded
from narrowcast.nn.quantize import as_module, finish, place
from narrowcast.nn.state import KEY, unpack
from narrowcast.nn.survey import Survey, Weight, join, survey


def encodings(model: nn.Module) -> dict[str, Encoding]:
    """For each key of the state dict that holds encoded rows: the codec, and the shape and dtype of the weight."""
    return {
        join(name, parameter): module._encoding(parameter)
        for name, module in as_module(model).named_modules(remove_duplicate=False)
        if isinstance(module, Encoded)
        for parameter in module._held
    }


def stored_state(model: nn.Module, *, keep_vars: bool = False) -> dict[str, Tensor]:
    """The state dict as files have it: without what encoded modules say in it, which `encodings` says."""
    state: dict[str, Tensor] = model.state_dict(keep_vars=keep_vars)
    drop_codecs(model, state)
    return state


def drop_codecs(model: nn.Module, state: dict[str, Any], prefix: str = "", *rest: Any) -> None:
    """Take out of a state dict what encoded modules say in it; a post-hook of `state_dict`, too."""
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, Encoded):
            state.pop(prefix + join(name, KEY), None)


def check_said(encoding: Encoding, key: str, packed: Tensor, where: str) -> None:
    """Whether what a state dict said of the rows of `key` is what they are declared to be elsewhere."""
    module, _, parameter = key.rpartition(".")
    facts = unpack(packed, join(module, KEY)).get(parameter)
    if facts is not None and facts[0] != encoding.codec.spec:
        raise StateDictError(
            f"{where}the rows of {key!r} are declared as {encoding.codec.spec!r}, and were saved as {facts[0]!r} by "
            f"{join(module, KEY)!r}: the files are of another save than config.json. Save the folder again. The model "
            "is as it was."
        )


def adopt(model: nn.Module, wanted: Mapping[str, Encoding]) -> None:
    """Make a model's modules hold encoded rows under exactly these keys. The rows' bytes are to be loaded.

    A tied weight may be named by any of its keys. Keys that hold such rows already are left as they are. The model is
    unchanged if a key does not fit it.
    """
    found = survey(as_module(model))
    by_key = {key: weight for weight in found.weights for key in weight.names()}
    present = encodings(model)
    chosen: dict[int, tuple[Weight, Encoding]] = {}
    for key, encoding in wanted.items():
        if present.get(key, encoding) != encoding:
            raise StateDictError(
                f"{key!r}: the model holds rows of {_described(present[key])} there, not of "
                f"{_described(encoding)}. Call dequantize_(model) first, or start from a new model."
            )
        if key in present:
            continue
        weight = by_key.get(key)
        if weight is None:
            raise StateDictError(f"{key!r}: {_why_not(key, by_key, found)}")
        _check(key, encoding, weight)
        first = chosen.setdefault(id(weight), (weight, encoding))[1]
        if first != encoding:
            raise StateDictError(
                f"{key!r}: {' and '.join(weight.names())} are one tied weight, but are described as "
                f"{_described(first)} and {_described(encoding)}. Untie them in the model, or save it tied."
            )
    for weight, encoding in chosen.values():
        place(weight, _empty_rows(weight, encoding))
    finish(model)


def _empty_rows(weight: Weight, encoding: Encoding) -> EncodedRows:
    lead = encoding.shape[: weight.slots[0].lead]
    size = encoding.codec.row_bytes(encoding.shape[len(lead) :].numel())
    device = weight.slots[0].float_weight().device
    data = torch.empty((*lead, size), dtype=torch.uint8, device=device)
    return EncodedRows(data, *encoding)


def _check(key: str, encoding: Encoding, weight: Weight) -> None:
    shape = weight.slots[0].shape()
    if encoding.shape != shape:
        raise StateDictError(
            f"{key!r}: rows of a weight of shape {list(encoding.shape)}, but the model has {list(shape)} "
            "there. The file is another model's, or the model was built with another configuration."
        )


def _why_not(key: str, by_key: Mapping[str, Weight], found: Survey) -> str:
    for skip in found.skips:
        if skip.name == key:
            return f"the model cannot hold encoded rows there: {skip.reason}."
    near = get_close_matches(key, by_key, 1, 0.0)
    hint = f" The nearest that can is {near[0]!r}." if near else " It has no weight that can."
    return f"the model has no weight of that name.{hint} The file is another model's, or its keys have a prefix."


def _described(encoding: Encoding) -> str:
    dtype = str(encoding.dtype).removeprefix("torch.")
    return f"{encoding.codec.spec} for {dtype} {list(encoding.shape)}"
