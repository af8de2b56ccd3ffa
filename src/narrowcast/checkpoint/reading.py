"""Checkpoints on a disk: a file, a folder with one file, or a folder with several files and an index.

    checkpoint = read("folder")          # headers only: names, shapes, encodings; everything about them is checked
    checkpoint.tensor("layers.0.weight") # mapped: the disk is read where the tensor is looked at
    checkpoint.read("layers.0.weight", 0, 1000)  # its first thousand elements, read into memory
    checkpoint.verify()                  # every checksum

Of a folder, `model.safetensors` is read, else the files that `*.safetensors.index.json` lists, else the only
safetensors file. transformers chooses in the same order. An index may name files of its own folder only.

Every file is opened once, and all files of a checkpoint before any is used. A folder that another process saves into
is read again until it no longer changes, so that all files are of one save (folders.py).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from narrowcast.checkpoint.files import HEADER_LIMIT, as_path
from narrowcast.checkpoint.folders import HEADERS, INDEX, OWN, SHARD, SINGLE
from narrowcast.checkpoint.header import Stored
from narrowcast.checkpoint.mapping import File, check_regular, identity
from narrowcast.checkpoint.parse import parse_json, short
from narrowcast.codecs import Codec
from narrowcast.codecs.payload import EncodedRows, Encoding
from narrowcast.codecs.tiles import tiles
from narrowcast.errors import CheckpointError, MissingFileError, ReplacedError

PATIENCE_SECONDS = 10.0
"""How long a folder that keeps changing is read again."""
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
        """The codec, shape and dtype of the encoded ones, tied names included."""
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
                    f"{self.path}: {short(name)} is in {file.path.name} and in another file. The files are of "
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
        """One tensor as it is stored, mapped without the rest of its file."""
        name = self.tied.get(name, name)
        return self.file_of[name].tensor(name)

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """The elements of a tensor as it is stored, laid flat, from `start` to `stop`."""
        name = self.tied.get(name, name)
        return self.file_of[name].read(name, start, stop)

    def tiles(self, name: str) -> Iterator[Tensor]:
        """One tensor as it is stored, laid flat, a tile at a time."""
        numel = math.prod(self.stored[self.tied.get(name, name)].shape)
        for start, stop in tiles(numel, 1):
            yield self.read(name, start, stop)

    def mapped(self) -> dict[str, Tensor]:
        """Every tensor as it is stored, mapped; tied names are the same object."""
        tensors: dict[str, Tensor] = {}
        for file in self.files:
            tensors |= file.tensors()
        return tensors | {alias: tensors[name] for alias, name in self.tied.items()}

    def same_bytes(self, one: str, other: str) -> bool:
        """Whether two names have the same bytes, dtype, shape and encoding."""
        one, other = self.tied.get(one, one), self.tied.get(other, other)
        alike = self.stored[one] == self.stored[other] and self.encodings.get(one) == self.encodings.get(other)
        sums = {self.file_of[name].contents.checksums.get(name) for name in (one, other)} - {None}
        if not alike or len(sums) > 1:
            return False
        pairs = zip(self.tiles(one), self.tiles(other), strict=True)
        return all(torch.equal(first.view(torch.uint8), second.view(torch.uint8)) for first, second in pairs)

    def verify(self, advance: Callable[[int], None] = lambda count: None) -> None:
        """Compare every tensor that has a checksum with it; `advance` is called with the bytes read."""
        for file in self.files:
            file.verify(advance)


def read(path: str | Path) -> Checkpoint:
    """Open a checkpoint, and check everything but the bytes of its tensors."""
    path = as_path(path)
    end = time.monotonic() + PATIENCE_SECONDS
    while True:
        before = _checkpoint_files(path)
        try:
            return _read(path)
        except (CheckpointError, FileNotFoundError) as error:
            lasting = isinstance(error, CheckpointError) and not isinstance(error, ReplacedError)
            if lasting and _checkpoint_files(path) == before:
                raise
            if time.monotonic() > end:
                raise ReplacedError(
                    f"{path}: another process kept replacing it for {PATIENCE_SECONDS:.0f} seconds while it was being "
                    f"read. Load it when that process is done. The last error was: {error}"
                ) from error
        time.sleep(PAUSE_SECONDS)


def _checkpoint_files(path: Path) -> list[tuple[str, tuple[int, ...]]]:
    """The files of a folder that belong to checkpoints, and their identities. If they change, a process is saving."""
    files = []
    with suppress(OSError):
        for own in path.iterdir():
            if own.name.endswith((".safetensors", ".safetensors.index.json")):
                with suppress(OSError):
                    files.append((own.name, identity(own.stat())))
    return sorted(files)


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
        return _read_listed(path, indices[0])
    if not indices and len(files) == 1 and not SHARD.fullmatch(files[0].name):
        return Checkpoint(path, [File(files[0])])
    if not files and not indices:
        raise MissingFileError(f"{path}: holds no safetensors file. Pickles are not read.")
    raise CheckpointError(
        f"{path}: holds {len(files)} safetensors files and {len(indices)} index files, and no single "
        f"index says which belong together. Pass one file, or finish the save or download that writes {INDEX}."
    )


def load_state(
    path: str | Path, *, device: torch.device | str | None = None, verify: bool = True
) -> dict[str, Tensor | EncodedRows]:
    """Every tensor of a checkpoint, under its name."""
    checkpoint = read(path)
    if verify:
        checkpoint.verify()
    tensors: dict[str, Tensor] = {}
    for file in checkpoint.files:
        tensors |= {name: tensor if device is None else tensor.to(device) for name, tensor in file.tensors().items()}
    tensors |= {alias: tensors[name] for alias, name in checkpoint.tied.items()}
    rows = {name: EncodedRows(tensors[name], *encoding) for name, encoding in checkpoint.encodings.items()}
    return tensors | rows


def _read_listed(folder: Path, index: Path) -> Checkpoint:
    """The files that an index lists. They must hold the tensors that it lists, and no others."""
    check_regular(index)
    if index.stat().st_size > HEADER_LIMIT:
        raise CheckpointError(f"{index}: has {index.stat().st_size} bytes, and an index has at most {HEADER_LIMIT}.")
    before = identity(index.stat())
    listing = parse_json(index.read_bytes(), str(index))
    places = _parse_places(listing, index)
    checkpoint = Checkpoint(folder, [File(folder / place) for place in sorted(set(places.values()))])
    for name in sorted(places.keys() | checkpoint.file_of.keys()):
        file = checkpoint.file_of.get(checkpoint.tied.get(name, name))
        if file is None or places.get(name) != file.path.name:
            raise CheckpointError(
                f"{index}: lists {short(name)} in {places.get(name, 'no file')}, but "
                f"{file.path.name if file else 'no file'} holds it. Index and files are of different saves. Save or "
                "download them again."
            )
    if not _is_one_save(listing, checkpoint, index) and identity(index.stat()) != before:
        raise ReplacedError(f"{index}: was replaced while its files were being opened. Load it again.")
    return checkpoint


def _parse_places(listing: dict[str, Any], index: Path) -> dict[str, str]:
    """The file of each tensor, by the tensor's name."""
    places = listing.get("weight_map")
    if not isinstance(places, dict) or not places:
        raise CheckpointError(
            f'{index}: has no "weight_map" of names to files, so it is not the index of a checkpoint.'
        )
    for name, place in places.items():
        if not isinstance(place, str) or not place or "\0" in place or Path(place).name != place or "\\" in place:
            raise CheckpointError(
                f"{index}: lists {short(name)} in {short(place)}. An index may only name files of its own folder, "
                "without a path. Do not trust this checkpoint."
            )
    return places


def _is_one_save(listing: dict[str, Any], checkpoint: Checkpoint, index: Path) -> bool:
    """Whether the index has digests of the files it was written with. Files with other digests are refused."""
    metadata = listing.get("metadata") if isinstance(listing.get("metadata"), dict) else {}
    assert metadata is not None
    own = metadata.get(OWN)
    if own is None:
        return False
    headers = own.get(HEADERS) if isinstance(own, dict) else None
    if not isinstance(headers, dict):
        raise CheckpointError(f'{index}: "{OWN}" has no "{HEADERS}" of files. The index is damaged.')
    total = sum(stored.nbytes for stored in checkpoint.stored.values())
    if len(headers) > len(checkpoint.files) or metadata.get("total_size") != total:
        raise CheckpointError(
            f"{index}: was written with {len(headers)} files of {short(metadata.get('total_size'))} bytes, but lists "
            f"{len(checkpoint.files)} files of {total}. The index is damaged. Save or download all files again."
        )
    for file in checkpoint.files:
        if headers.get(file.path.name) != file.digest:
            raise CheckpointError(
                f"{index}: {file.path.name} is not the file that this index was written with. The folder is a mixture "
                "of two saves, or a file was changed. Save or download all files again."
            )
    return True
