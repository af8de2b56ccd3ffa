"""`narrowcast codecs`: the catalogue, measured."""

from __future__ import annotations

import json
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
    table = Table("codec", "bits", "block", "bytes per element", "SQNR, dB")
    for row in rows:
        table.add_row(*(f"{value:.3g}" if isinstance(value, float) else str(value) for value in row.values()))
    Console().print(table)


def catalogue() -> list[dict[str, object]]:
    """What `narrowcast codecs` prints, one mapping per codec."""
    import torch

    import narrowcast as nc

    x = torch.randn(1 << 18, generator=torch.Generator().manual_seed(0))
    rows: list[dict[str, object]] = []
    for name in nc.list_codecs():
        codec = nc.codec(name)
        payload = nc.encode(x, codec)
        row = {"codec": name, "bits": codec.bits, "block": codec.block, "bytes_per_element": payload.nbytes / x.numel()}
        rows.append({**row, "sqnr_db": sqnr(x, nc.decode(payload))})
    return rows


def sqnr(x: Tensor, y: Tensor) -> float:
    """Signal to quantization noise of y against x, in dB."""
    noise = (x - y).double().square().sum()
    return float(10 * (x.double().square().sum() / noise).log10())
