"""What a run leaves: a small table for people, and the same figures in JSON for benchmarks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rich.table import Table

from . import tcp
from .counters import Counters
from .network import Network
from .supervise import Ended, described

MADE_BY = {
    "netem": "by the kernel's netem",
    "line": "by a line in user space",
}


def headline(network: Network) -> str:
    made_by = [MADE_BY[network.delay_by]] if network.delay_by in MADE_BY else []
    how = [_links(network), *made_by]
    count = network.ranks
    shared = f", {network.per_host} on each host" if network.per_host > 1 else ""
    return f"{count} rank{'s' if count > 1 else ''}{shared}, {', '.join(how)}, TCP {network.tcp or tcp.current()}"


def _links(network: Network) -> str:
    """What the links are like; where they differ, whose is whose."""
    users: dict[str, list[int]] = {}
    for number, link in enumerate(network.links):
        users.setdefault(str(link), []).append(number)
    if len(users) == 1:
        return next(iter(users))
    whose = "host" if network.per_host > 1 else "rank"
    named = ((f"{whose}{'s' if len(who) > 1 else ''} {', '.join(map(str, who))}", link) for link, who in users.items())
    return "; ".join(f"{who}: {link}" for who, link in named)


def summary(network: Network, counters: list[Counters], ended: Mapping[int, Ended], code: int) -> dict[str, Any]:
    """The shape of `--json`. Seconds and codes are null for a rank that netlab did not see end.

    Bytes and packets are those of a rank's host: where ranks share one, each shows the same.
    """
    rows = []
    for rank in range(network.ranks):
        end, host = ended.get(rank), rank // network.per_host
        row = {"rank": rank, "host": host, "address": network.addresses[host], **asdict(counters[host])}
        rows.append({**row, "seconds": end and round(end.seconds, 3), "exit_code": end and end.code})
    return {
        "ranks": len(rows),
        "per_host": network.per_host,
        "rate_bits_per_second": _one([link.rate for link in network.links]),
        "delay_seconds": _one([link.delay for link in network.links]),
        "loss": network.links[0].loss,
        "delay_by": network.delay_by,
        "tcp": network.tcp or tcp.current(),
        "exit_code": code,
        "per_rank": rows,
    }


def _one(values: list[Any]) -> Any:
    """The value that all ranks have, or the list of them."""
    return values[0] if len(set(values)) == 1 else values


def table(results: Mapping[str, Any]) -> Table:
    what = "rank" if results["per_host"] == 1 else "rank (bytes and packets: of its host)"
    shown = Table(what, "sent", "received", "packets", "dropped", "seconds", "end")
    for column in shown.columns[1:-1]:
        column.justify = "right"
    for row in results["per_rank"]:
        packets, dropped = (f"{row[f'tx_{what}']:,} / {row[f'rx_{what}']:,}" for what in ("packets", "dropped"))
        code, seconds = row["exit_code"], row["seconds"]
        end = "did not run" if code is None else described(code) if code else "ok"
        shown.add_row(
            str(row["rank"]),
            *(f"{row[key] / 1e6:,.2f} MB" for key in ("tx_bytes", "rx_bytes")),
            *(packets, dropped, "-" if seconds is None else f"{seconds:.1f}", end),
            style=None if code == 0 else "red",
        )
    return shown
