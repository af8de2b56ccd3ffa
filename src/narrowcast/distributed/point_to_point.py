"""send, recv, isend and irecv, with a codec.

Sender and receiver compare their arguments before the data moves, so a message is on its way once both have called.
Messages of one pair, direction and tag arrive in the order in which they were sent; others do not wait for each
other.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from narrowcast.codecs import codec as as_codec
from narrowcast.distributed import arguments
from narrowcast.distributed.collective import Collective, Operands, seed_for
from narrowcast.distributed.collectives import AnyCodec
from narrowcast.distributed.entry import message
from narrowcast.distributed.transport.agreement import Call
from narrowcast.distributed.transport.group import pair_for
from narrowcast.distributed.transport.work import Work
from narrowcast.errors import ShapeError


@message
def send(
    tensor: Tensor,
    dst: int | None = None,
    group: dist.ProcessGroup | None = None,
    tag: int = 0,
    group_dst: int | None = None,
    *,
    codec: AnyCodec = "int8",
    seed: int | None = None,
) -> None:
    """Send `tensor` to rank `dst`, and return when it is on its way."""
    _send(tensor, dst, group, tag, group_dst, codec, seed, "send", False)


@message
def isend(
    tensor: Tensor,
    dst: int | None = None,
    group: dist.ProcessGroup | None = None,
    tag: int = 0,
    group_dst: int | None = None,
    *,
    codec: AnyCodec = "int8",
    seed: int | None = None,
) -> Work | None:
    """`send` that returns a Work at once. The tensor must not change until it is done."""
    return _send(tensor, dst, group, tag, group_dst, codec, seed, "isend", True)


@message
def recv(
    tensor: Tensor,
    src: int | None = None,
    group: dist.ProcessGroup | None = None,
    tag: int = 0,
    group_src: int | None = None,
    *,
    codec: AnyCodec = "int8",
) -> int:
    """Receive from rank `src` into `tensor`, and return `src`: as in torch, -1 on a rank that is not in the group."""
    members = arguments.members(group, "recv")
    if members is None:
        return -1
    _receive(tensor, src, group, tag, group_src, codec, "recv", False)
    return src if group_src is None else dist.get_global_rank(members, group_src)  # type: ignore[return-value]


@message
def irecv(
    tensor: Tensor,
    src: int | None = None,
    group: dist.ProcessGroup | None = None,
    tag: int = 0,
    group_src: int | None = None,
    *,
    codec: AnyCodec = "int8",
) -> Work | None:
    """`recv` that returns a Work at once."""
    return _receive(tensor, src, group, tag, group_src, codec, "irecv", True)


def _send(
    tensor: Tensor,
    dst: int | None,
    group: dist.ProcessGroup | None,
    tag: int,
    group_dst: int | None,
    codec: AnyCodec,
    seed: int | None,
    name: str,
    async_op: bool,
) -> Work | None:
    members = arguments.members(group, name)
    if members is None:
        return None
    operands = Operands(tensor)
    source = operands.read(arguments.tensor(tensor, "tensor"))
    peer = _other(arguments.one_of(dst, group_dst, members, "dst", "group_dst"), members, "dst")
    chosen = as_codec(codec)
    pair = pair_for(members, source.device, members.rank(), peer, arguments.message_tag(tag))
    rows = chosen.as_rows(source)

    def protocol(collective: Collective) -> None:
        nbytes = collective.encoder.nbytes(rows)
        data = collective.encoder.encode(rows, collective.encoder.take("outbox", nbytes), peer, tag)
        sizes = [0 if rank == collective.rank else nbytes for rank in range(2)]
        collective.swap(lambda rank: data, sizes, [data[:0]] * 2)

    call = _message(chosen, source, members.rank(), peer, tag, members)
    plain = arguments.nbytes(source)
    collective = Collective(pair, call, protocol, name=name, plain_bytes=plain, seed=seed_for(chosen, seed))
    return collective.launch(operands, async_op)


def _receive(
    tensor: Tensor,
    src: int | None,
    group: dist.ProcessGroup | None,
    tag: int,
    group_src: int | None,
    codec: AnyCodec,
    name: str,
    async_op: bool,
) -> Work | None:
    members = arguments.members(group, name)
    if members is None:
        return None
    target = arguments.tensor(tensor, "tensor")
    if src is None and group_src is None:
        raise ShapeError(f"src=None: {name} with a codec needs to know the sender, which must agree on it. Pass src=.")
    peer = _other(arguments.one_of(src, group_src, members, "src", "group_src"), members, "src")
    chosen = as_codec(codec)
    pair = pair_for(members, target.device, peer, members.rank(), arguments.message_tag(tag))
    operands = Operands(tensor)
    rows = chosen.as_rows(operands.write(target))

    def protocol(collective: Collective) -> None:
        data = collective.encoder.take("inbox", collective.encoder.nbytes(rows))
        incoming = [data[:0] if rank == collective.rank else data for rank in range(2)]
        collective.swap(lambda rank: data, [0, 0], incoming)
        collective.encoder.decode(data, rows)

    call = _message(chosen, target, peer, members.rank(), tag, members)
    return Collective(pair, call, protocol, name=name).launch(operands, async_op)


def _message(codec: Any, tensor: Tensor, source: int, target: int, tag: int, group: dist.ProcessGroup) -> Call:
    ranks = dist.get_process_group_ranks(group)
    words = f"{arguments.in_common(tensor, codec)}, numel={tensor.numel()}"
    words += f", from={ranks[source]}, to={ranks[target]}, tag={tag}"
    return Call("message", codec, words)


def _other(peer: int, group: dist.ProcessGroup, name: str) -> int:
    if peer == group.rank():
        raise ShapeError(f"{name}: is this rank itself. A message goes to another rank; copy the tensor instead.")
    return peer
