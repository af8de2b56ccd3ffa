"""Which kernel of this folder multiplies by encoded rows.

    ring.cu          4- and 8-bit codes, one row of x, on Hopper (ring.py)
    dot.cu, tile.cu  the same elsewhere and for other sizes, and a few rows of x (cuts.py)
    slices.cu        more rows of x, up to 128 (slices.py)
    wide.cu          from 41 rows of x on, on Hopper (wide.py)

(attend.cu is no product: attention.py.)

They are compiled on first use (nvrtc.py). `linear` returns False for what they are not made for: triton/ takes other
formats, fp32 and what cannot be compiled here, up to 64 rows of x; what is left is decoded and multiplied by cuBLAS
(operators/linear.py). Where nothing can be compiled, the first call says so in a `KernelWarning`.
"""

from __future__ import annotations

import warnings
from functools import cache

import torch
from torch import Tensor

from narrowcast.errors import KernelWarning
from narrowcast.kernels.cuda import nvrtc
from narrowcast.kernels.cuda.cuts import LARGE, TILED, Cut, choose_cut
from narrowcast.kernels.cuda.formats import BYTES, KINDS, PAIRS, block_of, codes_of, fp8_of, levels_of, scaling_of
from narrowcast.kernels.cuda.launch import launch_cut, launch_ring, launch_slices, launch_wide
from narrowcast.kernels.cuda.ring import SLOWER_EARLY, Ring, choose_ring, direct_codes
from narrowcast.kernels.cuda.slices import WIDEST, Slices, choose_slices
from narrowcast.kernels.cuda.wide import Wide, choose_wide
from narrowcast.kernels.early import may_read_weights_early
from narrowcast.kernels.layout import Recipe, layout

_BF16 = torch.bfloat16

BATCH = 64
"""The largest batch that tile.cu is for."""

MANY = 128
"""The largest batch that slices.cu multiplies, twice."""

FROM, WIDE = 41, 4096
"""The batches that wide.cu is for: bench/results/decode-h200.md. Below, slices.cu is as fast; above, decoding first and
cuBLAS."""


def linear(out: Tensor, x: Tensor, data: Tensor, recipe: Recipe, bias: Tensor | None) -> bool:
    """Multiply, or return False."""
    if x.dtype not in KINDS or (bias is not None and bias.dtype not in KINDS):
        return False
    bias = None if bias is None else bias.contiguous()  # of which kernels are given the address alone
    x = x if x.stride(1) == 1 and x.stride(0) * x.element_size() % 16 == 0 else x.contiguous()
    if _codes(x, data, recipe) is None:
        return False
    if FROM <= len(x) <= WIDE:
        x = x if x.stride(0) >= x.shape[1] else x.contiguous()  # rows that overlap cannot be copied in boxes
        wide = wide_of(x, data, recipe, bias)
        if wide is not None:
            with torch.cuda.device(x.device):
                launch_wide(wide, out, x, data, recipe, bias)
            return True
    ring = ring_of(x, data, recipe, bias)
    if ring is not None:
        launch_ring(ring, out, x, data, recipe, bias)
        return True
    bits = recipe.format.bits
    if len(x) > MANY:
        return False
    if _sliced(len(x), bits, len(data) * x.shape[1]) and _in_slices(out, x, data, recipe, bias):
        return True
    few = TILED[bits]
    if len(x) > BATCH or (len(x) > few and bits == 8):
        return False
    for first in range(0, len(x), few):
        some = x[first : first + few]
        cut = cut_of(some, data, recipe, bias)
        if cut is None:
            return False
        launch_cut(cut, out[first : first + few], some, data, recipe, bias)
    return True


