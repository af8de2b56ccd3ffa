"""What a file says about itself: a safetensors header, and narrowcast's part of its metadata.

    __metadata__ = {"format": "pt", "narrowcast": TEXT, "narrowcast.crc32": SEAL}
    TEXT         = JSON: version 1; tensors: {name: {codec, shape, dtype}} of the encoded ones;
                   checksums: {name: crc32} of every tensor's bytes; tied: {alias: name}; user: anything;
                   inputs, where there are any: {layer: {codec, signed}} of layers that quantize their inputs

An encoded weight is stored as U8 [..., row_bytes] under its own name. The seal is a CRC-32 over the names, dtypes and
shapes of the header and over TEXT, so that no byte of the description can change unnoticed; one of the two keys without
the other is an error. A file without both is a plain safetensors file: no encoded weights, no checksums.

A header is data from anywhere: everything in it is checked here, before a tensor is made. What the package safetensors
checks (lengths, offsets that overlap or leave gaps, products of sizes) is not checked again.
"""

from __future__ import annotations

import json
import math
import zlib
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from narrowcast.codecs import Codec, codec
from narrowcast.codecs.payload import Encoding
from narrowcast.codecs.registry import codec_in_file
from narrowcast.errors import CheckpointError, NarrowcastError, NewerVersionError

