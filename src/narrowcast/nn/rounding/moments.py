"""What a rounding knows of a layer's inputs: the sum of x x^T.

The squared error of a layer's output, over the inputs it has seen, is the sum over outputs of d H d^T, where d is the
error of one output's weights and H the sum of x x^T over the inputs (over windows, for a convolution). So H is all that
a rounding needs of the data.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn


class InputMoments:
    """The sum of x x^T over the inputs of one Linear or convolution: fp64 [groups, k, k]."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer
        self.groups = int(getattr(layer, "groups", 1))
        self.total: Tensor | None = None
        self.count = 0

    def add(self, x: Tensor) -> None:
        """Count the inputs of one batch."""
        windows = self._windows(x.detach().float())
        grouped = windows.view(len(windows), self.groups, -1).transpose(0, 1)
        moments = (grouped.transpose(1, 2) @ grouped).double()
        self.total = moments if self.total is None else self.total + moments
        self.count += len(windows)

    def mean(self) -> Tensor:
        """H over the number of inputs, in fp32."""
        assert self.total is not None
        return (self.total / self.count).float()

    def _windows(self, x: Tensor) -> Tensor:
        """What each output position multiplies: [batch * positions, channels * kernel]."""
        layer: Any = self.layer
        if isinstance(layer, nn.Linear):
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
