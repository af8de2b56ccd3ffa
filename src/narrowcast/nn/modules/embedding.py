"""A table of vectors, each an encoded row.

`Embedding` is torch.nn.Embedding whose weight is uint8 [num_embeddings, row_bytes(embedding_dim)]. A lookup gathers the
rows it needs and decodes only these, to the module's dtype. Of torch's options those matter that have a meaning
without a gradient: `padding_idx` is kept. `max_norm`, which changes rows as they are read, is not supported.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from narrowcast.codecs import Codec, checks
from narrowcast.errors import DtypeError
from narrowcast.nn.modules.base import OneWeight, as_bytes


class Embedding(OneWeight):
    """torch.nn.Embedding on encoded rows."""

    float_class = nn.Embedding
    padding_idx: int | None

    @property
    def num_embeddings(self) -> int:
        return self.held.shape[0]

    @property
    def embedding_dim(self) -> int:
        return self.held.shape[1]

    def forward(self, input: Tensor) -> Tensor:
        codec, shape = self.held[:2]
        return look_up_rows(input, as_bytes(self.weight), codec, shape[1], self.dtype)


def look_up_rows(index: Tensor, rows: Tensor, codec: Codec, numel: int, dtype: torch.dtype) -> Tensor:
    """The vectors [*index.shape, numel] of encoded `rows` that `index` names."""
    if index.dtype not in (torch.int32, torch.int64):
        kind = checks.dtype_name(index.dtype)
        raise DtypeError(f"input: an embedding takes indices in int32 or int64, got {kind}. Pass input.long().")
    picked = rows.index_select(0, index.reshape(-1))
    return codec.decode(picked, numel, dtype).view(*index.shape, numel)
