"""How the files of a folder belong together, and how one checkpoint takes the place of another.

Which checkpoint a folder holds is decided by one name: `model.safetensors` if it is there, else what the index names;
as transformers decides. So a new checkpoint takes effect by one rename or removal, and a reader finds one of the two:

- a single file: its rename. What was there before (an index, shards) goes afterwards.
- shards: all are complete and have names that no file of the folder has; then the index is renamed into its place; a
  single file that still stands before it is removed.

The index has the SHA-256 of every shard's header, and a header has the checksums of its tensors: so an index belongs to
the files of one save and to no others, and a mixture of two is refused whoever made it. The first shards of a folder
have the names that Hugging Face gives; those of a later save have the number of their save in them besides.

Processes that save at the same time take turns (`turn`): the last one wins, and removes the files of all others. Where
the file system has no locks, two at the same moment may leave a folder that is refused, but never one that loads as a
mixture.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from narrowcast.checkpoint.files import Entry, Staging, sync

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD = re.compile(r"model(?:-[0-9a-f]{8})?-\d{5,}-of-\d{5,}\.safetensors")
OWN, HEADERS = "narrowcast", "headers"
"""Where the metadata of an index has {file: SHA-256 of its header}."""


def shard_names(count: int, save: str = "") -> list[str]:
    """The names of the files of a checkpoint: Hugging Face's, with the number of the save where one is given."""
    if count == 1:
        return [SINGLE]
    start = f"model-{save}" if save else "model"
    return [f"{start}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def free_names(folder: Path, count: int) -> list[str]:
    """Names for shards that no file in the folder has, and that no reader of an index there may look for."""
    plain = shard_names(count)
    if (folder / INDEX).exists() or any((folder / name).exists() for name in plain):
        return shard_names(count, new_save())
    return plain


def new_save() -> str:
    """A number that no other save has."""
    return secrets.token_hex(4)


def header_digest(header: bytes) -> str:
    """What an index says of a file: SHA-256 of its first bytes, the length and the header."""
    return hashlib.sha256(header).hexdigest()


def index(files: Mapping[str, Iterable[Entry]], headers: Mapping[str, str]) -> bytes:
    """The index of a folder: which tensor is in which file, and which save the files are of."""
    places = {entry.name: name for name, group in files.items() for entry in group}
    total = sum(entry.stored.nbytes for group in files.values() for entry in group)
    metadata = {"total_size": total, OWN: {HEADERS: dict(headers)}}
    return json.dumps({"metadata": metadata, "weight_map": places}, indent=2).encode()


@contextmanager
def turn(folder: Path) -> Iterator[None]:
    """Publish alone: other processes that save into the folder wait. A process that is killed lets go."""
    handle = None
    # Where folders cannot be locked, the digests of the index still tell a mixture.
    with suppress(ImportError, OSError):
        import fcntl

        handle = os.open(folder, os.O_RDONLY)
        fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        yield
    finally:
        if handle is not None:
            os.close(handle)


def publish_single(folder: Path, staging: Staging) -> None:
    """Make the one staged file the folder's checkpoint."""
    with turn(folder):
        staging.publish([SINGLE])
        remove_others(folder, {SINGLE})


def publish_shards(folder: Path, staging: Staging, groups: Sequence[Sequence[Entry]], headers: Sequence[str]) -> None:
    """Make the staged files, with these digests, the folder's checkpoint."""
    with turn(folder):
        names = free_names(folder, len(groups))
        staging.publish(names)
        publish_index(
            folder, dict(zip(names, groups, strict=True)), dict(zip(names, headers, strict=True)), only_shards=True
        )


def publish_index(
    folder: Path, files: Mapping[str, Iterable[Entry]], headers: Mapping[str, str], only_shards: bool
) -> None:
    """Make files that are in their places the folder's checkpoint; remove what was there. Done in a `turn`."""
    with Staging(folder) as staging:
        with staging.file(INDEX) as file:
            file.write(index(files, headers))
        staging.publish()
    (folder / SINGLE).unlink(missing_ok=True)
    sync(folder)
    remove_others(folder, {INDEX, *files}, only_shards)


def remove_others(folder: Path, kept: set[str], only_shards: bool = True) -> None:
    """Remove the files of other checkpoints: those that a save writes, or every safetensors file."""
    for path in folder.iterdir():
        of_a_save = path.name in (SINGLE, INDEX) or bool(SHARD.fullmatch(path.name))
        of_weights = path.name.endswith((".safetensors", ".safetensors.index.json"))
        if (of_a_save if only_shards else of_weights) and path.name not in kept:
            path.unlink(missing_ok=True)
