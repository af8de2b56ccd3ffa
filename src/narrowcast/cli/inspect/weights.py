"""The weights of a checkpoint as `narrowcast inspect` reads them: matrices of rows, a few rows at a time.

They are the tensors that `narrowcast quantize` would encode without rules, in the same rows. Tensors that are encoded
already are decoded as they are read. Files are mapped: memory holds only the rows that are being measured.
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
    open: Callable[[], Callable[[int, int], Tensor]]
    """Maps the tensor. Returns a function of (start, stop) that reads these rows as floats [stop - start, columns]."""

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
        opener = partial(_open_encoded, checkpoint, name, encoding.codec, columns)
        return Weight(name, tuple(encoding.shape), encoding.dtype, encoding.codec, rows, columns, opener)
    choice = choose(name, stored, compile_rules(None, "int8"))
    if choice.codec is None:
        return None
    rows, columns = math.prod(stored.shape[: choice.lead]), math.prod(stored.shape[choice.lead :])
    opener = partial(_open_plain, checkpoint, name, rows, columns)
    return Weight(name, stored.shape, stored.dtype, None, rows, columns, opener)


def _open_plain(checkpoint: Checkpoint, name: str, rows: int, columns: int) -> Callable[[int, int], Tensor]:
    tensor = checkpoint.tensor(name).view(rows, columns)
    return lambda start, stop: tensor[start:stop]


def _open_encoded(checkpoint: Checkpoint, name: str, codec: Codec, columns: int) -> Callable[[int, int], Tensor]:
    data = checkpoint.tensor(name).flatten(0, -2)
    return lambda start, stop: codec.decode(data[start:stop], columns)
