"""How FSDP2 hands over its gradients, and fetches its parameters: collectives that take the place of torch's own.

Every parameter group of the model gets a reduce-scatter, and with `gather=` an all-gather, that encode. torch calls
them where it would call its own, on the stream of its choice, and goes on when they return: on a CPU when it is done,
on CUDA when that stream waits for it. So nothing about streams, prefetching, or when parameters are freed is changed.

- The sum of a shard stays on the rank that owns it, unquantized: error feedback is the sender's alone.
- Gathered parameters are what forward and backward compute with, on every rank alike. The sharded ones, which the
  optimizer and checkpoints see, stay exact. Backward may gather again, and must find what forward found: the codec may
  not round at random.
- With replicas (HSDP) it is the all-reduce between them that is compressed (fsdp_replicas.py). The reduce-scatter
  within a replica is torch's own.
- Gathering from the fewer ranks of reshard_after_forward=int is left to torch: it goes uncompressed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from narrowcast.codecs import Codec
from narrowcast.codecs import codec as as_codec
from narrowcast.distributed import arguments
from narrowcast.distributed.collective import Collective, Operands
from narrowcast.distributed.collectives import AnyCodec
from narrowcast.distributed.gradients.compression import GradientCompression
from narrowcast.distributed.gradients.fsdp_groups import AllGather, ParameterGroup, ReduceScatter, groups_of
from narrowcast.distributed.gradients.fsdp_replicas import ReplicaReduce, lonely_group, residuals_of_shards
from narrowcast.distributed.gradients.fsdp_steps import Steps
from narrowcast.distributed.gradients.gather import gather_shards
from narrowcast.distributed.gradients.layout import ChunkLayout, Gradient, lay_out
from narrowcast.distributed.gradients.options import Mode, for_gradients
from narrowcast.distributed.gradients.outcome import Outcome
from narrowcast.distributed.gradients.reduction import ShardedBucket
from narrowcast.distributed.gradients.residuals import Holder, Residuals
from narrowcast.distributed.meshes import Given, check_mesh
from narrowcast.distributed.transport.agreement import Call
from narrowcast.distributed.transport.group import Group, group_for
from narrowcast.errors import DtypeError, ModelKindError, ShapeError, SpecError

GATHERED = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of parameters that a codec takes, and gives back without loss where they are exempt."""

LAYOUTS = 1024
"""So many sets of parameters that have a gradient together are remembered."""


