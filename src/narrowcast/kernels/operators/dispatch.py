"""Which kernel runs, and when an operation may bypass torch's dispatcher.

On the CPU the native core runs, on CUDA Triton. Where one is missing the reference runs instead, and the first
call says so in a `KernelWarning`. `NARROWCAST_KERNEL` in the environment ("reference", "native/avx2", ...) asks
for one kernel by name.
"""

from __future__ import annotations

import os
import warnings
from functools import cache

import torch
from torch import Tensor
from torch.autograd import forward_ad

from narrowcast.errors import KernelWarning, SpecError
from narrowcast.kernels.contract import Kernel, Reference
from narrowcast.kernels.cpu import binding
from narrowcast.kernels.layout import Recipe

OF_CODECS = ("encode", "decode", "decode_sum", "decode_sum_encode", "encode_searched", "linear")
"""The operations on a codec's rows."""

# Bound once: `unwatched` runs at every call of an operation, and takes a tenth of a small one.
_is_compiling = torch.compiler.is_compiling
_profiler_enabled = torch._C._autograd._profiler_enabled
_modes = torch._C._len_torch_dispatch_stack
_transforms = torch._C._functorch.peek_interpreter_stack


@cache
def kernel_for(device_type: str) -> Kernel:
    """The kernel that runs on this kind of device, loaded on first use."""
    wanted = os.environ.get("NARROWCAST_KERNEL", "")
    if wanted == "reference":
        return Reference()
    kernel: Kernel | None = None
    why = f"it has no kernel for {device_type!r} devices"
    if device_type == "cpu":
        kernel, why = binding.load(wanted.removeprefix("native/"))
    elif device_type == "cuda":
        from narrowcast.kernels import triton

        kernel, why = triton.load()
    if kernel is not None:
        return kernel
    warnings.warn(
        f"narrowcast runs its plain-torch reference on {device_type}, right but slow: {why}",
        KernelWarning,
        stacklevel=3,
    )
    return Reference()


def which_kernel(recipe: Recipe, device: torch.device, operation: str) -> str:
    """The name of what runs an operation of a codec on this device."""
    if operation not in OF_CODECS:
        raise SpecError(f"operation={operation!r}: codecs have {', '.join(OF_CODECS)}.")
    return kernel_for(device.type).runs(operation, recipe, device)


def unwatched(tensor: Tensor) -> bool:
    """Whether a plain call does what the operator would: no compiler, profiler, mode or transform wants to see an
    operator, and memory holds what the tensor shows (the dispatcher takes care of negated views).

    A Python operator costs several microseconds a call, and encoding a thousand floats is to take under 15.
    """
    return (
        not _is_compiling()
        and type(tensor) is Tensor
        and not _profiler_enabled()
        and _modes() == 0
        and _transforms() is None
        and forward_ad._current_level < 0
        and not tensor.is_meta
        and not tensor.is_neg()
    )


def transformed() -> bool:
    """Whether a transform of torch.func or forward-mode differentiation is active. Compilers trace their own."""
    return not _is_compiling() and (_transforms() is not None or forward_ad._current_level >= 0)
