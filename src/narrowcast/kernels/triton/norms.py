"""Triton: what a decoder does between products, for a few rows of activations.

    add_norm   total = x + delta;   y = total / sqrt(mean(total^2) + eps) * weight
    gate       y = gate * sigmoid(gate) * up

Sums and products are fp32. `total` is rounded to the activations' dtype before the norm takes it, as it is where the
two are separate kernels; y is rounded once.
"""

# Triton reads annotations: no `from __future__ import annotations` here. Its language is not one that mypy knows.
# mypy: ignore-errors
import torch
import triton
import triton.language as tl
from torch import Tensor

from narrowcast.errors import DtypeError
from narrowcast.kernels.triton.arguments import on
from narrowcast.kernels.triton.kinds import KINDS, after_the_last, bits_of, early, from_kind, to_kind

GATE = 1024
"""Elements of a program of `gate`."""


@triton.jit(do_not_specialize=["part", "eps"])
def add_norm_kernel(x, delta, weight, total, out, width, x_stride, delta_stride, part, eps, KIND: tl.constexpr,
                    ADD: tl.constexpr, EARLY: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """One row; `part` is 1 / width."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, WIDE)
    inside = place < width
    factor = from_kind(tl.load(weight + place, mask=inside, other=0), KIND)
    after_the_last(EARLY)
    value = from_kind(tl.load(x + row * x_stride + place, mask=inside, other=0), KIND)
    if ADD:
        more = from_kind(tl.load(delta + row * delta_stride + place, mask=inside, other=0), KIND)
        bits = to_kind(value + more, KIND)
        tl.store(total + row * width + place, bits, mask=inside)
        value = from_kind(bits, KIND)
    mean = tl.sum(value * value, 0) * part
    value = value * tl.div_rn(1.0, tl.sqrt_rn(mean + eps)) * factor
    tl.store(out + row * width + place, to_kind(value, KIND), mask=inside)


@triton.jit
def gate_kernel(gate, up, out, width, gate_stride, up_stride, KIND: tl.constexpr, EARLY: tl.constexpr,
                WIDE: tl.constexpr):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * WIDE + tl.arange(0, WIDE)
    inside = place < width
    after_the_last(EARLY)
    value = from_kind(tl.load(gate + row * gate_stride + place, mask=inside, other=0), KIND)
    other = from_kind(tl.load(up + row * up_stride + place, mask=inside, other=0), KIND)
    value = tl.div_rn(value, 1.0 + tl.exp(-value)) * other
    tl.store(out + row * width + place, to_kind(value, KIND), mask=inside)


def add_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + delta and its norm; x [batch, width] of one dtype with the others, last dimensions contiguous."""
    if weight.dtype != x.dtype or (delta is not None and delta.dtype != x.dtype):
        raise DtypeError(
            f"weight: a norm of {weight.dtype} cannot be applied to activations of {x.dtype}. Give the decoder one "
            "dtype: decoder.to(torch.bfloat16), or load_decoder(..., dtype=torch.bfloat16)."
        )
    batch, width = x.shape
    out = torch.empty(batch, width, dtype=x.dtype, device=x.device)
    total = x if delta is None else torch.empty_like(out)
    given, wide = x if delta is None else delta, triton.next_power_of_2(width)
    with on(x.device):
        add_norm_kernel[(batch,)](
            bits_of(x),
            bits_of(given),
            bits_of(weight),
            bits_of(total),
            bits_of(out),
            width,
            x.stride(0),
            given.stride(0),
            1.0 / width,
            eps,
            KIND=KINDS[x.dtype],
            ADD=delta is not None,
            WIDE=wide,
            num_warps=min(16, max(1, wide // 256)),
            **early(x.device),
        )
    return total, out


def gate(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, both [batch, width], last dimensions contiguous."""
    batch, width = gate.shape
    out = torch.empty(batch, width, dtype=gate.dtype, device=gate.device)
    with on(gate.device):
        gate_kernel[(triton.cdiv(width, GATE), batch)](
            bits_of(gate),
            bits_of(up),
            bits_of(out),
            width,
            gate.stride(0),
            up.stride(0),
            KIND=KINDS[gate.dtype],
            WIDE=GATE,
            num_warps=4,
            **early(gate.device),
        )
    return out
