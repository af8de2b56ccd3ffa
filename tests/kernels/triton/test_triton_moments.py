"""A step of AdamW on moments in rows, in Triton: the reference's bits.

Without a GPU the kernels run in Triton's interpreter, in a process of their own; see test_triton.py.
"""

from __future__ import annotations

import os

import pytest
import torch

from moment_cases import SHAPES, SPECS, operands, stepped
from narrowcast.kernels.contract import Reference
from processes import in_interpreter

INTERPRETER = os.environ.get("TRITON_INTERPRET") == "1"
CUDA = torch.cuda.is_available() and not INTERPRETER
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# The interpreter takes its time per row: six rows there, and each shape and each kind of values with half of the rest.
THESE = (*SHAPES, (1, 40_000)) if CUDA else (*SHAPES[:-1], (6, 33), (1, 2100))
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")


@pytest.mark.skipif(not (CUDA or INTERPRETER), reason="the interpreter runs this in a process of its own")
@pytest.mark.parametrize("spec", SPECS)
def test_triton_gives_the_references_bits(spec: str) -> None:
    from narrowcast.kernels.triton.launch import Triton

    for case, shape in enumerate(THESE):
        for hostile in (False, True):
            tensors = operands(spec, shape, DTYPES[(case + hostile) % 3], hostile=hostile)
            for takes_momentum in (False, True) if CUDA else (case % 2 == hostile,):
                wanted = stepped(Reference(), tensors, spec, takes_momentum=takes_momentum)
                device = "cuda" if CUDA else "cpu"
                mine = stepped(Triton(), tensors, spec, takes_momentum=takes_momentum, device=device)
                assert mine == wanted, (shape, hostile, takes_momentum)


@pytest.mark.skipif(CUDA or INTERPRETER, reason="this process runs the kernels itself")
@pytest.mark.timeout(300)
def test_triton_gives_the_references_bits_in_its_interpreter() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    assert "." * len(SPECS) in in_interpreter(__file__, "-k", "triton_gives")
