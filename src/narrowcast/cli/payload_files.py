"""Payloads in safetensors files: what `narrowcast encode` writes and `narrowcast decode` reads, a tensor at a time.

The bytes of a tensor are those of `narrowcast.encode(tensor, codec, seed=seed)`. The file is a checkpoint like any
other (docs/checkpoints.md), which describes rows: a payload is stored as the one row of a tensor with a dimension more,
[1, *shape], or with block=row as the rows that it has. The shape before stands in the metadata, under SHAPES. Tensors
that codecs do not take are copied. `decode` also takes what `narrowcast.save` and `narrowcast quantize` have written.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from narrowcast.checkpoint import Checkpoint, read
from narrowcast.checkpoint.files import Entry, Staging, write_tensors
from narrowcast.checkpoint.header import Stored
from narrowcast.cli import npy
from narrowcast.cli.bars import bytes_bar
from narrowcast.codecs import Codec, checks
from narrowcast.codecs import codec as as_codec
from narrowcast.codecs.payload import EncodedRows, Encoding
from narrowcast.codecs.payload import encode as encode_tensor
from narrowcast.errors import CheckpointError, SpecError

SHAPES = "encoded_shapes"
ARRAY = "array"
"""The name of the one tensor that comes out of a .npy file."""


class Source(NamedTuple):
    """The tensors of a file, mapped when they are asked for."""

    stored: dict[str, Stored]
    tensor: Callable[[str], Tensor]
    checkpoint: Checkpoint | None


# -- encoding ---------------------------------------------------------------------------------------------------------


def encode(path: Path, target: Path, spec: str, seed: int) -> dict[str, Any]:
    """Encode a file into another one; what became of its tensors."""
    codec = as_codec(spec)
    source = _open(path)
    floats = [name for name, stored in source.stored.items() if stored.dtype in checks.FLOATS]
    finite: dict[str, bool] = {}
    entries = [
        _encoded(source, name, codec, seed, finite) if name in floats else _copied(source, name, stored)
        for name, stored in source.stored.items()
    ]
    shapes = {name: list(source.stored[name].shape) for name in floats}
    _write(target, entries, source.checkpoint, {SHAPES: shapes})
    after = {entry.name: entry.stored.nbytes for entry in entries}
    return {
        "codec": codec.spec,
        "tensors": [{**_described(source, name, after), "finite": finite[name]} for name in floats],
        "copied": [name for name in source.stored if name not in finite],
        "bytes_before": sum(stored.nbytes for stored in source.stored.values()),
        "bytes_after": sum(after.values()),
    }


def _open(path: Path) -> Source:
    if path.suffix == ".npy":
        array = npy.read(path)
        return Source({ARRAY: Stored(array.dtype, tuple(array.shape))}, lambda name: array, None)
    found = read(path)
    if found.encodings:
        raise CheckpointError(
            f"SRC={str(path)!r}: {len(found.encodings)} of its tensors are encoded already, and encoding twice adds "
            "both errors. Start from the original, or run narrowcast decode first."
        )
    return Source(found.stored, found.tensor, found)


def _copied(source: Source, name: str, stored: Stored) -> Entry:
    return Entry(name, stored, None, partial(source.tensor, name))


def _encoded(source: Source, name: str, codec: Codec, seed: int, finite: dict[str, bool]) -> Entry:
    dtype, shape = source.stored[name]
    in_rows = codec.block == "row" and len(shape) > 1
    # A row needs a dimension that counts it, and one that it has: a number becomes [1, 1].
    told = torch.Size(shape if in_rows else (1, *(shape or (1,))))
    lead = len(told) - 1 if in_rows else 1
    stored = Stored(torch.uint8, (*told[:lead], codec.row_bytes(math.prod(told[lead:]))))

    def make() -> Tensor:
        x = source.tensor(name)
        # The extremes of a tensor are finite if and only if all of it is.
        finite[name] = not x.numel() or all(extreme.isfinite() for extreme in torch.aminmax(x))
        return encode_tensor(x, codec, seed=seed).data.view(stored.shape)

    return Entry(name, stored, Encoding(codec, told, dtype), make)


def _described(source: Source, name: str, after: dict[str, int]) -> dict[str, Any]:
    stored = source.stored[name]
    kind = str(stored.dtype).removeprefix("torch.")
    sizes = {"bytes_before": stored.nbytes, "bytes_after": after[name]}
    return {"name": name, "shape": list(stored.shape), "dtype": kind, **sizes}


# -- decoding ---------------------------------------------------------------------------------------------------------


def decode(path: Path, target: Path, name: str | None, dtype: torch.dtype | None) -> dict[str, Any]:
    """Decode a file, or one tensor of it, into another one; what came out."""
    found = read(path)
    names = [*found.stored] if name is None else [_known(name, found)]
    entries = [_decoded(found, own, dtype) for own in names]
    if target.suffix == ".npy":
        if len(entries) != 1:
            raise SpecError(
                f"DST={str(target)!r}: a .npy file holds one array, and SRC has {len(entries)} tensors. Pick one with "
                f"--name, such as --name {names[0]}, or write a .safetensors file."
                if names
                else f"DST={str(target)!r}: SRC has no tensor to write."
            )
        npy.check_dtype(entries[0].stored.dtype, entries[0].name)
    with bytes_bar() as bar:
        task = bar.add_task(f"checking {path.name}", total=sum(stored.nbytes for stored in found.stored.values()))
        found.verify(lambda count: bar.advance(task, count))
    _write(target, entries, found if name is None else None, {})
    return {
        "tensors": [
            {
                "name": entry.name,
                "codec": found.encodings[entry.name].codec.spec if entry.name in found.encodings else None,
                "shape": list(entry.stored.shape),
                "dtype": str(entry.stored.dtype).removeprefix("torch."),
            }
            for entry in entries
        ],
        "bytes_before": sum(found.stored[found.tied.get(own, own)].nbytes for own in names),
        "bytes_after": sum(entry.stored.nbytes for entry in entries),
    }


def _known(name: str, found: Checkpoint) -> str:
    if name not in found.stored and name not in found.tied:
        names = [*found.stored]
        some = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        raise SpecError(f"--name {name!r}: SRC has no tensor of that name. It has: {some or 'none'}.")
    return name


def _decoded(found: Checkpoint, name: str, dtype: torch.dtype | None) -> Entry:
    encoding = found.encodings.get(name)
    stored = found.stored[found.tied.get(name, name)]
    own = encoding.dtype if encoding else stored.dtype
    kind = dtype if dtype and own in checks.FLOATS else own
    shape = stored.shape if encoding is None else _shape_before(found, name, encoding)

    def make() -> Tensor:
        tensor = found.tensor(name)
        if encoding is None:
            return tensor.to(kind)
        return EncodedRows(tensor, *encoding).decode(kind).view(shape)

    return Entry(name, Stored(kind, shape), None, make)


def _shape_before(found: Checkpoint, name: str, encoding: Encoding) -> tuple[int, ...]:
    """The shape that `encode` noted, or the one that the file describes. The note is data from anywhere."""
    notes = found.user.get(SHAPES)
    noted = notes.get(found.tied.get(name, name)) if isinstance(notes, dict) else None
    told = tuple(encoding.shape)
    if noted is None:
        return told
    possible = [told, told[1:], *([()] if told == (1, 1) else [])]
    for shape in possible:
        if noted == list(shape):
            return shape
    raise CheckpointError(
        f"{found.path}: {name!r} is noted to have had the shape {str(noted)[:80]}, but holds {list(told)}. The "
        "metadata is damaged or another file's."
    )


# -- both -------------------------------------------------------------------------------------------------------------


def _write(target: Path, entries: list[Entry], like: Checkpoint | None, notes: dict[str, object]) -> None:
    """Write a file that is there when it is whole; ties and metadata are those of `like`."""
    with bytes_bar() as bar, Staging(target.absolute().parent) as staging:
        task = bar.add_task(target.name, total=sum(entry.stored.nbytes for entry in entries))
        with staging.file(target.name) as file:
            if target.suffix == ".npy":
                npy.write(file, entries[0].make())
            else:
                tied, inputs = (like.tied, like.inputs) if like else ({}, {})
                user = {key: value for key, value in (like.user if like else {}).items() if key != SHAPES}
                write_tensors(file, entries, tied, {**user, **notes}, lambda count: bar.advance(task, count), inputs)
        staging.publish()
