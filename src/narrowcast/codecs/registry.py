""" "int4:block=64" and codec objects: the names, and the grammar of specs.

spec    = name [":" option ("," option)*]
option  = key "=" value             value: an integer, true, false, a word, or numbers joined by "|"
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import lru_cache, partial
from typing import Any

import torch

from narrowcast.codecs.base import Codec
from narrowcast.codecs.cast import Cast, Float8
from narrowcast.codecs.levels import APoT, Levels, NormalFloat, PoT
from narrowcast.codecs.uniform import Sign, Uniform
from narrowcast.errors import SpecError
from narrowcast.kernels import operators

_CODECS: dict[str, tuple[type[Codec], Callable[..., Codec]]] = {
    **{name: (Cast, partial(Cast, name)) for name in ("raw", "fp16", "bf16")},
    **{name: (Float8, partial(Float8, name)) for name in ("fp8_e4m3", "fp8_e5m2")},
    "sign": (Sign, Sign),
    **{f"int{bits}": (Uniform, partial(Uniform, bits)) for bits in (2, 3, 4, 5, 6, 8)},
    **{f"apot{bits}": (APoT, partial(APoT, bits)) for bits in range(2, 9)},
    **{f"pot{bits}": (PoT, partial(PoT, bits)) for bits in range(2, 6)},
    "nf4": (NormalFloat, NormalFloat),
}
_NEEDS_A_TABLE: dict[str, tuple[type[Codec], Callable[..., Codec]]] = {"levels": (Levels, Levels)}


def list_codecs() -> list[str]:
    """Every name that `codec` takes without options (`levels` needs a table)."""
    return list(_CODECS)


def codec(spec: str | Codec | Mapping[str, Any]) -> Codec:
    """The codec that `spec` names: "int8", "int4:block=64", {"name": "int4", "block": 64}, or a codec itself."""
    return _resolve(spec)


Codec.from_config = staticmethod(codec)


def codec_in_file(spec: str | Codec | Mapping[str, Any]) -> Codec:
    """The codec that a file, a config or a state names.

    The fp8 names meant a plain cast before they had blocks. Every file since then says which of the two it is, so a
    bare name comes from an old file.
    """
    named = {"name": spec} if isinstance(spec, str) else spec
    if isinstance(named, Mapping) and dict(named) in [{"name": name} for name in ("fp8_e4m3", "fp8_e5m2")]:
        return codec({**named, "scale": "none"})
    return codec(spec)


def _resolve(spec: str | Codec | Mapping[str, Any]) -> Codec:
    if isinstance(spec, Codec):
        return spec
    if isinstance(spec, str):
        return _parse(spec) if torch.compiler.is_compiling() else _remembered(spec)
    if isinstance(spec, Mapping):
        options = {str(key): value for key, value in spec.items()}
        if not isinstance(options.get("name"), str):
            raise SpecError(f'codec={dict(spec)!r}: a mapping needs a "name", as in {{"name": "int4", "block": 64}}.')
        return _make(options.pop("name"), options)
    raise SpecError(f'codec={spec!r}: expected a string like "int4:block=64", a mapping or a Codec.')


def which_kernel(
    codec: str | Codec | Mapping[str, Any], device: torch.device | str = "cpu", *, operation: str = "encode"
) -> str:
    """What runs this codec on this device: "native/avx512", "triton", "cuda" or "reference". Unknown codecs raise.

    `operation` is "encode", "decode", "decode_sum", "decode_sum_encode" or "linear". All but the last are run by the
    same kernel. On a GPU that is Triton; "linear", the product with encoded weights, runs in kernels that are compiled
    as CUDA for common 4- and 8-bit codecs, and in Triton for others. The answer for "linear" holds for one bf16 vector
    and rows of about 4096 elements; larger batches may be decoded first and multiplied by torch.
    """
    recipe = _resolve(codec).recipe(torch.device("cpu"))
    return operators.which_kernel(recipe, torch.device(device), operation)


@lru_cache(maxsize=512)
def _remembered(spec: str) -> Codec:
    return _parse(spec)


def _parse(spec: str) -> Codec:
    name, _, rest = spec.partition(":")
    options: dict[str, Any] = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not key or not value or key in options:
            raise SpecError(
                f"codec={spec!r}: {part.strip()!r} is not a new option. Options are written key=value, once each, "
                f'with commas between: "{name}:block=64,scale=bf16".'
            )
        options[key] = _value(value)
    return _make(name.strip(), options)


def _value(text: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    try:
        return [float(item) for item in text.split("|")] if "|" in text else int(text)
    except ValueError:
        return text


def _make(name: str, options: dict[str, Any]) -> Codec:
    known = {**_CODECS, **_NEEDS_A_TABLE}
    if name not in known:
        close = get_close_matches(name.lower(), known, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise SpecError(f"codec {name!r} does not exist.{hint} There are: {', '.join(known)}.")
    cls, make = known[name]
    for key in options:
        if key not in cls.options:
            takes = f"takes {', '.join(cls.options)}" if cls.options else "takes no options"
            raise SpecError(f"{key}={options[key]!r}: codec {name!r} {takes}.")
    if name in _NEEDS_A_TABLE and "table" not in options:
        raise SpecError('codec "levels" needs a table: "levels:table=-1|0|1", or narrowcast.codecs.Levels([-1, 0, 1]).')
    return make(**options)
