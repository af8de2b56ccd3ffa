"""Tables of bench/training.py, out of the cells of training.json; targets are those of the project's issue 6.

Rows whose cell is missing are left out. Rows that miss their target say so.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from training_methods import METHODS

Cells = dict[str, Any]
FASTER = {("100mbit", "int8"): 3.3, ("100mbit", "int4+EF"): 5.0, ("1gbit", "int8"): 1.5}
"""Times fp32, with the large model."""
WORSE = {"int8": 0.005, "int4+EF": 0.01, "int2+EF": 0.05, "sign+EF": 0.05}
"""The share by which the held-out loss may be above fp32's."""
ABOVE = (0.1, 0.05, 0.02, 0.01)
"""Losses that are raced to: this share above what fp32 ends with."""
SLOW = "100mbit"


def bits_per_second(rate: str) -> float:
    return float(rate.removesuffix("mbit")) * 1e6 if rate.endswith("mbit") else float(rate.removesuffix("gbit")) * 1e9


def of(cells: Cells, *start: str) -> dict[str, Any]:
    """The cells under a path, by the rest of their keys."""
    prefix = "/".join(start) + "/"
    return {key.removeprefix(prefix): cell for key, cell in cells.items() if key.startswith(prefix)}


def table(head: str, rows: Sequence[Sequence[str]]) -> list[str]:
    columns = head.split(" | ")
    lines = [f"| {head} |", "|---|" + "--:|" * (len(columns) - 1), *("| " + " | ".join(row) + " |" for row in rows)]
    return ["", *lines, ""]


def verdict(good: bool, target: str) -> str:
    return f"{target}: {'ok' if good else 'MISSED'}"


# -- speed -------------------------------------------------------------------------------------------------------------


def seconds_of(cell: Any) -> dict[str, float]:
    return {name: statistics.median(figures["seconds"]) for name, figures in cell["found"].items()}


def sent_of(cell: Any) -> dict[str, float]:
    """Bytes that a rank sends in a step."""
    return {name: statistics.median(figures["sent"]) for name, figures in cell["found"].items()}


def speed_section(model: str, rate: str, cell: Any) -> list[str]:
    seconds, sent = seconds_of(cell), sent_of(cell)
    compute, plain = seconds.get("no exchange", 0.0), seconds["fp32"]
    rows = []
    for name, each in seconds.items():
        goal = FASTER.get((rate, name)) if model == "large" else None
        target = verdict(plain / each >= goal, f">= {goal}x") if goal else ""
        wire = sent[name] * 8 / bits_per_second(rate)
        times = cell["found"][name]["seconds"]
        rows.append(
            [
                name,
                f"{each:.3f}",
                f"{min(times):.3f} - {max(times):.3f}",
                f"{1 / each:.2f}",
                f"{plain / each:.2f}",
                f"{compute:.3f}",
                f"{each - compute:.3f}",
                f"{wire:.3f}",
                f"{sent[name] / 1e6:.3f}",
                f"{sent[name] / sent['fp32']:.1%}",
                target,
            ]
        )
    head = "| s a step | range s | steps/s | x fp32 | compute s | exposed s | wire s | MB a step | of fp32 | target"
    settings = cell["settings"]
    size = f"{settings['batch']} x {settings['config']['context']} bytes a rank"
    about = f"{settings['ranks']} ranks, {settings['rounds']} rounds of {settings['turn']} steps, {size}"
    return [f"## Speed: {model} model, {rate} ({about})", *table(f" {head}", rows)]


# -- quality -----------------------------------------------------------------------------------------------------------


def runs_of(cells: Cells, model: str) -> dict[str, dict[int, Any]]:
    """Figures by method and seed, in the order of the methods."""
    by_method: dict[str, dict[int, Any]] = {name: {} for name in METHODS}
    for key, cell in of(cells, "quality", model).items():
        name, seed = key.rsplit("/", 1)
        by_method[name][int(seed)] = cell["found"]
    return {name: dict(sorted(seeds.items())) for name, seeds in by_method.items() if seeds}


