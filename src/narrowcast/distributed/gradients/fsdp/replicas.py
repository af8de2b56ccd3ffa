"""The all-reduce between the replicas of HSDP: shards within a host, replicas on other hosts, the codec between them.

torch reduce-scatters within a replica, without loss and by its own collective. Then it calls the hook that stands here
with this rank's shard of the sums. Ranks that have the same shard in every replica average it, as DDP's ranks average a
bucket. So residuals are those of a shard.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from narrowcast.distributed import arguments
from narrowcast.distributed.gradients.compression import GradientCompression
from narrowcast.distributed.gradients.error_feedback.residuals import Holder, Residuals
from narrowcast.distributed.gradients.fsdp.groups import ParameterGroup
from narrowcast.distributed.gradients.fsdp.steps import Steps
from narrowcast.distributed.gradients.layout import ChunkLayout, Gradient, check_cover, lay_out
from narrowcast.distributed.gradients.options import Mode
from narrowcast.distributed.gradients.reduction import FlatBucket
from narrowcast.distributed.transport.group import Group


class ReplicaReduce:
    """The all-reduce of a parameter group's gradients between replicas."""

    def __init__(self, state: GradientCompression, parameters: ParameterGroup, steps: Steps) -> None:
        self._state = state
        self._parameters = parameters
        self._steps = steps

    def __call__(self, shard: Tensor) -> None:
        """Sum or average `shard` over all replicas, in place."""
        state, parameters, members = self._state, self._parameters, self._parameters.replicas
        assert members is not None
        step, outcome = self._steps.step_of(parameters)
        ranks = members.size()
        divisor = ranks if parameters.averages else 1
        plain_bytes = 2 * arguments.nbytes(shard) * (ranks - 1) // ranks
        if state.idle:
            state.count_idle(parameters.index, shard.numel(), plain_bytes)
            dist.all_reduce(shard, group=members)
            shard.div_(divisor)
            return
        group = state.agree(members, shard)
        assert isinstance(group, Group)
        with group.refusing("gradients"):
            which = tuple(parameters.with_gradients(shard.numel()))

            def cut(all_exempt: bool) -> list[ChunkLayout]:
                return self._layout(which, shard.numel(), group, all_exempt)

            reduction = state.prepare([shard], parameters.index, plain_bytes, cut, step)
            bucket = FlatBucket(shard, reduction.layout, state.residuals, outcome, reduction.probe, divisor)
            self._steps.reduce(parameters, group, reduction, bucket, [shard])

    def _layout(self, which: tuple[int, ...], total: int, group: Group, all_exempt: bool) -> list[ChunkLayout]:
        """How a shard is cut that holds these parameters of a group."""
        layouts, parameters = self._state.layouts, self._parameters
        key = ("replicas", parameters.index, *which, all_exempt)
        if key not in layouts:
            offset, gradients = 0, []
            for i in which:
                name, part = parameters.names[i], parameters.parts[i]
                exempt = all_exempt or self._state.parameters.is_exempt(name, part, group.size)
                gradients.append(Gradient(name, offset, part, exempt))
                offset += part
            check_cover(gradients, total)
            layouts[key] = lay_out(gradients, group.size, at_once=group.nccl)
        return layouts[key]


def residuals_of_shards(mode: Mode, holder: Holder, place: int) -> Residuals:
    """Of rank `holder` among the replicas, which has the shard of a place."""
    here = Holder(dist.get_world_size(), dist.get_rank(), holder.ranks, holder.rank, place, sharded=True)
    return Residuals(mode, here)


def lonely_group() -> dist.ProcessGroup:
    """A group of this rank alone, in which torch's own all-reduce moves nothing."""
    group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup), torch.__version__
    return group
