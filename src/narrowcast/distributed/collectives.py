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
from narrowcast.distributed.entry import collective
from narrowcast.distributed.launch import Operands, launch
from narrowcast.distributed.protocols import one_way, two_stage
from narrowcast.distributed.protocols.exchange import Exchange
from narrowcast.distributed.protocols.mesh import all_reduce_over_mesh
from narrowcast.distributed.transport.agreement import Call
from narrowcast.distributed.transport.group import peers_of
from narrowcast.distributed.transport.lane import Work

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
        return all_reduce_over_mesh(tensor, op, group, async_op, codec=codec, local_codec=local_codec, seed=seed)
    chosen, found = as_codec(codec), arguments.group_of(group, "all_reduce")
    target = arguments.tensor(tensor, "tensor")
    if found is None:
        return None
    name, divisor = arguments.reduction(op, found.size(), "all_reduce")
    peers, operands = peers_of(found, target.device), Operands(tensor)
    data = operands.write(target)

    def protocol(exchange: Exchange) -> None:
        if exchange.size > 1:
            two_stage.all_reduce(exchange, data.view(-1), divisor)

    call = Call("all_reduce", chosen, f"{arguments.in_common(target)}, numel={target.numel()}, op={name}")
    plain = 2 * arguments.nbytes(target) * (peers.size - 1) // peers.size
    return launch(peers, call, protocol, operands, plain_bytes=plain, async_op=async_op, seed=seed)


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
    found = arguments.group_of(group, "reduce_scatter")
    if found is None:
        return None
    parts = arguments.tensors(input_list, "input_list", found.size())
    target = arguments.tensor(output, "output")
    arguments.alike(target, parts[0], "output", "input_list[0]")
    arguments.count(parts[found.rank()], target.numel(), f"input_list[{found.rank()}]", "as many as output")
    return _reduce_scatter("reduce_scatter", output, parts, op, found, async_op, as_codec(codec), seed)


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
    found = arguments.group_of(group, "reduce_scatter_tensor")
    if found is None:
        return None
    source, target = arguments.tensor(input, "input"), arguments.tensor(output, "output")
    arguments.alike(target, source, "output", "input")
    arguments.count(source, target.numel() * found.size(), "input", f"output's for each of {found.size()} ranks")
    parts = list(checks.plain(source).contiguous().view(found.size(), target.numel()))
    return _reduce_scatter("reduce_scatter_tensor", output, parts, op, found, async_op, as_codec(codec), seed)


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
    peers, operands = peers_of(group, output.device), Operands(output)
    rows = [operands.read(part).view(-1) for part in parts]
    data = operands.write(output.detach())

    def protocol(exchange: Exchange) -> None:
        if exchange.size > 1:
            two_stage.reduce_scatter(exchange, rows, data.view(-1), divisor)
        else:
            data.view(-1).copy_(rows[0])

    sizes = tuple(len(row) for row in rows)
    call = Call(name, codec, f"{arguments.in_common(output)}, op={word}", sizes, (output.numel(),) * group.size())
    plain = sum(arguments.nbytes(row) for row in rows) - arguments.nbytes(output)
    return launch(peers, call, protocol, operands, plain_bytes=plain, async_op=async_op, seed=seed)


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
    found = arguments.group_of(group, "all_gather")
    if found is None:
        return None
    outputs = arguments.tensors(tensor_list, "tensor_list", found.size())
    source = arguments.tensor(tensor, "tensor")
    arguments.alike(source, outputs[0], "tensor", "tensor_list[0]")
    arguments.count(outputs[found.rank()], source.numel(), f"tensor_list[{found.rank()}]", "as many as tensor")
    operands = Operands(*tensor_list)
    return _all_gather("all_gather", operands, outputs, source, found, async_op, as_codec(codec), seed)


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
    found = arguments.group_of(group, "all_gather_into_tensor")
    if found is None:
        return None
    source, target = arguments.tensor(input, "input"), arguments.tensor(output, "output")
    arguments.alike(target, source, "output", "input")
    arguments.count(target, source.numel() * found.size(), "output", f"input's from each of {found.size()} ranks")
    operands = Operands(output)
    outputs = list(operands.write(target).view(found.size(), *source.shape))
    return _all_gather("all_gather_into_tensor", operands, outputs, source, found, async_op, as_codec(codec), seed)


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
    peers = peers_of(group, source.device)
    mine = codec.as_rows(operands.read(source))
    rows = [codec.as_rows(operands.write(output)) for output in outputs]

    def protocol(exchange: Exchange) -> None:
        if exchange.size > 1:
            one_way.all_gather(exchange, rows, mine)
        else:
            rows[0].copy_(mine)

    sizes = tuple(output.numel() for output in outputs)
    call = Call(name, codec, arguments.in_common(source, codec), (source.numel(),) * group.size(), sizes)
    plain = arguments.nbytes(source) * (group.size() - 1)
    return launch(peers, call, protocol, operands, plain_bytes=plain, async_op=async_op, seed=seed)


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
    found = arguments.group_of(group, "all_to_all")
    if found is None:
        return None
    outputs = arguments.tensors(output_tensor_list, "output_tensor_list", found.size())
    inputs = arguments.tensors(input_tensor_list, "input_tensor_list", found.size())
    arguments.alike(inputs[0], outputs[0], "input_tensor_list[0]", "output_tensor_list[0]")
    operands = Operands(*output_tensor_list)
    return _all_to_all("all_to_all", operands, outputs, inputs, found, async_op, as_codec(codec), seed)


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
    """Split `input` along its first dimension, send a piece to each rank, and put what came together in `output`.

    Without split sizes the pieces are equal. What a rank sends to itself is copied exactly.
    """
    found = arguments.group_of(group, "all_to_all_single")
    if found is None:
        return None
    source, target = arguments.tensor(input, "input"), arguments.tensor(output, "output")
    arguments.alike(source, target, "input", "output")
    source, target = (t if t.dim() else t.view(1) for t in (source, target))
    sent = arguments.splits(input_split_sizes, len(source), found.size(), "input_split_sizes", "input")
    expected = arguments.splits(output_split_sizes, len(target), found.size(), "output_split_sizes", "output")
    operands = Operands(output)
    outputs, inputs = list(operands.write(target).split(expected)), list(operands.read(source).split(sent))
    return _all_to_all("all_to_all_single", operands, outputs, inputs, found, async_op, as_codec(codec), seed)


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
    peers = peers_of(group, inputs[0].device)
    rows_in = [codec.as_rows(operands.read(piece)) for piece in inputs]
    rows_out = [codec.as_rows(operands.write(piece)) for piece in outputs]

    def protocol(exchange: Exchange) -> None:
        if exchange.size > 1:
            one_way.all_to_all(exchange, rows_out, rows_in)
        else:
            rows_out[0].view(-1).copy_(rows_in[0].view(-1))

    sent = tuple(piece.numel() for piece in inputs)
    expected = tuple(piece.numel() for piece in outputs)
    call = Call(name, codec, arguments.in_common(inputs[0], codec), sent, expected)
    plain = sum(arguments.nbytes(piece) for piece in inputs) - arguments.nbytes(inputs[rank])
    return launch(peers, call, protocol, operands, plain_bytes=plain, async_op=async_op, seed=seed)


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
    found = arguments.group_of(group, "broadcast")
    if found is None:
        return None
    target = arguments.tensor(tensor, "tensor")
    root = arguments.one_of(src, group_src, found, "src", "group_src")
    chosen, peers, operands = as_codec(codec), peers_of(found, target.device), Operands(tensor)
    rows = chosen.as_rows(operands.write(target))

    def protocol(exchange: Exchange) -> None:
        if exchange.size > 1:
            one_way.broadcast(exchange, rows, root)

    call = Call(
        "broadcast", chosen, f"{arguments.in_common(target, chosen)}, numel={target.numel()}, src={peers.ranks[root]}"
    )
    plain = arguments.nbytes(target) * (peers.size - 1) if root == peers.rank else 0
    return launch(peers, call, protocol, operands, plain_bytes=plain, async_op=async_op, seed=seed)
