"""What lies between ranks, in a few numbers that all of them share.

`measure_link` is a collective that takes about a second. It times what gradients would use, not the network below
it, and all ranks send and receive at once while it does:

- the two-stage reduction of a few elements, which is two trips: `latency_s` is one of them, headers, thread switches
  and Python included;
- a stream of rows between all ranks on the lane's own wire, long enough to fill it: `bandwidth_bytes_per_s`;
- the same two for torch's own all_reduce of the group, its competitor: `step_s` and `ring_bytes_per_s`. gloo and NCCL
  have ways of their own to fill a link, so the one cannot be told from the other.

A time is that of the slowest rank, in the best of a few rounds: what else a machine does can only add. `slowest` hands
every rank the same float64 numbers, bit for bit: what is decided from them alone is decided alike on all ranks.

`link_on_paper` stands in where there is nothing to measure yet.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from narrowcast.codecs import Codec
from narrowcast.codecs import codec as as_codec
from narrowcast.distributed import arguments
from narrowcast.distributed.collective import Collective, Operands
from narrowcast.distributed.protocols import two_stage
from narrowcast.distributed.protocols.mesh import Mesh
from narrowcast.distributed.transport.agreement import Call
from narrowcast.distributed.transport.group import Group, group_for
from narrowcast.errors import CollectiveError

ROUNDS = 3
"""Of every time, so many are taken."""

STREAM_S = 0.15
"""A stream of rows takes about so long. In 50 ms TCP has not found its share of the link yet: 4 ranks at 100 Mbit/s got
67 to 84% of it where they had 88% in 0.2 s."""

MOST_LOCAL = 1 << 21
"""Elements that are added up within hosts at most, to time it."""

FIRST_BYTES, MOST_BYTES = 1 << 18, 1 << 27
"""What a rank sends in the first stream, and at most. The first takes 21 ms at 100 Mbit/s."""

PAYLOAD = 0.95
"""The share of a link's bits that is left for rows: 1,448 bytes of every frame of 1,514 to 1,538."""

MESSAGE_S = {"cpu": 130e-6, "cuda": 5e-6}
"""What a row to a peer and one from it take a rank's processor, and about what a step takes gloo's: half of what the
processor time of a small all_reduce grew by with every rank, from 4 to 16 (a Xeon); 110 to 136 us with 64 and 256 ranks
(bench/results/scale.md); 160 to 200 us with coding, on two cores that others used, too (bench/results/messages.md).
NCCL: assumed."""

LOCAL_BITS_PER_S = {"cpu": 10e9, "cuda": 1000e9}
"""Assumed, where a plan on paper is not told: loopback and adding up by gloo's ranks, and NVLink."""

FEW = 64
"""Elements for each rank of a tensor whose bytes cost nothing."""


@dataclass(frozen=True)
class Link:
    """A rank's connection to all others, which it uses both ways at once. Seconds, and bytes a second."""

    latency_s: float
    """One trip: a small row to each of the others, and one from each."""
    bandwidth_bytes_per_s: float
    """Of large rows, to all others together."""
    message_s: float = 0.0
    """What each row takes the processor, beside the wire: on paper; a measured latency holds it already."""
    step_s: float | None = None
    """One of the 2(N-1) steps of the ring; None: as a trip with one row."""
    ring_bytes_per_s: float | None = None
    """Of the ring; None: as `bandwidth_bytes_per_s`."""
    overlap: float = 1.0
    """How much of encoding and decoding happens while rows are on their way, where there are chunks enough."""
    local_bytes_per_s: float | None = None
    """Of rows between the ranks of a host, adding up included, where several share one."""
    drag: float = 1.0
    """How many times longer a reduction takes than its coding and its wire together, where these get in each other's
    way: on a link that is as fast as memory, both want the same cores and caches."""

    def ring_s(self, nbytes: int, ranks: int) -> float:
        """The time of torch's own all_reduce of so many bytes, if it is a ring."""
        step = self.latency_s + self.message_s if self.step_s is None else self.step_s
        share = 2 * (ranks - 1) / ranks
        return 2 * (ranks - 1) * step + share * nbytes / (self.ring_bytes_per_s or self.bandwidth_bytes_per_s)


def link_on_paper(
    bits_per_s: float,
    latency_s: float = 50e-6,
    device: torch.device | str = "cpu",
    *,
    places: int = 1,
    local_bits_per_s: float | None = None,
) -> Link:
    """A link of so many bits a second each way: what the network needs, and what gloo (cpu) or NCCL (cuda) adds.

    `places` ranks share it, as those of a host do, and reach each other at `local_bits_per_s`. A ring crosses each
    link once, whoever shares it.
    """
    kind = "cuda" if torch.device(device).type == "cuda" else "cpu"
    rate = bits_per_s / 8 * PAYLOAD
    if places == 1:
        return Link(latency_s, rate, message_s=MESSAGE_S[kind])
    local = (local_bits_per_s or LOCAL_BITS_PER_S[kind]) / 8
    return Link(latency_s, rate / places, message_s=MESSAGE_S[kind], ring_bytes_per_s=rate, local_bytes_per_s=local)


