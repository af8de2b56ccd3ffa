"""CUDA kernels that are compiled when they are first needed: products with the most common formats of weights,
attention of one position, and sums of rows of 4-bit codes (sums.py) and of signs (signs.py)."""
