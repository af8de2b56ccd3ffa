"""The style of the pictures in bench/results is that of the command line: narrowcast/cli/shared/pictures.py."""

from __future__ import annotations

import sys
from pathlib import Path

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
    name_right,
    plain_ticks,
    save,
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
