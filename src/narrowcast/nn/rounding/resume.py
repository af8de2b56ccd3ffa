"""Rows that were rounded already, in a folder: after an interruption the same call goes on where it stopped.

`Finished(folder, ...)` keeps the rows of each weight, and its line of the report, in a file of its own, as soon as they
are there. A note says what they belong to: a digest of the model's weights and buffers, of the data, of the codecs and
of the rounding. A folder with another note is refused. Files appear under their names when they are complete.

Rows that are read back are those that were made, and what is rounded after them sees the same inputs. So the result has
the same bytes as without the interruption.

The model must be as it was if the rounding fails, so its float weights are needed until the end. With a folder they do
not stay in memory: a weight that is rounded is written to a file there, which is mapped in its place and unlinked at
once. The system reads it back where it is needed and drops it otherwise.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from narrowcast.errors import CalibrationError
from narrowcast.nn.rounding.batches import UNCHANGED

NOTE = "narrowcast-rounding.json"
ENDING = ".rows.pt"


class Finished:
    """The weights that are done, by their keys; with `folder=None` none is, and none is kept."""

    def __init__(self, folder: str | os.PathLike[str] | None, facts: Mapping[str, Any]) -> None:
        self._folder = None if folder is None else Path(folder)
        self._files: dict[str, Path] = {}
        self._moved: list[tuple[nn.Parameter, torch.device]] = []
        if self._folder is None:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._compare(self._folder / NOTE, json.dumps(facts, indent=1, sort_keys=True))
            self._files = {self._name(path): path for path in self._folder.glob(f"*{ENDING}")}
        except OSError as error:
            raise CalibrationError(
                f"checkpoint={str(folder)!r}: cannot be used: {error.strerror}. Name a folder that can be written. "
                f"{UNCHANGED}"
            ) from error

    def _compare(self, note: Path, text: str) -> None:
        if note.exists() and note.read_text("utf-8") != text:
            raise CalibrationError(
                f"checkpoint={str(note.parent)!r}: holds rows of another rounding: the model, the data, the codecs or "
                f"the options differ. Delete it, or name another folder. {UNCHANGED}"
            )
        if not note.exists():
            _write(note, lambda path: path.write_text(text, "utf-8"))

    @staticmethod
    def _name(path: Path) -> str:
        return path.name.removesuffix(ENDING)

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and _file_name(key) in self._files

    def read(self, key: str) -> tuple[Tensor, dict[str, Any]]:
        """The rows of a weight, and its line of the report."""
        path = self._files[_file_name(key)]
        try:
            kept = torch.load(path, map_location="cpu", weights_only=True)
            rows, line = kept["rows"], kept["line"]
        except Exception as error:
            raise CalibrationError(f"checkpoint: {path} cannot be read: {error}. Delete it. {UNCHANGED}") from error
        return rows, line

    def keep(self, key: str, rows: Tensor, line: Mapping[str, Any]) -> None:
        if self._folder is not None:
            path = self._folder / f"{_file_name(key)}{ENDING}"
            _write(path, lambda to: torch.save({"rows": rows.detach().cpu(), "line": dict(line)}, to))
            self._files[_file_name(key)] = path

    def move_out(self, weight: nn.Parameter) -> None:
        """Let a float weight lie in an unlinked file instead of memory. Weights that share their memory stay."""
        storage = weight.data.untyped_storage()
        if self._folder is None or weight.device.type == "meta" or storage.nbytes() != weight.nbytes:
            return
        path = self._folder / f"{os.getpid()}.floats.part"
        try:
            torch.save(weight.data.cpu(), path)
            self._moved.append((weight, weight.device))
            weight.data = torch.load(path, mmap=True, weights_only=True)
        finally:
            path.unlink(missing_ok=True)

    def move_back(self) -> None:
        """Bring the float weights back to where they were."""
        for weight, device in self._moved:
            weight.data = weight.data.to(device, copy=True)
        self._moved.clear()


def _file_name(key: str) -> str:
    return hashlib.blake2b(key.encode(), digest_size=16).hexdigest()


def _write(path: Path, write: Any) -> None:
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.part")
    write(unfinished)
    os.replace(unfinished, path)


def digest_of_model(model: nn.Module) -> str:
    """A digest of every weight and buffer of a model."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return _digest(part for name, tensor in named for part in (name, tensor))


def digest_of_data(batches: Iterable[Any]) -> str:
    """A digest of batches."""
    return _digest(part for batch in batches for part in _parts(batch))


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield str(name)
            yield from _parts(item)
    elif isinstance(value, (tuple, list)):
        yield f"{type(value).__name__} of {len(value)}"
        for item in value:
            yield from _parts(item)
    else:
        yield value if isinstance(value, Tensor) else repr(value)


def _digest(parts: Iterable[Any]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        if not isinstance(part, Tensor):
            digest.update(f"{part}\n".encode())
            continue
        digest.update(f"{part.dtype} {tuple(part.shape)}\n".encode())
        if part.device.type != "meta" and part.numel():
            plain = part.detach().cpu().contiguous().view(-1).view(torch.uint8)
            digest.update(plain.numpy().data)
    return digest.hexdigest()
