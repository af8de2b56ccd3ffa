"""The collectives of torch.distributed, with a codec.

Arguments, their order and their meaning are torch's; `codec=` (and `seed=`, for codecs that round stochastically) are
by keyword. Results are written into the caller's tensors, in their own dtype and layout. Every rank must pass the
same codec. In a group of one rank nothing travels and nothing is quantized.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from narrowcast.codecs import Codec, checks
from narrowcast.codecs import codec as as_codec
from narrowcast.distributed import arguments
from narrowcast.distributed.collective import Collective, Operands, Request
from narrowcast.distributed.entry import collective
from narrowcast.distributed.meshes import Sum, all_reduce_by_hosts, all_reduce_over_mesh, check_mesh
from narrowcast.distributed.protocols import one_way, together, two_stage
from narrowcast.distributed.transport.agreement import remembered_call
from narrowcast.distributed.transport.group import group_for
from narrowcast.distributed.transport.work import Work

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

    By default, where torchrun has started as many ranks (two or more) on each of several hosts, ranks of a host add up
    in full precision, or in `local_codec`, and only their sums travel between hosts, in `codec`. A 2-D DeviceMesh as
    `group`, hosts x local, says who shares a host. With any other group, dist.group.WORLD too, hosts play no part.
    """
    members = arguments.members(None if isinstance(group, DeviceMesh) else group, "all_reduce")
    if isinstance(group, DeviceMesh):
        check_mesh(group, "group", "all_reduce")
        return all_reduce_over_mesh(Sum.of(tensor, op, group.size(), codec, local_codec, seed), group, async_op)
    wanted = Sum.of(tensor, op, 1 if members is None else members.size(), codec, local_codec, seed)
    if members is None:
        return None

    def protocol(collective: Collective) -> None:
        if collective.size > 1:
            two_stage.all_reduce(collective, wanted.data.view(-1), wanted.divisor)

    everyone, call = group_for(members, tensor.device), remembered_call("all_reduce", wanted.far, wanted.words)
    plain = 2 * arguments.nbytes(tensor) * (members.size() - 1) // members.size()
    here = together.goes_as_it_is(wanted.far, wanted.data)
    flat = Collective(everyone, call, protocol, plain_bytes=plain, seed=wanted.seeds[1], here=here)
    if group is None:
        return all_reduce_by_hosts(wanted, members, flat, async_op)
    return flat.launch(wanted.operands, async_op)


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
    request = Request("reduce_scatter", members, async_op, as_codec(codec), seed)
    return _reduce_scatter(request, output, parts, op)


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
    request = Request("reduce_scatter_tensor", members, async_op, as_codec(codec), seed)
    return _reduce_scatter(request, output, parts, op)


def _reduce_scatter(request: Request, output: Tensor, parts: Sequence[Tensor], op: Any) -> Work | None:
    word, divisor = arguments.reduction(op, request.members.size(), request.op)
    operands = Operands(output)
    rows = [operands.read(part).view(-1) for part in parts]
    data = operands.write(output.detach())

    def protocol(collective: Collective) -> None:
        if collective.size > 1:
            two_stage.reduce_scatter(collective, rows, data.view(-1), divisor)
        else:
            data.view(-1).copy_(rows[0])

    sent, expected = tuple(len(row) for row in rows), (output.numel(),) * len(rows)
    plain = sum(arguments.nbytes(row) for row in rows) - arguments.nbytes(output)
    words = f"{arguments.in_common(output)}, op={word}"
    return request.launch(words, protocol, operands, plain, sent, expected, sizes=sent)


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
    request = Request("all_gather", members, async_op, as_codec(codec), seed)
    return _all_gather(request, operands, outputs, source)


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
    request = Request("all_gather_into_tensor", members, async_op, as_codec(codec), seed)
    return _all_gather(request, operands, outputs, source)


def _all_gather(request: Request, operands: Operands, outputs: Sequence[Tensor], source: Tensor) -> Work | None:
    codec = request.codec
    arguments.rows_alike([source, *outputs], codec)
    mine = codec.as_rows(operands.read(source))
    rows = [codec.as_rows(operands.write(output)) for output in outputs]

    def protocol(collective: Collective) -> None:
        if collective.size > 1:
            one_way.all_gather(collective, rows, mine)
        else:
            rows[0].copy_(mine)

    sent, expected = (source.numel(),) * len(rows), tuple(output.numel() for output in outputs)
    plain = arguments.nbytes(source) * (len(rows) - 1)
    return request.launch(arguments.in_common(source, codec), protocol, operands, plain, sent, expected, sizes=expected)


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
    request = Request("all_to_all", members, async_op, as_codec(codec), seed)
    return _all_to_all(request, operands, outputs, inputs, even=False)


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
    request = Request("all_to_all_single", members, async_op, as_codec(codec), seed)
    even = not any(len(sizes) for sizes in (input_split_sizes, output_split_sizes) if sizes is not None)
    return _all_to_all(request, operands, outputs, inputs, even=even)


def _all_to_all(
    request: Request, operands: Operands, outputs: Sequence[Tensor], inputs: Sequence[Tensor], *, even: bool
) -> Work | None:
    rank, codec = request.members.rank(), request.codec
    arguments.count(outputs[rank], inputs[rank].numel(), f"the output for rank {rank} itself", "what it sends itself")
    arguments.rows_alike([*inputs, *outputs], codec)
    rows_in = [codec.as_rows(operands.read(part)) for part in inputs]
    rows_out = [codec.as_rows(operands.write(part)) for part in outputs]

    def protocol(collective: Collective) -> None:
        if collective.size > 1:
            one_way.all_to_all(collective, rows_out, rows_in)
        else:
            rows_out[0].view(-1).copy_(rows_in[0].view(-1))

    sent, expected = tuple(part.numel() for part in inputs), tuple(part.numel() for part in outputs)
    plain = sum(arguments.nbytes(part) for part in inputs) - arguments.nbytes(inputs[rank])
    words, sizes = arguments.in_common(inputs[0], codec), sent if even else None
    return request.launch(words, protocol, operands, plain, sent, expected, sizes)


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

    words = f"{arguments.in_common(target, chosen)}, numel={target.numel()}, src={dist.get_global_rank(members, root)}"
    plain = arguments.nbytes(target) * (members.size() - 1) if root == members.rank() else 0
    return Request("broadcast", members, async_op, chosen, seed).launch(words, protocol, operands, plain)
