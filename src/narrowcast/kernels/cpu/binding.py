"""The compiled CPU core, through ctypes.

One shared library serves every Python and every torch: it knows pointers, strides and a `Spec`, not tensors. ctypes
lets go of the GIL during a call. The instruction set (avx512, avx2, plain) is chosen when the library is loaded.
"""

from __future__ import annotations

import ctypes
import os
from ctypes import c_float, c_int32, c_int64, c_void_p
from pathlib import Path

import torch
from torch import Tensor

from narrowcast import kernels
from narrowcast.kernels import reference
from narrowcast.kernels.contract import Kernel
from narrowcast.kernels.cpu.batches import MATRIX_FROM, MAX_BATCH, MAX_BATCH_AVX2, TILES_FROM
from narrowcast.kernels.cpu.reinstall import reinstall_command
from narrowcast.kernels.cpu.spec import conv_sizes, spec_of
from narrowcast.kernels.cpu.threads import GRAIN, LINEAR_GRAIN, openmp, team, threads_for
from narrowcast.kernels.layout import Grid, Recipe, Scale
from narrowcast.kernels.moments import Step, second_recipe
from narrowcast.kernels.reference import search
from narrowcast.kernels.windows import LONGEST, Window

ABI = 11
ISAS = ("plain", "avx2", "avx512")
DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.float64: 3}
LIBRARY = "_narrowcast_core"

UNKNOWN = 2
"""What nc_linear_tiles and nc_linear_matrix return where there are no tiles for a format or on this CPU, and
nc_integer_conv where its input holds a NaN, or its grid is none that it knows."""

LARGE = 1 << 22
"""Bytes from which on new memory is worth a word to the kernel."""


