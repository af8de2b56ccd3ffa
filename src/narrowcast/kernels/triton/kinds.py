"""Triton: activations in and out of registers, and kernels that start before the last one has ended.

A KIND is "fp32", "fp16" or "bf16". Activations travel as integers of their size, since numpy, behind the interpreter,
knows no bf16; in registers they are fp32.

A kernel that is launched with `early` may be set up while the kernel before it runs. It calls `after_the_last` before
it reads what other kernels write, and before it writes anything. Weights and tables may be read before.
"""

# Triton reads annotations: no `from __future__ import annotations` here. Its language is not one that mypy knows.
# mypy: ignore-errors
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from narrowcast.kernels.triton.arguments import INTS
from narrowcast.kernels.triton.codes import INTERPRETED, NATIVE, as_bits, as_float

KINDS = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
EARLY = True
"""Whether kernels may be launched early, where the device can; bench/decode_h200.py measures both."""


@triton.jit
def after_the_last(EARLY: tl.constexpr):
    """The next kernel may be set up from here on; what kernels before this one wrote may be read from here on."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def from_kind(bits, KIND: tl.constexpr):
    """fp32 of what was loaded."""
    if KIND == "fp32":
        value = as_float(bits)
    elif KIND == "fp16":
        value = bits.to(tl.float16, bitcast=True).to(tl.float32)
    else:
        value = as_float(bits.to(tl.int32) << 16)
    return value


@triton.jit
def to_kind(value, KIND: tl.constexpr):
    """fp32 rounded half to even, as what is stored."""
    if KIND == "fp32":
        code = as_bits(value)
    elif KIND == "fp16":
        code = value.to(tl.float16).to(tl.int16, bitcast=True)
    elif NATIVE:
        code = value.to(tl.bfloat16).to(tl.int16, bitcast=True)
    else:
        bits = as_bits(value)
        near = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        code = tl.where(value != value, 0x7FC0, near).to(tl.int16)
    return code


def bits_of(x: Tensor) -> Tensor:
    """The same memory as integers."""
    return x.view(INTS[x.element_size()])


def early(device: torch.device) -> dict[str, Any]:
    """The arguments of a launch that may be early."""
    if not (EARLY and _can_be_early(device)):
        return {"EARLY": False}
    return {"EARLY": True, "launch_pdl": True}


@cache
def _can_be_early(device: torch.device) -> bool:
    if INTERPRETED or device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)
