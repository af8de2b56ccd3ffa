"""What compress_gradients refuses on FSDP2 models, in which words, and that it then changes nothing."""

from __future__ import annotations

import types
from typing import Any

import faults
import pytest
import sharded
import torch
import torch.distributed as dist
import trained
from ranks import outcomes_of, run
from sharded import SHAPES, Stack, stack
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from trained import Given, given

import narrowcast as nc
from cases import same_bits
from narrowcast.distributed.gradients.fsdp import groups
from narrowcast.errors import CollectiveError, MismatchError, ModelKindError, NarrowcastError, SpecError, StateDictError


def _said(function: Any, *args: Any, **options: Any) -> tuple[type, str]:
    try:
        function(*args, **options)
    except NarrowcastError as error:
        return type(error), str(error)
    return type(None), ""


def _refusals(rank: int) -> dict[str, tuple[type, str]]:
    found = {
        "gather on DDP": _said(nc.compress_gradients, DDP(nn.Linear(4, 4)), gather="int8"),
        "neither": _said(nc.compress_gradients, nn.Linear(4, 4)),
        "FSDP1": _said(nc.compress_gradients, FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))),
    }
    module = stack()
    found["owner"] = _said(nc.compress_gradients, module, error_feedback="owner")
    found["group"] = _said(nc.compress_gradients, module, process_group=dist.new_group())
    found["random"] = _said(nc.compress_gradients, module, gather="int8:stochastic=true")
    found["unsigned"] = _said(nc.compress_gradients, module, gather="levels:table=0.0|1.0")
    state = nc.compress_gradients(module.first, "int4")  # a part of it
    found["twice"] = _said(nc.compress_gradients, module)
    sharded.backward(module, given(sharded.STACK, rank, 0))
    saved = state.state_dict()
    other = nc.compress_gradients(fully_shard(Given(SHAPES)), "int4")
    found["another rank"] = _said(other.load_state_dict, {**saved, "rank": 1 - rank})
    found["another model"] = _said(
        nc.compress_gradients(fully_shard(Given({"even": (16, 64)})), "int4").load_state_dict, saved
    )
    found["buckets"] = (type(None), repr(sorted(state.stats().buckets)))
    return found


@pytest.fixture(scope="module")
def refused() -> dict[str, tuple[type, str]]:
    found: dict[str, tuple[type, str]] = run(2, _refusals)[0]
    return found


@pytest.mark.parametrize(
    ("case", "kind", "words"),
    [
        ("gather on DDP", SpecError, "gather='int8': DistributedDataParallel keeps all parameters on every rank"),
        ("neither", ModelKindError, "model: Linear exchanges no gradients. Wrap it first"),
        ("FSDP1", ModelKindError, "is FSDP1, which has no place for a codec. Use fully_shard"),
        ("owner", SpecError, "error_feedback='owner': FSDP2 keeps sums where they are made"),
        ("group", SpecError, "process_group: an FSDP2 model exchanges gradients over the mesh"),
        ("random", SpecError, "the codec may not round at random"),
        ("unsigned", SpecError, "has no gradient sense"),
        ("twice", CollectiveError, "has a collective of its own already"),
        ("another rank", StateDictError, "taken by rank 1 of 2, loaded by rank 0 of 2"),
        ("another model", StateDictError, "which this model does not have in that size"),
    ],
)
def test_what_cannot_be_is_refused(case: str, kind: type, words: str, refused: dict[str, tuple[type, str]]) -> None:
    assert refused[case][0] is kind
    assert words in refused[case][1]


def test_a_part_of_a_model_can_be_compressed_alone(refused: dict[str, tuple[type, str]]) -> None:
    assert refused["buckets"][1] == "[0]"


def _differing(rank: int, options: list[dict[str, Any]]) -> None:
    nc.compress_gradients(fully_shard(Stack()), "int4", **options[rank])


@pytest.mark.parametrize("options", [[{}, {"gather": "int8"}], [{"gather": "int8"}, {"gather": "int4"}]])
def test_ranks_that_gather_differently_are_told_so_on_every_rank(options: list[dict[str, Any]]) -> None:
    outcomes = outcomes_of(2, _differing, options)
    assert all(isinstance(outcome.error, MismatchError) for outcome in outcomes)
    assert str(outcomes[0].error) == str(outcomes[1].error)
    assert "gather=int8" in str(outcomes[0].error)


def _one_fails(rank: int, shapes: Any) -> Any:
    """Step 0 is well; in step 1 the last rank fails when everything was swapped. Residuals before and after."""
    module = fully_shard(Given(shapes))
    state = nc.compress_gradients(module, "int4")
    sharded.backward(module, given(shapes, rank, 0))
    before = state.state_dict()["sender"]
    if rank == 1:
        faults.at("decoding", faults.run_out_of_memory)
    with pytest.raises((MemoryError, RuntimeError), match="no room left for codes"):
        module(given(shapes, rank, 1)).backward()
    return before, state.state_dict()["sender"]


@pytest.mark.parametrize("shapes", [{"small": (40, 64)}, {"large": (1000, 1500)}], ids=["with the header", "in pieces"])
def test_when_one_rank_fails_all_of_them_hear_of_it_and_their_residuals_are_those_from_before(shapes: Any) -> None:
    for before, after in run(2, _one_fails, shapes):
        for name in shapes:
            assert before[name].any()
            assert same_bits(before[name], after[name])


def _broken_off(rank: int) -> Any:
    """After a collective that failed, and an error of one's own in a hook: what the next forward does."""
    found = []
    for fails in ("collective", "hook"):
        module = sharded.dropping()
        nc.compress_gradients(module, "int4")

        def backward(step: int, module: Any = module) -> None:
            module(trained.batch(rank, step), step % 2).square().mean().backward()

        def raise_it(*_: Any) -> None:
            raise KeyError("mine")

        backward(0)
        if fails == "hook":
            module.first.register_full_backward_hook(raise_it)
        elif rank == 1:
            faults.at("encoding", faults.run_out_of_memory)
        first, again = faults.error_of(lambda: backward(1))[0], faults.error_of(lambda: backward(2))[0]
        found.append((type(first).__name__, type(again).__name__, str(again)))
    return found


def test_after_a_backward_that_broke_off_forward_raises_since_torch_would_reduce_no_more() -> None:
    for rank, ((collective, *after), (hook, *later)) in enumerate(run(2, _broken_off)):
        assert (collective, hook) == (("CollectiveError", "MemoryError")[rank], "KeyError")
        for kind, words in (after, later):
            assert kind == "CollectiveError"
            assert "a backward of this model broke off" in words
            assert "load a checkpoint" in words


def test_a_torch_that_is_arranged_differently_is_named() -> None:
    module: Any = types.SimpleNamespace(_get_fsdp_state=lambda: None)
    strange = types.SimpleNamespace(fsdp_params=[], mesh_info=None)
    with pytest.raises(CollectiveError, match=r"torch 2\..* arranges FSDP2 in another way than 2.11 to 2.15"):
        groups._check(module, strange)
