"""The paths that a command reads and writes, checked before any file is opened."""

from __future__ import annotations

from pathlib import Path

from narrowcast.errors import CheckpointError, MissingFileError, PlotError, TargetError


def check_source(path: Path, endings: tuple[str, ...]) -> None:
    """Refuse a source that does not exist, or is not a file with one of these endings."""
    if not path.exists():
        raise MissingFileError(f"SRC={str(path)!r}: no such file. Check the path.")
    if path.is_dir():
        raise CheckpointError(
            f"SRC={str(path)!r}: is a folder. Name a file, or use narrowcast quantize, which takes folders."
        )
    if path.suffix not in endings:
        raise CheckpointError(f"SRC={str(path)!r}: expected a file that ends in {' or '.join(endings)}.")


def check_target(path: Path, endings: tuple[str, ...], source: Path, overwrite: bool) -> None:
    """Refuse a target with another ending, one that exists, or one that cannot be written."""
    if path.suffix not in endings:
        raise TargetError(f"DST={str(path)!r}: the name of the file to write must end in {' or '.join(endings)}.")
    if path.exists() and path.samefile(source):
        raise TargetError(f"DST={str(path)!r}: is the source. The source is never changed: name another file.")
    check_place(f"DST={str(path)!r}", path, overwrite)


def check_picture(option: str, path: Path) -> None:
    """Refuse a picture with another ending, or one that cannot be written. A picture that exists is replaced."""
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise PlotError(f"{option} {str(path)!r}: the name must end in .png, .svg or .pdf.")
    check_place(f"{option} {str(path)!r}", path, overwrite=True)


def check_place(what: str, path: Path, overwrite: bool) -> None:
    """Refuse a file that exists (unless `overwrite`) or cannot be written. Errors call it `what`."""
    from narrowcast.checkpoint.files import check_writable  # it loads torch, which --help does without

    folder = path.absolute().parent
    if not folder.is_dir():
        raise TargetError(f"{what}: there is no folder {str(path.parent)!r}. Create it first.")
    if path.is_dir():
        raise TargetError(f"{what}: is a folder. Name a file in it.")
    if path.exists() and not overwrite:
        raise TargetError(f"{what}: exists already. Pass --overwrite, or name another file.")
    check_writable(what, path.parent)
