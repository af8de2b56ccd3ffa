"""How AdamW takes a momentum that travelled between ranks: what it is formed of, and the marks that announce it.

A marked parameter's `.grad` is its new first moment. adamw.py steps with it, and consumes the marks.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import Any

import torch
from torch import Tensor

from narrowcast.errors import OptimizerError
from narrowcast.optim import rows
from narrowcast.optim.around_torch import outside_graphs, unscale
from narrowcast.optim.update import COUNT


class Travelling(torch.optim.AdamW):
    """AdamW as seen by those who form its momentum."""

    _marked: set[Tensor]
    _expected: set[Tensor]
    _behind: set[Tensor]
    """Parameters whose second moment has been updated less often than the first."""
    _places: dict[Tensor, tuple[int, int]]
    _divisors: dict[Tensor, tuple[object, Tensor]]
    _expected_scale: bool | None = None
    """Whether momentums come at the scale of a GradScaler's loss; None where none are expected."""
    grad_scale: Tensor | None
    found_inf: Tensor | None

    def momentum_of(self, parameter: Tensor) -> Tensor:
        """The first moment of a parameter, with the sign of its gradient; zeros before its first step.

        This is the state itself where it is held in floats: read it, do not write it.
        """
        group = self._group_of(parameter)
        state = self.state.get(parameter) or {}
        if rows.FIRST in state:
            moment = rows.first_moment(parameter, state, group["state"])
        elif "exp_avg" in state:
            moment = state["exp_avg"]
        else:
            return torch.zeros_like(parameter, requires_grad=False)
        return -moment if group["maximize"] else moment

    def divisor_of(self, parameter: Tensor) -> Tensor:
        """What a step divides a first moment by: the root of the second moment, corrected, plus eps. Do not write it.

        Of a second moment in floats it is kept until that changes: 4 bytes a parameter, and half of the time of a step.
        """
        group, state = self._group_of(parameter), self.state.get(parameter) or {}
        second: Tensor | None = state.get("max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq")
        if second is None or group["differentiable"]:
            self._check_takes_momentum(parameter)
            return _divisor(rows.second_moment(parameter, state, group["state"]), group, state)
        count = state.get(COUNT, state["step"])
        updates = float(count) if count.device.type == "cpu" else None
        key = id(second), second._version, updates, group["betas"][1], group["eps"]
        known, divisor = self._divisors.get(parameter, (None, second))
        if known != key:
            divisor = _divisor(second, group, state)
            self._divisors[parameter] = key, divisor
        return divisor

    def beta1_of(self, parameter: Tensor) -> float:
        """How much of its first moment a parameter keeps in a step."""
        return float(self._group_of(parameter)["betas"][0])

    def take_momentum(self, parameters: Iterable[Tensor]) -> None:
        """In the next `step()` the `.grad` of these parameters is their new first moment, not a gradient.

        Their second moment stays as it is, and so does its bias correction; all else is as usual. The step consumes
        the marks; `zero_grad` leaves them. A parameter needs a second moment: it has stepped before, or was loaded.
        """
        parameters = list(parameters)
        for parameter in parameters:
            self._check_takes_momentum(parameter)
        self._marked.update(parameters)

    def expect_momentum(self, parameters: Iterable[Tensor], *, scaled: bool | None = None) -> None:
        """Say that these parameters will take a momentum: their states have `exp_avg_sq_steps` from now on.

        torch.distributed.checkpoint loads the keys that a fresh optimizer has after a first step, and no others.
        `scaled` says whether momentums come at the scale of a GradScaler's loss. Where it is given, a GradScaler hands
        its scale to `step()`, fused or not: one that nobody knew of when the momentum was formed is refused there.
        """
        parameters = list(parameters)
        for parameter in parameters:
            self._group_of(parameter)
        self._expected.update(parameters)
        self._count()
        if scaled is not None:
            self._expected_scale, self._step_supports_amp_scaling = scaled, True

    def take_gradient(self, parameters: Iterable[Tensor]) -> None:
        """Take back `take_momentum`, after a step that was skipped: the `.grad` of these parameters is a gradient."""
        for parameter in parameters:
            self._group_of(parameter)
            self._marked.discard(parameter)

    @property
    def momentum_pending(self) -> Set[Tensor]:
        """The parameters whose `.grad` the next step takes for a momentum: as it is now, and as it will be."""
        return self._marked

    def _check_takes_momentum(self, parameter: Tensor) -> None:
        if self._group_of(parameter)["differentiable"]:
            raise OptimizerError(
                "take_momentum: an optimizer with differentiable=True cannot step with a momentum. Make it without."
            )
        if not {"exp_avg_sq", rows.SECOND} & set(self.state.get(parameter) or {}):
            raise OptimizerError(
                f"take_momentum: a parameter of shape {tuple(parameter.shape)} has no second moment yet, which a step "
                "with a momentum leaves as it is. Step with gradients first: warmup_steps= of compress_gradients says "
                "how often; or load the state of an optimizer that did."
            )

    def _group_of(self, parameter: Tensor) -> dict[str, Any]:
        """The parameter group that holds a parameter."""
        for _ in range(2):
            number, at = self._places.get(parameter, (0, 0))
            groups = self.param_groups
            held = groups[number]["params"] if number < len(groups) else []
            if at < len(held) and held[at] is parameter:
                return groups[number]
            self._places = {
                each: (number, at) for number, held in enumerate(groups) for at, each in enumerate(held["params"])
            }
        shape = f"a tensor of shape {tuple(parameter.shape)}" if isinstance(parameter, Tensor) else repr(parameter)
        raise OptimizerError(
            f"parameter: the optimizer does not hold {shape}. It knows those it was made with or was given by "
            "add_param_group, the same objects. Make it from the model that is trained: "
            "nc.optim.AdamW(model.parameters())."
        )

    @torch.no_grad()
    def _unscale(self) -> bool:
        """What a GradScaler does for an optimizer that does not know of it; whether it found an overflow."""
        if self._marked and not self._expected_scale:
            raise OptimizerError(
                "step: a GradScaler scales the loss, and the momentum in .grad was formed without knowing. Tell it to "
                "compress_gradients: compress_gradients(model, codec, momentum=optimizer, scaler=scaler)."
            )
        scale, found_inf = self.grad_scale, self.found_inf
        self.grad_scale = self.found_inf = None  # torch's unfused steps take neither; the GradScaler deletes both
        if bool(found_inf):
            self._marked.clear()
            return True
        if scale is not None:
            unscale((each for group in self.param_groups for each in group["params"]), scale)
        return False

    @outside_graphs
    @torch.no_grad()
    def _count(self) -> None:
        """Where both moments have been updated equally often, `step` is the number of updates of the second one."""
        for parameter in self._expected - self._behind:
            if state := self.state.get(parameter):
                state.setdefault(COUNT, torch.zeros_like(state["step"])).copy_(state["step"])


def _divisor(second: Tensor, group: dict[str, Any], state: dict[str, Any]) -> Tensor:
    beta2, count = float(group["betas"][1]), state.get(COUNT, state["step"])
    on_cpu = count.device.type == "cpu"
    root = (1 - beta2 ** float(count)) ** 0.5 if on_cpu else (1 - beta2**count).sqrt()
    return second.sqrt().div_(root).add_(group["eps"])
