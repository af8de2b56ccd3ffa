"""Which codec gradients should travel in.

`choose` takes the most precise codec that is within a margin of the fastest. No compression wins ties: it is chosen
wherever it is within the margin, so what is chosen is never predicted to be slower. Precise means little noise on
normal numbers (`CodecSpeed.noise`).

Candidates by default are those that should leave a model as good as it would be without: bf16 and int8; with error
feedback int6 and int4, too (bench/training.py shows that). int2 and sign are faster on a slow link, and cost accuracy
or a warm-up, which no stopwatch can weigh: name them in `candidates` to have them considered. A cast that takes as many
bits as the gradients do is left out.

A plan that is made in a group is a collective. It is the same on every rank, since its numbers are.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from narrowcast.codecs import Codec, checks
from narrowcast.codecs import codec as as_codec
from narrowcast.distributed.gradients.options import Mode
from narrowcast.distributed.meshes import Given, meet_hosts, ranks_in, size_of
from narrowcast.distributed.planning.advice import Advice, advise
from narrowcast.distributed.planning.codec_speed import CodecSpeed, measure_codecs
from narrowcast.distributed.planning.link import STREAM_S, Link, average, measure_link, members_of, slowest, timed
from narrowcast.distributed.planning.prediction import NONE, Prediction, predict, predict_by_hosts, predict_plain
from narrowcast.distributed.protocols.mesh import Mesh
from narrowcast.distributed.transport.gloo import EAGER
from narrowcast.distributed.transport.group import Group, group_for
from narrowcast.errors import SpecError

MARGIN = 0.1
BUCKET = 25 * (1 << 20) // 4
"""Elements of a bucket, about, as DDP cuts them by default: what "auto" plans with."""
LOSSLESS_ENOUGH = ("bf16", "int8")
WITH_FEEDBACK = ("int6", "int4")


@dataclass(frozen=True)
class Plan:
    """The choice, and what it was made from. `str()` gives the table."""

    chosen: str
    reason: str
    predictions: tuple[Prediction, ...]
    link: Link
    ranks: int
    buckets: tuple[int, ...]
    dtype: torch.dtype
    margin: float
    hosts: int = 1
    """Hosts that share the ranks evenly, where several do."""
    advice: Advice | None = None
    """What else would make it shorter, where messages and trips take a tenth of the time or more."""

    @property
    def codec(self) -> Codec | None:
        return None if self.chosen == NONE else as_codec(self.chosen)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; buckets as pairs of a size and how many have it."""
        values = dataclasses.asdict(self)
        buckets = [list(pair) for pair in Counter(self.buckets).items()]
        return {**values, "buckets": buckets, "dtype": checks.dtype_name(self.dtype)}

    def __str__(self) -> str:
        head = f"{'codec':<12}{'MB sent':>12}{'wire s':>10}{'coding s':>10}{'total s':>10}{'x none':>8}"
        plain = next(p.seconds for p in self.predictions if p.codec == NONE)
        lines = [
            f"{p.codec:<12}{p.bytes / 1e6:>12.4g}{p.wire_seconds:>10.3g}{p.coding_seconds:>10.3g}{p.seconds:>10.3g}"
            f"{plain / p.seconds:>8.2f}{'  <' if p.codec == self.chosen else ''}"
            for p in self.predictions
        ]
        return "\n".join([head, *lines, self.reason])


# -- predicting -------------------------------------------------------------------------------------------------------


def choose(predictions: Sequence[Prediction], margin: float = MARGIN) -> tuple[Prediction, str]:
    """The most precise of those that take at most 1 + `margin` times as long as the fastest; and why, in a sentence."""
    if not predictions:
        raise SpecError("predictions: there is none to choose from. Predict at least one codec, or none's own.")
    if not 0 <= margin < 10:
        raise SpecError(f"margin={margin}: a share of the fastest time, zero or more. Write 0.1 for 10%.")
    fastest = min(predictions, key=lambda p: p.seconds)
    close = [p for p in predictions if p.seconds <= (1 + margin) * fastest.seconds]
    best = min(close, key=lambda p: (p.noise, p.codec != NONE, p.seconds))
    if best.codec == NONE and best.seconds <= fastest.seconds:
        return best, "none: no codec is faster."
    if best is fastest:
        return best, f"{best.codec}: the fastest, and nothing more precise is within {margin:.0%} of it."
    slower = best.seconds / fastest.seconds - 1
    return best, (
        f"{best.codec}: {slower:.1%} slower than the fastest ({fastest.codec}), which is within {margin:.0%}, "
        f"and {'without loss' if best.codec == NONE else 'the most precise that is'}."
    )


def candidates_for(dtype: torch.dtype, error_feedback: Mode | None = None) -> tuple[str, ...]:
    """The codecs that are considered for gradients of a dtype, besides none."""
    casts = tuple(name for name in LOSSLESS_ENOUGH if as_codec(name).bits < 8 * dtype.itemsize)
    return casts if error_feedback is False else casts + WITH_FEEDBACK


