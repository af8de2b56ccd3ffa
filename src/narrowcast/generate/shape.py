"""The shape of a Llama-like decoder, as config.json of a transformers checkpoint has it.

What is known: Llama, Mistral and Qwen2. A config that asks for anything that the decoder here would do differently
(another kind of model, activation, attention or rotary scaling) is refused with the name of the entry.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from narrowcast.errors import MissingFileError, ModelKindError

KINDS = ("llama", "mistral", "qwen2")
ROTARY_KINDS = ("default", "linear", "llama3")


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder. `rotary` has the entries of `rope_parameters`: kind, base and scaling of the angles."""

    width: int
    layers: int
    heads: int
    hidden: int
    words: int
    key_heads: int = 0
    """Heads of keys and values; 0: as many as queries have."""
    head_size: int = 0
    """0: width / heads."""
    context: int = 512
    """Positions that the model was made for."""
    norm_eps: float = 1e-5
    rotary: Mapping[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    tied: bool = False
    """Whether the embedding is the output matrix, too."""
    query_bias: bool = False
    """Whether queries, keys and values have a bias (Qwen2)."""
    out_bias: bool = False
    mlp_bias: bool = False
    ends: tuple[int, ...] = ()
    """Tokens that end a text."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "key_heads", self.key_heads or self.heads)
        object.__setattr__(self, "head_size", self.head_size or self.width // max(self.heads, 1))
        sizes = (self.width, self.layers, self.heads, self.hidden, self.words, self.head_size, self.context)
        if min(sizes) < 1 or self.heads % self.key_heads or self.head_size % 2:
            raise ModelKindError(
                f"Shape: sizes must be at least 1, key_heads must divide heads, head_size must be even. This is {self}"
            )

    @property
    def weights(self) -> int:
        """How many weights the matrices have, the embedding counted once."""
        within = self.head_size * (self.heads * 2 + self.key_heads * 2) * self.width
        tables = self.words * self.width * (1 if self.tied else 2)
        return self.layers * (within + 3 * self.hidden * self.width) + tables


SHAPES = {
    "110m": Shape(768, 12, 12, 2048, 16000),
    "1b": Shape(2048, 16, 32, 8192, 128256, key_heads=8, tied=True),
    "7b": Shape(4096, 32, 32, 11008, 32000),
}
"""For random weights: about as many as the name says."""


def read_shape(folder: Path) -> Shape:
    """The shape of the model in a folder."""
    path = folder / "config.json"
    if not path.is_file():
        raise MissingFileError(f"{folder}: has no config.json. Name the folder of a model that transformers has saved.")
    try:
        config = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ModelKindError(f"{path}: is not JSON ({error}). Save the model again.") from None
    return shape_of(config, str(path))


def shape_of(config: Mapping[str, Any], where: str = "config") -> Shape:
    """The shape that the entries of a config.json describe."""
    _check(config, where)
    kind = config["model_type"]
    ends = config.get("eos_token_id")
    try:
        return Shape(
            width=config["hidden_size"],
            layers=config["num_hidden_layers"],
            heads=config["num_attention_heads"],
            hidden=config["intermediate_size"],
            words=config["vocab_size"],
            key_heads=config.get("num_key_value_heads") or 0,
            head_size=config.get("head_dim") or 0,
            context=config.get("max_position_embeddings", 2048),
            norm_eps=config.get("rms_norm_eps", 1e-6),
            rotary=_rotary(config, where),
            tied=bool(config.get("tie_word_embeddings", False)),
            query_bias=kind == "qwen2" or bool(config.get("attention_bias", False)),
            out_bias=kind != "qwen2" and bool(config.get("attention_bias", False)),
            mlp_bias=bool(config.get("mlp_bias", False)),
            ends=tuple(ends) if isinstance(ends, list) else () if ends is None else (ends,),
        )
    except KeyError as error:
        raise ModelKindError(f"{where}: has no entry {error}, which a model of type {kind!r} needs.") from None


def _check(config: Mapping[str, Any], where: str) -> None:
    kind = config.get("model_type")
    if kind not in KINDS:
        raise ModelKindError(
            f"{where}: model_type is {kind!r}, and the runner knows {', '.join(KINDS)}. For other models, quantize the "
            "model of transformers and call its own generate: docs/huggingface.md."
        )
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelKindError(f"{where}: hidden_act is {activation!r}, and the runner knows 'silu'.")
    # Qwen2 has an entry for the window also where it is not used.
    windowed = config.get("sliding_window") if config.get("use_sliding_window", kind == "mistral") else None
    if windowed:
        raise ModelKindError(
            f"{where}: sliding_window is {windowed}, and the runner attends to every position. If your texts stay "
            "shorter than that, set it to null."
        )


def _rotary(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """`rope_parameters`, as configs have it since transformers 5, from that or from the entries of before."""
    rotary = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rotary.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    rotary.setdefault("rope_type", rotary.pop("type", "default"))
    if rotary["rope_type"] not in ROTARY_KINDS or rotary.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelKindError(
            f"{where}: rotary embeddings are {rotary}, and the runner knows the types {', '.join(ROTARY_KINDS)}, on "
            "whole heads."
        )
    return rotary
