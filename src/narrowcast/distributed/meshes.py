"""Hosts with several ranks each: the groups of a mesh, and all_reduce over one. protocols/mesh.py says what is sent.

A mesh is given as a 2-D DeviceMesh (hosts x local), or follows from where torchrun has started the ranks of the default
group (transport/hosts.py). What ranks know of their hosts they tell each other in the store, once, in the first
collective that asks: a meeting of all ranks, as every first collective is.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from narrowcast.codecs import Codec
from narrowcast.codecs import codec as as_codec
from narrowcast.distributed import arguments
from narrowcast.distributed.collective import Collective, Operands, seed_for
from narrowcast.distributed.encoder import lossless
from narrowcast.distributed.protocols import mesh as protocol
from narrowcast.distributed.protocols.mesh import Mesh
from narrowcast.distributed.stats import span
from narrowcast.distributed.transport import hosts
from narrowcast.distributed.transport.agreement import Call
from narrowcast.distributed.transport.failures import attempt
from narrowcast.distributed.transport.group import Group, group_for, subset_for
from narrowcast.distributed.transport.hosts import Hosts
from narrowcast.distributed.transport.lane import Lane
from narrowcast.distributed.transport.work import Work
from narrowcast.errors import ShapeError

_hosts: weakref.WeakKeyDictionary[Group, Hosts | None] = weakref.WeakKeyDictionary()
"""Of groups whose ranks have told each other. Each lane asks for itself: lanes know no order among each other."""


# -- hosts as torchrun knows them -------------------------------------------------------------------------------------


def find_hosts(members: dist.ProcessGroup, group: Group) -> None:
    """Find out who shares a host, once; in a job of the lane of `group`, the same ranks as `members`."""
    if group not in _hosts and hosts.may_have_hosts(members.size()):
        lines: list[str] = []

        def protocol(collective: Collective) -> None:
            store: Any = dist.PrefixStore(f"narrowcast/{attempt()}/hosts", c10d._get_process_group_store(members))
            store.set(str(collective.rank), hosts.mine())
            collective.agree()  # now everyone has written
            lines[:] = [line.decode() for line in store.multi_get([str(rank) for rank in range(collective.size)])]

        Collective(group, Call("hosts", as_codec("raw"), ""), protocol, name="finding who shares a host").run()
        _hosts[group] = hosts.hosts_of(lines)


def mesh_of_hosts(members: dist.ProcessGroup, group: Group, purpose: str) -> Mesh | None:
    """The mesh of a group's hosts, as far as they are known; None where the flat form serves."""
    found = _hosts.get(group)
    if found is None:
        return None
    host = next(i for i, ranks in enumerate(found) if group.rank in ranks)
    place = found[host].index(group.rank)
    within = subset_for(members, group.device, f"{purpose} within a host", found[host])
    between = subset_for(members, group.device, f"{purpose} between hosts", [ranks[place] for ranks in found])
    return Mesh(group, within, between, found)


# -- a mesh that is given ---------------------------------------------------------------------------------------------


def check_mesh(given: DeviceMesh, name: str, op: str) -> None:
    if given.ndim != 2:
        raise ShapeError(
            f"{name}: a mesh for {op} has two dimensions, hosts x local, not {given.ndim}. "
            'Make one with init_device_mesh("cpu", (hosts, local)).'
        )


def mesh_of(given: DeviceMesh, device: torch.device, purpose: str, everyone: Group) -> Mesh:
    """The groups of a mesh. A rank's place on its host is its column: those of a column sum the same part."""
    if bool((given.mesh[:, 1:] > given.mesh[:, :-1]).all()):
        between, within = (group_for(given.get_group(dim), device, purpose) for dim in range(2))
        return Mesh(everyone, within, between)
    # torch numbers the ranks of a group in ascending order, which is not that of the columns here.
    host, place = given.get_coordinate() or (0, 0)
    default = c10d._get_default_group()
    within = subset_for(default, device, f"{purpose} of a row", given.mesh[host].tolist())
    between = subset_for(default, device, f"{purpose} of a column", given.mesh[:, place].tolist())
    return Mesh(everyone, within, between)


# -- whatever is given ------------------------------------------------------------------------------------------------

Given = dist.ProcessGroup | DeviceMesh | None
"""None: the default group, by hosts where it has some."""


def size_of(given: Given, op: str) -> int:
    """The ranks of what is given; zero if this one is not among them."""
    if isinstance(given, DeviceMesh):
        return 0 if given.get_coordinate() is None else given.size()
    members = arguments.members(given, op)
    return 0 if members is None else members.size()


