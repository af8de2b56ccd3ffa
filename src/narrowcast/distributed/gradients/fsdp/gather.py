"""FSDP2's all-gather of parameters, in a codec; and how the rows of its buffers are cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from narrowcast.codecs import Codec
from narrowcast.distributed import arguments
from narrowcast.distributed.collective import Collective, Operands
from narrowcast.distributed.gradients.compression import GradientCompression
from narrowcast.distributed.gradients.fsdp.groups import AllGather, ParameterGroup
from narrowcast.distributed.gradients.fsdp.hosted import numel_of_place
from narrowcast.distributed.gradients.gather import gather_by_hosts, gather_shards
from narrowcast.distributed.gradients.layout import ChunkLayout, Gradient, lay_out
from narrowcast.distributed.gradients.options import for_gradients
from narrowcast.distributed.meshes import Given, everyone_in, ranks_in
from narrowcast.distributed.protocols import phases
from narrowcast.distributed.protocols.mesh import Mesh
from narrowcast.distributed.transport.agreement import Call
from narrowcast.distributed.transport.group import Group
from narrowcast.errors import SpecError

GATHERED = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of parameters that a codec takes, and gives back without loss where they are exempt."""

LAYOUTS = 1024
"""So many sets of parameters that have a gradient together are remembered."""


def ranks_given(state: GradientCompression, members: dist.ProcessGroup) -> Given:
    """Who reduces together, of those that share parameters: by hosts where these are all ranks."""
    everyone = dist.get_process_group_ranks(members) == list(range(dist.get_world_size()))
    return None if everyone and state.process_group is None else members


def shard_layout(
    state: GradientCompression, parameters: ParameterGroup, which: Sequence[int], group: Group | Mesh, all_exempt: bool
) -> list[ChunkLayout]:
    """How a matrix is cut that holds these parameters of a group; by hosts, the one with the rows of a place."""
    mesh = group if isinstance(group, Mesh) else None
    key = (parameters.index, *which, all_exempt, group.size, mesh is not None)
    if key not in state.layouts:
        if len(state.layouts) >= LAYOUTS:  # experts that come and go: residuals move to new layouts
            state.layouts.clear()
        offset, gradients = 0, []
        for i in which:
            name, numel, part = parameters.names[i], parameters.numels[i], parameters.parts[i]
            exempt = all_exempt or state.parameters.is_exempt(name, numel, group.size)
            if mesh is not None:
                numel = numel_of_place(numel, part, [ranks[mesh.within.rank] for ranks in mesh.hosts])
            gradients.append(Gradient(name, offset, numel, exempt, part))
            offset += part
        ranks = group.size if mesh is None else mesh.between.size
        state.layouts[key] = lay_out(gradients, ranks, sharded=True, at_once=group.nccl)
    return state.layouts[key]


class ShardGather(AllGather):
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
        given, device = ranks_given(self._state, group), output_tensor.device
        everyone, met = everyone_in(given, device, "parameters"), ranks_in(given, device, "parameters")
        layout = shard_layout(self._state, parameters, range(len(parameters.names)), everyone, False)
        matrix = output_tensor.view(ranks, columns)
        call = Call(
            "parameters", self._codec, f"group {parameters.index}, dtype={matrix.dtype}, numel={matrix.numel()}"
        )
        operands = Operands(output_tensor)
        operands.read(input_tensor)

        def bring_own() -> None:
            mine = matrix[everyone.rank]
            if mine.data_ptr() != input_tensor.data_ptr():
                mine.copy_(input_tensor)

        def protocol(collective: Collective) -> None:
            bring_own()
            gather_shards(collective, matrix, layout)
            counted.count_gather(plain, collective.sent_bytes)

        if isinstance(met, Mesh):
            return self._start_by_hosts(met, call, bring_own, matrix, layout, operands, async_op)
        return Collective(everyone, call, protocol, plain_bytes=plain).launch(operands, async_op)

    def _start_by_hosts(
        self,
        met: Mesh,
        call: Call,
        bring_own: Callable[[], None],
        matrix: Tensor,
        layout: Sequence[ChunkLayout],
        operands: Operands,
        async_op: bool,
    ) -> dist.Work | None:
        plain = arguments.nbytes(matrix[0]) * (met.between.size - 1)

        def job() -> list[Tensor]:
            bring_own()
            each = gather_by_hosts(met, call, matrix, layout)
            phases.run(each, "parameters")
            self._state.counted.count_gather(plain, each[0].sent_bytes)
            return operands.written

        return met.lane.start("parameters", job, operands.touched, async_op)

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


def for_parameters(codec: Codec) -> Codec:
    if codec.stochastic:
        raise SpecError(
            f"gather={codec.spec!r}: backward gathers parameters again and must find those that forward found, so the "
            "codec may not round at random. Leave out its rounding option."
        )
    return for_gradients(codec)
