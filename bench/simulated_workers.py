"""Training with several workers simulated in one process: which way to send gradients ends with the lowest loss.

A model's parameters lie in one flat vector. In each step every worker has a gradient of its own batch; those of
matrices are reduced as narrowcast reduces them (two stages: every worker encodes a row for each owner, keeps what that
loses, and the owner encodes the average and keeps what that loses), those of vectors without loss. So loss depends on
codec, feedback and optimizer as in a real run, and on no network. What is not simulated: buckets, and so which elements
share a block at the edges of parameters.

A `Way` names one such run; `train(way, ...)` is its loss on text that is never trained on.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import narrowcast as nc
from narrowcast.byte_gpt import ByteGPT, GPTConfig, batches, loss_of, stdlib_text
from training_ranks import held_out_windows, warm_cosine

BETAS, EPS, DECAY = (0.9, 0.95), 1e-8, 0.1


@dataclass(frozen=True)
class Way:
    """One way to train."""

    codec: str = ""
    """Nothing: fp32."""
    optimizer: str = "adamw"
    rate: float = 1e-3
    feedback: float = 0.0
    """What residuals are multiplied with before they are added: 0 is no feedback, 1 all of it."""
    clip: str = ""
    """'before': each worker's gradient; 'after': the average; to a norm of 1."""
    warmup: float = 0.0
    """With a share of the steps, the momentum travels after it."""
    warmup_codec: str = "int8"
    refresh: int = 0
    """Every so many steps of the momentum, a gradient travels; -1: after 16, 32, 64 ... steps."""
    scaled: bool = False
    """The momentum travels divided by the root of the second moment."""
    bound: float = 0.0
    """How far a scaled momentum may go; 0: any."""
    seed: int = 0

    @property
    def momentum(self) -> bool:
        return self.warmup > 0

    def sends_gradients(self, step: int, steps: int) -> bool:
        since = step - round(self.warmup * steps) + 1
        if not self.momentum or since <= 0:
            return True
        if self.refresh < 0:
            whole, rest = divmod(since, 16)
            return rest == 0 and whole & (whole + 1) == 0
        return bool(self.refresh) and since % self.refresh == 0

    def bits(self, steps: int) -> float:
        """Bits an element, on average over all steps."""
        wide = nc.codec(self.warmup_codec).row_bytes(1 << 20) / (1 << 17) if self.momentum else 0.0
        narrow = nc.codec(self.codec).row_bytes(1 << 20) / (1 << 17) if self.codec else 32.0
        return (
            sum(wide if self.momentum and self.sends_gradients(step, steps) else narrow for step in range(steps))
            / steps
        )


