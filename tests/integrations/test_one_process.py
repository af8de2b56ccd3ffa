"""Options that trainers cannot serve."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from narrowcast.errors import SpecError
from narrowcast.integrations import one_process


@pytest.mark.parametrize("options", [{"sync_every": 10}, {"outer_lr": 0.7}, {"outer_momentum": 0.9}])
def test_trainers_refuse_meetings_since_they_save_one_rank_for_all(options: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=r"sync_every: trainers save the model and the optimizer of the first rank"):
        one_process.compress(torch.nn.Linear(4, 4), "int8", options, "")


def test_none_is_as_good_as_nothing() -> None:
    with pytest.warns(UserWarning, match="one process"):
        one_process.compress(torch.nn.Linear(4, 4), "int8", {"sync_every": None, "gather": None}, "")
