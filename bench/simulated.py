"""What trains best for its bytes: codecs, error feedback, optimizers and the momentum, with simulated workers.

    python bench/simulated.py feedback --device cuda --processes 6 --out bench/results      minutes on a GPU
    python bench/simulated.py momentum --model tiny --steps 40                              to try it on a CPU

`feedback` asks when error feedback helps: three optimizers, 8 to 1 bits, residuals kept whole, decayed or not at all.
`momentum` asks how long the warm-up of a travelling momentum must be, and how its second moment is kept. `clipping`
asks whether gradients are better clipped before they travel or after. Every way is trained at several learning rates,
and counts at its best one: the first seed at all rates, the others (`--seeds 3`) at the best rate of the first.
simulated_workers.py says what a simulated worker is. Results are kept as they come, in simulated.jsonl: a second call
does only what is missing.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
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
from rich.table import Table  # noqa: E402

from narrowcast.byte_gpt import GPTConfig  # noqa: E402
from simulated_workers import Simulation, Way  # noqa: E402

MODELS: dict[str, tuple[GPTConfig, int]] = {
    "large": (GPTConfig(layers=6, width=384, heads=6, context=128), 8),
    "small": (GPTConfig(layers=4, width=128, heads=4, context=64), 4),
    "tiny": (GPTConfig(layers=1, width=32, heads=2, context=32), 2),
}
"""Shape, and sequences a worker and step."""
RATES = {"adamw": (5e-4, 1e-3, 2e-3), "sgd": (0.1, 0.3, 1.0), "muon": (5e-4, 1e-3, 2e-3)}


def feedback_ways() -> Iterable[Way]:
    """Every optimizer at every width, with and without feedback."""
    for optimizer, rates in RATES.items():
        for rate in rates:
            yield Way(optimizer=optimizer, rate=rate)
            for codec, feedback in itertools.product(("int8", "int4", "int3", "int2", "sign"), (0.0, 0.9, 0.95, 1.0)):
                if codec != "int8" or feedback in (0.0, 1.0):
                    yield Way(codec, optimizer, rate, feedback)


def momentum_ways() -> Iterable[Way]:
    """Warm-ups and refreshes, beside fp32 and the gradient in int8 and int4."""
    for rate in RATES["adamw"]:
        yield Way(rate=rate)
        yield Way("int8", rate=rate)
        yield Way("int4", rate=rate, feedback=1.0)
        for warmup, refresh in itertools.product((0.05, 0.1, 0.2), (0, 16, 64, -1)):
            yield Way("sign", rate=rate, feedback=1.0, warmup=warmup, refresh=refresh)
        yield Way("sign", rate=rate, feedback=1.0, warmup=0.1, refresh=-1, warmup_codec="int4")
        yield Way("int2", rate=rate, feedback=1.0, warmup=0.1, refresh=-1)


def clipping_ways() -> Iterable[Way]:
    for rate, clip in itertools.product(RATES["adamw"], ("", "before", "after")):
        for codec, feedback in (("", 0.0), ("int4", 0.0), ("int4", 1.0), ("int2", 0.0), ("int2", 1.0)):
            yield Way(codec, rate=rate, feedback=feedback, clip=clip)
        yield Way("sign", rate=rate, feedback=1.0, warmup=0.1, refresh=-1, clip=clip)


def trial_ways() -> Iterable[Way]:
    for rate in (1e-3, 2e-3):
        yield Way(rate=rate)
        yield Way("int4", rate=rate, feedback=1.0)
        for warmup in (0.05, 0.1, 0.2):
            yield Way("sign", rate=rate, feedback=1.0, warmup=warmup)
            for bound in (0.0, 1.0, 4.0):
                yield Way("sign", rate=rate, feedback=1.0, warmup=warmup, scaled=True, bound=bound)


QUESTIONS = {"trial": trial_ways, "feedback": feedback_ways, "momentum": momentum_ways, "clipping": clipping_ways}


def _key(way: Way, settings: dict[str, Any]) -> str:
    return json.dumps({**dataclasses.asdict(way), **settings}, sort_keys=True)


def _work(ways: Any, results: Any, settings: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high" if settings["tf32"] else "highest")
    config, batch = MODELS[settings["model"]]
    simulation = Simulation(config, batch, settings["steps"], settings["workers"], settings["device"])
    while (way := ways.get()) is not None:
        start = time.perf_counter()
        found = simulation.train(way)
        results.put((way, {**found, "seconds": round(time.perf_counter() - start, 2)}))


def run(ways: list[Way], settings: dict[str, Any], processes: int, file: Path) -> dict[str, Any]:
    """Train what is not in the file yet, some side by side; the results of all."""
    lines = file.read_text().splitlines() if file.exists() else []
    known = {line["key"]: line["found"] for line in map(json.loads, lines)}
    missing = [way for way in ways if _key(way, settings) not in known]
    context = multiprocessing.get_context("spawn")
    todo, results = context.Queue(), context.Queue()
    for way in [*missing, *[None] * processes]:
        todo.put(way)
    workers = [context.Process(target=_work, args=(todo, results, settings), daemon=True) for _ in range(processes)]
    for worker in workers if missing else ():
        worker.start()
    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress, file.open("a") as output:
        task = progress.add_task("training", total=len(missing))
        for _ in missing:
            way, found = results.get()
            key = _key(way, settings)
            known[key] = found
            output.write(json.dumps({"key": key, "found": found}) + "\n")
            output.flush()
            progress.advance(task)
    return known


def at_best(ways: list[Way], known: dict[str, Any], settings: dict[str, Any]) -> dict[Way, tuple[float, float]]:
    """Of each way, whatever its rate: the lowest loss, and the rate that gave it."""
    best: dict[Way, tuple[float, float]] = {}
    for way in ways:
        here = (_final(way, known, settings), way.rate)
        plain = dataclasses.replace(way, rate=0.0)
        best[plain] = min(best.get(plain, here), here)
    return best


def _final(way: Way, known: dict[str, Any], settings: dict[str, Any]) -> float:
    final = known[_key(way, settings)]["final"]
    return final if final == final else float("inf")


def table(best: list[Way], more: list[Way], known: dict[str, Any], settings: dict[str, Any]) -> Table:
    """Each way at its best rate over all seeds, beside fp32 with the same optimizer and clipping."""
    losses: dict[Way, list[float]] = {way: [] for way in best}
    for way in [*best, *more]:
        losses[dataclasses.replace(way, seed=0)].append(_final(way, known, settings))
    fp32 = {
        (way.optimizer, way.clip): statistics.mean(losses[way]) for way in best if not way.codec and not way.momentum
    }
    columns = (
        "optimizer",
        "codec",
        "bits",
        "feedback",
        "clip",
        "warm-up",
        "refresh",
        "rate",
        "loss",
        "apart",
        "to fp32",
    )
    shown = Table(
        *columns,
        title=f"{settings['model']}, {settings['steps']} steps, {settings['workers']} workers",
    )
    for way, finals in losses.items():
        loss, scatter = statistics.mean(finals), max(finals) - min(finals)
        warm = f"{way.warmup:.0%} {way.warmup_codec}" if way.momentum else ""
        refresh = {0: "", -1: "growing"}.get(way.refresh, str(way.refresh)) if way.momentum else ""
        bits = known[_key(way, settings)]["bits"]
        cells = (way.optimizer, way.codec or "fp32", f"{bits:.2f}", f"{way.feedback:g}", way.clip, warm, refresh)
        above = loss / fp32[way.optimizer, way.clip] - 1
        shown.add_row(*cells, f"{way.rate:g}", f"{loss:.4f}", f"{scatter:.4f}", f"{above:+.1%}")
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question", choices=QUESTIONS)
    parser.add_argument("--model", choices=MODELS, default="large")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--tf32", action="store_true", help="products on a GPU in TF32")
    parser.add_argument("--only", default="", help="ways whose repr has all of these words, separated by commas")
    parser.add_argument("--out", type=Path, default=Path("."))
    options = parser.parse_args()
    settings = {name: getattr(options, name) for name in ("model", "steps", "workers", "device", "tf32")}
    ways = list(QUESTIONS[options.question]())
    ways = [way for way in ways if not way.codec or all(word in repr(way) for word in options.only.split(","))]
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "simulated.jsonl"
    known = run(ways, settings, options.processes, file)
    best = [dataclasses.replace(way, rate=rate) for way, (_, rate) in at_best(ways, known, settings).items()]
    more = [dataclasses.replace(way, seed=seed) for seed in range(1, options.seeds) for way in best]
    known = run(more, settings, options.processes, file)
    Console(width=130).print(table(best, more, known, settings))


if __name__ == "__main__":
    main()
