"""A checkpoint to a quantized one, file by file, without a model and in bounded memory.

Sizes of encoded weights are known before they are encoded, so all output files are planned from the headers of the
source alone. Then they are written one by one, by any number of processes, each of which holds one tensor and its
encoding at a time. Rows are encoded as `narrowcast.quantize_` encodes them: to the same bytes.

A note in the target folder says which run it belongs to, until the last file is there. A run with the same note goes on
where the last one was cut off: files that are complete are compared with their checksums and kept.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from narrowcast.checkpoint.companions import companions, config_of, copy_companions
from narrowcast.checkpoint.files import SUFFIX, Entry, Staging, sweep, write_tensors
from narrowcast.checkpoint.folders import (
    INDEX,
    SHARD,
    SINGLE,
    new_save,
    publish_index,
    remove_others,
    shard_names,
    turn,
)
from narrowcast.checkpoint.header import Stored
from narrowcast.checkpoint.mapping import File
from narrowcast.checkpoint.reading import Checkpoint, read
from narrowcast.checkpoint.saving import by_group, check_ending, shards, size_in_bytes
from narrowcast.checkpoint.selection import Choice, choose, module_name, refuse_transposed
from narrowcast.codecs.payload import Encoding, encode_rows
from narrowcast.codecs.rules import CodecLike, Rules, compile_rules
from narrowcast.errors import CheckpointError, MissingFileError, QuantizeError, TargetError

NOTE = ".narrowcast-quantize.json"


class Part(NamedTuple):
    """One file of the target."""

    name: str
    entries: list[Entry]
    tied: dict[str, str]

    @property
    def nbytes(self) -> int:
        return sum(entry.stored.nbytes for entry in self.entries)


@dataclass
class Conversion:
    """A checkpoint that is to be quantized into another place. Every process of a run makes the same one."""

    source: Checkpoint
    target: Path
    """A folder, or a safetensors file."""
    rules: Rules
    allow_nonfinite: bool
    choices: dict[str, Choice]
    parts: list[Part] = field(default_factory=list)
    max_shard_size: int | None = None

    @property
    def folder(self) -> Path:
        return self.target.parent if self._to_file else self.target

    @property
    def _to_file(self) -> bool:
        return self.target.suffix == ".safetensors"

    # -- before ---------------------------------------------------------------------------------------------------

    def note(self) -> dict[str, Any]:
        """What makes two runs the same."""
        files = [(file.path, file.path.stat()) for file in self.source.files]
        return {
            "source": [[str(path.resolve()), status.st_size, status.st_mtime_ns] for path, status in files],
            "codec": self.rules.default.spec if self.rules.default else None,
            "rules": self.rules.config(),
            "allow_nonfinite": self.allow_nonfinite,
            "max_shard_size": self.max_shard_size,
        }

    def prepare(self, overwrite: bool) -> None:
        """Make the target ready. Done by one process, before any other begins."""
        target = self.target
        taken = {path.resolve() for file in self.source.files for path in (file.path, file.path.parent)}
        if target.resolve() in taken:
            raise TargetError(
                f"DST={str(target)!r}: is the source, or holds it. Name another place; the original is never changed."
            )
        if self._to_file:
            if target.exists() and not overwrite:
                raise TargetError(f"DST={str(target)!r}: is there already. Pass --overwrite, or name another file.")
            self.folder.mkdir(parents=True, exist_ok=True)
            return
        check_ending(f"DST={str(target)!r}", target)
        if target.exists() and not target.is_dir():
            raise TargetError(f"DST={str(target)!r}: is a file. Name a folder, or a file that ends in .safetensors.")
        target.mkdir(parents=True, exist_ok=True)
        if self._resumes() and not overwrite:
            sweep(target)
            return
        if any(target.iterdir()) and not overwrite:
            raise TargetError(
                f"DST={str(target)!r}: is not empty, and what is there is no unfinished run with these arguments. Pass "
                "--overwrite to replace the weights there, or name another folder."
            )
        save = new_save() if self._clear() else ""
        with Staging(target) as staging:
            with staging.file(NOTE) as file:
                file.write(json.dumps({**self.note(), "save": save}).encode())
            staging.publish()

    def _noted(self) -> dict[str, Any]:
        """The note in the target, or nothing."""
        try:
            found: object = json.loads((self.target / NOTE).read_bytes())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def _resumes(self) -> bool:
        noted = self._noted()
        noted.pop("save", None)
        return bool(noted == json.loads(json.dumps(self.note())))

    def _clear(self) -> bool:
        """Remove what unfinished runs left. A checkpoint stays until the new one is there: whether it is in the way."""
        try:
            kept = {file.path.name for file in read(self.target).files}
            kept |= set() if SINGLE in kept else {path.name for path in self.target.glob("*.safetensors.index.json")}
        except CheckpointError:
            kept = set()
        for path in self.target.iterdir():
            of_weights = path.name.endswith((".safetensors", ".safetensors.index.json", SUFFIX))
            if path.name == NOTE or (of_weights and path.name not in kept):
                path.unlink()
        return bool(kept & {INDEX, *(part.name for part in self.parts)})

    # -- file by file ---------------------------------------------------------------------------------------------

    def name_of(self, part: Part) -> str:
        """The name of a file in the target. Beside a checkpoint that is still there, it is one that no file has."""
        if self._to_file or part.name == SINGLE:
            return part.name
        save = self._noted().get("save")
        names = shard_names(len(self.parts), save) if isinstance(save, str) and save else None
        return names[self.parts.index(part)] if names else part.name

    def is_done(self, part: Part) -> bool:
        """Whether a whole file is there that an earlier run has written."""
        path = self.folder / self.name_of(part)
        if self._to_file or not path.exists():
            return False
        try:
            found = File(path)
            expected = {entry.name: entry.stored for entry in part.entries}
            encodings = {entry.name: entry.encoding for entry in part.entries if entry.encoding}
            if found.contents.tensors != expected or found.contents.encodings != encodings:
                return False
            Checkpoint(path, [found]).verify()
        except CheckpointError:
            return False
        return True

    def convert(self, part: Part, advance: Callable[[int], None] = lambda count: None) -> None:
        """Write one file of the target."""
        with Staging(self.folder) as staging:
            with staging.file(self.name_of(part)) as file:
                write_tensors(file, part.entries, part.tied, {}, advance)
            staging.publish()

    # -- after ----------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Write the index and what goes along. Done by one process, when every file is there."""
        if self._to_file:
            return
        names = [self.name_of(part) for part in self.parts]
        for name in names:
            if not (self.target / name).exists():
                raise MissingFileError(f"{self.target / name}: was not written. Run the same command again.")
        with turn(self.target):
            if names == [SINGLE]:
                remove_others(self.target, {SINGLE}, only_shards=False)
            else:
                files = {name: part.entries for name, part in zip(names, self.parts, strict=True)}
                headers = {name: File(self.target / name).digest for name in names}
                publish_index(self.target, files, headers, only_shards=False)
        copy_companions(self.source.path, self.target, companions(self.source.path)[0], self.quantization())
        (self.target / NOTE).unlink()

    def quantization(self) -> dict[str, Any]:
        """The `quantization_config` of config.json."""
        made = {module_name(name): choice.codec.spec for name, choice in self.choices.items() if choice.codec}
        default = self.rules.default.spec if self.rules.default else None
        return {"quant_method": "narrowcast", "codec": default, "rules": self.rules.config(), "weights": made}

    def summary(self) -> dict[str, Any]:
        """What becomes of the tensors: counts, bytes, and why some are only copied."""
        stored = self.source.stored
        after = {entry.name: entry.stored.nbytes for part in self.parts for entry in part.entries}
        encoded = [name for name, choice in self.choices.items() if choice.codec]
        taken, left = companions(self.source.path)
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
        found: dict[str, dict[str, int]] = {}
        for name, choice in self.choices.items():
            if choice.codec:
                line = found.setdefault(choice.codec.spec, {"tensors": 0, "bytes_before": 0, "bytes_after": 0})
                line["tensors"] += 1
                line["bytes_before"] += stored[name].nbytes
                line["bytes_after"] += after[name]
        return found


