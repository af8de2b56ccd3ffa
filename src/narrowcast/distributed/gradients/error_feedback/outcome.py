"""What becomes of a step: whether its gradients are applied, which residuals wait for.

An optimizer's step is skipped as a whole when a gradient is not finite: by `GradScaler`, for one. What such a step has
sent does not count, so neither do the residuals that it leaves: those from before it stay. A step that fails, or whose
backward breaks off, is not applied either.

Under DDP all ranks hold the same results, and each comes to the same verdict by itself. Under FSDP2 a rank sees its own
shards, so ranks tell each other (`exchange_verdicts`): sixteen bytes, once in a backward.

A number that is not finite is noted as NaN, all others as zero (x - x), so that verdicts are added up, wherever they
are. On CUDA they come to the host by themselves, and are waited for when the next step begins: no step waits for one.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from narrowcast.codecs import codec as as_codec
from narrowcast.distributed.collective import Collective, Operands
from narrowcast.distributed.protocols import one_way
from narrowcast.distributed.transport.agreement import Call
from narrowcast.distributed.transport.group import Group


class Outcome:
    """The verdict on one step, as far as it is known."""

    def __init__(self, pending: Callable[[], bool] = lambda: False) -> None:
        self.pending = pending
        """Whether an optimizer is still to use what all buckets ended with, as far as anyone can tell."""
        self.left_out = False
        """Whether the next step began and no optimizer had."""
        self.complete = False
        """Whether all of its buckets have been reduced."""
        self.error: BaseException | None = None
        """Why one of them could not be."""
        self.raised_by_backward = False
        """Whether backward() raises it, once DDP has all buckets (`raise_at_the_end`)."""
        self._verdicts: list[Tensor] = []
        """Zero or NaN, where the gradients are."""
        self._arriving: list[tuple[Tensor, torch.cuda.Event]] = []
        """The same on the host, once the event is over."""
        self._finite = True

    def note(self, results: Tensor) -> None:
        """Look at what all ranks, or this one, ended with. On a stream, it is the current one."""
        if not results.numel():
            return
        if not results.is_cuda and math.isfinite(float(results.sum(dtype=torch.float32))):
            return  # so are all terms; a sum that is not may have overflowed, and does not tell
        ends = torch.stack(torch.aminmax(results)).float()
        self.add((ends - ends).sum())

    def add(self, verdict: Tensor) -> None:
        """Take a verdict into account: zero or NaN."""
        self._verdicts.append(verdict)
        if verdict.is_cuda:
            host = torch.empty((), dtype=verdict.dtype, device="cpu", pin_memory=True)
            host.copy_(verdict, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self._arriving.append((host, event))
        else:
            self._finite = self._finite and not math.isnan(float(verdict))

    def verdict(self, device: torch.device) -> Tensor:
        """All so far in one, where the gradients are."""
        if not self._verdicts:
            return torch.zeros((), dtype=torch.float32, device=device)
        self._verdicts = [torch.stack(self._verdicts).sum()]
        return self._verdicts[0]

    @property
    def applies(self) -> bool:
        """Whether an optimizer may apply the gradients: all of them are there, and finite; and it was not left out."""
        arriving, self._arriving = self._arriving, []
        for host, event in arriving:
            event.synchronize()
            self._finite = self._finite and not math.isnan(float(host))
        return self._finite and self.complete and not self.left_out and self.error is None


def raise_at_the_end(outcome: Outcome) -> None:
    """Let backward() raise what a step failed with, as what it is: DDP makes a RuntimeError of what its futures raise.

    The engine calls back in order. DDP has its callback queued after this one, and waits there for all buckets: what
    this one queues comes after that.
    """

    def after_ddp() -> None:
        if outcome.error is not None:
            raise outcome.error

    engine: Any = torch.autograd.Variable._execution_engine
    with contextlib.suppress(RuntimeError):  # there is no backward, but a hook that is called by hand
        engine.queue_callback(lambda: engine.queue_callback(after_ddp))
        outcome.raised_by_backward = True


def exchange_verdicts(outcome: Outcome, group: Group, step: int) -> None:
    """Add the verdicts of all ranks of a group to that of this rank."""
    mine = outcome.verdict(group.device)
    call = Call("gradients, finite or not", as_codec("raw"), f"step={step}")

    def protocol(collective: Collective) -> None:
        rows = mine.expand(collective.size, 1, 4).contiguous()  # four floats are a whole row of 16 bytes
        one_way.all_gather(collective, rows.unbind(), rows[collective.rank])
        outcome.add(rows.sum())

    Collective(group, call, protocol, name="gradients").launch(Operands(mine), async_op=False)