def everyone_in(given: Given, device: torch.device, purpose: str) -> Group:
    """All ranks of what is given, as equals."""
    if isinstance(given, DeviceMesh):
        ranks: list[int] = given.mesh.flatten().tolist()
        return subset_for(c10d._get_default_group(), device, f"{purpose} of a mesh", ranks)
    return group_for(given or c10d._get_default_group(), device, purpose)


def meet_hosts(given: Given, group: Group) -> None:
    """Let ranks know of their hosts, where that is asked for. A collective of `group`, which is `everyone_in` it."""
    if given is None:
        members = c10d._get_default_group()

        def job() -> list[Tensor]:
            find_hosts(members, group)
            return []

        group.lane.run("hosts", job)


def ranks_in(given: Given, device: torch.device, purpose: str) -> Group | Mesh:
    """Those who reduce together, once they have met: a mesh of several hosts with several ranks each, or equals."""
    everyone = everyone_in(given, device, purpose)
    if isinstance(given, DeviceMesh):
        return everyone if 1 in given.shape else mesh_of(given, device, purpose, everyone)
    return everyone if given is not None else mesh_of_hosts(c10d._get_default_group(), everyone, purpose) or everyone


def _lane_of_meshes(device: torch.device) -> Group:
    """Whose lane all mesh collectives of this process share: they never race with others on the same groups."""
    return group_for(c10d._get_default_group(), device, "mesh")


# -- all_reduce -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sum:
    """An all_reduce, as its caller wants it: its tensor, what the sum is divided by, the codecs within and between
    hosts, their seeds, and what ranks must agree on."""

    operands: Operands
    data: Tensor
    divisor: int
    near: Codec
    far: Codec
    seeds: tuple[int, int]
    words: str

    @classmethod
    def of(cls, tensor: Tensor, op: Any, ranks: int, codec: Any, local_codec: Any, seed: int | None) -> Sum:
        target = arguments.tensor(tensor, "tensor")
        name, divisor = arguments.reduction(op, ranks, "all_reduce")
        far = as_codec(codec)
        near = lossless(target.dtype) if local_codec is None else as_codec(local_codec)
        seeds = seed_for(near, seed), seed_for(far, seed)
        operands = Operands(tensor)
        words = f"{arguments.in_common(target)}, numel={target.numel()}, op={name}"
        return cls(operands, operands.write(target), divisor, near, far, seeds, words)

    def over(self, mesh: Mesh) -> None:
        """Make it, in a job of the lane."""
        words = f"{self.words}, local_codec={self.near.spec}"
        flat = self.data.view(-1)
        protocol.all_reduce(mesh, flat, self.divisor, near=self.near, far=self.far, seeds=self.seeds, words=words)

    def launch(self, lane: Lane, make: Callable[[], None], async_op: bool) -> Work | None:
        """`make` it in its turn."""

        def job() -> list[Tensor]:
            with span("narrowcast::all_reduce"), torch.no_grad(), self.operands.writing():
                make()
                self.operands.copy_back()
            return self.operands.written

        return lane.start("all_reduce", job, self.operands.touched, async_op)


def all_reduce_over_mesh(wanted: Sum, given: DeviceMesh, async_op: bool) -> Work | None:
    """`all_reduce` where `group` is a mesh."""
    if given.get_coordinate() is None:
        return None
    device = wanted.data.device
    everyone = _lane_of_meshes(device)
    mesh = mesh_of(given, device, "mesh", everyone)
    return wanted.launch(everyone.lane, lambda: wanted.over(mesh), async_op)


def all_reduce_by_hosts(wanted: Sum, members: dist.ProcessGroup, flat: Collective, async_op: bool) -> Work | None:
    """`all_reduce` of the default group: by hosts where it has some, else `flat`."""
    if _hosts.get(flat.group, ()) is None or not hosts.may_have_hosts(members.size()):
        return flat.launch(wanted.operands, async_op)

    def make() -> None:
        find_hosts(members, flat.group)
        mesh = mesh_of_hosts(members, flat.group, "collectives")
        if mesh is None:
            flat.run()
        else:
            wanted.over(mesh)

    return wanted.launch(flat.group.lane, make, async_op)


def refuse_to_mesh(given: DeviceMesh, device: torch.device, error: BaseException) -> None:
    """Take part in an all_reduce over a mesh by failing it, in its turn."""
    if given.ndim == 2 and given.size() > 1 and given.get_coordinate() is not None:
        mesh_of(given, device, "mesh", _lane_of_meshes(device)).refuse("all_reduce", error)


def refuse_by_hosts(members: dist.ProcessGroup, device: torch.device, error: BaseException) -> None:
    """The same for the default group. As long as hosts are not known, the others fail as they ask for them."""
    group = group_for(members, device)

    def job() -> list[Tensor]:
        (mesh_of_hosts(members, group, "collectives") or group).give_up("all_reduce", error)
        return []

    group.lane.run_or_queue(Work("all_reduce", job))
