"""Files that are complete or absent.

New files are written in their folder under a temporary name that no reader looks at, flushed to the disk, and renamed
when all of them are complete. Whatever stops the work before that (an exception, Ctrl-C, a full disk) leaves the folder
as it was. Only a killed process leaves its temporary files; `sweep` removes them.
"""

from __future__ import annotations

import errno
import os
import secrets
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, NamedTuple

import torch
from torch import Tensor

from narrowcast.checkpoint.header import Contents, Stored, header_bytes
from narrowcast.codecs import Codec
from narrowcast.codecs.payload import Encoding
from narrowcast.errors import CheckpointError, TargetError

SUFFIX = ".narrowcast-tmp"
CHUNK = 1 << 24
"""Bytes written at a time: between two chunks, progress is reported and Ctrl-C is noticed."""
HEADER_LIMIT = 100_000_000
"""The longest header that the package safetensors accepts, in bytes."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def as_path(path: str | os.PathLike[str]) -> Path:
    """What a caller gave as `path`. An empty text would be the current folder."""
    if not os.fspath(path):
        raise CheckpointError(
            "path='': names no file and no folder. It may come from a variable that is not set. For the current folder "
            "pass '.'."
        )
    return Path(path)


class Entry(NamedTuple):
    """A tensor to be written: its dtype and shape, and a function that makes it when its turn comes, tile by tile."""

    name: str
    stored: Stored
    encoding: Encoding | None
    make: Callable[[], Iterable[Tensor]]
    """Contiguous tensors that have, one behind the other, the elements of this one."""


class Staging:
    """New files of a folder, published together. Leaving the `with` block without `publish` removes them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ready: dict[Path, Path] = {}

    def __enter__(self) -> Staging:
        return self

    @contextmanager
    def file(self, name: str) -> Iterator[BinaryIO]:
        """A new file to write to, in the folder or below it. It is complete when the block ends."""
        path = self._folder / name
        if path.parent != self._folder:
            path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}{SUFFIX}")
        self._ready[temporary] = path
        with self._named(temporary), open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())

    def publish(self, names: Sequence[str] | None = None) -> None:
        """Rename every file to its name, in the order in which they were written; or to `names`, if given."""
        if names is not None:
            self._ready = {own: self._folder / name for own, name in zip(self._ready, names, strict=True)}
        for temporary, path in self._ready.items():
            with self._named(temporary):
                os.replace(temporary, path)
        sync(self._folder)

    @contextmanager
    def _named(self, temporary: Path) -> Iterator[None]:
        """Errors of the system about the temporary file name the file that was asked for; their type stays."""
        try:
            yield
        except OSError as error:
            if str(error.filename) != str(temporary) and error.errno not in _FULL:
                raise
            full = error.errno in _FULL
            fix = "Free some disk space" if full else "Create the folder, or check its permissions"
            renamed = type(error)(
                f"{self._ready[temporary]}: cannot be written: {error.strerror}. {fix}, or name another folder."
            )
            renamed.errno = error.errno
            raise renamed from error

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for temporary in self._ready:
            temporary.unlink(missing_ok=True)


@contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """One file to write to. It appears under its name when the block ends without an error."""
    with Staging(path.absolute().parent) as staging:
        with staging.file(path.name) as file:
            yield file
        staging.publish()


def make_folder(what: str, folder: Path) -> None:
    """Make a folder that files can be written to, and its parents; refused if that cannot be. Errors call it `what`."""
    with _refusing(what, f"the folder {str(folder)!r} cannot be made"):
        folder.mkdir(parents=True, exist_ok=True)
    check_writable(what, folder)


def check_writable(what: str, folder: Path) -> None:
    """Refuse a folder that no file can be written to. Errors call it `what`."""
    with _refusing(what, f"cannot write to the folder {str(folder)!r}"):
        tempfile.TemporaryFile(dir=folder).close()


@contextmanager
def _refusing(what: str, problem: str) -> Iterator[None]:
    """An error of the system in here, but for a full disk, means that the folder is the wrong one."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise
        raise TargetError(f"{what}: {problem}: {error.strerror}. Name a folder that you may write to.") from error


def sync(folder: Path) -> None:
    """Flush a folder's new names to the disk. Some systems cannot open a folder; there, names last anyway."""
    with suppress(PermissionError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def sweep(folder: Path) -> None:
    """Remove the temporary files of killed processes. No other process may be writing to the folder."""
    for path in folder.rglob(f".*{SUFFIX}"):
        path.unlink(missing_ok=True)


def write_tensors(
    file: BinaryIO,
    entries: Sequence[Entry],
    tied: dict[str, str],
    user: dict[str, object],
    advance: Callable[[int], None] = lambda count: None,
    inputs: Mapping[str, tuple[Codec, bool]] | None = None,
) -> bytes:
    """Write a safetensors file tensor by tensor, holding a tile at a time. `advance` is called with the bytes written.

    Returns the header. It holds the checksums of all tensors, so it is written twice: before the tensors to take its
    place, and after them. Its length does not depend on the checksums.
    """
    ordered = sorted(entries, key=_alignment)
    encodings = {entry.name: entry.encoding for entry in ordered if entry.encoding is not None}
    stored = {entry.name: entry.stored for entry in ordered}
    contents = Contents(stored, encodings=encodings, tied=tied, user=user, inputs=dict(inputs or {}))
    start = header_bytes(contents)
    if len(start) > HEADER_LIMIT:
        raise CheckpointError(
            f"metadata: the header would take {len(start)} bytes, and safetensors reads at most {HEADER_LIMIT}. Put "
            "large values into tensors, or into a separate file."
        )
    file.write(start)
    for entry in ordered:
        contents.checksums[entry.name] = _write(file, entry, advance)
    file.seek(0)
    start = header_bytes(contents)
    file.write(start)
    return start


def _alignment(entry: Entry) -> int:
    # Encoded rows take multiples of 16 bytes and come first, then wide elements: so each is aligned without gaps.
    return 0 if entry.encoding is not None else 9 - entry.stored.dtype.itemsize


def _write(file: BinaryIO, entry: Entry, advance: Callable[[int], None]) -> str:
    checksum = written = 0
    for tile in entry.make():
        if tile.dtype == entry.stored.dtype:
            for chunk in chunks(tile):
                file.write(chunk)
                checksum, written = zlib.crc32(chunk, checksum), written + len(chunk)
                advance(len(chunk))
    if written != entry.stored.nbytes:
        raise CheckpointError(
            f"{entry.name!r} changed while it was being written. Save when no other thread changes it."
        )
    return f"{checksum:08x}"


def chunks(tensor: Tensor) -> Iterator[memoryview]:
    """The bytes of a contiguous CPU tensor, without a copy."""
    if not tensor.numel():
        return
    # A dimension of size 1 may have any stride, which `view` would not take.
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    data: memoryview = flat.view(torch.uint8).numpy().data
    for start in range(0, len(data), CHUNK):
        yield data[start : start + CHUNK]
