"""narrowcast.compat beside what it stands for, in one run.

    PYTHONPATH=src python bench/compat.py              every line below
    ... --only apot,channel,linear,hooks  --rounds 5  --ranks 8  --elements 2000000
    ... --out                                          writes bench/results/compat.json and .md

    apot      quantize_APoT, dequantize_APoT and quant_dequant_APoT at 4 and 8 bits, k=2, beside PyTorch's way, element
              by element in Python on tensors of one number, rewritten from its description and run on 200 elements
    channel   the uint8 codes of 6M elements in channels of 512, beside the loop over channels of PyTorch's own file,
              which torch brings along: with scales given, and from min and max on, as its hook does it
    linear    WeightOnlyInt8Linear at batch 1, beside gpt-fast's formula in eager mode, rewritten from its description
    hooks     both DDP hooks over gloo, one process per rank on this machine, beside their protocol with PyTorch's own
              conversions: as they are, they crash on gloo, so what they gather is read from the lists they gave

A figure is the median over rounds in which both take turns. But for the hooks, time is the processor time of the
calling thread, with one thread, so that other processes count little. (The loops of PyTorch's files use one thread
however many there are.) Of the hooks it is the wall clock's, of the slowest rank. `limit` is what the same run took for
moving the bytes alone: a copy of the input, reading the int8 weights once, and for the hooks gloo's all_reduce of the
fp32 tensor. On a machine by itself the wire costs nothing, so that this is hard to beat; bench/wire.py has links of a
known rate.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.multiprocessing as mp
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import quantization_hooks as theirs

import narrowcast as nc
from compat_hooks import CHANNEL, rank_main
from machine import facts
from narrowcast.compat import apot, gpt_fast
from narrowcast.compat import quantization_hooks as ours

RESULTS = Path(__file__).parent / "results"
FEW, MANY = 200, 1 << 20
ELEMENTS = 6_000_000
SHAPES = ((11008, 4096), (4096, 11008), (4096, 4096))
Work = Callable[[], object]
console = Console(width=max(130, Console().width))


class Line(NamedTuple):
    """Two contenders and what came of them; times in seconds, for the same amount of work."""

    what: str
    unit: str
    theirs: float
    ours: float
    limit: float
    target: float | None = None

    @property
    def ratio(self) -> float:
        return self.theirs / self.ours

    def cells(self) -> list[str]:
        scale = {"ns an element": 1e9, "ms": 1e3}[self.unit]
        target = (
            "" if self.target is None else f"{self.target:,.0f}x" + ("" if self.ratio >= self.target else ": MISSED")
        )
        times = [f"{value * scale:,.3g}" if value * scale < 1000 else f"{value * scale:,.0f}" for value in self[2:5]]
        return [self.what, self.unit, *times, f"{self.ratio:,.1f}x", target]


def turns(rounds: int, *works: Work) -> list[float]:
    """The median seconds of each, over rounds in which they take turns; a first round is not counted."""
    times = []
    for _ in range(rounds + 1):
        times.append([seconds(work) for work in works])
    return [statistics.median(column) for column in zip(*times[1:], strict=True)]


def seconds(work: Work) -> float:
    began = time.thread_time()
    work()
    return time.thread_time() - began


# -- additive powers of two -------------------------------------------------------------------------------------------


def codes_one_by_one(x: Tensor, levels: Tensor, codes: Tensor) -> list[Tensor]:
    """For each number the distance to every level, in Python, on tensors of one number."""
    nearest_codes = []
    for number in x.tolist():
        nearest, least = codes[0], torch.inf
        for level, code in zip(list(levels), list(codes), strict=True):
            distance = abs(level - number)
            if distance < least:
                nearest, least = code, distance  # type: ignore[assignment]
        nearest_codes.append(nearest)
    return nearest_codes


def levels_one_by_one(given: Tensor, levels: Tensor, codes: Tensor) -> list[Tensor]:
    """For each code its place in the list of codes, in Python."""
    return [levels[list(codes).index(code)] for code in given]


def apot_lines(rounds: int, bits: int) -> list[Line]:
    observer = apot.APoTObserver(bits, 2)
    few, many = torch.rand(FEW), torch.rand(MANY)
    observer(many)
    qparams = observer.calculate_qparams(False)
    alpha, _, levels, codes = qparams
    quantized = apot.quantize_APoT(many, *qparams)
    given, target = apot.float_to_apot(few, levels, codes, alpha), torch.empty_like(many)
    assert torch.equal(given, torch.stack(codes_one_by_one(few, levels, codes)))
    slow = partial(codes_one_by_one, few, levels, codes)
    pairs: list[tuple[str, Work, Work, float | None]] = [
        ("quantize", slow, partial(apot.quantize_APoT, many, *qparams), 1000),
        ("dequantize", partial(levels_one_by_one, given, levels, codes), quantized.dequantize, None),
        ("fake quantize", slow, partial(apot.quant_dequant_APoT, many, *qparams), None),
    ]
    copied = seconds_each(rounds, lambda: target.copy_(many)) / MANY
    lines = []
    for name, original, here, aim in pairs:
        took, mine = turns(rounds, original, here)
        lines.append(Line(f"APoT {name}, {bits} bits", "ns an element", took / FEW, mine / MANY, copied, aim))
    return lines


def seconds_each(rounds: int, work: Work) -> float:
    return turns(rounds, work)[0]


# -- per channel ------------------------------------------------------------------------------------------------------


def channel_lines(rounds: int) -> list[Line]:
    flat = torch.randn(ELEMENTS) * 1e-3
    x = flat[: ELEMENTS // CHANNEL * CHANNEL].view(-1, CHANNEL)
    low, high = x.amin(1).clamp(max=0), x.amax(1).clamp(min=0)
    scale = (high - low) / 255
    zero = (-low / scale).round()
    coded = theirs._quantize_per_channel_backend(x, scale, zero)
    assert torch.equal(coded, ours._quantize_per_channel_backend(x, scale, zero))
    codec, target = nc.codec(f"int8:block={CHANNEL},zero_point=true"), torch.empty_like(flat)
    out = torch.empty(1, codec.row_bytes(ELEMENTS), dtype=torch.uint8)  # as the hooks have it: room that is there

    def observed() -> Tensor:
        padded = F.pad(flat, (0, CHANNEL - ELEMENTS % CHANNEL)).view(-1, CHANNEL)
        observer = torch.ao.quantization.PerChannelMinMaxObserver()
        observer(padded)
        return theirs._quantize_per_channel_backend(padded, *observer.calculate_qparams())

    copied = seconds_each(rounds, lambda: target.copy_(flat))
    hooks: tuple[Work, Work] = observed, lambda: codec.encode(flat.view(1, -1), out=out)
    pairs: list[tuple[str, tuple[Work, Work], float | None]] = [
        ("quantize, scales given", both("_quantize_per_channel_backend", x, scale, zero), None),
        ("dequantize, scales given", both("_dequantize_per_channel_backend", coded, scale, zero), None),
        ("quantize as the hooks do", hooks, 100),
    ]
    lines = []
    for name, contenders, aim in pairs:
        lines.append(Line(f"per channel: {name}, 6M", "ms", *turns(max(rounds, 9), *contenders), copied, aim))
    return lines


def both(name: str, *arguments: Tensor) -> tuple[Work, Work]:
    """PyTorch's function of a name, and ours."""
    return partial(getattr(theirs, name), *arguments), partial(getattr(ours, name), *arguments)


