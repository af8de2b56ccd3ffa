"""Tables of bench/gpu_linear.py, out of the JSON of one run or of several on the same machine (a call has a limit).

python bench/gpu_linear_report.py RUN.json [RUN.json ...] > tables.md
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Lines = list[dict[str, Any]]


def head(names: list[str]) -> Iterator[str]:
    yield f"| | {' | '.join(names)} |"
    yield "|---|" + "---:|" * len(names)


def times(lines: Lines) -> Iterator[str]:
    """Microseconds of every layer, and the share of the limit."""
    shapes = list(dict.fromkeys((line["n"], line["k"]) for line in lines))
    yield from head([f"{n}x{k}" for n, k in shapes])
    for name in dict.fromkeys(line["name"] for line in lines):
        found = {(line["n"], line["k"]): line for line in lines if line["name"] == name}
        cells = [f"{found[s]['us']:.2f} ({found[s]['share']:.0%})" if s in found else "" for s in shapes]
        yield f"| {name} | {' | '.join(cells)} |"


def report(runs: list[dict[str, Any]]) -> Iterator[str]:
    batches: dict[int, Lines] = {}
    for run in runs:
        for batch in dict.fromkeys(line["batch"] for line in run["lines"]):
            if batch not in batches:  # of two runs, the first one's
                batches[batch] = [line for line in run["lines"] if line["batch"] == batch]
        batches[1] = batches[1] + run.get("competitors", [])
    for batch, lines in batches.items():
        yield from ("", f"## Batch {batch}: microseconds (share of reading its bytes)", "", *times(lines))
    for run in runs:
        if "end_to_end" in run:
            yield from ("", "## End to end: a 7B-shaped decoder, random weights, batch 1", "")
            yield from head(["tokens/s", "parameters, GiB"])
            for line in run["end_to_end"]:
                yield f"| {line['name']} | {line['tokens_per_second']:.1f} | {line['parameters_GiB']:.2f} |"


if __name__ == "__main__":
    print("\n".join(report([json.loads(Path(name).read_text()) for name in sys.argv[1:]])))
