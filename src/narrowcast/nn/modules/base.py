"""Modules that hold weights as encoded rows.

An `Encoded` module keeps a weight as a uint8 Parameter of shape [..., row_bytes], under the name that the float weight
had, so that a state dict keeps its keys. A `Held` for each such parameter says which codec made the rows and what they
decode to. The rest of the library asks the functions of this file for it: `encoded_parameters`, `float_dtype_of`,
`float_class_of`. An encoded module promises:

- The dtype of its floats follows `.to(...)`, `.half()`, `.type(...)` and the like, though no float weight is left to
  follow them. Rows stay bytes whatever the module is cast to. A parameter whose bytes were cast is refused.
- A state dict says what its rows are (nn/state.py). One of another layout, codec or shape is refused with the
  reason, before anything of this module is loaded.
- A float module becomes an encoded one, and an encoded one a float one, in place, by a change of its class. Names,
  hooks, biases, buffers and references to the module stay valid.

Rows are not trained: they never require a gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from narrowcast.codecs import Codec, checks
from narrowcast.codecs.rules import CodecLike
from narrowcast.errors import DtypeError, QuantizeError, StateDictError
from narrowcast.nn import state as extra_state

OTHER_CODEC = (
    "It was quantized with another codec, or is another model's: call quantize_ with the codec (and rules) it was "
    "saved with, or use narrowcast.save and narrowcast.load, which keep the codec of every weight in the file."
)


EMPTY = "_empty_float"
"""The name of a parameter without elements that `show_dtype` adds. No state dict has it."""


class Held(NamedTuple):
    """What the rows of one parameter decode to, and what the float parameter is once they are decoded."""

    codec: Codec
    shape: torch.Size
    """Of the weight whose rows are encoded: of its transpose, where `transposed`."""
    transposed: bool = False
    """Whether the float module keeps its weight as [in, out]."""
    trained: bool = True
    """Whether the float weight required a gradient."""

    def decode(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """The weight of these rows, row by row."""
        numel = math.prod(self.shape[rows.dim() - 1 :])
        return self.codec.decode(as_bytes(rows).detach(), numel, dtype).view(self.shape)

    def facts(self) -> list[Any]:
        """What a state dict says about these rows."""
        return [self.codec.spec, list(self.shape)]


class Conversion(NamedTuple):
    """How models are converted: nn/quantize.py, which knows every module class, gives its functions to `Encoded`."""

    quantize_: Callable[[nn.Module, CodecLike], Any]
    dequantize_: Callable[[nn.Module], nn.Module]


class Encoded(nn.Module):
    """A module some of whose parameters are encoded rows."""

    float_class: type[nn.Module] = nn.Module
    """The class of torch.nn that this one stands for."""
    conversion: ClassVar[Conversion]

    _held: dict[str, Held]
    _float_dtype: torch.dtype
    _float_class: type[nn.Module]

    @classmethod
    def from_float(cls: type[EncodedModule], module: nn.Module, codec: CodecLike) -> EncodedModule:
        """An encoded module with the weights of a float one, which is left as it is; biases are shared."""
        encoded, why = None, ""
        if isinstance(module, cls.float_class):
            encoded = copy_modules(module)
            skips = cls.conversion.quantize_(encoded, codec).skips
            why = f" ({skips[0].reason})" if skips else ""
        if not isinstance(encoded, cls):
            raise QuantizeError(
                f"module: {cls.__name__}.from_float takes a torch.nn.{cls.float_class.__name__}, got "
                f"{type(module).__name__}{why}. narrowcast.quantize_(model, codec) finds the right class by itself."
            )
        return encoded

    def dequantize(self) -> nn.Module:
        """The float module, with the decoded weights; this one is left as it is. Biases are shared."""
        return self.conversion.dequantize_(copy_modules(self))

    def _enter(self) -> None:
        """Remove what only the float form needs; called when a float module has become an encoded one."""

    def _leave(self) -> None:
        """Remove what only the encoded form needs; called before a module becomes a float one again."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Encoded:
        rows = {id(self._parameters.get(name)) for name in self._held}
        super()._apply(lambda t: keep_dtype(fn, t) if id(t) in rows else fn(t), recurse)  # type: ignore[no-untyped-call]
        # `fn` of an empty tensor tells the dtype; a buffer for that would show up in state dicts and parameter lists.
        dtype = fn(torch.empty(0, dtype=self._float_dtype, device="cpu")).dtype
        if dtype in checks.FLOATS:
            self._float_dtype = dtype
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.pop(prefix + EMPTY, None)

    def get_extra_state(self) -> Tensor:
        return extra_state.pack({name: held.facts() for name, held in self._held.items()})

    def set_extra_state(self, state: Any) -> None:
        _check_facts(self, extra_state.unpack(state, extra_state.KEY), "")

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        check_rows(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *rest)
        for key in (EMPTY, extra_state.KEY):
            extra_state.not_missing(rest[2], prefix, key)


EncodedModule = TypeVar("EncodedModule", bound=Encoded)


class OneWeight(Encoded):
    """An encoded module with one weight, called `weight`, and perhaps a bias."""

    weight: nn.Parameter

    @property
    def held(self) -> Held:
        """What the rows of `weight` decode to."""
        return self._held["weight"]

    @property
    def codec(self) -> Codec:
        return self._held["weight"].codec

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its floats: what `decoded()` gives."""
        return self._float_dtype

    def decoded(self, dtype: torch.dtype | None = None) -> Tensor:
        """The weight as floats, in `dtype` or the module's own."""
        return self._held["weight"].decode(self.weight, dtype or self._float_dtype)

    def extra_repr(self) -> str:
        return f"{self.float_class.extra_repr(self)}, codec={self.codec.spec!r}"


