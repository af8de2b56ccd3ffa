"""A codec at work in one collective, with its seed, its meter and its buffers."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from narrowcast.codecs import Codec
from narrowcast.codecs import codec as as_codec
from narrowcast.distributed.stats import Meter
from narrowcast.distributed.transport.buffers import Buffers
from narrowcast.errors import DtypeError
from narrowcast.kernels import operators

_WORD = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15  # 2**64 over the golden ratio, as splitmix64 takes it


_LOSSLESS = {torch.float32: "raw", torch.float64: "raw", torch.float16: "fp16", torch.bfloat16: "bf16"}


@functools.cache
def lossless(dtype: torch.dtype) -> Codec:
    """The codec in which tensors of this dtype travel without loss; fp64 is rounded to fp32, as in every codec."""
    if dtype not in _LOSSLESS:
        raise DtypeError(
            f"gradients of {dtype} cannot travel: there are codecs for float32, float64, bfloat16 and float16. Keep "
            "parameters that are trained in one of these."
        )
    return as_codec(_LOSSLESS[dtype])


EXACT = {dtype: lossless(dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16)}
"""Codecs whose rows are the elements as they lie in memory, and padding."""


def bytes_of(elements: Tensor, codec: Codec, nbytes: int) -> Tensor | None:
    """The memory of `elements` [numel], where that is their row of `nbytes` in this codec."""
    if codec != EXACT.get(elements.dtype) or elements.nbytes != nbytes or not elements.is_contiguous():
        return None
    return elements.view(torch.uint8)


def derive_seed(seed: int, *words: int) -> int:
    """The seed of one use among many of `seed`: the step, the rank, the stage, the part. 63 bits.

    Each word is mixed by itself, then with all before it, one-to-one in both: two lists of words, or two seeds, however
    near to each other, lead to the same result about as often as two random numbers of 63 bits are equal.
    """
    mixed = _mix(seed)
    for word in words:
        mixed = _mix(mixed ^ _mix(word + _STEP))
    return _mix(mixed ^ len(words)) >> 1


def _mix(word: int) -> int:
    """splitmix64's finalizer: every bit of the result depends on every bit of the word; two words never meet."""
    word = (word + _STEP) & _WORD
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
    return word ^ (word >> 31)


class Encoder:
    """Encodes, decodes and sums rows, and counts what that costs. `seed` is this rank's own.

    Bytes are in buffers, and elements elsewhere: they share no memory, and need not be checked for it in each chunk.
    """

    def __init__(self, codec: Codec, seed: int, meter: Meter, buffers: Buffers, device: torch.device) -> None:
        self.codec = codec
        self.meter = meter
        self.buffers = buffers
        self.device = device
        self._seed = seed
        self._recipe = codec.recipe(device)

    def using(self, codec: Codec) -> Encoder:
        """The same, with another codec."""
        return Encoder(codec, self._seed, self.meter, self.buffers, self.device)

    def nbytes(self, rows: Tensor) -> int:
        """The bytes that `rows` [count, numel] encode to."""
        return len(rows) * self.codec.row_bytes(rows.shape[1])

    def encode(self, rows: Tensor, out: Tensor, *key: int) -> Tensor:
        """Encode `rows` [count, numel] into the bytes `out`. The key tells apart what is encoded in one collective."""
        if rows.numel():
            with self.meter.encode():
                target = out.view(len(rows), -1)
                if rows.is_contiguous():
                    operators.encode_(target, rows, self._recipe, self._seed_of(key))
                else:
                    self.codec.encode(rows, self._seed_of(key), out=target)
        return out

    def decode(self, data: Tensor, out: Tensor) -> None:
        """Decode the bytes `data` into `out` [count, numel]."""
        if out.numel():
            with self.meter.decode():
                if out.is_contiguous():
                    operators.decode_(out, data.view(len(out), -1), self._recipe)
                else:
                    self.codec.decode(data.view(len(out), -1), out.shape[1], out=out)

    def decode_sum(self, data: Tensor, own: Tensor, rank: int, divisor: int, out: Tensor) -> None:
        """Sum the rows of all ranks into `out` [numel]; this rank's own is exact."""
        if out.numel():
            with self.meter.decode():
                self.codec.decode_sum(data, out.numel(), own=own, own_rank=rank, divisor=divisor, out=out)

    def decode_sum_encode(self, data: Tensor, own: Tensor, rank: int, divisor: int, out: Tensor, *key: int) -> None:
        """`decode_sum`, encoded again, in one pass."""
        if own.numel():
            seed = self._seed_of(key)
            with self.meter.decode():
                self.codec.decode_sum_encode(data, own.numel(), seed, own=own, own_rank=rank, divisor=divisor, out=out)

    def take(self, name: str, nbytes: int) -> Tensor:
        return self.buffers.take(name, nbytes, self.device)

    def _seed_of(self, key: tuple[int, ...]) -> int:
        return derive_seed(self._seed, *key) if self.codec.stochastic else 0
