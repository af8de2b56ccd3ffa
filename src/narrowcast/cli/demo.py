"""`narrowcast demo`: the library working, in a few seconds."""

from __future__ import annotations

from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import track
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Callable

SHOWN = ("raw", "bf16", "fp8_e4m3", "int8", "int6", "int4", "nf4", "apot4", "int3", "int2", "sign")


def demo() -> None:
    """Encode four million normal numbers with several codecs; show bytes, error and speed.

    Example: narrowcast demo
    """
    import torch

    import narrowcast as nc
    from narrowcast.cli.codecs import sqnr

    console = Console()
    console.print(f"narrowcast {nc.__version__} on torch {torch.__version__}, kernel {nc.which_kernel('int8')}\n")
    x = torch.randn(1 << 22, generator=torch.Generator().manual_seed(0))
    out, copy = torch.empty_like(x), torch.empty_like(x)
    limit = _seconds(lambda: copy.copy_(x))
    table = Table("codec", "bytes", "of fp32", "SQNR, dB", "worst error / bound", "encode / copy", "decode / copy")
    for name in track(SHOWN, "encoding", console=console, transient=True):
        payload = nc.encode(x, name)
        y = nc.decode(payload)
        worst = ((x - y).abs() / payload.codec.max_error(x)).max()
        encode = _seconds(lambda name=name: nc.encode(x, name)) / limit  # type: ignore[misc]
        decode = _seconds(lambda payload=payload: nc.decode(payload, out=out)) / limit  # type: ignore[misc]
        size = f"{payload.nbytes:,}", f"{payload.nbytes / x.nbytes:.1%}"
        table.add_row(name, *size, f"{sqnr(x, y):.1f}", f"{worst:.2f}", f"{encode:.2f}", f"{decode:.2f}")
    console.print(table)
    console.print("Times are shares of a plain copy of the fp32 tensor. Next: README.md, or `narrowcast codecs`.")


def _seconds(run: Callable[[], object]) -> float:
    times = []
    for _ in range(5):
        start = perf_counter()
        run()
        times.append(perf_counter() - start)
    return median(times)
