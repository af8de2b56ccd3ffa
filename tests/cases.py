"""The table of codecs that every suite runs, and the few words the suites share about them.

A new codec is one line in `CODECS`. The sizes and blocks below are worked out from a codec's options, not read from
the layout that is under test.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

import narrowcast as nc
from narrowcast.codecs import Levels
from narrowcast.kernels import operators
from narrowcast.kernels.operators import Kernel

FLT_MAX = torch.finfo(torch.float32).max
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)

VARIANTS = (
    "int8:block=8",
    "int8:block=24",
    "int8:block=512",
    "int8:block=row",
    "int8:scale=bf16",
    "int8:scale=fp16",
    "int8:scale=e8m0",
    "int8:zero_point=true",
    "int8:stochastic=true",
    "int8:block=row,zero_point=true",
    "int8:block=24,scale=e8m0,zero_point=true",
    "int8:block=32,zero_point=true,stochastic=true",
    "int6:block=24,scale=fp16",
    "int5:block=32,zero_point=true",
    "int5:scale=bf16",
    "int4:block=8",
    "int4:block=24,scale=e8m0",
    "int4:block=32,scale=fp32",
    "int4:block=128,scale=fp16,zero_point=true",
    "int4:block=row",
    "int4:stochastic=true",
    "int4:block=24,scale=e8m0,stochastic=true",
    "int4:block=32,zero_point=true,stochastic=true",
    "int3:block=8",
    "int3:block=24,zero_point=true",
    "int3:block=row,stochastic=true",
    "int2:scale=fp32",
    "int2:block=8,scale=e8m0",
    "int2:stochastic=true",
    "int2:block=24,zero_point=true",
    "sign:block=8",
    "sign:block=24,scale=fp32",
    "sign:block=512,scale=fp16",
    "sign:block=row,scale=e8m0",
    "fp8_e4m3:block=32",
    "fp8_e4m3:block=24,scale=e8m0",
    "fp8_e4m3:block=row,scale=bf16",
    "fp8_e4m3:scale=none",
    "fp8_e5m2:scale=none",
    "fp8_e5m2:block=8,scale=fp16",
    "fp8_e5m2:block=24,scale=e8m0",
    "apot4:k=1",
    "apot4:k=3",
    "apot4:k=4",
    "apot3:k=3,block=row",
    "apot5:k=5,block=32",
    "apot8:k=1,block=24",
    "apot6:scale=e8m0",
    "pot4:block=8,scale=fp16",
    "pot5:block=row",
    "nf4:block=24,scale=fp32",
    "nf4:block=row,scale=e8m0",
    "levels:table=-1.0|0.0|1.0",
    "levels:table=0.0|1.0",
    "levels:table=0.0|0.25|0.5|1.0,block=8",
    "levels:table=-0.3|-0.1|0.0|0.7|5.0,block=24,scale=fp32",
    "levels:table=-2.0|-1.0|0.0,scale=fp16",
)
WITHOUT_ZERO = ("levels:table=-1.0|1.0", "levels:table=0.5|1.0|2.0,block=8,scale=fp16")
CODECS = {
    **{spec: nc.codec(spec) for spec in (*nc.list_codecs(), *VARIANTS, *WITHOUT_ZERO)},
    "levels256": Levels([(i - 127) / 127 for i in range(256)]),
    "levels100:block=24": Levels([(i - 50) ** 3 for i in range(10, 90)], block=24),
}
OF_EACH_FAMILY = (
    *["bf16", "fp8_e4m3", "sign", "int8", "int4:block=row", "int4:stochastic=true", "int5:block=32,zero_point=true"],
    "nf4",
)
"""One codec for each kind of code and scale: what runs in all surroundings (conftest.py)."""
PLAIN = {name: codec for name, codec in CODECS.items() if codec.block is None}
BLOCKED = {name: codec for name, codec in CODECS.items() if codec.block is not None}
STOCHASTIC = {name: codec for name, codec in CODECS.items() if codec.stochastic}


def scale_name(codec: nc.Codec) -> str:
    """How scales are stored: the option, or the documented default (16 bits at 4 bits and below)."""
    if codec.block is None:
        return "none"
    return str(codec.config().get("scale", "bf16" if codec.bits <= 4 else "fp32"))


def affine(codec: nc.Codec) -> bool:
    return bool(codec.config().get("zero_point", False))


def block_size(codec: nc.Codec, numel: int) -> int:
    """Elements that share a scale; a plain cast has blocks of one."""
    if codec.block is None:
        return 1
    return max(numel, 1) if codec.block == "row" else int(codec.block)


def sections(codec: nc.Codec, numel: int) -> tuple[int, int, int, int]:
    """Where codes, scales, zero points and the row end and begin: (codes end, scales, zero points, unpadded end)."""
    size = {"none": 0, "fp32": 4, "bf16": 2, "fp16": 2, "e8m0": 1}[scale_name(codec)]
    blocks = 0 if codec.block is None else -(-numel // block_size(codec, numel))
    codes = (numel * codec.bits + 7) // 8
    scales = codes if size == 0 else (codes + size - 1) // size * size
    zeros = scales + blocks * size
    return codes, scales, zeros, zeros + (blocks if affine(codec) else 0)


def mixed(numel: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Gaussian values whose magnitudes differ from stretch to stretch, with zeros and denormals of fp32 among them.

    What lies outside fp16 saturates or flushes there on its own, so that every dtype holds finite values.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(numel, generator=generator, dtype=torch.float64)
    stretch = torch.randint(-12, 13, (numel // 40 + 1,), generator=generator).repeat_interleave(40)[:numel]
    x = x * 2.0**stretch
    x[torch.rand(numel, generator=generator) < 0.02] = 0.0
    x[torch.rand(numel, generator=generator) < 0.02] *= 2.0**-140
    top = torch.finfo(dtype).max
    return x.clamp(-top, top).to(dtype)


def bits(x: Tensor) -> Tensor:
    """A tensor as the integers behind its elements: equality of bits tells -0.0 from 0.0 and compares NaNs."""
    return x.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))


def kernels(device: str) -> dict[str, Kernel]:
    """Every kernel that this machine can run on `device`, by name: the reference, the default, each CPU path."""
    found: dict[str, Kernel] = {"reference": operators.Reference()}
    default = operators.kernel_for(device)
    found[default.name] = default
    if device == "cpu" and os.environ.get("NARROWCAST_KERNEL") != "reference":
        from narrowcast.kernels.cpu import binding

        for isa in ("avx512", "avx2", "neon", "plain"):
            kernel, _ = binding.load(isa)
            if kernel is not None:
                found[kernel.name] = kernel
    return found
