"""Checkpoints as they lie on a disk: a file, or a folder with one, or with several and an index.

    checkpoint = read("folder")          # headers only: names, shapes, encodings; everything about them is checked
    checkpoint.tensor("layers.0.weight") # mapped: the disk is read where the tensor is looked at
    checkpoint.verify()                  # every checksum

Which file of a folder: `model.safetensors`, else what `*.safetensors.index.json` lists, else the only safetensors file
there is; in this order, as transformers chooses. An index may name files of its own folder, nothing else.

Every file is opened once, and all that belong together before any is used. A folder into which somebody saves at the
same time is read again until it holds still: what comes out is of one save (folders.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from narrowcast.checkpoint.files import HEADER_LIMIT
from narrowcast.checkpoint.folders import HEADERS, INDEX, OWN, SHARD, SINGLE
from narrowcast.checkpoint.header import Stored, parse, short
from narrowcast.checkpoint.mapping import File, check_regular, identity
from narrowcast.codecs import Codec
from narrowcast.codecs.payload import EncodedRows, Encoding
from narrowcast.errors import CheckpointError, MissingFileError, ReplacedError

PATIENCE_SECONDS = 10.0
"""How long a folder that changes all the time is tried."""
PAUSE_SECONDS = 0.002


class Checkpoint:
    """All tensors of a file or folder, under their names."""

    def __init__(self, path: Path, files: list[File]) -> None:
        self.path = path
        self.files = files
        self.file_of: dict[str, File] = {}
        self.stored: dict[str, Stored] = {}
        """Every tensor, as the files hold it."""
        self.encodings: dict[str, Encoding] = {}
        """What the encoded ones stand for, tied names included."""
        self.tied: dict[str, str] = {}
        self.user: dict[str, Any] = {}
        self.inputs: dict[str, tuple[Codec, bool]] = {}
        """Of layers that quantize their inputs: the codec, and whether its grid is signed."""
        for file in files:
            self._add(file)

    def _add(self, file: File) -> None:
        for name in (*file.contents.tensors, *file.contents.tied):
            if name in self.file_of or name in self.tied:
                raise CheckpointError(
                    f"{self.path}: {short(name)} is in {file.path.name} and in another file, too. The files are of "
                    "different saves. Save or download all of them again."
                )
        own, tied = file.contents.encodings, file.contents.tied
        self.file_of |= dict.fromkeys(file.contents.tensors, file)
        self.stored |= file.contents.tensors
        self.encodings |= own | {alias: own[name] for alias, name in tied.items() if name in own}
        self.tied |= tied
        self.user |= file.contents.user
        self.inputs |= file.contents.inputs

    def tensor(self, name: str) -> Tensor:
        """One tensor as it is stored, mapped; nothing else of its file is."""
        name = self.tied.get(name, name)
        return self.file_of[name].tensor(name)

    def mapped(self) -> dict[str, Tensor]:
        """Every tensor as it is stored, mapped; tied names are the same object."""
        found: dict[str, Tensor] = {}
        for file in self.files:
            found |= file.tensors()
        return found | {alias: found[name] for alias, name in self.tied.items()}

    def same_bytes(self, one: str, other: str) -> bool:
        """Whether two names stand for the same bytes, read in the same way."""
        one, other = self.tied.get(one, one), self.tied.get(other, other)
        alike = self.stored[one] == self.stored[other] and self.encodings.get(one) == self.encodings.get(other)
        sums = {self.file_of[name].contents.checksums.get(name) for name in (one, other)} - {None}
        if not alike or len(sums) > 1:
            return False
        first, second = (self.tensor(name).flatten().view(torch.uint8) for name in (one, other))
        return torch.equal(first, second)

    def verify(self, advance: Callable[[int], None] = lambda count: None) -> None:
        """Compare every tensor that has a checksum with it; tell `advance` the bytes that were read."""
        for file in self.files:
            file.verify(advance)


def read(path: str | Path) -> Checkpoint:
    """Open a checkpoint and check everything but the bytes of its tensors."""
    path = Path(path)
    end = time.monotonic() + PATIENCE_SECONDS
    while True:
        before = _deciding(path)
        try:
            return _read(path)
        except (CheckpointError, FileNotFoundError) as error:
            still = isinstance(error, CheckpointError) and not isinstance(error, ReplacedError)
            if still and _deciding(path) == before:
                raise
            if time.monotonic() > end:
                raise ReplacedError(
                    f"{path}: was replaced again and again for {PATIENCE_SECONDS:.0f} seconds while it was read: "
                    f"somebody is saving there. Load it when that is done. The last time it was: {error}"
                ) from error
        time.sleep(PAUSE_SECONDS)


def _deciding(path: Path) -> list[tuple[str, tuple[int, ...]]]:
    """The files by which a folder says which checkpoint it holds. Where they change, somebody saves."""
    found = []
    with suppress(OSError):
        for own in path.iterdir():
            if own.name.endswith((".safetensors", ".safetensors.index.json")):
                with suppress(OSError):
                    found.append((own.name, identity(own.stat())))
    return sorted(found)


def _read(path: Path) -> Checkpoint:
    if not path.exists():
        raise MissingFileError(f"{path}: no such file or folder. Check the path.")
    if not path.is_dir():
        return Checkpoint(path, [File(path)])
    if (path / SINGLE).exists():
        return Checkpoint(path, [File(path / SINGLE)])
    indices = sorted(path.glob("*.safetensors.index.json"))
    files = sorted(path.glob("*.safetensors"))
    if len(indices) == 1:
        return _listed(path, indices[0])
    if not indices and len(files) == 1 and not SHARD.fullmatch(files[0].name):
        return Checkpoint(path, [File(files[0])])
    if not files and not indices:
        raise MissingFileError(f"{path}: holds no safetensors file. Only safetensors files are read, no pickles.")
    raise CheckpointError(
        f"{path}: holds {len(files)} safetensors files and {len(indices)} index files, so which tensors belong "
        f"together is not known. Pass one file, or finish the save or download that was to write {INDEX}."
    )


def load_state(
    path: str | Path, *, device: torch.device | str | None = None, verify: bool = True
) -> dict[str, Tensor | EncodedRows]:
    """Every tensor of a checkpoint, under its name."""
    checkpoint = read(path)
    if verify:
        checkpoint.verify()
    found: dict[str, Tensor] = {}
    for file in checkpoint.files:
        tensors = file.tensors()
        found |= tensors if device is None else {name: tensor.to(device) for name, tensor in tensors.items()}
    found |= {alias: found[name] for alias, name in checkpoint.tied.items()}
    rows = {name: EncodedRows(found[name], *encoding) for name, encoding in checkpoint.encodings.items()}
    return found | rows


def _listed(folder: Path, index: Path) -> Checkpoint:
    """The files that an index lists, and nothing beside what it lists."""
    check_regular(index)
    if index.stat().st_size > HEADER_LIMIT:
        raise CheckpointError(f"{index}: {index.stat().st_size} bytes, and an index has {HEADER_LIMIT} at most.")
    before = identity(index.stat())
    said = parse(index.read_bytes(), str(index))
    places = _places(said, index)
    found = Checkpoint(folder, [File(folder / place) for place in sorted(set(places.values()))])
    for name in sorted(places.keys() | found.file_of.keys()):
        held = found.file_of.get(found.tied.get(name, name))
        if held is None or places.get(name) != held.path.name:
            raise CheckpointError(
                f"{index}: {short(name)} is listed in {places.get(name, 'no file')} but found in "
                f"{held.path.name if held else 'none'}. Index and files are of different saves. Save or download them "
                "again."
            )
    if not _is_one_save(said, found, index) and identity(index.stat()) != before:
        raise ReplacedError(f"{index}: was replaced while its files were opened. Load it again.")
    return found


def _places(said: dict[str, Any], index: Path) -> dict[str, str]:
    """The file of each tensor, by its name."""
    places = said.get("weight_map")
    if not isinstance(places, dict) or not places:
        raise CheckpointError(f'{index}: has no "weight_map" of names to files. It is the index of something else.')
    for name, place in places.items():
        if not isinstance(place, str) or not place or "\0" in place or Path(place).name != place or "\\" in place:
            raise CheckpointError(
                f"{index}: {short(name)} is said to be in {short(place)}. An index names files of its own folder, "
                "without a path. Do not trust this checkpoint."
            )
    return places


def _is_one_save(said: dict[str, Any], found: Checkpoint, index: Path) -> bool:
    """Whether the index says which files it was written with, and those are they. Others than those are refused."""
    metadata = said.get("metadata") if isinstance(said.get("metadata"), dict) else {}
    assert metadata is not None
    own = metadata.get(OWN)
    if own is None:
        return False
    headers = own.get(HEADERS) if isinstance(own, dict) else None
    if not isinstance(headers, dict):
        raise CheckpointError(f'{index}: "{OWN}" has no "{HEADERS}" of files. The index is damaged.')
    total = sum(stored.nbytes for stored in found.stored.values())
    if len(headers) > len(found.files) or metadata.get("total_size") != total:
        raise CheckpointError(
            f"{index}: was written with {len(headers)} files of {short(metadata.get('total_size'))} bytes, and lists "
            f"{len(found.files)} of {total}. The index is damaged. Save or download all of them again."
        )
    for file in found.files:
        if headers.get(file.path.name) != file.digest:
            raise CheckpointError(
                f"{index}: {file.path.name} is not the file that this index was written with: the folder is a mixture "
                "of two saves, or a file was changed. Save or download all of them again."
            )
    return True
