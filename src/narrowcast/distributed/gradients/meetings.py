"""Fewer meetings: ranks train alone, and now and then average how far their parameters have moved (`sync_every=`).

At a meeting each rank sends the change of its parameters since the last one. With c the average of all changes, and p
the parameters that the last meeting ended with, which all ranks have alike:

    v = outer_momentum * v + c                            zero at first; kept only where outer_momentum is not zero
    p = p + outer_lr * (c + outer_momentum * v)           torch.optim.SGD's step with Nesterov's momentum, as in DiLoCo

By default (1, 0) parameters become their average. `p` and `v` are held in fp32 (in fp64 for parameters that are). A
parameter of fewer bits is `p` rounded, and its change is counted from that rounded value: so what rounding takes from
one meeting is not lost for the next. An optimizer's own moments stay with their rank.

`Meetings` holds when ranks meet, and what they have in common from one meeting to the next; it knows no ranks and sends
nothing. local_updates.py does.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from narrowcast.errors import SpecError, StateDictError

SyncEvery = int | Literal["growing"] | Sequence[int] | Callable[[int], int]

LONGEST, MEETINGS_OF_A_LENGTH = 16, 16
""""growing": intervals of one step, twice as long after so many of a length, up to so many steps. 0/1 Adam's (arXiv
2202.06009) grow in the same way, and end at 16 in DeepSpeed; there each length lasts for tens of thousands of steps."""

PUT_OFF = 8
"""How often in a row a meeting is put off by a step, since gradients of some rank are not finite. A GradScaler leaves
out such a step, on that rank alone, and halves its scale: eight times are enough for a factor of 256."""


class Intervals:
    """How many steps ranks train alone, from each meeting to the next."""

    def __init__(self, given: SyncEvery, first_step: int) -> None:
        """`first_step`: at which the first interval begins. A function is asked for it here, so that a wrong one is
        refused before training."""
        self._given = given
        if isinstance(given, str):
            if given != "growing":
                raise _refused(given)
        elif isinstance(given, Sequence):
            if not given:
                raise _refused(given)
            self._given = [_steps(each, f"sync_every={given!r}") for each in given]
        elif not callable(given):
            _steps(given, f"sync_every={given!r}")
        self.length_of(0, first_step)

    def length_of(self, meetings: int, step: int) -> int:
        """Of the interval that begins after so many meetings, at a step of the run."""
        given = self._given
        if isinstance(given, str):
            return int(min(LONGEST, 2 ** (meetings // MEETINGS_OF_A_LENGTH)))
        if isinstance(given, Sequence):
            return int(given[min(meetings, len(given) - 1)])
        return _steps(given(step), f"sync_every(step={step})") if callable(given) else given

    def __str__(self) -> str:
        """What every rank must have in common. What a function returns, ranks compare at each meeting."""
        return "a function" if callable(self._given) else repr(self._given)


def _steps(given: object, what: str) -> int:
    if isinstance(given, bool) or not isinstance(given, int) or given < 1:
        raise _refused(given, what)
    return given


def _refused(given: object, what: str = "") -> SpecError:
    return SpecError(
        f"{what or f'sync_every={given!r}'}: {given!r} is not a number of steps between two meetings, 1 or more. Pass "
        "for example sync_every=10; 'growing' for 1, 2, 4, 8, 16 steps, each length 16 times; a list of lengths, of "
        "which the last one stays; or a function of the step that returns the length of the interval that begins there."
    )


class Meetings:
    """When the ranks of a model meet, and what they had in common when they last did."""

    def __init__(
        self, sync_every: SyncEvery, first_step: int, optimizers: Sequence[Any], outer_lr: float, outer_momentum: float
    ) -> None:
        self.intervals = Intervals(sync_every, first_step)
        self.optimizers = list(optimizers)
        self.outer_lr = _number(outer_lr, "outer_lr", "a number above 0, usually 1, or 0.7 with a momentum")
        self.outer_momentum = _number(outer_momentum, "outer_momentum", "a number from 0 to below 1, in DiLoCo 0.9")
        self.count = 0
        """The meetings that are over."""
        self.since = 0
        """The steps since the last one."""
        self.put_off = 0
        """How often the next one was put off."""
        self.awaited: set[int] | None = None
        """A meeting is due once these optimizers (their ids) have stepped; None where none is."""
        self.parameters: dict[str, Tensor] = {}
        """Those that are averaged; local_updates.py names them."""
        self.meet: Callable[[], None] = lambda: None
        """Meet now, if there was a step since the last time; local_updates.py says how."""
        self.resumed_at = 0
        self.unseen = True
        """Whether ranks have not compared yet where they start from."""
        self._last: dict[str, Tensor] = {}
        self._velocity: dict[str, Tensor] = {}
        self._interval = (-1, -1, 0)
        """The one under way: the meetings before it, its first step, its length."""
        self._taken_with = ""
        """The digest of the parameters that a loaded state belongs to, until it is compared."""

    def __str__(self) -> str:
        """What every rank must have in common."""
        return f"sync_every={self.intervals}, outer_lr={self.outer_lr:g}, outer_momentum={self.outer_momentum:g}"

    def is_last_step(self, step: int) -> bool:
        """Whether a meeting is due after the step under way, of which so many of the run are over."""
        began = self.count, step - self.since
        if began != self._interval[:2]:  # a function is asked once for each interval
            self._interval = (*began, self.intervals.length_of(*began))
        return self.since + 1 >= self._interval[2]

    @property
    def due(self) -> bool:
        return self.awaited is not None

    @property
    def loaded(self) -> bool:
        """Whether a state of the middle of an interval was loaded, and `begin` has not looked at the model yet."""
        return bool(self._taken_with)

    def begin(self) -> None:
        """Before the first step after a meeting, or after the warm-up: note where all ranks start from."""
        if self._taken_with and self._taken_with != digest_of(self.parameters):
            raise StateDictError(
                f"state: saved {self.since} steps after a meeting, when each rank has parameters of its own, and those "
                "of the model are others. Load on each rank what that rank saved of the model and its optimizer, "
                "after DistributedDataParallel has wrapped it (which copies the first rank's parameters to all), or "
                "call compression.sync() before you save."
            )
        self._taken_with = ""
        if len(self._last) < len(self.parameters):
            for name, parameter in self.parameters.items():
                if name not in self._last:
                    self._last[name] = _widened(real(parameter)).clone(memory_format=torch.contiguous_format)

    def digest(self) -> str:
        """Of what all ranks should have in common."""
        return digest_of(self._last)

    def write_change(self, name: str, out: Tensor) -> None:
        """Write how far a parameter has moved since the last meeting."""
        parameter, last = real(self.parameters[name]), self._last[name]
        torch.sub(_widened(parameter), _widened(last.to(parameter.dtype)), out=out.view(parameter.shape))

    def move(self, name: str, average: Tensor) -> None:
        """Take the outer step of a parameter, given the average of all ranks' changes."""
        parameter, last = real(self.parameters[name]), self._last[name]
        step = average.view(parameter.shape)
        if self.outer_momentum:
            velocity = self._velocity.setdefault(name, torch.zeros_like(last))
            velocity.mul_(self.outer_momentum).add_(step)
            step = step.add(velocity, alpha=self.outer_momentum)
        last.add_(step, alpha=self.outer_lr)
        parameter.copy_(last)

    def over(self) -> None:
        """A meeting is over."""
        self.count += 1
        self.since = self.put_off = 0
        self.awaited, self.unseen = None, False

    # -- state --------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What the next meeting depends on. Parameters that are what the last meeting ended with are not repeated."""
        apart = {name: last for name, last in self._last.items() if self.since or not self._equal(name)}
        return {
            "count": self.count,
            "since": self.since,
            "put_off": self.put_off,
            "due": self.due,
            "last": {name: last.cpu().clone() for name, last in apart.items()},
            "velocity": {name: velocity.cpu().clone() for name, velocity in self._velocity.items()},
            "parameters": self._taken_with or (digest_of(self.parameters) if self.since else ""),
        }

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Go on from there; None where gradients travelled in every step: ranks start from what they have."""
        state = state or {
            "count": 0,
            "since": 0,
            "put_off": 0,
            "due": False,
            "parameters": "",
            "last": {},
            "velocity": {},
        }
        for key in ("last", "velocity"):
            strange = [name for name, tensor in state[key].items() if not self._fits(name, tensor)]
            if strange:
                raise StateDictError(
                    f"state: it holds parameters of the last meeting for {', '.join(strange[:5])}, which this model "
                    "does not have in that shape. The state is of another model; load the one saved with this one."
                )
        self.count, self.since, self.put_off = int(state["count"]), int(state["since"]), int(state["put_off"])
        self.awaited = set(map(id, self.optimizers)) if state["due"] else None
        self._last, self._velocity = (
            {name: tensor.to(self.parameters[name].device, copy=True) for name, tensor in state[key].items()}
            for key in ("last", "velocity")
        )
        self._taken_with, self.unseen, self.resumed_at = str(state["parameters"]), True, self.count

    def _fits(self, name: str, tensor: object) -> bool:
        here = self.parameters.get(name)
        return here is not None and isinstance(tensor, Tensor) and tensor.shape == real(here).shape

    def _equal(self, name: str) -> bool:
        return torch.equal(_widened(real(self.parameters[name])), self._last[name])


def real(parameter: Tensor) -> Tensor:
    """A parameter outside of autograd; a complex one as pairs of real numbers."""
    plain = parameter.detach()
    return torch.view_as_real(plain) if plain.is_complex() else plain


def change_dtype(parameter: Tensor) -> torch.dtype:
    """What the change of a parameter is counted in."""
    return torch.promote_types(real(parameter).dtype, torch.float32)


def _widened(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))


def digest_of(tensors: Mapping[str, Tensor]) -> str:
    """A few characters that differ where a bit of a tensor does, as good as surely."""
    digest = hashlib.blake2b(digest_size=6)
    for name in sorted(tensors):
        values = real(tensors[name]).contiguous()
        bits = values.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[values.dtype.itemsize])
        digest.update(f"{name} {int(bits.sum(dtype=torch.int64))} ".encode())
    return digest.hexdigest()


def _number(given: object, name: str, rule: str) -> float:
    fits = isinstance(given, (int, float)) and not isinstance(given, bool) and math.isfinite(given)
    number = float(given) if isinstance(given, (int, float)) else math.nan
    if not fits or not (number > 0 if name == "outer_lr" else 0 <= number < 1):
        raise SpecError(f"{name}={given!r}: {rule}. By default outer_lr=1.0 and outer_momentum=0.0: the average.")
    return number
