"""all_reduce over a mesh of hosts: full precision where links are fast, the codec where they are slow.

1. The ranks of a host add up (reduce-scatter), so that each of them owns a part of the host's sum, in fp32.
2. Each part is summed over the hosts, in the codec, by the two-stage reduction. A rank sends 1/local of the tensor.
3. The ranks of a host hand the parts to each other (all-gather).

The first and the last step use a codec that loses nothing of the tensor's dtype, unless `local_codec` says otherwise.
All mesh collectives of a process run in one lane, on wires of their own: they never race with others on the same
groups. A rank on which one step fails gives up the later ones: so every rank of the mesh learns of it, and every rank
has made the same number of calls in each of its groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from narrowcast.codecs import Codec
from narrowcast.codecs import codec as as_codec
from narrowcast.distributed import arguments
from narrowcast.distributed.launch import Operands, perform, seed_of, start
from narrowcast.distributed.protocols import one_way, two_stage
from narrowcast.distributed.protocols.encoder import derive_seed, lossless
from narrowcast.distributed.protocols.exchange import Exchange
from narrowcast.distributed.stats import span
from narrowcast.distributed.transport.agreement import Call
from narrowcast.distributed.transport.group import Peers, peers_of
from narrowcast.distributed.transport.lane import Work
from narrowcast.errors import ShapeError
from narrowcast.kernels.reference import casts


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
    if mesh.get_coordinate() is None:
        return None
    target = arguments.tensor(tensor, "tensor")
    word, divisor = arguments.reduction(op, mesh.size(), "all_reduce")
    far = as_codec(codec)
    near = lossless(target.dtype) if local_codec is None else as_codec(local_codec)
    seeds = seed_of(near, seed), seed_of(far, seed)
    operands = Operands(tensor)
    data, phases = operands.write(target), phases_of(mesh, target.device)
    words = f"{arguments.in_common(target)}, numel={target.numel()}, op={word}, local_codec={near.spec}"

    def job() -> list[Tensor]:
        with span("narrowcast::all_reduce"), torch.no_grad():
            parts = data.view(-1).split(two_stage.split(data.numel(), phases[0].size))
            _run_in_order(_steps(phases, parts, near, far, seeds, divisor, words))
            operands.bring_home()
        return operands.written

    return start(lane_of_meshes(target.device), "all_reduce", job, operands.touched, async_op)


def phases_of(mesh: DeviceMesh, device: torch.device) -> list[Peers]:
    """The ranks that this one meets in each step, in this order."""
    between, within = (peers_of(mesh.get_group(dim), device, "mesh") for dim in range(2))
    return [within, between, within]


def refuse_over_mesh(mesh: DeviceMesh, device: torch.device, error: BaseException) -> None:
    """Take part in an all_reduce over `mesh` by failing it, in its turn."""
    if mesh.ndim != 2 or mesh.get_coordinate() is None or mesh.size() == 1:
        return
    phases = phases_of(mesh, device)

    def job() -> list[Tensor]:
        for peers in phases:
            peers.give_up("all_reduce", error)
        return []

    lane_of_meshes(device).lane.run_or_queue(Work("all_reduce", job))


def lane_of_meshes(device: torch.device) -> Peers:
    """Whose lane all mesh collectives of this process share."""
    return peers_of(c10d._get_default_group(), device, "mesh")


@dataclass
class _Step:
    """One phase of the reduction."""

    peers: Peers
    call: Call
    protocol: Callable[[Exchange], None]
    plain_bytes: int
    seed: int


def _run_in_order(steps: Sequence[_Step]) -> None:
    """Run all steps. One that fails is known to the ranks of the later ones, too, who would wait for this rank."""
    for i, step in enumerate(steps):
        try:
            seed = derive_seed(step.seed, i)
            perform(step.peers, step.call, step.protocol, name=step.call.op, plain_bytes=step.plain_bytes, seed=seed)
        except BaseException as error:
            for later in steps[i + 1 :]:
                later.peers.give_up("all_reduce", error)
            raise


def _steps(
    phases: Sequence[Peers],
    parts: Sequence[Tensor],
    near: Codec,
    far: Codec,
    seeds: tuple[int, int],
    divisor: int,
    words: str,
) -> list[_Step]:
    within, between, _ = phases
    part = parts[within.rank]
    mine = torch.empty_like(part, dtype=torch.float32)

    def add_within(exchange: Exchange) -> None:
        if exchange.size > 1:
            two_stage.reduce_scatter(exchange, parts, mine, 1)
        else:
            mine.copy_(casts.to_float32(parts[0]))

    def add_between(exchange: Exchange) -> None:
        if exchange.size > 1:
            two_stage.all_reduce(exchange, mine, divisor)
        else:
            mine.div_(divisor)
        part.copy_(casts.cast_output(mine, part.dtype))

    def gather_within(exchange: Exchange) -> None:
        if exchange.size > 1:
            rows = [each[None] for each in parts]
            one_way.all_gather(exchange, rows, rows[exchange.rank])

    in_host = Call("all_reduce within hosts", near, words)
    of_hosts = Call("all_reduce between hosts", far, f"{words}, ranks={divisor}")
    others = sum(len(each) for each in parts) - len(part)
    ring = 2 * 4 * len(part) * (between.size - 1) // between.size
    return [
        _Step(within, in_host, add_within, others * part.element_size(), seeds[0]),
        _Step(between, of_hosts, add_between, ring, seeds[1]),
        _Step(within, in_host, gather_within, len(part) * part.element_size() * (within.size - 1), seeds[0]),
    ]
