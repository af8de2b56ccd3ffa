"""all_reduce over a mesh of hosts: full precision where links are fast, the codec where they are slow.

1. The ranks of a host add up (reduce-scatter), so that each of them owns a part of the host's sum, in fp32.
2. Each part is summed over the hosts, in the codec, by the two-stage reduction. A rank sends 1/local of the tensor.
3. The ranks of a host hand the parts to each other (all-gather).

The first and the last step use a codec that loses nothing of the tensor's dtype, unless `local_codec` says otherwise.
All mesh collectives of a process run in one lane, on wires of their own: they never race with others on the same
groups.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from narrowcast.codecs import Codec
from narrowcast.codecs import codec as as_codec
from narrowcast.distributed import arguments, one_trip, two_stage
from narrowcast.distributed.agreement import Call
from narrowcast.distributed.coder import lossless
from narrowcast.distributed.exchange import Exchange
from narrowcast.distributed.lane import Work
from narrowcast.distributed.launch import perform, seed_of, start, writable
from narrowcast.distributed.peers import peers_of
from narrowcast.distributed.stats import span
from narrowcast.errors import ShapeError
from narrowcast.kernels import casts


def all_reduce_over_mesh(
    tensor: Tensor, op: Any, mesh: DeviceMesh, async_op: bool, *, codec: Any, local_codec: Any, seed: int | None
) -> Work | None:
    """Sum (or average) `tensor` over a 2-D mesh, in place."""
    arguments.group_of(None, "all_reduce")
    if mesh.ndim != 2:
        raise ShapeError(
            f"group: a mesh for all_reduce has two dimensions, hosts x local, not {mesh.ndim}. "
            'Make one with init_device_mesh("cpu", (hosts, local)).'
        )
    target = arguments.tensor(tensor, "tensor")
    if mesh.get_coordinate() is None:
        return None
    between, within = mesh.get_group(0), mesh.get_group(1)
    word, divisor = arguments.reduction(op, mesh.size(), "all_reduce")
    far = as_codec(codec)
    near = lossless(target.dtype) if local_codec is None else as_codec(local_codec)
    number, near_number = seed_of(far, seed), seed_of(near, seed)
    data, bring_home = writable(target)

    def job() -> list[Tensor]:
        with span("narrowcast::all_reduce"):
            parts = data.view(-1).split(two_stage.split(data.numel(), within.size()))
            mine = torch.empty_like(parts[within.rank()], dtype=torch.float32)
            _add_within(parts, mine, within, near, near_number)
            _add_between(mine, between, far, number, divisor, word)
            parts[within.rank()].copy_(casts.cast_output(mine, target.dtype))
            _gather_within(parts, within, near, near_number)
            bring_home()
        return [tensor]

    lane = peers_of(c10d._get_default_group(), target.device, "mesh")
    return start(lane, "all_reduce", job, [tensor, data], async_op)


def _add_within(parts: Any, mine: Tensor, group: dist.ProcessGroup, codec: Codec, seed: int) -> None:
    def protocol(exchange: Exchange) -> None:
        if exchange.size > 1:
            two_stage.reduce_scatter(exchange, parts, mine, 1)
        else:
            mine.copy_(casts.to_float32(parts[0]))

    numel = sum(len(part) for part in parts)
    call = Call("all_reduce within hosts", codec, f"dtype={parts[0].dtype}, numel={numel}")
    plain = (numel - len(mine)) * parts[0].element_size()
    _perform(group, call, protocol, mine.device, plain, seed)


def _add_between(mine: Tensor, group: dist.ProcessGroup, codec: Codec, seed: int, divisor: int, op: str) -> None:
    def protocol(exchange: Exchange) -> None:
        if exchange.size > 1:
            two_stage.all_reduce(exchange, mine, divisor)
        else:
            mine.div_(divisor)

    call = Call("all_reduce between hosts", codec, f"numel={len(mine)}, op={op}, ranks={divisor}")
    plain = 2 * mine.numel() * 4 * (group.size() - 1) // group.size()
    _perform(group, call, protocol, mine.device, plain, seed)


def _gather_within(parts: Any, group: dist.ProcessGroup, codec: Codec, seed: int) -> None:
    def protocol(exchange: Exchange) -> None:
        if exchange.size > 1:
            rows = [part[None] for part in parts]
            one_trip.all_gather(exchange, rows, rows[exchange.rank])

    numel = sum(len(part) for part in parts)
    call = Call("all_reduce within hosts", codec, f"dtype={parts[0].dtype}, numel={numel}")
    mine = parts[group.rank()]
    _perform(group, call, protocol, mine.device, mine.numel() * mine.element_size() * (group.size() - 1), seed)


def _perform(group: dist.ProcessGroup, call: Call, protocol: Any, device: torch.device, plain: int, seed: int) -> None:
    perform(peers_of(group, device, "mesh"), call, protocol, name=call.op, plain_bytes=plain, seed=seed)
