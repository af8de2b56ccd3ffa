"""Encoded tensors, and the functions that make and read them.

A tensor is encoded as one row; with `block=row`, each vector of its last dimension is a row. A `Payload` holds those
rows end to end, and the codec, shape and dtype to decode them with. Its bytes have no header: files and messages that
need one write their own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from narrowcast.codecs import Codec, checks
from narrowcast.codecs import codec as as_codec
from narrowcast.errors import DtypeError, PayloadError, ShapeError


@dataclass(eq=False, slots=True)
class Payload:
    """An encoded tensor: bytes, and how to read them."""

    data: Tensor
    """The encoded rows end to end: 1-D, uint8."""
    codec: Codec
    shape: torch.Size
    dtype: torch.dtype

    def __post_init__(self) -> None:
        if not isinstance(self.data, Tensor) or self.data.dtype != torch.uint8 or self.data.dim() != 1:
            raise PayloadError("data: a payload's bytes are a 1-D uint8 tensor. Pass data.view(torch.uint8).flatten().")
        if not isinstance(self.codec, Codec):
            raise PayloadError(f"codec={self.codec!r}: expected a Codec. Pass narrowcast.codec({self.codec!r}).")
        checks.float_dtype(self.dtype, "dtype")
        expected = payload_bytes(self.codec, self.shape)
        if self.data.numel() != expected:
            raise PayloadError(
                f"data: a tensor of shape {tuple(self.shape)} takes {expected} bytes in codec {self.codec.spec!r}, "
                f"got {self.data.numel()}. The bytes were cut or padded, or the codec or shape is another one."
            )

    @property
    def nbytes(self) -> int:
        return self.data.numel()

    @property
    def device(self) -> torch.device:
        return self.data.device

    def to(self, device: torch.device | str) -> Payload:
        """The same bytes on another device."""
        return Payload(self.data.to(device), self.codec, self.shape, self.dtype)

    def __repr__(self) -> str:
        return (
            f"Payload({self.codec.spec!r}, shape={tuple(self.shape)}, dtype={self.dtype}, "
            f"nbytes={self.nbytes}, device={str(self.device)!r})"
        )


class Encoding(NamedTuple):
    """What the encoded rows under a key of a state dict decode to: the codec, the original shape and dtype."""

    codec: Codec
    shape: torch.Size
    dtype: torch.dtype


@dataclass(eq=False, slots=True)
class EncodedRows:
    """A weight whose rows are encoded one by one, as modules hold it and files store it.

    A weight of shape [out, in], or [experts, out, in], has a row for every vector of its last dimension. A
    convolution's [out, in, height, width] has one for every output: the dimensions that `data` lacks lie inside a row.
    """

    data: Tensor
    """uint8, [*shape[:n], row_bytes(product of shape[n:])] for some n of at least 1."""
    codec: Codec
    shape: torch.Size
    dtype: torch.dtype

    def __post_init__(self) -> None:
        lead = self.data.shape[:-1]
        fits = self.data.dtype == torch.uint8 and 1 <= len(lead) < len(self.shape) and self.shape[: len(lead)] == lead
        if not fits or self.data.shape[-1] != self.codec.row_bytes(self.numel):
            raise PayloadError(
                f"data: the rows of a weight of shape {tuple(self.shape)} in codec {self.codec.spec!r} are uint8, each "
                f"of {self.codec.row_bytes(self.numel)} bytes, got {checks.describe(self.data)}. "
                f"The bytes are another weight's, another codec's, or cut."
            )

    @property
    def numel(self) -> int:
        """The elements of one row."""
        return math.prod(self.shape[self.data.dim() - 1 :])

    @property
    def nbytes(self) -> int:
        return self.data.numel()

    def decode(self, dtype: torch.dtype | None = None) -> Tensor:
        """The weight, in `dtype` or its own."""
        return self.codec.decode(self.data, self.numel, dtype or self.dtype).view(self.shape)


def encode_rows(weight: Tensor, codec: str | Codec | Mapping[str, Any], *, lead: int | None = None) -> EncodedRows:
    """Encode a weight row by row: each vector of its last dimension, or all that its first `lead` dimensions index."""
    chosen = as_codec(codec)
    checks.float_rows(weight, "weight")
    lead = weight.dim() - 1 if lead is None else lead
    rows = weight.detach().reshape(*weight.shape[:lead], math.prod(weight.shape[lead:]))
    return EncodedRows(chosen.encode(rows, 0), chosen, weight.shape, weight.dtype)


def encode(x: Tensor, codec: str | Codec | Mapping[str, Any], *, seed: int | None = None) -> Payload:
    """Encode a float tensor of any shape.

    >>> payload = encode(torch.randn(1000), "int4")
    >>> payload.nbytes
    544
    """
    chosen = as_codec(codec)
    checks.float_rows(x, "x")
    rows = chosen.encode_matrix(chosen.as_rows(checks.plain(x)), seed)
    return Payload(rows.view(-1), chosen, x.shape, x.dtype)


def decode(payload: Payload, *, out: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Decode a payload, into `out` where given, else into a new tensor of `dtype` (default: the original's)."""
    if not isinstance(payload, Payload):
        raise PayloadError(f"payload: expected a Payload from encode(), got {type(payload).__name__}.")
    codec, shape = payload.codec, payload.shape
    rows, numel = _matrix(codec, shape)
    data = payload.data.view(rows, -1) if rows else payload.data.view(0, codec.row_bytes(numel))
    if out is None:
        return codec.decode(data, numel, dtype or payload.dtype).view(shape)
    checks.out(out, tuple(shape), checks.FLOATS, payload.device)
    if dtype not in (None, out.dtype):
        raise DtypeError(f"dtype={dtype}: out is {out.dtype}. Drop dtype=, or pass an out of that dtype.")
    if out.is_contiguous():
        codec.decode(data, numel, out=out.view(rows, numel))
    else:
        out.copy_(codec.decode(data, numel, out.dtype).view(shape))
    return out


def payload_bytes(codec: Codec, shape: torch.Size) -> int:
    """The bytes that a tensor of this shape takes."""
    rows, numel = _matrix(codec, shape)
    return rows * codec.row_bytes(numel)


def _matrix(codec: Codec, shape: torch.Size) -> tuple[int, int]:
    """How many rows a tensor of this shape has, and how long each is."""
    for size in shape:
        if size < 0:
            raise ShapeError(f"shape={tuple(shape)}: sizes are zero or more.")
    if codec.block != "row" or not shape:
        return 1, math.prod(shape)
    return math.prod(shape[:-1]), shape[-1]
