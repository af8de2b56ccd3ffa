"""Quantization-aware training: fake quantization, and layers made of it."""
