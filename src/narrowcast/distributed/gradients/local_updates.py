"""Ranks that train alone between meetings, under DDP: what its hook does then, and how ranks meet.

After the warm-up a bucket goes back to DDP as it came: the gradients of this rank. A step is counted when DDP hands
over its last bucket, since every rank does that equally often. Optimizers may leave out steps, and a GradScaler does so
on the one rank whose gradients are not finite. So:

- Ranks meet when the optimizer has stepped, after the step that ends an interval (`Meetings`).
- In the backward of that step they tell each other whether all gradients are finite: sixteen bytes. If some are not,
  all put the meeting off by a step. So no rank waits for one that leaves out the step by that rule.
- A rank that leaves it out by a rule of its own meets before its next forward that records gradients.

A meeting is a reduction of buckets like those of gradients, filled with changes of parameters: the same layout, codec,
residuals, hosts and errors. It is awaited. Parameters change when all buckets have arrived, so a meeting that fails
leaves those of this rank as they are; it is tried again before the next forward.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from narrowcast.distributed.gradients.buckets import flat_bucket, layout_of, plain_bytes_of
from narrowcast.distributed.gradients.compression import GradientCompression
from narrowcast.distributed.gradients.error_feedback.outcome import Outcome, exchange_verdicts, raise_at_the_end
from narrowcast.distributed.gradients.error_feedback.redistribution import added_to_average
from narrowcast.distributed.gradients.layout import ChunkLayout
from narrowcast.distributed.gradients.meetings import PUT_OFF, Meetings, change_dtype, real
from narrowcast.distributed.gradients.reduction import Bucket, Reduction
from narrowcast.distributed.meshes import size_of
from narrowcast.distributed.protocols.mesh import Mesh
from narrowcast.distributed.transport.group import Group
from narrowcast.errors import SpecError

BUCKET = 1 << 23
"""Elements of a bucket at a meeting, at most; a larger parameter has one of its own."""


def name_parameters(ddp: DistributedDataParallel, state: GradientCompression) -> None:
    """Say which parameters are averaged: those that DDP has gradients of. Refuse those that no optimizer holds."""
    meetings = state.meetings
    assert meetings is not None
    held = {id(p) for optimizer in meetings.optimizers for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in ddp.module.named_parameters():
        if parameter.requires_grad and name not in ddp.parameters_to_ignore:
            if id(parameter) not in held:
                raise SpecError(
                    f"optimizer: it does not hold {name} of the model. Make it with the parameters of the model that "
                    "DistributedDataParallel wraps, name all of several: optimizer=[one, other], and freeze what is "
                    "not trained, before the model is wrapped: parameter.requires_grad_(False)."
                )
            meetings.parameters[state.parameters.name_of(parameter)] = parameter
    state.parameters.orders.clear()  # changes are put in the order of dimensions (meetings.py)


def attach(ddp: DistributedDataParallel, state: GradientCompression) -> None:
    """Watch the steps of the optimizers, and forwards."""
    meetings = state.meetings
    assert meetings is not None

    def after_step(optimizer: Any, args: Any, options: Any) -> None:
        if meetings.awaited is not None:
            meetings.awaited.discard(id(optimizer))
            if not meetings.awaited:
                meet(state)

    def before_step(optimizer: Any, args: Any, options: Any) -> None:
        if meetings.loaded and is_alone(state):  # and no backward since: a meeting was due when it was saved
            begin(state)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def before_forward(module: Any, args: Any) -> None:
        if meetings.due and torch.is_grad_enabled():
            meet(state)

    meetings.meet = lambda: meet(state)
    for optimizer in meetings.optimizers:
        optimizer.register_step_pre_hook(before_step)
        optimizer.register_step_post_hook(after_step)
    ddp.register_forward_pre_hook(before_forward)


# -- a step alone -----------------------------------------------------------------------------------------------------


def is_alone(state: GradientCompression) -> bool:
    """Whether gradients of the step under way stay on their rank."""
    return state.meetings is not None and state.step >= state.timetable.warmup_steps


def begin(state: GradientCompression) -> None:
    """Before a step: note where ranks start from, if that is not known yet."""
    assert state.meetings is not None
    if not state.meetings.parameters:
        raise SpecError(
            "sync_every: ranks meet after the steps of an optimizer, of which a hook alone knows nothing. Leave "
            "register_comm_hook to compress_gradients(ddp, ..., sync_every=, optimizer=)."
        )
    state.meetings.begin()


def keep(state: GradientCompression, buffer: Tensor, index: int, last: bool) -> torch.futures.Future[Tensor]:
    """What the hook does in such a step: the bucket as it is."""
    meetings = state.meetings
    assert meetings is not None
    group = None
    if size_of(state.process_group, "compress_gradients") > 1:
        group = state.agree(state.process_group, buffer)
        state.counted.plain_bytes += plain_bytes_of([buffer], group)
    if index == 0:
        state.outcome_of(first=True)
    ends = meetings.is_last_step(state.step)
    if ends and group is not None:
        state.outcome_of(first=False).note(buffer)
    if last:
        state.step += 1
        meetings.since += 1
        if ends and _all_are_finite(state, meetings, group):
            meetings.awaited = set(map(id, meetings.optimizers))
    kept: torch.futures.Future[Tensor] = torch.futures.Future()
    kept.set_result(buffer)
    return kept


def _all_are_finite(state: GradientCompression, meetings: Meetings, group: Group | Mesh | None) -> bool:
    """Whether ranks meet after this step, as all of them say alike."""
    if group is None:
        return True
    outcome = state.outcome_of(first=False)
    try:
        with _awaited(state):
            exchange_verdicts(outcome, group.everyone if isinstance(group, Mesh) else group, state.step)
    except Exception as error:  # on every rank: they try again in the next step
        outcome.error = error
        raise_at_the_end(outcome)
        return False
    outcome.complete = True
    if outcome.applies or meetings.put_off >= PUT_OFF:
        return True
    meetings.put_off += 1
    return False


@contextlib.contextmanager
def _awaited(state: GradientCompression, counts_itself: bool = False) -> Iterator[None]:
    """Count what is done in here as time that nothing hides."""
    began = time.perf_counter()
    state.clock.handed_over()
    yield
    if not counts_itself:
        state.clock.worked(began)
    state.clock.next_step()


# -- a meeting --------------------------------------------------------------------------------------------------------


@dataclass
class Changes:
    """How far some parameters have moved since the last meeting, end to end; then the average of all ranks."""

    numels: dict[str, int]
    """The elements of each parameter, by its name."""
    buffer: Tensor

    @property
    def offsets(self) -> list[int]:
        """Where each parameter begins."""
        return [0, *accumulate(self.numels.values())][:-1]

    def by_name(self) -> Iterator[tuple[str, Tensor]]:
        """The part of the buffer that each parameter has."""
        return zip(self.numels, self.buffer.split(list(self.numels.values())), strict=True)


def meet(state: GradientCompression) -> None:
    """Average the changes of parameters over all ranks, and go on from there. Every rank calls it after as many steps.

    Without a step since the last time there is nothing to do.
    """
    meetings = state.meetings
    assert meetings is not None
    if not meetings.since:
        return
    with torch.no_grad():
        meetings.begin()
        changes = list(_changes(meetings))
        if size_of(state.process_group, "compress_gradients") > 1:
            _average(state, meetings, changes)
        else:
            _add_residuals(state, meetings, changes)
        for some in changes:
            for name, average in some.by_name():
                meetings.move(name, average)
    meetings.over()


def _add_residuals(state: GradientCompression, meetings: Meetings, changes: Sequence[Changes]) -> None:
    """On one rank: residuals of several ranks, from before, are added once."""
    states = state.loaded_of_all()
    for some in changes if states else ():
        for name, change in some.by_name():
            residual = added_to_average(states, name)
            if residual is not None:
                change += residual.to(change.device)
    state.forget()


def _changes(meetings: Meetings) -> Iterator[Changes]:
    """In buckets of one dtype on one device."""
    by_kind: dict[tuple[torch.device, torch.dtype], dict[str, int]] = {}
    for name, parameter in meetings.parameters.items():
        kind = parameter.device, change_dtype(parameter)
        by_kind.setdefault(kind, {})[name] = real(parameter).numel()
    for (device, dtype), all_numels in by_kind.items():
        for numels in _in_buckets(all_numels):
            changes = Changes(numels, torch.empty(sum(numels.values()), dtype=dtype, device=device))
            for name, change in changes.by_name():
                meetings.write_change(name, change)
            yield changes


def _in_buckets(all_numels: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """The parameters in order, as many in each bucket as `BUCKET` elements allow."""
    numels, total = dict[str, int](), 0
    for name, numel in all_numels.items():
        if total and total + numel > BUCKET:
            yield numels
            numels, total = {}, 0
        numels[name] = numel
        total += numel
    yield numels


def _average(state: GradientCompression, meetings: Meetings, changes: Sequence[Changes]) -> None:
    """Average all buckets over all ranks, in place. A failure raises on every rank."""
    group = state.agree(state.process_group, changes[0].buffer)
    counted = state.counted.plain_bytes
    with _awaited(state, counts_itself=not state.idle):
        if state.idle:
            for index, some in enumerate(changes):
                state.count_idle(index, some.buffer.numel(), plain_bytes_of([some.buffer], group))
                dist.all_reduce(some.buffer.div_(group.size), group=state.members)
        else:
            with group.refusing("gradients"):
                _reduce(state, meetings, group, changes)
    state.counted.plain_bytes = counted  # steps have counted what gradients would have sent
    if state.residuals is not None:
        state.residuals.settle()


def _reduce(state: GradientCompression, meetings: Meetings, group: Group | Mesh, changes: Sequence[Changes]) -> None:
    started = f" from #{meetings.digest()}" if meetings.unseen else ""
    words = f"meeting {meetings.count} after {meetings.since} steps, step={state.step}{started}"
    outcome = Outcome()
    reductions = [_prepared(state, meetings, group, some, index, outcome) for index, some in enumerate(changes)]

    def job() -> list[Tensor]:
        for index, (reduction, bucket) in enumerate(reductions):
            if outcome.error is None:
                with contextlib.suppress(Exception):  # it is raised when all ranks have made as many calls
                    state.reduce(group, reduction, bucket, f"{words}, bucket {index}")
            else:
                group.give_up("gradients", outcome.error)
        if outcome.error is not None:
            raise outcome.error
        outcome.complete = True
        return [some.buffer for some in changes]

    group.lane.start("gradients", job, [some.buffer for some in changes], async_op=False)


def _prepared(
    state: GradientCompression,
    meetings: Meetings,
    group: Group | Mesh,
    changes: Changes,
    index: int,
    outcome: Outcome,
) -> tuple[Reduction, Bucket]:
    parameters = [meetings.parameters[name] for name in changes.numels]
    buffer = changes.buffer

    def cut(all_exempt: bool) -> list[ChunkLayout]:
        return layout_of(state, parameters, changes.offsets, buffer.numel(), group, all_exempt)

    # The codec is that of the step that the meeting follows.
    reduction = state.prepare([buffer], index, plain_bytes_of([buffer], group), cut, state.step - 1)
    return reduction, flat_bucket(reduction, [buffer], state.residuals, outcome, group)
