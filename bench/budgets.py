"""Mixes of codecs of one size: chosen by the noise of weights, or by what the model's output loses on data.

    PYTHONPATH=src:bench python bench/budgets.py [--out bench/results] [--sentences 100]

The model, the judge and the texts are those of bench/rounding.py. At each budget of bits a weight, scales included,
`mix_codecs` chooses as `narrowcast inspect --budget` does: by the weights' relative noise (no data), or by the noise
times what it costs the model's output (`inspect --data`), on 60 sentences of the same kind or 60 paragraphs of another.
Noise is that of the rounding that is judged.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import narrowcast as nc
from machine import facts
from narrowcast.codecs.mix import mix_codecs
from narrowcast.codecs.sensitivity import measure
from narrowcast.nn.rounding.output_losses import output_sensitivity
from quality import MIXED, Judge
from rounding import calibration, judged

BUDGETS = (3.0, 3.5, 4.0, 4.5)
Row = dict[str, Any]


def statistics(judge: Judge, searched: bool) -> list[Any]:
    codecs = [nc.codec(spec) for spec in MIXED]
    return [
        measure(name, *weight.shape, lambda i, j, w=weight: w[i:j], codecs, searched=searched)
        for name, weight in judge.model.named_parameters()
        if weight.dim() == 2
    ]


def rows_of(judge: Judge) -> list[Row]:
    costs: dict[str, dict[str, float]] = {"relative noise": {}}
    costs |= {
        f"loss, {kind}": output_sensitivity(judge.model, data) for kind, data in calibration(judge.sentences).items()
    }
    rows = []
    for rounding in ("nearest", "search"):
        weights = statistics(judge, rounding == "search")
        for bits in BUDGETS:
            for criterion, cost in costs.items():
                for weight in weights:
                    weight.cost = cost.get(weight.name)
                mix = mix_codecs(weights, list(MIXED), bits)
                rules = {f"^{re.escape(name.removesuffix('.weight'))}$": codec for name, codec in mix.codecs.items()}
                row = judged(
                    judge, lambda model, r=rules, way=rounding: nc.quantize_(model, None, rules=r, rounding=way)
                )
                rows.append({"rounding": rounding, "budget": bits, "criterion": criterion, **row})
                print(_line(rows[-1]), flush=True)
    return rows


def _line(row: Row) -> str:
    return (
        f"| {row['rounding']} | {row['budget']} | {row['criterion']} | {row['cosine_mean']:.5f} | "
        f"{row['cosine_min']:.5f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write budgets.md and budgets.json into this folder")
    parser.add_argument("--sentences", type=int, default=100)
    arguments = parser.parse_args()
    judge = Judge(arguments.sentences)
    about = facts(data=f"all-MiniLM-L6-v2 in fp32, {len(judge.sentences)} sentences of Python's standard library")
    rows = rows_of(judge)
    lines = [
        "# Mixes of codecs by what they are chosen for",
        "",
        *(f"- {key}: {value}" for key, value in about.items()),
    ]
    lines += ["", "| rounding | bits | chosen by | mean cosine | lowest |", "|---|---:|---|---:|---:|"]
    if arguments.out:
        (arguments.out / "budgets.md").write_text("\n".join([*lines, *map(_line, rows)]) + "\n")
        (arguments.out / "budgets.json").write_text(json.dumps({"machine": about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