def quality_section(cells: Cells, model: str) -> list[str]:
    runs = runs_of(cells, model)
    settings = next(iter(of(cells, "quality", model).values()))["settings"]
    plain = {seed: run["final"] for seed, run in runs.get("fp32", {}).items()}
    rows = []
    for name, seeds in runs.items():
        good = {seed: run["final"] for seed, run in seeds.items() if "final" in run}
        if len(good) < len(seeds):
            rows.append([name, f"failed in {len(seeds) - len(good)} of {len(seeds)}", "", "", "", "", ""])
            continue
        paired = [good[seed] / plain[seed] - 1 for seed in good if seed in plain]
        mean, spread = statistics.mean(good.values()), statistics.pstdev(good.values())
        beside = f"{statistics.mean(paired):+.2%}" if paired else ""
        between = f"{min(paired):+.2%} to {max(paired):+.2%}" if paired else ""
        goal = WORSE.get(name)
        target = verdict(statistics.mean(paired) <= goal, f"<= {goal:+.1%}") if goal and paired else ""
        same = "yes" if all(run["same_bits"] for run in seeds.values()) else "no"
        rows.append([name, f"{mean:.4f} ± {spread:.4f}", beside, between, str(len(good)), same, target])
    context, batch = settings["config"]["context"], settings["batch"]
    about = f"{settings['steps']} steps, {settings['ranks']} ranks, {batch} x {context} bytes a rank"
    uncompressed = {name: METHODS[name].warmup_steps(settings["steps"]) for name in runs}
    plain_steps = ", ".join(f"{name} {count}" for name, count in uncompressed.items() if count)
    return [
        f"## Quality: {model} model ({about})",
        "",
        "Held-out loss in nats a byte, mean and standard deviation over seeds. First steps that are plain, or in int8 "
        f"(or what the name says) where the momentum travels after them: {plain_steps}.",
        *table(" | loss | to fp32 | of the seeds | seeds | ranks agree bit for bit | target", rows),
        *feedback_lines(runs),
    ]


def feedback_lines(runs: dict[str, dict[int, Any]]) -> list[str]:
    """What error feedback is worth: the loss with it beside the loss without, seed by seed."""
    lines = []
    for name in (name for name in runs if f"{name}+EF" in runs):
        without, with_it = ({seed: run.get("final") for seed, run in runs[key].items()} for key in (name, f"{name}+EF"))
        ratios = [with_it[seed] / loss - 1 for seed, loss in without.items() if loss and with_it.get(seed)]
        if ratios:
            lines.append(
                f"- {name}: error feedback changes the loss by {statistics.mean(ratios):+.2%} "
                f"({min(ratios):+.2%} to {max(ratios):+.2%}, {len(ratios)} seeds)"
            )
    return [*lines, ""] if lines else []


# -- time to a loss ----------------------------------------------------------------------------------------------------


def mean_curve(seeds: dict[int, Any]) -> list[tuple[int, float]]:
    curves = [run["curve"] for run in seeds.values() if "curve" in run]
    return [(points[0][0], statistics.mean(loss for _, loss in points)) for points in zip(*curves, strict=True)]


def spent(name: str, step: float, steps: int, cost: dict[str, float]) -> float:
    """Seconds, or bytes, when a step is done: those of the warm-up cost what fp32 costs, or what they travel in."""
    plain = min(step, METHODS[name].warmup_steps(steps))
    return plain * cost[METHODS[name].warmup_as] + (step - plain) * cost[METHODS[name].timed_as or name]


def crossing(curve: list[tuple[int, float]], level: float) -> float | None:
    """The first step at which the loss is down to a level, straight between points."""
    for (step, loss), (following, lower) in pairwise(curve):
        if loss > level >= lower:
            return step + (loss - level) / (loss - lower) * (following - step)
    return None


