"""All layers of a decoder for one new position of each sequence, in one call of the compiled core (layers_api.cpp).

The core does what `Layer.advance` (generate/decoder.py) would do with `Native` and `Between`, call by call: the same
functions in the same order, and so the same bits. What is saved is Python between them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int64, c_void_p
from typing import NamedTuple

import torch
from torch import Tensor

from narrowcast.kernels.cpu.between import cache_layout
from narrowcast.kernels.cpu.binding import DTYPES, Native, check, function
from narrowcast.kernels.cpu.spec import spec_of
from narrowcast.kernels.cpu.threads import GRAIN, LINEAR_GRAIN, team
from narrowcast.kernels.layout import Recipe


class Product(NamedTuple):
    """x W^T + bias, with W as encoded rows."""

    rows: Tensor
    recipe: Recipe
    numel: int
    bias: Tensor | None


class LayerParts(NamedTuple):
    """The tensors of one layer. `project` and `widen` are one product, or several that share their input."""

    norms: tuple[tuple[Tensor, float], tuple[Tensor, float]]
    project: Sequence[Product]
    out: Product
    widen: Sequence[Product]
    narrow: Product
    keys: Tensor
    values: Tensor

    def products(self) -> list[Product]:
        return [*self.project, self.out, *self.widen, self.narrow]


class Rows(ctypes.Structure):
    """Mirrors `Rows` in core/layers_api.cpp."""

    _fields_ = (
        ("spec", c_void_p),
        ("data", c_void_p),
        ("stride", c_int64),
        ("rows", c_int64),
        ("bias", c_void_p),
        ("bias_dtype", c_int64),
    )


class Norm(ctypes.Structure):
    """Mirrors `Norm` in core/layers_api.cpp."""

    _fields_ = (("weight", c_void_p), ("eps", c_float))


class Layer(ctypes.Structure):
    """Mirrors `Layer` in core/layers_api.cpp."""

    _fields_ = (
        ("norms", Norm * 2),
        ("project", Rows * 3),
        ("out", Rows),
        ("widen", Rows * 2),
        ("narrow", Rows),
        ("keys", c_void_p),
        ("values", c_void_p),
    )


class Step(ctypes.Structure):
    """Mirrors `Step` in core/layers_api.cpp."""

    _fields_ = (
        ("dtype", c_int64),
        ("batch", c_int64),
        ("width", c_int64),
        ("hidden", c_int64),
        ("cache", c_int64 * 8),
        ("turns", c_void_p),
        ("places", c_void_p),
        ("tiles_from", c_int64),
        ("matrix_from", c_int64),
        ("linear_grain", c_int64),
        ("attend_threads", c_int64),
        ("threads", c_int64),
        ("isa", c_int64),
    )


class Layers:
    """The layers of one decoder with the cache of one generation. Tensors are read where they lay when it was made."""

    def __init__(self, kernel: Native, dtype: torch.dtype, layers: Sequence[LayerParts]) -> None:
        first = layers[0]
        batch, key_heads, positions, size = first.keys.shape
        self.dtype, self._batch, self._kept = dtype, batch, [_alias(layer) for layer in layers]
        """`_kept` and `_specs`: the core has their addresses, so they must stay."""
        self._specs = [spec_of(one.recipe, one.numel) for layer in layers for one in layer.products()]
        self._layers = (Layer * len(layers))(*(_described(layer) for layer in self._kept))
        self._cached = batch * key_heads * positions * size
        width, hidden, queries = first.out.rows.shape[0], first.narrow.numel, first.out.numel
        self._step = Step(DTYPES[dtype], batch, width, hidden, cache_layout(first.keys, queries))
        self._step.linear_grain, self._step.isa = LINEAR_GRAIN, kernel.isa
        self._step.tiles_from, self._step.matrix_from = kernel.tiles_from[dtype], kernel.matrix_from
        self._nc_layers = function(kernel.library, "nc_layers", c_void_p, c_void_p, c_int64, c_void_p, c_void_p)

    def __call__(self, x: Tensor, at: Tensor, turns: Tensor) -> tuple[Tensor, Tensor]:
        """x [batch, width] through all layers; what comes out is the sum of the two terms."""
        x, delta = x.clone(memory_format=torch.contiguous_format), torch.empty(x.shape, dtype=x.dtype, device="cpu")
        step = self._step
        step.turns, step.places = turns.data_ptr(), at.data_ptr()
        step.threads, step.attend_threads = torch.get_num_threads(), team(self._cached, GRAIN)
        described = ctypes.addressof(step), ctypes.addressof(self._layers), len(self._layers)
        check(self._nc_layers(*described, x.data_ptr(), delta.data_ptr()))
        return x, delta


def _alias(layer: LayerParts) -> LayerParts:
    """The same memory, kept also where a parameter is given another."""

    def product(one: Product) -> Product:
        return one._replace(rows=one.rows.detach(), bias=None if one.bias is None else one.bias.detach())

    return LayerParts(
        ((layer.norms[0][0].detach(), layer.norms[0][1]), (layer.norms[1][0].detach(), layer.norms[1][1])),
        [product(one) for one in layer.project],
        product(layer.out),
        [product(one) for one in layer.widen],
        product(layer.narrow),
        layer.keys,
        layer.values,
    )


def _described(layer: LayerParts) -> Layer:
    described = Layer()
    for place, (weight, eps) in enumerate(layer.norms):
        described.norms[place] = Norm(weight.data_ptr(), eps)
    for place, product in enumerate(layer.project):
        described.project[place] = _rows_of(product)
    for place, product in enumerate(layer.widen):
        described.widen[place] = _rows_of(product)
    described.out, described.narrow = _rows_of(layer.out), _rows_of(layer.narrow)
    described.keys, described.values = layer.keys.data_ptr(), layer.values.data_ptr()
    return described


def _rows_of(product: Product) -> Rows:
    spec = ctypes.cast(spec_of(product.recipe, product.numel), c_void_p).value  # type: ignore[arg-type]
    bias = product.bias
    address, dtype = (None, 0) if bias is None else (bias.data_ptr(), DTYPES[bias.dtype])
    return Rows(spec, product.rows.data_ptr(), product.rows.stride(0), product.rows.shape[0], address, dtype)
