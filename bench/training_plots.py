"""The figures of bench/training.py: loss over steps and seconds, and loss over megabytes sent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pictures
import training_report as report

OURS = ("int8", "int4+EF", "int2+EF", "sign+EF")
COMPETITORS = ("fp32", "fp16 hook", "PowerSGD 4 at once")
"""What stands in the pictures; the tables have all. PowerSGD without its long, plain warm-up."""
LABELS = {"fp16 hook": "fp16", "PowerSGD 4 at once": "PowerSGD, rank 4"}
BELOW, BELOW_RIGHT = (0, -13), (1, -13)
OFFSETS = {
    "PowerSGD 4 at once": (-9, -7),
    "int2+EF": (-3, -12),
    "sign+EF": (8, 6),
    "int8": BELOW_RIGHT,
    "fp16 hook": BELOW_RIGHT,
}
"""Of names that would cover another below the end of their line."""


def draw(cells: report.Cells, model: str, folder: Path) -> dict[str, str]:
    """The files that were written, and what each shows."""
    tail = "" if model == "small" else f"-{model}"
    figures = {f"training{tail}.png": _losses(cells, model), f"megabytes{tail}.png": _megabytes(cells, model)}
    for name, figure in figures.items():
        pictures.save(figure, folder / name)
    return dict(zip(figures, ("loss over steps and over seconds", "loss over megabytes sent"), strict=True))


def _losses(cells: report.Cells, model: str) -> Any:
    """Loss over steps, above; loss over seconds, below."""
    figure, (above, below) = pictures.canvas(2, 1, size=(7.6, 8.4))
    curves = {name: report.mean_curve(seeds) for name, seeds in report.runs_of(cells, model).items()}
    shown = {name: curves[name] for name in (*COMPETITORS, *OURS) if curves.get(name)}
    for name, curve in shown.items():
        pictures.line(above, *zip(*curve, strict=True), name)
    if shown:
        final = [curve[-1][1] for curve in shown.values()]
        above.set_ylim(min(final) - 0.15, max(final) + 0.6)  # without the first steps, in which all fall alike
    above.set(xlabel="steps", ylabel="held-out loss, nats a byte")
    pictures.title(above, f"byte-level GPT ({model}), DDP, 4 ranks: the same number of steps")
    rate = f"{report.bits_per_second(report.SLOW) / 1e6:g} Mbit/s"
    points = report.race(cells, model, report.seconds_of)[0]
    for name in (name for name in (*COMPETITORS, *OURS) if name in points):
        seconds, losses = zip(*points[name], strict=True)
        pictures.line(below, seconds, losses, name)
        _name(below, seconds[-1], losses[-1], name)
    below.set(xscale="log", xlabel=f"seconds at {rate}", ylabel="held-out loss, nats a byte")
    pictures.plain_ticks(below.xaxis)
    below.margins(x=0.06, y=0.1)
    pictures.title(below, f"the same trainings over links of {rate}")
    pictures.name_right(figure, above, {LABELS.get(name, name): curve[-1] for name, curve in shown.items()})
    return figure


def _name(axes: Any, x: float, y: float, name: str) -> None:
    pictures.name_at(axes, (x, y), LABELS.get(name, name), name, OFFSETS.get(name, BELOW))


def _megabytes(cells: report.Cells, model: str) -> Any:
    """Loss over megabytes sent."""
    figure, (axes,) = pictures.canvas()
    curves = report.race(cells, model, report.sent_of)[0]
    for name in (name for name in (*COMPETITORS, *OURS[:3]) if name in curves):
        sent, losses = [count / 1e6 for count, _ in curves[name]], [loss for _, loss in curves[name]]
        pictures.line(axes, sent, losses, name)
        _name(axes, sent[-1], losses[-1], name)
    axes.set(xscale="log", xlabel="megabytes sent by a rank", ylabel="held-out loss, nats a byte")
    pictures.plain_ticks(axes.xaxis)
    axes.margins(x=0.06, y=0.1)
    return figure
