"""What a module is beside its tensors, in its state dict.

Rows of bytes do not say which codec made them, nor a clip whether its weight is normalized first. Modules of this
library say it in the way that torch has for it, the key `_extra_state`: JSON as uint8, padded with blanks to a multiple
of 64 bytes so that most have the same size. A tensor, since safetensors, distributed checkpoints and
torch.load(weights_only=True) carry nothing else; on the CPU wherever the module is, made when it is asked for.

State dicts from before this key load without it, strict or not, and are not checked for what they do not say.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from narrowcast.errors import StateDictError

KEY = "_extra_state"
ROOM = 64


def pack(facts: Mapping[str, Any]) -> Tensor:
    """Facts as a tensor."""
    text = json.dumps(facts, sort_keys=True, separators=(",", ":")).encode()
    padded = text.ljust(-(-len(text) // ROOM) * ROOM)
    return torch.frombuffer(bytearray(padded), dtype=torch.uint8)


def unpack(packed: Any, key: str) -> dict[str, Any]:
    """The facts of a tensor, or why it holds none."""
    facts: Any = None
    if isinstance(packed, Tensor) and packed.dtype == torch.uint8 and packed.device.type != "meta":
        try:
            facts = json.loads(bytes(packed.detach().flatten().tolist()))
        except ValueError:
            facts = None
    if not isinstance(facts, dict):
        kind = f"{packed.dtype} {list(packed.shape)}" if isinstance(packed, Tensor) else type(packed).__name__
        raise StateDictError(
            f"state_dict[{key!r}]: expected what narrowcast writes there, JSON as uint8, got {kind}. The state dict is "
            "another library's, or was changed on the way (a cast of all its tensors, for example). Without this key "
            "it loads as state dicts of earlier versions do."
        )
    return facts


def facts_in(state_dict: Mapping[str, Any], prefix: str) -> dict[str, Any] | None:
    """What a state dict says about the module at `prefix`; None if nothing."""
    return unpack(state_dict[prefix + KEY], prefix + KEY) if prefix + KEY in state_dict else None


def not_missing(missing_keys: list[str], prefix: str) -> None:
    """Earlier versions wrote no such key: it is not missed."""
    if prefix + KEY in missing_keys:
        missing_keys.remove(prefix + KEY)
