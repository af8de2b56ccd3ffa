"""State dicts that fit an optimizer: moments in the form in which it holds them, and tensors that torch must not cast.

A saved state has moments in floats or in rows, and the optimizer that loads it holds them in floats or in rows of its
own codec. Where the two differ, moments are decoded or encoded on the way in: `state=` of the optimizer decides, not
that of the file. Other options come from the file, as torch does it.

torch casts every tensor of a state but `step` to the parameter's dtype. `Uncast` carries bytes and counts past it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from narrowcast.errors import StateDictError
from narrowcast.optim import rows
from narrowcast.optim.update import COUNT


class Uncast:
    """A tensor that torch's `load_state_dict` passes on as it is."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def adapted(state_dict: dict[str, Any], groups: list[dict[str, Any]]) -> dict[str, Any]:
    """A state dict with the moments that these parameter groups hold. It shares tensors with the one given."""
    saved_groups, states = [dict(group) for group in state_dict["param_groups"]], dict(state_dict["state"])
    if [len(group["params"]) for group in saved_groups] != [len(group["params"]) for group in groups]:
        return state_dict  # torch says what is wrong
    for saved, own in zip(saved_groups, groups, strict=True):
        spec = saved.pop("state", None)
        if own.get("state") is not None:
            saved["state"] = own["state"]
            rows.check_group({**saved, "params": []})
        for key, parameter in zip(saved["params"], own["params"], strict=True):
            if isinstance(states.get(key), dict) and states[key]:
                states[key] = _adapted_state(states[key], parameter, spec, own.get("state"))
    return {**state_dict, "state": states, "param_groups": saved_groups}


def _adapted_state(state: dict[str, Any], parameter: Tensor, spec: str | None, own: str | None) -> dict[str, Any]:
    """One parameter's state: `spec` is the codec of the rows that were saved, `own` that of the rows to hold."""
    own = None if own is None or rows.why_in_floats(parameter) else own
    state = dict(state)
    if isinstance(state.get("step"), (int, float)):  # as torch kept it once; it makes tensors of all steps or of none
        state["step"] = torch.tensor(float(state["step"]), dtype=torch.float32, device="cpu")
    if rows.FIRST in state:
        state = _in_floats(state, parameter, spec) if spec != own else state
    if own is not None and "exp_avg" in state:
        first, second = (state.pop(key).to(parameter.device) for key in ("exp_avg", "exp_avg_sq"))
        state |= rows.encoded(parameter, first, second, own)
    for key in (rows.FIRST, rows.SECOND, COUNT):
        if isinstance(state.get(key), Tensor):
            state[key] = Uncast(state[key])
    if own is not None:
        _check_shapes(state, parameter, own)
        state["step"] = Uncast(state["step"].to("cpu"))
    return state


def _in_floats(state: dict[str, Any], parameter: Tensor, spec: str | None) -> dict[str, Any]:
    if spec is None:
        raise StateDictError(
            f"state_dict: holds moments in rows ({rows.FIRST}), and its parameter group does not say in which codec "
            "('state'). Load it as it was saved, with all entries of its parameter groups."
        )
    _check_shapes(state, parameter, spec)
    here = {key: value.to(parameter.device) if isinstance(value, Tensor) else value for key, value in state.items()}
    floats = {
        "exp_avg": rows.first_moment(parameter, here, spec),
        "exp_avg_sq": rows.second_moment(parameter, here, spec),
    }
    return {key: value for key, value in state.items() if key not in (rows.FIRST, rows.SECOND)} | floats


def _check_shapes(state: dict[str, Any], parameter: Tensor, spec: str) -> None:
    for key, shape in rows.shapes(parameter, spec).items():
        held = state.get(key)
        tensor = held.tensor if isinstance(held, Uncast) else held
        if not isinstance(tensor, Tensor) or tuple(tensor.shape) != shape:
            what = tuple(tensor.shape) if isinstance(tensor, Tensor) else tensor
            raise StateDictError(
                f"state_dict: {key} of a parameter of shape {tuple(parameter.shape)} in {spec!r} is uint8 of shape "
                f"{shape}, and was saved as {what}. Load the state of an optimizer of the same parameters."
            )


def unwrapped(state: dict[str, Any], parameter: Tensor) -> dict[str, Any]:
    """A parameter's state without `Uncast`, on the parameter's device."""
    for key, value in state.items():
        if isinstance(value, Uncast) and key in (rows.FIRST, rows.SECOND):
            state[key] = value.tensor.to(parameter.device)
        elif isinstance(value, Uncast):
            state[key] = value.tensor.to("cpu" if rows.FIRST in state else state["step"].device)
    return state
