"""Other libraries' layers for bench/gpu_linear.py (--competitors), and a decoder of 7B shape (--end-to-end).

Packages are taken from where Python finds them (unpacked wheels of torchao, bitsandbytes and gemlite on PYTHONPATH will
do); one that cannot run is reported with its reason, never left out silently.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import llama
import narrowcast as nc
from narrowcast.generate import Decoder, fuse_

Layer = Callable[[int], object]
"""One call, on the weights with this number."""


def copies(n: int, k: int, bytes_each: float) -> int:
    return max(2, int(200e6 / (n * k * bytes_each)) + 1)


def weight_of(n: int, k: int) -> Tensor:
    return torch.randn(n, k, device="cuda", dtype=torch.bfloat16) * 0.02


def seed_int8(n: int, k: int, x: Tensor) -> tuple[Layer, int]:
    """gpt-fast's formula, compiled: the bytes converted and scaled after the product."""
    count = copies(n, k, 1)
    weights = torch.randint(-127, 128, (count, n, k), device="cuda", dtype=torch.int8)
    scales = torch.rand(n, device="cuda", dtype=torch.bfloat16)

    @torch.compile(mode="max-autotune-no-cudagraphs", dynamic=False)
    def run(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
        return F.linear(x, weight.to(x.dtype)) * scales

    return lambda i: run(x, weights[i], scales), count


def torchao_int8(n: int, k: int, x: Tensor) -> tuple[Layer, int]:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    layers = [nn.Linear(k, n, bias=False, device="cuda", dtype=torch.bfloat16) for _ in range(copies(n, k, 1))]
    for layer in layers:
        quantize_(layer, Int8WeightOnlyConfig())
    run = torch.compile(F.linear, mode="max-autotune-no-cudagraphs", dynamic=False)
    return lambda i: run(x, layers[i].weight), len(layers)


def bitsandbytes_nf4(n: int, k: int, x: Tensor) -> tuple[Layer, int]:
    from bitsandbytes import functional as bnb

    made = [bnb.quantize_4bit(weight_of(n, k), quant_type="nf4", blocksize=64) for _ in range(copies(n, k, 0.5))]
    return lambda i: bnb.gemv_4bit(x, made[i][0].t(), state=made[i][1]), len(made)


def gemlite_int8(n: int, k: int, x: Tensor) -> tuple[Layer, int]:
    from gemlite.helper import A16W8

    made = [A16W8(device="cuda", dtype=torch.bfloat16).from_weights(weight_of(n, k)) for _ in range(copies(n, k, 1))]
    return lambda i: made[i](x), len(made)


def gemlite_int4(n: int, k: int, x: Tensor) -> tuple[Layer, int]:
    from gemlite.helper import A16W4_HQQ_INT

    made = []
    for _ in range(copies(n, k, 0.5)):
        codes = torch.randint(0, 16, (n, k), device="cuda", dtype=torch.uint8)
        scales = torch.rand(n * k // 128, 1, device="cuda", dtype=torch.bfloat16)
        packer = A16W4_HQQ_INT(device="cuda", dtype=torch.bfloat16)
        made.append(packer.from_weights(codes, scales, torch.full_like(scales, 8)))
    return lambda i: made[i](x), len(made)


COMPETITORS = {
    "seed int8, compiled": (seed_int8, 1.0),
    "torchao int8, compiled": (torchao_int8, 1.0),
    "gemlite int8": (gemlite_int8, 1.0),
    "gemlite int4 g128": (gemlite_int4, 0.5),
    "bitsandbytes nf4": (bitsandbytes_nf4, 0.5),
}


def competitors(
    shapes: tuple[tuple[int, int], ...], time: Callable[[Layer, int], float], limit: float
) -> list[dict[str, object]]:
    """Times of every competitor that runs here at batch 1."""
    found: list[dict[str, object]] = []
    for name, (n, k) in itertools.product(COMPETITORS, shapes):
        make, size = COMPETITORS[name]
        x = torch.randn(1, k, device="cuda", dtype=torch.bfloat16)
        try:
            run, count = make(n, k, x)
            taken = time(run, count)
        except Exception as error:
            print(f"{name} {n}x{k}: did not run: {type(error).__name__}: {str(error).splitlines()[0][:150]}")
            continue
        found.append({"name": name, "batch": 1, "n": n, "k": k, "us": taken, "share": size * n * k / limit / taken})
        print(f"{name:24s} {n:6d}x{k:<6d} {taken:8.2f} us ({size * n * k / limit / taken:4.0%})", flush=True)
        torch._dynamo.reset()
    return found


# -- end to end --------------------------------------------------------------------------------------------------------


class SeedLinear(nn.Module):
    """gpt-fast's int8 layer, in its own formula."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        scales = layer.weight.float().abs().amax(1) / 127
        self.register_buffer("weight", (layer.weight / scales[:, None]).round().clamp(-128, 127).to(torch.int8))
        self.register_buffer("scales", scales.to(layer.weight.dtype))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype)) * self.scales


def with_seed(model: nn.Module) -> None:
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                setattr(module, name, SeedLinear(child))


def with_torchao(model: nn.Module) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(model, Int8WeightOnlyConfig())


def ours(codec: str) -> Callable[[Decoder], None]:
    def convert(model: Decoder) -> None:
        nc.quantize_(model, codec, rules=llama.RULES)
        fuse_(model)

    return convert


MODELS: dict[str, Callable[[Any], object]] = {
    "bf16": fuse_,
    "bf16, compiled": fuse_,
    "ours int8:block=row": ours("int8:block=row"),
    "ours int8": ours("int8"),
    "ours int4": ours("int4"),
    "ours int4:block=128": ours("int4:block=128"),
    "ours apot4": ours("apot4"),
    "ours nf4": ours("nf4"),
    "seed int8": with_seed,
    "torchao int8": with_torchao,
}

COMPILED = ("bf16, compiled", "seed int8", "torchao int8")
"""Each layer by torch.compile, in plain torch; the others are the runner as it is."""


def end_to_end(shape: llama.Shape = llama.SEVEN, tokens: int = 200) -> list[dict[str, object]]:
    """Tokens a second at batch 1, of every model."""
    found: list[dict[str, object]] = []
    for name, convert in MODELS.items():
        torch.cuda.empty_cache()
        try:
            model = llama.random_decoder(shape, "cuda", torch.bfloat16)
            convert(model)
            held = sum(t.numel() * t.element_size() for t in model.parameters()) / 2**30
            speed = llama.tokens_per_second(model, tokens, compiled=name in COMPILED)
        except Exception as error:
            print(f"{name}: did not run: {type(error).__name__}: {str(error).splitlines()[0][:150]}")
            continue
        found.append({"name": name, "tokens_per_second": speed, "parameters_GiB": held})
        print(f"{name:24s} {speed:8.1f} tokens/s, parameters {held:6.2f} GiB", flush=True)
        del model
    return found
