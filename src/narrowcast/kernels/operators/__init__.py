"""The operations as torch operators, so that torch.compile, autograd, vmap and the profiler see them.

declare        operators out of annotated functions
dispatch       which kernel runs; when the dispatcher may be bypassed
derivatives    rules for backward, forward mode and vmap
rows           encode, decode, decode_sum, decode_sum_encode: what codecs call
linear         x W^T + b with encoded W
fake_quantize  floats to the levels of a grid, with straight-through gradients
integer        exact products and convolutions of int8
adamw          a step of AdamW on moments that are held in rows
"""

from narrowcast.kernels.contract import Kernel, Reference
from narrowcast.kernels.operators.dispatch import kernel_for, transformed, unwatched, which_kernel
from narrowcast.kernels.operators.rows import (
    decode,
    decode_,
    decode_sum,
    decode_sum_,
    decode_sum_encode,
    decode_sum_encode_,
    encode,
    encode_,
    encode_searched,
    encode_searched_,
)

__all__ = [
    "Kernel",
    "Reference",
    "decode",
    "decode_",
    "decode_sum",
    "decode_sum_",
    "decode_sum_encode",
    "decode_sum_encode_",
    "encode",
    "encode_",
    "encode_searched",
    "encode_searched_",
    "kernel_for",
    "transformed",
    "unwatched",
    "which_kernel",
]
