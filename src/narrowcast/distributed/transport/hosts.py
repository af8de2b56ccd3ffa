"""Who shares a host, as torchrun tells it.

torchrun gives every rank LOCAL_WORLD_SIZE, the ranks of its host, and GROUP_RANK, the number of its host. A rank knows
its own values only, and hosts may differ. So every rank hands over a line (`mine`), and all of them derive the same
hosts from the same lines (`hosts_of`).
"""

from __future__ import annotations

import os
from collections.abc import Sequence

Hosts = tuple[tuple[int, ...], ...]
"""The ranks of each host, by their numbers in the group. All hosts have as many: two or more."""


def mine() -> str:
    """What this rank knows of its host."""
    return f"{_number('LOCAL_WORLD_SIZE')} {_number('GROUP_RANK')}"


def _number(variable: str) -> str:
    value = os.environ.get(variable, "")
    return value if value.isdecimal() else "-"


def may_have_hosts(ranks: int) -> bool:
    """Whether so many ranks can be two hosts or more, with as many ranks on each: two or more."""
    return any(ranks % each == 0 for each in range(2, ranks // 2 + 1))


def hosts_of(lines: Sequence[str]) -> Hosts | None:
    """The hosts of ranks that said these lines; None for one host, one rank a host, uneven or unknown ones."""
    said = [line.split(" ") for line in lines]
    if any(local == "-" for local, _ in said):
        return None
    hosts = _by_number(said) if all(number != "-" for _, number in said) else _side_by_side(said)
    sizes = {len(host) for host in hosts}
    right = all(int(said[rank][0]) == len(host) for host in hosts for rank in host)
    return hosts if right and len(hosts) > 1 and len(sizes) == 1 and min(sizes) > 1 else None


def _by_number(said: Sequence[Sequence[str]]) -> Hosts:
    numbers = dict.fromkeys(number for _, number in said)
    return tuple(tuple(rank for rank, (_, other) in enumerate(said) if other == number) for number in numbers)


def _side_by_side(said: Sequence[Sequence[str]]) -> Hosts:
    """Without numbers: hosts one after the other, as launchers count ranks."""
    hosts, start = [], 0
    while start < len(said):
        end = min(len(said), start + max(1, int(said[start][0])))
        hosts.append(tuple(range(start, end)))
        start = end
    return tuple(hosts)
