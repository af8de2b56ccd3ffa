"""One safetensors file: opened once, checked once, mapped.

A `File` reads the header and maps the bytes of the same file, and uses only these bytes: replacing the file afterwards
does not change what is read. A file that is replaced while it is opened raises a `ReplacedError`.

Tensors are views of the mapping, each with its own storage, as the package safetensors gives them. A change stays in
memory, and saving or copying one tensor does not include the others. `tensor` maps the file again for one tensor, so
that its pages leave memory with it. `verify` reads through a buffer, which leaves no pages in memory.
"""

from __future__ import annotations

import gc
import os
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from narrowcast.checkpoint.folders import header_digest
from narrowcast.checkpoint.parse import parse_header, short
from narrowcast.errors import CheckpointError, MissingFileError, ReplacedError

PICKLES = (".pt", ".pth", ".bin", ".ckpt")
"""The endings of what torch.save writes."""
BLOCK = 1 << 20
"""Bytes read at a time to compare checksums: few enough to stay in a cache."""


class File:
    """One safetensors file whose header has been checked."""

    def __init__(self, path: Path) -> None:
        self.path = path
        check_regular(path)
        try:
            with open(path, "rb") as file:
                self._identity = identity(os.fstat(file.fileno()))
                self._check_whole()
                self._bytes = self._map()  # while the file is open, no other file has its inode
                if self._bytes is None:
                    raise ReplacedError(f"{path}: was replaced while it was being opened. Load it again.")
                start = file.read(8)
                body = file.read(int.from_bytes(start, "little"))
        except FileNotFoundError as error:
            raise ReplacedError(f"{path}: was removed while it was being opened. Load it again.") from error
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}. Check its permissions.") from error
        self._data = len(start) + len(body)
        self.digest = header_digest(start + body)
        """The digest that an index lists for this file."""
        with _no_collection():
            self.contents = parse_header(body, str(path))

    def tensor(self, name: str) -> Tensor:
        """One tensor, in a mapping of its own that lasts as long as it does."""
        mapped = self._map()
        return next(self._views(self._bytes if mapped is None else mapped, [name]))[1]

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor, mapped. The mapping lasts as long as they do."""
        with _no_collection():
            return dict(self._views(self._bytes, self.contents.tensors))

    def _views(self, mapped: Any, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        tensors, spans, data, frombuffer = self.contents.tensors, self.contents.spans, self._data, torch.frombuffer
        for name in names:
            dtype, shape = tensors[name]
            start, stop = spans[name]
            if start == stop:
                yield name, torch.empty(shape, dtype=dtype, device="cpu")
                continue
            count = (stop - start) // dtype.itemsize
            tensor = frombuffer(mapped, dtype=dtype, count=count, offset=data + start)
            yield name, tensor if len(shape) == 1 else tensor.view(shape)

    def _map(self) -> Any:
        """The bytes of the file; changes stay in memory. None if the path names another file by now."""
        failed: Exception | None = None
        try:
            storage = torch.UntypedStorage.from_file(str(self.path), shared=False, nbytes=self._identity[2])
        except (OSError, RuntimeError) as error:
            failed = error
        # A file that is open or mapped keeps its inode: the same inode before and after is the same file.
        if not self._is_there():
            return None
        if failed:
            raise CheckpointError(f"{self.path}: cannot be mapped into memory: {failed}") from failed
        return torch.empty(0, dtype=torch.uint8, device="cpu").set_(cast(torch.UntypedStorage, storage)).numpy()

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
        if not self.contents.checksums:
            return
        with suppress(FileNotFoundError), open(self.path, "rb", buffering=0) as file:
            if identity(os.fstat(file.fileno())) == self._identity:
                self._compare(file, memoryview(bytearray(min(BLOCK, self._identity[2]))), advance)
                return
        self._compare(None, memoryview(self._bytes), advance)

    def _compare(self, file: Any, block: memoryview, advance: Callable[[int], None]) -> None:
        """Compare checksums. `file` is read into `block` in order; without a file, `block` holds all bytes."""
        contents, crc32 = self.contents, zlib.crc32
        first, last = (0, 0) if file else (0, len(block))
        for name, (start, stop) in sorted(contents.spans.items(), key=_second):
            at, end, checksum = self._data + start, self._data + stop, 0
            while at < end:
                if not first <= at < last:
                    file.seek(at)
                    first, last = at, at + file.readinto(block)
                    if last == first:
                        raise CheckpointError(
                            f"{self.path}: ends inside {short(name)}. It was truncated while it was being read."
                        )
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
