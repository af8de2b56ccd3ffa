"""What each rounding leaves of a real model: cosines of sentence embeddings with those of the unquantized model.

    PYTHONPATH=src python bench/rounding.py [--out bench/results] [--sentences 120] [--codecs int4:block=64,nf4]

The model and the judge are those of bench/quality.py. "same kind" calibrates on 60 other sentences of the same kind
(first sentences of docstrings), "other kind" on 60 paragraphs of Python's language reference (pydoc_data.topics).
Every row has the same bytes as nearest rounding. Competitors run in the same process where they are installed:
bitsandbytes nf4 (block 64, the same bits but for fp32 scales) and torchao's HQQ (int4 with zero points, block 64).
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


def ours(judge: Judge, specs: list[str], data: dict[str, list[dict[str, Tensor]]]) -> list[Row]:
    rows = []
    for spec in specs:
        ways: dict[str, dict[str, Any]] = {"nearest": {}, "search": {"rounding": "search"}}
        ways |= {f"gptq, {kind}": {"rounding": "gptq", "data": batches} for kind, batches in data.items()}
        for name, options in ways.items():
            row = judged(judge, lambda model, spec=spec, options=options: nc.quantize_(model, spec, **options))
            rows.append({"codec": spec, "rounding": name, **row})
            print(_line(rows[-1]), flush=True)
    return rows


def competitors(judge: Judge) -> list[Row]:
    rows = []
    for name, change in (("bitsandbytes nf4", _bitsandbytes), ("torchao int4 HQQ, zero points", _hqq)):
        try:
            row = judged(judge, change)
        except Exception as error:  # a competitor that does not run here is a line of the table, not the end of it
            row = {"cosine_mean": float("nan"), "cosine_min": float("nan"), "seconds": float("nan")}
            name = f"{name}: does not run ({type(error).__name__}: {str(error)[:80]})"
        rows.append({"codec": name, "rounding": "competitor", **row})
        print(_line(rows[-1]), flush=True)
    return rows


def _replace(model: nn.Module, rounded: Callable[[Tensor], Tensor]) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.copy_(rounded(parameter.detach()).to(parameter.dtype))


def _bitsandbytes(model: nn.Module) -> None:
    from bitsandbytes import functional

    def rounded(weight: Tensor) -> Tensor:
        packed, state = functional.quantize_4bit(weight.contiguous(), blocksize=64, quant_type="nf4")
        return functional.dequantize_4bit(packed, state)  # type: ignore[no-any-return]

    _replace(model, rounded)


def _hqq(model: nn.Module) -> None:
    from torchao.quantization.quant_primitives import (
        _choose_qparams_and_quantize_affine_hqq as choose,
    )

    def rounded(weight: Tensor) -> Tensor:
        codes, scale, zero, _ = choose(
            weight, nbits=4, group_size=64, axis=1, compute_dtype=torch.float32, device="cpu"
        )
        codes, scale, zero = codes.float().view(-1, 64), scale.float().view(-1, 1), zero.float().view(-1, 1)
        plain = ((codes - zero) * scale).view(weight.shape)
        tinygemm = ((codes - 8) * scale + zero).view(weight.shape)  # torchao's other convention for zero points
        return min(plain, tinygemm, key=lambda some: float((some - weight).square().sum()))

    _replace(model, rounded)


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
    arguments = parser.parse_args()
    judge = Judge(arguments.sentences)
    about = facts(data=f"all-MiniLM-L6-v2 in fp32, {len(judge.sentences)} sentences of Python's standard library")
    data = {kind: batches for kind, batches in calibration(judge.sentences).items() if kind in arguments.kinds}
    rows = ours(judge, arguments.codecs.split(","), data) + competitors(judge)
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
