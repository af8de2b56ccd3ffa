"""all_reduce over a 2-D DeviceMesh: its arguments, its groups and its lane. protocols/mesh.py says what is sent."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from narrowcast.codecs import codec as as_codec
from narrowcast.distributed import arguments
from narrowcast.distributed.collective import Operands, seed_for
from narrowcast.distributed.encoder import lossless
from narrowcast.distributed.protocols import mesh as protocol
from narrowcast.distributed.protocols.mesh import Mesh
from narrowcast.distributed.stats import span
from narrowcast.distributed.transport.group import Group, group_for
from narrowcast.distributed.transport.work import Work
from narrowcast.errors import ShapeError


def all_reduce_over_mesh(
    tensor: Tensor, op: Any, group: DeviceMesh, async_op: bool, codec: Any, local_codec: Any, seed: int | None
) -> Work | None:
    """`all_reduce` where `group` is a mesh."""
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
    operands, mesh = Operands(tensor), _mesh_of(group, target.device)
    data = operands.write(target)
    words = f"{arguments.in_common(target)}, numel={target.numel()}, op={name}, local_codec={near.spec}"

    def job() -> list[Tensor]:
        with span("narrowcast::all_reduce"), torch.no_grad():
            protocol.all_reduce(mesh, data.view(-1), divisor, near=near, far=far, seeds=seeds, words=words)
            operands.copy_back()
        return operands.written

    return _group_of_meshes(target.device).lane.start("all_reduce", job, operands.touched, async_op)


def refuse_to_mesh(given: DeviceMesh, device: torch.device, error: BaseException) -> None:
    """Take part in an all_reduce over a mesh by failing it, in its turn."""
    if given.ndim != 2 or given.size() == 1 or given.get_coordinate() is None:
        return
    mesh = _mesh_of(given, device)

    def job() -> list[Tensor]:
        mesh.give_up(error)
        return []

    _group_of_meshes(device).lane.run_or_queue(Work("all_reduce", job))


def _mesh_of(mesh: DeviceMesh, device: torch.device) -> Mesh:
    between, within = (group_for(mesh.get_group(dim), device, "mesh") for dim in range(2))
    return Mesh(within, between)


def _group_of_meshes(device: torch.device) -> Group:
    """Whose lane all mesh collectives of this process share: they never race with others on the same groups."""
    return group_for(c10d._get_default_group(), device, "mesh")
