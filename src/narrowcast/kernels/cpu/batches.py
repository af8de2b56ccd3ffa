"""At how many vectors of x which way of multiplying encoded rows is the fastest on a CPU, by x's dtype.

Few vectors are multiplied with rows as they are, many with tiles of decoded rows: the core's own where there are any
for the format and the CPU, in matrix registers or in vectors, else torch's (operators/linear.py). Chosen by
bench/linear_batches.py.
"""

from __future__ import annotations

import torch

MAX_BATCH = {torch.float32: 64, torch.float16: 64, torch.bfloat16: 32}
"""Vectors that rows are multiplied with as they are, where the core has no tiles for a format. For more, decoding and
torch's own product are faster: measured on two Zen 4 cores, 11008x4096, int8 and int4; see bench/linear.py."""
MAX_BATCH_AVX2 = {torch.float32: 16, torch.float16: 24, torch.bfloat16: 24}
"""On AVX2, where what is decoded is multiplied in fp32 (operators/linear.py): bench/linear_batches.py, fp32 on a Zen 3
core, fp16 and bf16 on a Zen 5 told to do without AVX-512 (12 would be best for one thread, 32 for two)."""
TILES_FROM = {torch.float32: 7, torch.float16: 7, torch.bfloat16: 4}
"""Vectors from which on the core's own tiles (core/tile_x.h, AVX-512) are faster than rows as they are:
bench/linear_batches.py, on a Zen 4 core."""
MATRIX_FROM = 4
"""Vectors of bf16 from which on a CPU's matrix registers (core/matrix_x.h, AMX) are faster than either:
bench/linear_batches.py, on a Xeon with AMX."""
