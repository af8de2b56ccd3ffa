"""One safetensors file: opened once, checked once, read or mapped.

A `File` holds the file open from its first byte on. Replacing the file afterwards does not change what is read. A file
that is replaced while it is opened raises a `ReplacedError`.

- `read` reads elements of a tensor into memory of their own. A file, or a tensor, that is larger than memory is read
  a part at a time.
- `tensors` maps all tensors: views of the file, each with its own storage, as the package safetensors gives them. A
  change stays in memory, and saving or copying one tensor does not include the others. No memory is reserved for
  changes, so that a file may be larger than memory.
- `tensor` maps one tensor, so that its pages leave memory with it.
- `verify` reads through a buffer, which leaves no pages in memory.
"""

from __future__ import annotations

import gc
import io
import mmap
import os
import stat
import sys
import threading
import weakref
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from narrowcast.checkpoint.folders import header_digest
from narrowcast.checkpoint.parse import parse_header, short
from narrowcast.errors import CheckpointError, MissingFileError, ReplacedError

PICKLES = (".pt", ".pth", ".bin", ".ckpt")
"""The endings of what torch.save writes."""
BLOCK = 1 << 20
"""Bytes read at a time to compare checksums: few enough to stay in a cache."""
_NO_RESERVE = 0x4000 if sys.platform == "linux" else 0
"""MAP_NORESERVE, which Python's mmap names from 3.13 on: without it, Linux refuses to map more than memory holds."""


class File:
    """One safetensors file whose header has been checked."""

    def __init__(self, path: Path) -> None:
        self.path = path
        check_regular(path)
        try:
            handle = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
            weakref.finalize(self, os.close, handle)
            self._file, self._lock = io.FileIO(handle, closefd=False), threading.Lock()
            self._identity = identity(os.fstat(handle))
            self._check_whole()
            if not self._is_there():  # the check above went by the path
                raise ReplacedError(f"{path}: was replaced while it was being opened. Load it again.")
            start = self._file.read(8)
            body = self._file.read(int.from_bytes(start, "little"))
        except FileNotFoundError as error:
            raise ReplacedError(f"{path}: was removed while it was being opened. Load it again.") from error
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}. Check its permissions.") from error
        self._data = len(start) + len(body)
        self.digest = header_digest(start + body)
        """The digest that an index lists for this file."""
        with _no_collection():
            self.contents = parse_header(body, str(path))

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """The elements of a tensor, laid flat, from `start` to `stop`, in memory of their own."""
        dtype = self.contents.tensors[name].dtype
        elements = torch.empty(stop - start, dtype=dtype, device="cpu")
        at = self._data + self.contents.spans[name][0] + start * dtype.itemsize
        if elements.numel():
            self._fill(elements.view(torch.uint8).numpy().data, at, name)
        return elements

    def tensor(self, name: str) -> Tensor:
        """One tensor, in a mapping of its own that lasts as long as it does."""
        start, stop = self.contents.spans[name]
        first = (self._data + start) // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        return self._view(self._map(first, self._data + stop) if stop > start else None, name, first)

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor, mapped. The mapping lasts as long as they do."""
        with _no_collection():
            mapped = self._map(0, self._identity[2])
            return {name: self._view(mapped, name, 0) for name in self.contents.tensors}

    def _view(self, mapped: Any, name: str, first: int) -> Tensor:
        """A tensor in a mapping that begins at byte `first` of the file."""
        dtype, shape = self.contents.tensors[name]
        start, stop = self.contents.spans[name]
        if start == stop:
            return torch.empty(shape, dtype=dtype, device="cpu")
        count = (stop - start) // dtype.itemsize
        tensor = torch.frombuffer(mapped, dtype=dtype, count=count, offset=self._data + start - first)
        return tensor if len(shape) == 1 else tensor.view(shape)

    def _map(self, first: int, end: int) -> mmap.mmap:
        """The bytes of the file from `first` to `end`; changes stay in memory."""
        private: dict[str, int] = {"access": mmap.ACCESS_COPY}
        if hasattr(mmap, "MAP_PRIVATE"):
            private = {"flags": mmap.MAP_PRIVATE | _NO_RESERVE, "prot": mmap.PROT_READ | mmap.PROT_WRITE}
        try:
            return mmap.mmap(self._file.fileno(), end - first, offset=first, **private)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self.path}: cannot be mapped into memory: {error}") from error

    def _fill(self, block: memoryview, at: int, name: str) -> None:
        """Read the bytes from `at` on into `block`."""
        with self._lock:
            self._file.seek(at)
            while len(block):
                count = self._file.readinto(block)
                if not count:
                    raise CheckpointError(
                        f"{self.path}: ends inside {short(name)}. It was truncated while it was being read."
                    )
                block = block[count:]

    def _check_whole(self) -> None:
        """Let the package safetensors check the header: length, JSON, dtypes, offsets that overlap or leave gaps."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self.path, "np"):
                pass
        except (SafetensorError, OSError, RuntimeError) as error:
            if self._is_there():
                raise CheckpointError(f"{self.path}: {_kind(self.path, error)}") from error

    def _is_there(self) -> bool:
        """Whether the path still names this file."""
        with suppress(OSError):
            return identity(os.stat(self.path)) == self._identity
        return False

    def verify(self, advance: Callable[[int], None] = lambda count: None) -> None:
        """Compare every tensor with its checksum; `advance` is called with the bytes read."""
        contents, crc32, size = self.contents, zlib.crc32, self._identity[2]
        block, first, last = memoryview(bytearray(min(BLOCK, size))), 0, 0
        for name, (start, stop) in sorted(contents.spans.items(), key=_second) if contents.checksums else ():
            at, end, checksum = self._data + start, self._data + stop, 0
            while at < end:
                if not first <= at < last:  # small tensors share a block
                    first, last = at, min(at + BLOCK, size)
                    self._fill(block[: last - first], first, name)
                until = min(end, last)
                checksum = crc32(block[at - first : until - first], checksum)
                advance(until - at)
                at = until
            expected = contents.checksums[name]
            if f"{checksum:08x}" != expected:
                raise CheckpointError(
                    f"{self.path}: the bytes of {short(name)} do not match their checksum {short(expected)}, so "
                    "they were changed after they were written. Copy the file again from its source, or pass "
                    "verify=False to load it as it is."
                )


def _second(pair: tuple[str, tuple[int, int]]) -> tuple[int, int]:
    return pair[1]


@contextmanager
def _no_collection() -> Iterator[None]:
    """Pause the garbage collector: a large header makes many objects, none of them garbage. It saves half the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def identity(status: os.stat_result) -> tuple[int, int, int, int]:
    """What tells a file from another one of the same name: device, inode, size, and time of change."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _kind(path: Path, error: Exception) -> str:
    """Why safetensors does not read a file, by its ending where that says it."""
    ending = path.suffix.lower()
    if ending in PICKLES:
        return "is a pickle. Save it with safetensors.torch.save_file, or use nc.quantize_ in Python."
    if ending in (".npy", ".npz"):
        return "is a numpy file, not a safetensors file. narrowcast encode takes .npy files."
    return (
        f"not a whole safetensors file: {error}. It is truncated, damaged, or of another kind, such as a renamed "
        "pickle. Copy or save it again."
    )


def check_regular(path: Path) -> None:
    """Refuse what is not a regular file before it is opened: opening a pipe would wait."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError as error:
        raise MissingFileError(
            f"{path}: no such file, although the index lists it: the save or download was not finished."
        ) from error
    if not stat.S_ISREG(mode):
        raise CheckpointError(f"{path}: is not a regular file. Pass a safetensors file, or a folder of them.")
