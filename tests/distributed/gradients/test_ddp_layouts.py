"""Every kind of parameter that DDP trains: all of a bucket is averaged, or the step raises.

Raw is the codec here, so what compressed DDP leaves must be what plain DDP leaves, up to the order of an fp32 sum: at
most (ranks + 1) roundings of the largest partial sum, which the sum of magnitudes bounds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import trained
from ranks import play, run
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from trained import FEW

import narrowcast as nc
from cases import same_bits
from narrowcast.distributed.gradients.layout import Gradient, check_cover
from narrowcast.errors import CollectiveError, StateDictError

pytestmark = pytest.mark.timeout(180)

WORLD = 3


class Complex(nn.Module):
    """Complex and real parameters, large ones and small ones."""

    def __init__(self) -> None:
        super().__init__()
        self.waves = nn.Parameter(torch.randn(40, 32, dtype=torch.complex64))
        self.real = nn.Parameter(torch.randn(40, 32))
        self.few = nn.Parameter(torch.randn(5, dtype=torch.complex64))
        self.odd = nn.Parameter(torch.randn(31, 33, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return ((self.waves * self.real * x).sum() * self.few.sum()).abs() + (self.odd.abs() * x[:31].sum()).sum()


class Shared(nn.Module):
    """One parameter under two names, and one that is a view's base."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 32)
        self.head = nn.Linear(32, 40, bias=False)
        self.head.weight = self.embedding.weight
        self.stretched = nn.Parameter(torch.randn(32, 40).t())  # not contiguous

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x[:, 0].abs() * 10).long() % 40
        return self.head(self.embedding(tokens) * self.stretched[tokens]).square().mean()


class Mixed(nn.Module):
    """Parameters of several dtypes, frozen ones, integers, and images with channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 64, 3).to(memory_format=torch.channels_last)
        self.narrow = nn.Parameter(torch.randn(32, 48, dtype=torch.bfloat16))
        self.wide = nn.Parameter(torch.randn(20, 32, dtype=torch.float64))
        self.frozen = nn.Parameter(torch.randn(64, 64), requires_grad=False)
        self.counts = nn.Parameter(torch.arange(10), requires_grad=False)
        self.flags = nn.Parameter(torch.ones(7, dtype=torch.bool), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        images = x[:4, :16].reshape(1, 4, 4, 4).contiguous(memory_format=torch.channels_last)
        total = self.conv(images).square().sum() + (x.bfloat16() @ self.narrow).float().square().mean()
        return total + (x[:20].double() * self.wide).sum().float()


class Unused(nn.Module):
    """A layer that is not used in every step, nor on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if x[0, 0] > 0:
            x = self.second(x)
        return x.square().mean()


def _steps(rank: int, make: Callable[[], nn.Module], compressed: bool, **options: Any) -> list[dict[str, Tensor]]:
    torch.manual_seed(0)
    ddp = DDP(make(), bucket_cap_mb=FEW, **options)
    if compressed:
        nc.compress_gradients(ddp, "raw", error_feedback=False, exempt=None)
    found = []
    for step in range(3):
        ddp.zero_grad()
        x = torch.randn(40, 32, generator=torch.Generator().manual_seed(100 * rank + step))
        ddp(x).backward()
        found.append(trained.grads(ddp))
    return found


MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "complex": (Complex, {}),
    "complex, viewed": (Complex, {"gradient_as_bucket_view": True}),
    "shared": (Shared, {}),
    "shared, viewed": (Shared, {"gradient_as_bucket_view": True}),
    "mixed": (Mixed, {}),
    "mixed, viewed": (Mixed, {"gradient_as_bucket_view": True}),
    "static": (Complex, {"static_graph": True}),
    "unused": (Unused, {"find_unused_parameters": True}),
}


def _compare(rank: int) -> dict[str, Any]:
    return {
        name: [_steps(rank, make, compressed, **options) for compressed in (True, False)]
        for name, (make, options) in MODELS.items()
    }


@pytest.fixture(scope="module")
def compared() -> list[dict[str, Any]]:
    return run(WORLD, _compare, timeout=150)


