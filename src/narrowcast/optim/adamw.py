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

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from narrowcast.codecs import Codec
from narrowcast.errors import OptimizerError
from narrowcast.optim import loading, rows
from narrowcast.optim.around_torch import of_torch, outside_graphs
from narrowcast.optim.travelling import Travelling
from narrowcast.optim.update import COUNT, sort_alike, update


class AdamW(Travelling):
    """`torch.optim.AdamW`, with its arguments, its bits and its state dicts.

    It can also step with a momentum that was averaged between ranks: `nc.compress_gradients(ddp, "sign",
    momentum=optimizer)`.

    `state` is the codec in which the first moment is held: "int8" makes 2.1 bytes a parameter of both moments, "int4"
    1.6, instead of 8. The second moment then has 8 bits of its own: floats with 3 bits of mantissa over 32 octaves
    below a block's largest, rounded at random so that its mean is right, and never from above zero to zero.
    Parameters with fewer than two dimensions, 4096 elements or 64 elements in a row, and those of fp64, keep their
    moments in floats: `why_in_floats(parameter)` says why. A parameter group may have a `state` of its own, or None.
    """

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
        self._places, self._divisors, self._state = {}, {}, state
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
        self._divisors = {}
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
        if self._expected_scale is not None and getattr(self, "found_inf", None) is not None and self._unscale():
            return loss
        self._step_apart()
        of_torch(torch.optim.AdamW.step)(self)
        if self._expected:
            self._count()
        return loss

    def _in_rows(self, parameter: Tensor, group: dict[str, Any]) -> bool:
        return group.get("state") is not None and rows.why_in_floats(parameter) is None

    def _apart(self, parameter: Tensor, group: dict[str, Any]) -> bool:
        """Whether a parameter's update is not torch's."""
        return parameter in self._behind or self._in_rows(parameter, group)

    @outside_graphs
    @torch.no_grad()
    def _step_apart(self) -> None:
        """Update the parameters that torch's step does not, and consume the marks."""
        marked = self._marked
        for parameter in marked:
            self._check_takes_momentum(parameter)
            if COUNT not in (state := self.state[parameter]):
                state[COUNT] = state["step"].clone()
        self._behind |= marked
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
        floats: dict[bool, list[Tensor]] = {True: [], False: []}
        for parameter in parameters:
            if not self._in_rows(parameter, group):
                floats[parameter in marked].append(parameter)
                continue
            state = self.state[parameter]
            if not state:
                state.update(rows.new_state(parameter, group))
            rows.update(parameter, state, group, takes_momentum=parameter in marked, grad_scale=grad_scale)
        for takes_momentum, these in floats.items():
            for tensors in sort_alike(these, self.state, self.divisor_of if takes_momentum else None):
                update(group, tensors, takes_momentum=takes_momentum, grad_scale=grad_scale)

    def _init_group(self, group: dict[str, Any], *lists: Any) -> Any:
        """What torch's step updates of a group: all but what `_step_apart` has updated."""
        rest = [each for each in group["params"] if not self._apart(each, group)]
        if len(rest) < len(group["params"]):
            group = {**group, "params": rest}
        return super()._init_group(group, *lists)  # type: ignore[no-untyped-call]
