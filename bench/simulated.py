"""What trains best for its bytes: codecs, error feedback, optimizers and the momentum, with simulated workers.

    python bench/simulated.py all --tf32 --processes 14 --steps 400 --seeds 3 --out bench/results   minutes on a GPU
    python bench/simulated.py momentum --model tiny --steps 40                                       to try it on a CPU
    python bench/simulated.py all ... --report                                 tables of what is there; trains nothing

`feedback` asks when error feedback helps: three optimizers, 8 to 1 bits, residuals kept whole, decayed or not at all.
`momentum` asks how long the warm-up of a travelling momentum must be, how its second moment is kept and what it may
travel in, beside gradients and PowerSGD. `clipping` asks whether gradients are better clipped before they travel or
after, and `residuals` what it costs to hold residuals in 8 bits. Every way is trained at several learning rates, and
counts at its best one: the first seed at all rates, the others (`--seeds 3`) at the best rate of the first.
simulated_workers.py says what a simulated worker is. Results are kept as they come, in simulated.jsonl: a second call
does only what is missing.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src"), str(HERE.parent / "examples")]

import torch  # noqa: E402
import torch.multiprocessing as multiprocessing  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.progress import Progress  # noqa: E402

import simulated_report  # noqa: E402
from narrowcast.byte_gpt import GPTConfig  # noqa: E402
from simulated_workers import Simulation, Way  # noqa: E402

MODELS: dict[str, tuple[GPTConfig, int]] = {
    "large": (GPTConfig(layers=6, width=384, heads=6, context=128), 8),
    "small": (GPTConfig(layers=4, width=128, heads=4, context=64), 4),
    "tiny": (GPTConfig(layers=1, width=32, heads=2, context=32), 2),
}
"""Shape, and sequences a worker and step."""
RATES = {
    "adamw": (3.5e-4, 5e-4, 7e-4, 1e-3, 1.4e-3),
    "sgd": (0.01, 0.03, 0.1),
    "muon": (5e-4, 1e-3, 2e-3, 4e-3),
}
SENT = {"feedback": 1.0, "scaled": True, "bound": 4.0}
"""How the library sends a momentum."""


def feedback_ways() -> Iterable[Way]:
    """Every optimizer at every width, with and without feedback."""
    for optimizer, rates in RATES.items():
        for rate in rates:
            yield Way(optimizer=optimizer, rate=rate)
            for codec, feedback in itertools.product(("int8", "int4", "int3", "int2", "sign"), (0.0, 0.9, 0.95, 1.0)):
                if codec != "int8" or feedback in (0.0, 1.0):
                    yield Way(codec, optimizer, rate, feedback)


def momentum_ways() -> Iterable[Way]:
    """Warm-ups, refreshes and codecs, beside fp32, gradients in int8 and int4, and PowerSGD."""
    for rate in RATES["adamw"]:
        yield Way(rate=rate)
        yield Way("int8", rate=rate)
        yield Way("int4", rate=rate, feedback=1.0)
        yield from (Way(f"powersgd{rank}", rate=rate, feedback=1.0, warmup=0.1) for rank in (1, 2, 4))
        for warmup, refresh in itertools.product((0.05, 0.1, 0.2), (0, 16, -1)):
            yield Way("sign", rate=rate, warmup=warmup, refresh=refresh, **SENT)
        tenth = Way("sign", rate=rate, warmup=0.1, **SENT)
        yield dataclasses.replace(tenth, warmup_codec="int4")
        yield dataclasses.replace(tenth, scaled=False, bound=0.0)
        yield dataclasses.replace(tenth, follow=True)
        yield from (dataclasses.replace(tenth, codec=codec) for codec in ("sign:block=128", "int2", "int4", "raw"))


def clipping_ways() -> Iterable[Way]:
    for rate, clip in itertools.product(RATES["adamw"], ("", "before", "after")):
        for codec, feedback in (("", 0.0), ("int4", 0.0), ("int4", 1.0), ("int2", 0.0), ("int2", 1.0)):
            yield Way(codec, rate=rate, feedback=feedback, clip=clip)
        yield Way("sign", rate=rate, warmup=0.1, clip=clip, **SENT)


def residuals_ways() -> Iterable[Way]:
    for rate, held in itertools.product(RATES["adamw"], ("", "int8")):
        yield Way(rate=rate)
        yield Way("int4", rate=rate, feedback=1.0, residual_codec=held)
        yield Way("sign", rate=rate, warmup=0.1, residual_codec=held, **SENT)


QUESTIONS = {
    "feedback": feedback_ways,
    "momentum": momentum_ways,
    "clipping": clipping_ways,
    "residuals": residuals_ways,
}


def all_ways() -> Iterable[Way]:
    """Of all questions, each way once."""
    return dict.fromkeys(itertools.chain(*(ways() for ways in QUESTIONS.values())))


def _key(way: Way, settings: dict[str, Any]) -> str:
    return json.dumps({**dataclasses.asdict(way), **settings}, sort_keys=True)


def _work(ways: Any, results: Any, settings: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high" if settings["tf32"] else "highest")
    config, batch = MODELS[settings["model"]]
    simulation = Simulation(config, batch, settings["steps"], settings["workers"], settings["device"])
    while (way := ways.get()) is not None:
        start = time.perf_counter()
        try:
            found = simulation.train(way)
        except Exception as error:  # the main process ends with it, instead of waiting for ever
            results.put((way, f"{type(error).__name__}: {error}"))
            raise
        results.put((way, {**found, "seconds": round(time.perf_counter() - start, 2)}))


class Runs:
    """What has been trained, in a file and here, and processes that train more."""

    def __init__(self, settings: dict[str, Any], processes: int, file: Path) -> None:
        self.settings, self.file, self._processes = settings, file, processes
        lines = file.read_text().splitlines() if file.exists() else []
        self.known: dict[str, Any] = {line["key"]: line["found"] for line in map(json.loads, lines)}
        context = multiprocessing.get_context("spawn")
        self._todo, self._results = context.Queue(), context.Queue()
        self._workers = [
            context.Process(target=_work, args=(self._todo, self._results, settings), daemon=True)
            for _ in range(processes)
        ]
        self._started = False

    def has(self, way: Way) -> bool:
        return _key(way, self.settings) in self.known

    def of(self, way: Way) -> dict[str, Any]:
        found: dict[str, Any] = self.known[_key(way, self.settings)]
        return found

    def final(self, way: Way) -> float:
        loss = self.of(way)["final"]
        return loss if loss == loss else float("inf")

    def train(self, ways: Iterable[Way]) -> None:
        """Train what is not there yet, some side by side."""
        missing = [way for way in ways if not self.has(way)]
        if missing and not self._started:
            for worker in self._workers:
                worker.start()
            self._started = True
        for way in missing:
            self._todo.put(way)
        with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress:
            task = progress.add_task("training", total=len(missing))
            for _ in missing:
                self._add(*self._results.get())
                progress.advance(task)

    def _add(self, way: Way, found: dict[str, Any] | str) -> None:
        if isinstance(found, str):
            raise RuntimeError(f"{way}: {found}")
        key = _key(way, self.settings)
        self.known[key] = found
        with self.file.open("a") as output:
            output.write(json.dumps({"key": key, "found": found}) + "\n")

    def end(self) -> None:
        for _ in self._workers if self._started else ():
            self._todo.put(None)
        for worker in self._workers if self._started else ():
            worker.join()


def at_best(ways: Iterable[Way], runs: Runs) -> list[Way]:
    """Each way, with the rate at which its first seed ended lowest."""
    best: dict[Way, Way] = {}
    for way in ways:
        if runs.has(way):
            plain = dataclasses.replace(way, rate=0.0)
            best[plain] = min(best.get(plain, way), way, key=runs.final)
    return list(best.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question", choices=[*QUESTIONS, "all"])
    parser.add_argument("--model", choices=MODELS, default="large")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--tf32", action="store_true", help="products on a GPU in TF32")
    parser.add_argument("--only", default="", help="ways whose repr has all of these words, separated by commas")
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--report", action="store_true", help="print tables of what is there")
    options = parser.parse_args()
    settings = {name: getattr(options, name) for name in ("model", "steps", "workers", "device", "tf32")}
    ways = list(all_ways() if options.question == "all" else QUESTIONS[options.question]())
    ways = [way for way in ways if not way.codec or all(word in repr(way) for word in options.only.split(","))]
    options.out.mkdir(parents=True, exist_ok=True)
    runs = Runs(settings, options.processes, options.out / "simulated.jsonl")
    if not options.report:
        runs.train(ways)
        runs.train(
            dataclasses.replace(way, seed=seed) for seed in range(1, options.seeds) for way in at_best(ways, runs)
        )
        runs.end()
    print(simulated_report.tables(at_best(ways, runs), runs))


if __name__ == "__main__":
    main()
