"""The figures of bench/training.py: every method's loss over steps and seconds, and loss over megabytes sent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import training_report as report
from training_methods import METHODS

COLOURS = {"int8": "#2f6fb3", "int4+EF": "#1b9e77", "int2+EF": "#d95f02"}
COMPETITORS = {"fp32": "DDP, fp32", "fp16 hook": "fp16 hook", "PowerSGD 4 at once": "PowerSGD, rank 4"}
"""What stands in the picture of megabytes, of ours and of others; PowerSGD without its long, plain warm-up."""


def draw(cells: report.Cells, model: str, folder: Path) -> dict[str, str]:
    """The files that were written, and what each shows."""
    tail = "" if model == "small" else f"-{model}"
    names = {f"training{tail}.png": _overview(cells, model), f"megabytes{tail}.png": _megabytes(cells, model)}
    for name, figure in names.items():
        figure.savefig(folder / name, dpi=120)
    return dict(zip(names, ("losses and bytes", "loss over megabytes sent"), strict=True))


def _overview(cells: report.Cells, model: str) -> Any:
    """Loss over steps, loss over seconds, bytes a step."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(16, 4.6), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    colours = {name: f"C{number % 10}" for number, name in enumerate(METHODS)}
    for name, seeds in report.runs_of(cells, model).items():
        if curve := report.mean_curve(seeds):
            style = "--" if METHODS[name].competitor else "-" if METHODS[name].error_feedback or name == "int8" else ":"
            left.plot(*zip(*curve, strict=True), style, color=colours[name], label=name)
    for name, points in report.race(cells, model, report.seconds_of)[0].items():
        style = "--" if METHODS[name].competitor else "-"
        middle.semilogx(*zip(*points, strict=True), style, color=colours[name], label=name)
    cell = cells.get(f"speed/{model}/{report.SLOW}", {"found": {}})
    sent = {name: count / 1e6 for name, count in report.sent_of(cell).items() if name != "no exchange"}
    right.barh(list(sent)[::-1], list(sent.values())[::-1], color=[colours[name] for name in sent][::-1])
    left.set(xlabel="steps", ylabel="held-out loss, nats a byte", title="loss over steps")
    middle.set(xlabel=f"seconds at {report.SLOW}", title="loss over seconds")
    right.set(xlabel="MB sent a step and rank", title="bytes a step")
    for axes in (left, middle):
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(frameon=False, fontsize=8)
    figure.suptitle(f"byte-level GPT, {model}, 4 ranks")
    return figure


def _megabytes(cells: report.Cells, model: str) -> Any:
    """Loss over megabytes sent: each line ends with its name."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    figure = Figure(figsize=(8.4, 4.4), layout="constrained")
    axes = figure.subplots()
    curves = report.race(cells, model, report.sent_of)[0]
    for name, label in {**COMPETITORS, **{name: name for name in COLOURS}}.items():
        if name not in curves:
            continue
        sent, losses = [count / 1e6 for count, _ in curves[name]], [loss for _, loss in curves[name]]
        ours, colour = name in COLOURS, COLOURS.get(name, "#8a8a8a")
        axes.semilogx(sent, losses, "-" if ours else "--", color=colour, linewidth=2.2 if ours else 1.3)
        axes.plot(sent[-1], losses[-1], "o", color=colour, markersize=5)
        place = {"xytext": (0, -13), "textcoords": "offset points", "ha": "center", "va": "center"}
        if name.startswith("PowerSGD"):
            place |= {"xytext": (-8, -3), "ha": "right"}
        axes.annotate(label, (sent[-1], losses[-1]), color=colour, **place)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set(xlabel="megabytes sent by a rank", ylabel="held-out loss, nats a byte")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.06, y=0.1)
    return figure
