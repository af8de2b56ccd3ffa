"""What each rounding leaves of a real model: cosines of sentence embeddings with those of the unquantized model.

    PYTHONPATH=src python bench/rounding.py [--out bench/results] [--sentences 120] [--codecs int4:block=64,nf4]

The model and the judge are those of bench/quality.py. "same kind" calibrates on 60 other sentences of the same kind
(first sentences of docstrings), "other kind" on 60 paragraphs of Python's language reference (pydoc_data.topics).
Every row has the same bytes as nearest rounding. Competitors run in the same process where they are installed: those of
language_model_rivals.py (HQQ's own package, torchao's plain int4 and its HQQ, bitsandbytes nf4). They have zero points
(4.5 bits) or fp32 scales (4.5 bits) where `int4:block=64` takes 4.25. `--roundings` takes a part of the table.
"""

from __future__ import annotations

import argparse
import copy
import json
import resource
import time
from collections.abc import Callable
from pathlib import Path
from pydoc_data import topics
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer

import narrowcast as nc
from language_model_rivals import Trip, installed
from machine import facts
from quality import Judge, embed, folder, sentences

CODECS = ("int4:block=64", "nf4", "int3", "int4:zero_point=true")
CALIBRATION = 60
TARGETS = {
    ("int4:block=64", "search"): 0.963,
    ("int4:block=64", "gptq, same kind"): 0.99,
    ("int4:block=64", "gptq, other kind"): 0.975,
    ("nf4", "gptq, same kind"): 0.99,
    ("int3", "gptq, same kind"): 0.96,
}
"""The mean cosines that issue 19 asks for."""
Row = dict[str, Any]


def calibration(judged: list[str]) -> dict[str, list[dict[str, Tensor]]]:
    """Batches of 60 sentences that are not judged, and of 60 paragraphs."""
    own = [sentence for sentence in sentences(2 * CALIBRATION + len(judged)) if sentence not in set(judged)]
    paragraphs = [" ".join(part.split()) for topic in topics.topics.values() for part in topic.split("\n\n")]
    paragraphs = [part for part in paragraphs if 30 <= len(part.split()) <= 120][::7]
    tokenizer = AutoTokenizer.from_pretrained(folder())

    def batches(texts: list[str]) -> list[dict[str, Tensor]]:
        texts = sorted(texts[:CALIBRATION], key=len)
        return [
            dict(tokenizer(texts[i : i + 10], padding=True, truncation=True, return_tensors="pt"))
            for i in range(0, len(texts), 10)
        ]

    return {"same kind": batches(own), "other kind": batches(paragraphs)}


def judged(judge: Judge, change: Callable[[nn.Module], object]) -> Row:
    """A copy of the model, changed, beside the unquantized one."""
    model = copy.deepcopy(judge.model)
    start = time.perf_counter()
    change(model)
    seconds = time.perf_counter() - start
    cosines = (embed(model, judge.tokens) * judge.exact).sum(1)
    return {"cosine_mean": float(cosines.mean()), "cosine_min": float(cosines.min()), "seconds": seconds}


def ours(
    judge: Judge, specs: list[str], data: dict[str, list[dict[str, Tensor]]], roundings: tuple[str, ...]
) -> list[Row]:
    rows = []
    for spec in specs:
        ways: dict[str, dict[str, Any]] = {"nearest": {}, "search": {"rounding": "search"}}
        ways |= {f"gptq, {kind}": {"rounding": "gptq", "data": batches} for kind, batches in data.items()}
        for name in (name for name in ways if name.startswith(roundings)):
            options = ways[name]
            row = judged(judge, lambda model, spec=spec, options=options: nc.quantize_(model, spec, **options))
            rows.append({"codec": spec, "rounding": name, **row})
            print(_line(rows[-1]), flush=True)
    return rows


def competitors(judge: Judge) -> list[Row]:
    rows = []
    for name, trip in installed().items():
        try:
            row = judged(judge, lambda model, trip=trip: _replace(model, trip))
        except Exception as error:  # a competitor that does not run here is a line of the table, not the end of it
            row = {"cosine_mean": float("nan"), "cosine_min": float("nan"), "seconds": float("nan")}
            name = f"{name}: does not run ({type(error).__name__}: {str(error)[:80]})"
        rows.append({"codec": name, "rounding": "competitor", **row})
        print(_line(rows[-1]), flush=True)
    return rows


@torch.no_grad()
def _replace(model: nn.Module, trip: Trip) -> None:
    """Replace all matrices, tables of embeddings too, by what a competitor leaves of them."""
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.copy_(trip(parameter.detach())[0].to(parameter.dtype))


def _line(row: Row) -> str:
    target = TARGETS.get((row["codec"], row["rounding"]))
    verdict = "" if target is None else f">= {target}: {'ok' if row['cosine_mean'] >= target else 'MISSED'}"
    cells = f"{row['cosine_mean']:.5f} | {row['cosine_min']:.5f} | {row['seconds']:.1f}"
    return f"| {row['codec']} | {row['rounding']} | {cells} | {verdict} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write rounding.md and rounding.json into this folder")
    parser.add_argument("--sentences", type=int, default=120)
    parser.add_argument("--codecs", default=",".join(CODECS))
    parser.add_argument("--kinds", default="same kind,other kind", help="what gptq is calibrated on")
    parser.add_argument("--roundings", default="nearest,search,gptq")
    arguments = parser.parse_args()
    judge = Judge(arguments.sentences)
    about = facts(data=f"all-MiniLM-L6-v2 in fp32, {len(judge.sentences)} sentences of Python's standard library")
    data = {kind: batches for kind, batches in calibration(judge.sentences).items() if kind in arguments.kinds}
    roundings = tuple(arguments.roundings.split(","))
    rows = ours(judge, arguments.codecs.split(","), data, roundings) + competitors(judge)
    about["peak memory"] = f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.2f} GB, the whole run"
    lines = ["# What each rounding leaves of a real model", "", *(f"- {key}: {value}" for key, value in about.items())]
    lines += ["", "| codec | rounding | mean cosine | lowest | seconds | target |", "|---|---|---:|---:|---:|---|"]
    text = "\n".join([*lines, *map(_line, rows)]) + "\n"
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "rounding.md").write_text(text)
        (arguments.out / "rounding.json").write_text(json.dumps({"machine": about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
