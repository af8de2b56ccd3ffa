"""`narrowcast doctor --group`: every pair of ranks, measured; the matrix on rank 0, and the link that is slow."""

from __future__ import annotations

import json
import socket
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from narrowcast.cli.shared.failing import refuse
from narrowcast.cli.shared.launched import rank, world
from narrowcast.cli.shared.tables import show_table

if TYPE_CHECKING:
    from narrowcast.distributed.planning.pairs import Pairs

MOST_COLUMNS = 16
"""Ranks whose matrix is printed; of more, only what is slow."""


def examine_group(as_json: bool) -> None:
    """Measure, and print on rank 0."""
    if world() < 2:
        refuse(
            "--group measures the links between ranks, and this is a single process. Start it on every host: "
            "torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint host0:29500 --no-python "
            "narrowcast doctor --group"
        )
    pairs, hosts = _measure()
    if rank() == 0:
        from narrowcast.distributed.planning.pairs import find_slow

        slow = find_slow(pairs)
        if as_json:
            told = {"hosts": hosts, "bytes_per_s": pairs.bytes_per_s, "latency_s": pairs.latency_s, "slow": slow}
            print(json.dumps(told))
        else:
            _show(pairs, hosts, slow, Console())


def _measure() -> tuple[Pairs, list[str]]:
    import torch.distributed as dist

    from narrowcast.distributed.planning.pairs import measure_pairs

    dist.init_process_group("gloo")
    try:
        hosts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(hosts, socket.gethostname())
        return measure_pairs(), hosts
    finally:
        dist.destroy_process_group()


def _show(pairs: Pairs, hosts: list[str], slow: list[str], console: Console) -> None:
    size = len(hosts)
    for host in dict.fromkeys(hosts):
        there = ", ".join(str(i) for i, name in enumerate(hosts) if name == host)
        console.print(f"{host}: rank{'s' if hosts.count(host) > 1 else ''} {there}", highlight=False, markup=False)
    if size <= MOST_COLUMNS:
        for title, matrix, scale in (
            ("MB/s, from the rank of a line to that of a column", pairs.bytes_per_s, 1e-6),
            ("latency, ms one way", pairs.latency_s, 1e3),
        ):
            console.print(title, highlight=False, markup=False)
            table = Table("", *map(str, range(size)))
            for i, values in enumerate(matrix):
                cells = ("" if i == j else _digits(value * scale) for j, value in enumerate(values))
                table.add_row(str(i), *cells)
            show_table(table, console)
    else:
        console.print(f"{size} ranks: the matrix is in --json. Pairs were measured several at a time.", highlight=False)
    for line in slow:
        console.print(f"slow: {line}", style="red", soft_wrap=True, highlight=False, markup=False)
    if not slow:
        alone = "Two ranks have one link, and nothing to compare it with."
        console.print(alone if size == 2 else "No link is slow beside the others.", highlight=False)


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
