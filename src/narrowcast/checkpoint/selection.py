"""Which tensors of a checkpoint are weights, told by name and shape alone.

No model is there to ask, so this goes by the names that torch.nn and transformers give: a floating tensor called
`weight` with two dimensions or more, the projections of `nn.MultiheadAttention`, and floating tensors with three
dimensions whatever they are called (the experts of a mixture). Everything else is copied as it is. A rule is looked for
in the module's name ("layers.0.mlp.up_proj"), and in the tensor's where it is not called `weight`, as `quantize_` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from narrowcast.checkpoint.header import Stored
from narrowcast.codecs import Codec, checks
from narrowcast.codecs.rules import Rules
from narrowcast.errors import CheckpointError

_ATTENTION = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")
_KERNEL = 16
"""A tensor called `weight` of shape [a, b, c] is a 1-D convolution's up to this c, and a mixture of experts' above."""
_TRANSPOSED_MODELS = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer", "clvp")
_TRANSPOSED = ("c_attn", "q_attn", "c_fc", "c_proj")
"""Where transformers has `Conv1D`, a linear layer that keeps its weight as [in, out]."""


class Choice(NamedTuple):
    """What becomes of a tensor."""

    codec: Codec | None
    """None: it is copied."""
    lead: int = 1
    """The dimensions that count rows."""
    reason: str = ""
    """Why it is copied."""


def module_name(name: str) -> str:
    """The module whose weight this is, or the tensor's own name where it is not called `weight`."""
    return "" if name == "weight" else name.removesuffix(".weight")


def choose(name: str, stored: Stored, rules: Rules) -> Choice:
    """What becomes of the tensor `name`."""
    last, shape = name.rpartition(".")[2], stored.shape
    if stored.dtype not in checks.FLOATS:
        return Choice(None, reason=f"is {str(stored.dtype).removeprefix('torch.')}")
    if len(shape) < 2:
        return Choice(None, reason="is a vector or a number")
    if not stored.nbytes:
        return Choice(None, reason="has no elements")
    if last == "weight":
        lead = 2 if len(shape) == 3 and shape[2] > _KERNEL else 1
    elif len(shape) == 3 and min(shape) > 1:
        lead = 2
    elif len(shape) == 2 and last in _ATTENTION:
        lead = 1
    else:
        return Choice(None, reason="is not called weight")
    module = name.rpartition(".")[0]
    codec = rules.codec_for(module) if last == "weight" else rules.codec_for(module, name)
    return Choice(codec, lead, "" if codec else "a rule leaves it alone")


def refuse_transposed(model_type: object, choices: Mapping[str, Choice]) -> None:
    """Refuse to encode the columns of a weight as its rows."""
    wrong = [name for name, choice in choices.items() if choice.codec and module_name(name).endswith(_TRANSPOSED)]
    if wrong and model_type in _TRANSPOSED_MODELS:
        raise CheckpointError(
            f"{wrong[0]!r} and {len(wrong) - 1} more: models of type {model_type!r} keep these weights as [in, out], "
            "and rows are encoded by output. Load the model, call narrowcast.quantize_ and narrowcast.save, or leave "
            f"them with the rule '{'|'.join(_TRANSPOSED)}' = false."
        )
