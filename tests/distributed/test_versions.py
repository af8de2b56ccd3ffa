"""Whether autograd takes a tensor that a collective wrote for changed: as with torch's all_reduce, it does not."""

from __future__ import annotations

from collections.abc import Callable

import nccl_stand_in
import pytest
import torch
import torch.distributed as dist
from ranks import run
from torch import Tensor

from narrowcast import distributed as ncd
from narrowcast.distributed.protocols import together

SUM, AVG = dist.ReduceOp.SUM, dist.ReduceOp.AVG
SIZES = (100, together.PLAIN_BYTES // 4 + 1)  # over NCCL, the first goes as it is, the second in rows


def _calls() -> list[Callable[[Tensor], object]]:
    return [
        lambda x: ncd.all_reduce(x),
        lambda x: ncd.all_reduce(x, AVG),
        lambda x: ncd.all_reduce(x, AVG, codec="raw", async_op=True).wait(),  # type: ignore[union-attr]
        lambda x: ncd.all_reduce(x[::2], AVG),
        lambda x: ncd.broadcast(x, 0),
        lambda x: ncd.all_to_all_single(x, torch.ones_like(x), codec="int8"),
        lambda x: ncd.all_gather([x, torch.empty_like(x)], torch.ones_like(x)),
        lambda x: ncd.reduce_scatter_tensor(x, x.new_ones(2 * x.numel()), codec="int8"),
    ]


def _versions(rank: int, nccl: bool) -> None:
    if nccl:
        nccl_stand_in.use()
    plain = torch.ones(100)
    dist.all_reduce(plain)
    assert plain._version == 0  # torch's own
    for numel in SIZES:
        for dtype in (torch.float32, torch.float16):
            for i, call in enumerate(_calls()):
                x = torch.full((numel + numel % 2,), 5.0 * (rank + 1), dtype=dtype)
                before, values = x._version, x.clone()
                call(x)
                assert x._version == before, (numel, dtype, i)
                assert rank == 0 or not torch.equal(x, values), (numel, dtype, i)  # and it was written


@pytest.mark.parametrize("nccl", [False, True], ids=["gloo", "nccl"])
def test_a_tensor_that_a_collective_wrote_keeps_its_version(nccl: bool) -> None:
    run(2, _versions, nccl, timeout=55)


def _saved(rank: int) -> float:
    """A tensor that autograd has saved may be reduced after it, as with torch."""
    nccl_stand_in.use()
    w = torch.ones(10, requires_grad=True)
    x = torch.ones(10)
    loss = (w * x).sum()
    ncd.all_reduce(x, AVG)
    loss.backward()
    return float(w.grad.sum())  # type: ignore[union-attr]


def test_backward_does_not_mind_an_average_of_what_was_saved_any_more_than_a_sum() -> None:
    assert run(2, _saved, timeout=55) == [10.0, 10.0]
