"""Handwritten digits: a small convolutional network in floats, then with weights and inputs of 4, 3 and 2 bits.

    python examples/qat_digits.py [--epochs 20] [--seeds 3] [--bits 4 3 2] [--plot qat_digits.png]

The data is scikit-learn's: 1,797 real images of 8 x 8 pixels, a third of them kept for the test. Every quantized
network starts from the float one of its seed and is packed before the test. `step` is the time of a training step.
"""

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

GRIDS = {"apot": "through", "pot": "through", "int": "through", "apot, not normalized": None}


def network() -> nn.Sequential:
    layers: list[nn.Module] = []
    for into, out, stride in ((1, 32, 1), (32, 64, 2), (64, 64, 1), (64, 128, 2)):
        layers += [nn.Conv2d(into, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, 10))


def train(model: nn.Module, groups: list[dict], x: Tensor, y: Tensor, epochs: int, rate: float) -> float:
    """Train with AdamW on a cosine; the median seconds of a step."""
    optimizer = torch.optim.AdamW(groups, lr=rate, weight_decay=1e-4, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * -(-len(x) // 64))
    times = []
    for batch in [batch for _ in range(epochs) for batch in torch.randperm(len(x)).split(64)]:
        start = time.perf_counter()
        loss = F.cross_entropy(model(x[batch]), y[batch])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--bits", type=int, nargs="+", default=[4, 3, 2])
    parser.add_argument("--plot", help="a picture to draw")
    options = parser.parse_args()
    images, labels = load_digits(return_X_y=True)
    names = ["float", *(f"{bits} bits, {grid}" for bits in options.bits for grid in GRIDS)]
    accuracy, seconds = ({name: [] for name in names} for _ in range(2))
    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task("training", total=options.seeds * len(names))
        for seed in range(options.seeds):
            torch.manual_seed(seed)
            parts = train_test_split(images / 16, labels, test_size=1 / 3, random_state=seed, stratify=labels)
            x, x_test = (torch.tensor(part).float().view(-1, 1, 8, 8) for part in parts[:2])
            y, y_test = (torch.tensor(part) for part in parts[2:])
            for name in names:
                if name == "float":
                    model = plain = network()
                    seconds[name].append(train(model, [{"params": model.parameters()}], x, y, options.epochs, 3e-3))
                else:
                    model, (bits, grid) = copy.deepcopy(plain).train(), name.split(" bits, ")
                    codec = grid.split(",")[0] + bits
                    nc.prepare_qat_(model, codec, codec, normalize=GRIDS[grid])
                    nc.calibrate_(model, x.split(256), progress=False)
                    seconds[name].append(train(model, nc.parameter_groups(model), x, y, options.epochs, 1e-3))
                    nc.convert_(model)
                accuracy[name].append(100 * (model.eval()(x_test).argmax(1) == y_test).float().mean().item())
                progress.advance(bar)
    table = Table("network", "accuracy, %", "spread", "to float", "step")
    for name, values in accuracy.items():
        mean, factor = statistics.mean(values), statistics.median(seconds[name]) / statistics.median(seconds["float"])
        gain = f"{mean - statistics.mean(accuracy['float']):+.2f}"
        table.add_row(name, f"{mean:.2f}", f"{min(values):.2f} to {max(values):.2f}", gain, f"{factor:.2f}x")
    Console().print(table)
    if options.plot:
        from matplotlib.figure import Figure

        axes = (figure := Figure(figsize=(7, 4), layout="constrained")).subplots()
        for name, values in accuracy.items():
            axes.plot(values, [name] * len(values), "o", alpha=0.6)
        axes.invert_yaxis()
        axes.set(xlabel="test accuracy, %", title="Handwritten digits, one dot per seed")
        figure.savefig(options.plot, dpi=150)


if __name__ == "__main__":
    main()