def takes(recipe: Recipe, device: torch.device) -> bool:
    """Whether one bf16 vector is multiplied by these kernels, for rows of about 4096 elements in whole blocks."""
    codes, cpu = codes_of(recipe.format), torch.device("cpu")
    if codes is None or obstacle(device) or (codes in (BYTES, PAIRS) and levels_of(recipe, _BF16, cpu) is None):
        return False
    block = max(recipe.format.block, 1)
    k = -(-4096 // block) * block
    return choose_cut(codes, recipe.format, 1, 4096, k, KINDS[_BF16], -1, 1) is not None


def _in_slices(out: Tensor, x: Tensor, data: Tensor, recipe: Recipe, bias: Tensor | None) -> bool:
    """Multiply with slices.cu, in parts of the batch that are alike, or say that it is not made for this."""
    step = -(-len(x) // (8 * -(-len(x) // WIDEST))) * 8
    for first in range(0, len(x), step):
        some = x[first : first + step]
        slices = slices_of(some, data, recipe, bias)
        if slices is None:
            return False
        with torch.cuda.device(x.device):
            launch_slices(slices, out[first : first + step], some, data, recipe, bias)
    return True


def _sliced(batch: int, bits: int, weights: int) -> bool:
    """Whether slices.cu is faster than dot.cu and tile.cu, by bench/gpu_linear.py on an H200."""
    return batch > 16 or (batch > 8 and bits == 4) or (weights >= LARGE and batch > (1 if bits == 4 else 8))


def _codes(x: Tensor, data: Tensor, recipe: Recipe) -> int | None:
    """`CODES` for this call, or None if the kernels are not made for it."""
    codes = codes_of(recipe.format)
    aligned = all(address % 16 == 0 for address in (x.data_ptr(), data.data_ptr(), data.stride(0)))
    whole = data.stride(1) == 1 and x.shape[1] * recipe.format.bits % 128 == 0
    if codes is None or not aligned or not whole or not _compiles(x.device):
        return None
    if codes in (BYTES, PAIRS) and (x.dtype == torch.float32 or levels_of(recipe, x.dtype, x.device) is None):
        return None
    return codes


def cut_of(x: Tensor, data: Tensor, recipe: Recipe, bias: Tensor | None) -> Cut | None:
    """How dot.cu or tile.cu does this call, or None if they do not."""
    codes, kind = _codes(x, data, recipe), -1 if bias is None else KINDS[bias.dtype]
    if codes is None:
        return None
    sizes = (len(x), len(data), x.shape[1], KINDS[x.dtype], kind, _processors(x.device), _chip(x.device)[0])
    return choose_cut(codes, recipe.format, *sizes)


def ring_of(x: Tensor, data: Tensor, recipe: Recipe, bias: Tensor | None) -> Ring | None:
    """How ring.cu does this call, or None if it does not."""
    if len(x) != 1 or _codes(x, data, recipe) is None or not _chip(x.device)[1]:
        return None
    if may_read_weights_early() and direct_codes(recipe.format) in SLOWER_EARLY:
        return None
    n, k, kind = len(data), x.shape[1], -1 if bias is None else KINDS[bias.dtype]
    stride = data.stride(0) if n > 1 else layout(recipe.format, k).row_bytes
    return choose_ring(recipe.format, n, k, stride, KINDS[x.dtype], kind, _processors(x.device))


def slices_of(x: Tensor, data: Tensor, recipe: Recipe, bias: Tensor | None) -> Slices | None:
    """How slices.cu does this call, or None if it does not."""
    codes, kind = _codes(x, data, recipe), -1 if bias is None else KINDS[bias.dtype]
    if codes is None:
        return None
    block, scale = block_of(recipe.format, x.shape[1]), int(recipe.format.scale)
    sizes = (len(x), len(data), x.shape[1], KINDS[x.dtype], kind, _processors(x.device))
    return choose_slices(codes, block, scale, *sizes, *_chip(x.device))


def wide_of(x: Tensor, data: Tensor, recipe: Recipe, bias: Tensor | None) -> Wide | None:
    """How wide.cu does this call, or None if it does not."""
    codes, kind = _codes(x, data, recipe), -1 if bias is None else KINDS[bias.dtype]
    room, hopper = _chip(x.device)
    if codes is None or not hopper or x.dtype == torch.float32 or data.stride(0) < data.shape[1]:
        return None
    n, k = len(data), x.shape[1]
    scaling = scaling_of(recipe, x.dtype, k)
    block, scale = block_of(recipe.format, k), int(recipe.format.scale)
    sizes = (len(x), n, k, KINDS[x.dtype], kind, _processors(x.device), room)
    return choose_wide(codes, block, scale, scaling, fp8_of(recipe.format), *sizes)


@cache
def obstacle(device: torch.device) -> str:
    """Why the kernels cannot run there, or an empty string."""
    why = nvrtc.missing()
    if not why and torch.cuda.get_device_capability(device) < (8, 0):
        why = f"{torch.cuda.get_device_name(device)} has no tensor cores for bfloat16 (compute capability 8.0)"
    return why


@cache
def _compiles(device: torch.device) -> bool:
    """Whether the kernels can run there; where not, the first call says why."""
    why = obstacle(device)
    if why:
        warnings.warn(
            f"narrowcast multiplies by encoded weights with Triton, slower than with CUDA: {why}",
            KernelWarning,
            stacklevel=4,
        )
    return not why


@cache
def _processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def _chip(device: torch.device) -> tuple[int, bool]:
    """Shared memory that a block may ask for, and whether this is Hopper."""
    room = torch.cuda.get_device_properties(device).shared_memory_per_block_optin  # type: ignore[attr-defined]
    return int(room), torch.cuda.get_device_capability(device)[0] == 9
