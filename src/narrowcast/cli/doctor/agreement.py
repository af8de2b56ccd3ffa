"""The self-check of `narrowcast doctor`: every kernel gives the reference's bytes, for every codec.

The rows hold the cases that are most often wrong: ordinary numbers, zeros, a NaN, infinities, denormals, one outlier,
and a length that is not a multiple of any block. Encoded bytes, decoded bits and the fused sum of the finite rows are
compared. This checks an installation in a second; the tests of the repository check the kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from narrowcast.codecs import Codec, list_codecs
from narrowcast.codecs import codec as as_codec
from narrowcast.kernels import reference
from narrowcast.kernels.contract import Kernel
from narrowcast.kernels.cpu import binding
from narrowcast.kernels.operators import kernel_for

NUMEL = 531
SEED = 7
_OPTIONS = (
    "int4:block=row",
    "int8:zero_point=true",
    "int4:stochastic=true",
    "int4:block=32,scale=bf16",
    "nf4:block=32",
)


def specs() -> list[str]:
    """The codecs to try: each by its name, and options that take other paths through the kernels."""
    return [*list_codecs(), *_OPTIONS]


def kernels() -> list[tuple[Kernel, torch.device]]:
    """Every compiled kernel that this machine can run: each instruction set of the CPU, and the GPU's."""
    loaded = [kernel for kernel, _ in map(binding.load, binding.ISAS) if kernel is not None]
    runnable: list[tuple[Kernel, torch.device]] = [(kernel, torch.device("cpu")) for kernel in loaded]
    if torch.cuda.is_available() and kernel_for("cuda").name != "reference":
        runnable.append((kernel_for("cuda"), torch.device("cuda")))
    return runnable


def rows() -> Tensor:
    """The floats that are encoded."""
    x = torch.randn(6, NUMEL, dtype=torch.float32, device="cpu", generator=torch.Generator().manual_seed(0))
    x[1] = 0
    x[2, 130] = math.nan
    x[3, 17], x[3, 400] = math.inf, -math.inf
    x[4] *= 1e-41
    x[5, 300] = 3e30
    return x


def find_differences(
    kernel: Kernel, device: torch.device, advance: Callable[[], object] = lambda: None
) -> list[tuple[str, str]]:
    """The codecs for which a kernel differs from the reference, and what differs."""
    wrong: list[tuple[str, str]] = []
    for spec in specs():
        difference = _first_difference(kernel, as_codec(spec), device)
        if difference is not None:
            wrong.append((spec, difference))
        advance()
    return wrong


def _first_difference(kernel: Kernel, codec: Codec, device: torch.device) -> str | None:
    plain, here = codec.recipe(torch.device("cpu")), codec.recipe(device)
    x = rows()
    data = reference.encode(x, plain, SEED)
    out = torch.empty_like(data, device=device)
    kernel.encode(out, x.to(device), here, SEED)
    if not torch.equal(out.cpu(), data):
        return "encoded bytes"
    back = torch.empty_like(x, device=device)
    kernel.decode(back, data.to(device), here)
    if not _same_bits(back.cpu(), reference.decode(data, NUMEL, x.dtype, plain)):
        return "decoded bits"
    # With block=row, a row that is not finite would make the whole sum NaN.
    data = data[x.isfinite().all(1)]
    total = torch.empty(NUMEL, dtype=torch.float32, device=device)
    kernel.decode_sum(total, data.to(device), here, None, 0, 3)
    if not _same_bits(total.cpu(), reference.decode_sum(data, NUMEL, x.dtype, plain, None, 0, 3)):
        return "bits of a sum"
    return None


def _same_bits(values: Tensor, wanted: Tensor) -> bool:
    # The bits of a NaN that comes from an addition depend on the processor.
    nan = wanted.isnan()
    same = values.view(torch.int32) == wanted.view(torch.int32)
    return bool((same | nan).all() and torch.equal(values.isnan(), nan))
