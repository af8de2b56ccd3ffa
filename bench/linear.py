"""Linear on encoded rows on the CPU, beside competitors in the same run; a small decoder; and what quantizing costs.

    PYTHONPATH=src:bench python bench/linear.py              11008x4096 and its relatives, batch 1, 1 and 2 threads
    ... --batches 1,2,8,32  --shapes 11008x4096  --threads 1,2  --dtype bfloat16  --quick  --no-compile
    ... --end-to-end        tokens a second of a decoder of about 100M weights
    ... --convert           seconds a billion weights and peak memory of quantize_, each in a process of its own
    ... --out               writes bench/results/linear-cpu.json and .md

Weights rotate past the caches: copies of more than 100 MB in all. Contenders take turns of a pause and four calls, the
first of which is not counted: threads of the one before would still be spinning. Figures are medians. `x fp32` is the
time of F.linear in fp32 over the contender's; `MB` is what one copy of its weights takes, `share` these bytes a second
over the read bandwidth, which a sum over the same kind of memory gives in the same run. `SQNR` is of the product
beside that of the unquantized weights in fp64. On one thread, time is the CPU time of the calling thread, so that other
processes count little.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import narrowcast as nc
from data import sqnr
from linear_contenders import Contender, contenders
from machine import facts

CONVERTED = (8, 11008, 4096)
HEAD = ("", "MB", "SQNR dB", "ms", "x fp32", "GB/s", "share")
RESULTS = Path(__file__).parent / "results"
Row = dict[str, Any]
console = Console(width=max(120, Console().width))


# -- one layer --------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def measure(fighters: list[Contender], x: Tensor, rounds: int) -> dict[str, float]:
    """Milliseconds of each: medians over rounds in which they take turns. On one thread, CPU time."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    inputs = {one.name: x.to(one.dtype or x.dtype) for one in fighters}
    times: dict[str, list[float]] = {one.name: [] for one in fighters}
    for turn in range(-1, rounds):
        for one in fighters:
            time.sleep(0.01)
            for call in range(4):
                given, began = inputs[one.name], clock()
                one.call(given, (4 * turn + call) % one.copies)
                if turn >= 0 and call:
                    times[one.name].append(1e3 * (clock() - began))
    return {name: statistics.median(some) for name, some in times.items()}


@torch.inference_mode()
def errors(fighters: list[Contender], weight: Tensor, x: Tensor) -> dict[str, float]:
    """dB of each product, beside that of the weights as they were."""
    exact = F.linear(x.double(), weight.double())
    multiplying = [one for one in fighters if not one.name.startswith("read")]
    return {one.name: sqnr(exact, one.call(x.to(one.dtype or x.dtype), 0)) for one in multiplying}


def layer_rows(fighters: list[Contender], took: dict[str, float], noise: dict[str, float]) -> list[Row]:
    reading = max(one.nbytes / took[one.name] / 1e6 for one in fighters if one.name.startswith("read"))
    fp32 = took["F.linear float32"]
    rows = []
    for one in fighters:
        speed = one.nbytes / took[one.name] / 1e6
        row = {"name": one.name, "MB": one.nbytes / 1e6, "sqnr": noise.get(one.name), "ms": took[one.name]}
        rows.append({**row, "xfp32": fp32 / took[one.name], "GB/s": speed, "share": speed / reading})
    return rows


def layers(given: argparse.Namespace) -> list[Row]:
    measured = []
    for shape in given.shapes.split(","):
        n, k = (int(size) for size in shape.split("x"))
        weight = torch.randn(n, k, generator=torch.Generator().manual_seed(0)) * k**-0.5
        with console.status(f"making copies of {shape}"):
            fighters = list(contenders(weight, not given.no_compile))
        for threads in map(int, given.threads.split(",")):
            torch.set_num_threads(threads)
            for batch in map(int, given.batches.split(",")):
                x = torch.randn(batch, k).to(getattr(torch, given.dtype))
                took = measure(fighters, x, 4 if given.quick else 15)
                rows = layer_rows(fighters, took, errors(fighters, weight, x))
                measured.append({"shape": shape, "threads": threads, "batch": batch, "rows": rows})
                console.print(pretty(measured[-1]))
    return measured


