"""DDP's join: ranks with fewer batches. The average is over all ranks; another divisor is refused, not ignored."""

from __future__ import annotations

from typing import Any

import faults
import pytest
import trained
from ranks import run
from torch.nn.parallel import DistributedDataParallel as DDP

import narrowcast as nc
from narrowcast.errors import SpecError

pytestmark = pytest.mark.timeout(120)


def _joined(rank: int) -> Any:
    found = []
    for batches in ((1, 2), (0, 1)):  # of rank 0, and of rank 1
        ddp = DDP(trained.mlp())
        nc.compress_gradients(ddp, "int4")
        trained.train(ddp, rank, range(1), trained.sgd(ddp))

        def uneven(ddp: DDP = ddp, count: int = batches[rank]) -> None:
            with ddp.join(divide_by_initial_world_size=False):
                trained.train(ddp, rank, range(count), trained.sgd(ddp))

        found.append(faults.error_of(uneven)[0])
    return found


def test_dividing_by_the_ranks_that_are_left_is_refused_on_every_rank() -> None:
    for of_rank in run(2, _joined):
        for error in of_rank:
            assert type(error) is SpecError, error
            for words in ("join(divide_by_initial_world_size=False): ", "over all ranks", "Call model.join()"):
                assert words in str(error)
