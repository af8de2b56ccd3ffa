"""Parameters gathered in a codec: what forward and backward compute with, and what stays exact."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import sharded
import torch
import trained
from ranks import play, run
from sharded import padded, shard, whole
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from trained import exempt, given

import narrowcast as nc
from cases import same_bits

pytestmark = pytest.mark.timeout(180)

SHAPES = {"bias": (37,), "even": (32, 64), "tiny": (3, 5), "odd": (53, 41), "norm": (1200,), "prime": (1009, 1)}
LARGE = {"large": (1000, 1500), "norm": (300,), "larger": (700, 3001)}
"""3.6 million elements, in pieces of 2 million."""


class Seen(nn.Module):
    """A module that hands out the parameters which it computes with."""

    def __init__(self, shapes: trained.Shapes, frozen: str | None = None) -> None:
        super().__init__()
        for name, value in given(shapes, 0, 0).items():
            self.register_parameter(name, nn.Parameter(value))
        if frozen is not None:
            low = self.get_parameter(frozen).detach().bfloat16()
            self.register_parameter(frozen, nn.Parameter(low, requires_grad=False))

    def forward(self) -> dict[str, Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.named_parameters()}


def _expected(shapes: trained.Shapes, codec: str, world: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Every rank's shard after a trip, put together."""
    found = {}
    for name, value in given(shapes, 0, 0).items():
        value = value.to(dtype)
        rows = padded(value, world)
        if not exempt(value.shape, world):
            width = (1 << 19) // (world * 128) * 128
            coded = nc.codec(codec)
            cuts = [coded.decode(coded.encode(c), c.shape[1], dtype) for c in rows.split(width, 1)]
            rows = torch.cat(cuts, 1)
        found[name] = rows.reshape(-1)[: value.numel()].view(value.shape)
    return found


# -- what is computed with --------------------------------------------------------------------------------------------


def in_fp32(rank: int) -> Any:
    module = fully_shard(Seen(SHAPES))
    state = nc.compress_gradients(module, gather="int4")
    seen = [module()]
    module.reshard()
    with torch.no_grad():
        seen.append(module.eval()())
    return seen, sharded.parameters_of(module), state.stats()


