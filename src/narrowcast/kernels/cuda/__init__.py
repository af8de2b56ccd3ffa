"""CUDA kernels that are compiled when they are first needed: products with the most common formats of weights."""
