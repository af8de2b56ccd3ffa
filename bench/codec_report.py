"""Tables and lines of bench/codec.py, from its results."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.table import Table

OPERATIONS = ("encode", "decode")
Row = dict[str, Any]
HEAD = (
    *("codec", "B/elem", "dB Gauss", "dB Laplace", "dB grads", "enc GB/s", "xcopy", "share", "new", "dec GB/s"),
    *("xcopy", "share", "sum4", "reduce4", "enc us", "dec us", "target"),
)


def cells(row: Row) -> list[str]:
    parts = [row["codec"], f"{row['bytes']:.4f}", *(f"{value:.1f}" for value in row["sqnr"].values())]
    for name in OPERATIONS:
        one = row[name]
        parts += [f"{one['GB/s']:.1f}", f"{one['xcopy']:.2f}", f"{one['share']:.0%}"]
        parts += [f"{row['new']:.2f}"] if name == "encode" else []
    parts += [f"{row['sum4']:.2f}", f"{row['reduce4']:.2f}", *(f"{value:.1f}" for value in row["small"])]
    return [*parts, verdict(row)]


COMPETITOR_HEAD = ("competitor", "B/elem", "dB Gauss", "enc GB/s", "xcopy", "dec GB/s", "xcopy")


def competitor_cells(row: Row) -> list[str]:
    times = [cell for what in OPERATIONS for cell in (f"{row[what]['GB/s']:.2f}", f"{row[what]['xcopy']:.2f}")]
    return [row["codec"], f"{row['bytes']:.4f}", f"{row['sqnr']:.1f}", *times]


def verdict(row: Row) -> str:
    return f"over: {', '.join(row['over'])}" if row["over"] else "ok"


def rest(results: Row) -> Iterator[str]:
    """The lines below the table."""
    for row in results["competitors"]:
        if "error" in row:
            yield f"competitor {row['codec']}: did not run ({row['error']})"
    for row in results["two threads"]:
        both = [f"{what} {row[what]:.2f}x" for what in OPERATIONS]
        yield f"two threads over one, {row['codec']}: {', '.join(both)} ({verdict(row)})"
    yield "targets: int8, int4, bf16 <= 1.0 xcopy, others <= 1.5; sum4 <= 1.5; 1,000 floats < 15 us; 2 threads beat 1"
    missed = sum(bool(row["over"]) for row in results["codecs"] + results["two threads"])
    yield f"{missed} rows over a target" if missed else "every target met"


def markdown(results: Row) -> str:
    lines = ["# Codecs on the CPU", "", *(f"- {key}: {value}" for key, value in results["machine"].items()), ""]
    lines += ["| " + " | ".join(HEAD) + " |", "|---|" + "---:|" * (len(HEAD) - 2) + "---|"]
    lines += ["| " + " | ".join(cells(row)) + " |" for row in results["codecs"]]
    lines += ["", "| " + " | ".join(COMPETITOR_HEAD) + " |", "|---|" + "---:|" * (len(COMPETITOR_HEAD) - 1)]
    lines += ["| " + " | ".join(competitor_cells(row)) + " |" for row in results["competitors"] if "error" not in row]
    return "\n".join([*lines, "", *(f"- {line}" for line in rest(results)), ""])


def pretty(rows: list[Row]) -> Table:
    table = Table()
    for name in HEAD:
        table.add_column(name, justify="left" if name in (HEAD[0], HEAD[-1]) else "right", no_wrap=name == HEAD[0])
    for row in rows:
        table.add_row(*cells(row), style="red" if row["over"] else None)
    return table


def pretty_competitors(rows: list[Row]) -> Table:
    table = Table()
    for name in COMPETITOR_HEAD:
        table.add_column(name, justify="left" if name == "competitor" else "right")
    for row in rows:
        if "error" not in row:
            table.add_row(*competitor_cells(row))
    return table
