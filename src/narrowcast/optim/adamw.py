"""torch's AdamW, and the way in which it takes a momentum that travelled between ranks.

`AdamW` has the arguments, the behaviour and the state of torch.optim.AdamW, and gives the same bits: it calls torch's
own step. It adds one thing. `compress_gradients(..., momentum=optimizer)` averages first moments between ranks instead
of gradients, and hands them over like this:

    m = beta1 * optimizer.momentum_of(p) + (1 - beta1) * gradient     # on each rank; beta1 = optimizer.beta1_of(p)
    p.grad = the average of m between ranks
    optimizer.take_momentum([p])
    optimizer.step()                        # p.grad becomes the first moment; the second one stays as it is

A momentum has the sign of the gradient, also with maximize=True: the optimizer negates both. What clip_grad_norm_ or a
GradScaler does to `p.grad` before the step, it does to the momentum. Not done: `differentiable=True` with a momentum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from typing import Any, cast

import torch
from torch import Tensor

from narrowcast.errors import OptimizerError
from narrowcast.optim.update import COUNT, alike, update


class AdamW(torch.optim.AdamW):
    """`torch.optim.AdamW`, with its arguments, its bits and its state dicts. It can also step with a momentum that
    was averaged between ranks: `nc.compress_gradients(ddp, "sign", momentum=optimizer)`."""

    _marked: set[Tensor]
    _places: dict[Tensor, tuple[int, int]]

    _expected_scale: bool | None = None
    """Whether momentums come at the scale of a GradScaler's loss; None where none are expected."""
    grad_scale: Tensor | None
    found_inf: Tensor | None

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._marked, self._places = set(), {}
        super().__init__(*arguments, **options)

    # -- a momentum that travelled -----------------------------------------------------------------------------------

    def momentum_of(self, parameter: Tensor) -> Tensor:
        """The first moment of a parameter, with the sign of its gradient; zeros before its first step.

        This is the state itself where it can be: read it, do not write it.
        """
        group = self._group_of(parameter)
        state = self.state.get(parameter) or {}
        if "exp_avg" not in state:
            return torch.zeros_like(parameter, requires_grad=False)
        moment: Tensor = state["exp_avg"]
        return -moment if group["maximize"] else moment

    def divisor_of(self, parameter: Tensor) -> Tensor:
        """What a step divides a first moment by: the root of the second moment, corrected, plus eps."""
        self._check_takes_momentum(parameter)
        group, state = self._group_of(parameter), self.state[parameter]
        second: Tensor = state["max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"]
        correction = 1 - float(group["betas"][1]) ** state.get(COUNT, state["step"])
        return second.sqrt().div_(correction.sqrt()).add_(group["eps"])

    def beta1_of(self, parameter: Tensor) -> float:
        """How much of its first moment a parameter keeps in a step."""
        return float(self._group_of(parameter)["betas"][0])

    def expect_momentum(self, *, scaled: bool) -> None:
        """Say before the first backward that momentums will come; `scaled`: at the scale of a GradScaler's loss.

        From then on a GradScaler hands its scale to `step()`, fused or not: one that nobody knew of when the momentum
        was formed is refused there, instead of a scaled gradient in a momentum that is not.
        """
        self._expected_scale = scaled
        self._step_supports_amp_scaling = True

    def take_momentum(self, parameters: Iterable[Tensor]) -> None:
        """In the next `step()` the `.grad` of these parameters is their new first moment, not a gradient.

        Their second moment stays as it is, and so does its bias correction; all else is as usual. The step consumes
        the marks; `zero_grad` leaves them. A parameter needs a second moment: it has stepped before, or was loaded.
        """
        parameters = list(parameters)
        for parameter in parameters:
            self._check_takes_momentum(parameter)
        self._marked.update(parameters)

    def take_gradient(self, parameters: Iterable[Tensor]) -> None:
        """Take back `take_momentum`: the `.grad` of these parameters is a gradient.

        A GradScaler that finds an overflow may call no `step()`; then marks wait for the next one.
        """
        parameters = list(parameters)
        for parameter in parameters:
            self._group_of(parameter)
        self._marked.difference_update(parameters)

    @property
    def momentum_pending(self) -> Set[Tensor]:
        """The parameters whose `.grad` the next step takes for a momentum: as it is now, and as it will be."""
        return self._marked

    def _check_takes_momentum(self, parameter: Tensor) -> None:
        if self._group_of(parameter)["differentiable"]:
            raise OptimizerError(
                "take_momentum: an optimizer with differentiable=True cannot step with a momentum. Make it without."
            )
        if "exp_avg_sq" not in (self.state.get(parameter) or {}):
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
        """Load a state dict of this class or of torch.optim.AdamW."""
        # Torch casts every tensor but `step` to the parameter's dtype, and bf16 counts to 256. Numbers it leaves alone.
        states = {
            key: {**state, COUNT: float(state[COUNT])} if isinstance(state, dict) and COUNT in state else state
            for key, state in state_dict["state"].items()
        }
        super().load_state_dict({**state_dict, "state": states})

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | ({"_marked": self._marked} if self._marked else {})

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.setdefault("_marked", set())
        self.__dict__.setdefault("_places", {})
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        for held in self.state.values():
            if COUNT in held and not isinstance(held[COUNT], Tensor):
                held[COUNT] = torch.full_like(held["step"], held[COUNT])

    # -- steps -------------------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step, as torch.optim.AdamW's. A closure runs first, once."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._expected_scale is not None and getattr(self, "found_inf", None) is not None and self._unscale():
            return loss
        if self._marked or any(self._apart(parameter) for parameter in self.state):
            self._step_apart()
        _of_torch(torch.optim.AdamW.step)(self)
        return loss

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
            grads = [each.grad for group in self.param_groups for each in group["params"] if each.grad is not None]
            for (device, _), of_device in _by_device(grads).items():
                torch._foreach_mul_(of_device, scale.double().reciprocal().float().to(device))
        return False

    def _apart(self, parameter: Tensor) -> bool:
        """Whether a parameter's update is not torch's."""
        return parameter in self._marked or COUNT in (self.state.get(parameter) or {})

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @torch.no_grad()
    def _step_apart(self) -> None:
        """Update the parameters whose two moments have been updated unequally often, and consume the marks."""
        marked = self._marked
        for parameter in marked:
            self._check_takes_momentum(parameter)
            self.state[parameter].setdefault(COUNT, self.state[parameter]["step"].clone())
        grad_scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        skipped = found_inf is not None and bool(found_inf)
        for group in () if skipped else self.param_groups:
            apart = [each for each in group["params"] if each.grad is not None and self._apart(each)]
            if any(each.grad.is_sparse for each in apart):
                raise OptimizerError("grad: AdamW takes no sparse gradients or momentums. Pass grad.to_dense().")
            for takes_momentum in (True, False):
                chosen = [each for each in apart if (each in marked) == takes_momentum]
                for tensors in alike(chosen, self.state):
                    update(group, tensors, takes_momentum=takes_momentum, grad_scale=grad_scale)
        marked.clear()

    def _init_group(self, group: dict[str, Any], *lists: Any) -> Any:
        """What torch's step updates of a group: all but what `_step_apart` has updated."""
        rest = [each for each in group["params"] if not self._apart(each)]
        if len(rest) < len(group["params"]):
            group = {**group, "params": rest}
        return super()._init_group(group, *lists)  # type: ignore[no-untyped-call]


def _by_device(tensors: Iterable[Tensor]) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
    """Tensors that one foreach operation takes at once."""
    sorted_: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        sorted_.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return sorted_


def _of_torch(step: Callable[..., Any]) -> Callable[..., Any]:
    """torch's step as it was written: the first optimizer of a class wraps it to call hooks, which run around ours."""
    while getattr(step, "hooked", False):
        step = cast("Any", step).__wrapped__
    return step
