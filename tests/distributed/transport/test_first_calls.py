"""States of torch around a collective, where the call makes what outlives it: connections, buffers, tables."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import run
from torch.distributed.device_mesh import init_device_mesh

from ambient import SURROUNDINGS, surrounded
from cases import mixed, same_bits
from narrowcast import distributed as ncd

pytestmark = pytest.mark.timeout(120)

CODECS = ("int8", "nf4", "apot4", "pot4", "fp8_e4m3", "sign", "raw", "int4:stochastic=true")


def _first_calls(rank: int, names: list[str | None]) -> list[list[torch.Tensor]]:
    """A new group for each of the surroundings, whose first calls are made there, and later ones elsewhere."""
    found = []
    for name in names:
        group, results = dist.new_group(), []
        mesh = init_device_mesh("cpu", (dist.get_world_size(), 1))
        for turn in range(2):
            tensors = [mixed(5000, seed=10 * rank + i) for i in range(len(CODECS))]
            message, whole = mixed(300, seed=rank), mixed(200, seed=rank)
            with surrounded(name if turn == 0 else None):
                for x, codec in zip(tensors, CODECS, strict=True):
                    ncd.all_reduce(x, group=group, codec=codec, seed=3)
                works = [ncd.all_reduce(whole, group=group, async_op=True, codec="nf4")]
                if rank == 0:
                    works.append(ncd.isend(message, 1, group, codec="int8"))
                elif rank == 1:
                    works.append(ncd.irecv(message, 0, group, codec="int8"))
                ncd.all_reduce(tensors[0], group=mesh, codec="int4")
                for work in works:
                    work.wait()  # type: ignore[union-attr]
            results += [*tensors, message, whole]
        found.append(results)
    return found


def test_the_first_calls_of_a_group_give_the_same_bits_whatever_surrounds_them() -> None:
    names = [None, *(name for name in SURROUNDINGS if "cuda" not in name and "stream" not in name)]
    for found in run(2, _first_calls, names, timeout=100):
        for name, results in zip(names, found, strict=True):
            assert len(results) == len(found[0])
            for x, plain in zip(results, found[0], strict=True):
                assert x.dtype == plain.dtype
                assert same_bits(x, plain), name


def _inference_tensors(rank: int) -> list[float]:
    with torch.inference_mode():
        x = [torch.full((1000,), float(rank + 1)) for _ in range(4)]
        views = torch.full((40, 9), float(rank + 1))[::2, 1:8]
    sums = []
    with torch.inference_mode():
        ncd.all_reduce(x[0], codec="raw")
        ncd.all_reduce(x[1], async_op=True, codec="raw").wait()  # type: ignore[union-attr]
        ncd.all_reduce(views, async_op=True, codec="raw").wait()  # type: ignore[union-attr]
        ncd.reduce_scatter_tensor(x[2][:500], x[3], async_op=True, codec="raw").wait()  # type: ignore[union-attr]
        sums += [float(t.flatten()[0]) for t in (x[0], x[1], views, x[2])]
    later = torch.ones(1000, requires_grad=True)  # what is kept from the calls above is no inference tensor
    ncd.functional.all_reduce(later, codec="raw").sum().backward()
    ncd.all_reduce(later.detach(), async_op=True, codec="raw").wait()  # type: ignore[union-attr]
    assert later.grad is not None
    return [*sums, float(later[0]), float(later.grad[0])]


def test_tensors_made_in_inference_mode_are_reduced_in_and_out_of_turn_and_nothing_of_it_stays() -> None:
    for sums in run(2, _inference_tensors):
        assert sums == [3.0, 3.0, 3.0, 3.0, 2.0, 2.0]
