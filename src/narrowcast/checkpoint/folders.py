"""Which files of a folder belong together, and how one checkpoint replaces another.

One name decides which checkpoint a folder holds: `model.safetensors` if it exists, else the files that the index lists.
transformers decides the same way. So a new checkpoint takes effect by one rename or removal, and a reader sees either
the old one or the new one:

- A single file takes effect when it is renamed. The old index and shards are removed afterwards.
- Shards are complete and have names that no file of the folder has. Then the index is renamed into its place. Then a
  single file, which would come before it, is removed.

The index has the SHA-256 of every shard's header, and a header has the checksums of its tensors. So an index belongs to
the files of one save, and a mixture of two saves is refused. The first shards of a folder have the names that Hugging
Face gives. Those of a later save have the number of their save in them, too.

Processes that save at the same time take turns (`locked`). The last one wins, and removes the files of the others.
Where the file system has no locks, two processes may leave a folder that is refused, but never one that loads as a
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

from narrowcast.checkpoint.files import Entry, Staging, new_file, sync

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD = re.compile(r"model(?:-[0-9a-f]{8})?-\d{5,}-of-\d{5,}\.safetensors")
OWN, HEADERS = "narrowcast", "headers"
"""The keys under which the metadata of an index has {file: SHA-256 of its header}."""


def shard_names(count: int, save: str = "") -> list[str]:
    """The names of the files of a checkpoint: Hugging Face's, with the number of the save where one is given."""
    if count == 1:
        return [SINGLE]
    start = f"model-{save}" if save else "model"
    return [f"{start}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def free_names(folder: Path, count: int) -> list[str]:
    """Names for shards that no file of the folder has, and that its index does not list."""
    plain = shard_names(count)
    if (folder / INDEX).exists() or any((folder / name).exists() for name in plain):
        return shard_names(count, new_save())
    return plain


def new_save() -> str:
    """A number that no other save has."""
    return secrets.token_hex(4)


def header_digest(header: bytes) -> str:
    """The digest that an index has of a file: SHA-256 of its first bytes, the length and the header."""
    return hashlib.sha256(header).hexdigest()


def index_bytes(files: Mapping[str, Iterable[Entry]], headers: Mapping[str, str]) -> bytes:
    """The index of a folder: the file of each tensor, and the digest of each file."""
    places = {entry.name: name for name, group in files.items() for entry in group}
    total = sum(entry.stored.nbytes for group in files.values() for entry in group)
    metadata = {"total_size": total, OWN: {HEADERS: dict(headers)}}
    return json.dumps({"metadata": metadata, "weight_map": places}, indent=2).encode()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder: other processes that save into it wait. A killed process releases it."""
    handle = None
    # Where folders cannot be locked, the digests of the index still reveal a mixture.
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
    with locked(folder):
        staging.publish([SINGLE])
        remove_others(folder, {SINGLE})


def publish_shards(folder: Path, staging: Staging, groups: Sequence[Sequence[Entry]], headers: Sequence[str]) -> None:
    """Make the staged files, with these digests, the folder's checkpoint."""
    with locked(folder):
        names = free_names(folder, len(groups))
        staging.publish(names)
        publish_index(
            folder, dict(zip(names, groups, strict=True)), dict(zip(names, headers, strict=True)), only_shards=True
        )


def publish_index(
    folder: Path, files: Mapping[str, Iterable[Entry]], headers: Mapping[str, str], only_shards: bool
) -> None:
    """Make files that have their names the folder's checkpoint, and remove the old one. The caller holds the lock."""
    with new_file(folder / INDEX) as file:
        file.write(index_bytes(files, headers))
    (folder / SINGLE).unlink(missing_ok=True)
    sync(folder)
    remove_others(folder, {INDEX, *files}, only_shards)


def remove_others(folder: Path, names: set[str], only_shards: bool = True) -> None:
    """Remove the files of other checkpoints than `names`: files that a save writes, or every safetensors file."""
    for path in folder.iterdir():
        of_a_save = path.name in (SINGLE, INDEX) or bool(SHARD.fullmatch(path.name))
        of_weights = path.name.endswith((".safetensors", ".safetensors.index.json"))
        if (of_a_save if only_shards else of_weights) and path.name not in names:
            path.unlink(missing_ok=True)
