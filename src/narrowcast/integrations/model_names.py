"""The names of weights in files, and the modules of a transformers model that they belong to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key


def keys_of(model: Any, names: Iterable[str], keys: Mapping[str, Tensor]) -> dict[str, str]:
    """For each name, the key of the model's state dict that transformers loads it into. Unknown ones are left out.

    A name is a tensor's, or that of a module with a `weight`. It is the model's own name, or that of its files.
    """
    mapping = get_model_conversion_mapping(model) or []
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    found: dict[str, str] = {}
    for name in names:
        for known_as in (name, f"{name}.weight"):
            renamed, _ = rename_source_key(known_as, renamings, converters, model.base_model_prefix, keys)
            key = known_as if known_as in keys else renamed
            if key in keys:
                found[name] = key
                break
    return found


def empty_model(config: Mapping[str, Any]) -> nn.Module | None:
    """The model that a config.json describes, without memory; None if it names no class of transformers."""
    names = config.get("architectures")
    kind = getattr(transformers, str(names[0]), None) if isinstance(names, list) and names else None
    if kind is None:
        return None
    with torch.device("meta"):
        model: nn.Module = kind(kind.config_class.from_dict(dict(config)))
    return model
