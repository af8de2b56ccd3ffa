"""The public functions on tensors of any kind, in any surroundings, against what they say: plain definitions.

A tensor is drawn with its shape, dtype, strides and wrapping (a Parameter, a negated view, a part of a conjugate one, a
subclass, one that requires grad). It must give the bytes that a contiguous copy of its values gives, stay as it was,
and come back within the bound.
"""

from __future__ import annotations

import torch
from campaign import campaign
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import narrowcast as nc
from ambient import SURROUNDINGS, surrounded
from cases import CODECS, DTYPES, mixed, same_bits

AROUND = [None, *(name for name in SURROUNDINGS if "cuda" not in name and "stream" not in name)]
LAYOUTS = (
    "plain",
    "columns",
    "gaps",
    "offset",
    "expanded",
    "negated",
    "flipped",
    "conjugate real",
    "conjugate imaginary",
)
WRAPPINGS = ("plain", "parameter", "requires grad", "part of a graph", "subclass")
shapes = st.lists(st.integers(0, 9), max_size=4).map(tuple) | st.sampled_from([(1,), (300,), (5, 129), (2, 3, 64)])


class Subclass(Tensor):
    """As users make them: with nothing of its own."""


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The same values in other memory."""
    if layout == "columns" and x.dim() > 1:
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "gaps":
        return torch.stack([x, torch.full_like(x, 7.0)], -1)[..., 0]
    if layout == "offset":
        return torch.cat([torch.full((3,), 7.0, dtype=x.dtype), x.flatten()])[3:].view(x.shape)
    if layout == "expanded" and x.dim():
        return x[:1].expand(x.shape)
    if layout == "negated":
        return torch._neg_view(-x)
    if layout == "flipped" and x.dim():
        return x.flip(0).as_strided(x.shape, x.stride()).flip(0)
    if layout.startswith("conjugate") and x.dtype in (torch.float32, torch.float64, torch.float16):
        seven = torch.full_like(x, 7.0)
        if layout == "conjugate real":
            return torch.complex(x, seven).conj().real
        return torch.complex(seven, -x).conj().imag
    return x


def wrapped(x: Tensor, wrapping: str) -> Tensor:
    if wrapping == "parameter":
        return nn.Parameter(x)
    if wrapping == "requires grad":
        return x.detach().requires_grad_()
    if wrapping == "part of a graph":
        return x.detach().requires_grad_() * 1.0
    if wrapping == "subclass":
        return x.as_subclass(Subclass)
    return x


@campaign(150)
@given(
    st.sampled_from(sorted(CODECS)),
    shapes,
    st.sampled_from(DTYPES),
    st.sampled_from(LAYOUTS),
    st.sampled_from(WRAPPINGS),
    st.sampled_from(AROUND),
    st.integers(0, 2**20),
)
def test_any_tensor_encodes_as_a_plain_copy_of_it_and_decodes_within_the_bound(
    spec: str, shape: tuple[int, ...], dtype: torch.dtype, layout: str, wrapping: str, around: str | None, seed: int
) -> None:
    codec = CODECS[spec]
    values = mixed(torch.Size(shape).numel(), seed, dtype).clamp(-1e4, 1e4).view(shape)
    x = wrapped(laid_out(values, layout), wrapping)
    plain = x.detach().clone(memory_format=torch.contiguous_format).resolve_neg()
    expected = nc.encode(plain, codec, seed=seed)
    with surrounded(around):
        payload = nc.encode(x, codec, seed=seed)
        y = nc.decode(payload)
        bound = codec.max_error(plain)
    assert torch.equal(payload.data, expected.data)
    assert (payload.shape, payload.dtype) == (x.shape, dtype)
    assert payload.nbytes == payload.data.numel()
    assert same_bits(y, nc.decode(expected))
    assert (y.shape, y.dtype, y.device) == (x.shape, x.dtype, x.device)
    assert not y.requires_grad
    assert same_bits(x.detach().clone(memory_format=torch.contiguous_format).resolve_neg(), plain), "it was changed"
    assert bool(((plain.double() - y.double()).abs() <= bound.double()).all())
    out = torch.full(shape, 7.0, dtype=dtype)
    assert nc.decode(payload, out=out) is out
    assert same_bits(out, y)


@campaign(60)
@given(st.sampled_from(sorted(CODECS)), st.integers(1, 4), shapes, st.sampled_from(DTYPES), st.integers(0, 2**20))
def test_a_sum_of_rows_is_the_sum_of_what_they_decode_to_in_rank_order(
    spec: str, ranks: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int
) -> None:
    codec, numel = CODECS[spec], torch.Size(shape).numel()
    floats = mixed(ranks * numel, seed, dtype).clamp(-1e4, 1e4).view(ranks, numel)
    rows = codec.encode(floats, seed)
    expected, *others = codec.decode(rows, numel, dtype=torch.float32)
    for decoded in others:
        expected = expected + decoded
    assert same_bits(codec.decode_sum(rows, numel), expected)
    assert torch.equal(codec.decode_sum_encode(rows, numel, seed), codec.encode(expected, seed))


@campaign(60)
@given(
    st.sampled_from(sorted(CODECS)),
    shapes,
    st.sampled_from(("plain", "columns", "gaps", "offset")),
    st.sampled_from(AROUND),
    st.integers(0, 2**20),
)
def test_rows_in_any_memory_are_taken_apart_and_joined_again(
    spec: str, shape: tuple[int, ...], layout: str, around: str | None, seed: int
) -> None:
    codec, shape = CODECS[spec], shape or (1,)
    rows = laid_out(codec.encode(mixed(torch.Size(shape).numel(), seed).view(shape), seed), layout)
    before = rows.clone()
    with surrounded(around):
        fields = codec.split(rows, shape[-1])
        joined = codec.join(*fields)
    assert torch.equal(joined, before)
    assert torch.equal(rows, before)
    assert fields.codes.shape == shape
