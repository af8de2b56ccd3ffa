"""The weights of a checkpoint as `narrowcast inspect` sees them: matrices of rows, read a few rows at a time.

They are the tensors that `narrowcast quantize` would encode without rules, in the same rows, and those that are encoded
already, which are decoded as they are read. Files are mapped: memory holds the rows that are being looked at.
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
    """A tensor that can be quantized, or is."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    codec: Codec | None
    """What it is encoded in; None for plain floats."""
    rows: int
    columns: int
    open: Callable[[], Callable[[int, int], Tensor]]
    """Maps the tensor, and gives a function that reads rows from one number up to another: floats [rows, columns]."""

    @property
    def module(self) -> str:
        """The name that rules are matched against."""
        return module_name(self.name)


def weights_in(path: Path) -> tuple[list[Weight], int]:
    """The weights of a file or folder, and how many other tensors there are."""
    checkpoint = read(path)
    found = [weight for name in checkpoint.stored if (weight := _weight(checkpoint, name)) is not None]
    return found, len(checkpoint.stored) - len(found)


def _weight(checkpoint: Checkpoint, name: str) -> Weight | None:
    stored, encoding = checkpoint.stored[name], checkpoint.encodings.get(name)
    if encoding is not None:
        rows, columns = math.prod(stored.shape[:-1]), math.prod(encoding.shape[len(stored.shape) - 1 :])
        opener = partial(_encoded, checkpoint, name, encoding.codec, columns)
        return Weight(name, tuple(encoding.shape), encoding.dtype, encoding.codec, rows, columns, opener)
    choice = choose(name, stored, compile_rules(None, "int8"))
    if choice.codec is None:
        return None
    rows, columns = math.prod(stored.shape[: choice.lead]), math.prod(stored.shape[choice.lead :])
    opener = partial(_plain, checkpoint, name, rows, columns)
    return Weight(name, stored.shape, stored.dtype, None, rows, columns, opener)


def _plain(checkpoint: Checkpoint, name: str, rows: int, columns: int) -> Callable[[int, int], Tensor]:
    tensor = checkpoint.tensor(name).view(rows, columns)
    return lambda start, stop: tensor[start:stop]


def _encoded(checkpoint: Checkpoint, name: str, codec: Codec, columns: int) -> Callable[[int, int], Tensor]:
    data = checkpoint.tensor(name).flatten(0, -2)
    return lambda start, stop: codec.decode(data[start:stop], columns)
