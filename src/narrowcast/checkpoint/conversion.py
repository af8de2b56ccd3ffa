"""A checkpoint to a quantized one, file by file, without a model and in bounded memory.

parts.py lays out the files of the target. They are written one by one, by any number of processes, each of which holds
a tile of one tensor and its encoding at a time. Files and tensors may be larger than memory.

A note in the target folder says which run is writing there, until the last file is written. A run with the same note
resumes: it compares the files that are complete with their checksums, and writes the others.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from narrowcast.checkpoint.companions import companions, config_of, copy_companions
from narrowcast.checkpoint.files import SUFFIX, make_folder, new_file, sweep, write_tensors
from narrowcast.checkpoint.folders import INDEX, SINGLE, locked, new_save, publish_index, remove_others, shard_names
from narrowcast.checkpoint.header import Stored
from narrowcast.checkpoint.mapping import File
from narrowcast.checkpoint.parts import Part, Rounded, choose_codecs, lay_out_parts
from narrowcast.checkpoint.reading import Checkpoint, read
from narrowcast.checkpoint.saving import check_ending, size_in_bytes
from narrowcast.checkpoint.selection import Choice, module_name, refuse_transposed
from narrowcast.codecs.rules import CodecLike, Rules, compile_rules
from narrowcast.errors import CheckpointError, MissingFileError, TargetError

NOTE = ".narrowcast-quantize.json"


@dataclass
class Conversion:
    """A checkpoint that is to be quantized into another place. Every process of a run builds the same one."""

    source: Checkpoint
    target: Path
    """A folder, or a safetensors file."""
    rules: Rules
    allow_nonfinite: bool
    choices: dict[str, Choice]
    parts: list[Part]
    max_shard_size: int | None
    rounding: str = "nearest"

    @property
    def folder(self) -> Path:
        return self.target.parent if self._to_file else self.target

    @property
    def _to_file(self) -> bool:
        return self.target.suffix == ".safetensors"

    # -- before ---------------------------------------------------------------------------------------------------

    def note(self) -> dict[str, Any]:
        """What two runs must have in common for the second to resume the first."""
        files = [(file.path, file.path.stat()) for file in self.source.files]
        return {
            "source": [[str(path.resolve()), status.st_size, status.st_mtime_ns] for path, status in files],
            "codec": self.rules.default.spec if self.rules.default else None,
            "rules": self.rules.config(),
            "allow_nonfinite": self.allow_nonfinite,
            "max_shard_size": self.max_shard_size,
            **({} if self.rounding == "nearest" else {"rounding": self.rounding}),
        }

    def prepare(self, overwrite: bool) -> None:
        """Make the target ready. One process does it, before any other begins."""
        target = self.target
        taken = {path.resolve() for file in self.source.files for path in (file.path, file.path.parent)}
        if target.resolve() in taken:
            raise TargetError(
                f"DST={str(target)!r}: is the source, or holds it. The source is never changed: name another place."
            )
        if self._to_file:
            if target.exists() and not overwrite:
                raise TargetError(f"DST={str(target)!r}: exists already. Pass --overwrite, or name another file.")
            make_folder(f"DST={str(target)!r}", self.folder)
            return
        check_ending(f"DST={str(target)!r}", target)
        if target.exists() and not target.is_dir():
            raise TargetError(f"DST={str(target)!r}: is a file. Name a folder, or a file that ends in .safetensors.")
        make_folder(f"DST={str(target)!r}", target)
        if self._resumes() and not overwrite:
            sweep(target)
            return
        if any(target.iterdir()) and not overwrite:
            raise TargetError(
                f"DST={str(target)!r}: is not empty, and holds no unfinished run with these arguments. Pass "
                "--overwrite to replace the weights in it, or name another folder."
            )
        save = new_save() if self._clear() else ""
        with new_file(target / NOTE) as file:
            file.write(json.dumps({**self.note(), "save": save}).encode())

    def _read_note(self) -> dict[str, Any]:
        """The note in the target; empty where there is none."""
        try:
            noted: object = json.loads((self.target / NOTE).read_bytes())
        except (OSError, ValueError):
            return {}
        return noted if isinstance(noted, dict) else {}

    def _resumes(self) -> bool:
        noted = self._read_note()
        noted.pop("save", None)
        return bool(noted == json.loads(json.dumps(self.note())))

    def _clear(self) -> bool:
        """Remove the files of unfinished runs. A complete checkpoint stays until the new one can take its place.

        Returns whether such a checkpoint has names that the new files would have.
        """
        try:
            old = {file.path.name for file in read(self.target).files}
            old |= set() if SINGLE in old else {path.name for path in self.target.glob("*.safetensors.index.json")}
        except CheckpointError:
            old = set()
        for path in self.target.iterdir():
            of_weights = path.name.endswith((".safetensors", ".safetensors.index.json", SUFFIX))
            if path.name == NOTE or (of_weights and path.name not in old):
                path.unlink()
        return bool(old & {INDEX, *(part.name for part in self.parts)})

    # -- file by file ---------------------------------------------------------------------------------------------

    def name_of(self, part: Part) -> str:
        """The name of a file in the target. Beside an old checkpoint it has the number of this save in it."""
        if self._to_file or part.name == SINGLE:
            return part.name
        save = self._read_note().get("save")
        names = shard_names(len(self.parts), save) if isinstance(save, str) and save else None
        return names[self.parts.index(part)] if names else part.name

    def is_done(self, part: Part) -> bool:
        """Whether an earlier run has written this file completely."""
        path = self.folder / self.name_of(part)
        if self._to_file or not path.exists():
            return False
        try:
            file = File(path)
            expected = {entry.name: entry.stored for entry in part.entries}
            encodings = {entry.name: entry.encoding for entry in part.entries if entry.encoding}
            if file.contents.tensors != expected or file.contents.encodings != encodings:
                return False
            file.verify()
        except CheckpointError:
            return False
        return True

    def convert(self, part: Part, advance: Callable[[int], None] = lambda count: None) -> None:
        """Write one file of the target."""
        with new_file(self.folder / self.name_of(part)) as file:
            write_tensors(file, part.entries, part.tied, {}, advance)

    # -- after ----------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Write the index, and copy configuration and tokenizer. One process does it, when every file is written."""
        if self._to_file:
            return
        names = [self.name_of(part) for part in self.parts]
        for name in names:
            if not (self.target / name).exists():
                raise MissingFileError(f"{self.target / name}: was not written. Run the same command again.")
        with locked(self.target):
            if names == [SINGLE]:
                remove_others(self.target, {SINGLE}, only_shards=False)
            else:
                files = {name: part.entries for name, part in zip(names, self.parts, strict=True)}
                headers = {name: File(self.target / name).digest for name in names}
                publish_index(self.target, files, headers, only_shards=False)
        copied, _ = companions(self.source.path, self.target)
        copy_companions(self.source.path, self.target, copied, self.quantization())
        (self.target / NOTE).unlink()

    def quantization(self) -> dict[str, Any]:
        """The `quantization_config` of config.json."""
        weights = {module_name(name): choice.codec.spec for name, choice in self.choices.items() if choice.codec}
        default = self.rules.default.spec if self.rules.default else None
        return {"quant_method": "narrowcast", "codec": default, "rules": self.rules.config(), "weights": weights}

    def summary(self) -> dict[str, Any]:
        """Counts and bytes of the tensors by codec, and why some are copied."""
        stored = self.source.stored
        after = {entry.name: entry.stored.nbytes for part in self.parts for entry in part.entries}
        encoded = [name for name, choice in self.choices.items() if choice.codec]
        taken, left = companions(self.source.path, self.target)
        return {
            "quantized": len(encoded),
            "copied": len(stored) - len(encoded),
            "bytes_before": sum(tensor.nbytes for tensor in stored.values()),
            "bytes_after": sum(after.values()),
            "codecs": self._by_codec(stored, after),
            "skips": {name: choice.reason for name, choice in self.choices.items() if choice.codec is None},
            "unused_rules": self.rules.unused,
            "files": [part.name for part in self.parts],
            "files_copied": [] if self._to_file else taken,
            "files_left": [*taken, *left] if self._to_file else left,
        }

    def _by_codec(self, stored: Mapping[str, Stored], after: Mapping[str, int]) -> dict[str, dict[str, int]]:
        lines: dict[str, dict[str, int]] = {}
        for name, choice in self.choices.items():
            if choice.codec:
                line = lines.setdefault(choice.codec.spec, {"tensors": 0, "bytes_before": 0, "bytes_after": 0})
                line["tensors"] += 1
                line["bytes_before"] += stored[name].nbytes
                line["bytes_after"] += after[name]
        return lines


