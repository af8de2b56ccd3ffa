"""The files that a command reads and writes: what their names must be, before any of them is opened."""

from __future__ import annotations

import tempfile
from pathlib import Path

from narrowcast.errors import CheckpointError, MissingFileError, PlotError, TargetError


def check_source(path: Path, endings: tuple[str, ...]) -> None:
    """Refuse a source that is not there, or is no file of these kinds."""
    if not path.exists():
        raise MissingFileError(f"SRC={str(path)!r}: no such file. Check the path.")
    if path.is_dir():
        raise CheckpointError(f"SRC={str(path)!r}: is a folder. Name a file; folders are for narrowcast quantize.")
    if path.suffix not in endings:
        raise CheckpointError(f"SRC={str(path)!r}: expected a file that ends in {' or '.join(endings)}.")


def check_target(path: Path, endings: tuple[str, ...], source: Path, overwrite: bool) -> None:
    """Refuse a target that is of another kind, is taken, or has no folder to be in."""
    if path.suffix not in endings:
        raise TargetError(f"DST={str(path)!r}: a file that ends in {' or '.join(endings)} is written.")
    if path.exists() and path.samefile(source):
        raise TargetError(f"DST={str(path)!r}: is the source. Name another file; the original is never changed.")
    check_place(f"DST={str(path)!r}", path, overwrite)


def check_picture(option: str, path: Path) -> None:
    """Refuse a picture of another kind, or in a place where it cannot be drawn. One that is there will be replaced."""
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise PlotError(f"{option} {str(path)!r}: draws .png, .svg or .pdf. Give one of these endings.")
    check_place(f"{option} {str(path)!r}", path, overwrite=True)


def check_place(what: str, path: Path, overwrite: bool) -> None:
    """Refuse a file to be written, which errors call `what`, that is taken or has no folder to be in."""
    folder = path.absolute().parent
    if not folder.is_dir():
        raise TargetError(f"{what}: there is no folder {str(path.parent)!r}. Make it first.")
    if path.is_dir():
        raise TargetError(f"{what}: is a folder. Name a file in it.")
    if path.exists() and not overwrite:
        raise TargetError(f"{what}: is there already. Pass --overwrite, or name another file.")
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise TargetError(
            f"{what}: nothing can be written to {str(path.parent)!r}: {error.strerror}. Name a folder that you may "
            "write to."
        ) from error
