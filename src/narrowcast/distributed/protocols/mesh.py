"""all_reduce over a mesh of hosts: full precision where links are fast, the codec where they are slow.

1. The ranks of a host reduce-scatter: each of them owns a part of the host's sum, in fp32.
2. Each part is summed over the hosts, in the codec, by the two-stage reduction. A rank sends 1/local of the tensor.
3. The ranks of a host all-gather the parts.

The first and the last phase use a codec that loses nothing of the tensor's dtype, unless a local codec is given. Each
phase is a collective of its own group. A rank on which one phase fails gives up the later ones: so every rank of the
mesh learns of the failure, and every rank has made the same number of calls in each of its groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from narrowcast.codecs import Codec
from narrowcast.distributed.collective import Collective
from narrowcast.distributed.encoder import derive_seed, lossless
from narrowcast.distributed.protocols import one_way, two_stage
from narrowcast.distributed.transport.agreement import Call
from narrowcast.distributed.transport.group import Group
from narrowcast.distributed.transport.hosts import Hosts
from narrowcast.distributed.transport.lane import Lane
from narrowcast.distributed.transport.refusal import Refusing
from narrowcast.kernels.reference import casts

EXACT = {dtype: lossless(dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16)}
"""Codecs whose rows are the elements as they are in memory."""


@dataclass(frozen=True)
class Mesh(Refusing):
    """The ranks that this one meets: those of its host, and those in its place on the other hosts.

    `everyone` is all of them, in one group: its lane runs the collectives of the mesh.
    """

    everyone: Group
    within: Group
    between: Group
    hosts: Hosts = ()
    """The ranks of each host, by their numbers in `everyone`."""

    @property
    def size(self) -> int:
        return self.within.size * self.between.size

    @property
    def lane(self) -> Lane:
        return self.everyone.lane

    @property
    def nccl(self) -> bool:
        return bool(self.within.nccl)

    def give_up(self, op: str, error: BaseException) -> None:
        """`refuse`, here and now, from a job of the lane: every phase fails."""
        for group in (self.within, self.between, self.within):
            group.give_up(op, error)


def run(phases: Sequence[Collective], op: str) -> None:
    """Make the phases of one collective, one after the other. Where one fails, so do those after it, on all ranks."""
    for i, phase in enumerate(phases):
        try:
            phase.run()
        except BaseException as error:
            for later in phases[i + 1 :]:
                later.group.give_up(op, error)
            raise


def all_reduce(
    mesh: Mesh, flat: Tensor, divisor: int, *, near: Codec, far: Codec, seeds: tuple[int, int], words: str
) -> None:
    """Sum `flat` [numel] over all ranks of a mesh, in place: `near` is the codec within hosts, `far` between them."""
    parts = flat.split(two_stage.split(flat.numel(), mesh.within.size))
    run(_phases(mesh, parts, divisor, near, far, seeds, words), "all_reduce")


def _phases(
    mesh: Mesh, parts: Sequence[Tensor], divisor: int, near: Codec, far: Codec, seeds: tuple[int, int], words: str
) -> list[Collective]:
    within, between = mesh.within, mesh.between
    part = parts[within.rank]
    mine = torch.empty_like(part, dtype=torch.float32)

    def reduce_within(collective: Collective) -> None:
        if collective.size > 1:
            two_stage.reduce_scatter(collective, parts, mine, 1, in_chunks=near in EXACT.values())
        else:
            mine.copy_(casts.to_float32(parts[0]))

    def reduce_between(collective: Collective) -> None:
        if collective.size > 1:
            two_stage.all_reduce(collective, mine, divisor)
        else:
            mine.div_(divisor)
        part.copy_(casts.cast_output(mine, part.dtype))

    def gather_within(collective: Collective) -> None:
        as_is = near == EXACT.get(part.dtype)
        if collective.size > 1 and as_is and near.row_bytes(len(parts[0])) > collective.wire.eager:
            collective.agree()
            collective.share([each.view(torch.uint8) for each in parts])
        elif collective.size > 1:
            rows = [each[None] for each in parts]
            one_way.all_gather(collective, rows, rows[collective.rank])

    in_host = Call("all_reduce within hosts", near, words)
    of_hosts = Call("all_reduce between hosts", far, f"{words}, ranks={divisor}")
    others = (sum(len(each) for each in parts) - len(part)) * part.element_size()
    ring = 2 * 4 * len(part) * (between.size - 1) // between.size
    gathered = len(part) * part.element_size() * (within.size - 1)
    near_seed, far_seed = seeds
    return [
        Collective(within, in_host, reduce_within, plain_bytes=others, seed=derive_seed(near_seed, 0)),
        Collective(between, of_hosts, reduce_between, plain_bytes=ring, seed=derive_seed(far_seed, 1)),
        Collective(within, in_host, gather_within, plain_bytes=gathered, seed=derive_seed(near_seed, 2)),
    ]
