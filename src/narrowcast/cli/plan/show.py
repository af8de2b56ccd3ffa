"""How `narrowcast plan` prints a plan: what it was made from, a line for each codec, the choice, and advice."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from narrowcast.cli.shared.tables import show_table
from narrowcast.distributed.planning.prediction import NONE

if TYPE_CHECKING:
    from narrowcast.distributed.planning.advice import Advice
    from narrowcast.distributed.planning.planner import Plan


def show(result: Plan, head: list[str], advice: Advice | None) -> None:
    """Print the plan below the lines of `head`."""
    console = Console()
    console.print("\n".join(head) + "\n", highlight=False, markup=False, soft_wrap=True)
    plain = next(p for p in result.predictions if p.codec == NONE)
    by = "a host" if by_hosts(result) else "a rank"
    counted = bool(result.link.message_s)
    names = ["wire, s", *(["messages, s"] if counted else []), "coding, s", "all, s", "speedup", ""]
    table = Table("codec", f"MB a step, sent by {by}", *names)
    for p in result.predictions:
        times = [f"{p.wire_seconds:.3g}", *([f"{p.message_seconds:.3g}"] if counted else []), f"{p.coding_seconds:.3g}"]
        mark = "chosen" if p.codec == result.chosen else ""
        end = [f"{p.seconds:.3g}", f"{plain.seconds / p.seconds:.2f}", mark]
        table.add_row(p.codec, digits(p.bytes / 1e6), *times, *end, style="bold" if mark else None)
    show_table(table, console)
    for line in [result.reason, *advice_lines(advice)]:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def advice_lines(advice: Advice | None) -> list[str]:
    """What would make it shorter, in sentences."""
    if advice is None:
        return []
    added = f"{advice.overhead_seconds:.3g} s"
    lines = [f"Messages and trips add {added} to what bytes and coding take, and fewer bits do not help there."]
    if advice.bucket_mb is not None:
        lines.append(
            f"Larger buckets do: DDP(..., bucket_cap_mb={advice.bucket_mb}) takes {advice.bucket_seconds:.3g} s a step "
            f"(--bucket-mb {advice.bucket_mb})."
        )
    lines.append(
        f"So do fewer meetings: {advice.micro_batches} micro-batches added up under no_sync(), then sent, take "
        f"{advice.micro_batch_seconds:.3g} s for each."
    )
    return lines


def link_line(result: Plan, live: bool, device: str, unequal: str) -> str:
    """The link, in the numbers that everything follows from."""
    link = result.link
    parts = [
        f"link, {'measured' if live else 'on paper'}: {digits(link.bandwidth_bytes_per_s / 1e6)} MB/s{unequal}",
        f"{digits(link.latency_s * 1e6)} us a trip",
    ]
    if link.message_s:
        whose = "NCCL (assumed)" if device == "cuda" else "gloo's threads (measured with up to 256 ranks)"
        parts.append(f"{digits(link.message_s * 1e6)} us a message for {whose}")
    if link.local_bytes_per_s is not None:
        parts.append(
            f"of each rank while its host's share it; within a host {digits(link.local_bytes_per_s / 1e6)} MB/s"
        )
    return ", ".join(parts)


def by_hosts(result: Plan) -> str:
    return f" on {result.hosts} hosts" if 1 < result.hosts < result.ranks else ""


def digits(value: float) -> str:
    """Three digits, without an exponent for large values."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
