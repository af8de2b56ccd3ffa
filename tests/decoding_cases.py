"""Checks of norms, gates and attention of one position against fp64, under derived bounds: those of kernels/triton, or
those that a test gives. Without pytest, so that bench/decode_h200.py runs them too."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from narrowcast.generate.rotary import turn, turns
from narrowcast.generate.shape import Shape

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ULP = 2.0**-24
NORMS = [(1, 64), (3, 100), (16, 1)]
ATTENTIONS = [  # batch, heads, key heads, size, positions, at
    (1, 2, 2, 16, 40, (0,)),
    (1, 2, 1, 16, 200, (199,)),
    (3, 4, 4, 8, 150, (0, 64, 149)),
    (2, 7, 1, 24, 300, (63, 130)),
    (4, 2, 2, 32, 65, (5, 64, 1, 63)),
]


HALF_ATTENTIONS = [  # what cuda/attend.cu takes
    (1, 2, 2, 128, 300, (299,)),
    (2, 4, 2, 64, 40, (0, 39)),
    (3, 4, 1, 128, 90, (1, 31, 64)),
    (1, 8, 1, 64, 70, (65,)),
    (1, 3, 3, 128, 33, (32,)),
]


def drawn(*shape: int, dtype: torch.dtype, device: str, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def rounding(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """Of one rounding to the dtype."""
    return exact.abs() * torch.finfo(dtype).eps / 2 + torch.finfo(dtype).tiny


def check_norm(
    batch: int,
    width: int,
    dtype: torch.dtype,
    device: str,
    add_norm: Callable[..., tuple[Tensor, Tensor]] | None = None,
) -> None:
    if add_norm is None:
        from narrowcast.kernels.triton.norms import add_norm
    x, delta = (drawn(batch, 2 * width, dtype=dtype, device=device, seed=seed)[:, :width] for seed in (1, 2))
    weight = drawn(width, dtype=dtype, device=device, seed=3)
    for added in (delta, None):
        total, y = add_norm(x, added, weight, 1e-5)
        assert torch.equal(total, x if added is None else x + added)
        wide = total.double()
        exact = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
        # A sum of squares: `width` additions and as many products. Its root halves that. Six more operations.
        allowed = exact.abs() * (width + 8) * ULP + rounding(exact, dtype)
        assert ((y.double() - exact).abs() <= allowed).all()


def check_gate(dtype: torch.dtype, device: str, gate: Callable[..., Tensor] | None = None) -> None:
    if gate is None:
        from narrowcast.kernels.triton.norms import gate
    both = drawn(3, 2 * 1100, dtype=dtype, device=device)
    both[0, :4] = torch.tensor([0.0, 60.0, -60.0, -90.0], dtype=dtype)
    one, other = both.chunk(2, -1)
    y = gate(one, other)
    wide = one.double()
    exact = wide / (1 + (-wide).exp()) * other.double()
    # exp(x) is 2 ** (x / ln 2): an error of the exponent counts |x| times. PTX says two ulps for 2 ** x.
    allowed = exact.abs() * (2 * wide.abs() + 10) * 2 * ULP + rounding(exact, dtype)
    allowed = torch.where(wide < -88, exact.abs(), allowed)  # there exp(-x) overflows, and the result is zero
    assert ((y.double() - exact).abs() <= allowed).all()


def check_attention(
    batch: int,
    heads: int,
    key_heads: int,
    size: int,
    positions: int,
    at: tuple[int, ...],
    dtype: torch.dtype,
    device: str,
    attend: Callable[..., Tensor] | None = None,
) -> None:
    """`attend`: by default that of Triton."""
    if attend is None:
        from narrowcast.kernels.triton.attention import attend
    joined = drawn(batch, (heads + 2 * key_heads) * size, dtype=dtype, device=device)
    queries, keys, values = joined.split((heads * size, key_heads * size, key_heads * size), -1)
    cache = drawn(2, batch, key_heads, positions, size, dtype=dtype, device=device, seed=1)
    for row, place in enumerate(at):
        cache[:, row, :, place:] = torch.nan  # what was not written yet is never read
    places = torch.tensor(at, device=device)
    table = turns(Shape(heads * size, 1, heads, 8, 8, head_size=size), positions).to(device)
    before = cache.clone()
    mixed = attend(queries, keys, values, table, places, cache[0], cache[1])
    by = table[places][:, None].double()
    query = turn(queries.double().view(batch, heads, 1, size), by)
    key = turn(keys.double().view(batch, key_heads, 1, size), by)[:, :, 0]
    for row, place in enumerate(at):
        # Two products and their sum in fp32, then one rounding.
        slack = keys[row].double().abs().max() * 6 * ULP + rounding(key[row], dtype)
        assert ((cache[0, row, :, place].double() - key[row]).abs() <= slack).all()
        assert torch.equal(cache[1, row, :, place], values[row].view(key_heads, size))
        before[:, row, :, place] = cache[:, row, :, place]
        exact, allowed = attended(query[row], cache[:, row, :, : place + 1].double(), dtype)
        assert ((mixed[row].view(heads, size).double() - exact).abs() <= allowed).all()
    assert torch.equal(before.nan_to_num(7.0), cache.nan_to_num(7.0))


def attended(query: Tensor, cache: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What `query` [heads, 1, size] attends to in keys and values [2, key_heads, positions, size]; how far off a kernel
    may be.

    A score is off by the size + 6 roundings of its sum and of the turn before, of magnitudes (the turn's: up to twice a
    product's). An exponential is off by that and two ulps, in numerator and denominator. And there are two sums.
    """
    (heads, _, size), (key_heads, length) = query.shape, cache.shape[1:3]
    known, weighed = cache.repeat_interleave(heads // key_heads, 1)
    score = (query * known).sum(-1) / size**0.5
    share = score.softmax(-1)[..., None]
    exact, weight = (share * weighed).sum(1), (share * weighed.abs()).sum(1)
    magnitude = (query.abs().amax(-1, keepdim=True) * 2 * known.abs()).sum(-1) / size**0.5
    off = magnitude.amax(-1) * (size + 6) * ULP + score.abs().amax(-1) * 4 * ULP
    return exact, weight * (2 * off + (2 * length + 16) * 2 * ULP)[:, None] + rounding(exact, dtype)
