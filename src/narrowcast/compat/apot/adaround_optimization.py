"""Rounding learned for a whole model, layer by layer, as PyTorch's `AdaptiveRoundingOptimizer` is called.

    optimizer = AdaptiveRoundingOptimizer(model, callback, forward_hook_wrapper, data)
    rounded = optimizer.run_adaround()              # a copy; `model` stays as it is

`callback(model, batch, feed_forward_wrapper)` runs one batch of `data` through a model (one that takes two arguments is
called with two), and `forward_hook_wrapper(fetched)` gives a forward hook that appends a layer's input and output to a
list. Choices are learned by nn/rounding/learned.py, from all batches and in closed form of their second moments.

What differs from PyTorch's: all of Linear and Conv1d/2d/3d are rounded (there Linear and Conv1d); every batch counts
(there the first, over and over); the weights that come out lie on the grid (there they stay between two levels); no
output gets worse than by nearest rounding; nothing is printed, and the model stays on its device.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.ao.quantization.observer import MinMaxObserver

from narrowcast.compat.apot.adaround_fake_quantize import AdaroundFakeQuantizer
from narrowcast.compat.apot.adaround_loss import AdaptiveRoundingLoss
from narrowcast.errors import CalibrationError
from narrowcast.nn.rounding.learned import learn_levels
from narrowcast.nn.rounding.moments import InputMoments

CONVOLUTIONS: dict[type[nn.Module], Callable[..., Tensor]] = {
    nn.Conv1d: F.conv1d,
    nn.Conv2d: F.conv2d,
    nn.Conv3d: F.conv3d,
}


class AdaptiveRoundingOptimizer:
    """Rounds the weights of a copy of `model` so that each layer's output, on `data`, changes least."""

    def __init__(
        self,
        model: nn.Module,
        callback: Callable[..., None],
        forward_hook_wrapper: Callable[[list[Tensor]], Callable[..., Any]],
        data: Any,
        observer: Any = MinMaxObserver,
        max_iter: int = 10000,
        dtype: torch.dtype = torch.qint8,
        quant_min: int = -128,
        quant_max: int = 127,
        qscheme: torch.qscheme = torch.per_tensor_symmetric,
        batch_size: int = 256,
        feed_forward_wrapper: nn.Module | None = None,
    ) -> None:
        if not len(data):
            raise CalibrationError("data: it holds no batch, and choices are learned from what layers receive.")
        self.model, self.q_model = model, copy.deepcopy(model)
        self.callback, self.forward_hook_wrapper, self.data = callback, forward_hook_wrapper, data
        self.feed_forward_wrapper = feed_forward_wrapper
        self.batch_size, self.max_iter = min(batch_size, len(data)), max_iter
        self.dtype, self.observer, self.qscheme = dtype, observer, qscheme
        self.quant_min, self.quant_max = quant_min, quant_max
        self.adaptive_round_loss_fn = AdaptiveRoundingLoss(max_iter=max_iter, warm_start=0.2)

    def run_adaround(self) -> nn.Module:
        """The rounded copy. Layers come in the order of the model's modules, each after those before it are rounded."""
        pairs = list(zip(self.model.modules(), self.q_model.modules(), strict=True))
        for module in (module for pair in pairs for module in pair):
            if isinstance(module, nn.ReLU):
                module.inplace = False  # what a hook has seen must not change
        for module, q_module in pairs:
            if isinstance(module, (nn.Linear, *CONVOLUTIONS)):
                self.optimize_adaptive_rounding(module, q_module)
        return self.q_model.module if isinstance(self.q_model, nn.DataParallel) else self.q_model

    @torch.no_grad()
    def get_data_inp_out(
        self, module: nn.Module, q_module: nn.Module, data: Any
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """For each batch: the input of the rounded layer, and the output and input of the float one."""
        of_float: list[Tensor] = []
        of_rounded: list[Tensor] = []
        q_input, fp_out, fp_input = [], [], []
        hooks = [
            module.register_forward_hook(self.forward_hook_wrapper(of_float)),
            q_module.register_forward_hook(self.forward_hook_wrapper(of_rounded)),
        ]
        try:
            for batch in data:
                of_float.clear()
                of_rounded.clear()
                self._run(self.model, batch)
                self._run(self.q_model, batch)
                if of_float and of_rounded:  # else the batch does not reach this layer
                    q_input.append(of_rounded[0])
                    fp_input.append(of_float[0])
                    fp_out.append(of_float[1])
        finally:
            for hook in hooks:
                hook.remove()
        return q_input, fp_out, fp_input

    def _run(self, model: nn.Module, batch: Any) -> None:
        try:
            inspect.signature(self.callback).bind(model, batch, self.feed_forward_wrapper)
        except TypeError:
            self.callback(model, batch)
        else:
            self.callback(model, batch, self.feed_forward_wrapper)

    @torch.no_grad()
    def feed_forward(self, x: Tensor, weight: Tensor, module: nn.Module) -> Tensor:
        """What a layer gives with another weight."""
        layer: Any = module
        if isinstance(module, nn.Linear):
            return F.linear(x, weight, module.bias)
        convolve = next((function for kind, function in CONVOLUTIONS.items() if isinstance(module, kind)), None)
        if convolve is None:
            raise NotImplementedError(f"module: a {type(module).__name__} is none of Linear and Conv1d/2d/3d.")
        return convolve(x, weight, layer.bias, layer.stride, layer.padding, layer.dilation, layer.groups)

    def optimize_adaptive_rounding(
        self, module: nn.Module, q_module: nn.Module, activation: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        """Write learned levels into the weight of one layer of the copy. `activation` is not used, as in PyTorch's."""
        layer: Any = q_module
        quantizer = AdaroundFakeQuantizer(
            observer=self.observer,
            qscheme=self.qscheme,
            quant_min=self.quant_min,
            quant_max=self.quant_max,
            dtype=self.dtype,
            reduce_range=False,
        ).to(layer.weight.device)
        quantizer.enable_observer()
        quantizer(layer.weight)
        moments = InputMoments(q_module)
        for x in self.get_data_inp_out(module, q_module, self.data)[0]:
            moments.add(x)
        if not moments.count:
            return  # no batch reaches this layer
        scale, zero_point = quantizer.calculate_qparams()
        codes = torch.arange(self.quant_min, self.quant_max + 1, dtype=torch.int64, device=layer.weight.device)
        levels = (codes - zero_point.flatten()[0]).float()
        weight = layer.weight.detach()
        learned = learn_levels(weight, scale.flatten().expand(len(weight)), levels, moments.mean(), self.max_iter)
        weight.copy_(learned.weight)
        layer.weight_fake_quant = quantizer.activation_post_process  # where torch.ao's eager mode looks for it
