"""Triton on CUDA; loaded on first use, so that importing narrowcast never imports Triton.

    launch         the interface of `contract.Kernel`
    rows           which kernel runs on which grid, for rows of a codec; repeat: launches that were made before
    arguments      what kernels are told; groups: what they are compiled for
    cuts           how a row is cut into tiles, and of what size
    kernels        encode, decode and sums; tiles: between memory and registers
    codes, words   numbers and their codes, in registers; codes out of the words that hold them
    scales         a block's statistics and its scale; search, search_kernels: the scales that lose least
    columns, column_kernels  codes of rows, one column after another, for gptq
    tables         how a table of levels is searched; levels: the search, in registers
    moments        a step of AdamW on moments that are held in rows
    linear         x W^T + bias, for any format
    norms, attention  a decoder between its products, for one position; kinds: activations, and early launches
    fake_quantize  fake quantization; integer: exact integer products

They equal the reference bit for bit: tests/kernels/triton checks it in Triton's interpreter, bench/gpu.py on a GPU.
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
