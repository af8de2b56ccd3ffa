"""A language model that learned for real, and what each rounding leaves of it: perplexity on text that it never saw.

    PYTHONPATH=src python bench/language_model.py train --folder /tmp/lm            # on a GPU, 85M parameters
    PYTHONPATH=src python bench/language_model.py quantize --folder /tmp/lm --out bench/results
    PYTHONPATH=src python bench/language_model.py train --folder /tmp/tiny --size tiny --steps 200   # on a CPU, minutes

The model is narrowcast.byte_gpt, over bytes. The text is the source of Python's standard library and of the installed
packages, and their documentation (.py, .md, .rst, .txt). Of the standard library one file in ten is held out, and the
perplexity, per byte, is that of held-out text. Training runs in bf16 autocast on CUDA, with AdamW, a warm-up and a
cosine, from one seed; it saves a checkpoint every SAVE steps, and resumes from it when it is started again with the
same arguments. Its loss is printed as it falls.

`quantize` calibrates gptq on training text, quantizes a copy for each codec and rounding, and prints perplexities
beside the float model's, with seconds and the peak of memory.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import resource
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import narrowcast as nc
from machine import facts
from narrowcast.byte_gpt import ByteGPT, GPTConfig, batches, stdlib_text

SIZES = {
    "tiny": GPTConfig(layers=4, width=128, heads=4, context=128),
    "full": GPTConfig(layers=12, width=768, heads=12, context=512),
}
RATES = {"tiny": 2e-3, "full": 6e-4}
BATCHES = {"tiny": 16, "full": 64}
SAVE = 500
ENDINGS = (".py", ".md", ".rst", ".txt")
CODECS = ("int4:block=64", "nf4", "int3")
TARGETS = {("int4:block=64", "gptq"): 0.005, ("int4:block=64", "search"): 0.01, ("int3", "gptq"): 0.03}
"""How far above the float model's perplexity issue 19 allows."""


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
    count = min((len(text) - 1) // context, most)
    inputs = text[: count * context].view(count, context).long()
    targets = text[1 : count * context + 1].view(count, context).long()
    total = 0.0
    with torch.inference_mode():
        for start in range(0, count, 16):
            logits = model(inputs[start : start + 16].to(device)).float()
            expected = targets[start : start + 16].to(device)
            total += float(nn.functional.cross_entropy(logits.flatten(0, 1), expected.flatten(), reduction="sum"))
    return math.exp(total / (count * context))


# -- training ----------------------------------------------------------------------------------------------------------


def train(arguments: argparse.Namespace) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config, path = SIZES[arguments.size], arguments.folder / "checkpoint.pt"
    model = ByteGPT(config, seed=0).to(device)
    rate = RATES[arguments.size]
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.1)
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
    start = time.perf_counter()
    for step in range(first, arguments.steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * min((step + 1) / 200, 0.5 + 0.5 * math.cos(math.pi * step / arguments.steps) + 0.05)
        inputs, targets = (part.to(device, non_blocking=True) for part in next(drawn))
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(inputs)
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
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = SIZES[arguments.size]
    saved = torch.load(arguments.folder / "checkpoint.pt", map_location=device)
    model = ByteGPT(config).to(device).eval()
    model.load_state_dict(saved["model"])
    model = model.bfloat16() if device.type == "cuda" else model
    learned, held_out = texts(arguments.size)
    samples = batches(learned, config.context, 8, seed=2)
    data = [next(samples)[0] for _ in range(arguments.samples // 8)]
    exact = perplexity(model, held_out, config.context, device, arguments.windows)
    rows: list[dict[str, Any]] = [{"codec": "float", "rounding": "", "perplexity": exact, "loss": 0.0, "seconds": 0.0}]
    for codec in CODECS:
        for rounding in ("nearest", "search", "gptq"):
            rounded = copy.deepcopy(model)
            start = time.perf_counter()
            nc.quantize_(rounded, codec, rounding=rounding, data=data if rounding == "gptq" else None)
            seconds = time.perf_counter() - start
            found = perplexity(rounded, held_out, config.context, device, arguments.windows)
            row = {"codec": codec, "rounding": rounding, "perplexity": found, "loss": found / exact - 1}
            rows.append({**row, "seconds": seconds})
            print(_line(rows[-1]), flush=True)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    about = facts(data=f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f}M parameters, {saved['step']} steps")
    about["peak memory"] = f"{memory:.2f} GB on the CPU"
    lines = [
        "# What each rounding leaves of a language model",
        "",
        *(f"- {key}: {value}" for key, value in about.items()),
    ]
    lines += [
        "",
        "| codec | rounding | perplexity per byte | above float | seconds | target |",
        "|---|---|---:|---:|---:|---|",
    ]
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "language_model.md").write_text("\n".join([*lines, *map(_line, rows)]) + "\n")
        values = {"machine": about, "rows": rows}
        (arguments.out / "language_model.json").write_text(json.dumps(values, indent=1) + "\n")


def _line(row: dict[str, Any]) -> str:
    target = TARGETS.get((row["codec"], row["rounding"]))
    verdict = "" if target is None else f"<= {target:.1%}: {'ok' if row['loss'] <= target else 'MISSED'}"
    figures = f"{row['perplexity']:.4f} | {row['loss']:+.2%} | {row['seconds']:.1f}"
    return f"| {row['codec']} | {row['rounding']} | {figures} | {verdict} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["train", "quantize"])
    parser.add_argument("--folder", type=Path, required=True, help="where the checkpoint lies")
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--steps", type=int, default=20000)
    parser.add_argument("--samples", type=int, default=128, help="windows that gptq is calibrated on")
    parser.add_argument("--windows", type=int, default=512, help="windows of held-out text that are judged")
    parser.add_argument("--out", type=Path, help="write language_model.md and language_model.json into this folder")
    arguments = parser.parse_args()
    (train if arguments.action == "train" else quantize)(arguments)


if __name__ == "__main__":
    main()
