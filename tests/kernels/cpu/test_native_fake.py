"""Fake quantization in the native core: the reference's bits on every instruction set."""

from __future__ import annotations

import pytest
import torch

from cases import DTYPES, same_bits
from grid_cases import GRIDS, SHAPES, assert_agrees, make_operands
from narrowcast.kernels.cpu import binding
from processes import calls_that_survived


@pytest.fixture(params=binding.ISAS)
def kernel(request: pytest.FixtureRequest) -> binding.Native:
    best, why = binding.load()
    assert best is not None, why
    if binding.ISAS.index(request.param) > binding.ISAS.index(best.name.removeprefix("native/")):
        pytest.skip(f"this CPU has no {request.param}")
    loaded, why = binding.load(request.param)
    assert loaded is not None, why
    return loaded


@pytest.mark.parametrize("name", GRIDS)
def test_every_instruction_set_gives_the_references_bits(kernel: binding.Native, name: str) -> None:
    for case, shape in enumerate(SHAPES):
        for dtype in DTYPES:
            assert_agrees(kernel, GRIDS[name], shape, dtype, nan=case % 2 == 1)


@pytest.mark.parametrize("shape", [(1, 1, 200_000), (1, 2, 70_000), (3, 300, 300), (150, 5000, 1), (9000, 3, 5)])
def test_large_tensors_are_cut_into_tasks_without_a_seam(kernel: binding.Native, shape: tuple[int, ...]) -> None:
    assert_agrees(kernel, GRIDS["apot4"], shape, torch.float32, nan=False)


@pytest.mark.parametrize("shape", [(1, 1, 600_000), (40, 3, 5000), (1200, 500, 1)])
def test_threads_and_instruction_sets_change_no_bit_of_a_scales_gradient(shape: tuple[int, ...]) -> None:
    x, grad, scale = make_operands(GRIDS["nf4"], shape, torch.float32, nan=False)
    found = []
    before = torch.get_num_threads()
    for isa in binding.ISAS:
        loaded, _ = binding.load(isa)
        for threads in (1, 2, 5):
            if loaded is not None:
                torch.set_num_threads(threads)
                found.append(torch.empty_like(scale))
                loaded.fake_quantize_backward(torch.empty_like(x), found[-1], grad, x, scale, GRIDS["nf4"])
    torch.set_num_threads(before)
    assert len(found) >= 3
    assert all(same_bits(found[0], other) for other in found)


def test_results_past_the_caches_are_whole(kernel: binding.Native) -> None:
    # 16 MB and more are written past them, in whole pieces; the odd sizes leave a part of one.
    assert_agrees(kernel, GRIDS["int4"], (1, 1, (1 << 22) + 37), torch.float32, nan=False)
    assert_agrees(kernel, GRIDS["int4"], (2049, 2051, 1), torch.float32, nan=False)
    assert_agrees(kernel, GRIDS["int4"], (2046, 2064, 1), torch.float32, nan=False)  # rows that begin on a cache line


@pytest.mark.timeout(120)
def test_no_byte_beyond_the_tensors_is_touched(kernel: binding.Native) -> None:
    assert calls_that_survived("guard_fake.py", kernel.name.removeprefix("native/")) == 264


def test_the_integer_grid_and_the_search_agree(kernel: binding.Native) -> None:
    # A shift of every threshold by less than an element can tell keeps the codes and takes the grid's shortcut away.
    for name in ("apot3", "apot4", "apot6", "apot8"):
        grid = GRIDS[name]
        sought = grid._replace(thresholds=grid.thresholds + 2.0**-8)
        x = torch.arange(-4000.0, 4001.0).view(1, 1, -1) / 16
        scale = torch.ones(1)
        fast, slow = torch.empty_like(x), torch.empty_like(x)
        kernel.fake_quantize(fast, x, scale, grid)
        kernel.fake_quantize(slow, x, scale, sought)
        assert same_bits(fast, slow), name
