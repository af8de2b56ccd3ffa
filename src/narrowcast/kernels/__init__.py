"""The same four operations on three machines: plain torch, compiled C++, Triton. Tensors and numbers only."""
