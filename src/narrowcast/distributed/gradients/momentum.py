"""The momentum of AdamW, sent in place of gradients (1-bit Adam, arXiv 2102.02888).

A rank's momentum after a step is beta1 m + (1 - beta1) g, with m the momentum that all ranks have in common and g its
own gradient. The average of all ranks' is the next m. It changes slowly, and the optimizer divides it by a second
moment that stays as it is: so one bit an element and error feedback are enough, where a gradient in one bit would spoil
the second moment.

What travels is m divided by the root of the second moment, which all ranks have alike: the update itself, but for the
learning rate. Its elements are of one size, whatever the size of their gradients, so what a codec loses is spread
evenly over updates (bench/simulated.py momentum: at a warm-up of 5% the loss ends 18% lower than with m itself).

A bucket is turned into that before it travels, and back into the momentum after; DDP writes it into `.grad`. The
optimizer is told (`take_momentum`) that its next step finds the momentum there. Exempt parameters send gradients, and
are stepped as usual.

- `.grad` must be empty before a backward: two synchronized backwards without a step between them would put the momentum
  into the momentum. That is noticed, and refused in the second one.
- A step that no `optimizer.step()` has used when the next one begins was left out: it leaves no residuals.
- With a GradScaler, gradients are divided by its scale before they go in, and the average is multiplied with it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from narrowcast.distributed.gradients.error_feedback.outcome import Outcome
from narrowcast.errors import CollectiveError, SpecError


class MomentumOptimizer(Protocol):
    """What is asked of the optimizer: `narrowcast.optim.AdamW` is one."""

    momentum_pending: Set[Tensor]
    """The parameters whose `.grad` is a momentum that no step has used yet."""
    state: Any
    param_groups: list[dict[str, Any]]

    def momentum_of(self, parameter: Tensor) -> Tensor: ...
    def divisor_of(self, parameter: Tensor) -> Tensor: ...
    def beta1_of(self, parameter: Tensor) -> float: ...
    def expect_momentum(self, parameters: Iterable[Tensor], *, scaled: bool | None = None) -> None: ...
    def take_momentum(self, parameters: Iterable[Tensor]) -> None: ...
    def take_gradient(self, parameters: Iterable[Tensor]) -> None: ...
    def register_step_pre_hook(self, hook: Any) -> Any: ...


def momentum_of(
    optimizer: MomentumOptimizer | None, codec: object, schedule: object, scaler: torch.amp.GradScaler | None
) -> Momentum | None:
    """The momentum of an optimizer, which travels in `codec` or what `schedule` says; None where there is none."""
    if optimizer is None:
        if scaler is not None:
            raise SpecError(
                "scaler: only a momentum that travels needs to know it. Pass momentum=optimizer, or leave it out."
            )
        return None
    if codec == "auto" or (codec is None and schedule is None):
        raise SpecError(
            f'codec={codec!r}: which codec the momentum travels in is for you to say: "sign" (1.25 bits an element), '
            '"int2", "int4". Where the network is fast enough for none, leave momentum= out.'
        )
    return Momentum(optimizer, scaler)


_hooks = WeakTensorKeyDictionary()
"""Of each parameter the hook of the `Momentum` that watches it. Where a model was wrapped and compressed anew, that is
the last one: another would take the marks of a step that was left out, and this one would not see it."""


class Momentum:
    """Which optimizer's momentum travels, and how buckets become it."""

    def __init__(self, optimizer: MomentumOptimizer, scaler: torch.amp.GradScaler | None = None) -> None:
        if not hasattr(optimizer, "take_momentum"):
            raise SpecError(
                f"momentum={type(optimizer).__name__}: an optimizer whose momentum can travel, which is "
                "narrowcast.optim.AdamW. It takes torch.optim.AdamW's arguments: optimizer = "
                "narrowcast.optim.AdamW(model.parameters(), lr=...), then momentum=optimizer."
            )
        if scaler is not None and not hasattr(scaler, "scale"):
            raise SpecError(f"scaler={type(scaler).__name__}: the torch.amp.GradScaler that scales the loss, or None.")
        self.optimizer, self.scaler = optimizer, scaler
        self._watched: set[Tensor] = set()
        self._accumulated = False
        """Whether a gradient was added to a momentum that no step has used."""
        self._outcome = Outcome()
        self._sent_in: dict[Tensor, Outcome] = {}
        """The step that sent the momentum of a parameter last."""

    def unwatched(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """Those that `watch` has not seen."""
        return [parameter for parameter in parameters if parameter not in self._watched]

    def watch(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Raise unless the momentum of all these parameters can travel. Notice gradients that are added to it."""
        parameters = dict(named)
        if not parameters:
            return
        held = {id(parameter) for group in self.optimizer.param_groups for parameter in group["params"]}
        for name, parameter in parameters.items():
            if id(parameter) not in held:
                raise SpecError(
                    f"momentum: the optimizer does not hold {name} of the model. Make it with the parameters of the "
                    "model that DistributedDataParallel wraps, after .to(device): narrowcast.optim.AdamW("
                    "ddp.parameters(), ...). Name a parameter that is trained otherwise in exempt=."
                )
            if parameter.is_complex():
                raise SpecError(f"momentum: {name} is complex. Name it in exempt=: its gradients then travel instead.")
        self.optimizer.expect_momentum(parameters.values(), scaled=self.scaler is not None)
        for parameter in parameters.values():
            if parameter in _hooks:
                _hooks[parameter].remove()
            _hooks[parameter] = parameter.register_hook(self._before(parameter))
        self._watched.update(parameters.values())

    def _before(self, parameter: Tensor) -> Any:
        def before_gradient(_: Tensor) -> None:
            if parameter in self.optimizer.momentum_pending:
                if parameter.grad is not None and bool(parameter.grad.any()):
                    self._accumulated = True
                else:
                    if parameter in self._sent_in:  # else it was sent before the model was wrapped anew
                        self._sent_in[parameter].left_out = True
                    self.optimizer.take_gradient([parameter])

        return before_gradient

    def next_outcome(self, last: Outcome) -> Outcome:
        """That of a step that begins. The last one was left out if no optimizer step has used its momentum."""
        last.left_out = last.left_out or self._pending()  # what `_before` has seen, and is still to see
        self._outcome = Outcome(self._pending)
        return self._outcome

    def _pending(self) -> bool:
        return not self._watched.isdisjoint(self.optimizer.momentum_pending)

    def leave_unused_alone(self) -> None:
        """For DDP with find_unused_parameters: it writes no `.grad` of a parameter that no rank has used.

        What is there then is not the momentum, but the zeros of zero_grad(set_to_none=False). All ranks see the same.
        """

        def before_step(*_: Any) -> None:
            for parameter in self._watched & set(self.optimizer.momentum_pending):
                if parameter.grad is not None and not bool(parameter.grad.any()):
                    parameter.grad = None

        self.optimizer.register_step_pre_hook(before_step)

    def check_fresh(self) -> None:
        """Raise if this backward has added gradients to a momentum."""
        if self._accumulated:
            self._accumulated = False
            raise CollectiveError(
                "momentum: gradients of this backward were added to the momentum of the last one, which .grad holds "
                "and no optimizer.step() has used. Call optimizer.step() and optimizer.zero_grad() after each "
                "synchronized backward, and put all but the last backward of an accumulation under model.no_sync()."
            )

    def hand_over(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> FormedMomentum:
        """How these gradients, views of a bucket, become the momentum. From here on `.grad` counts as the momentum."""
        for parameter in parameters:
            if parameter not in self.optimizer.state:
                raise CollectiveError(
                    "momentum: the optimizer has no state of a parameter whose momentum is due. It took no step in the "
                    "warm-up: name one that is seldom used in exempt=. In a run that was resumed, load the optimizer's "
                    "state_dict as well as the compression's."
                )
        self.optimizer.take_momentum(parameters)
        self._sent_in.update(dict.fromkeys(parameters, self._outcome))
        scale = None
        if self.scaler is not None and gradients:
            one = torch.ones((), dtype=torch.float32, device=gradients[0].device)
            scale = self.scaler.scale(one).detach()  # stays on the device: nobody waits for it
        return FormedMomentum(self.optimizer, list(gradients), list(parameters), scale)


EXEMPT_IN = {torch.float32: torch.bfloat16, torch.float64: torch.bfloat16}
"""What exempt gradients of a dtype are rounded to in steps that send the momentum: next to one bit an element, vectors
in fp32 are 7% of all bytes of a small GPT. bf16 has the range of fp32, as the scale of a loss may ask for, and 8 bits:
its loss beside fp32's is in docs/momentum.md."""

LARGEST = 4.0
"""How large a rank's momentum may be, divided by the root of the second moment. With AdamW's default betas an update
is at most 3.2 for one gradient that is far larger than all before, and at most 1 for gradients that are alike. A
parameter that was hardly used in the warm-up has a second moment near zero, and would ask for any size."""


@dataclass
class FormedMomentum:
    """The gradients of one bucket, on their way into what travels, and from there into the momentum."""

    optimizer: MomentumOptimizer
    gradients: list[Tensor]
    parameters: list[Tensor]
    scale: Tensor | None
    """Of the loss."""

    def __post_init__(self) -> None:
        self._divisors: list[Tensor] = []

    @torch.no_grad()
    def form(self) -> None:
        """Turn gradients into what travels, in place."""
        if not self.gradients:
            return
        if self.scale is not None:
            torch._foreach_div_(self.gradients, self.scale)
        optimizer, dtype = self.optimizer, self.gradients[0].dtype
        moments = [optimizer.momentum_of(parameter).to(dtype) for parameter in self.parameters]
        betas = [optimizer.beta1_of(parameter) for parameter in self.parameters]
        self._divisors = [optimizer.divisor_of(parameter).to(dtype) for parameter in self.parameters]
        if self.gradients[0].device.type == "cpu":  # one by one: a gradient stays in the cache until it is formed
            for gradient, moment, beta, divisor in zip(self.gradients, moments, betas, self._divisors, strict=True):
                gradient.lerp_(moment, beta).div_(divisor)
                _bound(gradient)
            return
        for beta in set(betas):
            chosen = [i for i, each in enumerate(betas) if each == beta]
            torch._foreach_lerp_([self.gradients[i] for i in chosen], [moments[i] for i in chosen], beta)
        torch._foreach_div_(self.gradients, self._divisors)
        for gradient in self.gradients:
            _bound(gradient)

    @torch.no_grad()
    def restore(self) -> None:
        """Turn what arrived into the momentum, at the scale of the loss: a GradScaler divides it by that."""
        if not self.gradients:
            return
        torch._foreach_mul_(self.gradients, self._divisors)
        if self.scale is not None:
            torch._foreach_mul_(self.gradients, self.scale)
        self._divisors = []


def _bound(momentum: Tensor) -> None:
    """Clamp a momentum in place. One that is not finite stays so: the step is to be skipped."""
    if momentum.numel():
        low, high = torch.aminmax(momentum)
        if momentum.device.type == "cpu":  # on a GPU to ask would be to wait
            least, most = float(low), float(high)
            if least >= -LARGEST and most <= LARGEST:
                return
            if math.isfinite(least) and math.isfinite(most):
                momentum.clamp_(-LARGEST, LARGEST)
                return
        ends = torch.stack((low, high))
        momentum.clamp_(-LARGEST, LARGEST)
        momentum[(0,) * momentum.dim()] += (ends - ends).sum()  # zero, or NaN
