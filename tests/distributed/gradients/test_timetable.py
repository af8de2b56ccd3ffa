"""What travels in which step, and whether feedback is on, without any rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import narrowcast as nc
from narrowcast.distributed.gradients.timetable import Timetable
from narrowcast.errors import SpecError


def _what(table: Timetable, steps: int) -> str:
    """A letter a step: m for the momentum, g for gradients, capital where there is no codec."""
    letters = ""
    for step in range(steps):
        travel = table.at(step, nc.codec("sign"))
        letter = "m" if travel.momentum else "g"
        letters += letter if travel.codec else letter.upper()
    return letters


def test_gradients_travel_in_the_warm_up_and_the_momentum_after_it() -> None:
    assert _what(Timetable(3, "int8", None, None, momentum=True), 8) == "gggmmmmm"
    assert _what(Timetable(3, None, None, None, momentum=True), 8) == "GGGmmmmm"
    assert _what(Timetable(3, None, None), 8) == "GGGggggg"


def test_every_so_many_steps_a_gradient_refreshes_the_second_moment() -> None:
    assert _what(Timetable(2, "int8", None, 3, momentum=True), 12) == "ggmmgmmgmmgm"


def test_growing_intervals_double() -> None:
    table = Timetable(5, "int8", None, "growing", momentum=True)
    refreshed = [step for step in range(5, 600) if not table.at(step, nc.codec("sign")).momentum]
    assert [step - 4 for step in refreshed] == [16, 48, 112, 240, 496]


def test_a_step_that_a_schedule_leaves_uncompressed_sends_gradients() -> None:
    table = Timetable(1, "int8", lambda step: None if step % 2 else "int2", None, momentum=True)
    assert _what(table, 6) == "gGmGmG"


@pytest.mark.parametrize("refresh", [0, 1, -3, True, 2.5, "often"])
def test_a_refresh_that_cannot_be_is_refused(refresh: Any) -> None:
    with pytest.raises(SpecError, match="refresh="):
        Timetable(1, "int8", None, refresh, momentum=True)


SGD = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1, dtype=torch.float32, device="cpu"))], 0.1)
ADAM = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1, dtype=torch.float32, device="cpu"))], 0.1)


@pytest.mark.parametrize(
    ("codec", "optimizer", "feedback"),
    [
        ("int8", None, False),
        ("int8", SGD, False),
        ("int4", None, True),
        ("nf4", ADAM, False),  # no better with it, and 10 bytes a parameter
        ("int4", nc.optim.AdamW([torch.zeros(1, dtype=torch.float32, device="cpu", requires_grad=True)]), False),
        ("int4", "Adam", True),  # who knows
        ("int3", None, False),
        ("int2", ADAM, False),
        ("sign", None, False),
        ("sign", SGD, False),
        ("int2", SGD, True),
        ("int2", SimpleNamespace(optimizer=SGD), True),  # as Accelerate wraps it
        ("int2", SimpleNamespace(optimizer=ADAM), False),
        ("int2", "SGD", False),
    ],
)
def test_feedback_is_on_where_it_lowers_the_loss(codec: str, optimizer: Any, feedback: bool) -> None:
    assert nc.GradientCompression(codec, optimizer=optimizer).error_feedback is feedback


def test_feedback_is_on_with_a_schedule_but_under_adam() -> None:
    def schedule(step: int) -> str:
        return "int8" if step < 100 else "int2"

    for optimizer, feedback in ((None, True), (SGD, True), (ADAM, False)):
        assert nc.GradientCompression(schedule=schedule, optimizer=optimizer).error_feedback is feedback


def test_feedback_that_is_asked_for_is_given() -> None:
    assert nc.GradientCompression("sign", error_feedback=True, optimizer=ADAM).error_feedback is True
    assert nc.GradientCompression("int4", error_feedback=False, optimizer=SGD).error_feedback is False
