"""Triton: the operations on CUDA tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from narrowcast.kernels.contract import Kernel
from narrowcast.kernels.cuda import choose, signs, sums
from narrowcast.kernels.layout import Grid, Recipe
from narrowcast.kernels.triton import columns, fake_quantize, integer, linear
from narrowcast.kernels.triton.codes import INTERPRETED
from narrowcast.kernels.triton.moments import adamw
from narrowcast.kernels.triton.rows import decode, decode_sum_encode, encode
from narrowcast.kernels.triton.search import encode_searched
from narrowcast.kernels.windows import Window


class Triton(Kernel):
    """The operations on CUDA tensors (on CPU tensors in Triton's interpreter)."""

    name = "triton"

    def runs(self, operation: str, recipe: Recipe, device: torch.device) -> str:
        modules = {"linear": (choose,), "decode_sum_encode": (sums, signs)}.get(operation, ())
        in_cuda = not INTERPRETED and any(module.takes(recipe, device) for module in modules)
        return "cuda" if in_cuda else self.name

    def _encode(self, out: Tensor, rows: Tensor, recipe: Recipe, seed: int) -> None:
        if rows.numel() == 0:
            return
        rows = rows if rows.shape[1] == 1 or rows.stride(1) == 1 else rows.contiguous()
        with _writable(out, 16) as target:
            encode(target, rows, recipe, seed)

    def _encode_searched(
        self, out: Tensor, rows: Tensor, importance: Tensor | None, gain: float, recipe: Recipe
    ) -> None:
        if rows.numel() == 0:
            return
        rows = rows if rows.shape[1] == 1 or rows.stride(1) == 1 else rows.contiguous()
        with _writable(out, 16) as target:
            encode_searched(target, rows, importance, gain, recipe)

    def _decode(self, out: Tensor, data: Tensor, recipe: Recipe) -> None:
        if out.numel() == 0:
            return
        with _writable(out, 1) as target:
            decode(target, data, recipe, 1, None, -1, 1)

    def _decode_sum(
        self, out: Tensor, data: Tensor, recipe: Recipe, own: Tensor | None, own_rank: int, divisor: int
    ) -> None:
        if out.numel() == 0:
            return
        rank = own_rank if own is not None else -1
        with _writable(out, 1) as target:
            decode(target.view(1, -1), data, recipe, len(data), own, rank, divisor)

    def _decode_sum_encode(
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
        if numel == 0:
            return
        rank = own_rank if own is not None else -1
        with _writable(out, 16) as target:
            told = (target, data, numel, recipe, own, rank, divisor)
            if not INTERPRETED and (sums.decode_sum_encode(*told) or signs.decode_sum_encode(*told)):
                return
            if decode_sum_encode(target, data, numel, recipe, own, rank, divisor, seed):
                return
        total = torch.empty(numel, dtype=torch.float32, device=data.device)
        self.decode_sum(total, data, recipe, own, own_rank, divisor)
        self.encode(out.view(1, -1), total.view(1, -1), recipe, seed)

    def _linear(self, out: Tensor, x: Tensor, data: Tensor, recipe: Recipe, bias: Tensor | None) -> bool:
        if x.shape[1] == 0:
            return False  # rows without elements have no scales that a kernel could read
        if not INTERPRETED and choose.linear(out, x, data, recipe, bias):
            return True
        return linear.linear(out, x, data, recipe, bias)

    def _fake_quantize(self, out: Tensor, x: Tensor, scale: Tensor, grid: Grid) -> None:
        fake_quantize.fake_quantize(out, x, scale, grid)

    def _fake_quantize_backward(
        self, dx: Tensor, dscale: Tensor, grad: Tensor, x: Tensor, scale: Tensor, grid: Grid
    ) -> None:
        fake_quantize.fake_quantize_backward(dx, dscale, grad, x, scale, grid)

    def _adamw(self, parameter: Tensor, first: Tensor, second: Tensor, grad: Tensor, *how: Any) -> None:
        if parameter.numel():
            with _writable(first, 16) as rows, _writable(second, 16) as others:
                for target, held in ((rows, first), (others, second)):
                    if target is not held:
                        target.copy_(held)
                adamw(parameter, rows, others, grad, *how)

    def round_columns(
        self,
        weight: Tensor,
        factor: Tensor,
        scales: Tensor | None,
        zeros: Tensor | None,
        blocks: Tensor,
        recipe: Recipe,
    ) -> tuple[Tensor, Tensor]:
        if scales is None or not columns.takes(weight):
            return super().round_columns(weight, factor, scales, zeros, blocks, recipe)
        return columns.round_columns(weight, factor, scales, zeros, blocks, recipe)

    def choose_columns(
        self,
        values: Tensor,
        slope: Tensor,
        moments: Tensor,
        scales: Tensor | None,
        zeros: Tensor | None,
        blocks: Tensor,
        recipe: Recipe,
    ) -> tuple[Tensor, Tensor]:
        if scales is None or not columns.takes(values) or not columns.takes(slope):
            return super().choose_columns(values, slope, moments, scales, zeros, blocks, recipe)
        return columns.choose_columns(values, slope, moments, scales, zeros, blocks, recipe)

    def _integer_linear(self, out: Tensor, x: Tensor, weight: Tensor) -> None:
        integer.integer_linear(out, x, weight)

    def _integer_conv(
        self,
        out: Tensor,
        x: Tensor,
        scale: Tensor,
        grid: Grid,
        weight: Tensor,
        factor: Tensor,
        bias: Tensor | None,
        window: Window,
    ) -> None:
        values = torch.empty_like(x)
        fake_quantize.fake_quantize(values.view(1, 1, -1), x.view(1, 1, -1), scale, grid)
        integer.integer_conv(out, (values / scale).round(), grid.levels[-1], weight, factor, bias, window)


@contextlib.contextmanager
def _writable(out: Tensor, alignment: int) -> Iterator[Tensor]:
    """`out`, or a contiguous copy of its shape that starts at a multiple of so many bytes and is copied back."""
    fits = out.is_contiguous() and out.data_ptr() % alignment == 0
    target = out if fits else torch.empty_like(out, memory_format=torch.contiguous_format)
    yield target
    if target is not out:
        out.copy_(target)
