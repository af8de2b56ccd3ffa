"""The native core's step of AdamW equals the reference bit for bit, in every instruction set of this CPU."""

from __future__ import annotations

import pytest
import torch

from moment_cases import SHAPES, SPECS, operands, stepped
from narrowcast.kernels.contract import Reference
from narrowcast.kernels.cpu import binding
from processes import calls_that_survived

KERNELS = [kernel for kernel in (binding.load(isa)[0] for isa in binding.ISAS) if kernel is not None]


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_step_equals_the_reference(kernel: binding.Native, spec: str, dtype: torch.dtype) -> None:
    for shape in SHAPES:
        for hostile in (False, True):
            tensors = operands(spec, shape, dtype, hostile=hostile)
            for takes_momentum in (False, True):
                wanted = stepped(Reference(), tensors, spec, takes_momentum=takes_momentum)
                assert stepped(kernel, tensors, spec, takes_momentum=takes_momentum) == wanted, (shape, hostile)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_threads_do_not_change_a_bit(kernel: binding.Native) -> None:
    tensors = operands("int8", (700, 1000), torch.float32)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 3):
            torch.set_num_threads(threads)
            results.append(stepped(kernel, tensors, "int8"))
    finally:
        torch.set_num_threads(before)
    assert results[0] == results[1]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_no_byte_beyond_the_tensors_is_touched(kernel: binding.Native) -> None:
    assert calls_that_survived("guard_moments.py", kernel.name.removeprefix("native/")) == 720
