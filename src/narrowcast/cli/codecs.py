"""`narrowcast codecs`: the catalogue, measured."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from torch import Tensor


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
    console.print(table)
    console.print(
        "Of 262,144 normal numbers in fp32; bytes count the scales. Options go behind a colon: int4:block=64."
    )


def catalogue() -> list[dict[str, object]]:
    """What `narrowcast codecs` prints, one mapping per codec. An exact codec has no ratio: JSON has no infinity."""
    import torch

    import narrowcast as nc

    x = torch.randn(1 << 18, dtype=torch.float32, device="cpu", generator=torch.Generator().manual_seed(0))
    rows: list[dict[str, object]] = []
    for name in nc.list_codecs():
        codec = nc.codec(name)
        payload = nc.encode(x, codec)
        row = {"codec": name, "bits": codec.bits, "block": codec.block, "bytes_per_element": payload.nbytes / x.numel()}
        ratio = sqnr(x, nc.decode(payload))
        rows.append({**row, "sqnr_db": ratio if math.isfinite(ratio) else None})
    return rows


def sqnr(x: Tensor, y: Tensor) -> float:
    """Signal to quantization noise of y against x, in dB."""
    noise = (x - y).double().square().sum()
    return float(10 * (x.double().square().sum() / noise).log10())