def attach(model: nn.Module, state: GradientCompression, gather: AnyCodec | None) -> None:
    """Replace the collectives of all parameter groups in `model`, once all ranks are known to be configured alike."""
    codec = None if gather is None else _for_parameters(as_codec(gather))
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
    steps = Steps(state)
    lonely = lonely_group() if replicated else None
    for group in groups:
        gathers = None if codec is None else _Gather(state, group, codec)
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
    if given is None:
        return
    if not isinstance(given, DeviceMesh):
        raise SpecError(
            "process_group: an FSDP2 model exchanges gradients over the mesh given to fully_shard. Leave it out, or "
            "pass a 2-D mesh, replicas x shards, whose second dimension was given to fully_shard."
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
    """Meet all ranks that share parameters with this one."""
    for group in groups:
        for name, numel in zip(group.names, group.numels, strict=True):
            state.parameters.numels[name] = numel  # what this rank sees of it, where tensors are parallel too
        if group.replicas is not None:  # what it has of it
            state.parameters.numels.update(zip(group.names, group.parts, strict=True))
    shared = {group.process_group: group for group in groups if group.process_group.size() > 1}
    replicas = {group.replicas: group for group in groups if group.replicas is not None}
    codec = "none" if gather is None else gather.spec
    for members, group in (shared | replicas).items():
        meeting = group_for(members, group.device, "gradients")
        state.meet(meeting, group.dtype, f", groups={len(groups)}, gather={codec}")
    state.make_residuals = _residuals
    if replicas:
        place = groups[0].process_group.rank()
        state.make_residuals = partial(residuals_of_shards, place=place)
    for members, group in (replicas or shared).items():
        state.agree(members, torch.empty(0, dtype=group.dtype, device=group.device))


def _layout(
    state: GradientCompression, parameters: ParameterGroup, which: Sequence[int], group: Group, all_exempt: bool
) -> list[ChunkLayout]:
    """How a matrix is cut that holds these parameters of a group."""
    key = (parameters.index, *which, all_exempt, group.size)
    if key not in state.layouts:
        if len(state.layouts) >= LAYOUTS:  # experts that come and go: residuals move to new layouts
            state.layouts.clear()
        offset, gradients = 0, []
        for i in which:
            name, numel, part = parameters.names[i], parameters.numels[i], parameters.parts[i]
            exempt = all_exempt or state.parameters.is_exempt(name, numel, group.size)
            gradients.append(Gradient(name, offset, numel, exempt, part))
            offset += part
        state.layouts[key] = lay_out(gradients, group.size, sharded=True, at_once=group.nccl)
    return state.layouts[key]


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
        step, outcome = self._steps.step_of(self._parameters)
        plain_bytes = arguments.nbytes(input_tensor) * (group.size() - 1) // group.size()
        if self._state.idle:
            self._state.count_idle(self._parameters.index, input_tensor.numel(), plain_bytes)
            return self._own(output_tensor, input_tensor, group, op, async_op)
        meeting = self._state.agree(group, input_tensor)
        assert isinstance(meeting, Group)
        with meeting.refusing("gradients"):
            return self._start(meeting, output_tensor, input_tensor, op, async_op, plain_bytes, step, outcome)

    def _start(
        self,
        group: Group,
        output: Tensor,
        input: Tensor,
        op: Any,
        async_op: bool,
        plain_bytes: int,
        step: int,
        outcome: Outcome,
    ) -> dist.Work | None:
        state, parameters, columns = self._state, self._parameters, output.numel()
        which = parameters.with_gradients(columns)

        def cut(all_exempt: bool) -> list[ChunkLayout]:
            return _layout(state, parameters, which, group, all_exempt)

        matrix = input.view(group.size, columns)
        reduction = state.prepare(matrix, parameters.index, plain_bytes, cut, step)
        divisor, factor = _reduction(op, group.size)
        bucket = ShardedBucket(
            matrix, reduction.layout, state.residuals, outcome, reduction.probe, output, divisor, factor
        )

        def job() -> list[Tensor]:
            try:
                state.reduce(group, reduction, bucket, f"group {parameters.index}")
            except BaseException as error:
                self._steps.tell_of(error, group)
                raise
            return [output]

        if state.residuals is not None:
            self._steps.tell_at_the_end(parameters)
        return group.lane.start("gradients", job, [output, input], async_op)


class _Gather(AllGather):
    """The all-gather of a parameter group."""

    def __init__(self, state: GradientCompression, parameters: ParameterGroup, codec: Codec) -> None:
        self._state = state
        self._parameters = parameters
        self._codec = codec
        self._own = parameters.own_all_gather

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._own.allocate(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        parameters, ranks, columns = self._parameters, group.size(), input_tensor.numel()
        counted, plain = self._state.counted, arguments.nbytes(input_tensor) * (ranks - 1)
        reason = self._why_not(output_tensor, columns, ranks)
        if reason:
            counted.count_gather(plain, plain, reason)
            return self._own(output_tensor, input_tensor, group, async_op)
        meeting = group_for(group, output_tensor.device, "parameters")
        layout = _layout(self._state, parameters, range(len(parameters.names)), meeting, False)
        matrix = output_tensor.view(ranks, columns)

        def protocol(collective: Collective) -> None:
            mine = matrix[collective.rank]
            if mine.data_ptr() != input_tensor.data_ptr():
                mine.copy_(input_tensor)
            gather_shards(collective, matrix, layout)
            counted.count_gather(plain, collective.sent_bytes)

        words = f"group {parameters.index}, dtype={matrix.dtype}, numel={matrix.numel()}"
        operands = Operands(output_tensor)
        operands.read(input_tensor)
        call = Call("parameters", self._codec, words)
        return Collective(meeting, call, protocol, plain_bytes=plain).launch(operands, async_op)

    def _why_not(self, output: Tensor, columns: int, ranks: int) -> str:
        """Why torch has to gather this one."""
        if ranks != self._parameters.process_group.size():
            return "resharded to fewer ranks"  # and what comes from there has been quantized in forward
        if output.dtype not in GATHERED:
            several = output.dtype == torch.uint8
            return "parameters of several dtypes" if several else f"parameters gathered as {output.dtype}"
        if columns != sum(self._parameters.parts):
            return "parameters with an all-gather of their own"
        return ""


def _residuals(mode: Mode, holder: Holder) -> Residuals:
    # By their numbers among all: with HSDP, several ranks have the same number among those that share parameters.
    return Residuals(mode, Holder(dist.get_world_size(), dist.get_rank()), owners=False)


def _refuse_complex(group: ParameterGroup) -> None:
    for name, parameter in zip(group.names, group.parameters, strict=True):
        if parameter.is_complex() and parameter.requires_grad:
            raise DtypeError(
                f"{name}: its gradient is complex, and codecs take real numbers. Keep the parameter as "
                "torch.view_as_real(x) and compute with torch.view_as_complex of it, or use DistributedDataParallel, "
                "which hands over complex gradients as real ones."
            )


def _for_parameters(codec: Codec) -> Codec:
    if codec.stochastic:
        raise SpecError(
            f"gather={codec.spec!r}: backward gathers parameters again and must find those that forward found, so the "
            "codec may not round at random. Leave out its rounding option."
        )
    return for_gradients(codec)


def _reduction(op: Any, ranks: int) -> tuple[int, float]:
    """What a sum is divided by, and then multiplied with."""
    if op == dist.ReduceOp.PREMUL_SUM:
        factor = op.__getstate__()[1]  # how it is pickled; there is no other way to ask
        if isinstance(factor, float):
            return 1, factor
    return arguments.reduction(op, ranks, "compress_gradients")[1], 1.0
