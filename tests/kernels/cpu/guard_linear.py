"""Run as a script: linear on memory whose neighbours may not be touched. Prints how many calls survived."""

from __future__ import annotations

import sys

import torch
from guard_pages import guarded

import narrowcast as nc
from narrowcast.kernels.cpu import binding

NEVER = 1 << 30
SPECS = [
    *nc.list_codecs(),
    *("int8:block=row", "int4:block=24", "int4:block=128", "int4:zero_point=true", "fp8_e4m3:block=32"),
    "sign:block=512",
]


def check(kernel: binding.Native, codec: nc.Codec, numel: int, batch: int, at_end: bool) -> int:
    table = None if not codec._tables else guarded(codec._tables[torch.device("cpu")], at_end)
    recipe = codec.recipe(torch.device("cpu"))._replace(table=table)
    data = guarded(codec.encode(torch.randn(5, numel), 1), at_end)
    dtype = (torch.float32, torch.bfloat16, torch.float16)[numel % 3]
    x = guarded(torch.randn(batch, numel).to(dtype), at_end)
    out, bias = (guarded(torch.zeros(size, dtype=dtype), at_end) for size in (5 * batch, 5))
    assert kernel.linear(out.view(batch, 5), x, data, recipe, bias)
    assert out.isfinite().all()
    return 1


def main() -> None:
    calls = 0
    for isa in sys.argv[1:]:
        kernel, why = binding.load(isa)
        assert kernel is not None, why
        for name in SPECS:
            for numel, batch in ((1, 1), (65, 2), (1000, 3), (130, 5), (512, 1)):
                for at_end in (True, False):
                    # As they are, in tiles, and in matrix registers.
                    for tiles_from, matrix_from in ((NEVER, NEVER), (1, NEVER), (NEVER, 1)):
                        kernel.tiles_from, kernel.matrix_from = dict.fromkeys(kernel.max_batch, tiles_from), matrix_from
                        calls += check(kernel, nc.codec(name), numel, batch, at_end)
    print(calls)


if __name__ == "__main__":
    main()