def plan_conversion(
    source: str | Path,
    target: str | Path,
    codec: CodecLike | None,
    rules: Mapping[str, CodecLike | bool | None] | None = None,
    *,
    max_shard_size: int | str | None = None,
    allow_nonfinite: bool = False,
) -> Conversion:
    """Decide everything about a conversion from the headers of the source. Nothing is written."""
    compiled = compile_rules(rules, codec)
    limit = None if max_shard_size is None else size_in_bytes(max_shard_size)
    found = read(source)
    config = config_of(found.path) or {}
    if found.encodings:
        raise CheckpointError(
            f"{found.path}: holds {len(found.encodings)} weights that narrowcast has quantized already. Start from the "
            "original model: quantizing twice adds both errors."
        )
    choices = _choices(found, compiled)
    refuse_transposed(config.get("model_type"), choices)
    made = Conversion(found, Path(target), compiled, allow_nonfinite, choices, [], limit)
    made.parts += _parts(made)
    return made


def _choices(source: Checkpoint, rules: Rules) -> dict[str, Choice]:
    stored = source.stored
    choices = {name: choose(name, tensor, rules) for name, tensor in stored.items()}
    for alias, name in source.tied.items():
        other = choose(alias, stored[name], rules).codec
        if choices[name].codec and not other:
            choices[name] = Choice(None, reason=f"tied to {alias}, which a rule leaves alone")
        elif other and choices[name].codec not in (None, other):
            raise QuantizeError(
                f"rules: {name!r} and {alias!r} are one tied weight, which can have one codec, but rules give it "
                f"{choices[name].codec} and {other}. Write a rule that matches both."
            )
    return choices


