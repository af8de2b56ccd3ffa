"""Tokens a second of a Llama-like decoder with random weights, in the runner `narrowcast.generate`.

    PYTHONPATH=src:bench python bench/llama.py                 7B shapes on a GPU: the table and a profile of a token
    ... --codecs bf16,int4:block=128 --batch 16 --layers 4     part of it
    ... --no-profile --no-compiled --json PATH

The limit of a line is reading its weights and its cache once at the bandwidth measured in the same run. All figures are
of `generate` itself, from the second token on, greedy, from a prompt of 4 tokens: wall clock, tokens read by the host.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from pathlib import Path

import torch

import llama_profile
import narrowcast as nc
from narrowcast.generate import SHAPES, Decoder, Sampling, Shape, fuse_, generate
from narrowcast.generate import random_decoder as make
from narrowcast.generate.cache import Cache
from narrowcast.generate.decoder import Layer
from narrowcast.generate.kernels import Kernels, Torch, kernels_for
from narrowcast.generate.steps import Choice, Eager, Graph

SMALL, SEVEN = SHAPES["110m"], SHAPES["7b"]
PROMPT = [1, 2, 3, 4]
RULES = {"embed_tokens": None}
"""The embedding stays as it is: a step reads one row of it."""
LINES = ("bf16", "int8", "int8:block=row", "int4:block=128", "int4", "nf4", "apot4")


def random_decoder(shape: Shape, device: str, dtype: torch.dtype) -> Decoder:
    """Random weights of a usual size, made on the device."""
    return make(shape, device=device, dtype=dtype)


class Static(Eager):
    """Eager steps that see the whole cache, so that all have the same shapes."""

    def begin(self) -> None:
        self._longest = self._choice.cache.positions - 1
        super().begin()


def steps_of(decoder: Decoder, batch: int, positions: int, kernels: Kernels) -> Graph | Static:
    """Steps of a batch that has read nothing yet: a graph on CUDA, else eager."""
    norm = decoder.model.norm.weight
    cache = Cache(decoder.shape, batch, positions, norm.dtype, norm.device)
    sampling = Sampling()
    choice = Choice(decoder, cache, kernels, sampling, sampling.generator(norm.device))
    zeros = torch.zeros(batch, dtype=torch.int64, device=norm.device)
    return Graph(choice, zeros, zeros) if norm.is_cuda else Static(choice, zeros, zeros, 0)


def tokens_per_second(decoder: Decoder, tokens: int, compiled: bool = False, batch: int = 1) -> float:
    """Greedy generation. `compiled`: each layer by torch.compile, in plain torch, instead of the runner's kernels."""
    if not compiled:
        made = generate(decoder, [PROMPT] * batch, tokens + 1, stop_at_end=False)
        made.run()
        return made.tokens_per_second
    torch._dynamo.reset()
    decoder.step = torch.compile(Layer.advance, fullgraph=True, dynamic=False)
    try:
        steps = steps_of(decoder, batch, tokens + 8, Torch())
        for _ in range(3):
            steps.begin()
            steps.read()
        start = time.perf_counter()
        for number in range(tokens):
            steps.begin()
            if number >= steps.ahead:
                steps.read()
        steps.read()
        return batch * tokens / (time.perf_counter() - start)
    finally:
        decoder.step = Layer.advance


def built(shape: Shape, codec: str, device: str) -> Decoder:
    """A decoder in bf16, quantized, its products joined."""
    decoder = random_decoder(shape, device, torch.bfloat16)
    if codec != "bf16":
        nc.quantize_(decoder, codec, rules=RULES)
    fuse_(decoder)
    return decoder


def read_bytes(decoder: Decoder, batch: int, tokens: int) -> float:
    """What a step reads at least: all weights but the embedding, and half of what the cache holds at the end."""
    shape = decoder.shape
    held = decoder.weight_bytes - (0 if shape.tied else decoder.model.embed_tokens.weight.nbytes)
    cache = 2 * 2 * shape.layers * shape.key_heads * shape.head_size * batch * (len(PROMPT) + tokens / 2)
    return held + cache


