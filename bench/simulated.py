"""What trains best for its bytes: codecs, error feedback, optimizers and the momentum, with simulated workers.

    python bench/simulated.py --tf32 --processes 14 --seeds 3 --out bench/results       minutes on a GPU
    python bench/simulated.py momentum --model tiny --steps 40                          to try it on a CPU
    python bench/simulated.py adamw,sgd ... --report                                    tables of what is there

`adamw`, `sgd` and `muon` ask when error feedback helps: 8 to 1 bits, residuals kept whole, decayed or not at all.
`momentum` asks how long the warm-up of a travelling momentum must be, how its second moment is kept and what it may
travel in, beside PowerSGD. `clipping` asks whether gradients are better clipped before they travel or after, and
`residuals` what it costs to hold residuals in 8 bits. A way with several learning rates counts at its best one: the
first seed is trained at all rates, the others (`--seeds 3`) at the best rate of the first. `ahead` asks what is really
ahead with clipped gradients: all seeds are trained at all rates, and the rate with the lowest mean counts.
simulated_workers.py says what a simulated worker is. Results are kept as they come, in simulated.jsonl: a second call
does only what is missing.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import signal
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
SENT = {"feedback": 1.0, "scaled": True, "bound": 4.0}
"""How the library sends a momentum."""
RATES = (7e-4, 1e-3, 1.4e-3)
"""Of AdamW: fp32 is best at the middle one, and far worse at 5e-4 and 2e-3."""
AS_FP32 = 0.0
"""In place of a rate: the one at which fp32, with the same optimizer and clipping after the sum, is best."""


def adamw_ways() -> Iterable[Way]:
    """8 to 1 bits with and without feedback. The rate that is best without a codec and with two is taken for all."""
    for rate in RATES:
        yield Way(rate=rate)
        yield Way("int4", rate=rate, feedback=1.0)
        yield Way("int2", rate=rate)
    for codec, feedback in itertools.product(("int8", "int4", "int3", "int2", "sign"), (0.0, 0.9, 1.0)):
        if codec != "int8" or feedback != 0.9:
            yield Way(codec, feedback=feedback)


def sgd_ways() -> Iterable[Way]:
    return _at_best_rate("sgd", (0.03, 0.1))


def muon_ways() -> Iterable[Way]:
    return _at_best_rate("muon", (1e-3, 2e-3, 4e-3))


def _at_best_rate(optimizer: str, rates: Iterable[float]) -> Iterable[Way]:
    """fp32 at some rates, and codecs at the best of them."""
    yield from (Way(optimizer=optimizer, rate=rate) for rate in rates)
    for codec, feedback in itertools.product(("int4", "int2", "sign"), (0.0, 1.0)):
        yield Way(codec, optimizer, AS_FP32, feedback)


def momentum_ways() -> Iterable[Way]:
    """Warm-ups, refreshes and codecs of the momentum, beside PowerSGD."""
    for rate in RATES[1:]:
        yield Way(rate=rate)
        for warmup, codec in ((0.1, "int8"), (0.2, "int8"), (0.1, "int4"), (0.2, "int4"), (0.3, "int4")):
            yield Way("sign", rate=rate, warmup=warmup, warmup_codec=codec, **SENT)
        fifth = Way("sign", rate=rate, warmup=0.2, warmup_codec="int4", **SENT)
        yield dataclasses.replace(fifth, refresh=-1)
        yield dataclasses.replace(fifth, feedback=0.9)
        yield from (dataclasses.replace(fifth, codec=f"sign:block={block}") for block in (32, 128))
        yield from (dataclasses.replace(fifth, codec="int2", warmup=warmup) for warmup in (0.1, 0.2))
    yield from (Way(f"powersgd{rank}", feedback=1.0, warmup=0.1) for rank in (1, 2, 4))


def clipping_ways() -> Iterable[Way]:
    """Higher rates, too: clipped gradients bear them."""
    momentums = [Way(codec, warmup=0.2, warmup_codec="int4", **SENT) for codec in ("sign", "int2")]
    ways = Way(), Way("int4", feedback=1.0), Way("int2"), *momentums
    for way, rate in itertools.product(ways, (1e-3, 1.4e-3, 2e-3)):
        yield dataclasses.replace(way, rate=rate, clip="after")
    for way in (Way(), Way("int4", feedback=1.0)):
        yield dataclasses.replace(way, rate=AS_FP32, clip="before")


def ahead_ways() -> Iterable[Way]:
    """What is close after clipping, at rates around the best (which has more seeds): gradients in 2 bits, the momentum,
    its warm-ups."""
    momentums = [Way(codec, warmup=0.2, warmup_codec="int4", **SENT) for codec in ("sign", "int2")]
    for way, best in ((Way(), 1e-3), (Way("int2"), 1.4e-3), *((way, 1e-3) for way in momentums)):
        for rate in RATES:
            for seed in range(11 if rate == best else 5):
                yield dataclasses.replace(way, rate=rate, clip="after", seed=seed)
    for (warmup, codec), seed in itertools.product(((0.2, "int8"), (0.1, "int4"), (0.1, "int8")), range(5)):
        yield Way("sign", warmup=warmup, warmup_codec=codec, **SENT, clip="after", seed=seed)


def residuals_ways() -> Iterable[Way]:
    """Residuals held in fp32, and in int8."""
    fifth = Way("sign", warmup=0.2, warmup_codec="int4", **SENT)
    for way in (Way("int4", feedback=1.0), fifth):
        yield from (dataclasses.replace(way, residual_codec=codec) for codec in ("", "int8"))


QUESTIONS = {
    "adamw": adamw_ways,
    "sgd": sgd_ways,
    "muon": muon_ways,
    "momentum": momentum_ways,
    "clipping": clipping_ways,
    "ahead": ahead_ways,
    "residuals": residuals_ways,
}


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
    """Each way, with the rate at which its seeds ended lowest, of those with the most seeds; as of its first seed."""
    best: dict[Way, Way] = {}
    for way in (dataclasses.replace(way, seed=0) for way in ways):
        if runs.has(way):
            plain = dataclasses.replace(way, rate=0.0)
            best[plain] = min(best.get(plain, way), way, key=lambda each: _rank(each, runs))
    return list(best.values())


def _rank(way: Way, runs: Runs) -> tuple[int, float]:
    seeds = (dataclasses.replace(way, seed=seed) for seed in range(simulated_report.SEEDS))
    finals = [runs.final(each) for each in seeds if runs.has(each)]
    return -len(finals), sum(finals) / len(finals)


def with_rates(ways: Iterable[Way], runs: Runs) -> list[Way]:
    """Ways with fp32's best rate in place of `AS_FP32`; those without one are left out."""
    best = {(way.optimizer, bool(way.clip)): way.rate for way in at_best(ways, runs) if not way.codec}
    rates = [(way, way.rate or best.get((way.optimizer, bool(way.clip)), AS_FP32)) for way in ways]
    return [dataclasses.replace(way, rate=rate) for way, rate in rates if rate != AS_FP32]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions", nargs="?", default=",".join(QUESTIONS), help=f"of {', '.join(QUESTIONS)}")
    parser.add_argument("--model", choices=MODELS, default="large")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--tf32", action="store_true", help="products on a GPU in TF32")
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--report", action="store_true", help="print tables of what is there")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and ends the processes; `timeout` then leaves none behind
    settings = {name: getattr(options, name) for name in ("model", "steps", "workers", "device", "tf32")}
    if wrong := set(options.questions.split(",")) - set(QUESTIONS):
        parser.error(f"questions: there is no {sorted(wrong)}; there are {list(QUESTIONS)}")
    ways = list(dict.fromkeys(way for question in options.questions.split(",") for way in QUESTIONS[question]()))
    options.out.mkdir(parents=True, exist_ok=True)
    runs = Runs(settings, options.processes, options.out / "simulated.jsonl")
    if not options.report:
        runs.train(way for way in ways if way.rate != AS_FP32)
    ways = with_rates(ways, runs)
    if not options.report:
        best = at_best([way for way in ways if runs.has(way)], runs)
        best += [way for way in ways if not runs.has(way)]
        runs.train(dataclasses.replace(way, seed=seed) for seed in range(options.seeds) for way in best)
        runs.end()
    print(simulated_report.tables(at_best(ways, runs), runs))


if __name__ == "__main__":
    main()
