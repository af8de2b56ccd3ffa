"""How far a product of floats may be from the exact one: the tolerance of every test that multiplies.

Let s = |x| |W|^T + |b|, the sum of magnitudes. Each of K products and K sums (one more for the bias) rounds by at most
u = 2**-24 of its result, so that in whatever order they are summed, the sum is off by at most gamma s, where gamma =
n u / (1 - n u) and n = K + 2 (Higham, Accuracy and Stability, 3.1). An fp64 x may be rounded to fp32 first, as may the
weight and the bias, for it is allowed to sum in fp32: n = K + 5 covers them.

Where x has 16 bits, with unit roundoff v, the weight and the bias may be rounded to its dtype (v s together) and the
result is (v |y| <= v s, and a little for what was off before): 3 v s covers these. What is below the smallest normal
number rounds by at most the distance of denormals, once for each weight (times |x|), the bias and the result.
"""

from __future__ import annotations

import torch
from torch import Tensor


def assert_close_to_product(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """y is x W^T + b but for roundings; the weight is the decoded one."""
    exact = x.double() @ weight.double().transpose(-2, -1)
    size = x.double().abs() @ weight.double().abs().transpose(-2, -1)
    if bias is not None:
        exact, size = exact + bias.double(), size + bias.double().abs()
    assert y.dtype == x.dtype
    assert y.shape == exact.shape
    off, bound = (y.double() - exact).abs(), _bound(x, size)
    assert bool((off <= bound).all()), f"off by {off.max():.3g}, {(off / bound).max():.3g} of the bound"


def _bound(x: Tensor, size: Tensor) -> Tensor:
    steps = x.shape[-1] + 5
    gamma = steps * 2.0**-24 / (1 - steps * 2.0**-24)
    narrow = torch.finfo(x.dtype if x.element_size() == 2 else torch.float32)
    rounded = 3 * narrow.eps / 2 * size if x.element_size() == 2 else 0.0
    denormal = narrow.smallest_normal * narrow.eps * (x.double().abs().sum(-1, keepdim=True) + 2)
    return gamma * size + rounded + denormal
