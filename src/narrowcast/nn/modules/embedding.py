"""A table of vectors, each an encoded row.

`Embedding` is torch.nn.Embedding whose weight is uint8 [num_embeddings, row_bytes(embedding_dim)]. A lookup gathers the
rows it needs and decodes only these, to the module's dtype. What is left of torch's options are those that matter
without a gradient: `padding_idx` is kept as it was. `max_norm`, which changes rows as they are read, is not supported.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from narrowcast.errors import DtypeError
from narrowcast.nn.modules.base import OneWeight, as_bytes


class Embedding(OneWeight):
    """torch.nn.Embedding on encoded rows."""

    float_class = nn.Embedding
    padding_idx: int | None

    @property
    def num_embeddings(self) -> int:
        return self._held["weight"].shape[0]

    @property
    def embedding_dim(self) -> int:
        return self._held["weight"].shape[1]

    def forward(self, input: Tensor) -> Tensor:
        if input.dtype not in (torch.int32, torch.int64):
            kind = str(input.dtype).removeprefix("torch.")
            raise DtypeError(f"input: an embedding takes indices in int32 or int64, got {kind}. Pass input.long().")
        codec, shape = self._held["weight"][:2]
        rows = as_bytes(self.weight).index_select(0, input.reshape(-1))
        return codec.decode(rows, shape[1], self._float_dtype).view(*input.shape, shape[1])

    def extra_repr(self) -> str:
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}, codec={self.codec.spec!r}"
