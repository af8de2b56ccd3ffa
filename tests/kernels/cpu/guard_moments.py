"""Run as a script: steps of AdamW on moments in rows, on memory whose neighbours may not be touched.

Prints how many calls survived.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import torch
from guard_pages import guarded

from narrowcast.kernels.cpu import binding

sys.path.append(str(Path(__file__).parents[2]))
from moment_cases import SHAPES, SPECS, STEP, operands, recipe_of


def main() -> None:
    kernel, why = binding.load(sys.argv[1])
    assert kernel is not None, why
    calls = 0
    for spec, shape, dtype, at_end in itertools.product(
        SPECS, SHAPES, (torch.float32, torch.bfloat16, torch.float16), (True, False)
    ):
        tensors = [guarded(tensor, at_end) for tensor in operands(spec, shape, dtype)]
        for takes_momentum in (False, True):
            kernel.adamw(*tensors, recipe_of(spec), 3, takes_momentum, STEP)
            calls += 1
    print(calls, "calls")


if __name__ == "__main__":
    main()
