"""Where fewer meetings win: seconds to a loss at several rates, computed from what bench/training.py has measured.

A step of a way takes the compute, the wire's time of its bytes at a rate, and what it took beyond both at 100 Mbit/s,
where it was timed. Ranks that train alone pay the exchange of int4 at every meeting. Curves are those of `quality`, of
the seeds that all ways have in common. Nothing here was timed at another rate than 100 Mbit/s.
"""

from __future__ import annotations

from typing import Any

from narrowcast.distributed.gradients.meetings import Intervals
from training_methods import METHODS, Method
from training_report import SLOW, Cells, bits_per_second, crossing, mean_curve, of, runs_of, seconds_of, sent_of, table

RATES = ("20mbit", "100mbit", "1gbit")
WAYS = (
    *("fp32", "PowerSGD 4", "int4+EF", "momentum sign", "momentum sign after int4", "momentum sign 10%"),
    *("momentum sign 10% after int4", "momentum int2", "average 10", "average 30", "average growing", "DiLoCo 30"),
)
ABOVE = (0.5, 0.3, 0.2, 0.1, 0.05, 0.02, 0.01)
TIMED_AS = {"momentum sign": "sign+EF", "momentum int2": "int2+EF"}
"""What sends as many bytes, for ways that have not been timed."""


def costs(cell: Any, rate: str) -> dict[str, float]:
    """Seconds of a step that exchanges gradients, by method, at a rate."""
    seconds, sent = seconds_of(cell), sent_of(cell)
    compute, slow, here = seconds["no exchange"], bits_per_second(SLOW), bits_per_second(rate)
    beyond = {name: max(0.0, each - compute - 8 * sent[name] / slow) for name, each in seconds.items()}
    cost = {name: compute + 8 * sent[name] / here + beyond[name] for name in seconds}
    return cost | {name: cost[other] for name, other in TIMED_AS.items() if name not in cost and other in cost}


def spent(name: str, step: float, steps: int, cost: dict[str, float]) -> float:
    """Seconds when a step is done."""
    method, compute = METHODS[name], cost["no exchange"]
    if method.every:
        return step * compute + _meetings_within(method, step) * (cost[method.meets_as] - compute)
    first = min(step, method.warmup_steps(steps))
    return first * cost[method.warmup_as] + (step - first) * cost[method.timed_as or name]


def _meetings_within(method: Method, step: float) -> float:
    """How often ranks have met after so many steps."""
    if not isinstance(method.sync_every, str):
        return step / method.every
    intervals, met, at = Intervals("growing", 0), 0, 0
    while at + (length := intervals.length_of(met, at)) <= step:
        met, at = met + 1, at + length
    return met


