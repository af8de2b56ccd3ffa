"""Fake quantization in Triton: the reference's bits.

Without a GPU the kernels run in Triton's interpreter, in a process of their own; see test_triton.py.
"""

from __future__ import annotations

import os

import pytest
import torch

from cases import DTYPES
from grid_cases import GRIDS, SHAPES, assert_agrees
from processes import in_interpreter

INTERPRETER = os.environ.get("TRITON_INTERPRET") == "1"
CUDA = torch.cuda.is_available() and not INTERPRETER
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")


@pytest.mark.skipif(not (CUDA or INTERPRETER), reason="the interpreter runs this in a process of its own")
@pytest.mark.parametrize("name", GRIDS)
def test_triton_gives_the_references_bits(name: str) -> None:
    from narrowcast.kernels.triton.launch import Triton

    for case, shape in enumerate((*SHAPES[1:5], (1, 1, 5000), (1, 130, 2))):
        assert_agrees(Triton(), GRIDS[name], shape, DTYPES[case % 4], case % 2 == 1, "cuda" if CUDA else "cpu")


@pytest.mark.skipif(CUDA or INTERPRETER, reason="this process runs the kernels itself")
@pytest.mark.timeout(300)
def test_triton_gives_the_references_bits_in_its_interpreter() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    assert "." * len(GRIDS) in in_interpreter(__file__, "-k", "triton_gives")
