"""The data of the benchmarks: Gaussian and Laplace numbers, and a real model's gradients and weights.

The real ones come from a small byte-level transformer, trained for seconds on the source text of Python's standard
library: nothing is downloaded, and nothing is stored. The seed is fixed; the text is that of the Python that runs. The
model is not narrowcast.byte_gpt, because the figures of docs/defaults.md were measured on this one.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

LAYERS, HEADS, CONTEXT, BATCH, STEPS = 2, 4, 64, 16, 50


class Real(NamedTuple):
    gradients: Tensor
    """Every gradient of the last step, flat and in order: what DDP would put on the wire."""
    weights: Tensor
    """Every matrix of the trained model, flat: what would be stored quantized (no norms, no biases)."""
    loss: tuple[float, float]
    """Nats per byte at the first and the last step."""


class Model(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.position = nn.Parameter(torch.randn(CONTEXT, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, HEADS, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        hidden = self.layers(self.embedding(tokens) + self.position, mask=mask, is_causal=True)
        logits: Tensor = self.head(self.norm(hidden))
        return logits


def source_text(limit: int = 1 << 21) -> Tensor:
    """The first bytes of the standard library's modules, in the order of their names."""
    text = b""
    for path in sorted(Path(os.__file__).parent.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= limit:
            break
    return torch.frombuffer(bytearray(text[:limit]), dtype=torch.uint8).long()


def real(width: int = 128, seed: int = 0) -> Real:
    """Train for a few seconds; return the last step's gradients and the weights after it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        text, model = source_text(), Model(width)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        losses = []
        for _ in range(STEPS):
            starts = torch.randint(len(text) - CONTEXT, (BATCH, 1))
            window = text[starts + torch.arange(CONTEXT + 1)]
            loss = nn.functional.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(loss.item())
    gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    weights = [p.detach().flatten() for p in model.parameters() if p.dim() == 2]
    return Real(torch.cat(gradients), torch.cat(weights), (losses[0], losses[-1]))


def gaussian(numel: int, seed: int = 1) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def laplace(numel: int, seed: int = 2) -> Tensor:
    """Density exp(-|x|) / 2: an exponential with a random sign."""
    uniform = torch.rand(numel, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) - 0.5
    return (-uniform.sign() * torch.log1p(-2 * uniform.abs())).float()


def sqnr(x: Tensor, y: Tensor) -> float:
    """Signal over error, in dB."""
    error = (x.double() - y.double()).square().sum()
    return float("inf") if error == 0 else float(10 * torch.log10(x.double().square().sum() / error))
