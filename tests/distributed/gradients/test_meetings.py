"""When ranks meet, and where they go from there, without any rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from narrowcast.distributed.gradients.meetings import Intervals, Meetings, digest_of
from narrowcast.errors import SpecError, StateDictError


def _meetings(**options: Any) -> Meetings:
    given = {"sync_every": 2, "first_step": 0, "optimizers": [], "outer_lr": 1.0, "outer_momentum": 0.0, **options}
    return Meetings(**given)


def _lengths(given: Any, count: int, first_step: int = 0) -> list[int]:
    intervals, lengths, step = Intervals(given, first_step), [], first_step
    for meetings in range(count):
        lengths.append(intervals.length_of(meetings, step))
        step += lengths[-1]
    return lengths


def test_intervals_are_a_number_a_list_growing_or_what_a_function_says() -> None:
    assert _lengths(7, 3) == [7, 7, 7]
    assert _lengths([1, 2, 5], 5) == [1, 2, 5, 5, 5]
    assert _lengths("growing", 100) == [1] * 16 + [2] * 16 + [4] * 16 + [8] * 16 + [16] * 36
    assert _lengths(lambda step: 1 if step < 6 else 4, 4, first_step=5) == [1, 4, 4, 4]


def test_every_multiple_of_the_longest_interval_is_a_meeting_of_growing_ones() -> None:
    """bench/training.py lets them race to a multiple of 16 steps."""
    ends, step = set(), 0
    for length in _lengths("growing", 100):
        step += length
        ends.add(step)
    assert set(range(16, step + 1, 16)) <= ends


@pytest.mark.parametrize(
    "given", [0, -3, 2.5, True, "often", [], [3, 0], [3, "4"], {}, None, lambda step: 0, lambda step: None]
)
def test_what_is_no_interval_is_refused_with_the_rule_and_the_fix(given: Any) -> None:
    with pytest.raises(SpecError, match=r"sync_every.*not a number of steps between two meetings.*sync_every=10"):
        Intervals(given, 3)


def test_a_function_is_asked_for_its_first_interval_before_training_and_once_for_each() -> None:
    asked: list[int] = []

    def every(step: int) -> int:
        asked.append(step)
        return 3

    meetings = _meetings(sync_every=every, first_step=4)
    assert asked == [4]
    ends = []
    for step in range(4, 10):
        ends.append(meetings.is_last_step(step))
        meetings.since += 1
        if ends[-1]:
            meetings.over()
    assert ends == [False, False, True] * 2
    assert asked == [4, 4, 7]


@pytest.mark.parametrize(
    ("name", "given"),
    [("outer_lr", x) for x in (0, -1, float("nan"), float("inf"), "1", True, None)]
    + [("outer_momentum", x) for x in (-0.1, 1, 1.5, float("nan"), "0.9", False, None)],
)
def test_outer_arguments_that_cannot_be_are_refused(name: str, given: Any) -> None:
    with pytest.raises(SpecError, match=f"{name}={given!r}: a number"):
        _meetings(**{name: given})


def _moved(meetings: Meetings, parameter: torch.Tensor, change: torch.Tensor) -> torch.Tensor:
    """What a meeting makes of a parameter that one rank has moved by `change`."""
    meetings.begin()
    with torch.no_grad():
        parameter.add_(change)
        buffer = torch.empty(parameter.numel(), dtype=torch.float32)
        meetings.write_change("p", buffer)
        meetings.move("p", buffer)
    meetings.over()
    return buffer


@pytest.mark.parametrize(("lr", "momentum"), [(0.7, 0.9), (1.0, 0.5), (0.5, 0.0)])
def test_the_outer_step_is_that_of_sgd_with_nesterovs_momentum(lr: float, momentum: float) -> None:
    meetings = _meetings(outer_lr=lr, outer_momentum=momentum)
    parameter = torch.nn.Parameter(torch.randn(40))
    meetings.parameters["p"] = parameter
    other = torch.nn.Parameter(parameter.detach().clone())
    sgd = torch.optim.SGD([other], lr=lr, momentum=momentum, nesterov=momentum > 0)
    for _ in range(4):
        other.grad = -_moved(meetings, parameter, torch.randn(40))
        sgd.step()
        assert torch.equal(parameter, other)


def test_what_rounding_takes_from_a_meeting_is_not_lost_for_the_next() -> None:
    """Three steps of 1/512 from 1: bf16 rounds each of them away, and not all three."""
    meetings = _meetings(outer_lr=2.0**-9)
    parameter = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    meetings.parameters["p"] = parameter
    for _ in range(3):
        _moved(meetings, parameter, torch.ones(3, dtype=torch.bfloat16))
    assert meetings.state()["last"]["p"].tolist() == [1 + 3 * 2.0**-9] * 3
    assert parameter.tolist() == [1 + 2.0**-7] * 3
    single = _meetings(outer_lr=2.0**-9)
    alone = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    single.parameters["p"] = alone
    _moved(single, alone, torch.ones(3, dtype=torch.bfloat16))
    assert alone.tolist() == [1.0] * 3


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.float16], ids=str)
def test_parameters_of_other_dtypes_go_back_and_forth(dtype: torch.dtype) -> None:
    meetings = _meetings()
    value = torch.randn(6, 5, dtype=dtype).t()
    parameter = torch.nn.Parameter(value.clone(memory_format=torch.preserve_format))
    assert not parameter.is_contiguous()
    meetings.parameters["p"] = parameter
    meetings.begin()
    moved = torch.randn(5, 6, dtype=dtype)
    with torch.no_grad():
        parameter.copy_(moved)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        buffer = torch.empty(30 * (2 if dtype.is_complex else 1), dtype=wide)
        meetings.write_change("p", buffer)
        meetings.move("p", buffer)
    eps = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    # p - last and last + (p - last) are each rounded once, in the wide dtype; then to the parameter's.
    bound = 2 * eps * (moved.abs() + 2 * value.abs()) + (2.0**-11 * moved.abs() if dtype == torch.float16 else 0)
    assert ((parameter - moved).abs() <= bound).all()


def test_a_digest_tells_parameters_apart_by_one_bit() -> None:
    one = torch.randn(100)
    other = one.clone()
    assert digest_of({"p": one}) == digest_of({"p": other})
    other.view(torch.int32)[17] ^= 1
    assert digest_of({"p": one}) != digest_of({"p": other})
    assert digest_of({"p": one}) != digest_of({"q": one})


def test_a_state_of_another_model_is_refused() -> None:
    meetings = _meetings(outer_momentum=0.5)
    meetings.parameters["p"] = torch.nn.Parameter(torch.randn(4))
    _moved(meetings, meetings.parameters["p"], torch.randn(4))
    state = meetings.state()
    assert state["last"] == {}  # it is the parameter
    assert state["velocity"].keys() == {"p"}
    for other in ({"q": torch.randn(4)}, {"p": torch.randn(5)}):
        strange = _meetings(outer_momentum=0.5)
        strange.parameters.update(other)
        with pytest.raises(StateDictError, match="last meeting for p, which this model does not have"):
            strange.load(state)