def steps_within(name: str, seconds: float, cost: dict[str, float]) -> int:
    """How many steps a way makes of some seconds, up to a meeting where it has meetings."""
    every = METHODS[name].every or 1
    steps = int(seconds / (spent(name, 1000, 1000, cost) / 1000))
    if isinstance(METHODS[name].sync_every, str):  # its first steps cost more than those after them
        while spent(name, steps, steps, cost) > seconds:
            steps -= 1
    return max(1, steps // every) * every


def race_section(cells: Cells, model: str) -> list[str]:
    """What each way ends with after the same seconds, at each rate; the least loss in bold."""
    runs = of(cells, "race", model)
    if not runs:
        return []
    by_race: dict[tuple[str, str], dict[str, dict[int, Any]]] = {}
    for key, cell in runs.items():
        rate, seconds, name = key.split("/", 2)
        seconds, _, seed = seconds.partition(" seed ")
        by_race.setdefault((rate, seconds), {}).setdefault(name, {})[int(seed or 0)] = cell["found"]
    lines = [
        f"## The same seconds: {model} model",
        "",
        "Held-out loss after the same seconds of training in a network in a box, of each seed. Each way makes as many "
        "steps of them as its measured time a step allows, and its learning rate falls over these steps. Steps and "
        "seconds are those of seed 0; the last column is the mean over the seeds of a way.",
    ]
    for (rate, seconds), ways in sorted(by_race.items(), key=lambda pair: (bits_per_second(pair[0][0]), pair[0][1])):
        seeds = sorted({seed for of_way in ways.values() for seed in of_way})
        least = {seed: min(of_way[seed]["final"] for of_way in ways.values() if seed in of_way) for seed in seeds}
        rows = []
        for name in (name for name in METHODS if name in ways):
            first = ways[name].get(0, next(iter(ways[name].values())))
            losses = [_raced(ways[name].get(seed), least[seed]) for seed in seeds]
            beside = [run["final"] / least[seed] - 1 for seed, run in ways[name].items()]
            last = f"{sum(beside) / len(beside):+.1%}"
            rows.append([name, str(first["steps"]), f"{first['seconds']:.1f}", *losses, last])
        head = " | ".join(f"loss, seed {seed}" for seed in seeds)
        lines += ["", f"At {rate}, {seconds}:", *table(f" | steps | seconds | {head} | to the least", rows)]
    return lines


def _raced(run: dict[str, Any] | None, least: float) -> str:
    """A loss; the least of its seed in bold."""
    loss = "" if run is None else f"{run['final']:.4f}"
    return f"**{loss}**" if run is not None and run["final"] == least else loss


def arrival_section(cells: Cells, model: str) -> list[str]:
    """Seconds to each loss as they were raced, a table for each rate; the least of each in bold."""
    lines: list[str] = []
    by_rate: dict[str, dict[str, Any]] = {}
    for key, cell in of(cells, "arrival", model).items():
        rate, name = key.split("/", 1)
        by_rate.setdefault(rate, {})[name] = cell["found"]
    for rate, runs in sorted(by_rate.items(), key=lambda pair: bits_per_second(pair[0])):
        if "fp32" not in runs:
            continue
        ways, end = [name for name in METHODS if name in runs], runs["fp32"]["final"]
        times = {name: [_arrives(runs[name]["curve"], end * (1 + above)) for above in ABOVE] for name in ways}
        columns = [[t for t in column if t is not None] for column in zip(*times.values(), strict=True)]
        first = [min(column) if column else None for column in columns]
        rows = []
        for name in ways:
            last = [f"{runs[name]['seconds']:.1f}", f"{runs[name]['final'] / end - 1:+.2%}"]
            rows.append([name, *_cells(times[name], first), *last])
        head = " | ".join(f"{above:+.0%}" for above in ABOVE)
        steps = runs["fp32"]["steps"]
        lines += [f"## Arrival at {rate}: {model} model", ""]
        about = f"Seconds in a network in a box until the held-out loss is so much above fp32's last one ({end:.4f}), "
        lines.append(f"{about}with {steps} steps each and seed 0. The warm-up counts, losses are taken off the clock.")
        lines += table(f" | {head} | all {steps} steps | last loss to fp32", rows)
    return lines


def _arrives(curve: list[list[float]], level: float) -> float | None:
    """Seconds when a loss is down to a level, straight between the points [step, seconds, loss]."""
    return crossing([(seconds, loss) for _, seconds, loss in curve], level)


def timed(name: str, cost: dict[str, float]) -> bool:
    """Whether all is known that says what a way costs."""
    method = METHODS[name]
    needed = {"no exchange", method.meets_as} if method.every else {method.timed_as or name}
    return needed | ({method.warmup_as} if method.warmup else set()) <= set(cost)


def _listed(seeds: set[int]) -> str:
    return ", ".join(map(str, sorted(seeds)))


def _cells(times: list[float | None], first: list[float | None]) -> list[str]:
    """Seconds; the least of all ways in bold."""
    both = zip(times, first, strict=True)
    return ["" if t is None else f"**{t:.1f}**" if t == least else f"{t:.1f}" for t, least in both]


def meetings_section(cells: Cells, model: str) -> list[str]:
    """Tables of seconds to each loss, a rate each; nothing where no way trains alone."""
    cell, runs = cells.get(f"speed/{model}/{SLOW}"), runs_of(cells, model)
    known = costs(cell, SLOW) if cell else {}
    ways = [name for name in WAYS if name in runs and timed(name, known)]
    if cell is None or "fp32" not in ways or not any(METHODS[name].every for name in ways):
        return []
    steps = next(iter(of(cells, "quality", model).values()))["settings"]["steps"]
    seeds = set.intersection(*(set(runs[name]) for name in ways))
    curves = {name: mean_curve({seed: runs[name][seed] for seed in sorted(seeds)}) for name in ways}
    end = curves["fp32"][-1][1]
    lines = [
        f"## Fewer meetings: {model} model",
        "",
        "Ranks train alone for 10 or 30 steps, then average their parameters in int4, or take DiLoCo's outer step "
        "(0.7, 0.9). Seconds until the held-out loss is down to so much above fp32's last one, computed from bytes, "
        f"compute and the times at {SLOW}; {'seed' if len(seeds) == 1 else 'seeds'} {_listed(seeds)}. A momentum that "
        "was not timed itself is taken to cost what `sign+EF` and `int2+EF` cost. Empty: not reached.",
    ]
    for rate in RATES:
        cost = costs(cell, rate)
        reached = {name: [crossing(curves[name], end * (1 + above)) for above in ABOVE] for name in ways}
        times = {
            name: [None if step is None else spent(name, step, steps, cost) for step in of_way]
            for name, of_way in reached.items()
        }
        columns = [[t for t in column if t is not None] for column in zip(*times.values(), strict=True)]
        first = [min(column) if column else None for column in columns]
        rows = []
        for name, of_way in times.items():
            last = [f"{spent(name, steps, steps, cost):.0f}", f"{curves[name][-1][1] / end - 1:+.1%}"]
            rows.append([name, *_cells(of_way, first), *last])
        head = " | ".join(f"{above:+.0%}" for above in ABOVE)
        lines += ["", f"At {rate}:", *table(f" | {head} | all {steps} steps | last loss to fp32", rows)]
    return lines
