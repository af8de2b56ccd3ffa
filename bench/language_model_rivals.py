"""What other libraries leave of a model's linear layers at four and three bits: for bench/language_model.py.

A rival is taken where its package is installed. Its own functions encode each weight; the model then computes with
what they decode, in its own dtype, so that only the rounding is compared and not the kernels.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch
from torch import Tensor, nn

Trip = Callable[[Tensor], tuple[Tensor, float]]
"""A weight -> what is decoded of it, and the bits an element that it takes."""


def _hqq(bits: int, group: int) -> Trip:
    def trip(weight: Tensor) -> tuple[Tensor, float]:
        from hqq.core.quantize import Quantizer

        codes, about = Quantizer.quantize(
            weight, nbits=bits, group_size=group, axis=1, optimize=True, device=str(weight.device)
        )
        return Quantizer.dequantize(codes, about).view_as(weight), bits + 32 / group  # scale and zero point in 16 bits

    return trip


def _bitsandbytes(kind: str) -> Trip:
    def trip(weight: Tensor) -> tuple[Tensor, float]:
        import bitsandbytes.functional as bnb

        codes, state = bnb.quantize_4bit(weight.contiguous(), blocksize=64, quant_type=kind)
        return bnb.dequantize_4bit(codes, state), 4 + 32 / 64  # a scale in fp32

    return trip


def _torchao(bits: int, group: int, hqq: bool) -> Trip:
    def trip(weight: Tensor) -> tuple[Tensor, float]:
        from torchao.quantization.quant_primitives import (
            MappingType,
            _choose_qparams_and_quantize_affine_hqq,
            choose_qparams_affine,
            dequantize_affine,
            quantize_affine,
        )

        most, block = 2**bits - 1, (1, group)
        if hqq:
            codes, scale, zero, _ = _choose_qparams_and_quantize_affine_hqq(
                weight,
                nbits=bits,
                group_size=group,
                axis=1,
                compute_dtype=weight.dtype,
                device=str(weight.device),
                raw_output=True,
            )
            codes, parts = codes.view(-1, group).float(), scale.numel()
            decoded = (codes - zero.reshape(parts, 1).float()) * scale.reshape(parts, 1).float()
            return decoded.view_as(weight), bits + 32 / group
        kept = (weight, MappingType.ASYMMETRIC, block, torch.uint8, 0, most)
        scale, zero = choose_qparams_affine(*kept, scale_dtype=weight.dtype, zero_point_dtype=weight.dtype)
        codes = quantize_affine(weight, block, scale, zero, torch.uint8, 0, most)
        return dequantize_affine(codes, block, scale, zero, torch.uint8, 0, most), bits + 32 / group

    return trip


RIVALS: dict[str, tuple[str, Trip]] = {
    "hqq, 4 bits in 64": ("hqq", _hqq(4, 64)),
    "hqq, 3 bits in 64": ("hqq", _hqq(3, 64)),
    "hqq, 3 bits in 128": ("hqq", _hqq(3, 128)),
    "bitsandbytes nf4": ("bitsandbytes", _bitsandbytes("nf4")),
    "torchao int4 in 64": ("torchao", _torchao(4, 64, False)),
    "torchao int4 in 64, hqq": ("torchao", _torchao(4, 64, True)),
    "torchao int3 in 64, hqq": ("torchao", _torchao(3, 64, True)),
}
"""By name: the package, and the trip."""


def installed() -> dict[str, Trip]:
    return {name: trip for name, (package, trip) in RIVALS.items() if importlib.util.find_spec(package)}


@torch.no_grad()
def round_by(trip: Trip, model: nn.Module) -> float:
    """Replace the weights of all linear layers; the bits an element of them."""
    bits = 0.0
    for module in model.modules():
        if isinstance(module, nn.Linear):
            decoded, bits = trip(module.weight.data)
            module.weight.data.copy_(decoded.to(module.weight.dtype))
    return bits
