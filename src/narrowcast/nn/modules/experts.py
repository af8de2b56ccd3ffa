"""Weights of many experts in one tensor [experts, out, in], as encoded rows.

Mixtures of experts keep their weights as 3-D Parameters of a module of their own, whose forward indexes them,
multiplies with them, or hands them to a grouped multiplication. Such a module keeps that forward: its class becomes a
subclass in which each of these weights reads as `ExpertRows`. That stands for the float tensor: it has its shape and
dtype, an index or a transpose gives another one, and a torch function that multiplies with it runs on encoded rows.
Any other function, method or operator of torch.Tensor decodes it first, so that every forward is right; the common
forwards decode no expert that they do not use. Changes in place are refused, since the rows would not follow them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from narrowcast.codecs import Codec
from narrowcast.errors import QuantizeError
from narrowcast.nn.modules.base import Encoded, as_bytes, encoded_parameters, float_class_of, float_dtype_of
from narrowcast.nn.modules.linear import linear_on_rows


class ExpertRows:
    """Encoded rows that read like the float tensor they stand for."""

    def __init__(self, data: Tensor, codec: Codec, numel: int, dtype: torch.dtype, transposed: bool = False) -> None:
        self._rows = data
        self.codec = codec
        self.dtype = dtype
        self.requires_grad = False
        self._numel = numel
        self._transposed = transposed

    @property
    def shape(self) -> torch.Size:
        *lead, rows = self._rows.shape[:-1]
        return torch.Size((*lead, self._numel, rows) if self._transposed else (*lead, rows, self._numel))

    @property
    def device(self) -> torch.device:
        return self._rows.device

    @property
    def ndim(self) -> int:
        return self._rows.dim()

    def dim(self) -> int:
        return self._rows.dim()

    def size(self, dim: int | None = None) -> torch.Size | int:
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        return self.shape.numel()

    def is_floating_point(self) -> bool:
        return True

    def decode(self) -> Tensor:
        """The float tensor."""
        weight = self.codec.decode(as_bytes(self._rows).detach(), self._numel, self.dtype)
        return weight.transpose(-2, -1) if self._transposed else weight

    @property
    def data(self) -> ExpertRows:
        return self

    def detach(self) -> ExpertRows:
        return self

    def transpose(self, dim0: int, dim1: int) -> ExpertRows | Tensor:
        last = {self.dim() - 1, self.dim() - 2}
        if {dim0 % self.dim(), dim1 % self.dim()} != last:
            return self.decode().transpose(dim0, dim1)
        return self._with(self._rows, not self._transposed)

    @property
    def mT(self) -> ExpertRows | Tensor:
        return self.transpose(-2, -1)

    @property
    def T(self) -> ExpertRows | Tensor:
        return self.transpose(-2, -1) if self.dim() == 2 else self.decode().T

    def __getitem__(self, index: Any) -> ExpertRows | Tensor:
        whole = isinstance(index, (int, slice)) or (isinstance(index, Tensor) and index.dtype in _INDICES)
        # One expert or some of them; anything finer is for a tensor to answer.
        if self.dim() == 3 and whole and (not isinstance(index, Tensor) or index.dim() <= 1):
            return self._with(self._rows.detach()[index], self._transposed)
        return self.decode()[index]

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[ExpertRows | Tensor]:
        return (self[index] for index in range(len(self)))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name.endswith("_") and hasattr(Tensor, name):
            raise _in_place(name)
        return getattr(self.decode(), name)

    def __repr__(self) -> str:
        return f"ExpertRows({self.codec.spec!r}, shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        _refuse_in_place(func, args, kwargs)
        multiply = _MULTIPLY.get(func)
        if multiply is not None:
            product = multiply(*args, **kwargs)
            if product is not None:
                return product
        return func(*tree_map(_decoded, args), **tree_map(_decoded, kwargs))

    def _with(self, data: Tensor, transposed: bool) -> ExpertRows:
        return ExpertRows(data, self.codec, self._numel, self.dtype, transposed)

    def _linear(self, x: Tensor, expert: int | None = None, bias: Tensor | None = None) -> Tensor:
        """x times the rows of one expert; bias added."""
        data = self._rows.detach() if expert is None else self._rows.detach()[expert]
        return linear_on_rows(x, data, self.codec, self._numel, bias)


_OWN = {"__torch_function__", "__torch_dispatch__", "__deepcopy__", "__setstate__", "__hash__", "__dir__"}
_OWN |= {"__subclasshook__", "__init_subclass__", "__getattribute__", "__new__", "__reduce_ex__", "__reduce__"}
_OWN |= {"__setattr__", "__delattr__", "__sizeof__"}


def _delegated(name: str) -> Callable[..., Any]:
    """An operator of torch.Tensor that goes through `__torch_function__`: `w != 0` never asks `__getattr__`."""

    def operator(self: ExpertRows, *args: Any, **kwargs: Any) -> Any:
        return self.__torch_function__(getattr(Tensor, name), (ExpertRows,), (self, *args), kwargs)

    operator.__name__ = operator.__qualname__ = name
    return operator


for _name in dir(Tensor):
    _operator = getattr(Tensor, _name)
    _inherited = _operator is getattr(object, _name, None)  # what every object has
    _defined = _name in vars(ExpertRows) or _name in _OWN
    if _name.startswith("__") and inspect.isroutine(_operator) and not _inherited and not _defined:
        setattr(ExpertRows, _name, _delegated(_name))
ExpertRows.__hash__ = object.__hash__  # type: ignore[method-assign]  # as torch.Tensor's
ExpertRows.__array_priority__ = Tensor.__array_priority__  # type: ignore[attr-defined]  # so that numpy asks here first


def _refuse_in_place(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    name = str(getattr(func, "__name__", ""))
    changes = name.endswith("_") and not name.endswith("__")
    changes = changes or name == "__setitem__" or (name.startswith("__i") and hasattr(Tensor, f"__{name[3:]}"))
    changes = changes or kwargs.get("inplace") is True
    if (changes and args and isinstance(args[0], ExpertRows)) or isinstance(kwargs.get("out"), ExpertRows):
        raise _in_place(name)


def _in_place(name: str) -> QuantizeError:
    return QuantizeError(
        f"{name}: encoded rows are not changed in place, and a change of what they decode to would be lost. Write the "
        "result to a new tensor (w = w * 2), or call narrowcast.dequantize_(model) first."
    )


_INDICES = (torch.int64, torch.int32, torch.int16, torch.int8)


def _decoded(value: Any) -> Any:
    return value.decode() if isinstance(value, ExpertRows) else value


# -- multiplications on rows: each returns None for a call that needs floats ----------------------------------------


def _linear(input: Any, weight: Any, bias: Tensor | None = None) -> Tensor | None:
    if not isinstance(input, Tensor) or not isinstance(weight, ExpertRows):
        return None
    return weight._linear(input, bias=bias) if weight.dim() == 2 and not weight._transposed else None


def _matmul(input: Any, other: Any) -> Tensor | None:
    """x W^T, written with a transposed W."""
    if not isinstance(input, Tensor) or not isinstance(other, ExpertRows) or input.dim() == 0:
        return None
    return other._linear(input) if other.dim() == 2 and other._transposed else None


def _bmm(input: Any, mat2: Any, **rest: Any) -> Tensor | None:
    """W x for several experts, each with columns of its own."""
    if rest or not isinstance(input, ExpertRows) or not isinstance(mat2, Tensor) or input._transposed:
        return None
    if input.dim() != 3 or mat2.dim() != 3 or len(input) != len(mat2) or len(input) == 0:
        return None
    return torch.stack([input._linear(x.t(), expert).t() for expert, x in enumerate(mat2)])


def _grouped_mm(mat_a: Any, mat_b: Any, *, offs: Tensor | None = None, **rest: Any) -> Tensor | None:
    """x W^T where the rows of x up to offs[e] (and behind those of the expert before) belong to expert e."""
    if not isinstance(mat_a, Tensor) or not isinstance(mat_b, ExpertRows) or not mat_b._transposed or offs is None:
        return None
    if mat_a.dim() != 2 or mat_b.dim() != 3 or any(value is not None for value in rest.values()):
        return None
    products, start = [], 0
    for expert, end in enumerate(offs.tolist()):
        if end > start:
            products.append(mat_b._linear(mat_a[start:end], expert))
        start = max(start, end)
    products.append(mat_a.new_zeros(len(mat_a) - start, mat_b.shape[2]))  # rows of no expert
    return torch.cat(products)


_MULTIPLY: dict[Callable[..., Any], Callable[..., Tensor | None]] = {
    F.linear: _linear,
    torch.matmul: _matmul,
    torch.mm: _matmul,
    Tensor.matmul: _matmul,
    Tensor.mm: _matmul,
    Tensor.__matmul__: _matmul,
    torch.bmm: _bmm,
    Tensor.bmm: _bmm,
}
for _grouped in (getattr(F, "grouped_mm", None), getattr(torch, "_grouped_mm", None)):
    if _grouped is not None:
        _MULTIPLY[_grouped] = _grouped_mm


# -- the class of the module -----------------------------------------------------------------------------------------


class Experts(Encoded):
    """A module whose 3-D weights are encoded rows; its forward is that of its float class."""

    _names: tuple[str, ...] = ()

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # No importable name leads to a class made here: pickles and copies name what it was made of.
        return _empty, (float_class_of(self), self._names), vars(self).copy()


_CLASSES: dict[tuple[type[nn.Module], tuple[str, ...]], type[Experts]] = {}


def experts_class(float_class: type[nn.Module], names: tuple[str, ...]) -> type[Experts]:
    """The subclass of `float_class` in which these weights may be encoded rows."""
    if (float_class, names) in _CLASSES:
        return _CLASSES[float_class, names]
    members: dict[str, Any] = {name: property(_reader(name)) for name in names}
    members |= {"_names": names, "__module__": float_class.__module__, "__doc__": float_class.__doc__}
    created = type(f"Encoded{float_class.__name__}", (Experts, float_class), members)
    return _CLASSES.setdefault((float_class, names), created)


def _reader(name: str) -> Callable[[Experts], Any]:
    def read(module: Experts) -> Any:
        rows, held = module._parameters[name], encoded_parameters(module).get(name)
        if held is None or rows is None:
            return rows
        return ExpertRows(rows, held.codec, held.shape[-1], float_dtype_of(module))

    return read


def _empty(float_class: type[nn.Module], names: tuple[str, ...]) -> Experts:
    target = experts_class(float_class, names)
    return target.__new__(target)
