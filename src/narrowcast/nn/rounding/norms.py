"""What is known of a weight's columns without data: in BERT-like encoders, from the LayerNorms beside it.

In encoders with the names of BERT (RoBERTa, XLM-R, ELECTRA, MiniLM, and what is trained from them) queries, keys,
values and the first matrix of a feed-forward layer read the output of a LayerNorm. A column of it has the mean square
g^2 + b^2, where g and b are the norm's gain and bias, if the features before them are alike. An error of an embedding
is multiplied by the gain of the norm behind it, g^2 in squares. A search weighs the errors of columns by these.

The rows of token types and of positions are added there, and types are 0 unless a caller says otherwise. So positions
can make up for what the row of type 0 has lost, which every token would carry otherwise (sums.py).

Names alone are not enough: the norm must be there, be a LayerNorm, and have as many features as the weight has columns.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from narrowcast.codecs import Codec
from narrowcast.nn.rounding.choice import Chosen
from narrowcast.nn.rounding.search import round_by_search
from narrowcast.nn.survey import Weight

ATTENTION = re.compile(
    r"(?P<stack>(?P<root>.*?)encoder\.layer\.)(?P<place>\d+)\.attention\.self\.(query|key|value)\.weight"
)
FEED_FORWARD = re.compile(r"(?P<block>.*encoder\.layer\.\d+\.)intermediate\.dense\.weight")
TABLE = re.compile(r"(?P<root>.*?)embeddings\.(word|position|token_type)_embeddings\.weight")
LEAST = 1e-4
"""The least that an error counts, relative to the mean."""


class Hint(NamedTuple):
    """What a weight is rounded to, if that is not the weight, and how much errors count in its columns, if known."""

    target: Tensor | None = None
    importance: Tensor | None = None


class Hints(NamedTuple):
    """What is known of the weights of a model without data."""

    model: nn.Module
    targets: dict[str, Tensor]
    known: bool

    @classmethod
    def of(cls, model: nn.Module, choices: Sequence[tuple[Weight, Codec]], rounding: Chosen) -> Hints:
        """Hints for a rounding that searches, or searches where it has no data; none for others."""
        return cls(model, targets_without_data(model, choices) if rounding.searches else {}, rounding.takes_hints)

    def of_weight(self, weight: Weight) -> Hint:
        if not self.known:
            return Hint()
        return Hint(self.targets.get(weight.slots[0].key), importance_of(self.model, weight))


def importance_of(model: nn.Module, weight: Weight) -> Tensor | None:
    """How much an error counts in each column of a weight, 1 on average; None where nothing is known."""
    key = weight.slots[0].key
    name, behind = _norm_beside(key)
    try:
        norm = model.get_submodule(name) if name and len(weight.slots) == 1 else None
    except AttributeError:
        return None
    columns = weight.slots[0].float_weight().shape[-1:]
    if not isinstance(norm, nn.LayerNorm) or norm.weight is None or norm.weight.shape != columns:
        return None
    energy = norm.weight.detach().float().square()
    if not behind and norm.bias is not None:
        energy = energy + norm.bias.detach().float().square()
    energy = energy / energy.mean()
    usable = energy.device.type != "meta" and bool(energy.isfinite().all())
    return energy.clamp(min=LEAST).contiguous() if usable else None


def _norm_beside(key: str) -> tuple[str, bool]:
    """The name of the norm before or behind a weight, and whether it is behind."""
    if match := ATTENTION.fullmatch(key):
        place = int(match["place"])
        return (
            f"{match['stack']}{place - 1}.output.LayerNorm" if place else f"{match['root']}embeddings.LayerNorm",
            False,
        )
    if match := FEED_FORWARD.fullmatch(key):
        return f"{match['block']}attention.output.LayerNorm", False
    if match := TABLE.fullmatch(key):
        return f"{match['root']}embeddings.LayerNorm", True
    return "", False


def targets_without_data(model: nn.Module, choices: Sequence[tuple[Weight, Codec]]) -> dict[str, Tensor]:
    """What tables of positions are rounded to: their rows, and what the row of type 0 loses."""
    tables = {weight.slots[0].key: (weight, codec) for weight, codec in choices}
    targets = {}
    for key, (types, codec) in tables.items():
        positions = tables.get(key.replace("token_type_embeddings", "position_embeddings"))
        importance = importance_of(model, types) if TABLE.fullmatch(key) else None
        if importance is None or positions is None or positions[0] is types:
            continue
        slot = positions[0].slots[0]
        floats, rows = (some.float_weight().detach().float() for some in (types.slots[0], slot))
        if floats.shape[-1] != rows.shape[-1] or len(positions[0].slots) > 1:
            continue
        rounded = round_by_search(floats, codec, 1, importance=importance).decode(torch.float32)
        target = rows + (floats[0] - rounded[0])
        padding = getattr(slot.module, "padding_idx", None)
        if padding is not None:
            target[padding] = rows[padding]
        targets[slot.key] = target
    return targets
