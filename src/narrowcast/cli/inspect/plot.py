"""The figure of `narrowcast inspect --plot`: a line of dots per weight, a colour per codec, rings around the mix."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from narrowcast.checkpoint.files import new_file
from narrowcast.cli.shared.pictures import INK, canvas, colour_of, name_above
from narrowcast.codecs.mix import Mix
from narrowcast.codecs.sensitivity import Statistics
from narrowcast.errors import PlotError

try:
    import matplotlib  # noqa: F401  # canvas() needs it
except ImportError as error:
    raise PlotError(
        "--plot: drawing needs the package matplotlib, which is not installed. Run: pip install 'narrowcast[plot]'"
    ) from error

ROW = 0.22
"""Inches per weight: the height of the smallest label that is easy to read."""


def draw(weights: Sequence[Statistics], mix: Mix | None, path: Path) -> Any:
    """Draw the signal-to-noise ratio of every weight in every codec into a file that `check_picture` has accepted."""
    specs = list(weights[0].noise) if weights else []
    figure, (axes,) = canvas(size=(11, max(3.0, 1.8 + ROW * len(weights))))
    tops: dict[str, tuple[float, float]] = {}
    for spec in specs:
        shown = [(w.sqnr(spec), float(i)) for i, w in enumerate(weights) if math.isfinite(w.sqnr(spec))]
        axes.scatter([x for x, _ in shown], [y for _, y in shown], s=26, color=colour_of(spec), label=spec, zorder=3)
        if shown:
            tops[spec] = shown[0]
    if mix is not None:
        rings = [(w.sqnr(mix.codecs[w.name]), i) for i, w in enumerate(weights) if w.name in mix.codecs]
        at = [x for x, _ in rings], [y for _, y in rings]
        axes.scatter(*at, s=95, facecolors="none", edgecolors=INK, label="chosen", zorder=4)
    axes.set_yticks(range(len(weights)), [weight.name for weight in weights], fontsize=7)
    axes.set_ylim(len(weights) - 0.5, -0.5)
    axes.set_xlabel("signal to quantization noise, dB (right is better)", color=INK)
    words = "Signal-to-noise ratio of each weight in each codec"
    if mix is not None:
        words += f"; ringed: the best mix at {mix.bits:.2f} bits per weight, mean {mix.sqnr:.1f} dB"
    axes.set_title(words, loc="left", fontsize=11, color=INK, pad=44)
    name_above(figure, axes, tops)
    with new_file(path) as file:
        figure.savefig(file, dpi=130, format=path.suffix[1:].lower())
    return figure
