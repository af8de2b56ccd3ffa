"""A decoder with the shapes of Llama, in plain torch, for benchmarks: random weights, a cache of fixed size, batch 1.

`Decoder(SMALL)` has about 100 million weights, `Decoder(SEVEN)` the shapes of a 7B model. `tokens_per_second` generates
greedily. On a GPU each layer is compiled (once: all are alike) and a step replayed as a CUDA graph.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Shape(NamedTuple):
    width: int
    layers: int
    heads: int
    hidden: int
    words: int
    context: int = 512


SMALL = Shape(768, 12, 12, 2048, 16000)
SEVEN = Shape(4096, 32, 32, 11008, 32000)


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, hidden = shape.width, shape.hidden
        self.heads = shape.heads
        self.before, self.between = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)
        size = (1, shape.heads, shape.context, width // shape.heads)
        self.register_buffer("keys", torch.zeros(size), persistent=False)
        self.register_buffer("values", torch.zeros(size), persistent=False)

    def forward(self, x: Tensor, position: Tensor, turn: Tensor, seen: Tensor) -> Tensor:
        """x [1, 1, width] at `position` [1]; `turn` is that position's rotation, `seen` the positions so far."""
        y = self.before(x)
        query, key, value = (part(y).view(1, self.heads, 1, -1) for part in (self.query, self.key, self.value))
        self.keys.index_copy_(2, position, rotated(key, turn))
        self.values.index_copy_(2, position, value)
        found = F.scaled_dot_product_attention(rotated(query, turn), self.keys, self.values, attn_mask=seen)
        x = x + self.out(found.reshape(1, 1, -1))
        y = self.between(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def rotated(x: Tensor, turn: Tensor) -> Tensor:
    """Pairs of x turned by angles whose cosines and sines are `turn` [2, head / 2]."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * turn[0] - b * turn[1], a * turn[1] + b * turn[0]), -1)


class Decoder(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.words, shape.width)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.words, bias=False)
        half = shape.width // shape.heads // 2
        angles = torch.outer(torch.arange(shape.context).float(), 10000.0 ** -(torch.arange(half) / half))
        self.register_buffer("turns", torch.stack((angles.cos(), angles.sin()), 1), persistent=False)
        self.register_buffer("places", torch.arange(shape.context), persistent=False)
        self.step: Callable[..., Tensor] = Layer.forward

    def forward(self, token: Tensor, position: Tensor) -> Tensor:
        """The token after `token` [1], which is at `position` [1]: the likeliest, [1]."""
        x = self.embedding(token).view(1, 1, -1)
        turn = self.turns.index_select(0, position)[0].to(x.dtype)
        seen = (self.places <= position).view(1, 1, 1, -1)
        for layer in self.layers:
            x = self.step(layer, x, position, turn, seen)
        return self.head(self.norm(x)).argmax(-1).view(1)


def random_decoder(shape: Shape, device: str, dtype: torch.dtype) -> Decoder:
    """Random weights of a usual size, made on the device."""
    torch.manual_seed(0)
    was = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = Decoder(shape)
    finally:
        torch.set_default_dtype(was)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, 0.02)
    return model.eval().requires_grad_(False)


@torch.no_grad()
def tokens_per_second(model: Decoder, tokens: int, compiled: bool | None = None) -> float:
    """Greedy generation at batch 1, after a warm-up."""
    device = next(model.buffers()).device
    if compiled is None:
        compiled = device.type == "cuda"
    if compiled:
        torch._dynamo.reset()
        model.step = torch.compile(Layer.forward, fullgraph=True, dynamic=False)
    token, position = torch.zeros(1, dtype=torch.long, device=device), torch.zeros(1, dtype=torch.long, device=device)

    def advance() -> None:
        token.copy_(model(token, position))
        position.add_(1)

    for _ in range(3):
        advance()
    step: Callable[[], object] = advance
    if device.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            advance()
        step = graph.replay
        step()
        torch.cuda.synchronize()
    position.zero_()
    start = time.perf_counter()
    for _ in range(tokens):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return tokens / (time.perf_counter() - start)
