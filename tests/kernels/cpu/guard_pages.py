"""Run as a script: the native core on memory whose neighbours may not be touched.

Every buffer ends right before (or starts right after) a page without access, so that reading or writing one byte too
many kills the process. Prints how many calls survived.
"""

from __future__ import annotations

import ctypes
import mmap
import sys

import torch
from torch import Tensor

import narrowcast as nc
from narrowcast.kernels.cpu import binding

PAGE = mmap.PAGESIZE
_libc = ctypes.CDLL(None, use_errno=True)
_kept: list[mmap.mmap] = []


def guarded(source: Tensor, at_end: bool) -> Tensor:
    """A copy of `source` that ends at (or starts after) a page that may not be touched."""
    size = max(source.numel() * source.element_size(), 1)
    pages = -(-size // PAGE)
    memory = mmap.mmap(-1, (pages + 2) * PAGE)
    _kept.append(memory)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for page in (0, pages + 1):
        if _libc.mprotect(ctypes.c_void_p(address + page * PAGE), PAGE, 0):
            raise OSError(ctypes.get_errno(), "mprotect")
    offset = PAGE + (pages * PAGE - size if at_end else 0)
    flat = torch.frombuffer(memory, dtype=source.dtype, count=source.numel(), offset=offset)
    flat.copy_(source.flatten())
    return flat.view(source.shape)


def check(kernel: binding.Native, codec: nc.Codec, numel: int, at_end: bool) -> int:
    x = torch.randn(1, numel)
    table = None if not codec._tables else guarded(codec._tables[torch.device("cpu")], at_end)
    recipe = codec.recipe(x.device)._replace(table=table)
    calls = 0
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        rows = guarded(x.to(dtype), at_end)
        data = guarded(torch.zeros(1, codec.row_bytes(numel), dtype=torch.uint8), at_end)
        out = guarded(torch.zeros(1, numel, dtype=dtype), at_end)
        kernel.encode(data, rows, recipe, 1)
        kernel.decode(out, data, recipe)
        kernel.decode_sum(out[0], data, recipe, None, 0, 1)
        kernel.decode_sum(out[0], data, recipe, rows[0], 0, 2)
        reduced = guarded(torch.zeros_like(data[0]), at_end)
        kernel.decode_sum_encode(reduced, data, numel, recipe, None, 0, 1, 1)
        calls += 5
    return calls


def main() -> None:
    calls = 0
    for isa in sys.argv[1:]:
        kernel, why = binding.load(isa)
        assert kernel is not None, why
        for name in [*nc.list_codecs(), "int4:block=24,zero_point=true", "int3:block=row", "int8:stochastic=true"]:
            for numel in (1, 7, 8, 63, 64, 65, 130, 1000):
                for at_end in (True, False):
                    calls += check(kernel, nc.codec(name), numel, at_end)
    print(calls)


if __name__ == "__main__":
    main()
