"""Training over slow links: a byte-level GPT under DDP, four ranks, compressed gradients beside competitors.

    python bench/training.py --out bench/results            all of it, as root: tables, training.{md,json,png}; hours
    ... --only speed,quality,memory,report                  parts; `report` writes tables and plots of what is there
    ... --steps 600  --seeds 3  --rates 100mbit,1gbit  --methods "fp32,int4+EF"  --speed-models large,small

The text is the source of Python's standard library. `large` has 10.9 million parameters, `small` 0.9: the compute of
four ranks shares this machine's cores, so the many trainings of `quality` take the small one unless told otherwise.

    speed     seconds a step in a network in a box (bench/netlab): in one run the methods take turns, figures are
              medians over the rounds of the slowest rank's time. `compute` is a step without any exchange (DDP's
              no_sync), taken in the same turns; `exposed` is what a method takes beyond that; `wire` is the time that
              the counted bytes take at the link's rate. Bytes are the kernel's count on the interface, the most of any
              rank.
    quality   loss on text that is never trained on, after the same steps from the same weights on the same batches, for
              several seeds: real DDP on the loopback interface. `to fp32` pairs runs of the same seed. A curve's points
              before the last are taken on a quarter of that text.
    sweep     `quality` at several learning rates (`--learning-rates 1e-3,2e-3`), and each method at its best one.
    race      loss after the same seconds in a network in a box: each method makes as many steps as `speed` at that rate
              says it can (`--seconds 40`), with the learning rate's schedule over these steps (`--race-seeds 0,1,2`).
              Methods whose time a step, or that of their warm-up, was not taken are left out.
    arrival   seconds to a loss, raced: so many steps (`--steps 600`) in a network in a box. Twenty times under way the
              clock stands still, and the loss on all of the held-out text is taken. One seed.
    memory    what a compression keeps between steps, in bytes a parameter, and rank 0's peak memory beside DDP's own.

`report` also computes time to a loss: the curve of `quality` on the clock of `speed`, for the same model; steps of a
warm-up cost what fp32 costs, or int8 where the momentum travels after it. Every result is written when it is there,
and a second call does only what is missing (`--again`: all).
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src")]

from rich.console import Console  # noqa: E402
from rich.progress import Progress  # noqa: E402

import training_meetings  # noqa: E402
import training_plots  # noqa: E402
import training_ranks  # noqa: E402
import training_report  # noqa: E402
import training_sweep  # noqa: E402
from machine import sentence  # noqa: E402
from narrowcast.byte_gpt import GPTConfig  # noqa: E402
from narrowcast.netlab.tcp import choose  # noqa: E402
from training_methods import METHODS  # noqa: E402

RANKS = 4
MODELS: dict[str, dict[str, Any]] = {
    "large": {"config": asdict(GPTConfig(layers=6, width=384, heads=6, context=64)), "batch": 2, "rate": 5e-4},
    "small": {"config": asdict(GPTConfig(layers=4, width=128, heads=4, context=64)), "batch": 4, "rate": 1e-3},
    "tiny": {"config": asdict(GPTConfig(layers=1, width=32, heads=2, context=32)), "batch": 2, "rate": 3e-3},
}
"""Shape, sequences a step and rank, and learning rate; `tiny` is for trying the bench itself."""
PARTS = ("speed", "quality", "sweep", "race", "arrival", "memory", "report")
SPEED = (
    *("fp32", "fp16 hook", "PowerSGD 1", "PowerSGD 4", "per-tensor hook"),
    *("int8", "int4+EF", "int2+EF", "int2", "sign+EF", "momentum sign", "auto", "no exchange"),
)
NOT_TRAINED = {"auto", "no exchange"}
POINTS = 20
"""Losses that `arrival` takes on the way."""


class Results:
    """training.json: settings and figures of each cell, written at once, so that a run can be stopped and taken up."""

    def __init__(self, path: Path, again: bool) -> None:
        self.path, self.again = path, again
        self.cells: dict[str, Any] = json.loads(path.read_text())["cells"] if path.exists() else {}

    def missing(self, key: str, settings: dict[str, Any]) -> bool:
        cell = self.cells.get(key)
        return self.again or cell is None or cell["settings"] != settings or "failed" in cell["found"]

    def add(self, key: str, settings: dict[str, Any], figures: Any) -> None:
        self.cells[key] = {"settings": settings, "found": figures, "date": str(datetime.date.today())}
        whole = {"machine": sentence(), "cells": dict(sorted(self.cells.items()))}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".part")
        partial.write_text(json.dumps(whole, indent=1) + "\n")
        partial.replace(self.path)


def launch(job: dict[str, Any], *before: str) -> list[dict[str, Any]]:
    """Run a job on its ranks, in a network in a box or wherever `before` puts them; what rank 0 wrote, line by line."""
    with tempfile.TemporaryDirectory() as folder:
        job = {**job, "output": f"{folder}/out"}
        environment = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", **os.environ}
        command = [sys.executable, *before, __file__, "--rank", json.dumps(job)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{job['part']} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"[:4000])
        return [json.loads(line) for line in Path(f"{folder}/out").read_text().splitlines()]


def loopback() -> list[str]:
    return ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]


def lab(rate: str) -> list[str]:
    """A network in a box."""
    return [str(HERE / "netlab"), "--ranks", str(RANKS), "--only", "0", "--tcp", choose(), "--rate", rate]


# -- parts -------------------------------------------------------------------------------------------------------------


def speed(given: argparse.Namespace, results: Results, progress: Progress) -> None:
    methods = [name for name in SPEED if name in given.methods]
    cells = [(model, rate) for model in given.speed_models for rate in given.rates]
    bar = progress.add_task("speed", total=len(cells))
    for model, rate in cells:
        turn = 2 if rate.endswith("mbit") else 5
        settings = {**MODELS[model], "methods": methods, "rounds": given.rounds, "turn": turn, "ranks": RANKS}
        key = f"speed/{model}/{rate}"
        progress.update(bar, description=key)
        if results.missing(key, settings):
            (figures,) = launch({"part": "speed", **settings}, *lab(rate), "--", sys.executable)
            results.add(key, settings, figures)
        progress.advance(bar)


def quality(given: argparse.Namespace, results: Results, progress: Progress) -> None:
    methods = [name for name in METHODS if name in given.methods and name not in NOT_TRAINED]
    bar = progress.add_task("quality", total=len(methods) * given.seeds)
    settings = {**MODELS[given.quality_model], "steps": given.steps, "ranks": RANKS}
    # Seeds on the outside: a run that is stopped early has all methods of its first seeds.
    for seed in range(given.seeds):
        for name in methods:
            key = f"quality/{given.quality_model}/{name}/{seed}"
            progress.update(bar, description=key)
            if results.missing(key, settings):
                job = {"part": "quality", **settings, "method": name, "seeds": [seed]}
                results.add(key, settings, _trained(job, progress))
            progress.advance(bar)


def sweep(given: argparse.Namespace, results: Results, progress: Progress) -> None:
    methods = [name for name in METHODS if name in given.methods and name not in NOT_TRAINED]
    bar = progress.add_task("sweep", total=len(methods) * given.seeds * len(given.learning_rates))
    for seed, rate, name in itertools.product(range(given.seeds), given.learning_rates, methods):
        key = f"sweep/{given.quality_model}/{name}/{rate}/{seed}"
        settings = {**MODELS[given.quality_model], "rate": float(rate), "steps": given.steps, "ranks": RANKS}
        progress.update(bar, description=key)
        if results.missing(key, settings):
            job = {"part": "quality", **settings, "method": name, "seeds": [seed]}
            results.add(key, settings, _trained(job, progress))
        progress.advance(bar)


def race(given: argparse.Namespace, results: Results, progress: Progress) -> None:
    methods = [name for name in METHODS if name in given.methods and name not in NOT_TRAINED]
    bar = progress.add_task("race", total=len(methods) * len(given.rates) * len(given.race_seeds))
    for rate, seed in itertools.product(given.rates, map(int, given.race_seeds)):
        cell = results.cells.get(f"speed/{given.quality_model}/{rate}")
        if cell is None:
            raise SystemExit(f"race: needs `--only speed --speed-models {given.quality_model} --rates {rate}` first")
        cost = training_report.seconds_of(cell)
        for name in (name for name in methods if training_meetings.timed(name, cost)):
            race_of = f"{given.seconds:g} s" + (f" seed {seed}" if seed else "")
            key = f"race/{given.quality_model}/{rate}/{race_of}/{name}"
            progress.update(bar, description=key)
            steps = training_meetings.steps_within(name, given.seconds, cost)
            settings = {**MODELS[given.quality_model], "ranks": RANKS, "seconds": given.seconds, "steps": steps}
            if results.missing(key, settings):
                job = {"part": "race", **settings, "method": name, "seed": seed}
                results.add(key, settings, launch(job, *lab(rate), "--", sys.executable)[0])
            progress.advance(bar)


def arrival(given: argparse.Namespace, results: Results, progress: Progress) -> None:
    methods = [name for name in METHODS if name in given.methods and name not in NOT_TRAINED]
    bar = progress.add_task("arrival", total=len(methods) * len(given.rates))
    settings = {**MODELS[given.quality_model], "ranks": RANKS, "steps": given.steps, "points": POINTS}
    for rate, name in itertools.product(given.rates, methods):
        key = f"arrival/{given.quality_model}/{rate}/{name}"
        progress.update(bar, description=key)
        if results.missing(key, settings):
            job = {"part": "race", **settings, "method": name}
            results.add(key, settings, launch(job, *lab(rate), "--", sys.executable)[0])
        progress.advance(bar)


def _trained(job: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """A method that fails is a result, too: it is shown, and the others go on."""
    try:
        return launch(job, *loopback())[0]
    except RuntimeError as error:
        progress.console.print(f"{job['method']}: {error}", style="red", markup=False)
        return {"failed": str(error)[:600]}


def memory(given: argparse.Namespace, results: Results, progress: Progress) -> None:
    methods = [name for name in METHODS if name in given.methods and name not in NOT_TRAINED]
    bar = progress.add_task("memory", total=len(methods) * len(given.speed_models))
    for model in given.speed_models:
        for name in methods:
            key, settings = f"memory/{model}/{name}", {**MODELS[model], "ranks": RANKS}
            progress.update(bar, description=key)
            if results.missing(key, settings):
                (figures,) = launch({"part": "memory", **settings, "method": name}, *loopback())
                results.add(key, settings, figures)
            progress.advance(bar)


def write(cells: dict[str, Any], folder: Path, about: str, name: str = "training") -> str:
    """training.md and its pictures; the text. Under another name, no pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = training_report.tables(cells, about)
    for model in MODELS:
        lines += training_sweep.sweep_section(cells, model)
        lines += training_meetings.meetings_section(cells, model) + training_meetings.race_section(cells, model)
        lines += training_meetings.arrival_section(cells, model)
        drawn = name == "training" and model in training_report.trained(cells)
        pictures = training_plots.draw(cells, model, folder) if drawn else {}
        lines += [f"![{what}]({picture})" for picture, what in pictures.items()]
    text = "\n".join(lines).rstrip() + "\n"
    (folder / f"{name}.md").write_text(text)
    return text


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS), help=f"parts, of {', '.join(PARTS)}")
    parser.add_argument("--steps", type=int, default=600, help="of each training in `quality`")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rates", default="100mbit,1gbit")
    parser.add_argument("--learning-rates", default="5e-4,1e-3,2e-3", help="of `sweep`")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each method in `speed`")
    parser.add_argument("--seconds", type=float, default=40, help="of each training in `race`")
    parser.add_argument("--race-seeds", default="0", help="of `race`")
    here = [name for name, method in METHODS.items() if method.kind != "torchft" or find_spec("torchft")]
    parser.add_argument("--methods", default=",".join(here))
    parser.add_argument("--speed-models", default="large,small", help="for `speed` and `memory`")
    parser.add_argument("--quality-model", default="small", choices=MODELS, help="for `quality` and `race`")
    parser.add_argument("--again", action="store_true", help="do what is there already, too")
    parser.add_argument("--out", type=Path, default=HERE.parent / "build" / "training", help="folder for the results")
    parser.add_argument("--name", default="training", help="of the files there: training.json and training.md")
    parser.add_argument("--note", default="", help="a sentence for the head of training.md")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    given = parser.parse_args()
    lists: dict[str, Any] = {"only": PARTS, "methods": METHODS, "speed_models": MODELS}
    for name, known in (lists | dict.fromkeys(("rates", "learning_rates", "race_seeds"))).items():
        words = getattr(given, name).split(",")
        if known and (wrong := set(words) - set(known)):
            parser.error(f"--{name.replace('_', '-')}: there is no {sorted(wrong)}; there are {list(known)}")
        setattr(given, name, words)
    return given


def main() -> None:
    given = options()
    if given.rank:
        training_ranks.main(json.loads(given.rank))
        return
    results = Results(given.out / f"{given.name}.json", given.again)
    with Progress(console=Console(stderr=True)) as progress:
        for part in (speed, quality, sweep, race, arrival, memory):
            if part.__name__ in given.only:
                part(given, results, progress)
    if "report" in given.only:
        about = f"{sentence()}. {given.note}".rstrip()
        print(write(results.cells, given.out, about, given.name))


if __name__ == "__main__":
    main()
