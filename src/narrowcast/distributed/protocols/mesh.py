"""all_reduce over a mesh of hosts: full precision where links are fast, the codec where they are slow.

1. The ranks of a host reduce-scatter: each of them owns a part of the host's sum, in fp32.
2. Each part is summed over the hosts, in the codec, by the two-stage reduction. A rank sends 1/local of the tensor.
3. The ranks of a host all-gather the parts.

The first and the last phase use a codec that loses nothing of the tensor's dtype, unless a local codec is given. Each
phase is a collective of its own group (phases.py). Over gloo a part travels in chunks: while one is between hosts,
later ones are summed within the host, and earlier ones gathered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from narrowcast.codecs import Codec
from narrowcast.distributed.collective import Collective
from narrowcast.distributed.encoder import EXACT, derive_seed
from narrowcast.distributed.protocols import one_way, phases, pipeline, two_stage
from narrowcast.distributed.protocols.phases import Progress
from narrowcast.distributed.protocols.pipeline import Chunk, Segment, reduce
from narrowcast.distributed.transport.agreement import Call
from narrowcast.distributed.transport.group import Group
from narrowcast.distributed.transport.hosts import Hosts
from narrowcast.distributed.transport.lane import Lane
from narrowcast.distributed.transport.refusal import Refusing
from narrowcast.kernels.reference import casts

CHUNK, HOST_CHUNK = 1 << 20, 1 << 16
"""Elements of a part that travel together; with more than 16 hosts, as many as make so many for each, since each host's
share of them is a message. They decide who owns an element, and so the last bits of a sum. Of 2**17 to 2**21, tried on
32 MB with two hosts of two ranks on two cores, 2**20 took the least time at 1 Gbit/s, and about the least at 250 Mbit/s
(bench/results/hosts.md)."""


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


def all_reduce(
    mesh: Mesh, flat: Tensor, divisor: int, *, near: Codec, far: Codec, seeds: tuple[int, int], words: str
) -> None:
    """Sum `flat` [numel] over all ranks of a mesh, in place: `near` is the codec within hosts, `far` between them."""
    parts = flat.split(two_stage.split(flat.numel(), mesh.within.size))
    as_is, lossy = near == EXACT.get(flat.dtype), near not in EXACT.values()
    with mesh.giving_up("all_reduce"):
        reduction = _Reduction(mesh, parts, divisor, as_is=as_is, lossy=lossy)
    in_host = Call("all_reduce within hosts", near, words)
    of_hosts = Call("all_reduce between hosts", far, f"{words}, ranks={divisor}")
    within, between, part = mesh.within, mesh.between, parts[mesh.within.rank]
    others = (flat.numel() - len(part)) * part.element_size()
    ring = 2 * 4 * len(part) * (between.size - 1) // between.size
    gathered = len(part) * part.element_size() * (within.size - 1)
    near_seed, far_seed = seeds
    each = [
        Collective(within, in_host, reduction.within, plain_bytes=others, seed=derive_seed(near_seed, 0)),
        Collective(between, of_hosts, reduction.between, plain_bytes=ring, seed=derive_seed(far_seed, 1)),
        Collective(within, in_host, reduction.gather, plain_bytes=gathered, seed=derive_seed(near_seed, 2)),
    ]
    phases.run(each, "all_reduce", (reduction.summed, reduction.averaged))


class _Reduction:
    """The protocols of the three phases. `parts` are those of the tensor, one for each place on a host.

    `as_is` says that parts travel within hosts as they are in memory, `lossy` that their codec loses something: then
    they are not cut into chunks.
    """

    def __init__(self, mesh: Mesh, parts: Sequence[Tensor], divisor: int, *, as_is: bool, lossy: bool) -> None:
        self.mesh, self.parts, self.divisor = mesh, parts, divisor
        self.as_is, self.lossy = as_is, lossy
        self.rank, self.part = mesh.within.rank, parts[mesh.within.rank]
        self.mine = torch.empty_like(self.part, dtype=torch.float32)
        """The sums of the host, and then those of all, of this rank's part."""
        most = max(1, len(parts[0])) if mesh.nccl else max(CHUNK, HOST_CHUNK * mesh.between.size)
        self.cuts = [slice(start, start + most) for start in range(0, max(1, len(parts[0])), most)]
        """The chunks of every part: the first part is the longest."""
        here = mesh.within.ranks[self.rank]
        self.summed, self.averaged = Progress(len(self.cuts), here), Progress(len(self.cuts), here)

    def within(self, collective: Collective) -> None:
        """Sum the parts of the host's ranks, each at its owner."""
        if collective.size == 1:
            self.mine.copy_(casts.to_float32(self.part))
        elif self.lossy:
            two_stage.reduce_scatter(collective, self.parts, self.mine, 1)
        else:
            reduce(collective, [_SummedChunk(self, collective, i) for i in range(len(self.cuts))])

    def between(self, collective: Collective) -> None:
        """Sum this rank's part over the hosts."""
        if collective.size == 1:
            self.mine.div_(self.divisor)
        elif collective.wire.together:
            two_stage.all_reduce(collective, self.mine, self.divisor)
        else:
            reduce(collective, [_SharedChunk(self, collective, i) for i in range(len(self.cuts))])
            return
        self.keep(slice(None))

    def keep(self, cut: slice) -> None:
        """Write the sums of all hosts over a chunk of this rank's part."""
        self.part[cut].copy_(casts.cast_output(self.mine[cut], self.part.dtype))

    def gather(self, collective: Collective) -> None:
        """Pass the parts on within the host."""
        if collective.size > 1 and self.as_is and self.parts[0].nbytes > collective.wire.eager:
            pipeline.run([_FinishedChunk(self, collective, i) for i in range(len(self.cuts))])
        elif collective.size > 1:
            self.averaged.wait(len(self.cuts))
            rows = [each[None] for each in self.parts]
            one_way.all_gather(collective, rows, rows[self.rank])


