"""Which tensors of a checkpoint are weights, decided by name and shape alone.

Without a model, the names that torch.nn and transformers give decide. Weights are floating tensors called `weight` with
two dimensions or more, the projections of `nn.MultiheadAttention`, the matrices of recurrent layers (`weight_ih_l0`),
and floating tensors of any name with three dimensions (the experts of a mixture). Everything else is copied. As in
`quantize_`, a rule is searched for in the module's name ("layers.0.mlp.up_proj"), and in the tensor's name if that is
not `weight`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from narrowcast.checkpoint.header import Stored
from narrowcast.codecs import Codec, checks
from narrowcast.codecs.rules import Rules
from narrowcast.errors import CheckpointError

_ATTENTION = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")
_RECURRENT = re.compile(r"weight_(ih|hh|hr)_l\d+(_reverse)?")
_KERNEL = 16
"""A tensor called `weight` of shape [a, b, c] is taken for a 1-D convolution up to this c, and for experts above."""
_TRANSPOSED_MODELS = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer", "clvp")
_TRANSPOSED = ("c_attn", "q_attn", "c_fc", "c_proj")
"""The modules that are `Conv1D` in these models: a linear layer that stores its weight as [in, out]."""


class Choice(NamedTuple):
    """Whether a tensor is encoded or copied."""

    codec: Codec | None
    """None: it is copied."""
    lead: int = 1
    """How many leading dimensions count rows."""
    reason: str = ""
    """Why it is copied."""


def module_name(name: str) -> str:
    """The module that a weight belongs to, or the tensor's own name if it is not called `weight`."""
    return "" if name == "weight" else name.removesuffix(".weight")


def choose(name: str, stored: Stored, rules: Rules) -> Choice:
    """The codec of the tensor `name`, or the reason why it is copied."""
    last, shape = name.rpartition(".")[2], stored.shape
    if stored.dtype not in checks.FLOATS:
        return Choice(None, reason=f"is {checks.dtype_name(stored.dtype)}")
    if len(shape) < 2:
        return Choice(None, reason="is a vector or a number")
    if not stored.nbytes:
        return Choice(None, reason="has no elements")
    if last == "weight":
        lead = 2 if len(shape) == 3 and shape[2] > _KERNEL else 1
    elif len(shape) == 3 and min(shape) > 1:
        lead = 2
    elif len(shape) == 2 and (last in _ATTENTION or _RECURRENT.fullmatch(last)):
        lead = 1
    else:
        return Choice(None, reason="is not called weight")
    module = name.rpartition(".")[0]
    codec = rules.codec_for(module) if last == "weight" else rules.codec_for(module, name)
    return Choice(codec, lead, "" if codec else "a rule leaves it alone")


def refuse_transposed(model_type: object, choices: Mapping[str, Choice]) -> None:
    """Refuse weights that are stored as [in, out]: their columns would be encoded as rows."""
    wrong = [name for name, choice in choices.items() if choice.codec and module_name(name).endswith(_TRANSPOSED)]
    if wrong and model_type in _TRANSPOSED_MODELS:
        raise CheckpointError(
            f"{wrong[0]!r} and {len(wrong) - 1} more: models of type {model_type!r} store these weights as [in, out], "
            "and a row must hold the weights of one output. Load the model and call narrowcast.quantize_ and "
            f"narrowcast.save, or leave these weights out with the rule '{'|'.join(_TRANSPOSED)}' = false."
        )