def race(
    cells: Cells, model: str, cost_of: Callable[[Any], dict[str, float]]
) -> tuple[dict[str, list[tuple[float, float]]], dict[str, list[float | None]]]:
    """Each method's mean curve over what it costs, and its cost to each level; of a step in seconds, or in bytes."""
    cell = cells.get(f"speed/{model}/{SLOW}")
    runs = runs_of(cells, model)
    if cell is None or "fp32" not in runs:
        return {}, {}
    cost = cost_of(cell)
    steps = next(iter(of(cells, "quality", model).values()))["settings"]["steps"]
    end = mean_curve(runs["fp32"])[-1][1]
    curves, arrivals = {}, {}
    for name, seeds in runs.items():
        if (METHODS[name].timed_as or name) not in cost or not (curve := mean_curve(seeds)):
            continue
        curves[name] = [(spent(name, step, steps, cost), loss) for step, loss in curve]
        crossings = [crossing(curve, end * (1 + above)) for above in ABOVE]
        arrivals[name] = [None if step is None else spent(name, step, steps, cost) for step in crossings]
    return curves, arrivals


def race_section(cells: Cells, model: str) -> list[str]:
    _, arrivals = race(cells, model, seconds_of)
    if not arrivals:
        return []
    rows = [[name, *("not reached" if t is None else f"{t:.0f}" for t in times)] for name, times in arrivals.items()]
    lines = [
        f"## Time to a loss at {SLOW}: {model} model",
        "",
        "Seconds until the held-out loss is down to so much above fp32's last one: the curves of `quality` on the "
        "clock of `speed`.",
        *table(" | " + " | ".join(f"fp32's last {above:+.0%}" for above in ABOVE), rows),
    ]
    for number, above in enumerate(ABOVE):
        times = {name: each[number] for name, each in arrivals.items() if each[number] is not None}
        ours = {name: t for name, t in times.items() if not METHODS[name].competitor}
        competitors = {name: t for name, t in times.items() if METHODS[name].competitor}
        if ours and competitors:
            best, competitor = min(ours, key=ours.__getitem__), min(competitors, key=competitors.__getitem__)
            how = "ahead of every competitor" if ours[best] < competitors[competitor] else "BEHIND the best competitor"
            lines.append(
                f"- {above:+.0%}: {best} in {ours[best]:.0f} s, {how} ({competitor}, {competitors[competitor]:.0f} s)"
            )
    return [*lines, ""]


# -- memory ------------------------------------------------------------------------------------------------------------


def memory_section(cells: Cells, model: str) -> list[str]:
    memory = {name: cell["found"] for name, cell in of(cells, "memory", model).items()}
    ordered = [name for name in METHODS if name in memory]
    plain = memory["fp32"]["peak"]
    rows = [
        [
            name,
            f"{memory[name]['kept_per_parameter']:.2f}",
            f"{(memory[name]['peak'] - plain) / 1e6:+.0f}",
            f"{memory[name]['growth'] / 1e6:.1f}",
        ]
        for name in ordered
    ]
    return [
        f"## Memory: {model} model",
        "",
        "`kept` is what a compression keeps between steps (residuals, and PowerSGD's factors). `peak` is rank 0's most "
        "resident memory beside plain DDP's; `growth` how much of it came after the first 6 of 12 steps.",
        *table(" | kept, bytes a parameter | peak, MB over fp32 | growth, MB", rows),
    ]


# -- all of it ---------------------------------------------------------------------------------------------------------


def trained(cells: Cells) -> list[str]:
    """The models that `quality` has."""
    return sorted({key.split("/")[0] for key in of(cells, "quality")})


def tables(cells: Cells, about: str) -> list[str]:
    """Everything but the pictures, line by line."""
    lines = ["# Training over slow links", "", about + " What the columns mean stands at the top of bench/training.py."]
    lines.append("")
    for key, cell in of(cells, "speed").items():
        lines += speed_section(*key.split("/"), cell)
    for model in trained(cells):
        lines += quality_section(cells, model) + race_section(cells, model)
    for model in sorted({key.split("/")[0] for key in of(cells, "memory")}):
        lines += memory_section(cells, model)
    return lines
