"""Modules that hold weights as encoded rows.

An `Encoded` module keeps a weight as a uint8 Parameter of shape [..., row_bytes] under the name that the float weight
had, so that a state dict keeps its keys; `_held` says which of its parameters are rows, in which codec, and what they
stand for. It promises:

- The dtype of its floats follows `.to(...)`, `.half()`, `.type(...)` and the like, though no float weight is left to
  follow them. Rows stay bytes whatever the module is cast to; rows that are none any more are refused.
- A state dict says what its rows are (extra_state.py). One of another layout, codec or shape is refused with the
  reason, before anything of this module is loaded.
- A float module becomes an encoded one, and the other way round, by a change of its class, in place: names, hooks,
  biases, buffers and whoever holds a reference to it do not notice.

Rows are not trained: they never require a gradient.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from narrowcast.codecs import Codec, checks
from narrowcast.codecs.payload import Encoding
from narrowcast.codecs.rules import CodecLike
from narrowcast.errors import DtypeError, QuantizeError, StateDictError
from narrowcast.nn import state as extra_state

OTHER_CODEC = (
    "It was quantized with another codec, or is another model's: call quantize_ with the codec (and rules) it was "
    "saved with, or use narrowcast.save and narrowcast.load, which keep the codec of every weight in the file."
)


class Held(NamedTuple):
    """What the rows of one parameter stand for, and what its float weight is to be again."""

    codec: Codec
    shape: torch.Size
    """Of the weight whose rows are encoded: of its transpose, where `transposed`."""
    transposed: bool = False
    """Whether the float module keeps its weight as [in, out]."""
    trained: bool = True
    """Whether the float weight required a gradient."""

    def decode(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """The weight of these rows, row by row."""
        numel = _row_numel(self.shape, rows.dim() - 1)
        return self.codec.decode(as_bytes(rows).detach(), numel, dtype).view(self.shape)

    def facts(self) -> list[Any]:
        """What a state dict says about these rows."""
        return [self.codec.spec, list(self.shape)]


class Encoded(nn.Module):
    """A module some of whose parameters are encoded rows."""

    float_class: type[nn.Module] = nn.Module
    """The class of torch.nn that this one stands for."""

    _held: dict[str, Held]
    _float_dtype: torch.dtype
    _float_class: type[nn.Module]

    @classmethod
    def from_float(cls: type[EncodedModule], module: nn.Module, codec: CodecLike) -> EncodedModule:
        """An encoded module with the weights of a float one, which is left as it is; biases are shared."""
        from narrowcast.nn.quantize import quantize_  # which is built on this

        made, why = None, ""
        if isinstance(module, cls.float_class):
            made = shallow_copy(module)
            skips = quantize_(made, codec).skips
            why = f" ({skips[0].reason})" if skips else ""
        if not isinstance(made, cls):
            raise QuantizeError(
                f"module: {cls.__name__}.from_float takes a torch.nn.{cls.float_class.__name__}, got "
                f"{type(module).__name__}{why}. narrowcast.quantize_(model, codec) finds the right class by itself."
            )
        return made

    def dequantize(self) -> nn.Module:
        """The float module, with the decoded weights; this one is left as it is. Biases are shared."""
        from narrowcast.nn.quantize import dequantize_  # which is built on this

        return dequantize_(shallow_copy(self))

    def _leave(self) -> None:
        """Let go of what only the encoded form needs; called before a module becomes a float one again."""

    def _encoding(self, name: str) -> Encoding:
        held = self._held[name]
        return Encoding(held.codec, held.shape, self._float_dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Encoded:
        rows = {id(self._parameters.get(name)) for name in self._held}
        super()._apply(lambda t: keep_dtype(fn, t) if id(t) in rows else fn(t), recurse)  # type: ignore[no-untyped-call]
        # What `fn` makes of an empty tensor tells the dtype; a buffer for that would be in everybody's way.
        dtype = fn(torch.empty(0, dtype=self._float_dtype, device="cpu")).dtype
        if dtype in checks.FLOATS:
            self._float_dtype = dtype
        return self

    def get_extra_state(self) -> Tensor:
        return extra_state.pack({name: held.facts() for name, held in self._held.items()})

    def set_extra_state(self, state: Any) -> None:
        check_facts(self, extra_state.unpack(state, extra_state.KEY), "")

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        check_rows(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *rest)
        extra_state.not_missing(rest[2], prefix)


EncodedModule = TypeVar("EncodedModule", bound=Encoded)


class OneWeight(Encoded):
    """An encoded module with one weight, called `weight`, and perhaps a bias."""

    weight: nn.Parameter

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


# -- from float to encoded and back, in place ------------------------------------------------------------------------


def become(module: nn.Module, target: type[Encoded], dtype: torch.dtype) -> None:
    """Make a float module an instance of `target` that holds no rows yet."""
    if isinstance(module, Encoded):
        return
    vars(module).update(_held={}, _float_dtype=dtype, _float_class=type(module))
    module.__class__ = target


def hold(module: nn.Module, name: str, rows: nn.Parameter, held: Held) -> None:
    """Put rows in the place of a weight."""
    assert isinstance(module, Encoded)
    module._parameters[name] = rows
    module._held[name] = held


def restore(module: Encoded, decoded: dict[int, nn.Parameter]) -> None:
    """Make an encoded module a float one again. `decoded` remembers weights by their rows, so that ties stay tied."""
    for name, held in module._held.items():
        rows = module._parameters[name]
        assert rows is not None
        if id(rows) not in decoded:
            weight = held.decode(rows, module._float_dtype)
            weight = weight.t().contiguous() if held.transposed else weight
            decoded[id(rows)] = nn.Parameter(weight, requires_grad=held.trained)
        module._parameters[name] = decoded[id(rows)]
    module._leave()
    module.__class__ = module._float_class  # type: ignore[assignment]
    for name in ("_held", "_float_dtype", "_float_class"):
        del vars(module)[name]


def as_bytes(rows: Tensor) -> Tensor:
    """Rows, if they still are: the one place that looks, for every module."""
    if rows.dtype is not torch.uint8:
        raise DtypeError(
            f"weight: encoded rows are uint8, and these are {str(rows.dtype).removeprefix('torch.')}. Something cast "
            "the bytes themselves (p.data = p.data.float(), for example). To change the dtype of a model's floats call "
            "model.to(dtype), which leaves rows alone; to get these back, load them again."
        )
    return rows


def keep_dtype(fn: Callable[..., Any], tensor: Tensor) -> Tensor:
    """What `fn` (of `Module._apply`) makes of a tensor, but for its dtype."""
    made: Tensor = fn(tensor)
    return made if made.dtype == tensor.dtype else tensor.to(made.device)


def as_parameter(rows: Tensor) -> nn.Parameter:
    return nn.Parameter(rows, requires_grad=False)


def shallow_copy(module: nn.Module) -> nn.Module:
    """Other modules, down to the last child, that hold the same parameters."""
    made = copy.copy(module)
    for name, value in vars(made).items():
        if isinstance(value, (dict, set)):
            vars(made)[name] = value.copy()
    made._modules = {name: child and shallow_copy(child) for name, child in module._modules.items()}
    return made


# -- state dicts -----------------------------------------------------------------------------------------------------


def check_rows(module: Encoded, state_dict: Mapping[str, Any], prefix: str) -> None:
    """Refuse a state dict in which this module's rows are floats, or rows of another width, codec or weight."""
    for name, held in module._held.items():
        found, rows = state_dict.get(prefix + name), module._parameters[name]
        if not isinstance(found, Tensor) or rows is None:
            continue
        if found.dtype == rows.dtype and found.shape == rows.shape:
            continue
        raise StateDictError(
            f"state_dict[{prefix + name!r}]: this weight is held as uint8 rows {list(rows.shape)} of codec "
            f"{held.codec.spec!r}, the state dict has {str(found.dtype).removeprefix('torch.')} {list(found.shape)}. "
            + _what_to_do(found)
        )
    facts = extra_state.facts_in(state_dict, prefix)
    if facts is not None:
        check_facts(module, facts, prefix)


def check_facts(module: Encoded, facts: Mapping[str, Any], prefix: str) -> None:
    """Refuse rows that a state dict describes otherwise than this module does."""
    for name in {**module._held, **facts}:
        here, there = (module._held[name].facts() if name in module._held else None), facts.get(name)
        if here != there:
            raise StateDictError(
                f"state_dict[{prefix + name!r}]: this weight is held as {_described(here)}, the state dict has "
                f"{_described(there)}. {OTHER_CODEC}"
            )


def _described(facts: list[Any] | None) -> str:
    return "floats" if facts is None else f"rows of codec {facts[0]!r} for a weight of {facts[1]}"


def _what_to_do(found: Tensor) -> str:
    if found.is_floating_point():
        return (
            "It comes from the model before it was quantized: load it first and call quantize_ then, or call "
            "dequantize_(model), load, and quantize_ again."
        )
    return OTHER_CODEC


def _row_numel(shape: torch.Size, lead: int) -> int:
    numel = 1
    for size in shape[lead:]:
        numel *= size
    return numel