# -- int8 linear ------------------------------------------------------------------------------------------------------


def linear_lines(rounds: int) -> list[Line]:
    lines = []
    for out, into in SHAPES:
        layer = nn.Linear(into, out, bias=False)
        gpt_fast.replace_linear_weight_only_int8_per_channel(layer)
        weight, scales, x = layer.weight.contiguous(), layer.scales.bfloat16(), torch.randn(1, into)

        def eager(weight: Tensor = weight, scales: Tensor = scales, x: Tensor = x) -> Tensor:
            return F.linear(x, weight.to(x.dtype)) * scales

        with torch.no_grad():
            words = weight.view(torch.int32)
            took = turns(max(rounds, 9), eager, lambda layer=layer, x=x: layer(x), words.amax)  # type: ignore[misc]
        lines.append(Line(f"int8 linear {out}x{into}, batch 1", "ms", *took, 10 if out == 11008 else None))
    return lines


# -- hooks ------------------------------------------------------------------------------------------------------------


def hook_lines(rounds: int, ranks: int, elements: int) -> list[Line]:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, (ranks, elements, min(rounds, 5), folder), nprocs=ranks)
        took = json.loads(Path(folder, "times.json").read_text())
    return [
        Line(
            f"hook, per {kind}, {ranks} ranks, {elements / 1e6:g}M",
            "ms",
            took[f"theirs per {kind}"],
            took[f"ours per {kind}"],
            took["fp32"],
            3 if ranks >= 8 else None,
        )
        for kind in ("tensor", "channel")
    ]


# -- all of it --------------------------------------------------------------------------------------------------------


HEAD = ["", "unit", "original", "narrowcast", "limit", "ratio", "target"]


def written(about: dict[str, str], lines: list[Line]) -> None:
    rows = ["| " + " | ".join(cells) + " |" for cells in (HEAD, ["---", "---", *["---:"] * 5])]
    rows += ["| " + " | ".join(line.cells()) + " |" for line in lines]
    text = ["# narrowcast.compat beside what it stands for", "", *(f"- {key}: {value}" for key, value in about.items())]
    notes = ["", "The top of bench/compat.py explains the columns.", ""]
    (RESULTS / "compat.md").write_text("\n".join([*text, "", *rows, *notes]))
    values = {"machine": about, "lines": [{**line._asdict(), "ratio": line.ratio} for line in lines]}
    (RESULTS / "compat.json").write_text(json.dumps(values, indent=2) + "\n")


def main() -> int:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--only", default="apot,channel,linear,hooks")
    asked.add_argument("--rounds", type=int, default=5)
    asked.add_argument("--ranks", type=int, default=8)
    asked.add_argument("--elements", type=int, default=2_000_000)
    asked.add_argument("--out", action="store_true")
    given = asked.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    about = facts()
    kinds: dict[str, Callable[[], list[Line]]] = {
        "apot": lambda: apot_lines(given.rounds, 4) + apot_lines(given.rounds, 8),
        "channel": lambda: channel_lines(given.rounds),
        "linear": lambda: linear_lines(given.rounds),
        "hooks": lambda: hook_lines(given.rounds, given.ranks, given.elements),
    }
    lines: list[Line] = []
    for kind in given.only.split(","):
        lines += kinds[kind]()
    table = Table(*HEAD)
    for line in lines:
        table.add_row(*line.cells())
    console.print(*(f"{key}: {value}" for key, value in about.items()), sep="\n", highlight=False)
    console.print(table)
    if given.out:
        written(about, lines)
    missed: list[Any] = [line for line in lines if line.target is not None and line.ratio < line.target]
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
