"""The one style of all pictures: those of `demo` and `inspect --plot`, and those in bench/results.

Codecs of this library have a colour each, by name, the same in every picture; competitors are grey and dashed. A line
has its name at its end, in its colour, and there are no legends. matplotlib is imported when something is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

COLOURS = {
    "int8": "#2f6fb3",
    "int4": "#1b9e77",
    "int2": "#d95f02",
    "sign": "#a6518a",
    "uniform": "#2f6fb3",
    "APoT": "#d95f02",
    "PoT": "#a6518a",
    "NF4": "#1b9e77",
    "fp8 e4m3": "#7a5c00",
    "fp8 e5m2": "#5a54a4",
    "int6": "#4aa3c7",
    "int5": "#5a54a4",
    "int3": "#b8860b",
    "nf4": "#7cb342",
    "apot4": "#c2185b",
    "bf16": "#8d6e63",
    "fp16": "#6d4c41",
    "fp8_e4m3": "#7a5c00",
    "fp8_e5m2": "#5a54a4",
}
GREY = "#808080"
INK = "#333333"
HEIGHT = 13.0
"""Points from one name to the next, where lines end close together."""


def colour_of(name: str) -> str:
    """The codec's colour, error feedback, options or not; grey for a competitor, or one without a colour."""
    return COLOURS.get(name.removesuffix("+EF").split(":")[0].split(",")[0], GREY)


def canvas(
    rows: int = 1, columns: int = 1, size: tuple[float, float] = (7.2, 4.2), **shared: Any
) -> tuple[Any, list[Any]]:
    """A figure, and its axes in reading order."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    places = [axes for row in figure.subplots(rows, columns, squeeze=False, **shared) for axes in row]
    for axes in places:
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(INK)
        axes.tick_params(colors=INK)
    return figure, places


def line(axes: Any, xs: Sequence[float], ys: Sequence[float], name: str) -> None:
    """A line, or a point where there is one value, with a dot at its end."""
    colour = colour_of(name)
    ours = colour != GREY
    axes.plot(xs, ys, "-" if ours else "--", color=colour, linewidth=2.2 if ours else 1.3, zorder=3 if ours else 2)
    axes.plot(xs[-1], ys[-1], "o" if len(xs) > 1 else "D", color=colour, markersize=5, zorder=4)


def name_at(axes: Any, at: tuple[float, float], label: str, name: str, offset: tuple[float, float]) -> None:
    """A name beside a point, `offset` points away: its nearest edge, or its middle where it is right above or below."""
    from matplotlib.patheffects import withStroke

    halo = [withStroke(linewidth=3, foreground="white")]  # over a line, the name is read first
    side = "left" if offset[0] > 0 else "right" if offset[0] < 0 else "center"
    placed = {"textcoords": "offset points", "ha": side, "va": "center", "path_effects": halo, "zorder": 5}
    axes.annotate(label, at, offset, color=colour_of(name), **placed)


def name_above(figure: Any, axes: Any, tops: dict[str, tuple[float, float]]) -> None:
    """Names above points at the top of a picture, slanted, moved apart where they would overlap."""
    figure.draw_without_rendering()  # or the scale of x is not known yet
    points = 72 / figure.dpi
    places = {name: axes.transData.transform(top)[0] * points for name, top in tops.items()}
    order = sorted(places, key=places.__getitem__)
    for name, place in zip(order, apart([places[name] for name in order], least=1.3 * HEIGHT), strict=True):
        style = {"textcoords": "offset points", "ha": "left", "va": "bottom", "rotation": 35, "fontsize": 9}
        axes.annotate(name, tops[name], (place - places[name] - 3, 10), color=colour_of(name), **style)


def apart(heights: list[float], least: float = HEIGHT) -> list[float]:
    """Rising heights, with at least `least` between neighbours: those that are too close spread around their mean."""
    crowds: list[list[float]] = []
    for height in heights:
        crowds.append([height])
        while len(crowds) > 1 and _top(crowds[-2], least) + least > _bottom(crowds[-1], least):
            last = crowds.pop()
            crowds[-1] += last
    return [_bottom(crowd, least) + number * least for crowd in crowds for number in range(len(crowd))]


def _bottom(crowd: list[float], least: float) -> float:
    return sum(crowd) / len(crowd) - least * (len(crowd) - 1) / 2


def _top(crowd: list[float], least: float) -> float:
    return sum(crowd) / len(crowd) + least * (len(crowd) - 1) / 2


def plain_ticks(axis: Any) -> None:
    """1,000 in place of 10^3."""
    from matplotlib.ticker import FuncFormatter

    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))


def title(axes: Any, words: str) -> None:
    axes.set_title(words, loc="left", fontsize=11, color=INK)