@dataclass
class Reduction:
    """The average of all workers' vectors in a codec, with the residuals of all of them."""

    codec: Any
    feedback: float
    sender: Tensor | None = None
    owner: Tensor | None = None

    def average(self, terms: Tensor) -> Tensor:
        """[workers, n] -> [n], as all workers end with it."""
        workers, numel = terms.shape
        part = -(-numel // (128 * workers)) * 128
        meant = terms.new_zeros(workers, workers * part)
        meant[:, :numel] = terms
        meant = meant.view(workers, workers, part)
        if self.feedback and self.sender is not None:
            meant = meant + self.feedback * self.sender
        sent = self._trip(meant.view(-1, part)).view_as(meant).clone()
        own = torch.arange(workers, device=terms.device)
        sent[own, own] = meant[own, own]  # the owner's own part is not quantized
        sums = sent.sum(0) / workers
        if self.feedback and self.owner is not None:
            sums = sums + self.feedback * self.owner
        result = self._trip(sums)
        if self.feedback:
            self.sender, self.owner = meant - sent, sums - result
        return result.view(-1)[:numel]

    def _trip(self, rows: Tensor) -> Tensor:
        return self.codec.decode(self.codec.encode(rows), rows.shape[1])  # type: ignore[no-any-return]


@dataclass
class Flat:
    """A model whose parameters, and gradients, are views of one vector: matrices first."""

    model: nn.Module
    matrices: list[nn.Parameter] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.matrices = [p for p in self.model.parameters() if p.dim() > 1]
        everything = [*self.matrices, *(p for p in self.model.parameters() if p.dim() <= 1)]
        self.values = torch.cat([p.detach().reshape(-1) for p in everything])
        self.gradient = torch.zeros_like(self.values)
        self.compressed = sum(p.numel() for p in self.matrices)
        start = 0
        for p in everything:
            here = slice(start, start + p.numel())
            p.data, p.grad = self.values[here].view_as(p), self.gradient[here].view_as(p)
            start = here.stop


class Gradients:
    """The gradient of a loss at a batch; on a GPU, as one CUDA graph."""

    def __init__(self, flat: Flat, loss: Callable[..., Tensor], example: tuple[Tensor, ...]) -> None:
        self._flat, self._loss = flat, loss
        self._given = tuple(x.clone() for x in example)
        self._graph: Any = None
        if flat.values.is_cuda:
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                for _ in range(3):
                    self._run()
            torch.cuda.current_stream().wait_stream(stream)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._run()

    def _run(self) -> None:
        self._flat.gradient.zero_()
        self._loss(self._flat.model, *self._given).backward()

    def __call__(self, batch: tuple[Tensor, ...]) -> Tensor:
        for place, x in zip(self._given, batch, strict=True):
            place.copy_(x)
        self._run() if self._graph is None else self._graph.replay()
        return self._flat.gradient


class Optimizer:
    """AdamW, SGD with momentum, or momentum that is made orthogonal (as Muon does), on flat vectors."""

    def __init__(self, way: Way, flat: Flat) -> None:
        self.way, self.flat = way, flat
        self.first, self.second = torch.zeros_like(flat.values), torch.zeros_like(flat.values)
        self.steps = self.second_steps = 0
        self.decay = torch.zeros_like(flat.values)
        self.decay[: flat.compressed] = DECAY

    def step(self, gradient: Tensor, rate: float, taken: int) -> None:
        """One step. The first `taken` elements of `gradient` are the new momentum, whose second moment stays."""
        self.steps += 1
        momentum = self.first.lerp(gradient, 1 - BETAS[0])
        momentum[:taken] = gradient[:taken]
        if self.way.optimizer == "sgd":
            self.first = self.first * BETAS[0] + gradient
            self.flat.values.sub_(rate * self.first)
            return
        self.first = momentum
        self.flat.values.mul_(1 - rate * self.decay)
        rest = slice(taken, None)
        self.second[rest] = self.second[rest] * BETAS[1] + (1 - BETAS[1]) * gradient[rest].square()
        if not taken:
            self.second_steps += 1
        if self.way.optimizer == "muon":
            self._orthogonal(rate)
            taken = self.flat.compressed  # the rest by AdamW
        first = self.first / (1 - BETAS[0] ** self.steps)
        corrected = torch.empty_like(self.second)
        corrected[: self.flat.compressed] = self.second[: self.flat.compressed] / (1 - BETAS[1] ** self.second_steps)
        corrected[self.flat.compressed :] = self.second[self.flat.compressed :] / (1 - BETAS[1] ** self.steps)
        update = rate * first / (corrected.sqrt() + EPS)
        if self.way.optimizer == "muon":
            update[: self.flat.compressed] = 0
        self.flat.values.sub_(update)

    def divisor(self) -> Tensor:
        """What AdamW divides the momentum of matrices by."""
        return (self.second[: self.flat.compressed] / (1 - BETAS[1] ** self.second_steps)).sqrt() + EPS

    def _orthogonal(self, rate: float) -> None:
        start = 0
        for p in self.flat.matrices:
            moment = self.first[start : start + p.numel()].view_as(p).reshape(len(p), -1)
            size = 0.2 * math.sqrt(max(moment.shape))
            p.data.sub_((rate * size * _newton_schulz(moment)).view_as(p))
            start += p.numel()


def _newton_schulz(matrix: Tensor) -> Tensor:
    """A matrix with the same singular vectors and singular values near 1."""
    x = matrix / (matrix.norm() + 1e-7)
    x = x.mT if x.shape[0] > x.shape[1] else x
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if matrix.shape[0] > matrix.shape[1] else x


def train(
    way: Way, config: GPTConfig, batch: int, steps: int, workers: int, device: str, report: Callable[[int], None]
) -> dict[str, Any]:
    """The losses on held-out text at each twentieth of the steps, and the last one."""
    flat = Flat(ByteGPT(config, seed=way.seed).to(device))
    text = stdlib_text()
    data = [batches(text, config.context, batch, seed=way.seed, rank=rank) for rank in range(workers)]
    windows = held_out_windows(config, 256).to(device)
    gradients = Gradients(flat, lambda model, x, y: loss_of(model(x), y), tuple(x.to(device) for x in next(data[0])))
    optimizer = Optimizer(way, flat)
    narrow = Reduction(nc.codec(way.codec), way.feedback) if way.codec else None
    wide = Reduction(nc.codec(way.warmup_codec), 0.0) if way.momentum else narrow
    curve = []
    for step in range(steps):
        sends_gradients = way.sends_gradients(step, steps)
        terms = torch.stack([_local(gradients(tuple(x.to(device) for x in next(d))).clone(), way) for d in data])
        if not sends_gradients:
            terms[:, : flat.compressed].lerp_(optimizer.first[: flat.compressed], BETAS[0])
            if way.scaled:
                terms[:, : flat.compressed] /= optimizer.divisor()
                if way.bound:
                    terms[:, : flat.compressed].clamp_(-way.bound, way.bound)
        average = terms.mean(0)
        reduction = wide if sends_gradients else narrow
        if reduction is not None:
            average[: flat.compressed] = reduction.average(terms[:, : flat.compressed])
        if way.scaled and not sends_gradients:
            average[: flat.compressed] *= optimizer.divisor()
        if way.clip == "after":
            average = _clipped(average)
        optimizer.step(average, way.rate * warm_cosine(step, steps), 0 if sends_gradients else flat.compressed)
        report(step + 1)
        if (step + 1) % max(1, steps // 20) == 0:
            curve.append([step + 1, _loss(flat.model, windows)])
            if not math.isfinite(curve[-1][1]):
                break
    return {"final": curve[-1][1], "curve": curve, "bits": way.bits(steps)}


def _local(gradient: Tensor, way: Way) -> Tensor:
    return _clipped(gradient) if way.clip == "before" else gradient


def _clipped(gradient: Tensor) -> Tensor:
    return gradient * (1 / (gradient.norm() + 1e-6)).clamp(max=1.0)


@torch.no_grad()
def _loss(model: nn.Module, windows: Tensor) -> float:
    losses = [loss_of(model(part[:, :-1]), part[:, 1:]) for part in windows.split(64)]
    return float(torch.stack(losses).mean())
