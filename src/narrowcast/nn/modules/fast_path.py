"""Torch's fast path through transformer encoders, kept off where weights are encoded.

In eval mode nn.TransformerEncoderLayer hands the weights of its attention and its linear layers to one fused operator,
past their modules, and nn.TransformerEncoder may make its input a nested tensor for it. Both look at a flag of their
own first. Here that flag is lowered for encoders that hold encoded rows, or weights that are quantized in training, and
raised again once they hold none.
"""

from __future__ import annotations

from torch import nn

from narrowcast.nn.modules.attention import MultiheadAttention
from narrowcast.nn.modules.base import Encoded, become

FLAGS = {
    nn.TransformerEncoderLayer: ("activation_relu_or_gelu", 0),
    nn.TransformerEncoder: ("use_nested_tensor", False),
}
_BEFORE = "_narrowcast_fast_path"


def settle(model: nn.Module) -> None:
    """Let every module of torch's that reads the weights of its children know which of them are rows."""
    for module in model.modules():
        if type(module) is nn.MultiheadAttention and isinstance(module.out_proj, Encoded):
            become(module, MultiheadAttention, module.out_proj._float_dtype)
    for module in model.modules():
        for kind, (flag, off) in FLAGS.items():
            if isinstance(module, kind) and hasattr(module, flag):
                _settle_flag(module, flag, off)


def _settle_flag(module: nn.Module, flag: str, off: object) -> None:
    encoded = any(isinstance(child, Encoded) or hasattr(child, "weight_quantizer") for child in module.modules())
    known = vars(module)
    if encoded and _BEFORE not in known:
        known[_BEFORE] = known.get(flag)
        known[flag] = off
    elif not encoded and _BEFORE in known:
        known[flag] = known.pop(_BEFORE)