class Native(Kernel):
    """The operations on CPU tensors.

    `linear` takes no fp64, and more than MAX_BATCH vectors only where there are tiles for the format. The bits of a
    result depend on its row, its x, the CPU, and whether vectors are few or many (TILES_FROM, MATRIX_FROM, and
    MANY_VECTORS of core/tile_x.h): not on the number of threads, nor on the other vectors of the batch.
    """

    def __init__(self, library: ctypes.CDLL, isa: int) -> None:
        self.name = f"native/{ISAS[isa]}"
        self.library, self.isa = library, isa
        self.max_batch = MAX_BATCH_AVX2 if ISAS[isa] == "avx2" else MAX_BATCH
        self.tiles_from, self.matrix_from = TILES_FROM, MATRIX_FROM
        address, i32, i64 = c_void_p, c_int32, c_int64
        summands = (address, address, i64, i64, address, i32, i64, i64)
        self._nc_fresh = library.nc_fresh
        self._nc_fresh.argtypes, self._nc_fresh.restype = (address, i64), None
        self._nc_encode = function(library, "nc_encode", address, address, i32, i64, i64, address, i64, i64, i32, i32)
        searched = (address, address, i32, i64, i64, address, c_float, address, i64, i64, address, i64, i32, i32)
        self._nc_encode_searched = function(library, "nc_encode_searched", *searched)
        self._nc_decode = function(library, "nc_decode", address, address, i64, i64, address, i32, i64, i32, i32)
        self._nc_decode_sum = function(library, "nc_decode_sum", *summands, address, i32, i32, i32)
        self._nc_decode_sum_encode = function(library, "nc_decode_sum_encode", *summands, address, i64, i32, i32)
        factors = (address, address, i64, i64, address, i32, i64, i64)
        product = (*factors, address, i32, address, i64, i32, i32)
        self._nc_linear = function(library, "nc_linear", *product)
        self._nc_linear_tiles = function(library, "nc_linear_tiles", *product)
        self._nc_linear_matrix = function(library, "nc_linear_matrix", *product)
        slices = (address, address, address, i32, i64, i64, i64)
        self._nc_fake_quantize = function(library, "nc_fake_quantize", *slices, *(address,) * 4, i32, i32, i32, i32)
        matrices = (address, i64, i64, i64, address, i64, i64)
        self._nc_integer = function(library, "nc_integer_linear", *matrices, address, i64, i32, i32)
        image = (address, address, address, address, address, i32, i32)
        self._nc_integer_conv = function(library, "nc_integer_conv", *image, *(address,) * 4, i32, i32)
        moments = (address, address, address, address, i32, i64, address, address)
        self._nc_adamw = function(library, "nc_adamw", *moments, i64, i32, address, i32, i32)

    def fresh(self, out: Tensor) -> None:
        if out.nbytes >= LARGE:
            self._nc_fresh(out.data_ptr(), out.nbytes)

    def _encode(self, out: Tensor, rows: Tensor, recipe: Recipe, seed: int) -> None:
        count, numel = rows.shape
        if elements := count * numel:
            rows, stride = _contiguous(rows)
            source, target = (rows.data_ptr(), DTYPES[rows.dtype], stride, count), (out.data_ptr(), out.stride()[0])
            check(self._nc_encode(spec_of(recipe, numel), *source, *target, seed, threads_for(elements), self.isa))

    def _encode_searched(
        self, out: Tensor, rows: Tensor, importance: Tensor | None, gain: float, recipe: Recipe
    ) -> None:
        count, numel = rows.shape
        if recipe.format.scale == Scale.NONE or not count * numel:
            self._encode(out, rows, recipe, 0)
            return
        rows, stride = _contiguous(rows)
        source = rows.data_ptr(), DTYPES[rows.dtype], stride, count
        tried = search.candidates(recipe.format)
        factors = (c_float * len(tried))(*tried)
        weights = None if importance is None else importance.data_ptr()
        how = weights, gain, ctypes.addressof(factors), len(tried), search.REFINEMENTS
        target = out.data_ptr(), out.stride()[0]
        threads = threads_for((1 + len(tried)) * count * numel)
        check(self._nc_encode_searched(spec_of(recipe, numel), *source, *how, *target, threads, self.isa))

    def _decode(self, out: Tensor, data: Tensor, recipe: Recipe) -> None:
        count, numel = out.shape
        if elements := count * numel:
            data, stride = _contiguous(data)
            what = spec_of(recipe, numel)
            target = out.data_ptr(), DTYPES[out.dtype], out.stride()[0]
            check(self._nc_decode(what, data.data_ptr(), stride, count, *target, threads_for(elements), self.isa))

    def _decode_sum(
        self, out: Tensor, data: Tensor, recipe: Recipe, own: Tensor | None, own_rank: int, divisor: int
    ) -> None:
        numel, ranks = out.numel(), data.shape[0]
        if numel:
            data, stride = _contiguous(data)
            summands = _summands(data, stride, numel, recipe, own, own_rank, divisor)
            threads = threads_for(numel * ranks)
            check(self._nc_decode_sum(*summands, out.data_ptr(), DTYPES[out.dtype], threads, self.isa))

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
        if numel:
            data, stride = _contiguous(data)
            summands = _summands(data, stride, numel, recipe, own, own_rank, divisor)
            threads = threads_for(numel * data.shape[0])
            check(self._nc_decode_sum_encode(*summands, out.data_ptr(), seed, threads, self.isa))

    def _linear(self, out: Tensor, x: Tensor, data: Tensor, recipe: Recipe, bias: Tensor | None) -> bool:
        batch, numel = x.shape
        if x.dtype not in self.max_batch or numel == 0:
            return False
        (x, x_stride), (data, stride) = _contiguous(x), _contiguous(data)
        address, dtype = None, 0
        if bias is not None:
            bias = bias.contiguous()
            address, dtype = bias.data_ptr(), DTYPES[bias.dtype]
        rows = spec_of(recipe, numel), data.data_ptr(), stride, data.shape[0]
        vectors = x.data_ptr(), DTYPES[x.dtype], x_stride, batch
        threads = team(data.numel() * batch, LINEAR_GRAIN)
        given = *rows, *vectors, address, dtype, out.data_ptr(), out.stride()[0], threads, self.isa
        failed = self._nc_linear_matrix(*given) if batch >= self.matrix_from else UNKNOWN
        if failed == UNKNOWN and batch >= self.tiles_from[x.dtype]:
            failed = self._nc_linear_tiles(*given)
        if failed == UNKNOWN and batch <= self.max_batch[x.dtype]:
            failed = self._nc_linear(*given)
        if failed != UNKNOWN:
            check(failed)
        return failed != UNKNOWN

    def _fake_quantize(self, out: Tensor, x: Tensor, scale: Tensor, grid: Grid) -> None:
        self._launch_fake(out, None, None, x, scale, grid)

    def _fake_quantize_backward(
        self, dx: Tensor, dscale: Tensor, grad: Tensor, x: Tensor, scale: Tensor, grid: Grid
    ) -> None:
        self._launch_fake(dx, dscale, grad, x, scale, grid)

    def _launch_fake(
        self, out: Tensor, of_scale: Tensor | None, grad: Tensor | None, x: Tensor, scale: Tensor, grid: Grid
    ) -> None:
        slices = x.data_ptr(), grad.data_ptr() if grad is not None else None, out.data_ptr(), DTYPES[x.dtype], *x.shape
        scales = scale.data_ptr(), of_scale.data_ptr() if of_scale is not None else None
        levels = grid.levels.data_ptr(), grid.thresholds.data_ptr(), len(grid.levels), grid.uniform
        check(self._nc_fake_quantize(*slices, *scales, *levels, team(x.numel(), GRAIN), self.isa))

    def _integer_linear(self, out: Tensor, x: Tensor, weight: Tensor) -> None:
        (x, x_stride), (weight, stride) = _contiguous(x), _contiguous(weight)
        left = x.data_ptr(), x_stride, *x.shape
        right = weight.data_ptr(), stride, weight.shape[0]
        threads = team(weight.numel() * x.shape[0], LINEAR_GRAIN)
        check(self._nc_integer(*left, *right, out.data_ptr(), out.stride()[0], threads, self.isa))

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
        sizes, words = conv_sizes(x.shape, weight.shape, out.shape, window)
        levels = grid.levels.data_ptr(), grid.thresholds.data_ptr(), grid.levels.numel(), grid.uniform
        rows = weight.data_ptr(), factor.data_ptr(), None if bias is None else bias.data_ptr()
        threads = team(out.numel() * words, LINEAR_GRAIN)
        failed = UNKNOWN
        if 4 * words <= LONGEST:
            image = x.data_ptr(), sizes, scale.data_ptr()
            failed = self._nc_integer_conv(*image, *levels, *rows, out.data_ptr(), threads, self.isa)
        if failed == UNKNOWN:  # slow and rare: a NaN marks every window that holds it, and longer sums take int64
            out.copy_(reference.integer_conv(x, scale, grid, weight, factor, bias, window))
        else:
            check(failed)

    def _adamw(
        self,
        parameter: Tensor,
        first: Tensor,
        second: Tensor,
        grad: Tensor,
        recipe: Recipe,
        seed: int,
        takes_momentum: bool,
        step: Step,
    ) -> None:
        rows, numel = parameter.shape
        if rows and numel:
            formats = spec_of(recipe, numel), spec_of(second_recipe(recipe.format, parameter.device), numel)
            floats = parameter.data_ptr(), grad.data_ptr(), DTYPES[parameter.dtype], rows
            held = first.data_ptr(), second.data_ptr(), seed, takes_momentum, (c_float * len(step))(*step)
            check(self._nc_adamw(*formats, *floats, *held, team(rows * numel, GRAIN), self.isa))


