"""What compressed gradients remember: resuming is not stopping, to the bit; what does not fit changes nothing."""

from __future__ import annotations

import io
from typing import Any

import faults
import pytest
import torch
import trained
from ranks import run
from torch.nn.parallel import DistributedDataParallel as DDP

import narrowcast as nc
from cases import same_bits
from narrowcast.errors import StateDictError

pytestmark = pytest.mark.timeout(180)

STOP, END = 3, 7


def _alternate(step: int) -> str | None:
    return ("int4", None, "int2")[step % 3]


CONFIGS: dict[str, dict[str, Any]] = {
    "int4": {"codec": "int4"},
    "stochastic": {"codec": "int4:stochastic=true"},
    "stochastic without feedback": {"codec": "int8:stochastic=true", "error_feedback": False},
    "sign after a warm-up that is not over": {"codec": "sign", "warmup_steps": 5},
    "sign after a warm-up": {"codec": "sign:block=24", "warmup_steps": 2},
    "owner": {"codec": "int2", "error_feedback": "owner"},
    "schedule": {"codec": None, "schedule": _alternate},
}


class Run:
    """A model in training. Its weights are no multiple of a block a rank; its buckets are rebuilt after a step."""

    def __init__(self, rank: int, *, hooked: bool = False, **options: Any) -> None:
        self.rank = rank
        self.ddp = DDP(trained.mlp(width=25), bucket_cap_mb=0.002)
        self.optimizer = trained.sgd(self.ddp)
        if hooked:
            self.state = nc.GradientCompression(**{"model": self.ddp.module, **options})
            self.ddp.register_comm_hook(self.state, nc.gradient_hook)
        else:
            self.state = nc.compress_gradients(self.ddp, **options)

    def train(self, first: int, end: int) -> trained.Named:
        trained.train(self.ddp, self.rank, range(first, end), self.optimizer)
        return trained.parameters_of(self.ddp)

    def save(self) -> bytes:
        file = io.BytesIO()
        parts = (self.ddp.module, self.optimizer, self.state)
        torch.save([part.state_dict() for part in parts], file)
        return file.getvalue()

    def load(self, saved: bytes) -> None:
        model, optimizer, state = torch.load(io.BytesIO(saved), weights_only=True)
        self.ddp.module.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)
        self.state.load_state_dict(state)


def _resume(rank: int) -> Any:
    """Each configuration four times: straight on, stopped and resumed, the same by hook, and taken back in place."""
    found = {}
    for name, options in CONFIGS.items():
        straight = Run(rank, **options)
        straight.train(0, STOP)
        saved = straight.save()
        right = straight.train(STOP, END)
        resumed, hooked = Run(rank, **options), Run(rank, hooked=True, **options)
        after = []
        for other in (resumed, hooked):
            other.load(saved)
            after.append(other.train(STOP, END))
        straight.load(saved)
        after.append(straight.train(STOP, END))
        found[name] = right, after, [run.state.step for run in (resumed, hooked, straight)]
    return found


@pytest.fixture(scope="module")
def resumed() -> list[Any]:
    return run(3, _resume, timeout=150)


@pytest.mark.parametrize("name", CONFIGS)
def test_resuming_is_not_stopping_to_the_bit(name: str, resumed: list[Any]) -> None:
    for of_rank in resumed:
        right, after, steps = of_rank[name]
        assert steps == [END] * 3
        for way, found in zip(("resumed", "by hook", "taken back"), after, strict=True):
            for key, parameter in right.items():
                assert same_bits(found[key], parameter), (way, key)


def _residuals_matter(rank: int) -> Any:
    """What resuming without residuals, or with another seed, would give."""
    found = []
    for codec in ("int4", "int8:stochastic=true"):
        straight = Run(rank, codec=codec)
        straight.train(0, STOP)
        saved, state = straight.save(), straight.state.state_dict()
        right = straight.train(STOP, END)
        other = Run(rank, codec=codec)
        other.load(saved)
        other.state.load_state_dict({**state, "seed": 1, "sender": {}, "owner": {}, "ranks": 0, "rank": 0})
        found.append((right, other.train(STOP, END)))
    return found


