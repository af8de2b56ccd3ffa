"""What ranks must agree on before bytes move.

A uint8 wire hides every mistake: a wrong codec decodes to garbage, a wrong size aborts the process. So each
collective opens with a header of fixed size from every rank to every other. It holds the call's number in its lane, a
digest of all that must be equal (operation, codec with its options, dtype, sizes), the same in words, and two rows of
element counts: what the rank will send to each peer and what it expects from each. Every rank reads every header, so
all of them reach the same verdict, and `MismatchError` reads the same everywhere.
"""

from __future__ import annotations

import functools
import hashlib
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from narrowcast.codecs import Codec
from narrowcast.errors import MismatchError

_FIXED = struct.Struct("<q16s200s")
FIXED_BYTES = _FIXED.size

_Counts = npt.NDArray[np.int64]


def header_bytes(ranks: int) -> int:
    """The size of a header in a group of so many ranks."""
    return FIXED_BYTES + 16 * ranks


@dataclass(frozen=True)
class Call:
    """One rank's view of a collective."""

    op: str
    codec: Codec
    words: str
    """What must be equal on every rank, for people: "dtype=float32, numel=100, op=sum"."""
    send: tuple[int, ...] = ()
    """Elements for each rank, where ranks may differ; must equal what that rank expects."""
    receive: tuple[int, ...] = ()

    def __str__(self) -> str:
        text = f"{self.op}(codec={_short(self.codec.spec)}, {self.words})"
        if self.send:
            text += f" sending {list(self.send)}, expecting {list(self.receive)}"
        return text

    def header(self, number: int, ranks: int) -> bytes:
        digest, common = _digest(self.op, self.codec, self.words)
        counts = [*(self.send or (0,) * ranks), *(self.receive or (0,) * ranks)]
        return _FIXED.pack(number, digest, common) + struct.pack(f"<{2 * ranks}q", *counts)


@functools.lru_cache(maxsize=1024)
def _digest(op: str, codec: Codec, words: str) -> tuple[bytes, bytes]:
    """What must be equal, in few bytes and in words."""
    meant = json.dumps([op, codec.config(), words], sort_keys=True)
    common = f"{op}(codec={_short(codec.spec)}, {words})"
    return hashlib.blake2b(meant.encode(), digest_size=16).digest(), common.encode()[:200]


def check(table: npt.NDArray[np.uint8], ranks: Sequence[int]) -> None:
    """Raise `MismatchError` unless the headers (one per row) of all `ranks` (global numbers) fit together."""
    counted = table[:, FIXED_BYTES:]
    if (table[:, :FIXED_BYTES] != table[0, :FIXED_BYTES]).any():
        raise MismatchError(_differing([header.tobytes() for header in table], ranks))
    if not counted.any():
        return
    counts = counted.copy().view("<i8")
    send, receive = counts.reshape(len(ranks), 2, len(ranks)).swapaxes(0, 1)
    wrong = np.argwhere(send != receive.T)
    if len(wrong):
        raise MismatchError(_uneven(_text(table[0].tobytes()), send, receive, wrong, ranks))


def _differing(headers: Sequence[bytes], ranks: Sequence[int]) -> str:
    numbers = [_FIXED.unpack_from(header)[0] for header in headers]
    said: dict[str, list[int]] = {}
    for header, rank, number in zip(headers, ranks, numbers, strict=True):
        text = _text(header) + (f" as its call number {number}" if len(set(numbers)) > 1 else "")
        said.setdefault(text, []).append(rank)
    if len(said) == 1:  # the words were cut, or an option is not among them
        said = {f"{next(iter(said))} with options {header[8:24].hex()[:8]}": [] for header in headers}
        for header, rank in zip(headers, ranks, strict=True):
            said[f"{_text(header)} with options {header[8:24].hex()[:8]}"].append(rank)
    lines = "; ".join(f"{_ranks(who)} called {text}" for text, who in said.items())
    return (
        f"ranks disagree on a collective: {lines}. Nothing was sent. Every rank of a group must make the same calls "
        "in the same order, with the same codec, dtype and sizes."
    )


def _uneven(call: str, send: _Counts, receive: _Counts, wrong: _Counts, ranks: Sequence[int]) -> str:
    shown = "; ".join(
        f"rank {ranks[a]} sends {send[a, b]} elements to rank {ranks[b]}, which expects {receive[b, a]}"
        for a, b in wrong[:8].tolist()
    )
    rest = f" (and {len(wrong) - 8} more)" if len(wrong) > 8 else ""
    return (
        f"ranks disagree on the sizes of {call}: {shown}{rest}. Nothing was sent. What a rank sends to a peer "
        "must be what that peer's output has room for: check split sizes and tensor shapes."
    )


def _text(header: bytes) -> str:
    return str(_FIXED.unpack_from(header)[2].rstrip(b"\0").decode(errors="replace"))


def _ranks(who: Sequence[int]) -> str:
    return ("rank " if len(who) == 1 else "ranks ") + ", ".join(map(str, who))


def _short(spec: str) -> str:
    return spec if len(spec) <= 60 else spec[:57] + "..."


def as_tensor(header: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(header), dtype=torch.uint8)
