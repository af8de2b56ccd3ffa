"""The figure of `narrowcast inspect --plot`: a row of dots per weight, a colour per codec, rings around the mix."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from narrowcast.checkpoint.files import new_file
from narrowcast.codecs.mix import Mix
from narrowcast.codecs.sensitivity import Statistics
from narrowcast.errors import PlotError

try:
    import matplotlib
    from matplotlib.figure import Figure
except ImportError as error:
    raise PlotError(
        "--plot: drawing needs the package matplotlib, which is not installed. Run: pip install 'narrowcast[plot]'"
    ) from error

ROW = 0.22
"""Inches per weight: the height of the smallest label that is easy to read."""


def draw(weights: Sequence[Statistics], mix: Mix | None, path: Path) -> Figure:
    """Draw the signal-to-noise ratio of every weight in every codec into a file that `check_picture` has accepted."""
    specs = list(weights[0].noise) if weights else []
    figure = Figure(figsize=(11, max(3.0, 1.6 + ROW * len(weights))), layout="constrained")
    axes = figure.add_subplot()
    colours = matplotlib.colormaps["viridis"]
    for number, spec in enumerate(specs):
        shown = [(w.sqnr(spec), i) for i, w in enumerate(weights) if math.isfinite(w.sqnr(spec))]
        colour = colours(number / max(1, len(specs) - 1))
        axes.scatter([x for x, _ in shown], [y for _, y in shown], s=22, color=colour, label=spec, zorder=2)
    if mix is not None:
        rings = [(w.sqnr(mix.codecs[w.name]), i) for i, w in enumerate(weights) if w.name in mix.codecs]
        at = [x for x, _ in rings], [y for _, y in rings]
        axes.scatter(*at, s=90, facecolors="none", edgecolors="black", label="chosen", zorder=3)
    axes.set_yticks(range(len(weights)), [weight.name for weight in weights], fontsize=7)
    axes.set_ylim(len(weights) - 0.5, -0.5)
    axes.set_xlabel("signal to quantization noise, dB (right is better)")
    title = "Signal-to-noise ratio of each weight in each codec"
    if mix is not None:
        title += f"\nringed: the best mix at {mix.bits:.2f} bits per weight, mean {mix.sqnr:.1f} dB"
    axes.set_title(title, fontsize=10)
    axes.grid(axis="both", linewidth=0.4, alpha=0.6, zorder=0)
    figure.legend(loc="outside right upper", fontsize=8)
    with new_file(path) as file:
        figure.savefig(file, dpi=130, format=path.suffix[1:].lower())
    return figure
