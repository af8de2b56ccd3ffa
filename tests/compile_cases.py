"""torch.compile over encoded weights: one graph whatever the batch. Without pytest, for bench/decode_h200.py too."""

from __future__ import annotations

from typing import Any

import torch
from torch._dynamo.utils import counters

import narrowcast as nc
from narrowcast.generate.decoder import MLP
from narrowcast.generate.shape import Shape

BATCHES = (3, 2, 7, 16, 5)
"""The first is no other size of the model: torch.compile takes equal sizes for the same, and would compile again."""


def check_compiled(device: str, codec: str, **options: Any) -> None:
    """A gated MLP: no graph break, no recompilation after the first batch, and what the model gives without compiling.

    With CUDA graphs (mode="reduce-overhead") each batch is recorded once and then replayed; nothing may be skipped.
    """
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = MLP(Shape(256, 1, 4, 512, 64)).to(device, dtype).eval().requires_grad_(False)
    nc.quantize_(model, codec)
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, **options)
    with torch.no_grad():
        compiled(torch.randn(BATCHES[0], 256, device=device, dtype=dtype))
        with torch._dynamo.config.patch(error_on_recompile=True):
            for batch in BATCHES:
                for _ in range(3):  # warm up, record, replay
                    x = torch.randn(batch, 256, device=device, dtype=dtype)
                    y = compiled(x).clone()
                    expected = model(x)
                    # The same products; Inductor may round the gate once instead of twice, of 512 terms below 1.
                    slack = 0.0 if "backend" in options else 2 * torch.finfo(dtype).eps * float(expected.abs().max())
                    assert (y - expected).abs().max() <= slack, (codec, batch, float((y - expected).abs().max()))
    assert counters["stats"]["unique_graphs"] == 1, dict(counters["stats"])
    assert counters["inductor"]["cudagraph_skips"] == 0, "a CUDA graph was skipped"
