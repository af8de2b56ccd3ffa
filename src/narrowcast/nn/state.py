"""What the state dict of a module says beside its tensors.

Rows of bytes do not say which codec made them, and a clip does not say whether its weight is normalized first. Modules
of this library say it under torch's key for such facts, `_extra_state`: JSON as uint8, padded with blanks to a multiple
of 64 bytes so that most have the same size. It is a tensor, since safetensors, distributed checkpoints and
torch.load(weights_only=True) carry nothing else. It is made on demand, on the CPU wherever the module is.

State dicts from before this key load without it, strict or not, and are not checked for what they do not say.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from narrowcast.errors import StateDictError

KEY = "_extra_state"
ROOM = 64
"""Bytes that the facts are padded to a multiple of."""
ASSIGN = "assign_to_params_buffers"
"""The key of the local metadata by which torch tells modules of load_state_dict's assign=True."""


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


def not_missing(missing_keys: list[str], prefix: str, key: str = KEY) -> None:
    """Take this module's key out of the missing ones: earlier versions wrote none."""
    if prefix + key in missing_keys:
        missing_keys.remove(prefix + key)


def loading_strictly() -> bool:
    """Whether the load_state_dict that called, through torch's hooks, was asked for every key.

    Hooks and modules are told strict=True whatever was asked (torch 2.13), and what is missing is raised once
    everything else is loaded: too late for a check that leaves the model as it was. So the caller is asked.
    """
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not nn.Module.load_state_dict.__code__:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is None or bool(frame.f_locals.get("strict", True))


def check_before_loading(model: nn.Module, check: Callable[..., None], wanted: bool) -> None:
    """Let `check` see every state dict before any module of the model loads it, or no longer.

    So a state dict that does not fit changes nothing. Asking twice registers the check once.
    """
    hooks = model._load_state_dict_pre_hooks
    present = [key for key, hook in hooks.items() if getattr(hook, "hook", None) is check]
    if wanted and not present:
        model.register_load_state_dict_pre_hook(check)  # type: ignore[no-untyped-call]
    if not wanted:
        for key in present:
            del hooks[key]
