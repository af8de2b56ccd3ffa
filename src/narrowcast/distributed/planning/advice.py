"""What would make a step's reductions shorter, besides a codec: larger buckets, and fewer meetings.

Messages and trips cost the same however many bytes they carry. Larger buckets carry more in each. Meeting once for
several micro-batches has fewer of them, and fewer bytes. Both are predicted as the plan itself was, and named only
where messages and trips matter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from narrowcast.distributed.planning.link import Link
from narrowcast.distributed.planning.prediction import Prediction

LARGER_MB = (50, 100, 200, 400)
"""Buckets that are tried, in MB. Each is memory beside the gradients, unless DDP's gradient_as_bucket_view is set."""

WORTH = 0.1
"""Advice is given where messages and trips take such a share of the time; larger buckets, where they save it."""

MICRO_BATCHES = 4


@dataclass(frozen=True)
class Advice:
    """What to change, and what it would take."""

    overhead_seconds: float
    """Of the plan as it is: what messages and trips add to the time of a step."""
    bucket_mb: int | None
    """A larger bucket that pays, or None."""
    bucket_seconds: float | None
    """The time of a step with it."""
    micro_batches: int
    micro_batch_seconds: float
    """The time for each of so many micro-batches that are added up before they are sent; in larger buckets, if any."""


def advise(
    chosen: Prediction, link: Link, bucket_mb: float, again: Callable[[float, Link], Prediction]
) -> Advice | None:
    """Advice for a plan; None where messages and trips hardly matter.

    `again(megabytes, link)` predicts the chosen codec with other buckets, or on another link.
    """
    ideal = replace(link, latency_s=0.0, message_s=0.0, step_s=None if link.step_s is None else 0.0)
    overhead = chosen.seconds - again(bucket_mb, ideal).seconds
    if overhead < WORTH * chosen.seconds:
        return None
    larger = [(mb, again(mb, link).seconds) for mb in LARGER_MB if mb > bucket_mb]
    best = _smallest_that_pays(larger, chosen.seconds)
    size, seconds = (None, None) if best is None else best
    each = (chosen.seconds if seconds is None else seconds) / MICRO_BATCHES
    return Advice(overhead, size, seconds, MICRO_BATCHES, each)


def _smallest_that_pays(larger: Sequence[tuple[int, float]], now: float) -> tuple[int, float] | None:
    """The smallest bucket that has most of what the best one saves."""
    best = min((seconds for _, seconds in larger), default=now)
    if best > (1 - WORTH) * now:
        return None
    return next((mb, seconds) for mb, seconds in larger if seconds <= (1 + WORTH / 2) * best)
