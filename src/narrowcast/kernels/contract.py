"""The operations that a machine provides, and the reference behind the same interface.

A kernel subclasses `Kernel` and gives the operations with an underscore. Those write into `out` and may trust what they
are given: callers get to them through the ones without, which check first (arguments.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from narrowcast.kernels import arguments, reference
from narrowcast.kernels.layout import Grid, Recipe


class Kernel:
    """The operations on one kind of machine, writing into `out`. `numel` is out's own where not given."""

    name: str

    def fresh(self, out: Tensor) -> None:
        """A hint: `out` is new memory, about to be written whole."""

    def new_encoded(self, rows: Tensor, recipe: Recipe, seed: int) -> Tensor:
        """`encode` into new memory: there is no `out` to check."""
        out = torch.empty(arguments.encoded_shape(rows, recipe), dtype=torch.uint8, device=rows.device)
        self.fresh(out)
        self._encode(out, rows, recipe, seed)
        return out

    def new_decoded(self, data: Tensor, numel: int, dtype: torch.dtype, recipe: Recipe) -> Tensor:
        """`decode` into new memory."""
        out = torch.empty(arguments.decoded_shape(data, numel, dtype, recipe), dtype=dtype, device=data.device)
        self.fresh(out)
        self._decode(out, data, recipe)
        return out

    def encode(self, out: Tensor, rows: Tensor, recipe: Recipe, seed: int) -> None:
        arguments.encode(out, rows, recipe)
        self._encode(out, rows, recipe, seed)

    def decode(self, out: Tensor, data: Tensor, recipe: Recipe) -> None:
        arguments.decode(out, data, recipe)
        self._decode(out, data, recipe)

    def decode_sum(
        self, out: Tensor, data: Tensor, recipe: Recipe, own: Tensor | None, own_rank: int, divisor: int
    ) -> None:
        arguments.decode_sum(out, data, recipe, own, own_rank, divisor)
        self._decode_sum(out, data, recipe, own, own_rank, divisor)

    def reduce(
        self,
        out: Tensor,
        data: Tensor,
        numel: int,
        recipe: Recipe,
        own: Tensor | None,
        own_rank: int,
        divisor: int,
        seed: int,
    ) -> None:
        arguments.reduce(out, data, numel, recipe, own, own_rank, divisor)
        self._reduce(out, data, numel, recipe, own, own_rank, divisor, seed)

    def linear(self, out: Tensor, x: Tensor, data: Tensor, recipe: Recipe, bias: Tensor | None) -> bool:
        """x [batch, numel] times the rows of `data`, plus `bias`, into `out` [batch, rows]; False: not this one."""
        arguments.linear(out, x, data, recipe, bias)
        return self._linear(out, x, data, recipe, bias)

    # x, out and gradients are contiguous [outer, channels, inner]; scales are fp32 [channels]; nothing is empty.
    def fake_quantize(self, out: Tensor, x: Tensor, scale: Tensor, grid: Grid) -> None:
        arguments.fake_quantize(out, x, scale, grid)
        self._fake_quantize(out, x, scale, grid)

    def fake_gradients(self, dx: Tensor, dscale: Tensor, grad: Tensor, x: Tensor, scale: Tensor, grid: Grid) -> None:
        arguments.fake_gradients(dx, dscale, grad, x, scale, grid)
        self._fake_gradients(dx, dscale, grad, x, scale, grid)

    def integer_linear(self, out: Tensor, x: Tensor, weight: Tensor) -> None:
        arguments.integer_linear(out, x, weight)
        self._integer_linear(out, x, weight)

    # -- what a machine gives -----------------------------------------------------------------------------------------

    def _encode(self, out: Tensor, rows: Tensor, recipe: Recipe, seed: int) -> None:
        raise NotImplementedError

    def _decode(self, out: Tensor, data: Tensor, recipe: Recipe) -> None:
        raise NotImplementedError

    def _decode_sum(
        self, out: Tensor, data: Tensor, recipe: Recipe, own: Tensor | None, own_rank: int, divisor: int
    ) -> None:
        raise NotImplementedError

    def _reduce(
        self,
        out: Tensor,
        data: Tensor,
        numel: int,
        recipe: Recipe,
        own: Tensor | None,
        own_rank: int,
        divisor: int,
        seed: int,
    ) -> None:
        raise NotImplementedError

    def _linear(self, out: Tensor, x: Tensor, data: Tensor, recipe: Recipe, bias: Tensor | None) -> bool:
        raise NotImplementedError

    def _fake_quantize(self, out: Tensor, x: Tensor, scale: Tensor, grid: Grid) -> None:
        raise NotImplementedError

    def _fake_gradients(self, dx: Tensor, dscale: Tensor, grad: Tensor, x: Tensor, scale: Tensor, grid: Grid) -> None:
        raise NotImplementedError

    def _integer_linear(self, out: Tensor, x: Tensor, weight: Tensor) -> None:
        raise NotImplementedError


class Reference(Kernel):
    """The reference behind the interface of the compiled kernels."""

    name = "reference"

    def _encode(self, out: Tensor, rows: Tensor, recipe: Recipe, seed: int) -> None:
        out.copy_(reference.encode(rows, recipe, seed))

    def _decode(self, out: Tensor, data: Tensor, recipe: Recipe) -> None:
        out.copy_(reference.decode(data, out.shape[1], recipe, out.dtype))

    def _decode_sum(
        self, out: Tensor, data: Tensor, recipe: Recipe, own: Tensor | None, own_rank: int, divisor: int
    ) -> None:
        out.copy_(reference.decode_sum(data, len(out), recipe, own, own_rank, divisor, out.dtype))

    def _reduce(
        self,
        out: Tensor,
        data: Tensor,
        numel: int,
        recipe: Recipe,
        own: Tensor | None,
        own_rank: int,
        divisor: int,
        seed: int,
    ) -> None:
        out.copy_(reference.reduce(data, numel, recipe, own, own_rank, divisor, seed))

    def _linear(self, out: Tensor, x: Tensor, data: Tensor, recipe: Recipe, bias: Tensor | None) -> bool:
        out.copy_(reference.linear(x, data, recipe, bias))
        return True

    def _fake_quantize(self, out: Tensor, x: Tensor, scale: Tensor, grid: Grid) -> None:
        out.copy_(reference.fake_quantize(x, scale, grid))

    def _fake_gradients(self, dx: Tensor, dscale: Tensor, grad: Tensor, x: Tensor, scale: Tensor, grid: Grid) -> None:
        for out, found in zip((dx, dscale), reference.fake_quantize_backward(grad, x, scale, grid), strict=True):
            out.copy_(found)

    def _integer_linear(self, out: Tensor, x: Tensor, weight: Tensor) -> None:
        out.copy_(reference.integer_linear(x, weight))
