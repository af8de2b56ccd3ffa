"""Decoding on a GPU: first whether it is right, then how fast it is. One run, about 4 minutes on an H200.

    PYTHONPATH=src:bench:tests python3 bench/decode_h200.py

1. Triton's norms, gates and attention against fp64, under the bounds of tests/decoding_cases.py
2. products as a decoder calls them, with x from an early kernel just before, against fp64
3. greedy texts: graph = eager, kernels = plain torch in fp32, early launches = none, batch 1, 4 and 16
4. bench/llama.py's table and profiles; int4 also without early launches
5. torch.compile with our operators inside: fullgraph, no recompiles over batches, mode="reduce-overhead"

A part that fails says so and the next one runs. JSON goes to $OUT/decode.json where OUT is set.
"""

from __future__ import annotations

import argparse
import json
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import decoding_cases as cases
import gpu_linear
import llama
import narrowcast as nc
from narrowcast.generate import Decoder, Sampling, Shape, fuse_, generate, random_decoder
from narrowcast.generate.kernels import Torch
from narrowcast.kernels.triton import kinds, norms

CODECS = ("int8", "int4:block=128", "nf4", "apot4")
SMALL = Shape(1024, 4, 16, 2816, 8192, key_heads=4, context=1024)
WIDE_ATTENTIONS = [
    (1, 32, 32, 128, 512, (300,)),
    (16, 32, 8, 128, 300, tuple(range(0, 288, 18))),
    (2, 28, 4, 128, 2048, (2047, 64)),
]
found: dict[str, Any] = {}


def part(name: str, run: Callable[[], object]) -> None:
    began = time.perf_counter()
    try:
        found[name] = run()
        verdict = "done"
    except Exception as error:
        traceback.print_exc(limit=-4)
        found[name] = {"error": f"{type(error).__name__}: {error}"}
        verdict = f"FAILED: {type(error).__name__}: {str(error)[:300]}"
    print(f"== {name}: {verdict} ({time.perf_counter() - began:.1f} s)", flush=True)
    torch.cuda.empty_cache()


def kernels() -> int:
    count = 0
    for dtype in cases.DTYPES:
        for batch, width in (*cases.NORMS, (1, 4096), (16, 4096)):
            cases.check_norm(batch, width, dtype, "cuda")
        cases.check_gate(dtype, "cuda")
        for attention in (*cases.ATTENTIONS, *WIDE_ATTENTIONS):
            cases.check_attention(*attention, dtype, "cuda")
        count += len(cases.NORMS) + 3 + len(cases.ATTENTIONS) + len(WIDE_ATTENTIONS)
    return count


def products() -> dict[str, float]:
    """The largest share of its bound that a result reaches; x is made by an early kernel right before."""
    worst = {}
    for spec in CODECS:
        codec, share = nc.codec(spec), 0.0
        for n, k in ((4096, 4096), (12288, 4096), (22016, 4096), (4096, 11008)):
            rows = codec.encode(torch.randn(n, k, device="cuda") * 0.02)
            weight = codec.decode(rows, k, dtype=torch.float32).double()
            for batch in (1, 2, 16):
                ones = torch.ones(k, device="cuda", dtype=torch.bfloat16)
                for _ in range(3):
                    raw = torch.randn(batch, k, device="cuda", dtype=torch.bfloat16)
                    x = norms.add_norm(raw, raw, ones, 1e-5)[1]
                    y = codec.linear(x, rows, None)
                    exact, bound = gpu_linear.within(x, weight, None)
                    share = max(share, float(((y.double() - exact).abs() / bound).max()))
        worst[spec] = share
        print(f"   {spec}: {share:.2f} of its bound", flush=True)
        assert share <= 1, f"{spec} is outside its bound: {share}"
    return worst


def small(codec: str, dtype: torch.dtype) -> Decoder:
    decoder = random_decoder(SMALL, dtype=dtype, device="cuda")
    if codec != "float":
        nc.quantize_(decoder, codec)
    fuse_(decoder)
    return decoder


def prompts(batch: int) -> list[list[int]]:
    return [[(7 * i + 13 * j) % SMALL.words for j in range(1 + 5 * i)] for i in range(batch)]


def texts() -> list[str]:
    """Greedy texts of 48 tokens; in fp32 also beside plain torch, where two near logits may part a text."""
    said, wrong = [], []
    for codec in ("float", *CODECS):
        for batch in (1, 4, 16):
            decoder = small(codec, torch.bfloat16)
            graph = generate(decoder, prompts(batch), 48).run()
            again = generate(decoder, prompts(batch), 48).run()
            eager = generate(decoder, prompts(batch), 48, cuda_graph=False).run()
            kinds.EARLY = False
            late = generate(decoder, prompts(batch), 48, cuda_graph=False).run()
            kinds.EARLY = True
            if not graph == again == eager == late:
                same = [one == eager for one in (graph, again, late)]
                wrong.append(f"{codec} batch {batch}: graph, graph again, late equal eager: {same}")
        decoder = small(codec, torch.float32)
        fused = generate(decoder, prompts(4), 48).run()
        plain = generate(decoder, prompts(4), 48)
        plain._kernels = Torch("for comparison")
        same = sum(
            a == b for one, other in zip(fused, plain.run(), strict=True) for a, b in zip(one, other, strict=True)
        )
        said.append(f"{codec}: fp32, fused and plain torch agree in {same} of 192 tokens")
        print("  ", said[-1], flush=True)
        wrong += [said[-1]] if same < 150 else []
    drawn = [generate(small("int8", torch.bfloat16), prompts(2), 32, Sampling(0.8, 50, 0.95)).run() for _ in range(2)]
    wrong += ["the same seed draws different texts"] if drawn[0] != drawn[1] else []
    assert not wrong, "; ".join(wrong)
    return said


def compiled() -> str:
    from compile_cases import check_compiled

    for codec in CODECS:
        check_compiled("cuda", codec, mode="reduce-overhead")
    return "fullgraph, no recompiles"


def table() -> dict[str, object]:
    given = argparse.Namespace(
        shape="7b",
        layers=None,
        batch=None,
        tokens=200,
        device="cuda",
        json=None,
        codecs=",".join(llama.LINES),
        profiles="bf16,int8,int4:block=128,nf4",
        no_profile=False,
        no_compiled=False,
    )
    return llama.table(given)


def without_early() -> dict[str, object]:
    kinds.EARLY = False
    try:
        return llama.line(llama.SEVEN, "int4:block=128", 1, 200, 4.6e12, "cuda")
    finally:
        kinds.EARLY = True


if __name__ == "__main__":
    print(torch.cuda.get_device_name(), "torch", torch.__version__, flush=True)
    part("kernels against fp64", kernels)
    part("products after an early kernel", products)
    part("texts", texts)
    part("table", table)
    part("int4:block=128 without early launches between products", without_early)
    part("torch.compile", compiled)
    for name, what in found.items():
        if isinstance(what, dict) and "error" in what:
            print("FAILED", name, str(what["error"])[:400])
    if "OUT" in os.environ:
        Path(os.environ["OUT"], "decode.json").write_text(json.dumps(found, indent=1, default=str))