# -- what the rest of the library may know of an encoded module ------------------------------------------------------


def encoded_parameters(module: nn.Module) -> Mapping[str, Held]:
    """The parameters of a module that are encoded rows: none of a float module."""
    return module._held if isinstance(module, Encoded) else {}


def float_class_of(module: nn.Module) -> type[nn.Module]:
    """The class of a module, or the one that it had before it was encoded."""
    return module._float_class if isinstance(module, Encoded) else type(module)


def float_dtype_of(module: Encoded) -> torch.dtype:
    """The dtype that the rows of a module decode to."""
    return module._float_dtype


def set_float_dtype(module: Encoded, dtype: torch.dtype) -> None:
    """Let the rows of a module decode to another dtype."""
    module._float_dtype = dtype


# -- from float to encoded and back, in place ------------------------------------------------------------------------


def become(module: nn.Module, target: type[Encoded], dtype: torch.dtype) -> None:
    """Make a float module an instance of `target` that holds no rows yet. An encoded one stays as it is."""
    if not isinstance(module, Encoded):
        float_class, module.__class__ = type(module), target
        begin(module, float_class, dtype)  # type: ignore[arg-type]
        module._enter()  # type: ignore[operator]


def begin(module: Encoded, float_class: type[nn.Module], dtype: torch.dtype) -> None:
    """Give an encoded module its own attributes, without any rows."""
    vars(module).update(_held={}, _float_dtype=dtype, _float_class=float_class)


def hold(module: nn.Module, name: str, rows: nn.Parameter, held: Held) -> None:
    """Put rows in the place of a weight."""
    assert isinstance(module, Encoded)
    module._parameters[name] = rows
    module._held[name] = held


def restore(module: Encoded, decoded: dict[int, nn.Parameter]) -> None:
    """Make an encoded module a float one again. `decoded` has the weights by the id of their rows: ties stay tied."""
    for name, held in module._held.items():
        rows = module._parameters[name]
        assert rows is not None
        if id(rows) not in decoded:
            weight = held.decode(rows, module._float_dtype)
            weight = weight.t().contiguous() if held.transposed else weight
            decoded[id(rows)] = nn.Parameter(weight, requires_grad=held.trained)
        module._parameters[name] = decoded[id(rows)]
    module._parameters.pop(EMPTY, None)
    module._leave()
    module.__class__ = module._float_class  # type: ignore[assignment]
    for name in ("_held", "_float_dtype", "_float_class"):
        del vars(module)[name]


def as_bytes(rows: Tensor) -> Tensor:
    """`rows`, refused if something has cast them: the one place that looks, for every module."""
    if rows.dtype is not torch.uint8:
        raise DtypeError(
            f"weight: encoded rows are uint8, and these are {checks.dtype_name(rows.dtype)}. Something cast "
            "the bytes themselves (p.data = p.data.float(), for example). To change the dtype of a model's floats call "
            "model.to(dtype), which leaves rows alone; to get these back, load them again."
        )
    return rows


def keep_dtype(fn: Callable[..., Any], tensor: Tensor) -> Tensor:
    """`fn(tensor)`, for the functions of `Module._apply`, in the dtype of `tensor`."""
    applied: Tensor = fn(tensor)
    return applied if applied.dtype == tensor.dtype else tensor.to(applied.device)


def as_parameter(rows: Tensor) -> nn.Parameter:
    return nn.Parameter(rows, requires_grad=False)


def copy_modules(model: nn.Module) -> nn.Module:
    """New modules, down to the last child, with the same parameters, buffers and attributes.

    A module that the model has several times is copied once. Attributes are shared, since some cannot be copied; only
    their dictionaries and sets are new.
    """
    copies = {module: object.__new__(type(module)) for module in model.modules()}
    for module, copy in copies.items():
        for name, value in vars(module).items():
            vars(copy)[name] = value.copy() if isinstance(value, (dict, set)) else value
        copy._modules = {name: child and copies[child] for name, child in module._modules.items()}
    return copies[model]


# -- state dicts -----------------------------------------------------------------------------------------------------


def check_rows(module: Encoded, state_dict: Mapping[str, Any], prefix: str) -> None:
    """Refuse a state dict in which this module's rows are floats, or rows of another width, codec or weight."""
    for name, held in module._held.items():
        value, rows = state_dict.get(prefix + name), module._parameters[name]
        if not isinstance(value, Tensor) or rows is None:
            continue
        if (value.dtype, value.shape) != (rows.dtype, rows.shape):
            raise StateDictError(
                f"state_dict[{prefix + name!r}]: this weight is held as uint8 rows {list(rows.shape)} of codec "
                f"{held.codec.spec!r}, the state dict has {checks.describe(value)}. {_what_to_do(value)}"
            )
    facts = extra_state.facts_in(state_dict, prefix)
    if facts is not None:
        _check_facts(module, facts, prefix)


def _check_facts(module: Encoded, facts: Mapping[str, Any], prefix: str) -> None:
    """Refuse rows that a state dict describes otherwise than this module does."""
    for name in {**module._held, **facts}:
        here, there = (module._held[name].facts() if name in module._held else None), facts.get(name)
        if here != there:
            raise StateDictError(
                f"state_dict[{prefix + name!r}]: this weight is held as {_describe_facts(here)}, the state dict has "
                f"{_describe_facts(there)}. {OTHER_CODEC}"
            )


def _describe_facts(facts: list[Any] | None) -> str:
    return "floats" if facts is None else f"rows of codec {facts[0]!r} for a weight of {facts[1]}"


def _what_to_do(value: Tensor) -> str:
    if value.is_floating_point():
        return (
            "It comes from the model before it was quantized: load it first and call quantize_ then, or call "
            "dequantize_(model), load, and quantize_ again."
        )
    return OTHER_CODEC