def load(isa: str = "") -> tuple[Native | None, str]:
    """The core for this CPU (or for `isa`), or None and the reason why there is none."""
    path = find()
    if path is None:
        return None, (
            "its native core was not built when it was installed, because there was no C++ compiler. "
            f"Install one (g++ or clang++) and run: {reinstall_command()}"
        )
    library = ctypes.CDLL(str(path))
    if library.nc_abi() != ABI:
        return None, f"{path} was built for another version. Run: {reinstall_command()}"
    library.nc_team.argtypes, library.nc_team.restype = (c_void_p,), None
    library.nc_team(openmp())
    best = library.nc_best_isa()
    if isa and (isa not in ISAS or ISAS.index(isa) > best):
        return None, f"NARROWCAST_KERNEL asks for native/{isa}, and this CPU has {', '.join(ISAS[: best + 1])}."
    return Native(library, ISAS.index(isa) if isa else best), ""


def find() -> Path | None:
    """The built library: the one that NARROWCAST_CORE names, else the one beside this file or installed with it."""
    named = os.environ.get("NARROWCAST_CORE")
    if named:
        return Path(named)
    built = (path for folder in kernels.__path__ for path in sorted(Path(folder).glob(f"{LIBRARY}*")))
    return next(built, None)


def function(library: ctypes.CDLL, name: str, *arguments: type) -> ctypes._NamedFuncPointer:
    function = getattr(library, name)
    function.argtypes = arguments
    function.restype = c_int32
    return function  # type: ignore[no-any-return]


def _summands(
    data: Tensor, stride: int, numel: int, recipe: Recipe, own: Tensor | None, own_rank: int, divisor: int
) -> tuple[object, ...]:
    """The arguments of a sum. Addresses only: the caller keeps the tensors."""
    address, dtype = (None, 0) if own is None else (own.data_ptr(), DTYPES[own.dtype])
    return spec_of(recipe, numel), data.data_ptr(), stride, data.shape[0], address, dtype, own_rank, divisor


def _contiguous(matrix: Tensor) -> tuple[Tensor, int]:
    """A matrix whose rows lie in one piece each, and the elements from one to the next."""
    first, second = matrix.stride()
    if second == 1:
        return matrix, first
    matrix = matrix.contiguous()
    return matrix, matrix.shape[1]


def check(failed: int) -> None:
    if failed:
        raise MemoryError("narrowcast's native core ran out of memory")
