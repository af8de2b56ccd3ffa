"""One safetensors file: opened once, checked once, mapped.

A `File` reads the header of a file and maps its bytes at the same time, and goes on with just these bytes: whoever
replaces the file afterwards does not change what is read. If it is replaced in between, that is a `ReplacedError`.

Tensors are views of the mapping, each with a storage of its own, as the package safetensors makes them: a change stays
in memory, and storing or copying one takes no others along. `tensor` maps the file anew for one tensor, so that its
pages leave memory with it. Checksums are compared through a buffer, which leaves no pages in memory at all.
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
from narrowcast.checkpoint.header import contents_of, short
from narrowcast.errors import CheckpointError, MissingFileError, ReplacedError

PICKLES = (".pt", ".pth", ".bin", ".ckpt")
"""The endings of what torch.save writes."""
BLOCK = 1 << 20
"""Bytes that are read at a time to compare checksums: what stays in a cache."""


class File:
    """One safetensors file whose header has been checked."""

    def __init__(self, path: Path) -> None:
        self.path = path
        check_regular(path)
        try:
            with open(path, "rb") as file:
                self._identity = identity(os.fstat(file.fileno()))
                self._check_whole()
                self._bytes = self._map()  # while the file is open, its number is no other's
                if self._bytes is None:
                    raise ReplacedError(f"{path}: was replaced while it was opened. Load it again.")
                start = file.read(8)
                body = file.read(int.from_bytes(start, "little"))
        except FileNotFoundError as error:
            raise ReplacedError(f"{path}: was removed while it was opened. Load it again.") from error
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}. Check who may read it.") from error
        self._data = len(start) + len(body)
        self.digest = header_digest(start + body)
        """What an index says of this file."""
        with _no_collection():
            self.contents = contents_of(body, str(path))

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
        """The bytes of the file, which change in memory only; None if its name stands for another file by now."""
        failed: Exception | None = None
        try:
            storage = torch.UntypedStorage.from_file(str(self.path), shared=False, nbytes=self._identity[2])
        except (OSError, RuntimeError) as error:
            failed = error
        # A file that is open or mapped keeps its number: the same number before and after is the same file.
        if not self._is_there():
            return None
        if failed:
            raise CheckpointError(f"{self.path}: cannot be mapped into memory: {failed}") from failed
        return torch.empty(0, dtype=torch.uint8, device="cpu").set_(cast(torch.UntypedStorage, storage)).numpy()

    def _check_whole(self) -> None:
        """Let the package safetensors check the header: its length and JSON, dtypes, offsets that overlap or gape."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self.path, "np"):
                pass
        except (SafetensorError, OSError, RuntimeError) as error:
            if self._is_there():
                raise CheckpointError(f"{self.path}: {_kind(self.path, error)}") from error

    def _is_there(self) -> bool:
        """Whether the name still stands for this file."""
        with suppress(OSError):
            return identity(os.stat(self.path)) == self._identity
        return False

    def verify(self, advance: Callable[[int], None]) -> None:
        """Compare every tensor that has a checksum with it."""
        expected = self.contents.checksums
        if not expected:
            return
        with suppress(FileNotFoundError), open(self.path, "rb", buffering=0) as file:
            if identity(os.fstat(file.fileno())) == self._identity:
                self._compare(file, memoryview(bytearray(min(BLOCK, self._identity[2]))), advance)
                return
        self._compare(None, memoryview(self._bytes), advance)

    def _compare(self, file: Any, block: memoryview, advance: Callable[[int], None]) -> None:
        """Compare checksums, of a file that is read into `block` in order, or of all bytes in `block`."""
        contents, crc32 = self.contents, zlib.crc32
        first, last = (0, 0) if file else (0, len(block))
        for name, (start, stop) in sorted(contents.spans.items(), key=_second):
            at, end, checksum = self._data + start, self._data + stop, 0
            while at < end:
                if not first <= at < last:
                    file.seek(at)
                    first, last = at, at + file.readinto(block)
                    if last == first:
                        raise CheckpointError(f"{self.path}: ends in {short(name)}. It was cut while it was read.")
                until = min(end, last)
                checksum = crc32(block[at - first : until - first], checksum)
                advance(until - at)
                at = until
            said = contents.checksums[name]
            if f"{checksum:08x}" != said:
                raise CheckpointError(
                    f"{self.path}: the bytes of {short(name)} do not match their checksum {short(said)}. "
                    "They were changed on the disk or on the way. Copy the file again; verify=False loads it as it is."
                )


def _second(pair: tuple[str, tuple[int, int]]) -> tuple[int, int]:
    return pair[1]


@contextmanager
def _no_collection() -> Iterator[None]:
    """Let the garbage collector rest: a large header makes many objects, none of them garbage (half the time)."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def identity(status: os.stat_result) -> tuple[int, int, int, int]:
    """What tells a file from another one that has its name: device, number, size, and when it was changed."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _kind(path: Path, error: Exception) -> str:
    """Why a file is not read, by its ending where that tells."""
    ending = path.suffix.lower()
    if ending in PICKLES:
        return "a pickle; save it with safetensors.torch.save_file, or use nc.quantize_ in Python."
    if ending in (".npy", ".npz"):
        return "numpy's, and no safetensors file. narrowcast encode takes .npy files."
    return (
        f"not a whole safetensors file: {error}. It was cut off, damaged, or is of another kind (a pickle that was "
        "renamed, say). Copy or save it again."
    )


def check_regular(path: Path) -> None:
    """Refuse what is no file before it is opened: a pipe would wait."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError as error:
        raise MissingFileError(
            f"{path}: no such file. The index names it: the save or download was not finished."
        ) from error
    if not stat.S_ISREG(mode):
        raise CheckpointError(f"{path}: is not a regular file. Pass a safetensors file, or a folder that holds some.")
