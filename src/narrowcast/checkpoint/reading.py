"""Checkpoints as they lie on a disk: a file, or a folder with one, or with several and an index.

    checkpoint = read("folder")          # headers only: names, shapes, encodings; everything about them is checked
    checkpoint.tensor("layers.0.weight") # mapped: the disk is read where the tensor is looked at
    checkpoint.verify()                  # every checksum

Which file of a folder: `model.safetensors`, else what `*.safetensors.index.json` lists, else the only safetensors file
there is; in this order, as transformers chooses. An index may name files of its own folder, nothing else.
"""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from narrowcast.checkpoint.files import HEADER_LIMIT, checksum
from narrowcast.checkpoint.header import Stored, contents_of, parse
from narrowcast.codecs import Codec
from narrowcast.errors import CheckpointError, MissingFileError
from narrowcast.payload import EncodedRows, Encoding

PICKLES = (".pt", ".pth", ".bin", ".ckpt")
"""The endings of what torch.save writes."""
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class File:
    """One safetensors file whose header has been checked."""

    def __init__(self, path: Path) -> None:
        from safetensors import SafetensorError, safe_open

        self.path = path
        _check_regular(path)
        try:
            with safe_open(path, "pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: {_kind(path, error)}") from error
        with open(path, "rb") as file:
            self.contents = contents_of(file.read(int.from_bytes(file.read(8), "little")), str(path))

    def tensors(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Some tensors, mapped. The mapping lasts as long as they do."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self.path, "pt") as file:
                found = {name: file.get_tensor(name) for name in names}
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self.path}: {error}. The file was changed while it was read.") from error
        for name, tensor in found.items():
            if (tensor.dtype, tuple(tensor.shape)) != tuple(self.contents.tensors[name]):
                raise CheckpointError(f"{self.path}: {name!r} was changed while the file was read. Load it again.")
        return found


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
                    f"{self.path}: {name!r} is in {file.path.name} and in another file, too. The files are of "
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
        return self.file_of[name].tensors([name])[name]

    def mapped(self) -> dict[str, Tensor]:
        """Every tensor as it is stored, mapped; tied names are the same object."""
        found: dict[str, Tensor] = {}
        for file in self.files:
            found |= file.tensors(file.contents.tensors)
        return found | {alias: found[name] for alias, name in self.tied.items()}

    def verify(self, advance: Callable[[int], None] = lambda count: None) -> None:
        """Compare every tensor that has a checksum with it, one at a time."""
        for file in self.files:
            for name, expected in file.contents.checksums.items():
                tensor = file.tensors([name])[name]
                if checksum(tensor) != expected:
                    raise CheckpointError(
                        f"{file.path}: the bytes of {name!r} do not match their checksum {expected!r}. They were "
                        "changed on the disk or on the way. Copy the file again; verify=False loads it as it is."
                    )
                advance(tensor.nbytes)


def read(path: str | Path) -> Checkpoint:
    """Open a checkpoint and check everything but the bytes of its tensors."""
    path = Path(path)
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
    if not indices and len(files) == 1:
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
    encodings = checkpoint.encodings
    moved: dict[str, Tensor] = {}
    for name, tensor in checkpoint.mapped().items():
        stored = checkpoint.tied.get(name, name)
        found = moved[stored] if stored in moved else tensor.to(device or "cpu")
        moved[name] = found
    return {name: EncodedRows(own, *encodings[name]) if name in encodings else own for name, own in moved.items()}


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


def _check_regular(path: Path) -> None:
    if not path.exists():
        raise MissingFileError(f"{path}: no such file. The index names it: the save or download was not finished.")
    if not stat.S_ISREG(path.stat().st_mode):
        raise CheckpointError(f"{path}: is not a regular file. Pass a safetensors file, or a folder that holds some.")


def _listed(folder: Path, index: Path) -> Checkpoint:
    """The files that an index lists, and nothing beside what it lists."""
    _check_regular(index)
    if index.stat().st_size > HEADER_LIMIT:
        raise CheckpointError(f"{index}: {index.stat().st_size} bytes, and an index has {HEADER_LIMIT} at most.")
    places = parse(index.read_bytes(), str(index)).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise CheckpointError(f'{index}: has no "weight_map" of names to files. It is the index of something else.')
    for name, place in places.items():
        if not isinstance(place, str) or not place or "\0" in place or Path(place).name != place or "\\" in place:
            raise CheckpointError(
                f"{index}: {name!r} is said to be in {place!r}. An index names files of its own folder, without a "
                "path. Do not trust this checkpoint."
            )
    names: set[str] = set(places)
    found = Checkpoint(folder, [File(folder / place) for place in sorted(set(places.values()))])
    for name in sorted(names | set(found.file_of)):
        held = found.file_of.get(found.tied.get(name, name))
        if held is None or places.get(name) != held.path.name:
            raise CheckpointError(
                f"{index}: {name!r} is listed in {places.get(name, 'no file')} but found in "
                f"{held.path.name if held else 'none'}. Index and files are of different saves. Save or download them "
                "again."
            )
    return found
