"""Training with several workers simulated in one process: which way to send gradients ends with the lowest loss.

In each step every worker has a gradient of its own batch (simulated_gradients.py); those of matrices are reduced as
narrowcast reduces them (two stages: every worker encodes a row for each owner, keeps what that loses, and the owner
encodes the average and keeps what that loses), those of vectors without loss; then all step (simulated_optimizers.py).
So loss depends on codec, feedback and optimizer as in a real run, and on no network. What is not simulated: buckets,
and so which elements share a block at the edges of parameters.

A `Way` names one such run; `Simulation.train(way)` is its loss on text that is never trained on. On a GPU a step is two
CUDA graphs: the gradients, the same for all runs of a process, and the rest. Batches, learning rates and corrections
of all steps lie there from the start; a counter on the GPU says which are due.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import narrowcast as nc
from narrowcast.byte_gpt import ByteGPT, GPTConfig, batches, loss_of, stdlib_text
from simulated_gradients import AllAtOnce, Flat
from simulated_optimizers import BETAS, Now, Optimizer, corrections
from simulated_powersgd import PowerSGD
from training_ranks import held_out_windows, warm_cosine


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
    """The momentum travels divided by the root of the second moment, as the library sends it."""
    bound: float = 0.0
    """How far a scaled momentum may go; 0: any."""
    residual_codec: str = ""
    """What residuals are held in; nothing: fp32."""
    seed: int = 0

    @property
    def momentum(self) -> bool:
        return self.warmup > 0 and not self.powersgd

    @property
    def powersgd(self) -> int:
        """The rank of "powersgd4"; 0 for codecs."""
        return int(self.codec.removeprefix("powersgd")) if self.codec.startswith("powersgd") else 0

    def travels(self, step: int, steps: int) -> str:
        """What travels in a step: the gradient in the codec, the momentum in the codec, or a gradient as in the
        warm-up."""
        since = step - round(self.warmup * steps) + 1
        if since <= 0:
            return "warm-up"
        if not self.momentum:
            return "gradient"
        if self.refresh < 0:
            whole, rest = divmod(since, 16)
            refreshed = rest == 0 and whole & (whole + 1) == 0
        else:
            refreshed = bool(self.refresh) and since % self.refresh == 0
        return "warm-up" if refreshed else "momentum"


class Reduction:
    """The average of all workers' vectors in a codec, with the residuals of all of them."""

    def __init__(self, codec: str, feedback: float, terms: Tensor, residual_codec: str = "") -> None:
        """For terms [workers, n], with n a multiple of 128 workers."""
        workers, numel = terms.shape
        self._codec, self.feedback, self._part = nc.codec(codec), feedback, numel // workers
        self._held_in = nc.codec(residual_codec) if residual_codec else None
        self.sender = torch.zeros_like(terms) if feedback else None
        self.owner = terms.new_zeros(workers, self._part) if feedback else None
        self.bits = self._codec.bits_per_element()

    def reset(self) -> None:
        for residuals in (self.sender, self.owner):
            if residuals is not None:
                residuals.zero_()

    def average(self, terms: Tensor) -> Tensor:
        """[workers, n] -> [n], as all workers end with it. With feedback, `terms` become what was meant."""
        workers, part = len(terms), self._part
        if self.sender is not None:
            terms.add_(self.sender, alpha=self.feedback)
        meant = terms.view(workers * workers, part)
        rows = self._codec.encode(meant)
        sums = terms.new_empty(workers, part)
        for owner in range(workers):  # its own part is not quantized
            theirs, own = rows[owner::workers], terms.view(workers, workers, part)[owner, owner]
            self._codec.decode_sum(theirs, part, own=own, own_rank=owner, divisor=workers, out=sums[owner])
        if self.owner is not None:
            sums.add_(self.owner, alpha=self.feedback)
        result: Tensor = self._codec.decode(self._codec.encode(sums), part)
        if self.sender is not None and self.owner is not None:
            sent = self.sender.view_as(meant)
            self._codec.decode(rows, part, out=sent)
            torch.sub(meant, sent, out=sent)
            sent[:: workers + 1] = 0
            torch.sub(sums, result, out=self.owner)
            if self._held_in is not None:
                for residuals in (sent, self.owner):
                    self._held_in.decode(self._held_in.encode(residuals), part, out=residuals)
        return result.view(-1)