def open_conversion(
    source: str | Path,
    target: str | Path,
    codec: CodecLike | None,
    rules: Mapping[str, CodecLike | bool | None] | None = None,
    *,
    max_shard_size: int | str | None = None,
    allow_nonfinite: bool = False,
    rounding: str = "nearest",
    rows: Mapping[str, Tensor] | None = None,
) -> Conversion:
    """Read the headers of the source, and decide everything about its conversion. Nothing is written.

    With a `rounding` other than "nearest" scales are searched. `rows` has weights that were rounded elsewhere.
    """
    compiled = compile_rules(rules, codec)
    limit = None if max_shard_size is None else size_in_bytes(max_shard_size)
    checkpoint = read(source)
    config = config_of(checkpoint.path) or {}
    if checkpoint.encodings:
        raise CheckpointError(
            f"{checkpoint.path}: holds {len(checkpoint.encodings)} weights that narrowcast has quantized already. "
            "Start from the original model: quantizing twice adds both errors."
        )
    choices = choose_codecs(checkpoint, compiled)
    refuse_transposed(config.get("model_type"), choices)
    rounded = Rounded(rounding != "nearest", rows or {})
    parts = lay_out_parts(checkpoint, Path(target), choices, limit, allow_nonfinite, rounded)
    return Conversion(checkpoint, Path(target), compiled, allow_nonfinite, choices, parts, limit, rounding)
