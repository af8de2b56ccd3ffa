"""The collectives of torch.distributed, with a codec.

Arguments, their order and their meaning are torch's; `codec=` (and `seed=`, for codecs that round stochastically) are
by keyword. Results are written into the caller's tensors, in their own dtype and layout. Every rank must pass the
same codec. In a group of one rank nothing travels and nothing is quantized.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from narrowcast.codecs import Codec, checks
from narrowcast.codecs import codec as as_codec
from narrowcast.distributed import arguments
from narrowcast.distributed.collective import Collective, Operands, seed_for
from narrowcast.distributed.encoder import lossless
from narrowcast.distributed.entry import collective, group_of_meshes, mesh_of
from narrowcast.distributed.protocols import mesh as meshes
from narrowcast.distributed.protocols import one_way, two_stage
from narrowcast.distributed.stats import span
from narrowcast.distributed.transport.agreement import Call
from narrowcast.distributed.transport.group import group_for
from narrowcast.distributed.transport.work import Work
from narrowcast.errors import ShapeError

AnyCodec = str | Codec | Mapping[str, Any]
SUM = dist.ReduceOp.SUM


@collective
def all_reduce(
    tensor: Tensor,
    op: Any = SUM,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    async_op: bool = False,
    *,
    codec: AnyCodec = "int8",
    local_codec: AnyCodec | None = None,
    seed: int | None = None,
) -> Work | None:
    """Sum (or average) `tensor` over all ranks, in place; every rank ends with the same bits.

    `group` may be a 2-D DeviceMesh (hosts x local): then ranks of a host add up in full precision (or in
    `local_codec`), and only their sums travel between hosts in `codec`.
    """
    if isinstance(group, DeviceMesh):
        return _all_reduce_over_mesh(tensor, op, group, async_op, codec, local_codec, seed)
    chosen, members = as_codec(codec), arguments.members(group, "all_reduce")
    target = arguments.tensor(tensor, "tensor")
    if members is None:
        return None
    name, divisor = arguments.reduction(op, members.size(), "all_reduce")
    operands = Operands(tensor)
    data = operands.write(target)

    def protocol(collective: Collective) -> None:
        if collective.size > 1:
            two_stage.all_reduce(collective, data.view(-1), divisor)

    call = Call("all_reduce", chosen, f"{arguments.in_common(target)}, numel={target.numel()}, op={name}")
    plain = 2 * arguments.nbytes(target) * (members.size() - 1) // members.size()
    return _launch(members, call, protocol, operands, plain, async_op, seed)


def _all_reduce_over_mesh(
    tensor: Tensor,
    op: Any,
    group: DeviceMesh,
    async_op: bool,
    codec: AnyCodec,
    local_codec: AnyCodec | None,
    seed: int | None,
) -> Work | None:
    arguments.members(None, "all_reduce")
    if group.ndim != 2:
        raise ShapeError(
            f"group: a mesh for all_reduce has two dimensions, hosts x local, not {group.ndim}. "
            'Make one with init_device_mesh("cpu", (hosts, local)).'
        )
    if group.get_coordinate() is None:
        return None
    target = arguments.tensor(tensor, "tensor")
    name, divisor = arguments.reduction(op, group.size(), "all_reduce")
    far = as_codec(codec)
    near = lossless(target.dtype) if local_codec is None else as_codec(local_codec)
    seeds = seed_for(near, seed), seed_for(far, seed)
    operands, mesh = Operands(tensor), mesh_of(group, target.device)
    assert mesh is not None
    data = operands.write(target)
    words = f"{arguments.in_common(target)}, numel={target.numel()}, op={name}, local_codec={near.spec}"

    def job() -> list[Tensor]:
        with span("narrowcast::all_reduce"), torch.no_grad():
            meshes.all_reduce(mesh, data.view(-1), divisor, near=near, far=far, seeds=seeds, words=words)
            operands.copy_back()
        return operands.written

    return group_of_meshes(target.device).lane.start("all_reduce", job, operands.touched, async_op)


@collective
def reduce_scatter(
    output: Tensor,
    input_list: Sequence[Tensor],
    op: Any = SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    codec: AnyCodec = "int8",
    seed: int | None = None,
) -> Work | None:
    """Sum (or average) `input_list[rank]` over all ranks into `output` on that rank. The sum is not quantized."""
    members = arguments.members(group, "reduce_scatter")
    if members is None:
        return None
    parts = arguments.tensors(input_list, "input_list", members.size())
    target = arguments.tensor(output, "output")
    arguments.alike(target, parts[0], "output", "input_list[0]")
    arguments.count(parts[members.rank()], target.numel(), f"input_list[{members.rank()}]", "as many as output")
    return _reduce_scatter("reduce_scatter", output, parts, op, members, async_op, as_codec(codec), seed)


@collective
def reduce_scatter_tensor(
    output: Tensor,
    input: Tensor,
    op: Any = SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    codec: AnyCodec = "int8",
    seed: int | None = None,
) -> Work | None:
    """Sum (or average) `input` over all ranks, and write part `rank` of it into `output`. The sum is not quantized."""
    members = arguments.members(group, "reduce_scatter_tensor")
    if members is None:
        return None
    source, target = arguments.tensor(input, "input"), arguments.tensor(output, "output")
    arguments.alike(target, source, "output", "input")
    arguments.count(source, target.numel() * members.size(), "input", f"output's for each of {members.size()} ranks")
    parts = list(checks.plain(source).contiguous().view(members.size(), target.numel()))
    return _reduce_scatter("reduce_scatter_tensor", output, parts, op, members, async_op, as_codec(codec), seed)


def _reduce_scatter(
    name: str,
    output: Tensor,
    parts: Sequence[Tensor],
    op: Any,
    group: dist.ProcessGroup,
    async_op: bool,
    codec: Codec,
    seed: int | None,
) -> Work | None:
    word, divisor = arguments.reduction(op, group.size(), name)
    operands = Operands(output)
    rows = [operands.read(part).view(-1) for part in parts]
    data = operands.write(output.detach())

    def protocol(collective: Collective) -> None:
        if collective.size > 1:
            two_stage.reduce_scatter(collective, rows, data.view(-1), divisor)
        else:
            data.view(-1).copy_(rows[0])

    sizes = tuple(len(row) for row in rows)
    call = Call(name, codec, f"{arguments.in_common(output)}, op={word}", sizes, (output.numel(),) * group.size())
    plain = sum(arguments.nbytes(row) for row in rows) - arguments.nbytes(output)
    return _launch(group, call, protocol, operands, plain, async_op, seed)


@collective
def all_gather(
    tensor_list: Sequence[Tensor],
    tensor: Tensor,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    codec: AnyCodec = "int8",
    seed: int | None = None,
) -> Work | None:
    """Write the tensor of each rank into `tensor_list`; sizes may differ between ranks. All ranks get the same bits."""
    members = arguments.members(group, "all_gather")
    if members is None:
        return None
    outputs = arguments.tensors(tensor_list, "tensor_list", members.size())
    source = arguments.tensor(tensor, "tensor")
    arguments.alike(source, outputs[0], "tensor", "tensor_list[0]")
    arguments.count(outputs[members.rank()], source.numel(), f"tensor_list[{members.rank()}]", "as many as tensor")
    operands = Operands(*tensor_list)
    return _all_gather("all_gather", operands, outputs, source, members, async_op, as_codec(codec), seed)


@collective
def all_gather_into_tensor(
    output: Tensor,
    input: Tensor,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    codec: AnyCodec = "int8",
    seed: int | None = None,
) -> Work | None:
    """Write the input of each rank into `output`, one after the other. All ranks get the same bits."""
    members = arguments.members(group, "all_gather_into_tensor")
    if members is None:
        return None
    source, target = arguments.tensor(input, "input"), arguments.tensor(output, "output")
    arguments.alike(target, source, "output", "input")
    arguments.count(target, source.numel() * members.size(), "output", f"input's from each of {members.size()} ranks")
    operands = Operands(output)
    outputs = list(operands.write(target).view(members.size(), *source.shape))
    return _all_gather("all_gather_into_tensor", operands, outputs, source, members, async_op, as_codec(codec), seed)


def _all_gather(
    name: str,
    operands: Operands,
    outputs: Sequence[Tensor],
    source: Tensor,
    group: dist.ProcessGroup,
    async_op: bool,
    codec: Codec,
    seed: int | None,
) -> Work | None:
    arguments.rows_alike([source, *outputs], codec)
    mine = codec.as_rows(operands.read(source))
    rows = [codec.as_rows(operands.write(output)) for output in outputs]

    def protocol(collective: Collective) -> None:
        if collective.size > 1:
            one_way.all_gather(collective, rows, mine)
        else:
            rows[0].copy_(mine)

    sizes = tuple(output.numel() for output in outputs)
    call = Call(name, codec, arguments.in_common(source, codec), (source.numel(),) * group.size(), sizes)
    plain = arguments.nbytes(source) * (group.size() - 1)
    return _launch(group, call, protocol, operands, plain, async_op, seed)


@collective
def all_to_all(
    output_tensor_list: Sequence[Tensor],
    input_tensor_list: Sequence[Tensor],
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    codec: AnyCodec = "int8",
    seed: int | None = None,
) -> Work | None:
    """Send `input_tensor_list[i]` to rank i, and write what it sent into `output_tensor_list[i]`.

    Sizes may differ, and be zero. What a rank sends to itself is copied exactly.
    """
    members = arguments.members(group, "all_to_all")
    if members is None:
        return None
    outputs = arguments.tensors(output_tensor_list, "output_tensor_list", members.size())
    inputs = arguments.tensors(input_tensor_list, "input_tensor_list", members.size())
    arguments.alike(inputs[0], outputs[0], "input_tensor_list[0]", "output_tensor_list[0]")
    operands = Operands(*output_tensor_list)
    return _all_to_all("all_to_all", operands, outputs, inputs, members, async_op, as_codec(codec), seed)


@collective
def all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    codec: AnyCodec = "int8",
    seed: int | None = None,
) -> Work | None:
    """Split `input` along its first dimension, send a part to each rank, and write what came into `output` in order.

    Without split sizes the parts are equal. What a rank sends to itself is copied exactly.
    """
    members = arguments.members(group, "all_to_all_single")
    if members is None:
        return None
    source, target = arguments.tensor(input, "input"), arguments.tensor(output, "output")
    arguments.alike(source, target, "input", "output")
    source, target = (t if t.dim() else t.view(1) for t in (source, target))
    sent = arguments.splits(input_split_sizes, len(source), members.size(), "input_split_sizes", "input")
    expected = arguments.splits(output_split_sizes, len(target), members.size(), "output_split_sizes", "output")
    operands = Operands(output)
    outputs, inputs = list(operands.write(target).split(expected)), list(operands.read(source).split(sent))
    return _all_to_all("all_to_all_single", operands, outputs, inputs, members, async_op, as_codec(codec), seed)


def _all_to_all(
    name: str,
    operands: Operands,
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    group: dist.ProcessGroup,
    async_op: bool,
    codec: Codec,
    seed: int | None,
) -> Work | None:
    rank = group.rank()
    arguments.count(outputs[rank], inputs[rank].numel(), f"the output for rank {rank} itself", "what it sends itself")
    arguments.rows_alike([*inputs, *outputs], codec)
    rows_in = [codec.as_rows(operands.read(part)) for part in inputs]
    rows_out = [codec.as_rows(operands.write(part)) for part in outputs]

    def protocol(collective: Collective) -> None:
        if collective.size > 1:
            one_way.all_to_all(collective, rows_out, rows_in)
        else:
            rows_out[0].view(-1).copy_(rows_in[0].view(-1))

    sent = tuple(part.numel() for part in inputs)
    expected = tuple(part.numel() for part in outputs)
    call = Call(name, codec, arguments.in_common(inputs[0], codec), sent, expected)
    plain = sum(arguments.nbytes(part) for part in inputs) - arguments.nbytes(inputs[rank])
    return _launch(group, call, protocol, operands, plain, async_op, seed)


@collective
def broadcast(
    tensor: Tensor,
    src: int | None = None,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    group_src: int | None = None,
    *,
    codec: AnyCodec = "int8",
    seed: int | None = None,
) -> Work | None:
    """Write the tensor of rank `src` into every rank's. The source too ends with what it sent: the same bits as all."""
    members = arguments.members(group, "broadcast")
    if members is None:
        return None
    target = arguments.tensor(tensor, "tensor")
    root = arguments.one_of(src, group_src, members, "src", "group_src")
    chosen, operands = as_codec(codec), Operands(tensor)
    rows = chosen.as_rows(operands.write(target))

    def protocol(collective: Collective) -> None:
        if collective.size > 1:
            one_way.broadcast(collective, rows, root)

    source = dist.get_global_rank(members, root)
    call = Call("broadcast", chosen, f"{arguments.in_common(target, chosen)}, numel={target.numel()}, src={source}")
    plain = arguments.nbytes(target) * (members.size() - 1) if root == members.rank() else 0
    return _launch(members, call, protocol, operands, plain, async_op, seed)


def _launch(
    members: dist.ProcessGroup,
    call: Call,
    protocol: Callable[[Collective], None],
    operands: Operands,
    plain_bytes: int,
    async_op: bool,
    seed: int | None,
) -> Work | None:
    group, drawn = group_for(members, operands.written[0].device), seed_for(call.codec, seed)
    return Collective(group, call, protocol, plain_bytes=plain_bytes, seed=drawn).launch(operands, async_op)
