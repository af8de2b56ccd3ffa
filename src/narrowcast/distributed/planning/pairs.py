"""How fast each pair of ranks is: a matrix of rates, a matrix of latencies, and which link is slow.

`measure_pairs` is a collective. Pairs take turns, so that none shares a link with another; with more than `MOST_ALONE`
ranks, pairs that have no rank in common go at once, since there are too many. It times what gloo carries between two
processes, TCP and all, with messages of torch's own on the group: neither codecs nor narrowcast's lanes have a part in
it. A rank's own place in a matrix is 0.

`find_slow` compares: a rank whose every pair is slow has a slow link; a pair that is slow where both its ranks are fast
with others has one between them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from narrowcast.distributed.planning.link import members_of

MOST_ALONE = 16
PINGS, STREAMS = 10, 3
FIRST_BYTES, MOST_BYTES, LONG_S = 1 << 17, 1 << 26, 0.15
"""A stream is made longer until it takes so many seconds, and then taken once more: TCP needs a while to get going."""

SLOW = 2.0
"""A rate so many times below the others' is slow, or a latency so many times above, and by `SLOW_S` at least."""
SLOW_S = 1e-3


@dataclass(frozen=True)
class Pairs:
    """Between all ranks of a group; `[i][j]` is from i to j. Latencies are one way, and the same both ways."""

    bytes_per_s: list[list[float]]
    latency_s: list[list[float]]