def _snapshots(rank: int) -> Any:
    straight = Run(rank, codec="int4")
    straight.train(0, STOP)
    state = straight.state.state_dict()
    copy = torch.load(io.BytesIO(_saved(state)), weights_only=True)
    straight.train(STOP, END)
    untouched = _same_states(state, copy)
    other = Run(rank, codec="int4")
    other.load(straight.save())
    loaded = other.state.state_dict()
    same = _same_states(loaded, straight.state.state_dict())
    other.train(END, END + 1)
    return untouched, same, _same_states(loaded, straight.state.state_dict()), state


def _saved(state: dict[str, Any]) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def _same_states(one: dict[str, Any], other: dict[str, Any]) -> bool:
    plain = all(one[key] == other[key] for key in one if key not in ("sender", "owner"))
    return plain and all(
        one[which].keys() == other[which].keys()
        and all(same_bits(one[which][name], other[which][name]) for name in one[which])
        for which in ("sender", "owner")
    )


def _scenes(rank: int) -> Any:
    return _residuals_matter(rank), _snapshots(rank), _refused(rank)


def _nameless(rank: int) -> Any:
    """A state that was never told the model: parameters are numbered as they come."""
    options: dict[str, Any] = {"codec": "int4:stochastic=true", "model": None}
    straight, resumed = (Run(rank, hooked=True, **options) for _ in range(2))
    straight.train(0, STOP)
    resumed.load(straight.save())
    return straight.train(STOP, END), resumed.train(STOP, END), list(straight.state.state_dict()["sender"])


def test_resuming_is_exact_without_names_too() -> None:
    for straight, resumed, names in run(2, _nameless, timeout=150):
        assert all(name.startswith("parameter ") for name in names)
        assert names
        assert all(same_bits(straight[key], resumed[key]) for key in straight)


@pytest.fixture(scope="module")
def scenes() -> list[Any]:
    return run(2, _scenes, timeout=150)


def test_residuals_and_seeds_make_a_difference(scenes: list[Any]) -> None:
    for (feedback, stochastic), _, _ in scenes:
        for right, other in (feedback, stochastic):
            assert not all(same_bits(right[key], other[key]) for key in right)


def test_a_state_is_a_snapshot_of_plain_values_and_tensors(scenes: list[Any]) -> None:
    for rank, (_, (untouched, same, still, state), _) in enumerate(scenes):
        assert untouched, "later steps do not write into a state that was taken"
        assert same, "what was loaded and not used yet is what would be saved"
        assert still, "nor into one that was loaded"
        assert {key: state[key] for key in ("version", "step", "codec", "error_feedback", "ranks", "rank")} == {
            "version": 1,
            "step": STOP,
            "codec": "int4",
            "error_feedback": True,
            "ranks": 2,
            "rank": rank,
        }
        # 25 x 25: two rows of 384, of which the second one has 241 elements.
        assert {name: kept.numel() for name, kept in state["sender"].items()} == {"3.weight": 625}
        assert {name: kept.numel() for name, kept in state["owner"].items()} == {"3.weight": (384, 241)[rank]}


# -- states that do not fit -------------------------------------------------------------------------------------------


def _refused(rank: int) -> Any:
    """Every state that must be refused: the words, and whether training then goes on as if nothing had been tried."""
    plain = Run(rank, codec="int4:stochastic=true")
    right = plain.train(0, 4)
    good = plain.state.state_dict()
    other = Run(rank, codec="int4:stochastic=true")
    other.state.load_state_dict(
        {**plain.state.state_dict(), "step": 0, "sender": {}, "owner": {}, "ranks": 0, "rank": 0}
    )
    other.train(0, 2)
    bad = {
        "nothing": {},
        "no mapping": [1, 2],
        "version": {**good, "version": 2},
        "world": {**good, "ranks": 3},
        "rank": {**good, "rank": 1 - rank},
        "model": {**good, "sender": {"encoder.weight": torch.zeros(8)}},
        "size": {**good, "sender": {"3.weight": torch.zeros(626)}},
        "owner's size": {**good, "owner": {"3.weight": torch.zeros(600)}},
        "mode": {**good, "error_feedback": "owner", "sender": {}},
        "tensors": {**good, "sender": {"3.weight": [0.0] * 625}},
    }
    errors = {name: faults.error_of(lambda s=s: other.state.load_state_dict(s))[0] for name, s in bad.items()}  # type: ignore[misc,arg-type]
    after = other.train(2, 4)
    without = Run(rank, codec="int4:stochastic=true", error_feedback=False)
    errors["no feedback here"] = faults.error_of(lambda: without.state.load_state_dict(good))[0]
    return errors, all(same_bits(right[key], after[key]) for key in right), without.state.step


