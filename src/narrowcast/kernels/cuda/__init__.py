"""CUDA kernels compiled at run time, for the formats that matter most."""
