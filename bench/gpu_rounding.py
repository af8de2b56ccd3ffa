"""Roundings on a GPU: are searched rows those of the CPU, how long do a billion weights take, and does gptq work there?

    PYTHONPATH=src python bench/gpu_rounding.py [--weights 1e9] [--json FILE]
    PYTHONPATH=src python bench/gpu_rounding.py --device cpu --only times --weights 16e6    # one thread of a CPU

Searched scales on CUDA are compared with those of the CPU, byte for byte, for codecs of every kind. Times are medians
of three passes over one bf16 tensor, after a first one that compiles; each is printed as soon as it is known. `with
columns` is what `rounding="search"` takes, whose columns count by their inputs. gptq rounds a small stack of blocks
on either device, plain and with a checkpoint that is resumed; its layers' errors are compared, since products in
another order change some codes.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import narrowcast as nc
from narrowcast.kernels.reference.search import GAIN
from narrowcast.nn.rounding.search import round_by_search

COMPARED = (
    *("int8", "int8:block=32", "int8:block=128", "int8:block=row", "int4:block=32", "int4:block=64", "int4:block=128"),
    *("int4:block=row", "int3:block=32", "int3:block=64", "int3:block=row", "int4:block=64,zero_point=true"),
    *("int8:block=row,zero_point=true", "int4:scale=e8m0", "nf4:block=32", "nf4:block=64", "nf4:block=row"),
    *("apot4:block=64", "apot4:block=128", "apot4:block=row", "int6", "int5", "int2", "fp8_e4m3", "sign"),
)
TIMED = ("int4:block=64", "nf4", "int3:block=64", "int4:block=row", "int4:block=64,zero_point=true", "apot4", "int8")
CUDA = torch.device("cuda")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, width: int = 512, blocks: int = 4) -> None:
        super().__init__()
        self.table = nn.Embedding(1000, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, 1000)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def compare() -> dict[str, Any]:
    """The codecs whose searched rows differ, with how many rows do."""
    differing: dict[str, int] = {}
    generator = torch.Generator().manual_seed(0)
    for numel, dtype in ((4096, torch.float32), (1000, torch.bfloat16), (11008, torch.float32)):
        x = (torch.randn(96, numel, generator=generator) * 0.02).to(dtype)
        x[3, 5], x[4], x[5, 7] = float("nan"), 0.0, 3.0
        importance = torch.rand(numel, generator=generator) + 0.1
        for spec in COMPARED:
            codec = nc.codec(spec)
            for weights in (None, importance):
                expected = codec.encode_searched(x, weights)
                found = codec.encode_searched(x.cuda(), None if weights is None else weights.cuda()).cpu()
                rows = int((found != expected).any(1).sum())
                if rows:
                    differing[f"{spec} {numel} {dtype} {'weighted' if weights is not None else 'plain'}"] = rows
    weight = torch.randn(1024, 2048, generator=generator)
    for spec in COMPARED:
        one, other = (round_by_search(some, nc.codec(spec), 1).data.cpu() for some in (weight, weight.cuda()))
        rows = int((one != other).any(1).sum())
        if rows:
            differing[f"{spec} round_by_search"] = rows
    return {"compared": 7 * len(COMPARED), "differing": differing}


def seconds(work: Callable[[], object], device: str, rounds: int = 3) -> tuple[float, float]:
    """The median of some passes, and what the first one takes, which compiles; on a CPU the processor's time."""
    times, clock = [], time.perf_counter if device == "cuda" else time.process_time
    for _ in range(1 + rounds):
        if device == "cuda":
            torch.cuda.synchronize()
        start = clock()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(clock() - start)
    return statistics.median(times[1:]), times[0]


