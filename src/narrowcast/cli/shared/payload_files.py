"""Payloads in safetensors files: what `narrowcast encode` writes and `narrowcast decode` reads, a tensor at a time.

The bytes of a tensor are those of `narrowcast.encode(tensor, codec, seed=seed)`. The file is a checkpoint like any
other (docs/checkpoints.md), which describes rows. A payload is stored as one row, of a tensor of shape [1, *shape].
With block=row it is stored as its rows. The original shape is in the metadata, under SHAPES. Tensors that are not
floats are copied. `decode` also takes files of `narrowcast.save` and `narrowcast quantize`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from narrowcast.checkpoint import Checkpoint, read
from narrowcast.checkpoint.files import Entry, new_file, write_tensors
from narrowcast.checkpoint.header import Stored
from narrowcast.cli.shared import npy
from narrowcast.cli.shared.bars import bytes_bar
from narrowcast.codecs import Codec, checks
from narrowcast.codecs import codec as as_codec
from narrowcast.codecs.payload import Encoding
from narrowcast.codecs.sensitivity import is_finite
from narrowcast.codecs.streaming import decode_tiles, encode_tiles
from narrowcast.errors import CheckpointError, SpecError

SHAPES = "encoded_shapes"
ARRAY = "array"
"""The name of the tensor that is read from a .npy file."""


class Source(NamedTuple):
    """The tensors of a file."""

    stored: dict[str, Stored]
    read: Callable[[str, int, int], Tensor]
    """Of (name, start, stop): these elements of a tensor, laid flat."""
    checkpoint: Checkpoint | None


# -- encoding ---------------------------------------------------------------------------------------------------------


def encode(path: Path, target: Path, spec: str, seed: int) -> dict[str, Any]:
    """Encode a file into another one. Returns the sizes of its tensors, and which are finite or copied."""
    codec = as_codec(spec)
    source = _open(path)
    floats = [name for name, stored in source.stored.items() if stored.dtype in checks.FLOATS]
    finite: dict[str, bool] = {}
    entries = [
        _entry_to_encode(source, name, codec, seed, finite)
        if name in floats
        else Entry(name, stored, None, partial(source.checkpoint.tiles, name))  # type: ignore[union-attr]
        for name, stored in source.stored.items()
    ]
    shapes = {name: list(source.stored[name].shape) for name in floats}
    _write(target, entries, source.checkpoint, {SHAPES: shapes})
    after = {entry.name: entry.stored.nbytes for entry in entries}
    return {
        "codec": codec.spec,
        "tensors": [{**_describe(source, name, after), "finite": finite[name]} for name in floats],
        "copied": [name for name in source.stored if name not in finite],
        "bytes_before": sum(stored.nbytes for stored in source.stored.values()),
        "bytes_after": sum(after.values()),
    }


def _open(path: Path) -> Source:
    if path.suffix == ".npy":
        array = npy.Array(path)
        return Source({ARRAY: Stored(array.dtype, array.shape)}, lambda name, *part: array.read(*part), None)
    checkpoint = read(path)
    if checkpoint.encodings:
        raise CheckpointError(
            f"SRC={str(path)!r}: {len(checkpoint.encodings)} of its tensors are encoded already, and encoding twice "
            "adds both errors. Start from the original, or run narrowcast decode first."
        )
    return Source(checkpoint.stored, checkpoint.read, checkpoint)


def _entry_to_encode(source: Source, name: str, codec: Codec, seed: int, finite: dict[str, bool]) -> Entry:
    dtype, shape = source.stored[name]
    in_rows = codec.block == "row" and len(shape) > 1
    # One dimension counts the rows and one the elements of a row: a scalar becomes [1, 1].
    described = torch.Size(shape if in_rows else (1, *(shape or (1,))))
    lead = len(described) - 1 if in_rows else 1
    rows, numel = math.prod(described[:lead]), math.prod(described[lead:])
    stored = Stored(torch.uint8, (*described[:lead], codec.row_bytes(numel)))
    finite[name] = True

    def read(start: int, stop: int) -> Tensor:
        elements = source.read(name, start, stop)
        finite[name] = finite[name] and is_finite(elements)
        return elements

    return Entry(name, stored, Encoding(codec, described, dtype), partial(encode_tiles, codec, rows, numel, read, seed))


def _describe(source: Source, name: str, after: dict[str, int]) -> dict[str, Any]:
    stored = source.stored[name]
    sizes = {"bytes_before": stored.nbytes, "bytes_after": after[name]}
    return {"name": name, "shape": list(stored.shape), "dtype": checks.dtype_name(stored.dtype), **sizes}


# -- decoding ---------------------------------------------------------------------------------------------------------


def decode(path: Path, target: Path, name: str | None, dtype: torch.dtype | None) -> dict[str, Any]:
    """Decode a file, or one tensor of it, into another one. Returns the tensors and sizes that were written."""
    checkpoint = read(path)
    names = [*checkpoint.stored] if name is None else [_check_name(name, checkpoint)]
    entries = [_entry_to_decode(checkpoint, own, dtype) for own in names]
    if target.suffix == ".npy":
        if len(entries) != 1:
            raise SpecError(
                f"DST={str(target)!r}: a .npy file holds one array, and SRC has {len(entries)} tensors. Choose one, "
                f"for example --name {names[0]}, or write a .safetensors file."
                if names
                else f"DST={str(target)!r}: SRC has no tensor to write."
            )
        npy.check_dtype(entries[0].stored.dtype, entries[0].name)
    with bytes_bar() as bar:
        task = bar.add_task(f"checking {path.name}", total=sum(stored.nbytes for stored in checkpoint.stored.values()))
        checkpoint.verify(lambda count: bar.advance(task, count))
    _write(target, entries, checkpoint if name is None else None, {})
    return {
        "tensors": [
            {
                "name": entry.name,
                "codec": checkpoint.encodings[entry.name].codec.spec if entry.name in checkpoint.encodings else None,
                "shape": list(entry.stored.shape),
                "dtype": checks.dtype_name(entry.stored.dtype),
            }
            for entry in entries
        ],
        "bytes_before": sum(checkpoint.stored[checkpoint.tied.get(own, own)].nbytes for own in names),
        "bytes_after": sum(entry.stored.nbytes for entry in entries),
    }


def _check_name(name: str, checkpoint: Checkpoint) -> str:
    if name not in checkpoint.stored and name not in checkpoint.tied:
        names = [*checkpoint.stored]
        some = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        raise SpecError(f"--name {name!r}: SRC has no tensor of that name. It has: {some or 'none'}.")
    return name


def _entry_to_decode(checkpoint: Checkpoint, name: str, dtype: torch.dtype | None) -> Entry:
    encoding = checkpoint.encodings.get(name)
    stored = checkpoint.stored[checkpoint.tied.get(name, name)]
    own = encoding.dtype if encoding else stored.dtype
    kind = dtype if dtype and own in checks.FLOATS else own
    shape = stored.shape if encoding is None else _original_shape(checkpoint, name, encoding)

    def make() -> Iterator[Tensor]:
        if encoding is None:
            return (tile.to(kind) for tile in checkpoint.tiles(name))
        rows, numel = math.prod(stored.shape[:-1]), math.prod(encoding.shape[len(stored.shape) - 1 :])
        return decode_tiles(encoding.codec, rows, numel, partial(checkpoint.read, name), kind)

    return Entry(name, Stored(kind, shape), None, make)


def _original_shape(checkpoint: Checkpoint, name: str, encoding: Encoding) -> tuple[int, ...]:
    """The shape that `encode` wrote into the metadata, or that of the encoding. The metadata may hold anything."""
    notes = checkpoint.user.get(SHAPES)
    noted = notes.get(checkpoint.tied.get(name, name)) if isinstance(notes, dict) else None
    described = tuple(encoding.shape)
    if noted is None:
        return described
    possible = [described, described[1:], *([()] if described == (1, 1) else [])]
    for shape in possible:
        if noted == list(shape):
            return shape
    raise CheckpointError(
        f"{checkpoint.path}: {SHAPES} in the metadata says that {name!r} had the shape {str(noted)[:80]}, but it holds "
        f"{list(described)}. The metadata is damaged, or belongs to another file."
    )


# -- both -------------------------------------------------------------------------------------------------------------


def _write(target: Path, entries: list[Entry], like: Checkpoint | None, notes: dict[str, object]) -> None:
    """Write a file that appears when it is complete. Tied names and metadata are those of `like`."""
    with bytes_bar() as bar, new_file(target) as file:
        task = bar.add_task(target.name, total=sum(entry.stored.nbytes for entry in entries))
        if target.suffix == ".npy":
            npy.write(file, *entries[0].stored, entries[0].make())
            return
        tied, inputs = (like.tied, like.inputs) if like else ({}, {})
        user = {key: value for key, value in (like.user if like else {}).items() if key != SHAPES}
        write_tensors(file, entries, tied, {**user, **notes}, lambda count: bar.advance(task, count), inputs)
