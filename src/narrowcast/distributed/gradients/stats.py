"""What compressing gradients costs and loses, counted as it runs.

Bytes and seconds are counted in every step. Norms need passes over the gradients, so quantization is probed every
`PROBE_EVERY` steps only. Seconds: `busy` is the time in which the lane worked, `exposed` the part of it after backward
had handed over its last bucket, when nothing is left to hide it.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

PROBE_EVERY = 50


class Probe:
    """Signal and noise of a bucket's two quantizations."""

    def __init__(self) -> None:
        self._sums: dict[str, list[Tensor]] = {"sender": [], "owner": []}

    def add(self, which: Literal["sender", "owner"], meant: Tensor, sent: Tensor) -> None:
        meant = meant.float()
        pair = meant.new_empty(2)
        pair[0], pair[1] = meant.norm() ** 2, (meant - sent).norm() ** 2
        self._sums[which].append(pair)

    def sqnr(self, which: Literal["sender", "owner"]) -> float:
        """In dB; NaN where nothing was quantized."""
        sums = [pair.tolist() for pair in self._sums[which]]
        signal, noise = (math.fsum(pair[i] for pair in sums) for i in (0, 1))
        if not signal > 0:
            return math.nan
        return 10 * math.log10(signal / noise) if noise > 0 else math.inf


@dataclass
class BucketStats:
    """One bucket, as it went last."""

    index: int
    numel: int
    exempt: int
    """Elements that travel without loss."""
    codec: str | None = None
    """None where it went uncompressed."""
    reason: str = ""
    """Why it went uncompressed."""
    plain_bytes: int = 0
    sent_bytes: int = 0
    sqnr: float = math.nan
    """Of what this rank sent, in dB, when it was last probed."""
    owner_sqnr: float = math.nan
    """Of the sums that this rank owns."""


