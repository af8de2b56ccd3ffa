"""How long a step's reductions take, one after the other: from its buckets, the link and the codec's speed.

Nothing else enters: not what the backward pass hides, nor what the reduction takes from the processor.

- Uncompressed ("none"), the ring: each rank sends 2(N-1)/N of the bytes in 2(N-1) steps.
- In a codec, the two-stage reduction: on the wire, the bytes of its rows and headers, and two trips where rows travel
  with the header, else three; at work, coding, and what every message takes the processor. A bucket in P chunks hides
  work behind the wire, or the wire behind work, except for the first and the last chunk: the longer of the two counts
  whole, and 1/P of the shorter. Where the link's `overlap` is less than 1 (ranks that share cores with the wire), more
  of the shorter counts. That messages hide behind the wire is measured: bench/results/messages.md.
- Where ranks share hosts, the same between hosts, of what each place on a host has; and the bytes within hosts, there
  and back. They are added up, as one after the other: over gloo large buckets take less (protocols/phases.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from narrowcast.codecs import Codec
from narrowcast.distributed.gradients import layout
from narrowcast.distributed.gradients.options import Mode, mode_of
from narrowcast.distributed.planning.codec_speed import CodecSpeed
from narrowcast.distributed.planning.link import Link
from narrowcast.distributed.protocols import two_stage
from narrowcast.distributed.transport.agreement import HEADER_BYTES
from narrowcast.distributed.transport.gloo import EAGER

NONE = "none"


@dataclass(frozen=True)
class Prediction:
    """What one codec would take of each rank, a step."""

    codec: str
    """Its spec, or "none"."""
    seconds: float
    wire_seconds: float
    coding_seconds: float
    bytes: int
    """Sent by a rank, headers included; where several ranks share a host, by a host to others."""
    noise: float = 0.0
    message_seconds: float = 0.0
    """Of the processor, for messages, on paper; a ring's are part of its wire's. Trips are not in it."""


def predict_plain(buckets: Sequence[int], ranks: int, link: Link, dtype: torch.dtype = torch.float32) -> Prediction:
    """What torch's own all_reduce of `buckets` (numbers of elements) would take."""
    seconds, sent = 0.0, 0
    for numel, count in Counter(buckets).items():
        size = numel * dtype.itemsize
        seconds += count * link.ring_s(size, ranks)
        sent += count * (2 * (ranks - 1) * size // ranks)
    messages = len(buckets) * 2 * (ranks - 1) * (link.message_s if link.step_s is None else 0.0)
    return Prediction(NONE, seconds, seconds, 0.0, sent, message_seconds=messages)


def predict(
    buckets: Sequence[int],
    ranks: int,
    link: Link,
    codec: Codec,
    speed: CodecSpeed,
    *,
    gradients: bool = False,
    error_feedback: Mode | None = None,
    eager: int = EAGER,
) -> Prediction:
    """What the two-stage reduction of `buckets` (numbers of elements) in `codec` would take.

    By default that is `all_reduce`. With `gradients` it is what `compress_gradients` does, with `error_feedback` as
    given there. `eager` is what rides along with a header, 0 on NCCL, where there is no header and a tensor is one
    chunk.
    """
    coding_each = _coding_s(ranks, speed)
    if gradients:
        coding_each += _gradients_s(ranks, speed, mode_of(error_feedback, codec, None))
    total = wire = coding = messages = 0.0
    sent = 0
    for numel, count in Counter(buckets).items():
        nbytes, chunks, trips = _traffic(numel, ranks, codec, eager, gradients)
        on_wire = trips * link.latency_s + nbytes / link.bandwidth_bytes_per_s
        on_rows = (trips - 2 + 2 * chunks) * (ranks - 1) * link.message_s
        at_work = numel * coding_each + on_rows
        hidden = link.overlap * (1 - 1 / chunks)
        total += count * link.drag * (max(on_wire, at_work) + min(on_wire, at_work) * (1 - hidden))
        wire, messages, sent = wire + count * on_wire, messages + count * on_rows, sent + count * nbytes
        coding += count * numel * coding_each
    return Prediction(codec.spec, total, wire, coding, sent, speed.noise, messages)


def predict_by_hosts(
    buckets: Sequence[int], ranks: int, hosts: int, link: Link, codec: Codec, speed: CodecSpeed, **options: Any
) -> Prediction:
    """`predict` where `ranks` share `hosts` evenly: `link` is a rank's, while all of its host use it."""
    places = ranks // hosts
    between = predict([-(-numel // places) for numel in buckets], hosts, link, codec, speed, **options)
    inside = 4 * sum(buckets) * 2 * (places - 1) / places / (link.local_bytes_per_s or link.bandwidth_bytes_per_s)
    return replace(
        between,
        seconds=between.seconds + inside,
        wire_seconds=between.wire_seconds + inside,
        bytes=places * between.bytes,
    )


def _traffic(numel: int, ranks: int, codec: Codec, eager: int, gradients: bool) -> tuple[int, int, int]:
    """Bytes that a rank sends, chunks, and trips that nothing hides."""
    if gradients:
        chunks = layout.lay_out([layout.Gradient("", 0, numel, False)], ranks, at_once=not eager)
        parts = [chunk.columns for chunk in chunks]
    else:
        parts = [two_stage.split(size, ranks)[0] for size in two_stage.cut(numel, ranks, codec, eager)]
    rows = [codec.row_bytes(part) for part in parts]
    header = HEADER_BYTES if eager else 0
    along = not eager or (not gradients and len(rows) == 1 and rows[0] <= eager)
    return (ranks - 1) * (2 * sum(rows) + header), len(rows), 2 if along else 3


def _coding_s(ranks: int, speed: CodecSpeed) -> float:
    """Seconds of coding for each element of a bucket.

    Parts of the others are encoded, rows of this rank's part added up (as many elements in all as the bucket has), and
    every part's sum decoded.
    """
    return (1 - 1 / ranks) * speed.encode_s + speed.sum_s + speed.decode_s


def _gradients_s(ranks: int, speed: CodecSpeed, feedback: Mode) -> float:
    """Seconds more for each gradient: put side by side and back, and what feedback does at either quantization."""
    own = 1 / ranks
    seconds = 2 * speed.add_s
    if feedback is not False:
        seconds += own * 4 * speed.add_s
    if feedback is True:
        seconds += (1 - own) * (speed.decode_s + 2 * speed.add_s)
    return seconds
