"""bench/pictures.py: names of lines do not overlap, codecs are coloured; bench/redraw.py draws what is stored."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

import pictures
import redraw


@pytest.mark.parametrize("heights", [[], [5.0], [0, 0, 0], [0, 1, 2, 100, 101], [0, 14, 15, 28, 29], [0, 50, 51, 52]])
def test_names_keep_their_distance_and_their_order_and_stay_around_their_lines(heights: list[float]) -> None:
    moved = pictures.apart(heights, least=13)
    assert all(upper - lower >= 13 - 1e-9 for lower, upper in pairwise(moved))
    assert sum(moved) == pytest.approx(sum(heights))


def test_names_that_are_far_apart_stay_where_they_are() -> None:
    assert pictures.apart([0, 20, 40], least=13) == [0, 20, 40]


def test_codecs_are_coloured_and_competitors_grey() -> None:
    assert pictures.colour_of("int4+EF") == pictures.colour_of("int4") != pictures.colour_of("int8")
    assert {pictures.colour_of(name) for name in ("fp32", "fp16 hook", "PowerSGD 4")} == {pictures.GREY}


def test_every_picture_is_drawn_again_from_what_is_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    for file in redraw.FOLDER.glob("*.json"):
        (tmp_path / file.name).symlink_to(file)
    pictures_there = {file.name for file in redraw.FOLDER.glob("*.png")}
    monkeypatch.setattr(redraw, "FOLDER", tmp_path)
    redraw.main()
    assert {file.name for file in tmp_path.glob("*.png")} == pictures_there
