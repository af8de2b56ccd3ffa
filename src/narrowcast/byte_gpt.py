"""A small language model and text to train it on, offline: for `narrowcast demo`, examples/ and bench/training.py.

It stands outside cli/ so that examples and benchmarks import it without the command line, and inside the package
because the demo runs from a wheel. It needs torch and nothing else of narrowcast but its errors.

The model is a decoder-only transformer over bytes: no tokenizer, 256 symbols. `ByteGPT(config)` maps bytes
[batch, time] to logits [batch, time, 256] over the next byte; time is at most `config.context`. Norms come before
attention and layers, positions are learned, the output matrix is not tied, there is no dropout, and a seed decides the
weights.

The text is the source of Python's standard library, in the order of its paths: the same on every machine with the same
Python. Every tenth file is held out. Tests and character tables are excluded: they do not read like programs.

Not done: a cache of keys and values, mixed precision, training itself.
"""

from __future__ import annotations

import math
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from narrowcast.errors import MissingFileError, ShapeError

SYMBOLS = 256
HELD_OUT = 10
"""One file in this many is held out."""
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "encodings"}


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a model. The default has 0.8 million parameters, which a laptop trains in minutes."""

    layers: int = 4
    width: int = 128
    heads: int = 4
    context: int = 128

    def __post_init__(self) -> None:
        if min(self.layers, self.width, self.heads, self.context) < 1 or self.width % self.heads:
            raise ShapeError(
                f"GPTConfig: layers, width, heads and context must be at least 1, and heads must divide width; this is "
                f"{self}. For example: GPTConfig(layers=4, width=128, heads=4, context=128)"
            )


class Block(nn.Module):
    """Causal attention, then two linear layers on each position; both add to their input."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.before_attention = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.attended = nn.Linear(width, width)
        self.before_layers = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._attention(self.before_attention(x))
        hidden = F.gelu(self.up(self.before_layers(x)), approximate="tanh")
        return x + self.down(hidden)  # type: ignore[no-any-return]

    def _attention(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        split = self.queries_keys_values(x).view(batch, time, 3, self.heads, width // self.heads)
        queries, keys, values = split.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        return self.attended(mixed.transpose(1, 2).reshape(batch, time, width))  # type: ignore[no-any-return]


class ByteGPT(nn.Module):
    """Maps bytes, as integers [batch, time], to logits [batch, time, 256] of the next bytes."""

    def __init__(self, config: GPTConfig | None = None, *, seed: int = 0) -> None:
        super().__init__()
        self.config = config = config or GPTConfig()
        self.symbols = nn.Embedding(SYMBOLS, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.following = nn.Linear(config.width, SYMBOLS, bias=False)
        self._initialize(torch.Generator().manual_seed(seed))

    def _initialize(self, generator: torch.Generator) -> None:
        # The last layer of a residual branch starts smaller, so that the sum over 2 branches per layer keeps its scale.
        ends = {"attended", "down"}
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                shrink = math.sqrt(2 * self.config.layers) if name.rpartition(".")[2] in ends else 1.0
                nn.init.normal_(module.weight, std=0.02 / shrink, generator=generator)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        if tokens.dim() != 2 or tokens.shape[1] > self.config.context:
            raise ShapeError(
                f"tokens: ByteGPT takes [batch, time] with time up to its context of {self.config.context}; this is "
                f"{list(tokens.shape)}. Cut it: tokens[:, -{self.config.context}:]"
            )
        x = self.symbols(tokens) + self.positions(
            torch.arange(tokens.shape[1], dtype=torch.int64, device=tokens.device)
        )
        for block in self.blocks:
            x = block(x)
        return self.following(self.norm(x))  # type: ignore[no-any-return]

    @torch.no_grad()
    def generate(self, prompt: bytes, count: int, *, temperature: float = 0.8, seed: int = 0) -> bytes:
        """`count` bytes that continue the prompt. A temperature of 0 takes the most likely byte each time."""
        device = self.following.weight.device
        generator = torch.Generator(device).manual_seed(seed)
        written = torch.tensor([list(prompt or b"\n")], dtype=torch.int64, device=device)
        start = written.shape[1]
        for _ in range(count):
            logits = self(written[:, -self.config.context :])[:, -1]
            if temperature > 0:
                following = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
            else:
                following = logits.argmax(-1, keepdim=True)
            written = torch.cat([written, following], 1)
        return bytes(written[0, start:].tolist())


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy in nats per byte, averaged over all positions."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def stdlib_text(*, held_out: bool = False) -> Tensor:
    """The standard library's source as uint8 [bytes]: nine tenths of its files, or the tenth that is held out."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    chosen = [path for number, path in enumerate(_sources(folder)) if (number % HELD_OUT == 0) is held_out]
    text = bytearray(b"".join((folder / path).read_bytes() for path in chosen))
    if not text:
        raise MissingFileError(
            f"{folder}, the folder of the standard library, holds no Python source: some Pythons ship it compiled or "
            f"in a zip file. Use a Python that has it, or your own text: "
            f"torch.frombuffer(bytearray(data), dtype=torch.uint8)"
        )
    return torch.frombuffer(text, dtype=torch.uint8)


def _sources(folder: Path) -> list[str]:
    """The paths of the source files, in order. Folders of `LEFT_OUT` are not listed: some are large."""
    paths = []
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in LEFT_OUT]
        paths += [(Path(place) / name).relative_to(folder).as_posix() for name in files if name.endswith(".py")]
    return sorted(paths)


def batches(text: Tensor, context: int, batch: int, *, seed: int, rank: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless pairs of inputs and targets, int64 [batch, context], from random places. Each rank draws its own."""
    if len(text) <= context:
        raise ShapeError(
            f"text: must be longer than the context of {context}, and has {len(text)} bytes. Pass a longer text, or a "
            f"shorter context"
        )
    generator = torch.Generator().manual_seed((seed << 20) + rank)
    offsets = torch.arange(context + 1, dtype=torch.int64, device="cpu")
    while True:
        starts = torch.randint(len(text) - context, (batch, 1), dtype=torch.int64, device="cpu", generator=generator)
        windows = text[starts + offsets].long()
        yield windows[:, :-1], windows[:, 1:]
