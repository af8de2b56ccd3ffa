"""What transformers loaded of an encoded folder, checked: rows where rows belong, floats of their shapes elsewhere.

The loader of transformers compares no dtypes, and no shapes of weights that may be rows (before 5.23 none at all).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from transformers.utils import logging

from narrowcast.codecs import checks
from narrowcast.codecs.payload import EncodedRows, Encoding
from narrowcast.errors import StateDictError
from narrowcast.nn.modules.base import encoded_parameters

logger = logging.get_logger(__name__)


def decode(model: nn.Module, key: str, encoding: Encoding) -> None:
    """Replace rows by floats."""
    name, _, parameter = key.rpartition(".")
    module = model.get_submodule(name)
    rows = module._parameters[parameter]
    if rows is not None and rows.dtype == torch.uint8 and rows.shape[:-1] == encoding.shape[: rows.dim() - 1]:
        module._parameters[parameter] = nn.Parameter(EncodedRows(rows.detach(), *encoding).decode())
        logger.info(f"{key}: {type(module).__name__} cannot hold encoded rows; decoded from {encoding.codec.spec}.")


def check_floats(model: nn.Module, shapes: Mapping[str, torch.Size]) -> None:
    """Refuse floats of another shape than the model's, among the weights whose shapes the loader does not compare."""
    for key, shape in shapes.items():
        floats = model.get_submodule(key.rpartition(".")[0])._parameters.get(key.rpartition(".")[2])
        if floats is not None and floats.dtype != torch.uint8 and floats.shape != shape:
            raise StateDictError(
                f"{key}: expected floats of shape {list(shape)}, found {checks.describe(floats)}. config.json and the "
                "files are of different models: save or download the folder again."
            )


def check_rows(name: str, module: nn.Module) -> None:
    """Refuse rows that do not fit their module."""
    known = encoded_parameters(module)
    for parameter, rows in module._parameters.items():
        held = known.get(parameter)
        if rows is None or (held is None and rows.dtype != torch.uint8):
            continue
        if held is not None and not getattr(rows, "_is_hf_initialized", False) and not rows.is_meta:
            raise StateDictError(
                f"{name}.{parameter}: config.json lists it among the encoded weights, but no file holds its rows. "
                "The folder is incomplete: save or download it again."
            )
        lead = rows.dim() - 1
        fits = held and rows.shape == (*held.shape[:lead], held.codec.row_bytes(held.shape[lead:].numel()))
        if not fits or rows.dtype != torch.uint8:
            expected = f"rows of {held.codec.spec!r} for a weight of {list(held.shape)}" if held else "floats"
            raise StateDictError(
                f"{name}.{parameter}: expected {expected}, found {checks.describe(rows)}. "
                "config.json and the files are of different saves, or the weight was encoded without its model as "
                "[in, out], as GPT-2 keeps it: quantize that model with from_pretrained(..., "
                "quantization_config=NarrowcastConfig(...)) instead."
            )
