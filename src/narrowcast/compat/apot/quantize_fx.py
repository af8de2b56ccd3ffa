"""torch.ao's `convert_fx` for models that were prepared with APoT qconfigs.

torch's own convert_fx knows scales and zero points only, and fails on a grid that has neither. This one converts what
is on such a grid first, and leaves the rest to torch's:

- A Linear with APoT weights becomes a `LinearAPoT`, which multiplies by levels. Convolutions, transposed ones too, and
  embeddings keep a float weight, at its levels. Batch norms are folded in as torch folds them.
- The quantizers of such layers' inputs and outputs, uniform ones too, stay in the graph with the clips they have.
- A module that several calls share stays shared.

`prepare_fx` and `prepare_qat_fx` are torch's own.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.ao.quantization import quantize_fx
from torch.ao.quantization.fake_quantize import FakeQuantizeBase
from torch.ao.quantization.quantize_fx import prepare_fx, prepare_qat_fx
from torch.fx import GraphModule, Node

from narrowcast.compat.apot.fake_quantize import APoTFakeQuantize
from narrowcast.compat.apot.fake_quantize_function import fake_quantize_function
from narrowcast.compat.apot.layer import LinearAPoT
from narrowcast.errors import ModelKindError

__all__ = ["convert_fx", "prepare_fx", "prepare_qat_fx"]

ATTRIBUTES = "_observed_graph_module_attrs"
"""Where torch keeps what it knows of a prepared model."""
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
WEIGHTED = (nn.Linear, *CONVOLUTIONS, nn.Embedding, nn.EmbeddingBag)
RECURRENT = (nn.RNNBase, nn.RNNCellBase)


class FrozenQuantizer(nn.Module):
    """What is left of a fake quantizer in a converted graph: its parameters, and no observer."""

    def __init__(self, quantizer: Any) -> None:
        super().__init__()
        self.additive = isinstance(quantizer, APoTFakeQuantize)
        self.enabled = bool(quantizer.fake_quant_enabled[0])
        if self.additive:
            qparams = quantizer.calculate_qparams() if quantizer.qparams is None else quantizer.qparams
            self.axis, self.codes = None, (0, 0)
        else:
            qparams = quantizer.scale, quantizer.zero_point
            self.axis = quantizer.ch_axis if quantizer.is_per_channel else None
            self.codes = quantizer.activation_post_process.quant_min, quantizer.activation_post_process.quant_max
        for place, value in enumerate(qparams):
            self.register_buffer(f"qparam{place}", value.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        if not self.enabled:
            return x
        if self.additive:
            return fake_quantize_function.apply(x, *self.buffers())  # type: ignore[no-any-return,no-untyped-call]
        (scale, zero_point), (lowest, highest) = self.buffers(), self.codes
        if self.axis is None:
            return torch.fake_quantize_per_tensor_affine(x, scale, zero_point, lowest, highest)
        return torch.fake_quantize_per_channel_affine(x, scale, zero_point, self.axis, lowest, highest)


@torch.no_grad()
def convert_fx(graph_module: GraphModule, *args: Any, **kwargs: Any) -> GraphModule:
    """The prepared model with fixed weights and quantizers, as torch's convert_fx returns it; takes its arguments."""
    if not isinstance(graph_module, GraphModule) or ATTRIBUTES not in graph_module.meta:
        raise ModelKindError(
            f"graph_module: expected what prepare_fx or prepare_qat_fx returned, got a {type(graph_module).__name__}."
        )
    attributes = graph_module.meta[ATTRIBUTES]
    modules = dict(graph_module.named_modules(remove_duplicate=False))
    nodes = [node for node in graph_module.graph.nodes if node.op == "call_module"]
    called = {id(modules[node.target]): (str(node.target), modules[node.target]) for node in nodes}
    fixed = {key: layer for key, named in called.items() if (layer := _fixed_layer(*named)) is not None}
    layers = [node for node in nodes if id(modules[node.target]) in fixed]
    beside = {other for node in layers for other in (*node.all_input_nodes, *node.users)}
    around = {id(modules[node.target]) for node in nodes if node in beside}
    for key, (_, quantizer) in called.items():
        if isinstance(quantizer, APoTFakeQuantize) or (isinstance(quantizer, FakeQuantizeBase) and key in around):
            fixed[key] = FrozenQuantizer(quantizer)
    for node in nodes:
        if id(modules[node.target]) in fixed:
            _put(graph_module, node, fixed[id(modules[node.target])])
    for node in layers:
        attributes.node_name_to_qconfig[node.name] = None  # torch leaves such nodes alone
    return quantize_fx.convert_fx(graph_module, *args, **kwargs)


def _put(model: GraphModule, node: Node, module: nn.Module) -> None:
    parent, _, name = str(node.target).rpartition(".")
    setattr(model.get_submodule(parent), name, module)


def _fixed_layer(name: str, module: nn.Module) -> nn.Module | None:
    """A layer with APoT weights, once they are fixed; None for every other module."""
    quantizer = getattr(module, "weight_fake_quant", None)
    if quantizer is None:  # prepared without training: the quantizer of a weight is made now
        qconfig = getattr(module, "qconfig", None)
        first = module[0] if isinstance(module, nn.Sequential) and len(module) else module  # torch's fused modules
        wanted = isinstance(first, (*WEIGHTED, *RECURRENT)) and qconfig is not None
        quantizer = qconfig.weight() if wanted else None  # type: ignore[union-attr]
    if not isinstance(quantizer, APoTFakeQuantize):
        return None
    if isinstance(module, RECURRENT):
        raise ModelKindError(
            f"graph_module: {name} is a {type(module).__name__}, whose weights have no APoT form. Prepare the model "
            "without it: qconfig_mapping.set_object_type(type of the module, None)."
        )
    plain: Any = module.to_float() if hasattr(module, "to_float") else copy.deepcopy(module)  # type: ignore[operator]
    layer: Any = plain[0] if isinstance(plain, nn.Sequential) else plain
    if quantizer.qparams is None:
        quantizer.to(layer.weight.device)(layer.weight)
    layer.weight.copy_(FrozenQuantizer(quantizer)(layer.weight))
    if not isinstance(layer, nn.Linear) or quantizer.qparams is None:
        return _unconfigured(plain)
    fixed = LinearAPoT.from_reference(layer, *quantizer.qparams)
    if layer is plain:
        return fixed
    plain[0] = fixed
    return _unconfigured(nn.Sequential(*plain))


def _unconfigured(module: nn.Module) -> nn.Module:
    """Without what tells torch to quantize it."""
    for each in module.modules():
        each.qconfig = None  # type: ignore[assignment]
    return module
