"""Where ranks cannot train alone, and what is said of it."""

from __future__ import annotations

from typing import Any

import faults
import pytest
import torch
import trained
from meeting_runs import made, vector
from momentum_runs import SHAPES
from ranks import run
from torch.nn.parallel import DistributedDataParallel as DDP

import narrowcast as nc
from narrowcast.errors import CollectiveError, MismatchError, SpecError

pytestmark = pytest.mark.timeout(180)


class _Wrapper:
    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer


def _refusals(rank: int) -> Any:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    ddp = DDP(trained.Given(SHAPES))
    ours = torch.optim.AdamW(ddp.parameters(), 1e-3)
    named = dict(ddp.module.named_parameters())
    some = torch.optim.AdamW([p for name, p in named.items() if name != "odd"], 1e-3)
    rest = torch.optim.SGD([named["odd"]], 1e-3)
    wrong: dict[str, dict[str, Any]] = {
        "optimizer=None: with sync_every=": {"optimizer": None},
        "optimizer=list: with sync_every=": {"optimizer": [[ours]]},
        "optimizer=str: with sync_every=": {"optimizer": "AdamW"},
        "does not hold bias": {"optimizer": torch.optim.AdamW(trained.Given(SHAPES).parameters(), 1e-3)},
        "does not hold odd of the model": {"optimizer": some},
        "name all of several": {"optimizer": rest},
        "LBFGS with sync_every=": {"optimizer": torch.optim.LBFGS(ddp.parameters())},
        "sends them to the others in every step": {
            "optimizer": ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1)
        },
        "sync_every=0: 0 is not a number": {"sync_every": 0},
        "sync_every='often'": {"sync_every": "often"},
        "sync_every(step=3): None": {"sync_every": lambda step: None, "warmup_steps": 3},
        "outer_lr=0:": {"outer_lr": 0},
        "outer_momentum=1.0:": {"outer_momentum": 1.0},
        "outer_lr=0.7: it is of the step after a meeting": {"sync_every": None, "outer_lr": 0.7},
        "outer_momentum=0.9: it is of the step after a meeting": {"sync_every": None, "outer_momentum": 0.9},
        "momentum= with sync_every=4": {"momentum": nc.optim.AdamW(ddp.parameters(), 1e-3), "warmup_steps": 2},
        "scaler:": {"scaler": torch.amp.GradScaler("cpu")},
        "refresh=8": {"refresh": 8},
    }
    errors = {}
    for words, options in wrong.items():
        given = {"codec": "int4", "sync_every": 4, "optimizer": ours, **options}
        errors[words] = faults.error_of(lambda given=given: nc.compress_gradients(ddp, **given))[0]
    assert not ours._optimizer_step_post_hooks  # none of them has left anything behind
    nc.compress_gradients(ddp, "int4", sync_every=4, optimizer=[_Wrapper(some), rest])
    errors["hook already"] = faults.error_of(lambda: nc.compress_gradients(ddp, "int4", sync_every=4, optimizer=ours))[
        0
    ]
    assert not ours._optimizer_step_post_hooks
    return errors


def test_what_cannot_be_is_refused_with_the_reason() -> None:
    for errors in run(2, _refusals):
        for words, error in errors.items():
            assert isinstance(error, SpecError | CollectiveError), (words, error)
            assert words in str(error), (words, error)


def _sharded(rank: int) -> Any:
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(trained.mlp(width=40))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    return faults.error_of(lambda: nc.compress_gradients(model, "int4", sync_every=2, optimizer=optimizer))[0]


def test_fsdp2_is_refused_in_words() -> None:
    for error in run(2, _sharded):
        assert isinstance(error, SpecError)
        assert "sync_every: under FSDP2" in str(error)


def _two(step: int) -> int:
    return 2


def _three(step: int) -> int:
    return 3


def _disagreeing(rank: int, name: str, values: tuple[Any, Any]) -> Any:
    return faults.error_of(lambda: made(**{name: values[rank]}))[0]


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("sync_every", (3, 4)),
        ("sync_every", (3, "growing")),
        ("sync_every", ([1, 2], [1, 3])),
        ("sync_every", (3, _three)),
        ("outer_lr", (1.0, 0.7)),
        ("outer_momentum", (0.0, 0.9)),
        ("warmup_steps", (2, 3)),
    ],
)
def test_ranks_that_disagree_are_told_so_on_every_rank_before_training(name: str, values: Any) -> None:
    errors = run(2, _disagreeing, name, values)
    assert all(type(error) is MismatchError for error in errors), errors
    assert len({str(error) for error in errors}) == 1
    assert name in str(errors[0])


def _functions(rank: int) -> Any:
    ddp, optimizer, _ = made(sync_every=_two if rank == 0 else _three)
    return faults.error_of(lambda: trained.train(ddp, rank, range(6), optimizer))[0]


