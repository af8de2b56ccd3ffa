"""One contender of bench/decode_rivals.py, in a process of its own: NAME on the command line, what it found as JSON.

A contender builds a decoder, quantizes it, compiles, tunes and warms up, says that it is ready, waits for a line, and
says how fast it was. What libraries print goes to the standard error. Building, and whatever Inductor and Triton time
to choose kernels, waits for a lock that all contenders share.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fcntl
import importlib.metadata
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import gpu_competitors
import llama
import llama_profile
from decode_rivals import COMPILED, GPT_FAST, READING, arguments
from narrowcast.generate import SHAPES, Decoder, Shape, fuse_
from narrowcast.generate.decoder import Layer
from narrowcast.generate.kernels import Torch, kernels_for

GPT_FAST_FOLDER = Path(__file__).parents[1] / "wheels" / "gptfast"
PACKAGES = ("triton", "torchao", "bitsandbytes")


class Ready(NamedTuple):
    """A contender that has warmed up."""

    run: Callable[[], float]
    """Tokens a second of one run; of READING, bytes a second."""
    weights: int = 0
    read: int = 0
    """Bytes that a token reads at least: the weights without the embedding."""


class Turns:
    """The lock: who has it builds a model or times kernels, alone."""

    def __init__(self, path: Path) -> None:
        self._file, self._depth = path.open("w"), 0

    @contextlib.contextmanager
    def take(self) -> Iterator[None]:
        if not self._depth:
            fcntl.flock(self._file, fcntl.LOCK_EX)
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                fcntl.flock(self._file, fcntl.LOCK_UN)

    def tune(self) -> None:
        """Let Triton and Inductor take a turn for each kernel that they time."""
        import triton.testing
        from torch._inductor.runtime import benchmarking

        triton.testing.do_bench = self.take()(triton.testing.do_bench)
        for kind in vars(benchmarking).values():
            if isinstance(kind, type) and "benchmark_gpu" in vars(kind):
                kind.benchmark_gpu = self.take()(kind.benchmark_gpu)  # type: ignore[attr-defined]


# -- linear layers -----------------------------------------------------------------------------------------------------


class Nf4Linear(nn.Module):
    """What Linear4bit of bitsandbytes calls, without what it checks before."""

    packed: Tensor

    def __init__(self, weight: Tensor) -> None:
        from bitsandbytes import functional, matmul_4bit

        super().__init__()
        packed, self.state = functional.quantize_4bit(weight, quant_type="nf4", blocksize=64)
        self.register_buffer("packed", packed)
        self._product = matmul_4bit

    def forward(self, x: Tensor) -> Any:
        return self._product(x, self.packed, quant_state=self.state)


def gemlite_int8(weight: Tensor) -> Any:
    from gemlite.helper import A16W8

    return A16W8(device="cuda", dtype=weight.dtype).from_weights(weight)


def gemlite_int4(weight: Tensor) -> Any:
    from gemlite.helper import A16W4_HQQ_INT

    groups = weight.float().reshape(-1, 128)
    low, high = groups.aminmax(dim=1, keepdim=True)
    scales = (high - low) / 15
    zeros = (-low / scales).round()
    codes = (groups / scales + zeros).round().clamp(0, 15).to(torch.uint8).view(weight.shape)
    packer = A16W4_HQQ_INT(device="cuda", dtype=weight.dtype)
    return packer.from_weights(codes, scales.to(weight.dtype), zeros.to(weight.dtype))


def replace_linears(model: nn.Module, make: Callable[[Tensor], nn.Module]) -> None:
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                setattr(module, name, make(child.weight.detach()))


def quantize_by_torchao(model: nn.Module, bits: int, own_settings: bool) -> None:
    from torchao.quantization import Int4WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

    if bits == 8:
        quantize_(model, Int8WeightOnlyConfig(set_inductor_config=own_settings))
    else:  # of its packings the one whose kernel is in torch; the others need mslk
        tiles: dict[str, Any] = {"group_size": 128, "int4_packing_format": "tile_packed_to_4d"}
        quantize_(model, Int4WeightOnlyConfig(set_inductor_config=own_settings, **tiles))


def convert(name: str, decoder: Decoder) -> None:
    """Join products that share an input, and quantize the linear layers, in place."""
    if name.startswith("ours ") and name != "ours bf16":
        gpu_competitors.ours(name.removeprefix("ours "))(decoder)
        return
    fuse_(decoder)
    if name.startswith("torchao"):
        quantize_by_torchao(decoder, 8 if "int8" in name else 4, name.endswith("its settings"))
    elif name.startswith("gpt-fast"):
        gpu_competitors.with_seed(decoder)
    elif name.startswith("gemlite"):
        import gemlite

        gemlite.set_kernel_caching(True)  # one launch zeroes the outputs of 256 products
        replace_linears(decoder, gemlite_int8 if "int8" in name else gemlite_int4)
    elif name.startswith("bitsandbytes"):
        replace_linears(decoder, Nf4Linear)


# -- a decoder ---------------------------------------------------------------------------------------------------------


def held(model: nn.Module, device: str) -> int:
    """Bytes of a model: on a GPU all that this process has allocated there."""
    if device == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated()
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


def multiply(head: nn.Module, x: Tensor) -> Any:
    return head(x)


class Head(nn.Module):
    """The last product by another way to call it; torch.compile takes no call of nn.Linear by itself."""

    def __init__(self, head: nn.Module, call: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.head, self._call = head, call

    def forward(self, x: Tensor) -> Tensor:
        return self._call(self.head, x)


def compile_layers(decoder: Decoder, device: str) -> None:
    import torch._inductor.config as settings

    settings.coordinate_descent_tuning = True  # without it a product with one row of x is cuBLAS's
    mode = "max-autotune-no-cudagraphs" if device == "cuda" else None
    decoder.step = torch.compile(Layer.advance, fullgraph=True, dynamic=False, mode=mode)
    product = torch.compile(multiply, fullgraph=True, dynamic=False, mode=mode)
    decoder.add_module("lm_head", Head(decoder.lm_head, product))


def tokens_per_second(steps: Any, tokens: int) -> float:
    """From an empty cache."""
    with torch.inference_mode():
        steps._at.zero_()
    began = time.perf_counter()
    for number in range(tokens):
        steps.begin()
        if number >= steps.ahead:
            steps.read()
    steps.close()
    return tokens / (time.perf_counter() - began)


def gpt_fast(given: argparse.Namespace, shape: Shape, turns: Turns) -> Ready:
    sys.path.insert(0, str(GPT_FAST_FOLDER))
    import harness  # type: ignore[import-not-found]

    with turns.take():
        model = harness.build(shape, given.device)
        weights = held(model, given.device)
    run = harness.warmed_up(model, given.tokens, given.device)
    return Ready(run, weights, weights - model.tok_embeddings.weight.nbytes)


def prepare(name: str, given: argparse.Namespace) -> Ready:
    """Everything up to the first token that counts."""
    device, turns = given.device, Turns(given.folder / "turns")
    if device == "cuda":
        turns.tune()
    shape = dataclasses.replace(SHAPES[given.shape], layers=given.layers or SHAPES[given.shape].layers)
    if name == READING:
        with turns.take():
            llama_profile.read_bandwidth(device)
        return Ready(lambda: llama_profile.read_bandwidth(device))
    if name == GPT_FAST:
        return gpt_fast(given, shape, turns)
    with turns.take():
        decoder = llama.random_decoder(shape, device, torch.bfloat16)
        convert(name, decoder)
        weights = held(decoder, device)
    if name in COMPILED:
        compile_layers(decoder, device)
    between = Torch() if name in COMPILED else kernels_for(decoder, torch.device(device))
    steps = llama.steps_of(decoder, 1, given.tokens + 8, between)
    tokens_per_second(steps, given.tokens)
    read = weights - decoder.model.embed_tokens.weight.nbytes
    return Ready(lambda: tokens_per_second(steps, given.tokens), weights, read)


# -- the process -------------------------------------------------------------------------------------------------------


def software(device: str) -> dict[str, str]:
    found = {"python": sys.version.split()[0], "torch": torch.__version__, "cuda": str(torch.version.cuda)}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found | ({"device": torch.cuda.get_device_name()} if device == "cuda" else {})


def contend(given: argparse.Namespace) -> None:
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(**what: object) -> None:
        print(json.dumps(what), file=channel, flush=True)

    began = time.perf_counter()
    try:
        ready = prepare(given.contender, given)
        spent = time.perf_counter() - began
        say(weights=ready.weights, read=ready.read, prepared_s=spent, software=software(given.device))
        if sys.stdin.readline():
            say(runs=[ready.run() for _ in range(4)][1:])
    except BaseException as error:
        traceback.print_exc()
        first = (str(error).strip().splitlines() or [""])[0][:300]
        say(error=f"{type(error).__name__}: {first}")
    sys.stderr.flush()
    os._exit(0)  # graphs and their pools are not taken apart one by one while the next contender runs


if __name__ == "__main__":
    contend(arguments())
