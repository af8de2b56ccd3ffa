"""The style of the pictures in bench/results is that of the command line: narrowcast/cli/shared/pictures.py.

Here is what only they have: names at the right end of lines, and files of their size.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))

from narrowcast.cli.shared.pictures import (
    COLOURS,
    GREY,
    INK,
    apart,
    canvas,
    colour_of,
    line,
    name_at,
    plain_ticks,
    title,
)

__all__ = [
    "COLOURS",
    "GREY",
    "INK",
    "apart",
    "canvas",
    "colour_of",
    "line",
    "name_at",
    "name_right",
    "plain_ticks",
    "save",
    "title",
]


def name_right(figure: Any, axes: Any, ends: dict[str, tuple[float, float]]) -> None:
    """Names to the right of lines that end at the same x, moved apart where they would overlap."""
    figure.draw_without_rendering()  # or the scale of y is not known yet
    points = 72 / figure.dpi
    heights = {name: axes.transData.transform(end)[1] * points for name, end in ends.items()}
    order = sorted(heights, key=heights.__getitem__)
    for name, height in zip(order, apart([heights[name] for name in order]), strict=True):
        name_at(axes, ends[name], name, name, (9, height - heights[name]))


def save(figure: Any, path: Path) -> None:
    figure.savefig(path, dpi=140)
