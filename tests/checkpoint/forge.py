"""Files made by hand, from docs/checkpoints.md alone: what a writer in another language, or a forger, would make."""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path
from typing import Any

Tensors = dict[str, tuple[str, list[int], bytes]]
"""Name: dtype, shape, bytes."""


def raw(path: Path, header: object, data: bytes = b"") -> Path:
    """A safetensors file with this header: an object, or the very bytes."""
    body = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(body)) + body + data)
    return path


def plain(held: Tensors) -> tuple[dict[str, Any], bytes]:
    """The entries of a header, and the bytes behind it."""
    entries: dict[str, Any] = {}
    data = b""
    for name, (dtype, shape, some) in held.items():
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(some)]}
        data += some
    return entries, data


def about(held: Tensors, /, **changes: Any) -> dict[str, Any]:
    """What narrowcast would say about these tensors, with some of it changed."""
    checksums = {name: f"{zlib.crc32(some):08x}" for name, (_, _, some) in held.items()}
    return {"version": 1, "tensors": {}, "checksums": checksums, "tied": {}, "user": {}, **changes}


def seal(held: Tensors, text: str) -> str:
    said = [[name, dtype, shape] for name, (dtype, shape, _) in sorted(held.items())]
    return f"{zlib.crc32(json.dumps([said, text]).encode()):08x}"


def forged(path: Path, held: Tensors, /, text: str | None = None, **changes: Any) -> Path:
    """A file with narrowcast's metadata, changed, and a right seal over it."""
    entries, data = plain(held)
    text = json.dumps(about(held, **changes)) if text is None else text
    metadata = {"format": "pt", "narrowcast": text, "narrowcast.crc32": seal(held, text)}
    return raw(path, {"__metadata__": metadata, **entries}, data)
