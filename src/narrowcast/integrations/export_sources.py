"""What an export is made of: a state, and which of its weights belong to Linear modules.

A model says it itself. A folder of transformers says it by its config.json: the model is made without memory, and
asked. A mapping, and a folder without a config.json, are taken to hold weights of Linear modules only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from narrowcast.checkpoint.companions import companions
from narrowcast.checkpoint.models import load, state_of
from narrowcast.checkpoint.selection import module_name
from narrowcast.codecs.payload import EncodedRows
from narrowcast.errors import ExportError
from narrowcast.nn import Embedding, Linear

State: TypeAlias = Mapping[str, Tensor | EncodedRows]


def leave_out(name: str) -> str:
    return f'Or leave it as it is, with the rule {{"{module_name(name)}": None}} in quantize_.'


class Opened(NamedTuple):
    """What `export` was given."""

    state: State
    config: dict[str, Any]
    """The transformers config; empty where there is none."""
    linears: set[str] | None = None
    """The names of all Linear modules, if known."""
    others: Mapping[str, str] = {}
    """The encoded weights that are not in Linear modules, and why they are written as floats."""
    modules: Mapping[str, str] = {}
    """For each encoded weight, the name of its module in the model, where files have another one."""
    companions: Sequence[str] = ()
    """The other files of a folder, to be copied."""


def open_source(source: Any) -> Opened:
    if isinstance(source, torch.nn.Module):
        linears, others = _sort_modules(source)
        return Opened(state_of(source), _config(source), linears, others)
    if isinstance(source, Mapping):
        return Opened(source, {})
    folder = Path(source)
    config = json.loads((folder / "config.json").read_text()) if (folder / "config.json").is_file() else {}
    config.pop("quantization_config", None)
    copied = [name for name in companions(folder)[0] if name != "config.json"]
    state = load(folder)
    if not config:
        return Opened(state, config, companions=copied)
    return _sort_by_config(state, config, copied)


def _sort_by_config(state: State, config: dict[str, Any], copied: list[str]) -> Opened:
    """A folder of transformers: its config says which modules its weights belong to."""
    try:
        from narrowcast.integrations.model_names import empty_model, keys_of
    except ImportError as error:
        raise ImportError(
            "source: an export of a folder needs transformers, which knows its modules. Run: pip install "
            "'narrowcast[hf]'"
        ) from error
    model = empty_model(config)
    if model is None:
        raise ExportError(
            f"source: its config.json names architectures={config.get('architectures')!r}, which is no class of "
            "transformers, so Linear modules cannot be told from others. Load the model, call narrowcast.load(folder, "
            "model), and export the model."
        )
    encoded = [name for name, value in state.items() if isinstance(value, EncodedRows)]
    keys = keys_of(model, encoded, model.state_dict())
    others: dict[str, str] = {}
    for name in encoded:
        if name not in keys:
            raise ExportError(
                f"{name}: {type(model).__name__} has no weight of that name of its own. {leave_out(name)} Or load "
                "the model with from_pretrained, and export the model."
            )
        module = model.get_submodule(keys[name].rpartition(".")[0])
        if not isinstance(module, torch.nn.Linear):
            others[name] = f"belongs to {_a(type(module).__name__)}"
    linears = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    modules = {name: module_name(key) for name, key in keys.items()}
    return Opened(state, config, linears, others, modules, copied)


def _a(kind: str) -> str:
    return f"{'an' if kind[0] in 'AEIOU' else 'a'} {kind}"


def _config(model: Any) -> dict[str, Any]:
    if not hasattr(getattr(model, "config", None), "to_dict"):
        return {}
    config: dict[str, Any] = json.loads(json.dumps(model.config.to_dict(), default=str))
    config.pop("quantization_config", None)
    return {**config, "architectures": [type(model).__name__]}


def _sort_modules(model: torch.nn.Module) -> tuple[set[str], dict[str, str]]:
    """The names of all Linear modules, and the encoded weights of embeddings."""
    names: set[str] = set()
    others: dict[str, str] = {}
    for name, module in model.named_modules():
        if isinstance(module, Linear) and module.held.transposed:
            raise ExportError(
                f"{name}: is a Conv1D, with a weight of [in, out], in the float model, and programs that read "
                f"pack-quantized read Linear modules. {leave_out(name)}"
            )
        if isinstance(module, Embedding):
            others[f"{name}.weight" if name else "weight"] = "belongs to an Embedding"
        if isinstance(module, (torch.nn.Linear, Linear)):
            names.add(name)
    return names, others


def decode_others(state: State, others: Mapping[str, str]) -> tuple[State, dict[str, str]]:
    """The state with these weights, and those tied to them, as floats; and the names of all of them."""
    reasons: dict[str, str] = {}
    floats: dict[int, Tensor] = {}
    for name, reason in others.items():
        rows = state[name]
        if isinstance(rows, EncodedRows):
            reasons[name] = reason
            floats.setdefault(rows.data.data_ptr(), rows.decode())
    changed: dict[str, Tensor | EncodedRows] = {}
    for name, value in state.items():
        tied = floats.get(value.data.data_ptr()) if isinstance(value, EncodedRows) else None
        changed[name] = value if tied is None else tied
        if tied is not None:
            reasons.setdefault(name, "is tied to such a weight")
    return changed, reasons


def untied(state: State) -> State:
    """The state without the second names of tied floats. Rows that are tied have no place in the format."""
    seen: dict[tuple[int, torch.Size, torch.dtype], str] = {}
    untied: dict[str, Tensor | EncodedRows] = {}
    for name, value in state.items():
        data = value.data if isinstance(value, EncodedRows) else value
        first = seen.setdefault((data.data_ptr(), data.shape, data.dtype), name) if data.numel() else name
        if first == name:
            untied[name] = value
        elif isinstance(value, EncodedRows):
            raise ExportError(
                f"{first} and {name} are one tied weight, and pack-quantized cannot tie packed weights. "
                f"{leave_out(name)} Or untie them before quantizing."
            )
    return untied
