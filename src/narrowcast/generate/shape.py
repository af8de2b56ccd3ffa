"""The shape of a Llama-like decoder, as config.json of a transformers checkpoint has it.

What is known: Llama, Mistral and Qwen2. A config that asks for anything that the decoder here would do differently
(another kind of model, activation, attention or rotary scaling) is refused with the name of the entry. An entry that is
not there is what transformers takes it for, and so are entries that its model of this kind does not read. Tokens that
end a text are those of generation_config.json, where there is one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from narrowcast.errors import MissingFileError, ModelKindError

KINDS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096},
}
"""Kinds of models, with what transformers takes for an entry that config.json does not have."""
SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("vocab_size", "max_position_embeddings"),
)
"""Entries that must be whole numbers. Heads of keys and the size of heads may be null."""
ROTARY_KINDS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
"""Kinds of rotary embeddings, with the numbers that each needs beside `rope_theta`."""


def _check_number(name: str, value: Any, kind: type) -> None:
    if not isinstance(value, kind) or isinstance(value, bool):
        what = "whole number" if kind is Integral else "number"
        raise ModelKindError(f"{name}={value!r}: must be a {what}. Write it without quotes, and not null.")


def _check_rotary(rotary: Mapping[str, Any]) -> None:
    """Refuse angles that rotary.py would compute differently, or not at all."""
    kind = rotary.get("rope_type")
    if kind not in ROTARY_KINDS or rotary.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelKindError(
            f"rotary embeddings are {dict(rotary)}, and the runner knows the types {', '.join(ROTARY_KINDS)}, on whole "
            "heads. For others, quantize the model of transformers and call its own generate: docs/huggingface.md."
        )
    for entry in ("rope_theta", *ROTARY_KINDS[kind]):
        value = rotary.get(entry)
        if not isinstance(value, Real) or isinstance(value, bool) or value <= 0:
            raise ModelKindError(
                f"rotary embeddings are {dict(rotary)}: {kind!r} needs {entry!r}, a number above 0. Take "
                "rope_parameters from the config.json that the model was published with."
            )
    if kind == "llama3" and rotary["low_freq_factor"] > rotary["high_freq_factor"]:
        raise ModelKindError(
            f"rotary embeddings are {dict(rotary)}: low_freq_factor must not be above high_freq_factor. Most likely "
            "the two are swapped."
        )


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
        for name in ("width", "layers", "heads", "hidden", "words", "key_heads", "head_size", "context"):
            _check_number(name, getattr(self, name), Integral)
        _check_number("norm_eps", self.norm_eps, Real)
        for end in self.ends:
            _check_number("ends", end, Integral)
        _check_rotary(self.rotary)
        object.__setattr__(self, "key_heads", self.key_heads or self.heads)
        object.__setattr__(self, "head_size", self.head_size or self.width // max(self.heads, 1))
        sizes = (self.width, self.layers, self.heads, self.hidden, self.words, self.head_size, self.context)
        if min(*sizes, self.key_heads) < 1 or self.heads % self.key_heads or self.head_size % 2:
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
    config, generation = _read(path), folder / "generation_config.json"
    if generation.is_file():
        config["eos_token_id"] = _read(generation).get("eos_token_id")
    return shape_of(config, str(path))


def _read(path: Path) -> dict[str, Any]:
    try:
        entries = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ModelKindError(f"{path}: is not JSON ({error}). Save the model again.") from None
    if not isinstance(entries, dict):
        raise ModelKindError(f"{path}: holds a {type(entries).__name__}, not entries by name. Save the model again.")
    return entries


def shape_of(config: Mapping[str, Any], where: str = "config") -> Shape:
    """The shape that the entries of a config.json describe."""
    kind = config.get("model_type")
    if kind not in KINDS:
        raise ModelKindError(
            f"{where}: model_type is {kind!r}, and the runner knows {', '.join(KINDS)}. For other models, quantize the "
            "model of transformers and call its own generate: docs/huggingface.md."
        )
    config = KINDS[kind] | dict(config)
    try:
        _check(config)
        return _shape(kind, config)
    except KeyError as error:
        raise ModelKindError(f"{where}: has no entry {error}, which a model of type {kind!r} needs.") from None
    except ModelKindError as error:
        raise ModelKindError(f"{where}: {error}") from None


def _shape(kind: str, config: Mapping[str, Any]) -> Shape:
    ends = config.get("eos_token_id")
    biased = kind == "llama" and bool(config.get("attention_bias", False))
    return Shape(
        width=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        hidden=config["intermediate_size"],
        words=config["vocab_size"],
        key_heads=config.get("num_key_value_heads") or 0,
        head_size=config.get("head_dim") or 0,
        context=config["max_position_embeddings"],
        norm_eps=config.get("rms_norm_eps", 1e-6),
        rotary=_rotary(config),
        tied=bool(config.get("tie_word_embeddings", False)),
        query_bias=kind == "qwen2" or biased,
        out_bias=biased,
        mlp_bias=kind == "llama" and bool(config.get("mlp_bias", False)),
        ends=tuple(ends) if isinstance(ends, list) else () if ends is None else (ends,),
    )


def _check(config: Mapping[str, Any]) -> None:
    """Refuse what the decoder here would do differently."""
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelKindError(f"hidden_act is {activation!r}, and the runner knows 'silu'.")
    for entry in SIZES:
        _check_number(entry, config[entry], Integral)
    for entry in _windows(config):
        window = config.get(entry)
        if window is None:
            continue
        _check_number(entry, window, Integral)
        if window < config["max_position_embeddings"]:
            raise ModelKindError(
                f"{entry} is {window}, and the runner attends to every position. If your texts stay within that, "
                f"set max_position_embeddings to {window} in config.json."
            )


def _windows(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Entries that say how far back transformers attends.

    Qwen2 has one also where it is not used. Llama has none, but the cache of transformers' `generate` takes either for
    one, whatever the model: it keeps no more positions than that.
    """
    if config["model_type"] == "qwen2":
        return ("sliding_window",) if config.get("use_sliding_window", False) else ()
    return "sliding_window", "attention_chunk_size"


def _rotary(config: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_parameters`, as configs have it since transformers 5, from that or from the entries of before."""
    rotary = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    rotary.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    rotary.setdefault("rope_type", rotary.pop("type", "default"))
    if config.get("partial_rotary_factor") is not None:
        rotary.setdefault("partial_rotary_factor", config["partial_rotary_factor"])
    if rotary["rope_type"] == "llama3":
        entry = "original_max_position_embeddings"
        own = rotary.get(entry, config["max_position_embeddings"])
        rotary[entry] = config.get(entry, own)  # an entry beside the others comes first
    return rotary
