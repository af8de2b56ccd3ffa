"""Integer convolutions beside torch's float ones, on a CPU: packed layers with quantized inputs, and nn.Conv2d.

    PYTHONPATH=src python bench/integer_conv.py             every layer, with one thread and with two
    ... --threads 1  --batches 1  --codecs apot4  --rounds 9
    ... --clock wall                                        for a machine that has nothing else to do
    ... --out                                               writes bench/results/integer_conv.json and .md

Contenders take turns in one process, several calls each; figures are medians over the rounds, and a ratio is the median
of the rounds' ratios: above 1 the integers are faster. Time is the processor time of the process, so that others count
little. With two threads it is what both took together, work and waking each other up; those that wait for work sleep.

In `apot4` weights and inputs are additive powers of two in 4 bits, and pairs of products fit an int16; in `int8` both
have 8 bits, and they do not.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when torch is imported

import torch
from torch import Tensor, nn

import narrowcast as nc
from machine import facts

CLOCKS = {"processor": time.process_time, "wall": time.perf_counter}
RESULTS = Path(__file__).parent / "results"
LEAST = 0.005
"""Seconds that one turn takes at least."""


class Layer(NamedTuple):
    network: str
    size: int
    channels: int
    outputs: int
    kernel: int
    stride: int

    def make(self) -> nn.Conv2d:
        return nn.Conv2d(self.channels, self.outputs, self.kernel, self.stride, self.kernel // 2, bias=False)

    def __str__(self) -> str:
        step = f", stride {self.stride}" if self.stride > 1 else ""
        return f"{self.channels}x{self.size}x{self.size}, {self.kernel}x{self.kernel} to {self.outputs}{step}"


CIFAR, IMAGENET = "ResNet-20, CIFAR-10", "ResNet-18 and -50, ImageNet"
LAYERS = [
    *(Layer(CIFAR, 32, 16, 16, 3, 1), Layer(CIFAR, 32, 16, 32, 3, 2), Layer(CIFAR, 32, 16, 32, 1, 2)),
    *(Layer(CIFAR, 16, 32, 32, 3, 1), Layer(CIFAR, 16, 32, 64, 3, 2), Layer(CIFAR, 16, 32, 64, 1, 2)),
    Layer(CIFAR, 8, 64, 64, 3, 1),
    *(Layer(IMAGENET, 224, 3, 64, 7, 2), Layer(IMAGENET, 56, 64, 64, 3, 1), Layer(IMAGENET, 56, 64, 128, 3, 2)),
    *(Layer(IMAGENET, 56, 64, 128, 1, 2), Layer(IMAGENET, 56, 64, 256, 1, 1), Layer(IMAGENET, 56, 256, 64, 1, 1)),
    *(Layer(IMAGENET, 28, 128, 128, 3, 1), Layer(IMAGENET, 14, 256, 256, 3, 1), Layer(IMAGENET, 14, 1024, 256, 1, 1)),
    Layer(IMAGENET, 7, 512, 512, 3, 1),
]


class Line(NamedTuple):
    """One layer: milliseconds of the float convolution and of each codec, and how many times faster that is."""

    threads: int
    batch: int
    layer: Layer
    plain: float
    integer: dict[str, float]
    ratio: dict[str, float]

    def cells(self) -> list[str]:
        cells = [str(self.layer), f"{self.plain:.3f}"]
        for codec, value in self.integer.items():
            cells += [f"{value:.3f}", f"{self.ratio[codec]:.2f}"]
        return cells


def packed(layer: Layer, codec: str, x: Tensor) -> nn.Module:
    module = layer.make()
    nc.prepare_qat_(module, codec, codec)
    nc.calibrate_(module, [x[:4]])
    nc.convert_(module.eval())
    assert isinstance(module, nc.nn.IntegerConv2d), type(module)
    return module


def milliseconds(module: nn.Module, x: Tensor, calls: int, clock: Callable[[], float]) -> float:
    begin = clock()
    for _ in range(calls):
        module(x)
    return (clock() - begin) / calls * 1e3


def measure(layer: Layer, batch: int, threads: int, codecs: list[str], rounds: int, clock: Callable[[], float]) -> Line:
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    x = torch.rand(batch, layer.channels, layer.size, layer.size)
    modules = [layer.make().eval(), *(packed(layer, codec, x) for codec in codecs)]
    calls = [max(1, round(LEAST * 1e3 / milliseconds(module, x, 3, time.process_time))) for module in modules]
    times = []
    for _ in range(rounds):
        turn = zip(modules, calls, strict=True)
        times.append([milliseconds(module, x, count, clock) for module, count in turn])
    plain, *integer = (statistics.median(column) for column in zip(*times, strict=True))
    ratios = [statistics.median(row[0] / row[i + 1] for row in times) for i in range(len(codecs))]
    by_codec = [dict(zip(codecs, values, strict=True)) for values in (integer, ratios)]
    return Line(threads, batch, layer, plain, *by_codec)


def table(lines: list[Line], codecs: list[str]) -> list[str]:
    """A section for each number of threads, network and batch."""
    rows: list[str] = []
    head = ["layer", "float, ms"]
    for codec in codecs:
        head += [f"{codec}, ms", "times faster"]
    before = None
    for line in lines:
        section = f"## {line.layer.network}, batch {line.batch}, {line.threads} thread{'s' * (line.threads > 1)}"
        if section != before:
            rows += ["", section, "", f"| {' | '.join(head)} |", f"|---|{'---:|' * (len(head) - 1)}"]
            before = section
        rows.append(f"| {' | '.join(line.cells())} |")
    return rows


def summary(lines: list[Line], codecs: list[str]) -> list[str]:
    rows = []
    for codec in codecs:
        ratios = sorted(line.ratio[codec] for line in lines)
        below = sum(ratio < 1 for ratio in ratios)
        middle = statistics.median(ratios)
        rows.append(
            f"- {codec}: {ratios[0]:.2f} to {ratios[-1]:.2f} times as fast as float, {middle:.2f} in the middle; "
            f"{below} of {len(ratios)} lines are slower"
        )
    return rows


def written(about: dict[str, str], lines: list[Line], codecs: list[str]) -> None:
    text = ["# Integer convolutions beside float ones", "", *(f"- {key}: {value}" for key, value in about.items())]
    text += ["", *summary(lines, codecs), *table(lines, codecs), ""]
    text += ["The top of bench/integer_conv.py explains the columns.", ""]
    (RESULTS / "integer_conv.md").write_text("\n".join(text))
    values = [{**line._asdict(), "layer": line.layer._asdict()} for line in lines]
    (RESULTS / "integer_conv.json").write_text(json.dumps({"machine": about, "lines": values}, indent=1) + "\n")


@torch.no_grad()
def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--threads", default="1,2")
    asked.add_argument("--batches", default="1,32")
    asked.add_argument("--codecs", default="apot4,int8")
    asked.add_argument("--rounds", type=int, default=9)
    asked.add_argument("--clock", choices=CLOCKS, default="processor")
    asked.add_argument("--out", action="store_true")
    given = asked.parse_args()
    codecs, about = given.codecs.split(","), facts(clock=given.clock)
    lines = []
    for threads in map(int, given.threads.split(",")):
        for batch in map(int, given.batches.split(",")):
            for layer in LAYERS:
                lines.append(measure(layer, batch, threads, codecs, given.rounds, CLOCKS[given.clock]))
                print(threads, batch, *lines[-1].cells(), sep=" | ", flush=True)
    print(*table(lines, codecs), "", *summary(lines, codecs), sep="\n")
    about["load"] = f"{os.getloadavg()[0]:.1f} at the end, on {os.cpu_count()} cores"
    if given.out:
        written(about, lines, codecs)


if __name__ == "__main__":
    main()