def timings(weights: int, specs: Sequence[str], device: str) -> list[dict[str, Any]]:
    x = torch.empty(max(weights // 4096, 1), 4096, dtype=torch.bfloat16, device=device).normal_(0, 0.02)
    counts = torch.rand(4096, device=device) + 0.5
    lines = []
    for spec in specs:
        codec = nc.codec(spec)
        before = torch.cuda.memory_allocated() if device == "cuda" else 0
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        line: dict[str, Any] = {"codec": spec, "kernel": nc.which_kernel(codec, device, operation="encode_searched")}
        works = {
            "nearest": lambda codec=codec: codec.encode(x),
            "searched": lambda codec=codec: codec.encode_searched(x, gain=GAIN),
            "with columns": lambda codec=codec: codec.encode_searched(x, counts, GAIN),
        }
        for name, work in works.items():
            line[f"{name} s"], line[f"{name}, first s"] = seconds(work, device)
            print(spec, name, f"{line[f'{name} s']:.4f} s, first {line[f'{name}, first s']:.1f} s", flush=True)
        line["GB beside the weight"] = (torch.cuda.max_memory_allocated() - before) / 1e9 if device == "cuda" else 0.0
        line["ratio"] = line["with columns s"] / line["nearest s"]
        lines.append(line)
    return lines


def gptq() -> dict[str, Any]:
    torch.manual_seed(0)
    model = Model().eval()
    data = [torch.randint(0, 1000, (8, 64)) for _ in range(8)]
    results: dict[str, Any] = {}
    for name, codec in (("int4", "int4:block=64"), ("nf4", "nf4"), ("int3 zero point", "int3:zero_point=true")):
        reports: dict[str, nc.nn.Report] = {}
        for device in ("cpu", "cuda"):
            own = copy.deepcopy(model).to(device)
            torch.cuda.reset_peak_memory_stats()
            start = time.perf_counter()
            reports[device] = nc.quantize_(own, codec, rounding="gptq", data=data)
            torch.cuda.synchronize()
            results[f"{name} {device} s"] = time.perf_counter() - start
            assert all(parameter.device.type == device for parameter in own.parameters())
        results[f"{name} cuda peak bytes"] = torch.cuda.max_memory_allocated()
        pairs = list(zip(reports["cpu"].entries, reports["cuda"].entries, strict=True))
        results[f"{name} largest ratio of errors cuda / cpu"] = max(b.error / a.error for a, b in pairs)
        results[f"{name} all better than nearest"] = all(b.error < b.nearest_error for _, b in pairs[1:])
    return {**results, "resumed": resumed(model, data)}


def resumed(model: nn.Module, data: list[torch.Tensor]) -> str:
    """An interrupted rounding with a checkpoint on CUDA, called again."""
    rounding, done = nc.nn.GPTQ.__call__, 0

    def stop(*arguments: Any, **options: Any) -> Any:
        nonlocal done
        done += 1
        if done == 5:
            raise KeyboardInterrupt
        return rounding(*arguments, **options)

    plain, own = copy.deepcopy(model).cuda(), copy.deepcopy(model).cuda()
    nc.quantize_(plain, "int4:block=64", rounding="gptq", data=data)
    with tempfile.TemporaryDirectory() as folder:
        nc.nn.GPTQ.__call__ = stop  # type: ignore[method-assign]
        try:
            nc.quantize_(own, "int4:block=64", rounding="gptq", data=data, checkpoint=folder)
        except KeyboardInterrupt:
            pass
        finally:
            nc.nn.GPTQ.__call__ = rounding  # type: ignore[method-assign]
        same = all(torch.equal(a, b.cuda()) for a, b in zip(own.parameters(), model.parameters(), strict=True))
        nc.quantize_(own, "int4:block=64", rounding="gptq", data=data, checkpoint=folder)
    ended = all(torch.equal(a, b) for a, b in zip(own.parameters(), plain.parameters(), strict=True))
    return (
        f"the model was {'' if same else 'NOT '}as before, and {'ends' if ended else 'does NOT end'} in the same bytes"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=float, default=1e9)
    parser.add_argument("--json", default=os.path.join(os.environ.get("OUT", "."), "gpu_rounding.json"))
    parser.add_argument("--device", default="cuda", help="cpu times on one thread instead, with --only times")
    parser.add_argument("--only", default="", help="bytes, times or gptq")
    parser.add_argument("--codecs", default=";".join(TIMED), help="which are timed, with semicolons between")
    options = parser.parse_args()
    torch.set_num_threads(1 if options.device == "cpu" else torch.get_num_threads())
    name = torch.cuda.get_device_name() if options.device == "cuda" else options.device
    result: dict[str, Any] = {"device": name, "torch": torch.__version__}
    for name, work in (
        ("bytes", compare),
        ("times", lambda: timings(int(options.weights), options.codecs.split(";"), options.device)),
        ("gptq", gptq),
    ):
        if options.only not in ("", name):
            continue
        start = time.perf_counter()
        try:
            result[name] = work()
        except Exception as error:
            result[name] = f"FAILED: {type(error).__name__}: {error}"
        result[f"{name} took s"] = round(time.perf_counter() - start, 1)
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=1)
        show(name, result[name])
        print(f"({name}: {result[f'{name} took s']} s)\n", flush=True)


def show(name: str, value: Any) -> None:
    if name != "times" or isinstance(value, str):
        print(f"{name}: {json.dumps(value, indent=1)}")
        return
    names = "nearest s", "searched s", "with columns s", "ratio", "GB beside the weight"
    print(f"| codec | kernel | {' | '.join(names)} |")
    for line in value:
        print(f"| {line['codec']} | {line['kernel']} | {' | '.join(f'{line[name]:.4g}' for name in names)} |")


if __name__ == "__main__":
    main()
