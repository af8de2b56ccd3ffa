"""What ranks must agree on before bytes move.

A uint8 wire hides every mistake: a wrong codec decodes to garbage, a wrong size aborts the process. So each
collective opens with a header from every rank to every other: 32 bytes, however many ranks there are. It holds the
call's number in its lane, a digest of all that must be equal (operation, codec with its options, dtype, sizes), and one
word for the element counts that the rank sends to each peer and expects from each: over all ranks these words add up to
zero if every count is what its receiver expects, and but for one chance in 2^64 not otherwise. Every rank reads every
header, so all of them reach the same verdict. One byte more says whether the rank sends rows in advance (wire.py): what
others must take off the connections if it comes to nothing.

Where headers do not fit, all ranks know it, and tell each other in a second trip what they called, in words, and all
their counts: a statement. So `MismatchError` reads the same everywhere.
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

_HEADER = struct.Struct("<q15s?Q")
_DIGEST, _IN_ADVANCE = slice(8, 23), 23
HEADER_BYTES = _HEADER.size

_STATED = struct.Struct("<q16s200s")

_Bytes = npt.NDArray[np.uint8]
_Words = npt.NDArray[np.uint64]
_Counts = npt.NDArray[np.int64]


def statement_bytes(ranks: int) -> int:
    """The size of a statement in a group of so many ranks."""
    return _STATED.size + 16 * ranks


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
    sizes: tuple[int, ...] | None = ()
    """What every rank holds alike and counts follow from; None where counts are known to their two ranks only."""

    def __str__(self) -> str:
        text = f"{self.op}(codec={_short(self.codec.spec)}, {self.words})"
        if self.send:
            text += f" sending {list(self.send)}, expecting {list(self.receive)}"
        return text

    @functools.cached_property
    def key(self) -> bytes | None:
        """The same on all ranks that agree, and for all calls alike; None where no rank knows by itself what is."""
        return None if self.sizes is None else _key(self.op, self.codec, self.words, self.sizes)


remembered_call = functools.lru_cache(maxsize=1024)(Call)
"""A `Call`; the same object for equal arguments, so that its key is computed once."""


class Header:
    """What a rank says of its call, as the `number`th one of its lane: `data` always, the statement where it must.

    A call that is repeated has its number negative.
    """

    def __init__(self, call: Call, number: int, rank: int, ranks: int) -> None:
        self._call, self._number, self._rank, self._ranks = call, number, rank, ranks

    @functools.cached_property
    def data(self) -> torch.Tensor:
        call = self._call
        digest, _ = _digest(call.op, call.codec, call.words)
        return as_tensor(_HEADER.pack(self._number, digest, False, _fold(self._rank, call.send, call.receive)))

    @property
    def data_in_advance(self) -> torch.Tensor:
        """The same, of a rank that sends rows in advance."""
        data = self.data.clone()
        data[_IN_ADVANCE] = 1
        return data

    @property
    def key(self) -> bytes | None:
        """That of the call."""
        return self._call.key

    def statement(self) -> torch.Tensor:
        call, nothing = self._call, (0,) * self._ranks
        said = _STATED.pack(abs(self._number), *_digest(call.op, call.codec, call.words))
        return as_tensor(
            said + struct.pack(f"<{2 * self._ranks}q", *(call.send or nothing), *(call.receive or nothing))
        )


@functools.lru_cache(maxsize=1024)
def _digest(op: str, codec: Codec, words: str) -> tuple[bytes, bytes]:
    """What must be equal, in few bytes and in words."""
    meant = json.dumps([op, codec.config(), words], sort_keys=True)
    common = f"{op}(codec={_short(codec.spec)}, {words})"
    return hashlib.blake2b(meant.encode(), digest_size=16).digest(), common.encode()[:200]


@functools.lru_cache(maxsize=1024)
def _key(op: str, codec: Codec, words: str, sizes: tuple[int, ...]) -> bytes:
    digest = _digest(op, codec, words)[0]
    return hashlib.blake2b(digest + struct.pack(f"<{len(sizes)}q", *sizes), digest_size=16).digest()


@functools.lru_cache(maxsize=64)
def _fold(rank: int, send: tuple[int, ...], receive: tuple[int, ...]) -> int:
    """What a rank sends less what it expects, in one word. Over all ranks these add up to 0 if the two are alike."""
    if not send:
        return 0
    mine, peers = np.full(len(send), rank, np.uint64), np.arange(len(send), dtype=np.uint64)
    sent, expected = (np.array(counts, np.int64).view(np.uint64) for counts in (send, receive))
    return int((_mix(mine, peers, sent) - _mix(peers, mine, expected)).sum())


def _mix(source: _Words, target: _Words, count: _Words) -> _Words:
    """64 bits of each count between two ranks, which are to cancel only against those of the same three numbers."""
    mixed: _Words = np.zeros_like(count)
    for word in (source, target, count):
        mixed = _finalize(mixed ^ word)
    return mixed


def _finalize(word: _Words) -> _Words:
    """splitmix64: every bit of the result depends on every bit of the word."""
    word = word + np.uint64(0x9E3779B97F4A7C15)
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    word ^= word >> np.uint64(31)
    return word


def fit(headers: _Bytes) -> bool:
    """Whether the headers of all ranks, one per row, fit together."""
    words = np.ascontiguousarray(headers).view("<u8")
    numbers, digests = np.abs(words[:, 0].view("<i8")), headers[:, _DIGEST]
    return bool((numbers == numbers[0]).all() and (digests == digests[0]).all()) and not words[:, 3].sum()


def in_advance(headers: _Bytes) -> list[int]:
    """The ranks that sent rows in advance."""
    return [int(rank) for rank in np.flatnonzero(headers[:, _IN_ADVANCE])]


def overtaken(headers: _Bytes) -> list[int]:
    """The ranks that repeat a call which others have done with, well or not; none where all are at the same call."""
    numbers = np.ascontiguousarray(headers[:, :8]).view("<i8")[:, 0]
    counts = np.abs(numbers)
    behind = counts == counts.min()
    return [] if behind.all() or (numbers[behind] > 0).any() else [int(rank) for rank in np.flatnonzero(behind)]


def mismatch(statements: _Bytes, ranks: Sequence[int]) -> MismatchError:
    """The error of `ranks` (global numbers) whose headers do not fit together, by their statements, one per row."""
    said, counted = statements[:, : _STATED.size], statements[:, _STATED.size :]
    if (said != said[0]).any():
        return MismatchError(_differing([statement.tobytes() for statement in said], ranks))
    counts = np.ascontiguousarray(counted).view("<i8")
    send, receive = counts.reshape(len(ranks), 2, len(ranks)).swapaxes(0, 1)
    wrong = np.argwhere(send != receive.T)
    return MismatchError(_uneven(_text(said[0].tobytes()), send, receive, wrong, ranks))


def _differing(statements: Sequence[bytes], ranks: Sequence[int]) -> str:
    numbers = [_STATED.unpack_from(statement)[0] for statement in statements]
    said: dict[str, list[int]] = {}
    for statement, rank, number in zip(statements, ranks, numbers, strict=True):
        text = _text(statement) + (f" as its call number {number}" if len(set(numbers)) > 1 else "")
        said.setdefault(text, []).append(rank)
    if len(said) == 1:  # the words were cut, or an option is not among them
        said = {f"{next(iter(said))} with options {statement[8:24].hex()[:8]}": [] for statement in statements}
        for statement, rank in zip(statements, ranks, strict=True):
            said[f"{_text(statement)} with options {statement[8:24].hex()[:8]}"].append(rank)
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


def _text(statement: bytes) -> str:
    return str(_STATED.unpack_from(statement)[2].rstrip(b"\0").decode(errors="replace"))


def _ranks(who: Sequence[int]) -> str:
    return ("rank " if len(who) == 1 else "ranks ") + ", ".join(map(str, who))


def _short(spec: str) -> str:
    return spec if len(spec) <= 60 else spec[:57] + "..."


def as_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
