"""How FSDP2 hands over its gradients, and fetches its parameters: collectives that take the place of torch's own.

Every parameter group of the model gets a reduce-scatter, and with `gather=` an all-gather, that encode. torch calls
them where it would call its own, on the stream of its choice, and goes on when they return: on a CPU when it is done,
on CUDA when that stream waits for it. So nothing about streams, prefetching, or when parameters are freed is changed.

- The sum of a shard stays on the rank that owns it, unquantized: error feedback is the sender's alone.
- Gathered parameters are what forward and backward compute with, on every rank alike. The sharded ones, which the
  optimizer and checkpoints see, stay exact. Backward may gather again, and must find what forward found: the codec may
  not round at random.
- With replicas (HSDP) it is the all-reduce between them that is compressed (replicas.py). The reduce-scatter
  within a replica is torch's own.
- Gathering from the fewer ranks of reshard_after_forward=int is left to torch: it goes uncompressed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from narrowcast.codecs import Codec
from narrowcast.codecs import codec as as_codec
from narrowcast.distributed import arguments
from narrowcast.distributed.collectives import AnyCodec
from narrowcast.distributed.gradients.compression import GradientCompression
from narrowcast.distributed.gradients.error_feedback.residuals import Holder, Residuals
from narrowcast.distributed.gradients.fsdp.gather import ShardGather, for_parameters, ranks_given, shard_layout
from narrowcast.distributed.gradients.fsdp.groups import ParameterGroup, ReduceScatter, groups_of
from narrowcast.distributed.gradients.fsdp.hosted import HostShardedBucket, numel_of_place
from narrowcast.distributed.gradients.fsdp.replicas import ReplicaReduce, lonely_group, residuals_of_shards
from narrowcast.distributed.gradients.fsdp.steps import Steps
from narrowcast.distributed.gradients.layout import ChunkLayout
from narrowcast.distributed.gradients.options import Mode
from narrowcast.distributed.gradients.reduction import ShardedBucket
from narrowcast.distributed.meshes import Given, check_mesh, everyone_in, meet_hosts
from narrowcast.distributed.protocols.mesh import Mesh
from narrowcast.errors import DtypeError, ModelKindError, ShapeError, SpecError


def attach(model: nn.Module, state: GradientCompression, gather: AnyCodec | None) -> None:
    """Replace the collectives of all parameter groups in `model`, once all ranks are known to be configured alike."""
    codec = None if gather is None else for_parameters(as_codec(gather))
    groups = groups_of(model, list(state.parameters.numels))
    if not groups:
        raise ModelKindError(f"model: {type(model).__name__} is sharded, but has no parameters.")
    for group in groups:
        _refuse_complex(group)
        _take_replicas(group, state.process_group)
    replicated = _replicated(groups)
    if not replicated and state.error_feedback == "owner":
        raise SpecError(f"error_feedback={state.error_feedback!r}: {_NO_OWNER}")
    _agree(state, groups, codec)
    state.clock.handed_over()  # torch waits for each reduction where it asks for it
    steps = Steps(state, groups)
    lonely = lonely_group() if replicated else None
    for group in groups:
        gathers = None if codec is None else ShardGather(state, group, codec)
        group.left_out = partial(steps.leave_out, group)
        group.refuse_after_a_break()
        if lonely is None:
            group.replace_collectives(_Reduce(state, group, steps), gathers)
        else:
            group.replace_all_reduce(ReplicaReduce(state, group, steps), lonely)
            group.replace_collectives(None, gathers)


_NO_OWNER = (
    "FSDP2 keeps sums where they are made and quantizes none, so an owner has no residual. Pass True for the sender's, "
    "or False."
)


def _take_replicas(group: ParameterGroup, given: Given) -> None:
    """Take it from a mesh (replicas x shards) who has the same shards as this rank, where torch was not told."""
    if given is None or given is dist.group.WORLD:
        return
    if not isinstance(given, DeviceMesh):
        raise SpecError(
            "process_group: an FSDP2 model exchanges gradients over the mesh given to fully_shard. Leave it out, "
            "pass dist.group.WORLD if hosts are to play no part, or a 2-D mesh, replicas x shards, whose second "
            "dimension was given to fully_shard."
        )
    check_mesh(given, "process_group", "compress_gradients")
    here, there = (dist.get_process_group_ranks(g) for g in (group.process_group, given.get_group(1)))
    if group.replicas is not None or here != there:
        raise ShapeError(
            f"process_group: {', '.join(group.names[:3])} are sharded over ranks {here}, the second dimension of the "
            f"mesh has {there}. Pass the mesh whose second dimension was given to fully_shard; where fully_shard got "
            "both, leave it out."
        )
    if given.size(0) > 1:
        group.replicas = given.get_group(0)


def _replicated(groups: Sequence[ParameterGroup]) -> bool:
    """Whether there are replicas: of all parameters, or of none."""
    kinds = {group.replicas is not None for group in groups}
    if len(kinds) > 1:
        raise ModelKindError(
            "model: some of it is replicated (a 2-D mesh) and some is not. Give all of it one mesh, or compress the "
            "two apart: compress_gradients takes a part of a model, too."
        )
    return kinds.pop()


def _agree(state: GradientCompression, groups: Sequence[ParameterGroup], gather: Codec | None) -> None:
    """Meet all ranks that share parameters with this one, or have replicas of its shards."""
    _take_numels(state, groups)
    shared = {group.process_group: group for group in groups if group.process_group.size() > 1}
    replicas = {group.replicas: group for group in groups if group.replicas is not None}
    about = f", groups={len(groups)}, gather={'none' if gather is None else gather.spec}"
    for members, group in (shared | replicas).items():
        state.meet(everyone_in(ranks_given(state, members), group.device, "gradients"), group.dtype, about)
    if gather is not None:
        for members, group in shared.items():
            given = ranks_given(state, members)
            meet_hosts(given, everyone_in(given, group.device, "parameters"))
    place = groups[0].process_group.rank()
    state.make_residuals = partial(residuals_of_shards, place=place) if replicas else _residuals
    for members, group in (replicas or shared).items():
        given = members if replicas else ranks_given(state, members)
        ranks = state.agree(given, torch.empty(0, dtype=group.dtype, device=group.device))
        if isinstance(ranks, Mesh):
            _take_shares(state, groups, ranks)


def _take_numels(state: GradientCompression, groups: Sequence[ParameterGroup]) -> None:
    """How large parameters are, as this rank sees them where tensors are parallel too; with replicas, its shards."""
    for group in groups:
        sizes = group.numels if group.replicas is None else group.parts
        state.parameters.numels.update(zip(group.names, sizes, strict=True))
        along = zip(group.names, group.sharded_along, strict=True)
        state.parameters.orders.update({name: f"shards along dimension {dim}" for name, dim in along if dim})


def _take_shares(state: GradientCompression, groups: Sequence[ParameterGroup], mesh: Mesh) -> None:
    """How much of each parameter this place on its host keeps residuals of."""
    rows = [ranks[mesh.within.rank] for ranks in mesh.hosts]
    for group in groups:
        for name, numel, part in zip(group.names, group.numels, group.parts, strict=True):
            state.parameters.shares[name] = numel_of_place(numel, part, rows)


class _Reduce(ReduceScatter):
    """The reduce-scatter of a parameter group's gradients."""

    def __init__(self, state: GradientCompression, parameters: ParameterGroup, steps: Steps) -> None:
        self._state = state
        self._parameters = parameters
        self._steps = steps
        self._own = parameters.own_reduce_scatter
        """For the memory that torch takes, and for when there is nothing to compress with."""

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._own.allocate(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        state, parameters, columns = self._state, self._parameters, output_tensor.numel()
        step, outcome = self._steps.step_of(parameters)
        plain_bytes = arguments.nbytes(input_tensor) * (group.size() - 1) // group.size()
        if state.idle:
            state.count_idle(parameters.index, input_tensor.numel(), plain_bytes)
            return self._own(output_tensor, input_tensor, group, op, async_op)
        ranks = state.agree(ranks_given(state, group), input_tensor)
        with ranks.refusing("gradients"):
            which = parameters.with_gradients(columns)

            def cut(all_exempt: bool) -> list[ChunkLayout]:
                return shard_layout(state, parameters, which, ranks, all_exempt)

            matrix = input_tensor.view(ranks.size, columns)
            reduction = state.prepare([matrix], parameters.index, plain_bytes, cut, step)
            divisor, factor = _reduction(op, ranks.size)
            fields = matrix, reduction.layout, state.residuals, outcome, reduction.probe, output_tensor, divisor, factor
            bucket = HostShardedBucket(*fields, ranks) if isinstance(ranks, Mesh) else ShardedBucket(*fields)
            return self._steps.reduce(parameters, ranks, reduction, bucket, [output_tensor, input_tensor], async_op)


def _residuals(mode: Mode, holder: Holder) -> Residuals:
    # By their numbers among all: with HSDP, several ranks have the same number among those that share parameters.
    if not holder.hosts:
        holder = Holder(dist.get_world_size(), dist.get_rank())
    return Residuals(mode, replace(holder, sharded=bool(holder.hosts)), owners=False)


def _refuse_complex(group: ParameterGroup) -> None:
    for name, parameter in zip(group.names, group.parameters, strict=True):
        if parameter.is_complex() and parameter.requires_grad:
            raise DtypeError(
                f"{name}: its gradient is complex, and codecs take real numbers. Keep the parameter as "
                "torch.view_as_real(x) and compute with torch.view_as_complex of it, or use DistributedDataParallel, "
                "which hands over complex gradients as real ones."
            )


def _reduction(op: Any, ranks: int) -> tuple[int, float]:
    """What a sum is divided by, and then multiplied with."""
    if op == dist.ReduceOp.PREMUL_SUM:
        factor = op.__getstate__()[1]  # how it is pickled; there is no other way to ask
        if isinstance(factor, float):
            return 1, factor
    return arguments.reduction(op, ranks, "compress_gradients")[1], 1.0
