"""A language model that learned for real, and what each rounding leaves of it: perplexity on text that it never saw.

    PYTHONPATH=src python bench/language_model.py train --folder /tmp/lm            # on a GPU, 59M parameters
    PYTHONPATH=src python bench/language_model.py quantize --folder /tmp/lm --out bench/results
    PYTHONPATH=src python bench/language_model.py train --folder /tmp/tiny --size tiny --steps 200   # on a CPU, minutes

The model is narrowcast.byte_gpt, over bytes. The text is the source of Python's standard library and of the installed
packages, and their documentation (.py, .md, .rst, .txt). Of the standard library one file in ten is held out, and the
perplexity, per byte, is that of held-out text. Training runs in bf16 autocast on CUDA, with AdamW, a warm-up and a
cosine, from one seed; it saves a checkpoint every SAVE steps, and resumes from it when it is started again with the
same arguments. Its loss is printed as it falls.

`quantize` calibrates gptq on training text (of the standard library), quantizes the linear layers of a copy for each
codec and rounding, and prints perplexities beside the float model's and those of rivals that are installed
(language_model_rivals.py), with bits a weight, seconds and the peak of memory.
"""

from __future__ import annotations

import argparse
import copy
import functools
import itertools
import json
import math
import re
import resource
import sysconfig
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import narrowcast as nc
from language_model_rivals import installed, round_by
from machine import facts
from narrowcast.byte_gpt import ByteGPT, GPTConfig, batches, stdlib_text

SIZES = {
    "tiny": GPTConfig(layers=4, width=128, heads=4, context=128),
    "full": GPTConfig(layers=12, width=640, heads=10, context=512),
}
RATES = {"tiny": 2e-3, "full": 6e-4}
BATCHES = {"tiny": 16, "full": 64}
SAVE = 500
ENDINGS = (".py", ".md", ".rst", ".txt")
CODECS = ("int4:block=64", "int4:block=32", "int4:zero_point=true", "nf4", "int3:block=64", "int3:block=32")
LAYERS = {"symbols|positions": None}
"""Embeddings stay as they are: rivals have codecs for linear layers only."""
TARGETS = {("int4:block=64", "gptq"): 0.005, ("int4:block=64", "search"): 0.01, ("int3:block=64", "gptq"): 0.03}
"""How far above the float model's perplexity issue 19 allows."""
Row = dict[str, Any]