WORDS = {
    "nothing": ["not what GradientCompression.state_dict() returns", "'codec'"],
    "no mapping": ["not what GradientCompression.state_dict() returns"],
    "version": ["version 2", "knows 1", "Update"],
    "world": ["of 3, loaded by rank", "of 2", "on as many ranks", 'residuals="redistribute"', 'residuals="drop"'],
    "rank": ["load on each rank what that rank saved"],
    "model": ["encoder.weight", "another model"],
    "size": ["3.weight", "another model"],
    "owner's size": ["3.weight", "another model"],
    "mode": ["error_feedback='owner'", "error_feedback is True here", "Pass the same error_feedback"],
    "tensors": ["3.weight", "list"],
    "no feedback here": ["error_feedback=True", "error_feedback is False here", "Pass the same error_feedback"],
}


@pytest.mark.parametrize("name", WORDS)
def test_a_state_that_does_not_fit_is_refused_in_clear_words(name: str, scenes: list[Any]) -> None:
    for _, _, (errors, _, _) in scenes:
        assert type(errors[name]) is StateDictError, errors[name]
        assert str(errors[name]).startswith("state: ")
        for part in WORDS[name]:
            assert part in str(errors[name])


def test_a_refused_state_leaves_everything_as_it_was(scenes: list[Any]) -> None:
    for _, _, (_, same, step) in scenes:
        assert same
        assert step == 0


def _fewer(rank: int, states: list[Any], hooked: bool) -> Any:
    """States of another number of ranks; by hook the number is not known before the first step."""
    run_ = Run(rank, codec="int4", hooked=hooked)
    refused = faults.error_of(lambda: run_.state.load_state_dict(states[rank]))[0]
    if refused is None:
        refused = faults.error_of(lambda: run_.train(0, 1))[0]
    stripped = {**states[rank], "sender": {}, "owner": {}, "ranks": 0, "rank": 0}
    fresh = Run(rank, codec="int4", hooked=hooked)
    fresh.state.load_state_dict(stripped)
    fresh.train(0, 2)
    return str(refused), fresh.state.step


@pytest.mark.parametrize(("world", "hooked"), [(3, False), (3, True), (1, False)])
def test_a_state_of_another_number_of_ranks_is_refused_and_goes_on_without_its_residuals(
    world: int, hooked: bool, scenes: list[Any]
) -> None:
    states = [state for _, (_, _, _, state), _ in scenes]
    for rank, (refused, step) in enumerate(run(world, _fewer, [*states, states[0]], hooked, timeout=150)):
        assert f"of 2, loaded by rank {rank} of {world}" in refused
        assert 'residuals="drop"' in refused
        assert step == STOP + 2


# -- auto -------------------------------------------------------------------------------------------------------------


def _auto(rank: int) -> Any:
    """What "auto" takes here, and what it goes on with after a resume: whatever was chosen before."""
    first = Run(rank, codec="auto")
    plan = first.state.plan
    trained_on = first.train(0, 2)
    chosen = None if first.state.codec is None else first.state.codec.spec
    state = first.state.state_dict()
    kept = []
    for spec, mode in (("int4", True), ("int8", False), (None, False)):
        second = Run(rank, codec="auto", hooked=True)
        second.state.load_state_dict({**state, "codec": spec, "error_feedback": mode})
        second.train(0, 1)
        kept.append((None if second.state.codec is None else second.state.codec.spec, second.state.error_feedback))
    third = Run(rank, codec="auto")
    third.state.load_state_dict(
        {**state, "codec": "int2", "error_feedback": False, "sender": {}, "owner": {}, "ranks": 0}
    )
    third.train(0, 1)
    kept.append((third.state.codec.spec if third.state.codec else None, third.state.error_feedback))
    return chosen, None if plan is None else (plan.chosen, str(plan)), trained_on, state, kept


def test_auto_takes_the_same_codec_on_every_rank_and_keeps_it_in_its_state() -> None:
    one, two = run(2, _auto, timeout=150)
    chosen, plan, parameters, state, kept = one
    assert plan is not None
    assert plan[0] == (chosen or "none")
    assert plan == two[1]
    assert chosen == two[0] == state["codec"]
    assert all(same_bits(parameters[key], two[2][key]) for key in parameters)
    assert kept == two[4] == [("int4", True), ("int8", False), (None, False), ("int2", False)]