def verdicts(layer: Row) -> Iterator[str]:
    """The targets, which are for batch 1."""
    if layer["batch"] != 1:
        return
    ms = {row["name"]: row["ms"] for row in layer["rows"]}
    int8, int4 = ms["narrowcast int8:block=row"], ms["narrowcast int4"]
    for competitor in ("aten int8pack", "torchao int8, compiled", "torchao int8, eager"):
        if competitor in ms:
            yield f"int8 {ms[competitor] / int8:.2f}x as fast as {competitor} (target: over 1)"
    yield f"int8 {ms['F.linear float32'] / int8:.2f}x as fast as fp32 (target 3.3)"
    yield f"int4 {int8 / int4:.2f}x, in blocks of 128 {int8 / ms['narrowcast int4:block=128']:.2f}x int8 (target 1.5)"


def pretty(layer: Row) -> Table:
    table = Table(title=title(layer))
    for name in HEAD:
        table.add_column(name, justify="right" if name else "left")
    for row in layer["rows"]:
        table.add_row(*cells(row))
    return table


def title(layer: Row) -> str:
    return f"{layer['shape']}, batch {layer['batch']}, {layer['threads']} thread{'s' * (layer['threads'] > 1)}"


def cells(row: Row) -> list[str]:
    noise = "" if row["sqnr"] is None else f"{row['sqnr']:.1f}"
    times = f"{row['ms']:.3f}", f"{row['xfp32']:.2f}", f"{row['GB/s']:.1f}", f"{row['share']:.0%}"
    return [row["name"], f"{row['MB']:.1f}", noise, *times]


# -- end to end -------------------------------------------------------------------------------------------------------


