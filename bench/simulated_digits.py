"""When error feedback helps: a small vision model, four simulated workers, SGD with momentum beside AdamW.

    python bench/simulated_digits.py [--optimizers sgd,adamw] [--steps 200] [--seeds 3] [--file digits.jsonl]

A convolutional network of 30 thousand parameters learns scikit-learn's digits (8 x 8 pixels, a third kept for the
test). Workers, codecs and residuals are those of simulated_workers.py. Every way is trained at two learning rates and
three seeds, and counts at its best rate by the mean test loss. Results are kept as they come: a second call does only
what is missing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from dataclasses import asdict
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src"), str(HERE.parent / "examples")]

import torch  # noqa: E402
from sklearn.datasets import load_digits  # noqa: E402
from sklearn.model_selection import train_test_split  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from simulated_gradients import Flat, one_by_one  # noqa: E402
from simulated_workers import Run, Way  # noqa: E402

RATES = {"sgd": (0.05, 0.15), "adamw": (2e-3, 6e-3)}
WORKERS, BATCH = 4, 16


def network(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    convolutions = nn.Conv2d(1, 16, 3, 1, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU()
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(512, 48), nn.ReLU(), nn.Linear(48, 10))


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x), y)


def train(way: Way, steps: int) -> tuple[float, float]:
    """The loss on the test images, and the share of them that are told right."""
    images, labels = load_digits(return_X_y=True)
    split = train_test_split(images, labels, test_size=1 / 3, random_state=0, stratify=labels)
    x, x_test = (torch.tensor(each, dtype=torch.float32).view(-1, 1, 8, 8) / 16 for each in split[:2])
    y, y_test = (torch.tensor(each) for each in split[2:])
    flat = Flat(network(way.seed), WORKERS)
    run, generator = Run(way, flat, steps), torch.Generator().manual_seed(way.seed)
    for step in range(steps):
        chosen = torch.randint(len(x), (WORKERS * BATCH,), generator=generator)
        one_by_one(flat, loss_of, x[chosen], y[chosen])
        run.step(torch.tensor([step]), "gradient")
    with torch.no_grad():
        scores = flat.model(x_test)
        return float(nn.functional.cross_entropy(scores, y_test)), float((scores.argmax(1) == y_test).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--optimizers", default="sgd,adamw")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--file", type=Path, default=Path("digits.jsonl"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    known = {}
    for line in options.file.read_text().splitlines() if options.file.exists() else ():
        key, figures = json.loads(line)
        known[key] = figures
    print("| optimizer | codec | feedback | best rate | test loss | told right |\n|---|---|---:|---:|---:|---:|")
    kinds = [("", 0.0), *itertools.product(("int4", "int2", "sign"), (0.0, 0.9, 1.0))]
    for optimizer, (codec, feedback) in itertools.product(options.optimizers.split(","), kinds):
        means = []
        for rate in RATES[optimizer]:
            runs = []
            for seed in range(options.seeds):
                way = Way(codec, optimizer, rate, feedback, seed=seed)
                key = json.dumps([asdict(way), options.steps], sort_keys=True)
                if key not in known:
                    known[key] = train(way, options.steps)
                    with options.file.open("a") as file:
                        file.write(json.dumps([key, known[key]]) + "\n")
                runs.append(known[key])
            losses, right = zip(*runs, strict=True)
            mean = statistics.mean(losses)
            means.append((mean if mean == mean else float("inf"), rate, statistics.mean(right)))
        loss, rate, right = min(means)
        cells = optimizer, codec or "fp32", f"{feedback:g}", f"{rate:g}", f"{loss:.4f}", f"{right:.2%}"
        print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