def test_functions_that_disagree_are_noticed_when_ranks_meet() -> None:
    errors = run(2, _functions)
    assert all(isinstance(error, CollectiveError) for error in errors), errors
    assert all("step=2" in str(error) and "step=3" in str(error) for error in errors), errors


def _apart(rank: int) -> Any:
    """Parameters differ from the start: DDP was told not to copy the first rank's."""
    ddp = DDP(trained.mlp(seed=rank, width=40), init_sync=False)
    optimizer = torch.optim.AdamW(ddp.parameters(), 0.01)
    nc.compress_gradients(ddp, "int4", sync_every=2, optimizer=optimizer)
    before = vector(ddp)
    error = faults.error_of(lambda: trained.train(ddp, rank, range(4), optimizer))[0]
    return error, torch.equal(before, vector(ddp))


def test_ranks_that_start_from_other_parameters_are_told_so() -> None:
    results = run(2, _apart)
    for error, _ in results:
        assert type(error) is MismatchError, error
        assert "from #" in str(error)
    assert str(results[0][0]) == str(results[1][0])


def _joined(rank: int) -> Any:
    ddp, optimizer, _ = made()

    def uneven() -> None:
        with ddp.join():
            trained.train(ddp, rank, range(1 + rank), optimizer)

    return faults.error_of(uneven)[0]


def test_join_is_refused_on_every_rank() -> None:
    for error in run(2, _joined):
        assert type(error) is SpecError, error
        assert "join() with sync_every=" in str(error)


def _killed(rank: int) -> Any:
    ddp, optimizer, state = made(sync_every=2)
    trained.train(ddp, rank, range(3), optimizer)
    before = state.meetings.count
    if rank == 1:
        faults.at("stage one", faults.die)
    error, seconds = faults.error_of(lambda: trained.train(ddp, rank, range(3, 4), optimizer))
    return error, seconds, before, state.meetings.count, state.meetings.since


def test_a_rank_that_dies_in_a_meeting_is_named_by_all_others_and_changes_nothing() -> None:
    from ranks import outcomes_of

    outcomes = outcomes_of(3, _killed, group_timeout=20.0)
    for rank in (0, 2):
        error, seconds, before, after, since = outcomes[rank].value
        assert isinstance(error, CollectiveError), error
        assert "rank 1" in str(error)
        assert seconds < 15
        assert (before, after, since) == (1, 1, 2)


def _out_of_memory(rank: int, place: str) -> Any:
    ddp, optimizer, state = made(sync_every=2)
    trained.train(ddp, rank, range(3), optimizer)
    if rank == 1:
        faults.at(place, faults.run_out_of_memory)
    error = faults.error_of(lambda: trained.train(ddp, rank, range(3, 4), optimizer))[0]
    count = state.meetings.count
    trained.train(ddp, rank, range(4, 9), optimizer)
    state.sync()
    return error, count, state.meetings.count, vector(ddp)


@pytest.mark.parametrize(
    ("place", "count"),
    [
        ("encoding", 4),  # in backward, where ranks tell whether gradients are finite: meetings after 2, 5, 7, 9 steps
        ("between stages", 5),  # in the meeting: after 2, 4 (before the next forward), 6, 8, and 9 by sync()
    ],
)
def test_a_meeting_that_failed_on_one_rank_fails_on_all_and_is_held_later(place: str, count: int) -> None:
    results = run(3, _out_of_memory, place)
    for error, before, after, _ in results:
        assert error is not None
        assert "no room left for codes" in str(error) or isinstance(error, MemoryError)
        assert (before, after) == (1, count)
    assert all(torch.equal(results[0][3], other[3]) for other in results[1:])


# -- two hooks with a momentum ----------------------------------------------------------------------------------------


def _two_hooks(rank: int, twice: bool) -> Any:
    ddp = DDP(trained.mlp(width=40))
    optimizer = nc.optim.AdamW(ddp.parameters(), 0.01)
    given: dict[str, Any] = {"momentum": optimizer, "warmup_steps": 2, "seed": 3}
    nc.compress_gradients(ddp, "sign", **given)
    error = None
    if twice:
        error = faults.error_of(lambda: nc.compress_gradients(ddp, "int2", **given))[0]
    trained.train(ddp, rank, range(6), optimizer)
    return error, vector(ddp)


def test_a_second_hook_with_a_momentum_is_refused_and_disturbs_nothing() -> None:
    for (error, found), (_, meant) in zip(run(2, _two_hooks, True), run(2, _two_hooks, False), strict=True):
        assert type(error) is CollectiveError, error
        assert "has a communication hook already" in str(error)
        assert torch.equal(found, meant)
