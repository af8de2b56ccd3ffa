"""torch's AdamW, the way in which it takes a momentum that travelled between ranks, and moments held in rows.

`AdamW` has the arguments, the behaviour and the state of torch.optim.AdamW, and gives the same bits: it calls torch's
own step. It adds two things. With `state=` it holds the moments of large parameters in rows (rows.py), and steps those
parameters itself. And `compress_gradients(..., momentum=optimizer)` averages first moments between ranks instead of
gradients, and hands them over like this:

    m = beta1 * optimizer.momentum_of(p) + (1 - beta1) * gradient     # on each rank; beta1 = optimizer.beta1_of(p)
    p.grad = the average of m between ranks
    optimizer.take_momentum([p])
    optimizer.step()                        # p.grad becomes the first moment; the second one stays as it is

A momentum has the sign of the gradient, also with maximize=True: the optimizer negates both. What clip_grad_norm_ or a
GradScaler does to `p.grad` before the step, it does to the momentum. Not done: `differentiable=True` with a momentum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from narrowcast.codecs import Codec
from narrowcast.errors import OptimizerError
from narrowcast.optim import loading, rows
from narrowcast.optim.update import COUNT, alike, update


class AdamW(torch.optim.AdamW):
    """`torch.optim.AdamW`, with its arguments, its bits and its state dicts.

    It can also step with a momentum that was averaged between ranks: `nc.compress_gradients(ddp, "sign",
    momentum=optimizer)`.

    `state` is the codec in which the first moment is held: "int8" makes 2.1 bytes a parameter of both moments, "int4"
    1.6, instead of 8. The second moment then has 8 bits of its own: floats with 3 bits of mantissa over 32 octaves
    below a block's largest, rounded at random so that its mean is right, and never from above zero to zero.
    Parameters with fewer than two dimensions, 4096 elements or 64 elements in a row, and those of fp64, keep their
    moments in floats: `why_in_floats(parameter)` says why. A parameter group may have a `state` of its own, or None.
    """

    _marked: set[Tensor]
    _expected: set[Tensor]
    _behind: set[Tensor]
    """Parameters whose second moment has been updated less often than the first."""
    _places: dict[Tensor, tuple[int, int]]
    _state: str | Codec | None

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        state: str | Codec | None = None,
    ) -> None:
        self._marked, self._expected, self._behind = set(), set(), set()
        self._places, self._state = {}, state
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's. A group may have a `state` of its own; None keeps its moments in floats."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        group.setdefault("state", self._state)
        if group["state"] is None:
            del group["state"]  # as torch's groups are
            return
        try:
            rows.check_group(group)
        except BaseException:
            self.param_groups.pop()
            raise

    def why_in_floats(self, parameter: Tensor) -> str | None:
        """Why the moments of a parameter are held in floats; None where they are held in rows."""
        if self._group_of(parameter).get("state") is None:
            return "its group has no `state`"
        return rows.why_in_floats(parameter)

    # -- a momentum that travelled -----------------------------------------------------------------------------------

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

    def expect_momentum(self, parameters: Iterable[Tensor]) -> None:
        """Say that these parameters will take a momentum: their states have `exp_avg_sq_steps` from now on.

        torch.distributed.checkpoint loads the keys that a fresh optimizer has after a first step, and no others.
        """
        parameters = list(parameters)
        for parameter in parameters:
            self._group_of(parameter)
        self._expected.update(parameters)
        self._count()

    def take_gradient(self, parameters: Iterable[Tensor]) -> None:
        """Take back `take_momentum`: the `.grad` of these parameters is a gradient.

        A GradScaler that finds an overflow may call no `step()`; then marks wait for the next one.
        """
        parameters = list(parameters)
        for parameter in parameters:
            self._group_of(parameter)
        self._marked.difference_update(parameters)

    @property
    def momentum_pending(self) -> frozenset[Tensor]:
        """The parameters whose `.grad` the next step takes for a momentum."""
        return frozenset(self._marked)

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

    # -- states ------------------------------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class, whatever its `state` was, or of torch.optim.AdamW.

        Moments are decoded or encoded where this optimizer holds them in another form than the one that was saved.
        """
        last = self.register_load_state_dict_pre_hook(lambda _, given: loading.adapted(given, self.param_groups))
        try:
            super().load_state_dict(state_dict)
        finally:
            last.remove()

    def __getstate__(self) -> dict[str, Any]:
        sets = {name: value for name in ("_marked", "_expected") if (value := getattr(self, name))}
        return super().__getstate__() | {"_state": self._state} | sets

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in (("_marked", set()), ("_expected", set()), ("_places", {}), ("_state", None)):
            self.__dict__.setdefault(name, value)
        for parameter, held in state["state"].items():
            if isinstance(held, dict):
                loading.unwrapped(held, parameter)
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._behind = {key for key, held in self.state.items() if COUNT in held and bool(held[COUNT] != held["step"])}

    # -- steps -------------------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step, as torch.optim.AdamW's. A closure runs first, once."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step_apart()
        _of_torch(torch.optim.AdamW.step)(self)
        if self._expected:
            self._count()
        return loss

    def _in_rows(self, parameter: Tensor, group: dict[str, Any]) -> bool:
        return group.get("state") is not None and rows.why_in_floats(parameter) is None

    def _apart(self, parameter: Tensor, group: dict[str, Any]) -> bool:
        """Whether a parameter's update is not torch's."""
        return parameter in self._behind or self._in_rows(parameter, group)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @torch.no_grad()
    def _count(self) -> None:
        """Where both moments have been updated equally often, `step` is the number of updates of the second one."""
        for parameter in self._expected - self._behind:
            if state := self.state.get(parameter):
                state.setdefault(COUNT, torch.zeros_like(state["step"])).copy_(state["step"])

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @torch.no_grad()
    def _step_apart(self) -> None:
        """Update the parameters that torch's step does not, and consume the marks."""
        marked = self._marked
        for parameter in marked:
            self._check_takes_momentum(parameter)
            self.state[parameter].setdefault(COUNT, self.state[parameter]["step"].clone())
            self._behind.add(parameter)
        chosen = [
            (group, [each for each in group["params"] if each.grad is not None and self._apart(each, group)])
            for group in self.param_groups
        ]
        if any(each.grad.is_sparse for _, parameters in chosen for each in parameters if each.grad is not None):
            raise OptimizerError("grad: AdamW takes no sparse gradients or momentums. Pass grad.to_dense().")
        found_inf = getattr(self, "found_inf", None)
        skipped = found_inf is not None and any(parameters for _, parameters in chosen) and bool(found_inf)
        for group, parameters in () if skipped else chosen:
            self._update_group(group, parameters)
        marked.clear()

    def _update_group(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        marked, grad_scale = self._marked, getattr(self, "grad_scale", None)
        floats = []
        for parameter in parameters:
            if not self._in_rows(parameter, group):
                floats.append(parameter)
                continue
            state = self.state[parameter]
            if not state:
                state.update(rows.new_state(parameter, group))
            rows.update(parameter, state, group, takes_momentum=parameter in marked, grad_scale=grad_scale)
        for takes_momentum in (True, False):
            for tensors in alike([each for each in floats if (each in marked) == takes_momentum], self.state):
                update(group, tensors, takes_momentum=takes_momentum, grad_scale=grad_scale)

    def _init_group(self, group: dict[str, Any], *lists: Any) -> Any:
        """What torch's step updates of a group: all but what `_step_apart` has updated."""
        rest = [each for each in group["params"] if not self._apart(each, group)]
        if len(rest) < len(group["params"]):
            group = {**group, "params": rest}
        return super()._init_group(group, *lists)  # type: ignore[no-untyped-call]


def _of_torch(step: Callable[..., Any]) -> Callable[..., Any]:
    """torch's step as it was written: the first optimizer of a class wraps it to call hooks, which run around ours."""
    while getattr(step, "hooked", False):
        step = cast("Any", step).__wrapped__
    return step