class SeedLinear(nn.Module):
    """gpt-fast's int8 layer, in our words: rows of int8, scaled after the product."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        scale = layer.weight.float().abs().amax(1) / 127
        self.register_buffer("weight", (layer.weight.float() / scale[:, None]).round().to(torch.int8))
        self.register_buffer("scale", scale.to(layer.weight.dtype))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype)) * self.scale


def seed_quantize(model: nn.Module) -> None:
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                setattr(parent, name, SeedLinear(child))


def decoders() -> dict[str, tuple[torch.dtype, Callable[[nn.Module], object]]]:
    def torchao(model: nn.Module) -> None:
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        quantize_(model, Int8WeightOnlyConfig())

    def with_codec(spec: str) -> Callable[[nn.Module], object]:
        return lambda model: nc.quantize_(model, spec, rules={"embed_tokens": None})

    half = torch.bfloat16
    return {
        "fp32": (torch.float32, lambda model: None),
        "bf16": (half, lambda model: None),
        "seed int8": (half, seed_quantize),
        "torchao int8": (half, torchao),
        **{f"narrowcast {spec}": (half, with_codec(spec)) for spec in ("int8:block=row", "int4", "apot4")},
    }


def end_to_end(given: argparse.Namespace) -> list[Row]:
    from llama import SMALL, fuse_, random_decoder, tokens_per_second

    # Attention over the cache is the same work for all, and torch's on a CPU is slow: a short cache leaves it small.
    measured, tokens = [], 16 if given.quick else 64
    for threads in map(int, given.threads.split(",")):
        torch.set_num_threads(threads)
        for name, (dtype, convert) in decoders().items():
            model = random_decoder(SMALL, "cpu", dtype)
            convert(model)
            if name in ("fp32", "bf16") or name.startswith("narrowcast"):
                fuse_(model)  # the others hold weights of classes that it does not know
            row: Row = {"name": name, "threads": threads}
            for compiled in (False, True)[: 1 if given.no_compile else 2]:
                try:
                    speed = statistics.median(tokens_per_second(model, tokens, compiled) for _ in range(3))
                    row["compiled" if compiled else "eager"] = speed
                except Exception as error:
                    row["error"] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:100]}"
            measured.append(row)
            console.print(decoder_line(row))
    return measured


def decoder_line(row: Row) -> str:
    speeds = ", ".join(f"{way} {row[way]:.1f} tokens/s" for way in ("eager", "compiled") if way in row)
    return f"{row['name']}, {row['threads']} threads: {speeds}{' ' + row['error'] if 'error' in row else ''}"


# -- quantize_ itself -------------------------------------------------------------------------------------------------


def convert_one(name: str) -> Row:
    """In this process: seconds a billion weights, and the peak above the unquantized model, in bytes a weight."""
    count, n, k = CONVERTED
    convert = decoders()[name][1]
    convert(nn.Sequential(nn.Linear(256, 256, bias=False)).bfloat16())  # imports and first calls
    model = nn.Sequential(*(nn.Linear(k, n, bias=False, dtype=torch.bfloat16) for _ in range(count)))
    weights = count * n * k
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    convert(model)
    took = time.perf_counter() - began
    peak = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    return {"name": name, "s/billion": took / weights * 1e9, "peak": peak / weights}


def conversions() -> list[Row]:
    rows = []
    for name in [name for name in decoders() if "int" in name or "apot" in name]:
        run = subprocess.run([sys.executable, __file__, "--convert-one", name], capture_output=True, text=True)
        row = (
            json.loads(run.stdout.splitlines()[-1])
            if run.returncode == 0
            else {"name": name, "error": run.stderr[-200:]}
        )
        rows.append(row)
        console.print(conversion_line(row))
    return rows


def conversion_line(row: Row) -> str:
    if "error" in row:
        return f"{row['name']}: did not run ({row['error']})"
    return (
        f"{row['name']}: {row['s/billion']:.1f} s a billion weights, peak {row['peak']:.2f} bytes a weight above "
        "the unquantized model in bf16"
    )


# -- the report -------------------------------------------------------------------------------------------------------


def markdown(results: Row) -> str:
    lines = ["# Linear on the CPU", "", *(f"- {key}: {value}" for key, value in results["machine"].items())]
    for layer in results.get("layers", []):
        lines += ["", f"## {title(layer)}", "", f"| {' | '.join(HEAD)} |", "|---" + "|---:" * 6 + "|"]
        lines += ["| " + " | ".join(cells(row)) + " |" for row in layer["rows"]]
        lines += ["", *(f"- {line}" for line in verdicts(layer))]
    for key, head, line in (
        ("end to end", "A decoder of about 100M weights, batch 1", decoder_line),
        ("convert", "quantize_", conversion_line),
    ):
        if key in results:
            lines += ["", f"## {head}", "", *(f"- {line(row)}" for row in results[key])]
    return "\n".join([*lines, ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="11008x4096,4096x4096,4096x11008")
    parser.add_argument("--batches", default="1")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"), help="of x, for ours")
    parser.add_argument("--quick", action="store_true", help="few rounds")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--end-to-end", action="store_true")
    parser.add_argument("--convert", action="store_true")
    parser.add_argument("--convert-one", help=argparse.SUPPRESS)
    parser.add_argument("--out", action="store_true", help="write bench/results/linear-cpu.json and .md")
    given = parser.parse_args()
    if given.convert_one:
        print(json.dumps(convert_one(given.convert_one)))
        return 0
    results: Row = {"machine": facts(x=f"{given.dtype}; competitors in int8 and int4 take bfloat16")}
    console.print(*(f"{key}: {value}" for key, value in results["machine"].items()), sep="\n", highlight=False)
    if given.shapes:
        results["layers"] = layers(given)
        for layer in results["layers"]:
            for line in verdicts(layer):
                console.print(f"{title(layer)}: {line}", highlight=False)
    if given.end_to_end:
        results["end to end"] = end_to_end(given)
    if given.convert:
        results["convert"] = conversions()
    if given.out:
        (RESULTS / "linear-cpu.json").write_text(json.dumps(results, indent=1))
        (RESULTS / "linear-cpu.md").write_text(markdown(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
