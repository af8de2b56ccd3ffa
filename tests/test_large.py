"""More than 2**31 elements: offsets are 64 bits wide everywhere, so the end is encoded as it would be on its own."""

from __future__ import annotations

import pytest
import torch

import narrowcast as nc
from cases import mixed, same_bits

NUMEL = 2**31 + 4096 + 77
"""Past 2**31 by some whole blocks of 128 and a part of one."""
START = 2**31 - 1024
"""The tail that is looked at: a multiple of every block, below the edge; START * bits / 8 is a whole byte."""


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("spec", ["int8", "int4"])
def test_the_tail_of_a_tensor_of_more_than_2_to_31_elements_is_encoded_as_the_tail_alone(spec: str) -> None:
    if nc.which_kernel(spec, "cpu") == "reference":
        pytest.skip("the reference widens to int64 on the way: it needs 100 GB for this")
    codec = nc.codec(spec)
    block = int(codec.block or 0)
    size = 4 if spec == "int8" else 2
    tail = mixed(NUMEL - START, dtype=torch.bfloat16)
    x = torch.zeros(NUMEL, dtype=torch.bfloat16)
    x[START:] = tail
    x[:block] = 1.0

    row = codec.encode(x)
    alone = codec.encode(tail)
    codes, codes_alone = -(-NUMEL * codec.bits // 8), -(-len(tail) * codec.bits // 8)
    assert torch.equal(row[START * codec.bits // 8 : codes], alone[:codes_alone])
    groups_alone = -(-len(tail) // block)
    end = -(-codes // size) * size + -(-NUMEL // block) * size
    end_alone = -(-codes_alone // size) * size + groups_alone * size
    assert torch.equal(row[end - groups_alone * size : end], alone[end_alone - groups_alone * size : end_alone])
    assert row[end:].count_nonzero() == 0

    del x
    back = codec.decode(row, NUMEL, torch.bfloat16)
    assert same_bits(back[START:], codec.decode(alone, len(tail), torch.bfloat16))
    assert bool((back[:block] == 1.0).all())
    assert int(back[block:START].count_nonzero()) == 0

    total = codec.decode_sum(row.unsqueeze(0), NUMEL, torch.bfloat16, out=back)
    assert same_bits(total[START:], codec.decode(alone, len(tail), torch.bfloat16))