def schedule(size: int) -> list[list[tuple[int, int]]]:
    """Turns of pairs, each pair once. In a turn no rank is in two of them."""
    if size <= MOST_ALONE:
        return [[(i, j)] for i in range(size) for j in range(i + 1, size)]
    seats: list[int | None] = [*range(size), *([None] if size % 2 else [])]
    turns = []
    for _ in range(len(seats) - 1):  # a round robin: the first stays, the others move on by one
        faces = zip(seats[: len(seats) // 2], reversed(seats[len(seats) // 2 :]), strict=True)
        turns.append([(min(a, b), max(a, b)) for a, b in faces if a is not None and b is not None])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return turns


def measure_pairs(group: dist.ProcessGroup | None = None) -> Pairs:
    """Measure every pair of ranks of a group that carries tensors on the CPU; every rank gets the same matrices."""
    members = members_of(group, "measure_pairs")
    rank, size = dist.get_rank(members), members.size()
    measured = torch.zeros(2, size, size, dtype=torch.float64, device="cpu")
    for turn in schedule(size):
        dist.barrier(members)
        for low, high in turn:
            if rank == low:
                latency, there, back = _lead(members, high)
                measured[0, low, high], measured[0, high, low] = there, back
                measured[1, low, high] = measured[1, high, low] = latency
            elif rank == high:
                _follow(members, low)
    dist.all_reduce(measured, group=members)
    rates, latencies = measured.tolist()
    return Pairs(rates, latencies)


def find_slow(pairs: Pairs) -> list[str]:
    """What is slow, in words, the worst first; nothing where there are too few ranks to compare, or all are alike."""
    return [*_slow_rates(pairs.bytes_per_s), *_slow_latencies(pairs.latency_s)]


# -- one pair ---------------------------------------------------------------------------------------------------------


def _lead(group: dist.ProcessGroup, peer: int) -> tuple[float, float, float]:
    """Seconds of a trip, and bytes a second to a peer and from it."""
    byte = torch.zeros(1, dtype=torch.uint8, device="cpu")
    trips = []
    for _ in range(PINGS):
        start = time.perf_counter()
        _send(group, byte, peer)
        _receive(group, byte, peer)
        trips.append((time.perf_counter() - start) / 2)
    latency = min(trips)
    rates = []
    for there in (True, False):
        best, nbytes, left = 0.0, FIRST_BYTES, STREAMS
        while left:
            word = torch.tensor([nbytes if there else -nbytes], dtype=torch.int64, device="cpu")
            _send(group, word, peer)
            data = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
            start = time.perf_counter()
            if there:
                _send(group, data, peer)
                _receive(group, byte, peer)
            else:
                _send(group, byte, peer)
                _receive(group, data, peer)
            seconds = time.perf_counter() - start
            through = max(seconds - 2 * latency, seconds / 2)
            if seconds >= LONG_S or nbytes >= MOST_BYTES:
                best, left = max(best, nbytes / through), left - 1
            else:
                nbytes = min(MOST_BYTES, int(nbytes * min(8.0, 1 + LONG_S / seconds)))
        rates.append(best)
    _send(group, torch.zeros(1, dtype=torch.int64, device="cpu"), peer)
    return latency, rates[0], rates[1]


def _follow(group: dist.ProcessGroup, peer: int) -> None:
    """The other half of `_lead`."""
    byte = torch.zeros(1, dtype=torch.uint8, device="cpu")
    word = torch.zeros(1, dtype=torch.int64, device="cpu")
    for _ in range(PINGS):
        _receive(group, byte, peer)
        _send(group, byte, peer)
    while True:
        _receive(group, word, peer)
        nbytes = int(word)
        data = torch.empty(abs(nbytes), dtype=torch.uint8, device="cpu")
        if nbytes > 0:
            _receive(group, data, peer)
            _send(group, byte, peer)
        elif nbytes < 0:
            _receive(group, byte, peer)
            _send(group, data, peer)
        else:
            return


def _send(group: dist.ProcessGroup, tensor: Tensor, peer: int) -> None:
    dist.send(tensor, group=group, group_dst=peer)


def _receive(group: dist.ProcessGroup, tensor: Tensor, peer: int) -> None:
    dist.recv(tensor, group=group, group_src=peer)


# -- comparing --------------------------------------------------------------------------------------------------------


def _others(size: int, *without: int) -> list[int]:
    return [each for each in range(size) if each not in without]


def _pairs_among(ranks: Sequence[int]) -> Iterator[tuple[int, int]]:
    return ((i, j) for i in ranks for j in ranks if i != j)


def _slow_rates(rates: list[list[float]]) -> list[str]:
    size = len(rates)
    said: list[tuple[float, str]] = []
    slow_ranks: list[int] = []
    for rank in _others(size) if size > 2 else []:
        others = _others(size, rank)
        usual = statistics.median(rates[i][j] for i, j in _pairs_among(others))
        out, into = max(rates[rank][j] for j in others), max(rates[j][rank] for j in others)
        ways = [f"{way} at most {_mb(rate)}" for way, rate in (("sends", out), ("gets", into)) if SLOW * rate < usual]
        if ways:
            slow_ranks.append(rank)
            said.append((min(out, into), f"rank {rank}: {' and '.join(ways)}, where the others have {_mb(usual)}."))
    rest = _others(size, *slow_ranks)
    for i, j in _pairs_among(rest) if len(rest) > 2 else []:
        usual = min(
            max(rates[i][k] for k in rest if k not in (i, j)), max(rates[k][j] for k in rest if k not in (i, j))
        )
        if SLOW * rates[i][j] < usual:
            text = f"from rank {i} to rank {j}: {_mb(rates[i][j])}, where both have {_mb(usual)} with others."
            said.append((rates[i][j], text))
    return [text for _, text in sorted(said)]


def _slow_latencies(latencies: list[list[float]]) -> list[str]:
    size = len(latencies)
    said = []
    for rank in _others(size) if size > 2 else []:
        others = _others(size, rank)
        usual = statistics.median(latencies[i][j] for i, j in _pairs_among(others))
        best = min(latencies[rank][j] for j in others)
        if best > SLOW * usual and best > usual + SLOW_S:
            said.append((-best, f"rank {rank}: {_ms(best)} to the nearest, where the others have {_ms(usual)}."))
    return [text for _, text in sorted(said)]


def _mb(rate: float) -> str:
    return f"{rate / 1e6:.3g} MB/s"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
