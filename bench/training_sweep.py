"""Each way at its best learning rate: the table of `sweep`, out of the cells that bench/training.py has written.

A way's best rate is the one with the least mean loss over its seeds. Differences are those of runs with the same seed,
each way at its own best rate, with their standard error.
"""

from __future__ import annotations

import statistics
from collections import defaultdict

from training_methods import METHODS
from training_report import Cells, of, table

Losses = dict[str, dict[int, float]]
"""By learning rate, then by seed."""


def losses_of(cells: Cells, model: str) -> dict[str, Losses]:
    """Held-out losses of all ways that were swept; a run that failed has none."""
    losses: dict[str, Losses] = defaultdict(lambda: defaultdict(dict))
    for key, cell in of(cells, "sweep", model).items():
        name, rate, seed = key.rsplit("/", 2)
        if "failed" not in cell["found"]:
            losses[name][rate][int(seed)] = cell["found"]["final"]
    return losses


def best_of(losses: Losses) -> str:
    """The rate with the least mean loss, of those with the most seeds."""
    most = max(len(seeds) for seeds in losses.values())
    return min(
        (rate for rate in losses if len(losses[rate]) == most), key=lambda rate: statistics.mean(losses[rate].values())
    )


def beside(one: dict[int, float], other: dict[int, float]) -> str:
    """How much higher the losses of the one are, over the seeds that both have."""
    ratios = [100 * (one[seed] / other[seed] - 1) for seed in sorted(one.keys() & other.keys())]
    if not ratios:
        return ""
    error = f" +-{statistics.stdev(ratios) / len(ratios) ** 0.5:.2f}" if len(ratios) > 1 else ""
    return f"{statistics.mean(ratios):+.2f}%{error}"


def sweep_section(cells: Cells, model: str) -> list[str]:
    losses = losses_of(cells, model)
    if not losses:
        return []
    rates = sorted({rate for of_way in losses.values() for rate in of_way}, key=float)
    best = {name: losses[name][best_of(losses[name])] for name in losses}
    others = [name for name in ("fp32", "int2") if name in best]
    rows = []
    for name in (name for name in METHODS if name in losses):
        means = [
            f"{statistics.mean(seeds.values()):.4f}" if (seeds := losses[name].get(rate)) else "" for rate in rates
        ]
        place = rates.index(best_of(losses[name]))
        means[place] = f"**{means[place]}**"
        differences = ["" if name == other else beside(best[name], best[other]) for other in others]
        rows.append([name, *means, *differences, str(len(best[name]))])
    steps = next(iter(of(cells, "sweep", model).values()))["settings"]["steps"]
    head = " | ".join(["", *rates, *(f"to {other}" for other in others), "seeds"])
    return [
        f"## Each at its best learning rate: {model} model",
        "",
        f"Held-out loss after {steps} steps, the mean over the seeds at each rate; the best in bold. Differences are "
        "of runs with the same seed, each way at its best rate, +- their standard error.",
        *table(head, rows),
    ]