@dataclass
class GradientStats:
    """The sums over all steps so far; bytes are those that this rank sent."""

    steps: int = 0
    plain_bytes: int = 0
    """What a ring would have sent in the gradients' own dtype."""
    sent_bytes: int = 0
    busy_seconds: float = 0.0
    exposed_seconds: float = 0.0
    buckets: dict[int, BucketStats] = field(default_factory=dict)
    """By their index in the last step."""
    uncompressed: dict[str, int] = field(default_factory=dict)
    """How many buckets, or gathered parameter groups, went uncompressed, by reason."""
    gather_plain_bytes: int = 0
    """What gathering parameters would have sent, where `gather=` compresses it (FSDP2)."""
    gather_sent_bytes: int = 0
    meetings: int = 0
    """How often ranks met to average their parameters, with `sync_every=`; that time is all among `exposed_seconds`."""
    residual_norm: float = 0.0
    owner_residual_norm: float = 0.0
    residual_bytes: int = 0

    @property
    def saved_bytes(self) -> int:
        return self.plain_bytes - self.sent_bytes

    @property
    def ratio(self) -> float:
        """How many times fewer bytes were sent."""
        return self.plain_bytes / self.sent_bytes if self.sent_bytes else 1.0

    @property
    def hidden_seconds(self) -> float:
        return max(0.0, self.busy_seconds - self.exposed_seconds)

    def __str__(self) -> str:
        """A line of what matters most; `repr` has all of it."""
        words = [f"{self.steps} step{'' if self.steps == 1 else 's'}", self._sent()]
        if self.meetings:
            words.insert(1, f"{self.meetings} meeting{'' if self.meetings == 1 else 's'}")
        if self.gather_plain_bytes:
            words.append(f"parameters {_bytes(self.gather_sent_bytes)} in place of {_bytes(self.gather_plain_bytes)}")
        if self.busy_seconds:
            words.append(f"{self.exposed_seconds:.2f} s not hidden")
        probed = [bucket.sqnr for bucket in self.buckets.values() if math.isfinite(bucket.sqnr)]
        ends = dict.fromkeys(f"{end:.1f}" for end in (min(probed), max(probed))) if probed else {}
        if ends:
            words.append(f"SQNR {' to '.join(ends)} dB")
        reasons = ", ".join(f"{count} ({reason})" for reason, count in self.uncompressed.items())
        return ", ".join(words) + (f"; uncompressed: {reasons}" if reasons else "")

    def _sent(self) -> str:
        if not self.sent_bytes:
            return "nothing sent"
        fewer = f" ({self.ratio:.1f}x fewer)" if self.sent_bytes < self.plain_bytes else ""
        return f"{_bytes(self.sent_bytes)} sent in place of {_bytes(self.plain_bytes)}{fewer}"

    def unprobed(self, bucket: BucketStats) -> bool:
        """Whether nothing is known of such a bucket's quantization."""
        before = self.buckets.get(bucket.index)
        return before is None or before.numel != bucket.numel or math.isnan(before.sqnr)

    def count(self, bucket: BucketStats, probe: Probe | None) -> None:
        """Add a bucket that has been reduced."""
        before = self.buckets.get(bucket.index)
        if probe is not None:
            bucket.sqnr, bucket.owner_sqnr = probe.sqnr("sender"), probe.sqnr("owner")
        elif before is not None and before.numel == bucket.numel:
            bucket.sqnr, bucket.owner_sqnr = before.sqnr, before.owner_sqnr
        self.buckets[bucket.index] = bucket
        self.plain_bytes += bucket.plain_bytes
        self.sent_bytes += bucket.sent_bytes
        if bucket.codec is None:
            self.uncompressed[bucket.reason] = self.uncompressed.get(bucket.reason, 0) + 1

    def count_plain(self, index: int, numel: int, reason: str, nbytes: int) -> None:
        """Add a bucket that torch has reduced."""
        self.count(BucketStats(index, numel, numel, None, reason, nbytes, nbytes), None)

    def end_step(self, last: int) -> None:
        """Drop buckets after the last one: a step may have fewer than the one before, where the first one waits."""
        self.buckets = {index: bucket for index, bucket in self.buckets.items() if index <= last}

    def count_gather(self, plain_bytes: int, sent_bytes: int, reason: str = "") -> None:
        """Add a parameter group that has been gathered; uncompressed, where there is a reason."""
        self.gather_plain_bytes += plain_bytes
        self.gather_sent_bytes += sent_bytes
        if reason:
            self.uncompressed[f"gather: {reason}"] = self.uncompressed.get(f"gather: {reason}", 0) + 1

    def scalars(self) -> dict[str, float]:
        """Everything that a plot over steps can show. Names are such as MLflow takes: letters, digits, spaces, _-.:/"""
        named = ("saved_bytes", "sent_bytes", "ratio", "hidden_seconds", "exposed_seconds")
        scalars = {name: float(getattr(self, name)) for name in (*named, "residual_norm", "owner_residual_norm")}
        if self.meetings:
            scalars["meetings"] = float(self.meetings)
        for reason, count in self.uncompressed.items():
            scalars[f"uncompressed/{re.sub('[^A-Za-z0-9_.:/ -]', ' ', reason)}"] = float(count)
        for index, bucket in self.buckets.items():
            for name in ("sqnr", "owner_sqnr"):
                if math.isfinite(getattr(bucket, name)):
                    scalars[f"{name}/bucket {index}"] = getattr(bucket, name)
        return scalars


def log(stats: GradientStats, writer: Any, step: int, prefix: str) -> None:
    """Write `stats` to a TensorBoard `SummaryWriter`, or anything with its `add_scalar`."""
    for name, value in stats.scalars().items():
        writer.add_scalar(f"{prefix}{name}", value, step)


def _bytes(number: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if number < 999.5:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} TB"


def norm(tensors: Sequence[Tensor]) -> float:
    """Of all elements of all tensors."""
    return float(torch.stack([tensor.norm() for tensor in tensors]).norm()) if tensors else 0.0


class Clock:
    """How much of the lane's time backward hides."""

    def __init__(self) -> None:
        self.busy = self.exposed = 0.0
        self._handed_over: float | None = None

    def handed_over(self) -> None:
        """Backward has no more buckets in this step."""
        self._handed_over = time.perf_counter()

    def worked(self, began: float) -> None:
        """The lane has worked on a bucket until now."""
        now = time.perf_counter()
        self.busy += now - began
        if self._handed_over is not None:
            self.exposed += now - max(began, self._handed_over)

    def next_step(self) -> None:
        self._handed_over = None
