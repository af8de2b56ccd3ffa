"""What each file of a converted checkpoint will hold, decided from the headers of the source alone.

The size of an encoded weight is known before it is encoded, so every output file is laid out before the first one is
written. An `Entry` encodes its weight when its turn comes, tile by tile, to the bytes of `narrowcast.quantize_`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from narrowcast.checkpoint.files import Entry
from narrowcast.checkpoint.folders import SHARD, shard_names
from narrowcast.checkpoint.header import Stored
from narrowcast.checkpoint.reading import Checkpoint
from narrowcast.checkpoint.saving import split_into_shards, split_tied
from narrowcast.checkpoint.selection import Choice, choose, module_name
from narrowcast.codecs.payload import Encoding
from narrowcast.codecs.rules import Rules
from narrowcast.codecs.sensitivity import is_finite
from narrowcast.codecs.streaming import encode_tiles
from narrowcast.errors import QuantizeError


class Part(NamedTuple):
    """One file of the target."""

    name: str
    entries: list[Entry]
    tied: dict[str, str]

    @property
    def nbytes(self) -> int:
        return sum(entry.stored.nbytes for entry in self.entries)


def choose_codecs(source: Checkpoint, rules: Rules) -> dict[str, Choice]:
    """The codec of each tensor, or the reason why it is copied. A tied weight is encoded if all its names are."""
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


class Rounded(NamedTuple):
    """How weights are rounded: by search or to nearest; and rows that were rounded elsewhere, by the weight's name."""

    searched: bool = False
    rows: Mapping[str, Tensor] = MappingProxyType({})


def lay_out_parts(
    source: Checkpoint,
    target: Path,
    choices: Mapping[str, Choice],
    limit: int | None,
    allow_nonfinite: bool,
    rounded: Rounded = Rounded(),  # noqa: B008  # a NamedTuple does not change
) -> list[Part]:
    """The files of the target: those of the source under their names, or new ones of up to `limit` bytes."""
    entries = {
        name: _entry(source, name, stored, choices[name], allow_nonfinite, rounded)
        for name, stored in source.stored.items()
    }
    if target.suffix == ".safetensors":
        groups, names = [list(entries.values())], [target.name]
    elif limit is not None:
        groups = split_into_shards(entries.values(), limit)
        names = shard_names(len(groups))
    else:
        groups = [[entries[name] for name in file.contents.tensors] for file in source.files]
        names = [file.path.name for file in source.files]
        # A source that was saved more than once has the number of its save in its names. The target is a first save.
        names = shard_names(len(groups)) if len(groups) == 1 or all(map(SHARD.fullmatch, names)) else names
    return [Part(*part) for part in zip(names, groups, split_tied(groups, source.tied), strict=True)]


def _entry(
    source: Checkpoint, name: str, stored: Stored, choice: Choice, allow_nonfinite: bool, rounded: Rounded
) -> Entry:
    if choice.codec is None:
        return Entry(name, stored, None, partial(source.tiles, name))
    shape, lead = torch.Size(stored.shape), choice.lead
    numel = shape[lead:].numel()
    rows = Stored(torch.uint8, (*shape[:lead], choice.codec.row_bytes(numel)))
    encoding = Encoding(choice.codec, shape, stored.dtype)
    ready = rounded.rows.get(name)
    if ready is not None and tuple(ready.shape) == tuple(rows.shape):
        return Entry(name, rows, encoding, lambda: iter([ready.reshape(-1)]))
    read = partial(_read_finite, source, name, allow_nonfinite)
    encode = partial(encode_tiles, choice.codec, shape[:lead].numel(), numel, read, searched=rounded.searched)
    return Entry(name, rows, encoding, encode)


def _read_finite(source: Checkpoint, name: str, allow_nonfinite: bool, start: int, stop: int) -> Tensor:
    elements = source.read(name, start, stop)
    if not allow_nonfinite and not is_finite(elements):
        raise QuantizeError(
            f"{name!r} holds an infinity or a NaN, and every block that holds one decodes to NaN. The usual cause is a "
            "training that diverged, or an overflow in fp16. Repair the checkpoint, leave the weight out with a rule "
            f'("{module_name(name)}" = false), or pass --allow-nonfinite.'
        )
    return elements
