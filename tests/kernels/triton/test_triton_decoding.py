"""Norms, gates and attention of one position, in Triton: within the bounds of fp32 sums around what fp64 gives.

Without a GPU the kernels run in Triton's interpreter, in a process of their own; see test_triton.py.
"""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from narrowcast.generate.rotary import turn, turns
from narrowcast.generate.shape import Shape
from processes import in_interpreter

INTERPRETER = os.environ.get("TRITON_INTERPRET") == "1"
CUDA = torch.cuda.is_available() and not INTERPRETER
DEVICE = "cuda" if CUDA else "cpu"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ULP = 2.0**-24

pytest.importorskip("triton", reason="Triton is not installed")
here = pytest.mark.skipif(not (CUDA or INTERPRETER), reason="the interpreter runs this in a process of its own")
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
kinds = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.mark.skipif(CUDA or INTERPRETER, reason="the tests below run here themselves")
def test_triton_decodes_within_the_bounds_in_its_interpreter() -> None:
    in_interpreter(__file__)


def drawn(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def rounding(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """Of one rounding to the dtype."""
    return exact.abs() * torch.finfo(dtype).eps / 2 + torch.finfo(dtype).tiny


@here
@kinds
@pytest.mark.parametrize(("batch", "width"), [(1, 64), (3, 100), (16, 1)])
def test_the_norm_of_a_sum_is_within_its_bound(batch: int, width: int, dtype: torch.dtype) -> None:
    from narrowcast.kernels.triton.norms import add_norm

    x, delta = (drawn(batch, 2 * width, dtype=dtype, seed=seed)[:, :width] for seed in (1, 2))
    weight = drawn(width, dtype=dtype, seed=3)
    for added in (delta, None):
        total, y = add_norm(x, added, weight, 1e-5)
        assert torch.equal(total, x if added is None else x + added)
        wide = total.double()
        exact = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
        # A sum of squares: `width` additions and as many products. Its root halves that. Six more operations.
        allowed = exact.abs() * (width + 8) * ULP + rounding(exact, dtype)
        assert ((y.double() - exact).abs() <= allowed).all()


@here
@kinds
def test_a_gate_is_within_its_bound(dtype: torch.dtype) -> None:
    from narrowcast.kernels.triton.norms import gate

    both = drawn(3, 2 * 1100, dtype=dtype)
    both[0, :4] = torch.tensor([0.0, 60.0, -60.0, -90.0], dtype=dtype)
    one, other = both.chunk(2, -1)
    y = gate(one, other)
    wide = one.double()
    exact = wide / (1 + (-wide).exp()) * other.double()
    # exp(x) is 2 ** (x / ln 2): an error of the exponent counts |x| times. PTX says two ulps for 2 ** x.
    allowed = exact.abs() * (2 * wide.abs() + 10) * 2 * ULP + rounding(exact, dtype)
    allowed = torch.where(wide < -88, exact.abs(), allowed)  # there exp(-x) overflows, and the result is zero
    assert ((y.double() - exact).abs() <= allowed).all()


CASES = [  # batch, heads, key heads, size, positions, at
    (1, 2, 2, 16, 40, (0,)),
    (1, 2, 1, 16, 200, (199,)),
    (3, 4, 4, 8, 150, (0, 64, 149)),
    (2, 7, 1, 24, 300, (63, 130)),
    (4, 2, 2, 32, 65, (5, 64, 1, 63)),
]


@here
@kinds
@pytest.mark.parametrize(("batch", "heads", "key_heads", "size", "positions", "at"), CASES)
def test_attention_keeps_the_new_position_and_is_within_its_bound(
    batch: int, heads: int, key_heads: int, size: int, positions: int, at: tuple[int, ...], dtype: torch.dtype
) -> None:
    from narrowcast.kernels.triton.attention import attend

    joined = drawn(batch, (heads + 2 * key_heads) * size, dtype=dtype)
    queries, keys, values = joined.split((heads * size, key_heads * size, key_heads * size), -1)
    cache = drawn(2, batch, key_heads, positions, size, dtype=dtype, seed=1)
    places = torch.tensor(at, device=DEVICE)
    for row, place in enumerate(at):
        cache[:, row, :, place:] = torch.nan  # what was not written yet is never read
    table = turns(Shape(heads * size, 1, heads, 8, 8, head_size=size), positions).to(DEVICE)
    before = cache.clone()
    mixed = attend(queries, keys, values, table, places, cache[0], cache[1])

    by = table[places][:, None].double()
    query = turn(queries.double().view(batch, heads, 1, size), by)
    key = turn(keys.double().view(batch, key_heads, 1, size), by)[:, :, 0]
    for row, place in enumerate(at):
        kept = cache[0, row, :, place].double()
        # Two products and their sum in fp32, then one rounding.
        slack = keys[row].double().abs().max() * 6 * ULP
        assert ((kept - key[row]).abs() <= slack + rounding(key[row], dtype)).all()
        assert torch.equal(cache[1, row, :, place], values[row].view(key_heads, size))
        before[:, row, :, place] = cache[:, row, :, place]
    assert torch.equal(before.nan_to_num(7.0), cache.nan_to_num(7.0))

    for row, place in enumerate(at):
        group = heads // key_heads
        known, weighed = (cache[i, row, :, : place + 1].double().repeat_interleave(group, 0) for i in (0, 1))
        products = query[row] * known  # [heads, positions, size]
        score = products.sum(-1) / size**0.5
        share = score.softmax(-1)[..., None]
        exact, weight = (share * weighed).sum(1), (share * weighed.abs()).sum(1)
        # A score is off by the `size` + 6 roundings of its sum and the turn before, of magnitudes (the turn's: up to
        # twice a product's); an exponential by that and two ulps, twice, numerator and denominator; and two sums.
        magnitude = (query[row].abs().amax(-1, keepdim=True) * 2 * known.abs()).sum(-1) / size**0.5
        off = magnitude.amax(-1) * (size + 6) * ULP + score.abs().amax(-1) * 4 * ULP
        allowed = weight * (2 * off + (2 * place + 16) * 2 * ULP)[:, None] + rounding(exact, dtype)
        assert ((mixed[row].view(heads, size).double() - exact).abs() <= allowed).all()


def test_spans_cover_every_position_once() -> None:
    from narrowcast.kernels.triton.attention import MOST, divide

    for positions in (1, 8, 63, 64, 65, 513, 4096, 131072):
        for programs in (1, 8, 32, 512, 4096):
            count, length, step = divide(positions, programs, 4, 128)
            assert length % step == 0
            assert (count - 1) * length < positions <= count * length
            assert count <= MOST
