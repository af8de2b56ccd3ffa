"""The header of a file: safetensors' own, and narrowcast's part of its metadata.

    __metadata__ = {"format": "pt", "narrowcast": TEXT, "narrowcast.crc32": SEAL}
    TEXT         = JSON: version 1; tensors: {name: {codec, shape, dtype}} of the encoded ones;
                   checksums: {name: crc32} of every tensor's bytes; tied: {alias: name}; user: anything;
                   inputs, where there are any: {layer: {codec, signed}} of layers that quantize their inputs;
                   codecs, where there are any: {name: module} of codecs that are not the library's own

An encoded weight is stored as U8 [..., row_bytes] under its own name. The seal is a CRC-32 over the names, dtypes and
shapes of the header and over TEXT, so that a changed byte of the description is noticed. One of the two keys without
the other is an error. A file with neither is a plain safetensors file: no encoded weights, no checksums.

This module has the contents of a file and writes its header. parse.py reads one.
"""

from __future__ import annotations

import json
import math
import zlib
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from narrowcast.codecs import Codec, checks
from narrowcast.codecs.payload import Encoding
from narrowcast.codecs.registry import module_of

VERSION = 1
TEXT, SEAL = "narrowcast", "narrowcast.crc32"
UNKNOWN = "0" * 8
"""A placeholder for a checksum that is not known yet, of the same length."""

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


class Stored(NamedTuple):
    """A tensor as the file holds it."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass
class Contents:
    """What a file holds: its tensors in the order of their bytes, and narrowcast's description of them."""

    tensors: dict[str, Stored]
    spans: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Where their bytes begin and end, counted from the end of the header. Known for files that were read."""
    encodings: dict[str, Encoding] = field(default_factory=dict)
    checksums: dict[str, str] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    user: dict[str, Any] = field(default_factory=dict)
    inputs: dict[str, tuple[Codec, bool]] = field(default_factory=dict)
    """Of layers that quantize their inputs: the codec, and whether its grid is signed."""


def clip_of(layer: str) -> str:
    """The name of the tensor that holds the clip of a layer's inputs. It is in the file that describes them."""
    return f"{layer}.input_quantizer.alpha" if layer else "input_quantizer.alpha"


def header_bytes(contents: Contents) -> bytes:
    """The first bytes of a file. Their number does not depend on the checksums; tensors begin at a multiple of 64."""
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
    used = [encoding.codec for encoding in contents.encodings.values()] + [own for own, _ in contents.inputs.values()]
    modules = {own.name: module_of(own.name) for own in used if module_of(own.name)}
    if modules:
        about["codecs"] = modules
    text = json.dumps(about)
    entries: dict[str, Any] = {"__metadata__": {"format": "pt", TEXT: text, SEAL: seal(contents.tensors, text)}}
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
    codec, shape, dtype = encoding
    return {"codec": codec.spec, "shape": list(shape), "dtype": checks.dtype_name(dtype)}


def seal(tensors: dict[str, Stored], text: str) -> str:
    """The CRC-32 that no byte of the description can change without changing."""
    described = [[name, NAMES[stored.dtype], list(stored.shape)] for name, stored in sorted(tensors.items())]
    return f"{zlib.crc32(json.dumps([described, text]).encode()):08x}"
