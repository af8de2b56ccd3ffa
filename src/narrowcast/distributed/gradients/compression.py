"""Compressed gradients: which codec they travel in, what that costs, and what is kept from step to step.

`GradientCompression` belongs to one model on one rank. A step is one synchronization of gradients: with gradient
accumulation, the one backward that is not under `no_sync`. ddp.py and fsdp/ hand over buckets and count the steps.

What must hold: every rank ends with the same bits; the same model, codec and world size give the same numbers however
gradients are spread over buckets; `state_dict` holds all that the next step depends on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from narrowcast.codecs import Codec, checks
from narrowcast.distributed.collective import Collective
from narrowcast.distributed.collectives import AnyCodec
from narrowcast.distributed.encoder import derive_seed, lossless
from narrowcast.distributed.gradients import options
from narrowcast.distributed.gradients import state as saved
from narrowcast.distributed.gradients.ddp_buckets import Order
from narrowcast.distributed.gradients.error_feedback import redistribution
from narrowcast.distributed.gradients.error_feedback.outcome import Outcome
from narrowcast.distributed.gradients.error_feedback.residuals import Holder, Residuals, holder_among
from narrowcast.distributed.gradients.layout import ChunkLayout, Cut
from narrowcast.distributed.gradients.meetings import Meetings
from narrowcast.distributed.gradients.momentum import EXEMPT_IN, MomentumOptimizer, momentum_of
from narrowcast.distributed.gradients.options import Exempt, Mode, one_dimensional
from narrowcast.distributed.gradients.parameters import Parameters
from narrowcast.distributed.gradients.reduction import Bucket, Reduction
from narrowcast.distributed.gradients.stats import PROBE_EVERY, BucketStats, Clock, GradientStats, Probe, log
from narrowcast.distributed.gradients.timetable import Refresh, Schedule, Timetable, Travel
from narrowcast.distributed.gradients.under_way import UnderWay
from narrowcast.distributed.meshes import Given, everyone_in, meet_hosts, ranks_in, size_of
from narrowcast.distributed.planning.planner import Plan, choose_codec
from narrowcast.distributed.protocols import phases
from narrowcast.distributed.protocols.mesh import Mesh
from narrowcast.distributed.stats import span
from narrowcast.distributed.transport.agreement import Call
from narrowcast.distributed.transport.group import Group


class GradientCompression:
    """Compresses the gradients of a model on their way to the other ranks.

    - `codec`: what they travel in. "auto" measures the link and the codecs when ranks first meet, and takes the most
      precise one that is about as fast as any, or none where the network is fast enough (`plan` says why). None: none.
    - `error_feedback`: keep what quantization loses, and send it along in the next step. True: at the sender and at
      the owner of a sum; "owner": there only, in 1/ranks of the memory; False. By default, what trains best: on from
      4 to below 8 bits, from 2 with an `optimizer` like SGD, from 1 with `momentum` or `meetings`; off with Adam.
      `residual_codec`: what it is kept in: "int8" takes a quarter of fp32's memory, "bf16" half.
    - `warmup_steps`: so many first steps travel in `warmup_codec`: uncompressed by default, with `momentum` in int2.
    - `schedule(step)`: the codec of a step after those, in place of `codec`; None for no compression.
    - `exempt`: which parameters travel without loss (beside a momentum, in bf16): `(name, parameter) -> bool`, regexes
      (searched in the name), or None. By default those of one dimension. So do those of less than 128 elements a rank.
    - `model`: whose parameters they are; it gives residuals their names. Without it they are numbered as they come.
    - `seed`: of stochastic rounding; drawn from torch's generator by default.
    - `momentum`: a `narrowcast.optim.AdamW`, whose momentum travels after the warm-up in place of gradients; its second
      moment is then updated in the steps that `refresh` names alone: every so many, "growing", or None (timetable.py).
      `scaler` is the GradScaler of the loss, if there is one.
    - `meetings`: what `compress_gradients(..., sync_every=)` makes of its arguments: parameters are averaged, seldom.
    """

    def __init__(
        self,
        codec: AnyCodec | None = "int8",
        *,
        error_feedback: Mode | None = None,
        warmup_steps: int = 0,
        schedule: Schedule | None = None,
        exempt: Exempt = one_dimensional,
        process_group: Given = None,
        model: nn.Module | None = None,
        seed: int | None = None,
        momentum: MomentumOptimizer | None = None,
        warmup_codec: AnyCodec | Literal["default"] | None = "default",
        refresh: Refresh = None,
        scaler: torch.amp.GradScaler | None = None,
        optimizer: object = None,
        residual_codec: AnyCodec | None = None,
        meetings: Meetings | None = None,
    ) -> None:
        self._auto, self._chosen = codec == "auto", False
        self.codec = None if codec is None or self._auto else options.codec_of(codec)
        self.plan: Plan | None = None
        """Why "auto" chose what it did."""
        self._feedback = error_feedback
        self.meetings = meetings
        self._kind = "changes" if meetings else options.kind_of(optimizer, momentum)
        self.error_feedback = options.mode_of(error_feedback, self.codec, schedule, self._kind)
        self._residual_codec = options.residual_codec_of(residual_codec, self.error_feedback, self._auto)
        self.momentum = momentum_of(momentum, codec, schedule, scaler)
        self.timetable = Timetable(warmup_steps, warmup_codec, schedule, refresh, self.momentum is not None)
        self.step = 0
        """The steps that are over."""
        self.process_group = process_group
        self.trainer: Callable[[], nn.Module | None] = lambda: None
        """The DistributedDataParallel that hands over the gradients, where it is known and alive."""
        self.travel_at(warmup_steps)  # so that a wrong schedule raises now, not in backward, when DDP has its only hook
        self.parameters = Parameters(model, exempt)
        self._seed = checks.seed(seed)
        self.layouts: dict[object, list[ChunkLayout]] = {}  # how buckets are cut, by what ddp.py or fsdp/ knows them by
        self.order = Order()
        self.residuals: Residuals | None = None
        self.make_residuals: Callable[[Mode, Holder], Residuals] = Residuals
        self._outcome, self._agreed, self.under_way = Outcome(), False, UnderWay()
        self.counted, self.clock, self._resumed_at = GradientStats(), Clock(), 0
        self._loaded: Mapping[str, Any] | None = None

    # -- all ranks alike ----------------------------------------------------------------------------------------------

    def agree(self, given: Given, like: Tensor) -> Group | Mesh:
        """Those who reduce together, once all are known to be configured alike. `like` is a parameter, or a bucket."""
        if not self._agreed:
            group = everyone_in(given, like.device, "gradients")
            self.meet(group, like.dtype)
            meet_hosts(given, group)
            if self._auto and not self._chosen:
                total = sum(self.parameters.numels.values()) or like.numel()
                self._use(*choose_codec(total, like.dtype, given, like.device, self._feedback))
        ranks = ranks_in(given, like.device, "gradients")
        if not self._agreed:
            if self.error_feedback and self.residuals is None:
                self.residuals = self.make_residuals(self.error_feedback, holder_among(ranks))
                self.residuals.codec = self._residual_codec
            if self._loaded is not None:
                self._take_residuals(self._loaded)
            self._agreed = True
        return ranks

    @property
    def members(self) -> dist.ProcessGroup | None:
        """All ranks in one group of torch's; None for the default one."""
        mesh_given = isinstance(self.process_group, DeviceMesh)
        return getattr(self.trainer(), "process_group", None) if mesh_given else self.process_group  # type: ignore[return-value]

    def refuse(self, error: BaseException, device: torch.device) -> None:
        """Take part in the reduction of a bucket by failing it: the others are told why."""
        if size_of(self.process_group, "compress_gradients"):
            among = ranks_in if self._agreed else everyone_in  # else the others are about to meet
            among(self.process_group, device, "gradients").refuse("gradients", error)

    def meet(self, group: Group, dtype: torch.dtype, also: str = "") -> None:
        """Raise on every rank unless all are configured alike; `also` is what else they must have in common."""
        call = Call("compress_gradients", self.codec or lossless(dtype), self._words() + also, sizes=None)
        Collective(group, call, lambda collective: collective.agree(), name="gradients").run_in_lane()

    def loaded_of_all(self) -> Sequence[Mapping[str, Any]]:
        """The loaded states of all ranks that saved, where there is one rank now."""
        return saved.of_all(self._loaded or {})

    def _mode_of(self, codec: Codec | None) -> Mode:
        return options.mode_of(self._feedback, codec, self.timetable.schedule, self._kind)

    def _use(self, codec: Codec | None, plan: Plan | None) -> None:
        self.codec, self.plan, self._chosen = codec, plan, True
        self.error_feedback = self._mode_of(codec)
        if self.residuals is not None and self.residuals.mode != self.error_feedback:
            self.residuals = None

    def _words(self) -> str:
        """What every rank must have in common."""
        auto = "auto, " if self._auto else "" if self.codec else "none, "
        feedback = f"{self.error_feedback}" + (f" in {self._residual_codec.spec}" if self._residual_codec else "")
        meetings = f"{self.meetings}, " if self.meetings else ""
        return f"{auto}error_feedback={feedback}, {self.timetable}, {meetings}step={self.step}, {self.parameters}"

    # -- one step -----------------------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Whether torch's own collectives do all the work."""
        return self.codec is None and self.timetable.schedule is None

    def travel_at(self, step: int) -> Travel:
        """What travels in a step, and in which codec."""
        return self.timetable.at(step, self.codec)

    def outcome_of(self, first: bool) -> Outcome:
        """The outcome of the step under way, to which a bucket belongs; that of a new one with its `first`."""
        if first:
            self._outcome = Outcome() if self.momentum is None else self.momentum.next_outcome(self._outcome)
        return self._outcome

    def prepare(self, bucket: Sequence[Tensor], index: int, plain_bytes: int, cut: Cut, step: int) -> Reduction:
        """How a bucket travels in this step; without a codec it would send `plain_bytes`."""
        codec, reason, momentum = self.travel_at(step)
        layout, numel, dtype = cut(codec is None), sum(each.numel() for each in bucket), bucket[0].dtype
        ranks = len(bucket[0]) if bucket[0].dim() == 2 else 1  # exempt elements of a matrix are counted in columns
        exempt = ranks * sum(chunk.exempt_numel for chunk in layout)
        if exempt == numel and codec is not None:
            codec, reason = None, "nothing to compress"
        stats = BucketStats(index, numel, exempt, None if codec is None else codec.spec, reason, plain_bytes)
        probed = codec is not None and (step % PROBE_EVERY == 0 or self.counted.unprobed(stats))
        probe, exempt_in = Probe() if probed else None, EXEMPT_IN.get(dtype) if momentum else None
        sends_momentum = momentum and codec is not None
        return Reduction(codec or lossless(dtype), layout, stats, probe, step, sends_momentum, exempt_in)

    def residuals_of(self, reduction: Reduction) -> Residuals | None:
        """Those that a bucket adds. What the momentum, or a meeting, has left is no part of a gradient: it waits."""
        return self.residuals if self.meetings is None and (self.momentum is None or reduction.momentum) else None

    def reduce(self, group: Group | Mesh, reduction: Reduction, bucket: Bucket, words: str) -> None:
        """Reduce a bucket here and now, in a job of the lane, and count what it costs."""
        stats = reduction.stats
        words = f"{words}, dtype={bucket.gradients.dtype}, numel={stats.numel}, exempt={stats.exempt}{bucket.words}"
        call, seed = Call("gradients", reduction.codec, words), derive_seed(self._seed, reduction.step)
        began = time.perf_counter()
        with span("narrowcast::gradients"):
            try:
                each = bucket.phases(group, call, stats.plain_bytes, seed)
                phases.run(each, "gradients", bucket.progress)
            except BaseException as error:
                bucket.outcome.error = error
                raise
        stats.sent_bytes = each[len(each) // 2].sent_bytes  # of three, the one between hosts
        self.clock.worked(began)
        self.counted.count(stats, reduction.probe)

    def count_idle(self, index: int, numel: int, plain_bytes: int) -> None:
        """Count a bucket that torch reduces."""
        self.counted.count_plain(index, numel, "auto: none" if self._auto else "codec=None", plain_bytes)

    @property
    def error(self) -> BaseException | None:
        """Why the last step failed, if it did: what backward() raised."""
        return self._outcome.error

    def stats(self) -> GradientStats:
        """What this rank's steps have cost and lost, since the start or the last `load_state_dict`."""
        stats = self.counted
        stats.steps = self.step - self._resumed_at
        stats.busy_seconds, stats.exposed_seconds = self.clock.busy, self.clock.exposed
        stats.meetings = 0 if self.meetings is None else self.meetings.count - self.meetings.resumed_at
        if self.residuals is not None:
            self.residuals.measure(stats)
        return stats

    def sync(self) -> None:
        """With `sync_every`: average parameters over all ranks now, if there was a step since. Every rank calls it."""
        if self.meetings is not None:
            self.meetings.meet()

    def __str__(self) -> str:
        how = "schedule" if self.timetable.schedule else "auto" if self._auto else ""
        return f"{options.spoken(self.codec, how, self._chosen, self.error_feedback)}: {self.stats()}"

    def log(self, writer: Any, step: int | None = None, prefix: str = "gradients/") -> None:
        """Write `stats()` to a TensorBoard SummaryWriter."""
        log(self.stats(), writer, self.step if step is None else step, prefix)

    # -- state --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All that the next step of this rank depends on: numbers, strings and tensors. Every rank has its own."""
        meetings = {} if self.meetings is None else {"meetings": self.meetings.state()}
        settings = self.step, self._seed, self.codec, self.error_feedback, self.residuals, self.momentum is not None
        state = self._loaded or saved.taken(*settings, self.parameters.orders)  # one loaded, where no bucket came since
        return {**state, "step": self.step, **self.under_way.state(), **meetings}

    def load_state_dict(
        self,
        state: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        residuals: redistribution.Redistribution | None = None,
    ) -> None:
        """Go on where `state_dict` was taken: by the same rank of as many, with the same parameters. On other ranks
        `residuals` are "redistribute"d, from the states of all ranks that saved, or "drop"ped, from one."""
        state = redistribution.for_other_ranks(state, residuals, dealable=self.make_residuals is Residuals)
        saved.check(state)
        saved.check_kind(state, self.momentum is not None, self.meetings is not None, residuals is not None)
        codec = saved.codec_of(state) if self._auto else self.codec  # what was chosen then
        saved.check_fits(state, self._mode_of(codec), self.residuals, self.parameters)
        if self.meetings is not None:
            self.meetings.load(state.get("meetings"))
        if self._auto:
            self._use(codec, self.plan)
        self.step, self._seed = int(state["step"]), int(state["seed"])
        self.counted, self.clock, self._resumed_at = GradientStats(), Clock(), self.step
        self._loaded, self._agreed = dict(state), False  # on the step, for one
        self.under_way.load(state)
        if self.residuals is not None:
            self._take_residuals(state)

    def forget(self) -> None:
        """Drop all residuals: for a step that every rank skips, by a rule of yours, though its gradients are finite."""
        if self.residuals is not None:
            self.residuals.load({})
        if self._loaded is not None:
            self._loaded = redistribution.without_residuals(self._loaded)

    def _take_residuals(self, state: Mapping[str, Any]) -> None:
        saved.load_residuals(self.residuals, state)
        self._loaded = None
