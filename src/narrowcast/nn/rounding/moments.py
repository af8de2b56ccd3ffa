"""What a rounding knows of a layer's inputs: the sum of x x^T.

The squared error of a layer's output, over the inputs it has seen, is the sum over outputs of d H d^T, where d is the
error of one output's weights and H the sum of x x^T over the inputs (over windows, for a convolution). So H is all that
a rounding needs of the data.

The inputs x' that a layer gets in a rounded model are not those that it had: the layers before it were rounded. Where
it is known what the layer's output y should be, the sum of y x'^T says which weights give it (`wanted`).

A weight whose outputs read different inputs has several H: one for each group of a convolution, for queries, keys and
values of an attention, for each expert of a mixture. Its outputs, in order, are cut into as many equal parts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Inputs(NamedTuple):
    """The mean moments of the inputs of one group of outputs: [k, k]."""

    moments: Tensor
    wanted: Tensor | None = None
    """The mean of y x'^T, [outputs, k]; None where the outputs that are wanted are those of the weight itself."""
    squares: Tensor | None = None
    """The mean of y^2, [outputs]."""

    def of_outputs(self, part: slice) -> Inputs:
        """The same for some of the outputs."""
        if self.wanted is None or self.squares is None:
            return self
        return Inputs(self.moments, self.wanted[part], self.squares[part])

    def errors(self, weight: Tensor, rounded: Tensor) -> Tensor:
        """The mean squared errors of outputs, [outputs], if `rounded` stands for `weight` [outputs, k]."""
        if self.wanted is None or self.squares is None:
            difference = weight - rounded
            error: Tensor = ((difference @ self.moments) * difference).sum(-1)
            return error.clamp(min=0.0)
        # Sums that nearly cancel: in fp64.
        other = rounded.double()
        error = ((other @ self.moments.double() - 2 * self.wanted.double()) * other).sum(-1)
        return (error + self.squares.double()).clamp(min=0.0).float()

    def energy(self, weight: Tensor) -> Tensor:
        """The mean squared outputs of `weight`."""
        return ((weight @ self.moments) * weight).sum(-1) if self.squares is None else self.squares


class InputMoments:
    """The sums of x x^T over the inputs of one weight: fp64 [groups, k, k]."""

    def __init__(self, layer: nn.Module, groups: int | None = None) -> None:
        self.layer = layer
        self.groups = int(getattr(layer, "groups", 1)) if groups is None else groups
        self.total: Tensor | None = None
        self.wanted: Tensor | None = None
        """The sums of y x'^T, y being the outputs that are wanted; None where they are not known."""
        self.squares: Tensor | None = None
        """The sums of y^2."""
        self.counts = [0] * self.groups
        self.keep: Tensor | None = None
        """Which tokens [batch, length] of the batch that runs are no padding; None for all of them."""

    @property
    def count(self) -> int:
        """How many inputs were counted, in the group that has most."""
        return max(self.counts)

    def add(self, x: Tensor) -> None:
        """Count the inputs of one batch of a Linear or a convolution."""
        grouped = self._grouped(self._kept(x))
        moments = (grouped.transpose(1, 2) @ grouped).double()
        self.total = moments if self.total is None else self.total.add_(moments)
        self.counts = [count + grouped.shape[1] for count in self.counts]

    def add_wanted(self, x: Tensor, y: Tensor) -> None:
        """Count the outputs that are wanted, bias included, of inputs that were counted."""
        layer: Any = self.layer
        outputs = self._kept(y).detach().float()
        outputs = outputs.movedim(-1 - len(layer.kernel_size), -1) if self._convolves() else outputs
        outputs = outputs if layer.bias is None else outputs - layer.bias.detach().float()
        outputs = outputs.reshape(-1, self.groups, outputs.shape[-1] // self.groups).transpose(0, 1)
        wanted = (outputs.transpose(1, 2) @ self._grouped(self._kept(x))).double()
        squares = outputs.square().sum(1).double()
        self.wanted = wanted if self.wanted is None else self.wanted.add_(wanted)
        self.squares = squares if self.squares is None else self.squares.add_(squares)

    def _convolves(self) -> bool:
        return hasattr(self.layer, "kernel_size")

    def add_to_group(self, group: int, x: Tensor) -> None:
        """Count inputs [..., k] of the outputs of one group."""
        vectors = self._kept(x).detach().float().reshape(-1, x.shape[-1])
        if self.total is None:
            size = self.groups, x.shape[-1], x.shape[-1]
            self.total = torch.zeros(size, dtype=torch.float64, device=x.device)
        self.total[group] += (vectors.t() @ vectors).double()
        self.counts[group] += len(vectors)

    def _kept(self, x: Tensor) -> Tensor:
        """The inputs of tokens that are no padding; all where an input is no sequence [batch, length, k]."""
        if self.keep is None or x.dim() != 3 or x.shape[:2] != self.keep.shape or self._convolves():
            return x
        return x[self.keep.to(x.device)]

    def mean(self) -> Tensor:
        """H over the number of inputs, in fp32; zeros for a group without inputs."""
        assert self.total is not None
        return self._mean(self.total)

    def inputs(self, device: torch.device) -> list[Inputs]:
        """The mean moments of each group, on a device."""
        mean = self.mean().to(device)
        if self.wanted is None or self.squares is None:
            return [Inputs(group) for group in mean]
        others = self._mean(self.wanted).to(device), self._mean(self.squares).to(device)
        return [Inputs(*group) for group in zip(mean, *others, strict=True)]

    def _mean(self, total: Tensor) -> Tensor:
        counts = torch.tensor(self.counts, dtype=torch.float64, device=total.device).clamp(min=1.0)
        return (total / counts.view(-1, *(1,) * (total.dim() - 1))).float()

    def _grouped(self, x: Tensor) -> Tensor:
        windows = self._windows(x.detach().float())
        return windows.view(len(windows), self.groups, windows.shape[1] // self.groups).transpose(0, 1)

    def finite(self) -> bool:
        return self.total is None or bool(self.total.isfinite().all())

    def _windows(self, x: Tensor) -> Tensor:
        """What each output position multiplies: [batch * positions, channels * kernel]."""
        layer: Any = self.layer
        if not self._convolves():
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
        return x.reshape(x.shape[: 1 + spatial].numel(), x.shape[1 + spatial :].numel())
