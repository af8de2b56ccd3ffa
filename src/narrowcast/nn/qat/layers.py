"""Layers that train with quantized weights, and quantized inputs where asked for.

A trained layer is torch's own layer, by a change of its class, with one or two `FakeQuantize` beside its weight:
`weight_quantizer`, and `input_quantizer` or None. The optimizer updates the float weight, under its own name. Each
forward pass quantizes the weight, and the input where asked for, and then computes what torch's layer does. An
embedding quantizes only the vectors that it looks up.

Nothing else about a layer changes: names, hooks, biases and references to it stay valid.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from narrowcast.nn.qat.fake_quantize import FakeQuantize


class Trained(nn.Module):
    """A layer of torch.nn whose weight is quantized in every forward pass."""

    weight: Tensor
    weight_quantizer: FakeQuantize
    input_quantizer: FakeQuantize | None
    _plain_class: type[nn.Module]

    def quantized_weight(self) -> Tensor:
        """The weight at the levels of its grid; differentiable in the weight and the clip."""
        quantized: Tensor = self.weight_quantizer(self.weight)
        return quantized

    def quantized_input(self, x: Tensor) -> Tensor:
        """The input at the levels of its grid, or as it is where inputs are not quantized."""
        return x if self.input_quantizer is None else self.input_quantizer(x)

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        """Also a float weight without clips (strict=False): clips that were chosen from the old weight start anew."""
        super()._load_from_state_dict(state_dict, prefix, *rest)
        quantizer = self.weight_quantizer
        without_clips = prefix + "weight" in state_dict and f"{prefix}weight_quantizer.alpha" not in state_dict
        if without_clips and not quantizer.given and self.weight.device.type != "meta":
            quantizer.start_from(self.weight)


class QatLinear(Trained, nn.Linear):
    """torch.nn.Linear on a fake-quantized weight."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(self.quantized_input(input), self.quantized_weight(), self.bias)


class QatConvolution(Trained):
    """What convolutions on fake-quantized weights share."""

    bias: Tensor | None
    _conv_forward: Callable[[Tensor, Tensor, Tensor | None], Tensor]

    def forward(self, input: Tensor) -> Tensor:
        return self._conv_forward(self.quantized_input(input), self.quantized_weight(), self.bias)


class QatConv1d(QatConvolution, nn.Conv1d):
    """torch.nn.Conv1d on a fake-quantized weight."""


class QatConv2d(QatConvolution, nn.Conv2d):
    """torch.nn.Conv2d on a fake-quantized weight."""


class QatConv3d(QatConvolution, nn.Conv3d):
    """torch.nn.Conv3d on a fake-quantized weight."""


class QatEmbedding(Trained, nn.Embedding):
    """torch.nn.Embedding on fake-quantized vectors: those that are looked up."""

    def forward(self, input: Tensor) -> Tensor:
        quantizer = self.weight_quantizer
        if not quantizer.is_started:
            quantizer(self.weight)
        index = input.reshape(-1)
        options: dict[str, Any] = {"scale_grad_by_freq": self.scale_grad_by_freq, "sparse": self.sparse}
        vectors = F.embedding(index, self.weight, self.padding_idx, None, 2.0, **options)
        return quantizer.lookup(vectors, index, self.weight.numel()).view(*input.shape, self.embedding_dim)


TRAINED: dict[type[nn.Module], type[Trained]] = {
    nn.Linear: QatLinear,
    nn.Conv1d: QatConv1d,
    nn.Conv2d: QatConv2d,
    nn.Conv3d: QatConv3d,
    nn.Embedding: QatEmbedding,
}


def train(module: nn.Module, target: type[Trained], weight: FakeQuantize, input: FakeQuantize | None) -> None:
    """Make a float layer a trained one, in place."""
    vars(module)["_plain_class"] = type(module)
    module.__class__ = target
    module.add_module("weight_quantizer", weight)
    module.add_module("input_quantizer", input)


def untrain(module: Trained) -> None:
    """Make a trained layer a float one again; the weight is the float weight."""
    for name in ("weight_quantizer", "input_quantizer"):
        delattr(module, name)
    module.__class__ = vars(module).pop("_plain_class")
