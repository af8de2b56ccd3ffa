"""What `quantize_` did: each encoded weight with its codec, bytes and error, each skipped weight with the reason.

`str(report)` is a table to read, `report.to_dict()` plain values for machines.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from narrowcast.nn.survey import Skip


class Entry(NamedTuple):
    """One weight that was encoded."""

    name: str
    """Its key in the state dict."""
    kind: str
    """The class of the module that holds it."""
    shape: tuple[int, ...]
    codec: str
    bytes_before: int
    bytes_after: int
    sqnr: float | None
    """Signal to quantization noise in dB: infinity where nothing was lost, None on the meta device."""
    tied: tuple[str, ...] = ()
    """Other keys that hold the same rows."""
    rounding: str = "nearest"
    """How it was rounded."""
    nearest_error: float | None = None
    """What nearest rounding would lose: the squared error of the layer's output over the squared output, on the data;
    without data, of the weight. None where nothing was compared."""
    error: float | None = None
    """The same for the rows that were made."""
    note: str = ""
    """Why another rounding was taken than the one asked for."""


@dataclass
class Report:
    """What was encoded, what was not, and which rules decided nothing."""

    entries: list[Entry] = field(default_factory=list)
    skips: list[Skip] = field(default_factory=list)
    unused_rules: list[str] = field(default_factory=list)

    @property
    def bytes_before(self) -> int:
        """Of the weights that were encoded; a tied one counts once."""
        return sum(entry.bytes_before for entry in self.entries)

    @property
    def bytes_after(self) -> int:
        return sum(entry.bytes_after for entry in self.entries)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain values, totals included."""
        return {
            "entries": [entry._asdict() for entry in self.entries],
            "skips": [skip._asdict() for skip in self.skips],
            "unused_rules": list(self.unused_rules),
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
        }

    def __str__(self) -> str:
        return "\n".join([*self._encoded(), *self._totals(), *self._skipped(), *self._unused()])

    def _encoded(self) -> list[str]:
        if not self.entries:
            return []
        rows = [("weight", "kind", "shape", "codec", "before", "after", "SQNR")]
        for entry in self.entries:
            name = " = ".join((entry.name, *entry.tied))
            shape = "x".join(map(str, entry.shape))
            sizes = _bytes(entry.bytes_before), _bytes(entry.bytes_after)
            rows.append((name, entry.kind, shape, entry.codec, *sizes, _decibels(entry.sqnr)))
        if any(entry.error is not None for entry in self.entries):
            added = [("rounding", "nearest", "output error")]
            added += [(entry.rounding, _share(entry.nearest_error), _share(entry.error)) for entry in self.entries]
            return _aligned([(*row, *more) for row, more in zip(rows, added, strict=True)], right=(4, 5, 6, 8, 9))
        return _aligned(rows, right=(4, 5, 6))

    def _totals(self) -> list[str]:
        before, after = self.bytes_before, self.bytes_after
        ratio = f", {before / after:.2f}x smaller" if after else ""
        lines = [f"{_count(len(self.entries), 'weight')} encoded: {_bytes(before)} -> {_bytes(after)}{ratio}"]
        grown = [entry.name for entry in self.entries if entry.bytes_after > entry.bytes_before]
        if grown:
            lines.append(f"larger than before (rows are padded to 16 bytes): {', '.join(grown)}")
        reasons: dict[str, list[str]] = {}
        for entry in self.entries:
            if entry.note:
                reasons.setdefault(f"{entry.rounding}: {entry.note}", []).append(entry.name)
        return lines + [f"{reason}: {', '.join(names)}" for reason, names in reasons.items()]

    def _skipped(self) -> list[str]:
        if not self.skips:
            return []
        return [f"{_count(len(self.skips), 'weight')} left as they were:"] + [
            f"  {line}" for line in _aligned([tuple(skip) for skip in self.skips])
        ]

    def _unused(self) -> list[str]:
        if not self.unused_rules:
            return []
        return [f"rules that decided for no weight: {', '.join(map(repr, self.unused_rules))}"]


def _aligned(rows: Sequence[tuple[str, ...]], right: tuple[int, ...] = ()) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _bytes(number: int) -> str:
    for unit in ("B", "kB", "MB"):
        if number < 1000:
            return f"{number:.3g} {unit}" if unit != "B" else f"{number} B"
        number = number / 1000  # type: ignore[assignment]
    return f"{number:.3g} GB"


def _share(error: float | None) -> str:
    return "-" if error is None else f"{100 * error:.3g}%"


def _decibels(sqnr: float | None) -> str:
    if sqnr is None:
        return "-"
    return "exact" if sqnr == math.inf else f"{sqnr:.1f} dB"