def measure_link(
    group: dist.ProcessGroup | None = None,
    device: torch.device | str = "cpu",
    *,
    dtype: torch.dtype = torch.float32,
    purpose: str = "collectives",
    mesh: Mesh | None = None,
) -> Link:
    """Measure the link between the ranks of `group`, for tensors on `device`; every rank gets the same numbers.

    `dtype` is what torch's all_reduce sends, `purpose` says whose lane and wire are used. Where ranks share hosts,
    rows are those between the hosts of a `mesh`, of all places at once. All ranks of the group must call it, as for any
    collective.
    """
    where = torch.device(device)
    members = members_of(group, "measure_link")
    ranks = group_for(members, where, purpose)
    between = ranks if mesh is None else mesh.between
    few = torch.zeros(FEW * ranks.size, dtype=torch.float32, device=where)
    trips = timed(ranks, lambda: average(between, few, as_codec("raw")), rounds=5, warm_up=True)
    rate = _row_rate(ranks, between)
    hops = 2 * (ranks.size - 1)
    step = timed(ranks, lambda: dist.all_reduce(few, group=members), rounds=5, warm_up=True) / hops
    nbytes = min(int(rate * STREAM_S / 2), MOST_BYTES)
    plain = torch.zeros(max(1, nbytes // dtype.itemsize), dtype=dtype, device=where)
    ring = timed(ranks, lambda: dist.all_reduce(plain, group=members))
    through = max(ring - hops * step, ring / 2)  # the steps of a large ring overlap: they are no more than half of it
    local = None if mesh is None else _local_rate(ranks, mesh.within, min(plain.numel(), MOST_LOCAL))
    of_ring = hops / ranks.size * plain.nbytes / through
    return Link(trips / 2, rate, step_s=step, ring_bytes_per_s=of_ring, local_bytes_per_s=local)


def _local_rate(ranks: Group, within: Group, numel: int) -> float:
    """Bytes a second of rows within hosts, and of adding them up."""
    x = torch.zeros(numel, dtype=torch.float32, device=within.device)
    seconds = timed(ranks, lambda: average(within, x, as_codec("raw")), warm_up=True)
    return 2 * (within.size - 1) / within.size * x.nbytes / seconds


def members_of(group: dist.ProcessGroup | None, what: str) -> dist.ProcessGroup:
    """The group meant, of two ranks or more, with this one among them."""
    members = arguments.members(group, what)
    if members is None:
        raise CollectiveError(f"{what}: this rank is not in the group. Call it on the ranks of the group alone.")
    if members.size() < 2:
        raise CollectiveError(f"{what}: a group of one rank has no link. It takes two ranks or more to measure one.")
    return members


def slowest(group: Group, values: Sequence[float], about: str = "") -> list[float]:
    """The largest that any rank gave of each of `values`: the same bits on every rank. A collective.

    What the values are `about` must be the same on all ranks.
    """
    mine = torch.tensor(values, dtype=torch.float64, device="cpu").view(torch.uint8).to(group.device)
    rows = torch.empty(group.size, mine.numel(), dtype=torch.uint8, device=group.device)
    rows[group.rank] = mine

    def protocol(collective: Collective) -> None:
        collective.agree()
        collective.share(list(rows))

    _launch(group, as_codec("raw"), f"values={len(values)}{about}", protocol, rows)
    largest: list[float] = rows.cpu().view(torch.float64).amax(0).tolist()
    return largest


def timed(group: Group, run: Callable[[], object], *, rounds: int = ROUNDS, warm_up: bool = False) -> float:
    """The slowest rank's seconds of a collective, in the best round. Before each round, ranks meet."""
    times = []
    for turn in range(rounds + warm_up):
        slowest(group, [0.0])  # ranks that start together, to within a trip
        start = time.perf_counter()
        run()
        finish(group.device)
        if turn >= warm_up:
            times.append(time.perf_counter() - start)
    return min(slowest(group, times))


def average(group: Group, flat: Tensor, codec: Codec) -> None:
    """The two-stage reduction of `flat` [numel], on the wire that is measured."""

    def protocol(collective: Collective) -> None:
        two_stage.all_reduce_rows(collective, flat, collective.size)

    _launch(group, codec, f"numel={flat.numel()}", protocol, flat)


def finish(device: torch.device) -> None:
    """Wait until a device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _row_rate(everyone: Group, group: Group) -> float:
    """Bytes a second of rows from each rank of `group` to its others, while all such groups of `everyone` send."""
    nbytes, rates = FIRST_BYTES, list[float]()
    while len(rates) < ROUNDS:
        row = max(1, min(two_stage.ROW_BYTES, nbytes // (group.size - 1)))
        count = max(1, nbytes // (row * (group.size - 1)))
        sent = count * row * (group.size - 1)
        seconds = slowest(everyone, [_stream_s(group, row, count)])[0]
        if seconds >= STREAM_S / 2 or nbytes >= MOST_BYTES:
            rates.append(sent / seconds)
        else:
            nbytes = min(int(nbytes * min(16.0, STREAM_S / seconds)) + 1, MOST_BYTES)
    return max(rates)


def _stream_s(group: Group, nbytes: int, count: int) -> float:
    """Seconds for `count` rows of `nbytes` to each of the others, and as many from each."""
    row = torch.zeros(nbytes, dtype=torch.uint8, device=group.device)
    inbox = torch.empty(2, group.size, nbytes, dtype=torch.uint8, device=group.device)
    seconds = 0.0

    def protocol(collective: Collective) -> None:
        nonlocal seconds
        collective.agree()
        start = time.perf_counter()
        coming = [collective.wire.expect(list(rows)) for rows in inbox[:count]]
        for i in range(count):
            for peer in collective.targets:
                collective.send(row, peer)
            for _ in coming[i]():
                pass
            if i + 2 < count:
                coming.append(collective.wire.expect(list(inbox[i % 2])))
        collective.wire.flush()
        finish(group.device)
        seconds = time.perf_counter() - start

    _launch(group, as_codec("raw"), f"row={nbytes}, count={count}", protocol, inbox)
    return seconds


def _launch(group: Group, codec: Codec, words: str, protocol: Callable[[Collective], None], written: Tensor) -> None:
    call = Call("measure_link", codec, words)
    Collective(group, call, protocol).launch(Operands(written), async_op=False)
