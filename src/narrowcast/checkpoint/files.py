"""Files that are there whole or not at all.

New files are written beside their place under a name that no reader looks at, flushed to the disk, and renamed when
all of them are complete. Whatever stops the work before that (an exception, Ctrl-C, a full disk) leaves the folder as
it was; only a killed process leaves its temporary files, which `sweep` removes.
"""

from __future__ import annotations

import errno
import os
import secrets
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, NamedTuple

import torch
from torch import Tensor

from narrowcast.checkpoint.header import Contents, Stored, header
from narrowcast.codecs import Codec
from narrowcast.codecs.payload import Encoding
from narrowcast.errors import CheckpointError

SUFFIX = ".narrowcast-tmp"
CHUNK = 1 << 24
"""Bytes between two looks at the clock and at Ctrl-C."""
HEADER_LIMIT = 100_000_000
"""What the package safetensors accepts."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Entry(NamedTuple):
    """A tensor to be written: what it will be, and a function that makes it when its turn comes."""

    name: str
    stored: Stored
    encoding: Encoding | None
    make: Callable[[], Tensor]


class Staging:
    """New files of a folder, published together. Leaving the `with` block without `publish` removes them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ready: dict[Path, Path] = {}

    def __enter__(self) -> Staging:
        return self

    @contextmanager
    def file(self, name: str) -> Iterator[BinaryIO]:
        """A new file, complete when the block ends."""
        temporary = self._folder / f".{name}.{secrets.token_hex(4)}{SUFFIX}"
        self._ready[temporary] = self._folder / name
        with self._named(temporary), open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())

    def publish(self, names: Sequence[str] | None = None) -> None:
        """Give every file its name, in the order in which they were made; or other `names`, known only now."""
        if names is not None:
            self._ready = {own: self._folder / name for own, name in zip(self._ready, names, strict=True)}
        for temporary, path in self._ready.items():
            with self._named(temporary):
                os.replace(temporary, path)
        sync(self._folder)

    @contextmanager
    def _named(self, temporary: Path) -> Iterator[None]:
        """What the system says of the temporary file is said of the file that was asked for; the type stays."""
        try:
            yield
        except OSError as error:
            if str(error.filename) != str(temporary) and error.errno not in _FULL:
                raise
            full = error.errno in _FULL
            fix = (
                "Free some space, or name another place." if full else "Make the folder, or name one you may write to."
            )
            told = type(error)(f"{self._ready[temporary]}: cannot be written: {error.strerror}. {fix}")
            told.errno = error.errno
            raise told from error

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for temporary in self._ready:
            temporary.unlink(missing_ok=True)


def sync(folder: Path) -> None:
    """Make new names in a folder last. Some systems cannot open a folder; theirs last anyway."""
    with suppress(PermissionError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def sweep(folder: Path) -> None:
    """Remove what a killed process left. Nobody may be writing there."""
    for path in folder.glob(f".*{SUFFIX}"):
        path.unlink(missing_ok=True)


def write_tensors(
    file: BinaryIO,
    entries: Sequence[Entry],
    tied: dict[str, str],
    user: dict[str, object],
    advance: Callable[[int], None] = lambda count: None,
    inputs: Mapping[str, tuple[Codec, bool]] | None = None,
) -> bytes:
    """Write a safetensors file tensor by tensor, holding one at a time; tell `advance` the bytes as they are written.

    Returns the header. Checksums are known when all bytes are, so it is written twice: its length does not depend on
    them.
    """
    ordered = sorted(entries, key=_alignment)
    encodings = {entry.name: entry.encoding for entry in ordered if entry.encoding is not None}
    stored = {entry.name: entry.stored for entry in ordered}
    contents = Contents(stored, encodings=encodings, tied=tied, user=user, inputs=dict(inputs or {}))
    start = header(contents)
    if len(start) > HEADER_LIMIT:
        raise CheckpointError(
            f"metadata: the header would take {len(start)} bytes, and safetensors reads {HEADER_LIMIT} at most. Put "
            "large values into tensors, or into a file of their own."
        )
    file.write(start)
    for entry in ordered:
        contents.checksums[entry.name] = _write(file, entry, advance)
    file.seek(0)
    start = header(contents)
    file.write(start)
    return start


def _alignment(entry: Entry) -> int:
    # Encoded rows take multiples of 16 bytes and come first, then wide elements: each is aligned, with no gaps.
    return 0 if entry.encoding is not None else 9 - entry.stored.dtype.itemsize


def _write(file: BinaryIO, entry: Entry, advance: Callable[[int], None]) -> str:
    tensor = entry.make()
    if (tensor.dtype, tuple(tensor.shape)) != tuple(entry.stored):
        raise CheckpointError(f"{entry.name!r} changed while it was being written. Save when nothing else changes it.")
    checksum = 0
    for chunk in chunks(tensor):
        file.write(chunk)
        checksum = zlib.crc32(chunk, checksum)
        advance(len(chunk))
    return f"{checksum:08x}"


def chunks(tensor: Tensor) -> Iterator[memoryview]:
    """The bytes of a contiguous CPU tensor, without a copy."""
    if not tensor.numel():
        return
    # The stride of a dimension of size 1 may be anything, and would be in the way of `view`.
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    data: memoryview = flat.view(torch.uint8).numpy().data
    for start in range(0, len(data), CHUNK):
        yield data[start : start + CHUNK]
