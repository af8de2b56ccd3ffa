"""The weights of a checkpoint as `narrowcast inspect` reads them: matrices of rows, a few rows at a time.

They are the tensors that `narrowcast quantize` would encode without rules, in the same rows. Tensors that are encoded
already are decoded as they are read. Memory holds only the rows that are being measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from narrowcast.checkpoint.reading import Checkpoint, read
from narrowcast.checkpoint.selection import choose, module_name
from narrowcast.codecs import Codec
from narrowcast.codecs.rules import compile_rules


class Weight(NamedTuple):
    """A tensor that is quantized, or can be."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    codec: Codec | None
    """The codec that it is encoded with; None for plain floats."""
    rows: int
    columns: int
    read: Callable[[int, int], Tensor]
    """Of (start, stop): these rows as floats [stop - start, columns]."""

    @property
    def module(self) -> str:
        """The name that rules are matched against."""
        return module_name(self.name)


def weights_in(path: Path) -> tuple[list[Weight], int]:
    """The weights of a file or folder, and the number of its other tensors."""
    checkpoint = read(path)
    weights = [weight for name in checkpoint.stored if (weight := _weight(checkpoint, name)) is not None]
    return weights, len(checkpoint.stored) - len(weights)


def _weight(checkpoint: Checkpoint, name: str) -> Weight | None:
    stored, encoding = checkpoint.stored[name], checkpoint.encodings.get(name)
    if encoding is not None:
        rows, columns = math.prod(stored.shape[:-1]), math.prod(encoding.shape[len(stored.shape) - 1 :])
        read = partial(_read_encoded, checkpoint, name, encoding.codec, columns)
        return Weight(name, tuple(encoding.shape), encoding.dtype, encoding.codec, rows, columns, read)
    choice = choose(name, stored, compile_rules(None, "int8"))
    if choice.codec is None:
        return None
    rows, columns = math.prod(stored.shape[: choice.lead]), math.prod(stored.shape[choice.lead :])
    return Weight(
        name, stored.shape, stored.dtype, None, rows, columns, partial(_read_plain, checkpoint, name, columns)
    )


def _read_plain(checkpoint: Checkpoint, name: str, columns: int, start: int, stop: int) -> Tensor:
    return checkpoint.read(name, start * columns, stop * columns).view(stop - start, columns)


def _read_encoded(checkpoint: Checkpoint, name: str, codec: Codec, columns: int, start: int, stop: int) -> Tensor:
    size = codec.row_bytes(columns)
    return codec.decode(checkpoint.read(name, start * size, stop * size).view(stop - start, size), columns)
