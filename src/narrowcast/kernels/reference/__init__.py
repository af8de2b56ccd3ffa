"""Plain torch: what every operation means.

The compiled kernels take the same arguments and return the same bytes, bit for bit (`linear` but for the order of its
sums); where one is in doubt, this folder is right. All arithmetic is fp32, one correctly rounded operation at a time;
only the mean of `sign` is summed in fp64. Nothing here is clever, nothing here is fast.

    search         encode_searched: rows with the scales that lose least
    rows           encode, decode, decode_sum, decode_sum_encode
    scales, codes  a block's scale and zero point; its codes, and how they are packed
    casts, draws   fp32 and the other floats; the random numbers of stochastic rounding
    products       linear, integer_linear, integer_conv
    grids          fake quantization, forward and backward
    columns        codes of rows, one column after another, for gptq
    moments        a step of AdamW on moments that are held in rows
"""

from narrowcast.kernels.reference.codes import pack, unpack
from narrowcast.kernels.reference.columns import choose_columns, round_columns
from narrowcast.kernels.reference.grids import fake_quantize, fake_quantize_backward
from narrowcast.kernels.reference.moments import adamw, encode_second
from narrowcast.kernels.reference.products import convolve_levels, integer_conv, integer_linear, linear
from narrowcast.kernels.reference.rows import decode, decode_sum, decode_sum_encode, encode
from narrowcast.kernels.reference.scales import scale_bits, scale_value
from narrowcast.kernels.reference.search import encode_searched

__all__ = [
    "adamw",
    "choose_columns",
    "convolve_levels",
    "decode",
    "decode_sum",
    "decode_sum_encode",
    "encode",
    "encode_searched",
    "encode_second",
    "fake_quantize",
    "fake_quantize_backward",
    "integer_conv",
    "integer_linear",
    "linear",
    "pack",
    "round_columns",
    "scale_bits",
    "scale_value",
    "unpack",
]
