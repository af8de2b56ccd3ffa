""" "int4:block=64" and codec objects: the names, and the grammar of specs.

spec    = name [":" option ("," option)*]
option  = key "=" value             value: an integer, true, false, a word, or numbers joined by "|"

`register_codec` adds a name from outside the library. Packages may also declare their codecs as entry points of the
group "narrowcast.codecs"; such a package is imported when one of its names is first asked for.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import lru_cache, partial
from importlib.metadata import entry_points
from inspect import Parameter, signature
from typing import Any, NamedTuple

import torch
from torch import Tensor

from narrowcast.codecs.base import Codec
from narrowcast.codecs.cast import Cast, Float8
from narrowcast.codecs.levels import APoT, Levels, NormalFloat, PoT
from narrowcast.codecs.uniform import Sign, Uniform
from narrowcast.errors import SpecError
from narrowcast.kernels import operators

ENTRY_POINTS = "narrowcast.codecs"
"""The group of entry points that name codecs: `my_codec = "my_package:MyCodec"`."""


class Entry(NamedTuple):
    """What a name stands for."""

    make: Callable[..., Codec]
    options: tuple[str, ...] | None
    """The options that a spec may give; None for any."""
    bare: bool = True
    """Whether the name alone is a spec."""
    module: str = ""
    """The module that registered it; empty for codecs of the library."""


_BUILT_IN = {
    **{name: Entry(partial(Cast, name), Cast.options) for name in ("raw", "fp16", "bf16")},
    **{name: Entry(partial(Float8, name), Float8.options) for name in ("fp8_e4m3", "fp8_e5m2")},
    "sign": Entry(Sign, Sign.options),
    **{f"int{bits}": Entry(partial(Uniform, bits), Uniform.options) for bits in (2, 3, 4, 5, 6, 8)},
    **{f"apot{bits}": Entry(partial(APoT, bits), APoT.options) for bits in range(2, 9)},
    **{f"pot{bits}": Entry(partial(PoT, bits), PoT.options) for bits in range(2, 6)},
    "nf4": Entry(NormalFloat, NormalFloat.options),
    "levels": Entry(Levels, Levels.options, bare=False),
}
_codecs: dict[str, Entry] = dict(_BUILT_IN)


def list_codecs() -> list[str]:
    """Every name that `codec` takes without options, registered ones included (`levels` needs a table)."""
    return [name for name, entry in _codecs.items() if entry.bare]


def register_codec(name: str, factory: Callable[..., Codec]) -> None:
    """Let `name` stand for an own codec: in specs, files, state dicts and collectives, as the library's names do.

    `factory` is a subclass of `Codec`, or a function that returns one. The options of a spec ("mine:block=32") are
    passed to it as keyword arguments: those that `factory.options` lists, or the function's own. The codec that it
    makes must be called `name`. Every process that meets the name registers it: usually by importing the module that
    calls this function, which files note down. A name of the library cannot be taken.
    """
    _register(name, factory, sys._getframe(1).f_globals.get("__name__", "__main__"))


def _register(name: str, factory: Callable[..., Codec], module: str) -> None:
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z]\w*", name, re.ASCII):
        raise SpecError(f"name={name!r}: the name of a codec is a word of letters, digits and _, such as 'fp4_e2m1'.")
    if not callable(factory) or isinstance(factory, Codec):
        raise SpecError(
            f"factory={factory!r}: expected a subclass of Codec, or a function that makes one. Pass the class itself, "
            "not an instance."
        )
    known = _codecs.get(name)
    # A module that is reloaded, or a cell that is run again, defines its class again.
    if known is not None and (not known.module or _origin(known.make) != _origin(factory)):
        whose = f"{_origin(known.make)} of {known.module!r}" if known.module else "a codec of narrowcast"
        raise SpecError(f"name={name!r}: is {whose} already. Choose another name.")
    options, bare = _options(factory)
    _codecs[name] = Entry(factory, options, bare, module)
    _remembered.cache_clear()


def _origin(factory: Callable[..., Codec]) -> str:
    return getattr(factory, "__qualname__", repr(factory))


def _options(factory: Callable[..., Codec]) -> tuple[tuple[str, ...] | None, bool]:
    """The options that a factory takes (None for any), and whether it needs none of them."""
    parameters = [*signature(factory).parameters.values()]
    required = [p.name for p in parameters if p.default is Parameter.empty and p.kind not in _VARIADIC]
    if isinstance(factory, type) and issubclass(factory, Codec):
        return factory.options, not required
    takes_any = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters)
    named = tuple(parameter.name for parameter in parameters if parameter.kind not in _VARIADIC)
    return None if takes_any else named, not required


_VARIADIC = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


def module_of(name: str) -> str:
    """The module that registered a codec; empty for those of the library, and for names that nobody registered."""
    return _codecs[name].module if name in _codecs else ""


def check_storable(codec: Codec) -> None:
    """Refuse a codec that a file could not name: `narrowcast.codec` must make the same one of its spec."""
    try:
        again = codec_in_file(codec.spec)
    except SpecError as error:
        raise SpecError(
            f"codec={codec.spec!r}: a file holds the name of a codec, and nothing could read this one: {error} "
            f"Register it first: narrowcast.register_codec({codec.name!r}, {type(codec).__name__})."
        ) from error
    here, there = (own.recipe(torch.device("cpu")) for own in (codec, again))
    if here[:2] != there[:2] or not _same_table(here.table, there.table):
        raise SpecError(
            f"codec={codec.spec!r}: narrowcast.codec({codec.spec!r}) makes another codec than this "
            f"{type(codec).__name__}, and a file that names it would decode to other numbers. Give it a name of its "
            "own, and options in its `given` that tell it from others of its class."
        )


def _same_table(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.shape == other.shape and bool(((one == other) | (one.isnan() & other.isnan())).all())


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

    `operation` is "encode", "decode", "decode_sum", "decode_sum_encode" or "linear". On a CPU the same kernel runs all
    of them. On a GPU that is Triton, but "linear", the product with encoded weights, runs in kernels that are compiled
    as CUDA for common 4- and 8-bit codecs; so does "decode_sum_encode" on Hopper for 4-bit codecs and `sign`. The
    answer for "linear" holds for one bf16 vector and rows of about 4096 elements; larger batches may be decoded first
    and multiplied by torch. That for "decode_sum_encode" holds for eight rows of 2**28 elements; short ones, and for
    `sign` sums with an own row, run in Triton.
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
    entry = _codecs.get(name) or _load_entry_point(name)
    if entry is None:
        close = get_close_matches(name.lower(), _codecs, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise SpecError(f"codec {name!r} does not exist.{hint} There are: {', '.join(_codecs)}.")
    for key in options:
        if entry.options is not None and key not in entry.options:
            takes = f"takes {', '.join(entry.options)}" if entry.options else "takes no options"
            raise SpecError(f"{key}={options[key]!r}: codec {name!r} {takes}.")
    if name == "levels" and "table" not in options:
        raise SpecError('codec "levels" needs a table: "levels:table=-1|0|1", or narrowcast.codecs.Levels([-1, 0, 1]).')
    built = entry.make(**options)
    if entry.module and (not isinstance(built, Codec) or built.name != name):
        what = f"a codec called {built.name!r}" if isinstance(built, Codec) else f"a {type(built).__name__}"
        raise SpecError(
            f"codec {name!r}: what {entry.module!r} registered under this name makes {what}. It must make a Codec with "
            f"name={name!r}, which files and other ranks know it by."
        )
    return built


def _load_entry_point(name: str) -> Entry | None:
    """What an installed package declares under this name, imported and registered."""
    for point in entry_points(group=ENTRY_POINTS, name=name):
        factory = point.load()
        if name not in _codecs:  # its import may have registered it
            _register(name, factory, point.module)
        return _codecs[name]
    return None