@pytest.mark.parametrize("name", MODELS)
def test_raw_gradients_are_those_of_plain_ddp(name: str, compared: list[dict[str, Any]]) -> None:
    for of_rank in compared:
        found, plain = of_rank[name]
        for step in range(3):
            assert found[step].keys() == plain[step].keys()
            for key, right in plain[step].items():
                one = found[step][key]
                assert one.dtype == right.dtype
                assert one.shape == right.shape
                eps = max(torch.finfo(right.dtype).eps, 2.0**-23)  # fp64 travels as fp32
                scale = max(float(p[step][key].abs().max()) for p in (r[name][1] for r in compared))
                # Plain DDP divides first, which in bf16 rounds each term.
                assert float((one - right).abs().max()) <= (WORLD + 1) * eps * WORLD * max(scale, 1e-3), key
            assert all(same_bits(found[step][key], compared[0][name][0][step][key]) for key in found[step])


def _resumed(rank: int) -> Any:
    """Complex parameters with error feedback: residuals of all their numbers, saved and loaded."""
    torch.manual_seed(0)
    ddp = DDP(Complex())
    state = nc.compress_gradients(ddp, "int4", exempt=None)
    x = torch.randn(40, 32, generator=torch.Generator().manual_seed(rank))
    ddp(x).backward()
    kept = state.state_dict()
    other = DDP(Complex())
    nc.compress_gradients(other, "int4", exempt=None).load_state_dict(kept)
    return {name: residual.numel() for name, residual in kept["sender"].items()}, trained.grads(ddp)


def test_complex_parameters_have_residuals_for_both_of_their_numbers() -> None:
    found = run(2, play, {"resumed": _resumed})
    for of_rank in found:
        numels, gradients = of_rank["resumed"]
        assert numels == {"waves": 2 * 1280, "real": 1280, "odd": 2 * 1023}
        assert all(same_bits(gradients[name], found[0]["resumed"][1][name]) for name in gradients)


def _reordered(rank: int) -> Any:
    """A state of a weight in channels_last, loaded where it is, where it is not, and from before orders were named."""

    def made(layout: torch.memory_format) -> tuple[DDP, nc.GradientCompression]:
        torch.manual_seed(0)
        ddp = DDP(nn.Conv2d(8, 16, 3, bias=False).to(memory_format=layout))
        return ddp, nc.compress_gradients(ddp, "int4")

    ddp, compression = made(torch.channels_last)
    ddp(torch.randn(2, 8, 6, 6)).sum().backward()
    state = compression.state_dict()
    same, contiguous = made(torch.channels_last)[1], made(torch.contiguous_format)[1]
    same.load_state_dict(state)
    with pytest.raises(StateDictError) as caught:
        contiguous.load_state_dict(state)
    with pytest.raises(StateDictError):
        contiguous.load_state_dict([state, state], residuals="redistribute")
    of_contiguous = {**state, "orders": {}}
    with pytest.raises(StateDictError):
        same.load_state_dict(of_contiguous)
    contiguous.load_state_dict({key: value for key, value in state.items() if key != "orders"})
    contiguous.load_state_dict(state, residuals="drop")
    return str(caught.value), contiguous.step


def test_residuals_of_a_parameter_in_another_memory_order_are_refused() -> None:
    for words, step in run(2, _reordered):
        assert words.startswith("state: the residuals of weight are in another order: strides 72, 1, 24, 8 there, ")
        assert 'load_state_dict(state, residuals="drop")' in words
        assert step == 1


@pytest.mark.parametrize(
    ("places", "total", "words"),
    [
        ([(0, 10), (10, 5)], 30, "holds 30 elements, and its parameters (p0, p1) have 15"),
        ([(0, 10), (12, 5)], 17, "p1 starts at element 12, and what is before it ends at 10"),
        ([(0, 10), (8, 5)], 13, "p1 starts at element 8, and what is before it ends at 10"),
        ([], 4, "holds 4 elements"),
    ],
)
def test_a_bucket_that_its_parameters_do_not_cover_is_refused(
    places: list[tuple[int, int]], total: int, words: str
) -> None:
    entries = [Gradient(f"p{i}", offset, numel, False) for i, (offset, numel) in enumerate(places)]
    with pytest.raises(CollectiveError) as caught:
        check_cover(entries, total)
    assert words in str(caught.value)
    assert "Update narrowcast" in str(caught.value)


def test_parameters_in_any_order_and_empty_ones_cover_a_bucket() -> None:
    check_cover([Gradient("b", 10, 5, False), Gradient("none", 10, 0, True), Gradient("a", 0, 10, True)], 15)
