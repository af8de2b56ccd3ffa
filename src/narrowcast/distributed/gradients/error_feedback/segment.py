"""Error feedback: what a quantization loses is kept, and added to what is sent next.

Each of a reduction's two quantizations has its own residual, in fp32: residual = meant - sent. The sender's is as large
as the gradients; the owner's, of the sums, is 1/ranks of that. *sent + residual == meant* holds exactly where fp32
holds the difference, as it does for the integer codecs.

The sender means gradient + residual. This sum is put into the memory of the next residual, not over the last one. So a
step changes nothing by itself: its residuals count from the next step on, if the step is applied (outcome.py). A step
that is skipped, or fails, leaves the residuals as they were, to the bit. That takes the memory of the residuals twice.

residuals.py keeps residuals from step to step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from narrowcast.distributed.encoder import Encoder
from narrowcast.distributed.gradients.stats import Probe
from narrowcast.distributed.protocols.pipeline import Segment


class FeedbackSegment(Segment):
    """A segment whose quantizations may leave residuals, and may be probed.

    With `keeps`, the parts are a sender's residuals to which gradients have been added; they turn into the residuals
    that are left. `owner` is the residual of this rank's own part; the next one goes to `owner_next`.
    """

    def __init__(
        self,
        encoder: Encoder,
        parts: Sequence[Tensor],
        sums: Sequence[Tensor],
        key: int,
        *,
        keeps: bool,
        owner: Tensor | None = None,
        owner_next: Tensor | None = None,
        probe: Probe | None = None,
    ) -> None:
        super().__init__(encoder, parts, sums, key)
        self._keeps = keeps
        self._owner = owner
        self._owner_next = owner_next
        self._probe = probe
        self._encoded: list[tuple[int, Tensor]] = []

    def encode(self, rank: int, peer: int, out: Tensor) -> None:
        super().encode(rank, peer, out)
        self._encoded.append((peer, out))

    def sent(self) -> None:
        encoded, self._encoded = self._encoded, []
        if not self._keeps and self._probe is None:
            return
        for peer, data in encoded:
            meant = self.parts[peer]
            if meant.numel():
                sent = self._fp32("sent", meant.numel())
                self.encoder.decode(data, sent[None])
                if self._probe is not None:
                    self._probe.add("sender", meant, sent)
                if self._keeps:
                    leave_residual(meant, sent)

    def decode_sum_encode(self, inbox: Tensor, rank: int, divisor: int, out: Tensor) -> None:
        if self._owner is None and self._probe is None:
            super().decode_sum_encode(inbox, rank, divisor, out)
        else:
            self._sum_with_residual(inbox, rank, divisor, out)
        self._clear_own(rank)

    def decode_sum(self, inbox: Tensor, rank: int, divisor: int) -> None:
        super().decode_sum(inbox, rank, divisor)
        self._clear_own(rank)

    def _sum_with_residual(self, inbox: Tensor, rank: int, divisor: int, out: Tensor) -> None:
        own, total = self.parts[rank], self.sums[rank]
        meant = self._fp32("sum", own.numel())
        self.encoder.decode_sum(inbox, own, rank, divisor, meant)
        if self._owner is not None:
            meant.add_(self._owner)
        self.encoder.encode(meant[None], out, rank, len(self.parts), *self.key)
        self.decode(rank, out)
        sent = total
        if total.dtype != torch.float32:
            sent = self._fp32("sent", own.numel())
            self.encoder.decode(out, sent[None])
        if self._probe is not None:
            self._probe.add("owner", meant, sent)
        if self._owner_next is not None:
            leave_residual(self._owner_next.copy_(meant), sent)

    def _clear_own(self, rank: int) -> None:
        if self._keeps:
            self.parts[rank].zero_()  # the owner's own part is not quantized: its residual is zero

    def _fp32(self, name: str, numel: int) -> Tensor:
        return self.encoder.take(name, 4 * numel).view(torch.float32)


def leave_residual(meant: Tensor, sent: Tensor) -> None:
    """Turn `meant` into the residual. If it is not finite, neither is a result, and the residual never counts."""
    meant.sub_(sent)
