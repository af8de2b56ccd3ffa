"""Floats to bytes to floats: one class per family of codecs, and the registry of their names."""

from narrowcast.codecs.base import Codec
from narrowcast.codecs.cast import Cast, Float8
from narrowcast.codecs.levels import APoT, Levels, NormalFloat, PoT, apot_levels
from narrowcast.codecs.registry import codec, list_codecs, register_codec, which_kernel
from narrowcast.codecs.uniform import Sign, Uniform

__all__ = [
    "APoT",
    "Cast",
    "Codec",
    "Float8",
    "Levels",
    "NormalFloat",
    "PoT",
    "Sign",
    "Uniform",
    "apot_levels",
    "codec",
    "list_codecs",
    "register_codec",
    "which_kernel",
]