def in_bf16(rank: int) -> Any:
    module = fully_shard(Seen(SHAPES), mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    nc.compress_gradients(module, gather="int8:block=row")
    return module(), sharded.parameters_of(module)


def in_pieces(rank: int) -> Any:
    module = fully_shard(Seen(LARGE))
    state = nc.compress_gradients(module, None, gather="int8")
    right = _expected(LARGE, "int8", 2)
    return {name: same_bits(value, right[name]) for name, value in module().items()}, state.stats()


def in_backward(rank: int) -> Any:
    """The gradient of x in x W' is W itself, where that of the result is the identity."""
    torch.manual_seed(0)
    layer = nn.Linear(40, 64, bias=False)
    module = shard(nn.Sequential(layer, nn.Identity()), "0", reshard_after_forward=True)
    nc.compress_gradients(module, gather="int4")
    x = torch.zeros(64, 40, requires_grad=True)
    module(x).backward(torch.eye(64))
    assert x.grad is not None
    rows = padded(whole(layer.weight.detach()), 2)
    coded = nc.codec("int4")
    return x.grad, coded.decode(coded.encode(rows), rows.shape[1]).view(64, 40)


def of_several_dtypes(rank: int) -> Any:
    module = fully_shard(Seen(SHAPES, frozen="odd"))
    state = nc.compress_gradients(module, gather="int4")
    return module(), state.stats()


SCENES = {scene.__name__: scene for scene in (in_fp32, in_bf16, in_pieces, in_backward, of_several_dtypes)}


@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    return run(2, play, {**SCENES, "trained": _trained}, timeout=150)


def test_every_rank_computes_with_the_bytes_that_were_sent_and_keeps_its_own_exact(two: list[dict[str, Any]]) -> None:
    right, exact = _expected(SHAPES, "int4", 2), given(SHAPES, 0, 0)
    assert not torch.equal(right["odd"], exact["odd"])
    for of_rank in two:
        seen, kept, stats = of_rank["in_fp32"]
        for once in seen:
            assert all(same_bits(once[name], right[name]) for name in right)
        assert all(same_bits(kept[name], exact[name]) for name in exact)
        assert stats.gather_sent_bytes < stats.gather_plain_bytes / 3  # exempt ones and two headers among them
        assert stats.uncompressed == {}


def test_mixed_precision_gathers_in_its_own_dtype(two: list[dict[str, Any]]) -> None:
    right, exact = _expected(SHAPES, "int8:block=row", 2, torch.bfloat16), given(SHAPES, 0, 0)
    for of_rank in two:
        seen, kept = of_rank["in_bf16"]
        assert all(same_bits(seen[name], right[name]) for name in right)
        assert all(same_bits(kept[name], exact[name]) for name in exact)


def test_a_group_of_several_pieces_is_gathered_to_the_same_bits(two: list[dict[str, Any]]) -> None:
    for of_rank in two:
        same, stats = of_rank["in_pieces"]
        assert same == dict.fromkeys(LARGE, True)
        assert stats.gather_sent_bytes < stats.gather_plain_bytes / 3.8  # int8 in blocks of 128: 8.25 bits or less
        assert stats.gather_plain_bytes == 4 * (1_500_000 // 2 + 150 + 350 * 3001)


def test_backward_finds_what_forward_found(two: list[dict[str, Any]]) -> None:
    for of_rank in two:
        found, right = of_rank["in_backward"]
        assert same_bits(found, right)


def test_parameters_of_several_dtypes_are_left_to_torch_and_counted(two: list[dict[str, Any]]) -> None:
    exact = given(SHAPES, 0, 0)
    for of_rank in two:
        seen, stats = of_rank["of_several_dtypes"]
        assert all(torch.equal(seen[name], exact[name].to(seen[name].dtype)) for name in exact)
        assert stats.uncompressed == {"gather: parameters of several dtypes": 1}


# -- training ---------------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = trained.mlp()
        self.one, self.two = nn.Linear(24, 24), nn.Linear(24, 24)
        self.two.weight = self.one.weight
        self.grow = nn.Linear(4, 24)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(self.grow(self.inner(x))).tanh())[:, :4]


def _model() -> tuple[Any, Any, torch.optim.Optimizer]:
    torch.manual_seed(5)
    module = shard(Tied(), "inner.0", "inner.3", "inner", reshard_after_forward=True)
    state = nc.compress_gradients(module, "int2:stochastic=true", error_feedback=True, gather="int8")
    return module, state, trained.sgd(module)


def _trained(rank: int) -> Any:
    """Six steps, and six steps with all thrown away and loaded again after the third."""
    module, state, optimizer = _model()
    trained.train(module, rank, range(3), optimizer)
    saved = io.BytesIO()
    torch.save(state.state_dict(), saved)
    parts = {name: p.detach().to_local().clone() for name, p in module.named_parameters()}
    momentum = copy.deepcopy(optimizer.state_dict())
    trained.train(module, rank, range(3, 6), optimizer)

    again, fresh, other = _model()
    with torch.no_grad():
        for name, p in again.named_parameters():
            p.to_local().copy_(parts[name])
    other.load_state_dict(momentum)
    saved.seek(0)
    fresh.load_state_dict(torch.load(saved, weights_only=True))
    trained.train(again, rank, range(3, 6), other)
    names = sorted(state.state_dict()["sender"])
    return sharded.parameters_of(module), sharded.parameters_of(again), names, (state.step, fresh.step)


def test_going_on_from_a_saved_state_equals_never_having_stopped(two: list[dict[str, Any]]) -> None:
    for of_rank in two:
        never, again, names, steps = of_rank["trained"]
        assert never.keys() == again.keys()
        assert all(same_bits(never[name], again[name]) for name in never)
        assert steps == (6, 6)
        assert names == ["inner.3.weight", "one.weight"]  # tied: once
        assert all(same_bits(never[name], two[0]["trained"][0][name]) for name in never)


def _fewer(rank: int) -> Any:
    """Backward gathers from two of four ranks, what forward left there."""
    torch.manual_seed(0)
    layer = nn.Linear(40, 64, bias=False)
    module = shard(nn.Sequential(layer, nn.Identity()), "0", reshard_after_forward=2)
    state = nc.compress_gradients(module, gather="int4")
    x = torch.zeros(64, 40, requires_grad=True)
    module(x).backward(torch.eye(64))
    assert x.grad is not None
    rows = padded(whole(layer.weight.detach()), 4)
    coded = nc.codec("int4")
    right = coded.decode(coded.encode(rows), rows.shape[1]).view(64, 40)
    return same_bits(x.grad, right), state.stats().uncompressed


def test_what_is_resharded_to_fewer_ranks_is_not_quantized_again() -> None:
    assert run(4, _fewer) == [(True, {"gather: resharded to fewer ranks": 1})] * 4
