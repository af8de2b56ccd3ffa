"""What a rounding knows of a layer's inputs: the sum of x x^T.

The squared error of a layer's output, over the inputs it has seen, is the sum over outputs of d H d^T, where d is the
error of one output's weights and H the sum of x x^T over the inputs (over windows, for a convolution). So H is all that
a rounding needs of the data.

A weight whose outputs read different inputs has several H: one for each group of a convolution, for queries, keys and
values of an attention, for each expert of a mixture. Its outputs, in order, are cut into as many equal parts.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class InputMoments:
    """The sums of x x^T over the inputs of one weight: fp64 [groups, k, k]."""

    def __init__(self, layer: nn.Module, groups: int | None = None) -> None:
        self.layer = layer
        self.groups = int(getattr(layer, "groups", 1)) if groups is None else groups
        self.total: Tensor | None = None
        self.counts = [0] * self.groups

    @property
    def count(self) -> int:
        """How many inputs were counted, in the group that has most."""
        return max(self.counts)

    def add(self, x: Tensor) -> None:
        """Count the inputs of one batch of a Linear or a convolution."""
        windows = self._windows(x.detach().float())
        grouped = windows.view(len(windows), self.groups, -1).transpose(0, 1)
        moments = (grouped.transpose(1, 2) @ grouped).double()
        self.total = moments if self.total is None else self.total.add_(moments)
        self.counts = [count + len(windows) for count in self.counts]

    def add_to_group(self, group: int, x: Tensor) -> None:
        """Count inputs [..., k] of the outputs of one group."""
        vectors = x.detach().float().reshape(-1, x.shape[-1])
        if self.total is None:
            size = self.groups, x.shape[-1], x.shape[-1]
            self.total = torch.zeros(size, dtype=torch.float64, device=x.device)
        self.total[group] += (vectors.t() @ vectors).double()
        self.counts[group] += len(vectors)

    def mean(self) -> Tensor:
        """H over the number of inputs, in fp32; zeros for a group without inputs."""
        assert self.total is not None
        counts = torch.tensor(self.counts, dtype=torch.float64, device=self.total.device).clamp(min=1.0)
        return (self.total / counts.view(-1, 1, 1)).float()

    def finite(self) -> bool:
        return self.total is None or bool(self.total.isfinite().all())

    def _windows(self, x: Tensor) -> Tensor:
        """What each output position multiplies: [batch * positions, channels * kernel]."""
        layer: Any = self.layer
        if not hasattr(layer, "kernel_size"):
            return x.reshape(-1, x.shape[-1])
        spatial = len(layer.kernel_size)
        x = x if x.dim() == spatial + 2 else x.unsqueeze(0)
        mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
        x = F.pad(x, layer._reversed_padding_repeated_twice, mode=mode)
        for place in range(spatial):
            size, step, apart = (int(option[place]) for option in (layer.kernel_size, layer.stride, layer.dilation))
            x = x.unfold(2 + place, apart * (size - 1) + 1, step)[..., ::apart]
        # [batch, channels, *positions, *kernel] -> [batch * positions, channels * kernel]
        x = x.movedim(1, 1 + spatial)
        return x.reshape(x.shape[: 1 + spatial].numel(), -1)