class _SummedChunk(Chunk):
    """A chunk of every part, on its way to the places on the host that sum it."""

    def __init__(self, reduction: _Reduction, collective: Collective, index: int) -> None:
        self._summed, self._end, cut = reduction.summed, index + 1, reduction.cuts[index]
        parts, sums = [part[cut] for part in reduction.parts], [reduction.mine[cut]] * collective.size
        segments = [Segment(collective.encoder, parts, sums, index)]
        super().__init__(collective, segments, index, 1, keep_sums=True, from_memory=True)

    def receive(self) -> None:
        super().receive()
        self._summed.reach(self._end)


class _SharedChunk(Chunk):
    """A chunk of this rank's part, on its way through the reduction between hosts."""

    def __init__(self, reduction: _Reduction, collective: Collective, index: int) -> None:
        self._reduction, self._index = reduction, index
        flat = reduction.mine[reduction.cuts[index]]
        parts = flat.split(two_stage.split(len(flat), collective.size))
        super().__init__(collective, [Segment(collective.encoder, parts, key=index)], index, reduction.divisor)

    def prepare(self) -> None:
        self._reduction.summed.wait(self._index + 1)

    def finish(self) -> None:
        super().finish()
        self._reduction.keep(self._reduction.cuts[self._index])
        self._reduction.averaged.reach(self._index + 1)


class _FinishedChunk:
    """A chunk of every part, on its way from its owner to the others of the host, as it is in memory."""

    def __init__(self, reduction: _Reduction, collective: Collective, index: int) -> None:
        self._collective, self._averaged, self._end = collective, reduction.averaged, index + 1
        self._rows = [part[reduction.cuts[index]].view(torch.uint8) for part in reduction.parts]

    def open(self) -> None:
        self._collective.agree()

    def expect(self) -> None:
        self._arrive = self._collective.wire.expect(self._rows)

    def send(self) -> None:
        self._averaged.wait(self._end)
        self._collective.send_to_all(self._rows[self._collective.rank])

    def receive(self) -> None:
        for _ in self._arrive():
            pass

    def finish(self) -> None:
        """Nothing comes back."""
