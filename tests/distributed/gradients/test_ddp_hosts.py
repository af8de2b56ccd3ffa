"""Compressed gradients where ranks share hosts: exact within a host, the codec between, residuals of a share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import trained
from hosted import HostExpected, launched
from ranks import run
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP
from trained import FEW, SHAPES, STEPS, Given, given

import narrowcast as nc
from cases import same_bits

pytestmark = pytest.mark.timeout(180)

MESHES = [(2, 2), (3, 2), (2, 3)]
# (codec, error feedback, dtype, options of DDP)
CASES: list[tuple[str, Any, torch.dtype, dict[str, Any]]] = [
    ("int4:block=row", True, torch.float32, {}),
    ("int4:block=row", True, torch.float32, {"bucket_cap_mb": FEW}),
    ("int8", False, torch.float32, {"bucket_cap_mb": FEW, "gradient_as_bucket_view": True}),
    ("int4", "owner", torch.float32, {}),
    ("int8", True, torch.bfloat16, {"bucket_cap_mb": FEW}),
    ("raw", False, torch.float64, {}),
]


def _trained(rank: int, hosts: int, local: int) -> Any:
    launched(rank, hosts, local)
    found = []
    for codec, feedback, dtype, options in CASES:
        ddp = DDP(Given(SHAPES, dtype), **options)
        state = trained.compressed(ddp, codec, error_feedback=feedback)
        gradients = [trained.backward(ddp, given(SHAPES, rank, step, dtype)) for step in range(STEPS)]
        found.append((gradients, state.state_dict()))
    return found


@pytest.mark.parametrize(("hosts", "local"), MESHES)
def test_every_rank_ends_with_the_bits_of_the_model_and_keeps_residuals_of_its_share(hosts: int, local: int) -> None:
    found = run(hosts * local, _trained, hosts, local, timeout=150)
    for case, (codec, feedback, dtype, _) in enumerate(CASES):
        expected = HostExpected(nc.codec(codec), hosts, local, feedback)
        ranks = range(hosts * local)
        right = [expected.step([given(SHAPES, rank, step, dtype) for rank in ranks]) for step in range(STEPS)]
        for rank in ranks:
            gradients, state = found[rank][case]
            trained.agree(gradients, right)
            host, place = divmod(rank, local)
            holder = {"ranks": hosts * local, "rank": rank, "hosts": hosts, "host": host, "place": place}
            assert {name: state[name] for name in holder} == (holder if feedback else dict.fromkeys(holder, 0))
            sender, owner = expected.state_of(host, place) if feedback else ({}, {})
            for name, meant in (("sender", sender), ("owner", owner)):
                assert state[name].keys() == meant.keys()
                for parameter, residual in meant.items():
                    assert same_bits(state[name][parameter], residual), (rank, codec, name, parameter)
