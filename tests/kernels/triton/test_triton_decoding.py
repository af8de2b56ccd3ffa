"""Norms, gates and attention of one position, in Triton: within the bounds of fp32 sums around what fp64 gives.

Without a GPU the kernels run in Triton's interpreter, in a process of their own; see test_triton.py.
"""

from __future__ import annotations

import os

import pytest
import torch

from decoding_cases import ATTENTIONS, DTYPES, NORMS, check_attention, check_gate, check_norm
from narrowcast.errors import DtypeError
from processes import in_interpreter

INTERPRETER = os.environ.get("TRITON_INTERPRET") == "1"
CUDA = torch.cuda.is_available() and not INTERPRETER
DEVICE = "cuda" if CUDA else "cpu"

pytest.importorskip("triton", reason="Triton is not installed")
here = pytest.mark.skipif(not (CUDA or INTERPRETER), reason="the interpreter runs this in a process of its own")
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
kinds = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.mark.skipif(CUDA or INTERPRETER, reason="the tests below run here themselves")
def test_triton_decodes_within_the_bounds_in_its_interpreter() -> None:
    in_interpreter(__file__)


@here
@kinds
@pytest.mark.parametrize(("batch", "width"), NORMS)
def test_the_norm_of_a_sum_is_within_its_bound(batch: int, width: int, dtype: torch.dtype) -> None:
    check_norm(batch, width, dtype, DEVICE)


@here
@kinds
def test_a_gate_is_within_its_bound(dtype: torch.dtype) -> None:
    check_gate(dtype, DEVICE)


@here
@kinds
@pytest.mark.parametrize(("batch", "heads", "key_heads", "size", "positions", "at"), ATTENTIONS)
def test_attention_keeps_the_new_position_and_is_within_its_bound(
    batch: int, heads: int, key_heads: int, size: int, positions: int, at: tuple[int, ...], dtype: torch.dtype
) -> None:
    check_attention(batch, heads, key_heads, size, positions, at, dtype, DEVICE)


@here
def test_spans_cover_every_position_once() -> None:
    from narrowcast.kernels.triton.attention import MOST, divide

    for positions in (1, 8, 63, 64, 65, 513, 4096, 131072):
        for programs in (1, 8, 32, 512, 4096):
            count, length, step = divide(positions, programs, 4, 128)
            assert length % step == 0
            assert (count - 1) * length < positions <= count * length
            assert count <= MOST


@here
def test_a_norm_of_another_dtype_than_the_activations_is_refused() -> None:
    from narrowcast.kernels.triton import norms

    x, weight = torch.zeros(1, 8, dtype=torch.bfloat16), torch.zeros(8, dtype=torch.float32)
    with pytest.raises(DtypeError, match="one dtype"):
        norms.add_norm(x, None, weight, 1e-6)
