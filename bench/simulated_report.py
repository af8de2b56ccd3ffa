"""Tables of bench/simulated.py. A loss is the mean over the seeds that are there, ± half of what they are apart."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from simulated_workers import Way

NAMES = {"adamw": "AdamW", "sgd": "SGD with momentum", "muon": "Muon"}
SEEDS = 20
"""As many as are looked for."""
CODECS = ("int8", "int4", "int3", "int2", "sign")
FEEDBACK = (0.0, 0.9, 1.0)
REFRESHED = {0: "", -1: ", refreshed after 16, 32, 64 ... steps"}


class Ends:
    """The losses that ways ended with, at their best rates."""

    def __init__(self, best: Iterable[Way], runs: Any) -> None:
        self._runs = runs
        self._best = {dataclasses.replace(way, rate=0.0): way for way in best}

    def at_best(self, way: Way) -> Way | None:
        """The way at its best rate; None where it was not trained."""
        return self._best.get(dataclasses.replace(way, rate=0.0, seed=0))

    def losses(self, way: Way) -> list[float]:
        best = self.at_best(way)
        seeds = [dataclasses.replace(best, seed=seed) for seed in range(SEEDS)] if best else []
        return [self._runs.final(each) for each in seeds if self._runs.has(each)]

    def cell(self, way: Way) -> str:
        losses = self.losses(way)
        return f"{statistics.mean(losses):.3f} ± {(max(losses) - min(losses)) / 2:.3f}" if losses else ""

    def beside(self, way: Way, other: Way) -> str:
        """How far the mean is above another's, in percent, and the least and most of single seeds."""
        pairs = list(zip(self.losses(way), self.losses(other), strict=False))
        if not pairs:
            return ""
        apart = [mine / its - 1 for mine, its in pairs]
        mean = statistics.mean(mine for mine, _ in pairs) / statistics.mean(its for _, its in pairs) - 1
        return f"{mean:+.1%} ({min(apart):+.1%} to {max(apart):+.1%})"

    def seeds(self, way: Way) -> str:
        return str(len(self.losses(way)))

    def rate(self, way: Way) -> str:
        best = self.at_best(way)
        return f"{best.rate:g}" if best else ""

    def bits(self, way: Way) -> str:
        best = self.at_best(way)
        return f"{self._runs.of(best)['bits']:.2f}" if best else ""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return ["", *("| " + " | ".join(cells) + " |" for cells in lines), ""]


def feedback_section(ends: Ends) -> list[str]:
    """A table for each optimizer: codecs, and what residuals are multiplied with."""
    lines = []
    for optimizer, name in NAMES.items():
        plain = Way(optimizer=optimizer)
        ways = [Way(codec, optimizer, feedback=feedback) for codec in CODECS for feedback in FEEDBACK]
        trained = [way for way in ways if ends.losses(way)]
        if not trained:
            continue
        shares = sorted({way.feedback for way in trained})
        rows = []
        for codec in dict.fromkeys(way.codec for way in trained):
            each = [Way(codec, optimizer, feedback=feedback) for feedback in shares]
            cells = [
                ends.cell(way) and f"{ends.cell(way)}{_seeds(ends, way)}, {ends.beside(way, plain)}" for way in each
            ]
            rows.append([f"`{codec}`", *cells])
        head = ["residuals times", *("0: no feedback" if share == 0 else f"{share:g}" for share in shares)]
        rates = sorted({ends.rate(way) for way in trained}, key=float)
        about = f"fp32 {ends.cell(plain)} with {ends.seeds(plain)} seeds, best at a rate of {ends.rate(plain)}."
        about += f" Best rates of the others: {', '.join(rates)}."
        lines += [f"## {name}", "", about, *table(head, rows)]
    return lines


def _seeds(ends: Ends, way: Way) -> str:
    return "" if len(ends.losses(way)) == 3 else f" ({ends.seeds(way)} seed{'s' if len(ends.losses(way)) > 1 else ''})"


def compared(ends: Ends, ways: Iterable[Way], name: Callable[[Way], str]) -> list[str]:
    rows = []
    for way in ways:
        if ends.losses(way):
            plain = Way(optimizer=way.optimizer, clip=way.clip)
            cells = ends.bits(way), ends.rate(way), ends.cell(way), ends.beside(way, plain), ends.seeds(way)
            rows.append([name(way), *cells])
    return table(["", "bits", "best rate", "loss", "to fp32, of the seeds", "seeds"], rows)


def in_words(way: Way) -> str:
    if not way.codec:
        return "fp32"
    if way.powersgd:
        return f"PowerSGD {way.powersgd}, {way.warmup:.0%} plain first"
    if not way.momentum:
        return f"gradients in `{way.codec}`" + (", error feedback" if way.feedback else "")
    words = f"momentum in `{way.codec}`, {way.warmup:.0%} in {way.warmup_codec} first"
    words += REFRESHED.get(way.refresh, f", refreshed every {way.refresh} steps")
    words += "" if way.scaled else ", not divided by the second moment's root"
    words += f", residuals times {way.feedback:g}" if way.feedback != 1 else ""
    return words + (", residuals in int8" if way.residual_codec else "")


def tables(best: Sequence[Way], runs: Any) -> str:
    """All tables that there are results for."""
    ends = Ends(best, runs)
    plain = [way for way in best if way.optimizer == "adamw" and not way.clip]
    momentums = [way for way in plain if way.momentum or way.powersgd]
    lines = feedback_section(ends)
    if momentums:
        gradients = [Way(), Way("int8"), Way("int4", feedback=1.0), Way("int2"), Way("sign")]
        lines += ["## The momentum", *compared(ends, [*gradients, *momentums], in_words)]
    clipped = [way for way in best if way.clip]
    if clipped:
        unclipped = [dataclasses.replace(way, clip="") for way in clipped]
        both = sorted(dict.fromkeys([*unclipped, *clipped]), key=lambda way: (in_words(way), way.clip))
        lines += ["## Clipping", *compared(ends, both, lambda way: f"{in_words(way)}, clipped: {way.clip or 'no'}")]
    return "\n".join(lines)