VERSION = 1
TEXT, SEAL = "narrowcast", "narrowcast.crc32"
UNKNOWN = "0" * 8
"""Stands for a checksum that is not known yet: as long as any other."""

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
_FLOATS = {"float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_LIMIT = 1 << 63  # torch counts sizes and elements in int64
DIMENSIONS = 64
"""The most that torch's operators take; numpy's limit, too."""
_NESTED = 1_000_000
"""Lists and objects that metadata may hold beside those of the tensors: each takes memory of many times its bytes."""


class Stored(NamedTuple):
    """A tensor as the file holds it."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass
class Contents:
    """What a file holds: its tensors in the order of their bytes, and what narrowcast knows about them."""

    tensors: dict[str, Stored]
    spans: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Where their bytes begin and end, behind the header; filled in by reading."""
    encodings: dict[str, Encoding] = field(default_factory=dict)
    checksums: dict[str, str] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    user: dict[str, Any] = field(default_factory=dict)
    inputs: dict[str, tuple[Codec, bool]] = field(default_factory=dict)
    """Of layers that quantize their inputs: the codec, and whether its grid is signed."""


def clip_of(layer: str) -> str:
    """The name of the clip of a layer's inputs, which is in the file that describes them."""
    return f"{layer}.input_quantizer.alpha" if layer else "input_quantizer.alpha"


# -- writing ----------------------------------------------------------------------------------------------------------


def header(contents: Contents) -> bytes:
    """The first bytes of the file. Their number does not depend on the checksums; tensors begin at a multiple of 64."""
    about: dict[str, Any] = {
        "version": VERSION,
        "tensors": {name: describe(encoding) for name, encoding in contents.encodings.items()},
        "checksums": {name: contents.checksums.get(name, UNKNOWN) for name in contents.tensors},
        "tied": contents.tied,
        "user": contents.user,
    }
    if contents.inputs:
        about["inputs"] = {
            layer: {"codec": own.spec, "signed": signed} for layer, (own, signed) in contents.inputs.items()
        }
    text = json.dumps(about)
    entries: dict[str, Any] = {"__metadata__": {"format": "pt", TEXT: text, SEAL: _seal(contents.tensors, text)}}
    start = 0
    for name, stored in contents.tensors.items():
        end = start + stored.nbytes
        entries[name] = {"dtype": NAMES[stored.dtype], "shape": list(stored.shape), "data_offsets": [start, end]}
        start = end
    body = json.dumps(entries, separators=(",", ":")).encode()
    body += b" " * (-(8 + len(body)) % 64)
    return len(body).to_bytes(8, "little") + body


def describe(encoding: Encoding) -> dict[str, object]:
    """An encoding as plain values."""
    name = str(encoding.dtype).removeprefix("torch.")
    return {"codec": encoding.codec.spec, "shape": list(encoding.shape), "dtype": name}


def _seal(tensors: dict[str, Stored], text: str) -> str:
    said = [[name, NAMES[stored.dtype], list(stored.shape)] for name, stored in sorted(tensors.items())]
    return f"{zlib.crc32(json.dumps([said, text]).encode()):08x}"


# -- reading ----------------------------------------------------------------------------------------------------------


def contents_of(body: bytes, where: str) -> Contents:
    """The contents that a header which the package safetensors has accepted describes."""
    entries = parse(body, where)
    metadata = entries.pop("__metadata__", None) or {}
    tensors = _stored(entries, where)
    spans = {name: tuple(entry["data_offsets"]) for name, entry in entries.items()}
    if TEXT not in metadata and SEAL not in metadata:
        return Contents(tensors, spans)
    text, seal = metadata.get(TEXT), metadata.get(SEAL)
    if text is None or seal is None:
        raise CheckpointError(
            f"{where}: the metadata has only one of {TEXT!r} and {SEAL!r}. The file was damaged, or rewritten by a "
            "tool that drops metadata. Copy it again, or write it again with narrowcast.save."
        )
    nested = text.count("[") + text.count("{")
    if nested > _NESTED + 4 * len(tensors):
        raise CheckpointError(
            f"{where}: the metadata holds {nested} lists and objects, and {_NESTED} are the most beside those of its "
            "tensors. Put large values into tensors. The file is not read."
        )
    about = _object(parse(text.encode(), where), "metadata", where)
    _check_version(about.get("version"), where)
    if seal != _seal(tensors, text):
        raise CheckpointError(
            f"{where}: the header does not match its own checksum {short(seal)}. A byte of it was changed on the way. "
            "Copy the file again from where it came."
        )
    return _checked(about, tensors, spans, where)


def parse(text: bytes, where: str) -> dict[str, Any]:
    """A JSON object in which every name is used once."""
    try:
        return _object(json.loads(text, object_pairs_hook=_once), "JSON", where)
    except (ValueError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{where}: not JSON that can be read: {error}. The file is damaged.") from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"the name {short(twice)} is used twice")
    return found


def _object(value: object, what: str, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: {what} is a {type(value).__name__}, not an object. The file is damaged.")
    return value


def _check_version(version: object, where: str) -> None:
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise CheckpointError(f"{where}: version={short(version)} is no version of the format. The file is damaged.")
    if version > VERSION:
        raise NewerVersionError(
            f"{where}: written in version {version} of the format, and this narrowcast reads up to {VERSION}. Upgrade "
            "with pip install --upgrade narrowcast."
        )


def _stored(entries: dict[str, dict[str, Any]], where: str) -> dict[str, Stored]:
    """What the tensors of a file are. Many are alike: each dtype and shape is checked, and kept, once."""
    known: dict[tuple[object, ...], Stored] = {}
    tensors: dict[str, Stored] = {}
    for name, entry in entries.items():
        dtype, shape = entry["dtype"], entry["shape"]
        key = (dtype, *shape)
        if key not in known:
            if dtype not in DTYPES:
                raise CheckpointError(
                    f"{where}: {short(name)} has the dtype {short(dtype)}. There are: {', '.join(DTYPES)}."
                )
            _check_shape(shape, name, where)
            known[key] = Stored(DTYPES[dtype], tuple(shape))
        tensors[name] = known[key]
    return tensors


def _check_shape(shape: object, name: str, where: str) -> None:
    sizes = shape if isinstance(shape, list) else [None]
    if len(sizes) > DIMENSIONS:
        raise CheckpointError(
            f"{where}: {short(name)} has {len(sizes)} dimensions, and a tensor has {DIMENSIONS} at most. The file is "
            "damaged, or made to do harm."
        )
    whole = all(isinstance(size, int) and not isinstance(size, bool) and 0 <= size < _LIMIT for size in sizes)
    # Zero elements do not excuse other sizes: torch multiplies strides without them.
    if not whole or math.prod(size for size in sizes if size) >= _LIMIT:
        raise CheckpointError(
            f"{where}: {short(name)} has the shape {short(shape)}. Sizes are whole numbers whose product is below "
            "2**63. The file is damaged."
        )


def short(value: object) -> str:
    """What a file says, in an error: no longer than a line or two, however long it is there."""
    text = repr(value)
    return text if len(text) <= 160 else text[:157] + "..."


def _checked(
    about: dict[str, Any], tensors: dict[str, Stored], spans: dict[str, tuple[int, int]], where: str
) -> Contents:
    parts = {part: _object(about.get(part), part, where) for part in ("tensors", "checksums", "tied", "user")}
    checksums, tied = parts["checksums"], parts["tied"]
    if checksums.keys() != tensors.keys() or not all(isinstance(value, str) for value in checksums.values()):
        odd = short(sorted(checksums.keys() ^ tensors.keys())[:3])
        raise CheckpointError(f"{where}: every tensor has one checksum, but not {odd}. The metadata is another file's.")
    for alias, name in tied.items():
        if alias in tensors or not isinstance(name, str) or name not in tensors:
            raise CheckpointError(
                f"{where}: {short(alias)} is tied to {short(name)}, but a tied name stands for a tensor of the file, "
                "and is none itself. The metadata is damaged or another file's."
            )
    encodings = {name: _encoding(entry, name, tensors, where) for name, entry in parts["tensors"].items()}
    said = _object(about.get("inputs", {}), "inputs", where)
    names = {*tensors, *tied} if said else set()
    inputs = {layer: _input(entry, layer, names, where) for layer, entry in said.items()}
    return Contents(tensors, spans, encodings, checksums, tied, parts["user"], inputs)


def _input(entry: object, layer: str, names: set[str], where: str) -> tuple[Codec, bool]:
    about = _object(entry, f"the description of the inputs of {short(layer)}", where)
    signed = about.get("signed")
    if clip_of(layer) not in names or not isinstance(signed, bool):
        raise CheckpointError(
            f"{where}: the inputs of {short(layer)} are said to be quantized, with signed={short(signed)}, but signed "
            f"is true or false, and {clip_of(layer)!r} a tensor of the file. The metadata is damaged or another file's."
        )
    return _codec(about.get("codec"), layer, where, of_inputs=True), signed


def _encoding(entry: object, name: str, tensors: dict[str, Stored], where: str) -> Encoding:
    about = _object(entry, f"the description of {short(name)}", where)
    dtype = about.get("dtype")
    if not isinstance(dtype, str) or dtype not in _FLOATS:
        raise CheckpointError(
            f"{where}: {short(name)} was of dtype {short(dtype)}. Encoded weights were one of {[*_FLOATS]}."
        )
    _check_shape(about.get("shape"), name, where)
    shape = torch.Size(about["shape"])
    chosen = _codec(about.get("codec"), name, where)
    stored = tensors.get(name)
    if stored is None or not _fits(stored, chosen, shape):
        raise CheckpointError(
            f"{where}: {short(name)} is said to be {chosen.spec!r} of shape {short(list(shape))}, but the file holds "
            f"{'nothing of that name' if stored is None else f'{NAMES[stored.dtype]} {list(stored.shape)}'}. "
            "The metadata is another file's."
        )
    return Encoding(chosen, shape, _FLOATS[dtype])


def _codec(spec: Any, name: str, where: str, of_inputs: bool = False) -> Codec:
    try:
        return codec(spec) if of_inputs else codec_in_file(spec)  # a grid, which has no blocks, or rows of bytes
    except (NarrowcastError, TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(
            f"{where}: {short(name)} has a codec that cannot be made: {str(error)[:200]} It comes from a later "
            "narrowcast, or is damaged."
        ) from error


def _fits(stored: Stored, chosen: Codec, shape: torch.Size) -> bool:
    lead = len(stored.shape) - 1
    if stored.dtype != torch.uint8 or not 1 <= lead < len(shape) or tuple(shape[:lead]) != stored.shape[:lead]:
        return False
    return stored.shape[-1] == chosen.row_bytes(math.prod(shape[lead:]))