class Run:
    """One way at work: what is done with the gradients of a step."""

    def __init__(self, way: Way, flat: Flat, steps: int) -> None:
        self.way, self.flat, self.optimizer = way, flat, Optimizer(way.optimizer, flat)
        self._narrow, self._wide = _reductions(way, flat)
        self._average = torch.zeros_like(flat.values)
        self.travels = [way.travels(step, steps) for step in range(steps)]
        rates = [way.rate * warm_cosine(step, steps) for step in range(steps)]
        updates = [what != "momentum" for what in self.travels]
        self._table = corrections(rates, updates).to(flat.values.device)

    @property
    def bits(self) -> float:
        """Bits an element, on average over all steps."""
        wide, narrow = (each.bits if each else 32.0 for each in (self._wide, self._narrow))
        return sum(wide if what == "warm-up" else narrow for what in self.travels) / len(self.travels)

    def reset(self) -> None:
        """Begin anew, but for the parameters."""
        for state in (self.optimizer.first, self.optimizer.second):
            state.zero_()
        for reduction in (self._narrow, self._wide):
            if reduction is not None:
                reduction.reset()

    @torch.no_grad()
    def step(self, counter: Tensor, travels: str) -> None:
        """Reduce the gradients of all workers, and step with the average."""
        flat, way, average = self.flat, self.way, self._average
        now = Now(*self._table.index_select(0, counter).unbind(1))
        matrices = slice(0, flat.compressed)
        if way.clip == "before":
            self._clip_each()
        divisor, takes_momentum = None, travels == "momentum"
        if takes_momentum:
            flat.of_matrices.lerp_(self.optimizer.first[matrices], BETAS[0])
            if way.scaled:
                divisor = self.optimizer.divisor(matrices, now.second)
                flat.of_matrices.div_(divisor)
                if way.bound:
                    flat.of_matrices.clamp_(-way.bound, way.bound)
        reduction = self._wide if travels == "warm-up" else self._narrow
        average[matrices] = flat.of_matrices.mean(0) if reduction is None else reduction.average(flat.of_matrices)
        average[flat.numel : flat.compressed] = 0
        average[flat.compressed :] = flat.of_vectors.mean(0)
        if divisor is not None:
            average[matrices].mul_(divisor)
        if way.clip == "after":
            average.mul_((1 / (average.norm() + 1e-6)).clamp(max=1.0))
        self.optimizer.step(average, now, takes_momentum=takes_momentum)

    def _clip_each(self) -> None:
        both = self.flat.of_matrices, self.flat.of_vectors
        norms = torch.stack([each.norm(dim=1) for each in both]).norm(dim=0)
        for each in both:
            each.mul_((1 / (norms + 1e-6)).clamp(max=1.0)[:, None])


def _reductions(way: Way, flat: Flat) -> tuple[Reduction | PowerSGD | None, Reduction | None]:
    """How gradients or momentums are reduced, and gradients in the warm-up; None: without loss."""
    if way.powersgd:
        return PowerSGD(way.powersgd, flat), None
    terms = flat.of_matrices
    narrow = Reduction(way.codec, way.feedback, terms, way.residual_codec) if way.codec else None
    return narrow, Reduction(way.warmup_codec, 0.0, terms) if way.momentum else narrow


class Simulation:
    """A model, its data and the graph of its gradients, for one run after another."""

    def __init__(self, config: GPTConfig, batch: int, steps: int, workers: int, device: str) -> None:
        self.config, self.batch, self.steps, self.workers = config, batch, steps, workers
        self.flat = Flat(ByteGPT(config).to(device), workers)
        self.windows = held_out_windows(config, 256).to(device)
        self._data = torch.zeros(steps, workers * batch, config.context + 1, dtype=torch.int64, device=device)
        self._counter = torch.zeros(1, dtype=torch.int64, device=device)
        fill = AllAtOnce(self.flat, lambda model, x, y: loss_of(model(x), y))

        def gradients() -> None:
            windows = self._data.index_select(0, self._counter)[0]
            fill(windows[:, :-1], windows[:, 1:])

        self._gradients = as_graph(gradients, self.flat.values.is_cuda)
        self._start = functools.cache(self._start_of)

    def train(self, way: Way, report: Callable[[int], None] = lambda step: None) -> dict[str, Any]:
        """The losses on held-out text at each tenth of the steps (of a quarter of it before the last)."""
        run = Run(way, self.flat, self.steps)
        self._counter.zero_()
        steps = {
            what: as_graph(functools.partial(run.step, self._counter, what), self.flat.values.is_cuda)
            for what in set(run.travels)
        }
        run.reset()  # capturing has stepped
        values, data = self._start(way.seed)
        self.flat.values.copy_(values)
        self._data.copy_(data)
        self._counter.zero_()
        every, curve = max(1, self.steps // 10), []
        for step, what in enumerate(run.travels, 1):
            self._gradients()
            steps[what]()
            self._counter.add_(1)
            report(step)
            if step == self.steps or step % every == 0:
                curve.append([step, self._loss(self.windows if step == self.steps else self.windows[::4])])
                if not math.isfinite(curve[-1][1]):
                    break
        return {"final": curve[-1][1], "curve": curve, "bits": run.bits}

    def _start_of(self, seed: int) -> tuple[Tensor, Tensor]:
        """The parameters that a seed begins with, and all of its batches."""
        flat = Flat(ByteGPT(self.config, seed=seed), self.workers)
        text, size = _text(), (self.config.context, self.batch)
        ranks = [batches(text, *size, seed=seed, rank=rank) for rank in range(self.workers)]
        drawn = []
        for _ in range(self.steps):
            pairs = [next(rank) for rank in ranks]
            drawn.append(torch.cat([torch.cat([x, y[:, -1:]], 1) for x, y in pairs]))
        return flat.values.to(self._data.device), torch.stack(drawn).to(self._data.device)

    @torch.no_grad()
    def _loss(self, windows: Tensor) -> float:
        losses = [loss_of(self.flat.model(part[:, :-1]), part[:, 1:]) for part in windows.split(64)]
        return float(torch.stack(losses).mean())


_text = functools.cache(stdlib_text)


def as_graph(work: Callable[[], None], on_gpu: bool) -> Callable[[], None]:
    """On a GPU, a CUDA graph that does the work; it is done once or twice on the way. Else the work itself."""
    if not on_gpu:
        return work
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()  # compiles kernels, which cannot be captured
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay
