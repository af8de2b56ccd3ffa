"""Train a small convolutional network on handwritten digits, in floats, then with weights and inputs of 4, 3 and 2 bits.

    python examples/qat_digits.py [--epochs 20] [--seeds 3] [--bits 4 3 2] [--plot qat_digits.png]

The data is scikit-learn's `digits`, 1,797 real images of 8 x 8 pixels; a third of them is kept for the test. Each row of
the table is the test accuracy over the seeds: mean and spread. Every quantized network starts from the float one of its
seed, and is packed by `convert_` for the test: what is measured is the packed network.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

import narrowcast as nc

GRIDS = {"apot": {}, "pot": {}, "int": {}, "apot, weights not normalized": {"normalize": None}}


def network() -> nn.Sequential:
    def block(into: int, out: int, stride: int) -> list[nn.Module]:
        return [nn.Conv2d(into, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out), nn.ReLU()]

    layers = block(1, 16, 1) + block(16, 32, 2) + block(32, 32, 1) + block(32, 64, 2)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(256, 10))


def digits(seed: int) -> list[Tensor]:
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images, labels, test_size=1 / 3, random_state=seed, stratify=labels)
    x, x_test, y, y_test = (torch.tensor(part) for part in parts)
    return [(x.float() / 16).view(-1, 1, 8, 8), (x_test.float() / 16).view(-1, 1, 8, 8), y, y_test]


def train(model: nn.Module, groups: list[dict], x: Tensor, y: Tensor, epochs: int, rate: float) -> float:
    """Train with AdamW on a cosine; the seconds that a step took, in the middle."""
    optimizer = torch.optim.AdamW(groups, lr=rate, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * -(-len(x) // 64))
    times = []
    for _ in range(epochs):
        for batch in torch.randperm(len(x)).split(64):
            start = time.perf_counter()
            loss = F.cross_entropy(model(x[batch]), y[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            times.append(time.perf_counter() - start)
            schedule.step()
    return statistics.median(times)


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    return 100 * (model.eval()(x).argmax(1) == y).float().mean().item()


def main() -> dict[str, list[float]]:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--bits", type=int, nargs="+", default=[4, 3, 2])
    parser.add_argument("--plot")
    options = parser.parse_args()
    kinds = [(grid, bits) for bits in options.bits for grid in GRIDS]
    results: dict[str, list[float]] = {}
    steps: dict[str, list[float]] = {}
    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task("training", total=options.seeds * (1 + len(kinds)))
        for seed in range(options.seeds):
            torch.manual_seed(seed)
            x, x_test, y, y_test = digits(seed)
            plain = network()
            steps.setdefault("float", []).append(train(plain, [{"params": plain.parameters()}], x, y, options.epochs, 3e-3))
            results.setdefault("float", []).append(accuracy(plain, x_test, y_test))
            progress.advance(bar)
            for grid, bits in kinds:
                name, codec = f"{bits} bits, {grid}", f"{grid.split(',')[0]}{bits}"
                model = copy.deepcopy(plain).train()
                nc.prepare_qat_(model, codec, codec, **GRIDS[grid])
                nc.calibrate_(model, x.split(256), progress=False)
                steps.setdefault(name, []).append(train(model, nc.parameter_groups(model), x, y, options.epochs, 1e-3))
                nc.convert_(model)
                results.setdefault(name, []).append(accuracy(model, x_test, y_test))
                progress.advance(bar)
    show(results, {name: statistics.median(some) for name, some in steps.items()})
    if options.plot:
        plot(results, options.plot)
    return results


def show(results: dict[str, list[float]], steps: dict[str, float]) -> None:
    table = Table("network", "accuracy %", "spread", "against float", "step")
    baseline = statistics.mean(results["float"])
    for name, values in results.items():
        mean = statistics.mean(values)
        spread = f"{min(values):.2f} to {max(values):.2f}"
        table.add_row(name, f"{mean:.2f}", spread, f"{mean - baseline:+.2f}", f"{steps[name] / steps['float']:.2f}x")
    Console().print(table)


def plot(results: dict[str, list[float]], path: str) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for place, values in enumerate(results.values()):
        axes.plot(values, [place] * len(values), "o", alpha=0.6)
    axes.set_yticks(range(len(results)), list(results))
    axes.invert_yaxis()
    axes.set(xlabel="test accuracy, %", title="Handwritten digits, one dot per seed")
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