def text_of_packages(limit: int) -> Tensor:
    """The first bytes of sources and documentation of installed packages, in the order of their paths."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["purelib"]).rglob("*")):
        if path.suffix in ENDINGS and path.is_file() and path.stat().st_size < 1 << 20:
            text += path.read_bytes()
        if len(text) >= limit:
            break
    return torch.frombuffer(text[:limit] or bytearray(b"\n"), dtype=torch.uint8)


def texts(size: str) -> tuple[Tensor, Tensor]:
    """What the model learns from, and what it is judged by."""
    learned, held_out = stdlib_text(), stdlib_text(held_out=True)
    more = text_of_packages(0 if size == "tiny" else 300 << 20)
    return torch.cat([learned, more]), held_out


def perplexity(model: nn.Module, text: Tensor, context: int, device: torch.device, most: int) -> float:
    """Per byte, over consecutive windows of `text`, at most `most` of them."""
    return compared(model, None, text, context, device, most)[0]


def compared(
    model: nn.Module, unrounded: nn.Module | None, text: Tensor, context: int, device: torch.device, most: int
) -> tuple[float, float]:
    """The perplexity, and the KL divergence of predictions from those of the unrounded model, in nats a byte."""
    count = min((len(text) - 1) // context, most)
    inputs = text[: count * context].view(count, context).long()
    targets = text[1 : count * context + 1].view(count, context).long()
    total = away = 0.0
    with torch.inference_mode():
        for start in range(0, count, 16):
            own = inputs[start : start + 16].to(device)
            found = model(own).float().log_softmax(-1)
            total -= float(found.gather(-1, targets[start : start + 16].to(device).unsqueeze(-1)).sum())
            if unrounded is not None:
                known = unrounded(own).float().log_softmax(-1)
                away += float((known.exp() * (known - found)).sum())
    return math.exp(total / (count * context)), away / (count * context)


# -- training ----------------------------------------------------------------------------------------------------------


def train(arguments: argparse.Namespace) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config, path = SIZES[arguments.size], arguments.folder / "checkpoint.pt"
    model = ByteGPT(config, seed=0).to(device)
    rate = RATES[arguments.size]
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.1, fused=device.type == "cuda"
    )
    learned, held_out = texts(arguments.size)
    first = 0
    if path.exists():
        saved = torch.load(path, map_location=device)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]
        print(f"resuming at step {first}", flush=True)
    drawn = batches(learned, config.context, BATCHES[arguments.size], seed=1)
    for _ in range(first):  # the same windows as if it had not stopped
        next(drawn)
    compiled = torch.compile(model) if device.type == "cuda" else model
    start = time.perf_counter()
    for step in range(first, arguments.steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * min((step + 1) / 200, 0.5 + 0.5 * math.cos(math.pi * step / arguments.steps) + 0.05)
        inputs, targets = (part.to(device, non_blocking=True) for part in next(drawn))
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = compiled(inputs)
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % SAVE == 0 or step + 1 == arguments.steps:
            _save(path, model, optimizer, step + 1)
            judged = perplexity(model, held_out, config.context, device, 64)
            seconds = time.perf_counter() - start
            print(
                f"step {step + 1}: loss {loss.item():.4f}, held-out {math.log(judged):.4f}, {seconds:.0f} s", flush=True
            )


def _save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
    torch.save(state, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


# -- quantizing --------------------------------------------------------------------------------------------------------


def quantize(arguments: argparse.Namespace) -> None:
    device = torch.device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    config = SIZES[arguments.size]
    saved = {"model": unpacked(arguments.packed), "step": "packed"} if arguments.packed else None
    saved = saved or torch.load(arguments.folder / "checkpoint.pt", map_location=device)
    model = ByteGPT(config).to(device).eval()
    model.load_state_dict(saved["model"])
    model = model.bfloat16() if device.type == "cuda" else model
    held_out = stdlib_text(held_out=True)
    samples = batches(stdlib_text(), config.context, 8, seed=2)
    data = [next(samples)[0].to(device) for _ in range(arguments.samples // 8)]

    def judged(name: str, rounding: str, work: Callable[[nn.Module], float]) -> Row:
        rounded = copy.deepcopy(model)
        seconds, memory, bits = measured(lambda: work(rounded), device)
        found, away = compared(rounded, model, held_out, config.context, device, arguments.windows)
        row = {"codec": name, "rounding": rounding, "bits": bits, "perplexity": found, "loss": found / exact - 1}
        print(_line(row := {**row, "KL": away, "seconds": seconds, "GB": memory}), flush=True)
        return row

    exact = perplexity(model, held_out, config.context, device, arguments.windows)
    rows = [judged("float", "", lambda rounded: 8 * rounded.following.weight.element_size())]  # type: ignore[union-attr,operator]
    wanted = re.compile(arguments.only)
    for codec, rounding in itertools.product(CODECS, ("nearest", "search", "gptq")):
        if wanted.search(f"{codec} {rounding}"):
            rows.append(judged(codec, rounding, functools.partial(_ours, codec, rounding, data)))
    for name, trip in installed().items():
        if wanted.search(name):
            try:
                rows.append(judged(name, "its own", functools.partial(round_by, trip)))
            except Exception as error:  # a rival that does not run here is not the end of the table
                print(f"{name}: does not run ({type(error).__name__}: {str(error)[:200]})", flush=True)
    about = facts(data=f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f}M parameters, {saved['step']} steps")
    if arguments.out:
        _write(arguments.out, f"language_model-{device.type}", about, rows)


def unpacked(paths: Sequence[Path]) -> dict[str, Tensor]:
    """The state dict of files that hold matrices in int8, as codes and scales of blocks of 64."""
    state = {}
    for path in paths:
        for name, value in torch.load(path, map_location="cpu").items():
            packed = isinstance(value, dict)
            state[name] = (value["q"].float() * value["s"].float()).view(value["shape"]) if packed else value
    return state


def _ours(codec: str, rounding: str, data: list[Tensor], model: nn.Module) -> float:
    given = data if rounding == "gptq" else None
    shapes = [module.weight.shape for module in model.modules() if isinstance(module, nn.Linear)]
    nc.quantize_(model, codec, rounding=rounding, data=given, rules=LAYERS)
    stored = sum(rows * nc.codec(codec).row_bytes(columns) for rows, columns in shapes)
    return 8 * stored / sum(shape.numel() for shape in shapes)


def measured(work: Callable[[], float], device: torch.device) -> tuple[float, float, float]:
    """Seconds, GB at the peak (on a GPU beyond those before; else the process's so far), and what it returns."""
    before = 0
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    start = time.perf_counter()
    bits = work()
    if device.type != "cuda":
        return time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, bits
    torch.cuda.synchronize()
    return time.perf_counter() - start, (torch.cuda.max_memory_allocated() - before) / 1e9, bits


def _write(folder: Path, name: str, about: dict[str, Any], rows: list[Row]) -> None:
    lines = ["# What each rounding leaves of a language model", ""]
    lines += [*(f"- {key}: {value}" for key, value in about.items()), ""]
    lines += ["| codec | rounding | bits | perplexity per byte | above float | KL | seconds | GB | asked |"]
    lines += ["|---|---|---:|---:|---:|---:|---:|---:|---|"]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.md").write_text("\n".join([*lines, *map(_line, rows)]) + "\n")
    (folder / f"{name}.json").write_text(json.dumps({"machine": about, "rows": rows}, indent=1) + "\n")


def _line(row: Row) -> str:
    target = TARGETS.get((row["codec"], row["rounding"]))
    verdict = "" if target is None else f"<= {target:.1%}: {'ok' if row['loss'] <= target else 'MISSED'}"
    figures = f"{row['perplexity']:.4f} | {row['loss']:+.2%} | {row['KL']:.5f} | {row['seconds']:.1f} | {row['GB']:.2f}"
    return f"| {row['codec']} | {row['rounding']} | {row['bits']:.3f} | {figures} | {verdict} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["train", "quantize"])
    parser.add_argument("--folder", type=Path, default=Path(), help="where the checkpoint lies")
    parser.add_argument("--packed", type=Path, nargs="*", default=[], help="files of int8 weights, in its place")
    parser.add_argument("--only", default="", help="a regular expression of codecs, roundings and rivals")
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--samples", type=int, default=128, help="windows that gptq is calibrated on")
    parser.add_argument("--windows", type=int, default=512, help="windows of held-out text that are judged")
    parser.add_argument("--device", default="", help="where to quantize; the GPU where there is one")
    parser.add_argument("--out", type=Path, help="write language_model-cuda.md and .json (or -cpu) into this folder")
    arguments = parser.parse_args()
    (train if arguments.action == "train" else quantize)(arguments)


if __name__ == "__main__":
    main()
