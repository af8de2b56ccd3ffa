"""Draws the pictures of bench/results again, out of the JSON files there. Nothing is measured.

PYTHONPATH=src python bench/redraw.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import grids
import training_plots
import training_report
import wire

FOLDER = Path(__file__).parent / "results"


def stored(name: str) -> Any:
    return json.loads((FOLDER / name).read_text())


def main() -> None:
    wire.plot(stored("wire.json"), FOLDER / "wire.png")
    table = stored("grids.json")["sqnr_db"]
    rows = {
        name: {grid: {int(b): v for b, v in row.items()} for grid, row in each.items()} for name, each in table.items()
    }
    grids.plot(rows, FOLDER / "grids.png")
    cells = stored("training.json")["cells"]
    for model in training_report.trained(cells):
        training_plots.draw(cells, model, FOLDER)


if __name__ == "__main__":
    main()