def _parts(conversion: Conversion) -> list[Part]:
    """The files of the target: those of the source under their names, or new ones of up to `max_shard_size`."""
    source, limit, to_file = conversion.source, conversion.max_shard_size, conversion.target.suffix == ".safetensors"
    entries = {name: _entry(conversion, name, stored) for name, stored in source.stored.items()}
    if to_file:
        groups, names = [list(entries.values())], [conversion.target.name]
    elif limit is not None:
        groups = shards(entries.values(), limit)
        names = shard_names(len(groups))
    else:
        groups = [[entries[name] for name in file.contents.tensors] for file in source.files]
        names = [file.path.name for file in source.files]
        # Names that a later save of the source gave go back to those of a first one.
        names = shard_names(len(groups)) if len(groups) == 1 or all(map(SHARD.fullmatch, names)) else names
    aliases = by_group(groups, source.tied)
    return [Part(*part) for part in zip(names, groups, aliases, strict=True)]


def _entry(conversion: Conversion, name: str, stored: Stored) -> Entry:
    codec, lead, _ = conversion.choices[name]
    if codec is None:
        return Entry(name, stored, None, partial(conversion.source.tensor, name))
    shape = torch.Size(stored.shape)
    rows = Stored(torch.uint8, (*shape[:lead], codec.row_bytes(shape[lead:].numel())))
    return Entry(name, rows, Encoding(codec, shape, stored.dtype), partial(_encode, conversion, name))


def _encode(conversion: Conversion, name: str) -> Tensor:
    codec, lead, _ = conversion.choices[name]
    assert codec is not None
    weight = conversion.source.tensor(name)
    # The extremes of a tensor are finite if and only if all of it is; no copy is made.
    if not conversion.allow_nonfinite and not all(extreme.isfinite() for extreme in torch.aminmax(weight)):
        raise QuantizeError(
            f"{name!r} holds an infinity or a NaN, and a block that does decodes to NaN throughout. Usually training "
            "diverged, or fp16 overflowed. Mend the checkpoint, leave the weight as it is with a rule "
            f'("{module_name(name)}" = false), or pass --allow-nonfinite.'
        )
    return encode_rows(weight, codec, lead=lead).data
