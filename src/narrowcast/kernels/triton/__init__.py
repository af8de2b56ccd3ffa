"""Triton on CUDA; loaded on first use, so that importing narrowcast never imports Triton.

    gpu_codes    numbers and their codes, in registers
    gpu_levels   tables of levels, in registers
    gpu_words    codes out of the words that hold them
    gpu_scales   a block's statistics and its scale
    gpu_tiles    tiles of a row between memory and registers
    gpu_kernels  the kernels
    gpu_fake     fake quantization, exact integer products
    gpu_tables   how a table of levels is searched
    gpu_plan     how a row is cut into tiles, and of what size
    gpu_arguments  what kernels are told
    gpu_launch   which kernel runs on which grid: the interface of `ops.Kernel`

They equal reference.py bit for bit: tests/kernels/test_gpu.py checks it in Triton's interpreter, bench/gpu.py on a GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from narrowcast.kernels.contract import Kernel


def load() -> tuple[Kernel | None, str]:
    """The Triton kernel, or None and the reason why there is none."""
    try:
        from narrowcast.kernels.triton.launch import Triton
    except ImportError as error:
        return None, f"Triton cannot be imported ({error}). Install it with: pip install triton"
    return Triton(), ""
