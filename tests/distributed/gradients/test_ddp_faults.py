"""What goes wrong with compressed gradients: one clear error on every rank, soon, and nothing half-done is kept."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from typing import Any

import faults
import pytest
import ranks
import torch
import torch.distributed as dist
import trained
from patience import within
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from trained import SHAPES, Expected, Given, given

import narrowcast as nc
from cases import same_bits
from narrowcast import distributed as ncd
from narrowcast.distributed.gradients.ddp import average_bucket
from narrowcast.distributed.gradients.ddp_buckets import DdpBucket
from narrowcast.errors import CollectiveError, DtypeError, MismatchError, ModelKindError, SpecError

pytestmark = pytest.mark.timeout(180)

LIMIT = 3.0
SOON = 2.0


# -- before anything is sent ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"codec": "int9"}, ["int9"]),
        ({"codec": "levels:table=0.0|0.5|1.0"}, ["codec='levels:", "no gradient sense", "negative levels"]),
        ({"codec": "levels:table=-1.0|0.0"}, ["no gradient sense: it turns -1, 1 into -1, 0"]),
        ({"error_feedback": "sender"}, ["error_feedback='sender'", '"owner"', "from 4 bits to below 8"]),
        ({"warmup_steps": -1}, ["warmup_steps=-1", "0 or more"]),
        ({"warmup_steps": 2.5}, ["warmup_steps=2.5"]),
        ({"codec": lambda step: "int8"}, ["codec=<function", "a function of the step", "schedule=lambda step:"]),
        ({"schedule": 3}, ["schedule=3: ", "a function of the step", "None for no compression", "lambda step:"]),
        ({"schedule": "int4"}, ["schedule='int4': ", "a function of the step", "lambda step:"]),
        ({"schedule": lambda step: "int44"}, ["schedule(step=0): codec 'int44' does not exist", "'int4'"]),
        ({"schedule": lambda step: "int44" if step == 5 else None, "warmup_steps": 5}, ["schedule(step=5): codec"]),
        ({"schedule": lambda step: 4}, ["schedule(step=0): codec=4: expected a string"]),
        ({"exempt": "["}, ["exempt='['", "a regex"]),
        ({"exempt": [3]}, ["exempt=[3]", "a function (name, parameter) -> bool"]),
        ({"exempt": 3}, ["exempt=3: ", "a function (name, parameter) -> bool", 'exempt=["bias", "norm"]']),
        ({"exempt": b"bias"}, ["exempt=b'bias': ", "a regex"]),
        ({"exempt": [b"bias"]}, ["exempt=[b'bias']: ", "a regex", "bytes pattern"]),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(SpecError) as caught:
        nc.GradientCompression(**options)
    for word in words:
        assert word in str(caught.value)


def test_a_rule_may_answer_with_a_match_or_none() -> None:
    model = nn.Linear(2, 2)
    state = nc.GradientCompression(exempt=lambda name, _: re.search("bias", name), model=model)  # type: ignore[arg-type, return-value]
    assert state.parameters.exempts == {"weight": False, "bias": True}


def test_a_schedule_is_asked_at_once_for_the_first_step_that_it_decides() -> None:
    asked = []
    nc.GradientCompression(schedule=asked.append, warmup_steps=7)
    assert asked == [7]


@pytest.mark.parametrize("model", [nn.Linear(3, 3), torch.compile(nn.Linear(3, 3), backend="eager"), 3])
def test_a_model_that_exchanges_no_gradients_is_refused(model: Any) -> None:
    with pytest.raises(ModelKindError, match=r"^model: .*DistributedDataParallel"):
        nc.compress_gradients(model, "int8")


def _wrong_uses(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def again(how: Callable[[DDP], object]) -> BaseException | None:
        ddp = DDP(Given(SHAPES))
        how(ddp)
        return faults.error_of(lambda: nc.compress_gradients(ddp, "int8"))[0]

    def foreign(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        raise AssertionError

    found["twice"] = again(lambda ddp: nc.compress_gradients(ddp, "int8"))
    found["beside another"] = again(lambda ddp: ddp._comm_hooks.append((foreign, None)))
    ddp = DDP(Given(SHAPES))
    nc.compress_gradients(ddp, "int8")
    state = nc.GradientCompression("int8", model=ddp.module)
    found["by hand, too"] = faults.error_of(lambda: ddp.register_comm_hook(state, nc.gradient_hook))[0]
    sparse = DDP(nn.Sequential(nn.Embedding(400, 4, sparse=True), nn.Linear(4, 4)))
    nc.compress_gradients(sparse, "int8")
    found["sparse"] = faults.error_of(lambda: sparse(torch.tensor([1, 2])).sum().backward())[0]
    unhooked = DDP(Given(SHAPES))
    wrong: Any = 3
    found["no schedule"] = faults.error_of(lambda: nc.compress_gradients(unhooked, "int4", schedule=wrong))[0]
    nc.compress_gradients(unhooked, "int4")  # DDP's only hook is still to be had
    codec = "levels:table=0.0|1.0"
    late = DDP(Given(SHAPES))
    nc.compress_gradients(late, schedule=lambda step: codec if step else "int8")
    trained.backward(late, given(SHAPES, rank, 0))
    found["schedule"] = faults.error_of(lambda: trained.backward(late, given(SHAPES, rank, 1)))[0]
    return found


def _mismatches(rank: int) -> dict[str, Any]:
    """Rank 1 is configured differently: what every rank raises, and how many bytes of gradients were sent by then."""
    options: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "codec": ({"codec": "int8"}, {"codec": "int4", "error_feedback": False}),
        "block": ({"codec": "int8"}, {"codec": "int8:block=64"}),
        "feedback": ({"codec": "int4"}, {"codec": "int4", "error_feedback": "owner"}),
        "warm-up": ({"codec": "int8", "warmup_steps": 5}, {"codec": "int8", "warmup_steps": 6}),
        "schedule": ({"codec": "int4"}, {"codec": "int4", "schedule": lambda step: "int4"}),
        "exempt": ({"codec": "int4"}, {"codec": "int4", "exempt": "odd"}),
        "auto": ({"codec": "int8", "error_feedback": False}, {"codec": "auto", "error_feedback": False}),
        "none": ({"codec": "raw"}, {"codec": None}),
    }
    found = {}
    for name, sides in options.items():
        ddp = DDP(Given(SHAPES))
        error = faults.error_of(lambda s=sides, ddp=ddp: nc.compress_gradients(ddp, **s[rank == 1]))[0]  # type: ignore[misc]
        nc.compress_gradients(ddp, "raw", error_feedback=False)  # it was not registered, and the ranks can go on
        found[name] = error, trained.backward(ddp, given(SHAPES, rank, 0))
    names = DDP(Given(SHAPES if rank != 1 else {f"{name}_": shape for name, shape in SHAPES.items()}))
    found["names"] = faults.error_of(lambda: nc.compress_gradients(names, "int8"))[0], None
    hooked = DDP(Given(SHAPES))
    state = nc.GradientCompression("int4" if rank == 1 else "int2", model=hooked.module)
    hooked.register_comm_hook(state, nc.gradient_hook)
    before = {name: p.detach().clone() for name, p in hooked.named_parameters()}
    error = faults.error_of(lambda: trained.backward(hooked, given(SHAPES, rank, 0)))[0]
    assert all(same_bits(before[name], p.detach()) for name, p in hooked.named_parameters())
    found["by hook"] = error, None
    resumed = DDP(Given(SHAPES))
    state = nc.compress_gradients(resumed, "int8")
    state.load_state_dict({**state.state_dict(), "step": 5 if rank == 1 else 4})
    found["step"] = faults.error_of(lambda: trained.backward(resumed, given(SHAPES, rank, 0)))[0], None
    return found


DIFFERENT = {
    "codec": ["ranks 0, 2 called compress_gradients(codec=int8, ", "rank 1 called compress_gradients(codec=int4, "],
    "block": ["codec=int8, ", "codec=int8:block=64, "],
    "feedback": ["error_feedback=True", "error_feedback=owner"],
    "warm-up": ["warmup_steps=5", "warmup_steps=6"],
    "schedule": ["rank 1 called", ", schedule, "],
    "exempt": ["exempt=2 #", "exempt=1 #"],
    "auto": ["rank 1 called compress_gradients(codec=raw, auto, "],
    "none": ["rank 1 called compress_gradients(codec=raw, none, "],
    "names": ["ranks 0, 2 called", "parameters=6 exempt=2 #"],
    "by hook": ["codec=int2, ", "rank 1 called compress_gradients(codec=int4, "],
    "step": ["step=4, ", "step=5, "],
}


def _uses(rank: int) -> Any:
    return _wrong_uses(rank), _mismatches(rank)


@pytest.fixture(scope="module")
def uses() -> list[Any]:
    return ranks.run(3, _uses, timeout=150, group_timeout=60)


@pytest.mark.parametrize("name", DIFFERENT)
def test_ranks_that_are_configured_differently_all_raise_the_same_before_anything_is_sent(
    name: str, uses: list[Any]
) -> None:
    errors, gradients = zip(*(mismatches[name] for _, mismatches in uses), strict=True)
    assert {type(error) for error in errors} == {MismatchError}, errors
    assert len({str(error) for error in errors}) == 1
    for word in ("ranks disagree", "Nothing was sent.", *DIFFERENT[name]):
        assert word in str(errors[0])
    if gradients[0] is not None:
        right = {key: trained.average([given(SHAPES, rank, 0)[key] for rank in range(3)]) for key in SHAPES}
        assert all(same_bits(found[key], right[key]) for found in gradients for key in SHAPES), "it goes on"


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("twice", CollectiveError, "has a communication hook already"),
        ("beside another", CollectiveError, "has a communication hook already"),
        ("by hand, too", RuntimeError, "can only be called once"),  # torch's own
        (
            "sparse",
            DtypeError,
            "0.weight: its gradient is sparse, and codecs take dense ones. Make the embedding with sparse=False.",
        ),
        ("no schedule", SpecError, "schedule=3: "),
        ("schedule", SpecError, "schedule(step=1): codec='levels:table=0.0|1.0' has no gradient sense"),
    ],
)
def test_wrong_uses_are_refused(name: str, kind: type, words: str, uses: list[Any]) -> None:
    for wrong, _ in uses:
        assert type(wrong[name]) is kind, wrong[name]
        assert words in str(wrong[name])


# -- while a step is under way ----------------------------------------------------------------------------------------

BUCKETS = 0.004
"""MB: four buckets, all handed over while the first one is on its way."""


def _trainer(rank: int, cap: float = 25.0) -> tuple[DDP, Any]:
    """After two steps: DDP has rebuilt its buckets, and uses its own collectives no more."""
    ddp = DDP(Given(SHAPES), bucket_cap_mb=cap)
    state = nc.compress_gradients(ddp, "int4", seed=1)
    for step in range(2):
        trained.backward(ddp, given(SHAPES, rank, step))
    ncd.all_reduce(torch.ones(1))
    dist.barrier()
    return ddp, state


def _try(ddp: DDP, rank: int, step: int) -> tuple[BaseException | None, float]:
    return faults.error_of(lambda: trained.backward(ddp, given(SHAPES, rank, step)))


def _one_dies(rank: int, place: str) -> Any:
    ddp, _ = _trainer(rank, BUCKETS)
    if rank == 2:
        faults.at(place, faults.die)
    return [_try(ddp, rank, step) for step in (2, 3)]


@pytest.mark.parametrize("place", ["encoding", "stage one", "between stages"])
def test_survivors_of_a_killed_rank_raise_from_backward_and_name_it(place: str) -> None:
    outcomes = ranks.outcomes_of(3, _one_dies, place, timeout=60)
    assert outcomes[2].exitcode == -signal.SIGKILL
    for outcome in outcomes[:2]:
        assert outcome.error is None, outcome.trace
        for error, seconds in outcome.value:
            assert type(error) is CollectiveError  # though DDP makes a RuntimeError of what fails in a hook's future
            assert "gradients: rank 2 is gone" in str(error)
            assert seconds < within(SOON + 1.0)


def _one_leaves(rank: int, how: str) -> Any:
    ddp, _ = _trainer(rank)
    if rank == 1 and how == "forward":
        raise ValueError("a bad batch")
    if rank == 1:
        return None
    return _try(ddp, rank, 2)


@pytest.mark.parametrize("how", ["forward", "done"])
def test_ranks_that_wait_for_one_that_raised_and_left_say_so(how: str) -> None:
    outcomes = ranks.outcomes_of(3, _one_leaves, how, timeout=60)
    assert how == "done" or type(outcomes[1].error) is ValueError
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.error is None, outcome.trace
        error, seconds = outcome.value
        assert "gradients: rank 1 is gone" in str(error)
        assert seconds < within(SOON + 1.0)


def _one_fails(rank: int, fault: str, place: str, cap: float) -> Any:
    """Step 2 fails; what steps 3 and 4 give, and whether the failure changed a residual."""
    ddp, state = _trainer(rank, cap)
    before = state.state_dict()
    if rank == 2:
        faults.at(place, {"raises": faults.run_out_of_memory, "stops": faults.stop}[fault])
    failed = _try(ddp, rank, 2)
    if fault == "stops":
        time.sleep(0.5)
    after = state.state_dict()
    left = [same_bits(r, after[which][name]) for which in ("sender", "owner") for name, r in before[which].items()]
    later = [trained.backward(ddp, given(SHAPES, rank, step)) for step in (3, 4)]
    return failed, left, later, state.step


class _OfDtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(40, 40, dtype=torch.bfloat16), nn.Linear(40, 40)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x.bfloat16()).float()).square().mean()  # type: ignore[no-any-return]


def _fails_at_first(rank: int) -> Any:
    ddp = DDP(_OfDtypes(), static_graph=True, bucket_cap_mb=25)
    nc.compress_gradients(ddp, "int4")
    if rank == 1:
        faults.at("encoding", faults.run_out_of_memory)
    return faults.error_of(lambda: ddp(torch.ones(4, 40)).backward())[0]


def test_a_failure_in_the_first_step_of_a_static_graph_is_raised() -> None:
    """DDP says of none of its buckets that it is the last one."""
    here, there = ranks.run(2, _fails_at_first)
    assert type(here) is CollectiveError
    assert type(there) is MemoryError


def _wake(processes: list[Any]) -> None:
    faults.wait_until_stopped(processes[2].pid)
    time.sleep(1.3 * LIMIT)
    os.kill(processes[2].pid, signal.SIGCONT)


@pytest.mark.parametrize(
    ("fault", "place", "cap"),
    [
        ("raises", "stage one", 25.0),
        ("raises", "between stages", 25.0),
        ("raises", "stage one", BUCKETS),
        ("stops", "stage one", 25.0),
    ],
)
def test_after_a_step_that_failed_training_goes_on_and_nothing_of_it_is_sent_again(
    fault: str, place: str, cap: float
) -> None:
    found = ranks.run(
        3,
        _one_fails,
        fault,
        place,
        cap,
        timeout=100,
        group_timeout=LIMIT if fault == "stops" else 30.0,
        meanwhile=_wake if fault == "stops" else None,
    )
    expected = Expected(nc.codec("int4"), 3, True)  # as if there had been no step 2
    right = [expected.step([given(SHAPES, rank, step) for rank in range(3)]) for step in (0, 1, 3, 4)][2:]
    why = "rank 2 failed in it: MemoryError" if fault == "raises" else "rank 2 did not answer"
    for rank, ((error, seconds), left, later, steps) in enumerate(found):
        assert type(error) is (MemoryError if rank == 2 and fault == "raises" else CollectiveError)
        assert ("no room left for codes" if rank == 2 and fault == "raises" else why) in str(error)
        assert rank == 2 or seconds < within(LIMIT + 1.0 if fault == "stops" else SOON)
        assert left, "there are residuals"
        assert all(left), "what the failed step left does not count, in any of its buckets"
        assert steps == 5
        for one, other in zip(later, right, strict=True):
            assert all(same_bits(one[name], other[name]) for name in other)


def _never_there(rank: int) -> Any:
    """A rank that makes no step, and one that makes another call in its place."""
    ddp, _ = _trainer(rank)
    if rank == 2:
        time.sleep(1.5 * LIMIT)
        return None
    return _try(ddp, rank, 2)


def test_a_rank_that_makes_no_step_is_named_when_the_time_is_up() -> None:
    found = ranks.run(3, _never_there, timeout=60, group_timeout=LIMIT)
    for error, seconds in found[:2]:
        assert "rank 2 did not answer" in str(error)
        assert 0.8 * LIMIT < seconds < within(LIMIT + 1.5)


def _no_group() -> BaseException | None:
    state = nc.GradientCompression("int8")
    return faults.error_of(lambda: average_bucket(state, DdpBucket(torch.ones(3), [], [], 0, True)))[0]


def test_without_a_process_group_the_error_says_what_to_call() -> None:
    error = _no_group()
    assert type(error) is CollectiveError
    assert "init_process_group" in str(error)