def decide(
    buckets: Sequence[int],
    ranks: int,
    link: Link,
    speeds: dict[str, CodecSpeed],
    *,
    dtype: torch.dtype = torch.float32,
    gradients: bool = True,
    error_feedback: Mode | None = None,
    margin: float = MARGIN,
    eager: int = EAGER,
    hosts: int = 1,
) -> Plan:
    """The plan for `buckets` (numbers of elements) on a link, with codecs of these speeds. Nothing is measured."""
    if not buckets or min(buckets) < 1:
        raise SpecError(
            f"buckets={list(buckets)[:8]}: numbers of elements, at least one. buckets_of(params) gives some."
        )
    if ranks < 2:
        raise SpecError(f"ranks={ranks}: gradients travel between two ranks or more.")
    if hosts < 1 or ranks % hosts:
        raise SpecError(f"hosts={hosts}: {ranks} ranks cannot share them evenly. Hosts have as many ranks each.")
    options: dict[str, Any] = {"gradients": gradients, "error_feedback": error_feedback, "eager": eager}

    def predicted(spec: str, buckets: Sequence[int], link: Link) -> Prediction:
        if spec == NONE:
            return predict_plain(buckets, ranks, link, dtype)
        if 1 < hosts < ranks:
            return predict_by_hosts(buckets, ranks, hosts, link, as_codec(spec), speeds[spec], **options)
        return predict(buckets, ranks, link, as_codec(spec), speeds[spec], **options)

    predictions = tuple(predicted(spec, buckets, link) for spec in (NONE, *speeds))
    best, reason = choose(predictions, margin)

    def again(megabytes: float, link: Link) -> Prediction:
        return predicted(best.codec, buckets_of(sum(buckets), dtype, megabytes), link)

    advice = advise(best, link, max(buckets) * dtype.itemsize / 2**20, again) if gradients else None
    return Plan(best.codec, reason, predictions, link, ranks, tuple(buckets), dtype, margin, hosts, advice)


def buckets_of(params: int, dtype: torch.dtype = torch.float32, megabytes: float = 25.0) -> list[int]:
    """The numbers of elements of the buckets that DDP makes of so many parameters, its small first one aside."""
    each = max(1, int(megabytes * 2**20) // dtype.itemsize)
    return [each] * (params // each) + ([params % each] if params % each else [])


# -- measuring --------------------------------------------------------------------------------------------------------


def plan(
    buckets: Sequence[int],
    group: Given = None,
    device: torch.device | str = "cpu",
    *,
    dtype: torch.dtype = torch.float32,
    gradients: bool = True,
    error_feedback: Mode | None = None,
    candidates: Sequence[str | Codec] | None = None,
    margin: float = MARGIN,
) -> Plan:
    """Measure the group's link and the candidates' speed, and choose. A collective, of two or three seconds."""
    where = torch.device(device)
    if isinstance(group, DeviceMesh):  # of all ranks; among fewer it is the link between hosts that counts
        group = None if group.size() == dist.get_world_size() else group.get_group(0)
    members = members_of(group, "plan")
    purpose = "gradients" if gradients else "collectives"
    everyone = group_for(members, where, purpose)
    considered = candidates_for(dtype, error_feedback) if candidates is None else candidates
    codecs = [as_codec(each) for each in considered if each != NONE]
    specs = ",".join(codec.spec for codec in codecs)
    about = f", codecs={specs}, margin={margin}, error_feedback={error_feedback}, dtype={dtype}, buckets={[*buckets]}"
    slowest(everyone, [0.0], about)  # all ranks ask for the same plan
    meet_hosts(group, everyone)
    ranks = ranks_in(group, where, purpose)
    mesh = ranks if isinstance(ranks, Mesh) else None
    between, places = (everyone, 1) if mesh is None else (mesh.between, mesh.within.size)
    link = measure_link(members, where, dtype=dtype, purpose=purpose, mesh=mesh)
    probe = codecs[-1] if codecs else as_codec("int8")
    speeds = measure_codecs(dict.fromkeys([*codecs, probe]), where, ranks=between.size, group=everyone)
    eager = 0 if everyone.nccl else EAGER
    largest = -(-max(buckets, default=1) // places)
    link = _calibrated(link, everyone, between, probe, speeds[probe.spec], largest, eager)
    hosts = 1 if mesh is None else between.size
    speeds = {codec.spec: speeds[codec.spec] for codec in codecs}
    options: dict[str, Any] = {"dtype": dtype, "gradients": gradients, "error_feedback": error_feedback}
    return decide(buckets, everyone.size, link, speeds, margin=margin, eager=eager, hosts=hosts, **options)


def choose_codec(
    total: int,
    dtype: torch.dtype,
    group: Given,
    device: torch.device | str,
    error_feedback: Mode | None,
) -> tuple[Codec | None, Plan | None]:
    """What `codec="auto"` means for a model with so many elements: the codec, or None for none.

    Without other ranks nothing travels, and there is no plan.
    """
    if size_of(group, "compress_gradients") < 2:
        return None, None
    buckets = [min(BUCKET, total - start) for start in range(0, total, BUCKET)]
    chosen = plan(buckets, group, device, dtype=dtype, error_feedback=error_feedback)
    return chosen.codec, chosen


def _calibrated(
    link: Link, everyone: Group, group: Group, codec: Codec, speed: CodecSpeed, largest: int, eager: int
) -> Link:
    """The link, with its overlap and drag: found by a real reduction, where its time would tell."""

    def predicted(numel: int, overlap: float) -> float:
        there = dataclasses.replace(link, overlap=overlap)
        return predict([numel], group.size, there, codec, speed, eager=eager).seconds

    numel = largest
    while numel > 1 and predicted(numel, 0.0) > STREAM_S:
        numel //= 2
    most, least = predicted(numel, 0.0), predicted(numel, 1.0)
    if most <= 1.02 * least:  # one chunk, or a wire that is far slower than coding: it makes no difference
        return link
    x = torch.randn(numel, dtype=torch.float32, device="cpu", generator=torch.Generator().manual_seed(0)).to(
        group.device
    )
    took = timed(everyone, lambda: average(group, x, codec), rounds=5, warm_up=True)
    overlap = min(max((most - took) / (most - least), 0.0), 1.0)
    return dataclasses.replace(link, overlap=overlap, drag=max(took / most, 1.0))
