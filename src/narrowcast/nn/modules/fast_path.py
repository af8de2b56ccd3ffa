"""Torch's fast path through transformer encoders, switched off where weights are encoded.

In eval mode nn.TransformerEncoderLayer does not call its attention and its linear layers: it hands their weights to one
fused operator, and nn.TransformerEncoder may make its input a nested tensor for it. Both first look at a flag of their
own. `set_fast_path` clears that flag for encoders that hold encoded rows, or weights that are quantized in training,
and gives it its old value once they hold none.
"""

from __future__ import annotations

from torch import nn

from narrowcast.nn.modules.attention import MultiheadAttention
from narrowcast.nn.modules.base import Encoded, become, float_dtype_of

FLAGS = {
    nn.TransformerEncoderLayer: ("activation_relu_or_gelu", 0),
    nn.TransformerEncoder: ("use_nested_tensor", False),
}
_BEFORE = "_narrowcast_fast_path"


def set_fast_path(model: nn.Module) -> None:
    """Tell every torch.nn module that reads its children's weights whether these are floats."""
    for module in model.modules():
        if type(module) is nn.MultiheadAttention and isinstance(module.out_proj, Encoded):
            become(module, MultiheadAttention, float_dtype_of(module.out_proj))
    for module in model.modules():
        for kind, (flag, off) in FLAGS.items():
            if isinstance(module, kind) and hasattr(module, flag):
                _set_flag(module, flag, off)


def _set_flag(module: nn.Module, flag: str, off: object) -> None:
    encoded = any(isinstance(child, Encoded) or hasattr(child, "weight_quantizer") for child in module.modules())
    known = vars(module)
    if encoded and _BEFORE not in known:
        known[_BEFORE] = known.get(flag)
        known[flag] = off
    elif not encoded and _BEFORE in known:
        known[flag] = known.pop(_BEFORE)
