"""What travels in which step: gradients or the momentum, in which codec.

    steps         0 ... warmup_steps - 1     after those
    gradients     in `warmup_codec`          in `codec`, or in what `schedule(step)` says
    momentum      gradients in               the momentum in `codec` or `schedule(step)`, with gradients in
                  `warmup_codec`             `warmup_codec` again in the steps that `refresh` names

A codec of None stands for no compression. In a momentum run a step without one sends gradients, too: nothing would be
gained by the momentum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from narrowcast.codecs import Codec
from narrowcast.codecs import codec as as_codec
from narrowcast.distributed.collectives import AnyCodec
from narrowcast.distributed.gradients.options import codec_of, for_gradients
from narrowcast.errors import SpecError

Schedule = Callable[[int], AnyCodec | None]
Refresh = int | Literal["growing"] | None

BEFORE_MOMENTUM = "int2"
"""What gradients travel in by default in the warm-up of a momentum: with fewer bits, of 8, 4 and 2, runs ended level or
lower (docs/momentum.md). What a coarse codec adds to small gradients raises the least second moments of a block, by
which momentums are divided from then on: that may be what keeps the largest updates small."""

FIRST_INTERVAL = 16
"""Steps to the first refresh of "growing"; each interval after it is twice as long as the one before."""


class Travel(NamedTuple):
    """What travels in one step."""

    codec: Codec | None
    reason: str
    """Why there is no codec, or another one than asked for; "" otherwise."""
    momentum: bool


class Timetable:
    """The steps of one run, as its arguments say. `momentum`: whether the momentum travels after the warm-up."""

    def __init__(
        self,
        warmup_steps: int,
        warmup_codec: AnyCodec | Literal["default"] | None,
        schedule: Schedule | None,
        refresh: Refresh = None,
        momentum: bool = False,
    ) -> None:
        self.warmup_steps = _steps(warmup_steps)
        if warmup_codec == "default":
            warmup_codec = BEFORE_MOMENTUM if momentum else None
        self.warmup_codec = None if warmup_codec is None else _warmup_codec(warmup_codec)
        self.schedule = _schedule(schedule)
        self.refresh = _refresh(refresh)
        self.momentum = momentum
        if momentum and not warmup_steps:
            raise SpecError(
                "warmup_steps=0: the momentum is divided by a second moment that only gradients give, so a run begins "
                "with steps that send gradients. Pass for example a fifth of all steps: warmup_steps=1000 of 5000."
            )
        if refresh is not None and not momentum:
            raise SpecError(
                f"refresh={refresh!r}: it is the second moment that is refreshed while the momentum travels. Pass "
                "momentum=optimizer, too, or leave it out."
            )

    def at(self, step: int, codec: Codec | None) -> Travel:
        """What travels in a step, where `codec` is the one of the run."""
        if step < self.warmup_steps:
            return Travel(self.warmup_codec, "warm-up", False)
        if self.momentum and self._refreshes(step - self.warmup_steps + 1):
            return Travel(self.warmup_codec, "refresh", False)
        if self.schedule is None:
            return Travel(codec, "", self.momentum)
        scheduled = _scheduled(self.schedule, step)
        return Travel(scheduled, "schedule" if scheduled is None else "", self.momentum and scheduled is not None)

    def __str__(self) -> str:
        """What every rank must have in common."""
        schedule = ", schedule" if self.schedule else ""
        warmup = f"{self.warmup_steps}" + (f" in {self.warmup_codec.spec}" if self.warmup_codec else "")
        momentum = f", momentum, refresh={self.refresh}" if self.momentum else ""
        return f"warmup_steps={warmup}{schedule}{momentum}"

    def _refreshes(self, since: int) -> bool:
        """Whether the `since`-th step after the warm-up, counted from one, sends gradients."""
        if self.refresh is None:
            return False
        if self.refresh == "growing":
            whole, rest = divmod(since, FIRST_INTERVAL)
            return rest == 0 and (whole & (whole + 1)) == 0  # after 1, 3, 7, 15 ... first intervals
        return since % self.refresh == 0


def _steps(given: int) -> int:
    if isinstance(given, bool) or not isinstance(given, int) or given < 0:
        raise SpecError(f"warmup_steps={given!r}: a number of steps, 0 or more.")
    return given


def _warmup_codec(given: AnyCodec) -> Codec:
    try:
        return codec_of(given)
    except SpecError as error:
        raise SpecError(f"warmup_codec: {error}") from error


def _schedule(given: Schedule | None) -> Schedule | None:
    if given is not None and not callable(given):
        raise SpecError(
            f"schedule={given!r}: a function of the step that returns a codec, or None for no compression. For "
            'example schedule=lambda step: "int8" if step < 1000 else "int4".'
        )
    return given


def _scheduled(schedule: Schedule, step: int) -> Codec | None:
    """The codec that a schedule has for a step."""
    given = schedule(step)
    try:
        return None if given is None else for_gradients(as_codec(given))
    except SpecError as error:
        raise SpecError(f"schedule(step={step}): {error}") from error


def _refresh(given: Refresh) -> Refresh:
    if given is None or given == "growing":
        return given
    if isinstance(given, bool) or not isinstance(given, int) or given < 2:
        raise SpecError(
            f"refresh={given!r}: every how many steps gradients travel to refresh the second moment, 2 or more; "
            f"'growing' for intervals of {FIRST_INTERVAL}, {2 * FIRST_INTERVAL}, {4 * FIRST_INTERVAL} ... steps; "
            "None for never."
        )
    return given
