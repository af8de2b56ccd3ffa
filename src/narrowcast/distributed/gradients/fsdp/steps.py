"""The steps of an FSDP2 model: which backward a reduction belongs to, and whether all ranks' gradients were finite.

A step is one backward pass that reduces gradients. torch does not say when one begins: it does when a parameter group
is to be reduced that the step before has reduced already, or has left out in a pass that is over: a pass comes to every
group of its root, whether there is a gradient or not (layers that are dropped, experts that no token went to).

A rank sees its own shards only. So at the end of a backward ranks tell each other whether all is finite
(`exchange_verdicts` in error_feedback/outcome.py), on which residuals depend.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from narrowcast.distributed.gradients.compression import GradientCompression
from narrowcast.distributed.gradients.error_feedback.outcome import Outcome, exchange_verdicts
from narrowcast.distributed.gradients.fsdp.groups import ParameterGroup
from narrowcast.distributed.gradients.reduction import Bucket, Reduction
from narrowcast.distributed.protocols.mesh import Mesh
from narrowcast.distributed.transport.group import Group, group_for
from narrowcast.distributed.transport.work import Work


class Steps:
    """The steps of one model."""

    def __init__(self, state: GradientCompression, groups: Sequence[ParameterGroup]) -> None:
        self._state = state
        state.under_way.groups = [group.names for group in groups]
        self._outcome = Outcome()
        self._task, self._waiting = -1, -1
        """The pass in which a group was reduced last, and the one whose end is waited for: numbers of autograd's."""
        self._to_tell: dict[dist.ProcessGroup, torch.device] = {}
        """Who shares parameters that were reduced in this pass."""

    def step_of(self, parameters: ParameterGroup) -> tuple[int, Outcome]:
        """The number of the step in which a parameter group is being reduced, and its outcome."""
        task, under_way = torch._C._current_graph_task_id(), self._state.under_way
        if under_way.is_over(parameters.index, task):
            under_way.begin(task)
            self._state.step += 1
            if self._outcome.complete or task != self._task:  # else one pass reduces it bit by bit
                self._outcome = Outcome()
        under_way.reduced.add(parameters.index)
        self._outcome.complete, self._task = False, task
        return self._state.step - 1, self._outcome

    def leave_out(self, parameters: ParameterGroup) -> None:
        """A pass that reduces gradients came to a parameter group, and it has none."""
        self._state.under_way.left_out.add((parameters.index, torch._C._current_graph_task_id()))

    def reduce(
        self,
        parameters: ParameterGroup,
        group: Group | Mesh,
        reduction: Reduction,
        bucket: Bucket,
        tensors: Sequence[Tensor],
        async_op: bool = False,
    ) -> Work | None:
        """Reduce the gradients of a parameter group in their turn. It touches `tensors`; the first is its result."""

        def job() -> list[Tensor]:
            try:
                self._state.reduce(group, reduction, bucket, f"group {parameters.index}")
            except BaseException as error:
                self._tell_of(error, group.everyone if isinstance(group, Mesh) else group)
                raise
            return [tensors[0]]

        if self._state.residuals is not None:
            self._tell_at_the_end(parameters)
        return group.lane.start("gradients", job, tensors, async_op, at_once=group.nccl)

    def _tell_at_the_end(self, parameters: ParameterGroup) -> None:
        """When this pass is over, tell all ranks that share these parameters whether all is finite here."""
        for members in parameters.process_groups:
            self._to_tell[members] = parameters.device
        if self._task == -1:
            self._tell()
        elif self._task != self._waiting:
            self._waiting = self._task
            torch.autograd.Variable._execution_engine.queue_callback(self._tell)

    def _tell_of(self, error: BaseException, here: Group) -> None:
        """Backward breaks off in a job of `here`: ranks that wait to be told how it went fail, too."""
        for members, device in self._take().items():
            group = group_for(members, device, "gradients")
            if group is here:
                group.give_up("gradients", error)
            else:
                group.refuse("gradients", error)

    def _tell(self) -> None:
        """A verdict reaches all ranks of a mesh when it goes through each of its dimensions, and all others by way of
        the larger group."""
        for members, device in sorted(self._take().items(), key=lambda item: item[0].size()):
            exchange_verdicts(self._outcome, group_for(members, device, "gradients"), self._state.step - 1)
        self._outcome.complete = True

    def _take(self) -> dict[dist.ProcessGroup, torch.device]:
        to_tell, self._to_tell, self._waiting = self._to_tell, {}, -1
        return to_tell
