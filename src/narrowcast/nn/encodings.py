"""Which keys of a model's state dict are encoded rows, and how a float model gets the same ones.

`encodings(model)` describes a quantized model. `adopt(model, encodings)` makes the same keys of a float model encoded
rows, usually on the meta device; their bytes are still to be loaded. Together they carry a quantized model through a
file without quantizing it again.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor, nn

from narrowcast.codecs import checks
from narrowcast.codecs.payload import EncodedRows, Encoding
from narrowcast.errors import StateDictError
from narrowcast.nn.modules.base import Encoded, encoded_parameters, float_dtype_of
from narrowcast.nn.quantize import as_module, finish, place
from narrowcast.nn.state import KEY, unpack
from narrowcast.nn.survey import Survey, Weight, join, survey


def encodings(model: nn.Module) -> dict[str, Encoding]:
    """For each key of the state dict that holds encoded rows: the codec, and the shape and dtype of the weight."""
    return {
        join(name, parameter): Encoding(held.codec, held.shape, float_dtype_of(module))
        for name, module in as_module(model).named_modules(remove_duplicate=False)
        if isinstance(module, Encoded)
        for parameter, held in encoded_parameters(module).items()
    }


def stored_state(model: nn.Module, *, keep_vars: bool = False) -> dict[str, Tensor]:
    """The state dict as files have it: without the extra state of encoded modules, since `encodings` says the same."""
    state: dict[str, Tensor] = model.state_dict(keep_vars=keep_vars)
    drop_codecs(model, state)
    return state


def drop_codecs(model: nn.Module, state: dict[str, Any], prefix: str = "", *rest: Any) -> None:
    """Remove the extra state of encoded modules from a state dict. Also a post-hook of `state_dict`."""
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, Encoded):
            state.pop(prefix + join(name, KEY), None)


def check_declared(encoding: Encoding, key: str, packed: Tensor, where: str) -> None:
    """Refuse an encoding of `key` that is declared elsewhere, if the extra state `packed` names another codec."""
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
    surveyed = survey(as_module(model))
    by_key = {key: weight for weight in surveyed.weights for key in weight.names()}
    present = encodings(model)
    chosen: dict[int, tuple[Weight, Encoding]] = {}
    for key, encoding in wanted.items():
        if present.get(key, encoding) != encoding:
            raise StateDictError(
                f"{key!r}: the model holds rows of {_describe(present[key])} there, not of "
                f"{_describe(encoding)}. Call dequantize_(model) first, or start from a new model."
            )
        if key in present:
            continue
        weight = by_key.get(key)
        if weight is None:
            raise StateDictError(f"{key!r}: {_why_not(key, by_key, surveyed)}")
        _check(key, encoding, weight)
        first = chosen.setdefault(id(weight), (weight, encoding))[1]
        if first != encoding:
            raise StateDictError(
                f"{key!r}: {' and '.join(weight.names())} are one tied weight, but are described as "
                f"{_describe(first)} and {_describe(encoding)}. Untie them in the model, or save it tied."
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


def _why_not(key: str, by_key: Mapping[str, Weight], surveyed: Survey) -> str:
    for skip in surveyed.skips:
        if skip.name == key:
            return f"the model cannot hold encoded rows there: {skip.reason}."
    near = get_close_matches(key, by_key, 1, 0.0)
    hint = f" The nearest that can is {near[0]!r}." if near else " It has no weight that can."
    return f"the model has no weight of that name.{hint} The file is another model's, or its keys have a prefix."


def _describe(encoding: Encoding) -> str:
    return f"{encoding.codec.spec} for {checks.dtype_name(encoding.dtype)} {list(encoding.shape)}"
