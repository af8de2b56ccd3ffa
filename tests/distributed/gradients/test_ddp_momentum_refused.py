"""Where a momentum cannot travel, and what is said of it."""

from __future__ import annotations

from typing import Any

import faults
import pytest
import torch
import trained
from momentum_runs import SHAPES
from ranks import run
from torch.nn.parallel import DistributedDataParallel as DDP

import narrowcast as nc
from narrowcast.errors import CollectiveError, SpecError

pytestmark = pytest.mark.timeout(180)


def _refusals(rank: int) -> Any:
    ddp = DDP(trained.Given(SHAPES))
    ours = nc.optim.AdamW(ddp.parameters(), 1e-3)
    others = nc.optim.AdamW(trained.Given(SHAPES).parameters(), 1e-3)
    some = nc.optim.AdamW([p for name, p in ddp.named_parameters() if "odd" not in name], 1e-3)
    theirs: Any = torch.optim.AdamW(ddp.parameters(), 1e-3)
    wrong: dict[str, dict[str, Any]] = {
        "narrowcast.optim.AdamW": {"momentum": theirs},
        "does not hold even": {"momentum": others},
        "does not hold odd": {"momentum": some},
        "warmup_steps=0": {"momentum": ours, "warmup_steps": 0},
        "codec='auto'": {"momentum": ours, "codec": "auto"},
        "codec=None": {"momentum": ours, "codec": None},
        "refresh=1": {"momentum": ours, "refresh": 1},
        "refresh=True": {"momentum": ours, "refresh": True},
        "refresh='often'": {"momentum": ours, "refresh": "often"},
        "refresh=8": {"refresh": 8},
        "scaler:": {"scaler": torch.amp.GradScaler("cpu")},
        "scaler=str": {"momentum": ours, "scaler": "yes"},
        "warmup_codec:": {"momentum": ours, "warmup_codec": "int44"},
    }
    errors = {}
    for words, options in wrong.items():
        given = {"codec": "sign", "warmup_steps": 3, **options}
        errors[words] = faults.error_of(lambda given=given: nc.compress_gradients(ddp, **given))[0]
    nc.compress_gradients(ddp, "sign", momentum=ours, warmup_steps=3)  # none of them has left anything behind
    errors["hook already"] = faults.error_of(lambda: nc.compress_gradients(ddp, "sign", momentum=ours, warmup_steps=3))[
        0
    ]
    return errors


def test_what_cannot_be_is_refused_with_the_reason() -> None:
    for errors in run(2, _refusals):
        for words, error in errors.items():
            assert isinstance(error, SpecError | CollectiveError), (words, error)
            assert words in str(error), (words, error)


def _sharded(rank: int) -> Any:
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(trained.mlp(width=40))
    optimizer = nc.optim.AdamW(model.parameters(), 1e-3)
    return faults.error_of(lambda: nc.compress_gradients(model, "sign", momentum=optimizer, warmup_steps=2))[0]


def test_fsdp2_is_refused_in_words() -> None:
    for error in run(2, _sharded):
        assert isinstance(error, SpecError)
        assert "FSDP2" in str(error)