def line(shape: Shape, codec: str, batch: int, tokens: int, bandwidth: float, device: str) -> dict[str, object]:
    """Tokens a second of all sequences together: the median of three generations, and the limit."""
    decoder = built(shape, codec, device)
    speeds = [tokens_per_second(decoder, tokens, batch=batch) for _ in range(4)][1:]
    limit = batch * bandwidth / read_bytes(decoder, batch, tokens)
    speed = statistics.median(speeds)
    name = kernels_for(decoder, torch.device(device)).name
    result = {
        "name": codec,
        "batch": batch,
        "tokens_per_second": speed,
        "limit": limit,
        "runs": speeds,
        "between": name,
    }
    print(
        f"{codec:16s} batch {batch:2d} {speed:9.1f} tokens/s, {speed / limit:4.0%} of {limit:.0f}; "
        f"weights {decoder.weight_bytes / 2**30:.2f} GiB; between products: {name}",
        flush=True,
    )
    return result


def profile(shape: Shape, codec: str, device: str, batch: int = 1) -> dict[str, object]:
    """Where the time of a token goes, in microseconds for each class of kernels."""
    decoder = built(shape, codec, device)
    steps = steps_of(decoder, batch, 256, kernels_for(decoder, torch.device(device)))
    return llama_profile.profile(steps, codec, shape.layers)


def compiled(shape: Shape, tokens: int, device: str) -> dict[str, object]:
    """bf16 by torch.compile, layer by layer, in a CUDA graph."""
    speed = tokens_per_second(built(shape, "bf16", device), tokens, compiled=True)
    print(f"{'bf16, compiled':16s} batch  1 {speed:9.1f} tokens/s", flush=True)
    return {"name": "bf16, compiled", "batch": 1, "tokens_per_second": speed}


def attempt(results: list[dict[str, object]], what: str, run: object, *arguments: object) -> None:
    """Add what `run` gives; say what went wrong, and go on."""
    try:
        assert callable(run)
        results.append(run(*arguments))
    except Exception as error:
        said = (str(error).strip().splitlines() or [""])[0][:200]
        print(f"{what}: did not run: {type(error).__name__}: {said}", flush=True)
        results.append({"name": what, "error": f"{type(error).__name__}: {error}"})
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def table(given: argparse.Namespace) -> dict[str, object]:
    shape = dataclasses.replace(SHAPES[given.shape], layers=given.layers or SHAPES[given.shape].layers)
    bandwidth = llama_profile.read_bandwidth(given.device)
    print(f"{given.shape}, {shape.layers} layers, {given.tokens} tokens, reads {bandwidth / 1e12:.2f} TB/s", flush=True)
    lines: list[dict[str, object]] = []
    profiles: list[dict[str, object]] = []
    batches = [1] if given.batch is None else [given.batch]
    for codec in given.codecs.split(","):
        for batch in batches:
            attempt(lines, f"{codec} batch {batch}", line, shape, codec, batch, given.tokens, bandwidth, given.device)
    if given.batch is None:
        for codec, batch in (("int4:block=128", 16), ("bf16", 16)):
            attempt(lines, f"{codec} batch {batch}", line, shape, codec, batch, given.tokens, bandwidth, given.device)
    if not given.no_compiled:
        attempt(lines, "bf16, compiled", compiled, shape, given.tokens, given.device)
    if not given.no_profile:
        for codec in given.profiles.split(","):
            attempt(profiles, f"profile of {codec}", profile, shape, codec, given.device)
    return {"shape": dataclasses.asdict(shape), "read_TBps": bandwidth / 1e12, "lines": lines, "profiles": profiles}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="7b", choices=list(SHAPES))
    parser.add_argument("--layers", type=int, help="fewer layers, for a try")
    parser.add_argument("--codecs", default=",".join(LINES))
    parser.add_argument("--profiles", default="bf16,int8,int4:block=128,nf4")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--no-profile", action="store_true")
    parser.add_argument("--no-compiled", action="store_true")
    parser.add_argument("--json")
    return parser.parse_args()


if __name__ == "__main__":
    chosen = arguments()
    found = table(chosen)
    if chosen.json:
        Path(chosen.json).write_text(json.dumps(found, indent=1, default=str))
