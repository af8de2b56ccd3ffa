"""`narrowcast codecs`: every codec, with its size and error measured."""

from __future__ import annotations

import json
import math
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from narrowcast.cli.shared.tables import show_table


def codecs(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List every codec: bits, block, bytes per element, and its signal-to-noise ratio on Gaussian data.

    Example: narrowcast codecs --json
    """
    rows = catalogue()
    if as_json:
        print(json.dumps(rows))
        return
    table = Table("codec")
    for heading in ("bits", "block", "bytes per element", "SQNR, dB"):
        table.add_column(heading, justify="right")
    for row in rows:
        size, ratio = f"{row['bytes_per_element']:.4f}", row["sqnr_db"]
        cells = str(row["codec"]), str(row["bits"]), str(row["block"] or "-"), size
        table.add_row(*cells, "exact" if ratio is None else f"{ratio:.1f}")
    console = Console()
    show_table(table, console)
    console.print(
        "Measured on 262,144 Gaussian numbers in fp32; bytes include the scales. Options follow a colon: int4:block=64."
    )


def catalogue() -> list[dict[str, object]]:
    """The rows of the table, one mapping per codec. An exact codec has no ratio, because JSON has no infinity."""
    import torch

    import narrowcast as nc
    from narrowcast.codecs.sensitivity import decibels

    x = torch.randn(1 << 18, dtype=torch.float32, device="cpu", generator=torch.Generator().manual_seed(0))
    energy = x.double().square().sum()
    rows: list[dict[str, object]] = []
    for name in nc.list_codecs():
        codec = nc.codec(name)
        payload = nc.encode(x, codec)
        row = {"codec": name, "bits": codec.bits, "block": codec.block, "bytes_per_element": payload.nbytes / x.numel()}
        ratio = decibels(float((x - nc.decode(payload)).double().square().sum() / energy))
        rows.append({**row, "sqnr_db": ratio if math.isfinite(ratio) else None})
    return rows
