"""What stands for `narrowcast.kernels.cuda.nvrtc` where there is no GPU: CUDA kernels, compiled for and run on the CPU.

`function` has the contract of `nvrtc.function`. The files are compiled as they are, after `cuda.h`, which stands for
CUDA, and with `instructions.h` in the place of `instructions.cuh`. Every launch runs twice, warps in order and in
reverse, on copies of its tensors that end where memory may not be touched, with NaN (all ones) before them and between
their rows. It raises `Broken` where the kernel does what a GPU forbids or leaves undefined (`machine.h`), where it
writes to anything but its output, and where the two runs differ by a bit.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from narrowcast.kernels.cuda import nvrtc

HERE = Path(__file__).parent
COMPILER = shutil.which("g++")
SHARED = 228 << 10
"""Bytes that a launch can ask for, and some more, which have to stay as they were."""

OUT = 2
"""Which argument of a kernel is written, all of it."""

CHANGED = {"attend": (6, 7), "wide": (5,)}
"""Which others are written in part, by kernel."""

KEPT = ("wide", "join")
"""Kernels that write a part of their output each: what is there stays."""

ALIGNED = {"sums": (3,)}
"""Which arguments start at a multiple of 16 bytes, as the kernel asks, and may end before the page without access."""

OPTIONS = (
    "-std=c++17",
    "-O1",
    "-fPIC",
    "-shared",
    "-w",
    "-U_FORTIFY_SOURCE",
    "-ffp-contract=off",
    "-fno-strict-aliasing",  # which nvcc does not assume either
    "-fsanitize=alignment,bounds,shift,signed-integer-overflow,integer-divide-by-zero",
    "-fsanitize-undefined-trap-on-error",
)

_libc = ctypes.CDLL(None, use_errno=True)


class Broken(Exception):
    """A kernel did what it may not."""


class Function:
    """One kernel, compiled for the CPU."""

    def __init__(
        self, library: Path, changed: tuple[int, ...] = (), kept: bool = False, aligned: tuple[int, ...] = ()
    ) -> None:
        self._changed = changed
        self._aligned = aligned
        self._kept = kept
        self._launch = ctypes.CDLL(str(library)).launch
        self._launch.restype = ctypes.c_char_p

    def __call__(self, grid: int, threads: int, shared: int, arguments: Sequence[nvrtc.Argument]) -> None:
        """Launch as `nvrtc.Function` does, and wait."""
        places = [place for place in self._changed if arguments[place] is not None]
        results = [self._run(grid, threads, shared, arguments, reverse) for reverse in (False, True)]
        for place, one, other in zip((OUT, *places), *results, strict=True):
            if not torch.equal(one.view(torch.uint8), other.view(torch.uint8)):
                raise Broken("the result depends on the order of warps: a barrier is missing")
            out = arguments[place]
            assert isinstance(out, Tensor)
            out.copy_(one)

    def _run(
        self, grid: int, threads: int, shared: int, arguments: Sequence[nvrtc.Argument], reverse: bool
    ) -> list[Tensor]:
        tensors = [one.tensor if isinstance(one, nvrtc.Boxes) else one for one in arguments]
        copies = [
            Guarded(one, 16 if place in self._aligned else 1) if isinstance(one, Tensor) else None
            for place, one in enumerate(tensors)
        ]
        written = copies[OUT]
        assert written is not None
        if not self._kept:
            written.tensor.view(torch.uint8).fill_(0xFF)
        before = [None if copy is None else bytes(copy.memory[copy.head : copy.end]) for copy in copies]
        values = [_value(one, copy) for one, copy in zip(arguments, copies, strict=True)]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        said = self._launch(grid, threads, shared, reverse, pointers).decode()
        if said:
            raise Broken(said + "; arguments: " + ", ".join(str(copy) for copy in copies if copy is not None))
        for copy, then in zip(copies, before, strict=True):
            if copy is not None and then is not None and copy not in [copies[place] for place in self._changed]:
                size = copy.start - copy.head if copy is written else len(then)
                if copy.memory[copy.head : copy.head + size] != then[:size]:
                    raise Broken(f"memory was written that is not the output: {copy}")
        changed = [copies[place] for place in self._changed]
        return [written.tensor.clone(), *(copy.tensor.clone() for copy in changed if copy is not None)]


def _value(argument: nvrtc.Argument, copy: Guarded | None) -> object:
    """What a kernel is given for this argument, with the copy in the place of its tensor."""
    if not isinstance(argument, nvrtc.Boxes):
        return nvrtc._value(argument if copy is None else copy.tensor)
    assert copy is not None
    memory = ctypes.create_string_buffer(nvrtc.MAP_BYTES + nvrtc.MAP_ALIGNMENT)
    place = -ctypes.addressof(memory) % nvrtc.MAP_ALIGNMENT
    words = (ctypes.c_uint64 * (nvrtc.MAP_BYTES // 8)).from_buffer(memory, place)
    numbers = argument._replace(tensor=copy.tensor).numbers
    words[: len(numbers)] = numbers
    return words


class Guarded:
    """A copy of a tensor, strides and all, that ends before a page without access, as near as it is aligned."""

    def __init__(self, source: Tensor, aligned: int = 1) -> None:
        page = mmap.PAGESIZE
        places = 1 + sum((size - 1) * step for size, step in zip(source.shape, source.stride(), strict=True))
        size = places * source.element_size()
        self.head, self.end = page, page + -(-size // page) * page
        self.start = (self.end - size) // aligned * aligned
        self.memory = mmap.mmap(-1, self.end + page)
        self.memory[self.head : self.end] = b"\xff" * (self.end - self.head)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        for guard in (0, self.end):
            if _libc.mprotect(ctypes.c_void_p(address + guard), ctypes.c_size_t(page), 0):
                raise OSError(ctypes.get_errno(), "mprotect")
        flat = torch.frombuffer(self.memory, dtype=source.dtype, count=places, offset=self.start)
        self.tensor = flat.as_strided(source.shape, source.stride())
        self.tensor.copy_(source)

    def __str__(self) -> str:
        first = self.tensor.data_ptr()
        return f"{first:#x} to {first + self.end - self.start:#x}"


class Emulator:
    """Compiles into `folder`, each set of macros once, whichever process asks for it first."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._functions: dict[str, Function] = {}

    def function(
        self,
        sources: tuple[Path, ...],
        name: str,
        defines: tuple[tuple[str, int], ...],
        device: int | None,
        early: bool = False,
    ) -> Function:
        """`nvrtc.function`, for the CPU."""
        text = program(sources, name, defines)
        key = hashlib.sha256((text + "".join(file.read_text() for file in sources)).encode()).hexdigest()[:16]
        if key not in self._functions:
            library = self._compile(text, self._folder / f"{name}_{key}")
            self._functions[key] = Function(library, CHANGED.get(name, ()), name in KEPT, ALIGNED.get(name, ()))
        return self._functions[key]

    def _compile(self, text: str, stem: Path) -> Path:
        assert COMPILER is not None
        library = stem.with_suffix(".so")
        if library.exists():
            return library
        source, mine = (stem.with_suffix(f".{os.getpid()}.{kind}") for kind in ("cpp", "so"))
        source.write_text(text)
        command = [COMPILER, *OPTIONS, f"-I{HERE}", str(source), "-o", str(mine)]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        if run.returncode:
            raise Broken(f"g++ could not compile {source.name}:\n{run.stderr[:4000]}")
        mine.replace(library)  # whole, or not at all
        return library


def program(sources: tuple[Path, ...], name: str, defines: tuple[tuple[str, int], ...]) -> str:
    """The kernel `name` of these files as a library for the CPU, whose one function is `launch`."""
    asked = re.findall(r"extern __shared__ (?:__align__\(1024\) )?(\w+) (\w+)\[\]", sources[-1].read_text())
    kind, memory = asked[0] if asked else ("char", "nothing")
    own = [HERE / file.with_suffix(".h").name for file in sources]
    lines = [f"#define {key} {value}" for key, value in defines]
    lines += ['#include "cuda.h"', f"alignas(1024) thread_local {kind} {memory}[{SHARED} / sizeof({kind})];"]
    lines += [f'#include "{mine if mine.exists() else file}"' for mine, file in zip(own, sources, strict=True)]
    lines += [
        'extern "C" const char* launch(int grid, int threads, int asked, int reverse, void* const* values) {',
        f"    const char* memory = (const char*)::{memory};",
        f"    auto* const body = launch_of({name}, values);",
        f"    return machine::launch(body, grid, threads, reverse, memory, {SHARED}, asked);",
        "}",
    ]
    return "\n".join(lines) + "\n"
