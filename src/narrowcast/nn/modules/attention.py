"""Multi-head attention whose projections are encoded rows.

`MultiheadAttention` is torch.nn.MultiheadAttention with any of its projections encoded: `in_proj_weight` (the rows for
queries, then keys, then values), or `q_proj_weight`, `k_proj_weight` and `v_proj_weight`, and `out_proj`. It computes
what torch's module computes outside of its fast path, for every option. Nested tensors are refused: only the fast path
takes them.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from narrowcast.codecs import checks
from narrowcast.errors import DtypeError, ShapeError
from narrowcast.nn.modules.base import Encoded, encoded_parameters
from narrowcast.nn.modules.linear import linear_on_rows

PACKED = "in_proj_weight"
APART = ("q_proj_weight", "k_proj_weight", "v_proj_weight")


class MultiheadAttention(Encoded):
    """torch.nn.MultiheadAttention with encoded projections."""

    float_class = nn.MultiheadAttention
    embed_dim: int
    num_heads: int
    head_dim: int
    dropout: float
    batch_first: bool
    add_zero_attn: bool
    in_proj_weight: nn.Parameter | None
    in_proj_bias: nn.Parameter | None
    bias_k: nn.Parameter | None
    bias_v: nn.Parameter | None
    out_proj: nn.Module

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        if is_causal and attn_mask is None:
            raise ShapeError(
                "is_causal=True: a hint that attn_mask is the causal mask, and there is none. Pass attn_mask= too, for "
                "example torch.nn.Transformer.generate_square_subsequent_mask(length)."
            )
        batched = query.dim() == 3
        q, k, v = (self._heads(x) for x in self._extended(*self._projected(query, key, value, batched)))
        # Torch's own condition: where the hint can be taken, the mask is not read.
        hint = is_causal and key_padding_mask is None and not need_weights
        mask = None if hint else self._mask(attn_mask, key_padding_mask, q, k)
        dropout = self.dropout if self.training else 0.0
        weights: Tensor | None = None
        if need_weights:
            scores = (q * math.sqrt(1.0 / self.head_dim)) @ k.transpose(-2, -1)
            weights = F.dropout((scores if mask is None else scores + mask).softmax(-1), dropout)
            mixed = weights @ v
            weights = weights.mean(1) if average_attn_weights else weights
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, mask, dropout, hint)
        out = self.out_proj(mixed.transpose(1, 2).flatten(2))
        if not batched:
            return out.squeeze(0), None if weights is None else weights.squeeze(0)
        return out if self.batch_first else out.transpose(0, 1), weights

    @property
    def _qkv_same_embed_dim(self) -> bool:
        """Asked by nn.TransformerEncoderLayer before its fast path, which would read the rows as floats: never."""
        return False

    # -- projections: [batch, length, embed_dim] from here on ------------------------------------------------------

    def _projected(self, query: Tensor, key: Tensor, value: Tensor, batched: bool) -> tuple[Tensor, Tensor, Tensor]:
        if query.is_nested or query.dim() not in (2, 3) or not query.dim() == key.dim() == value.dim():
            kinds = ["nested" if x.is_nested else list(x.shape) for x in (query, key, value)]
            raise ShapeError(
                "query, key, value: expected three tensors of 3 dimensions, or of 2 without a batch, got "
                f"{', '.join(map(str, kinds))}. Nested tensors only go with unquantized attention: pad them. An "
                "nn.TransformerEncoder makes them unless quantize_ was called on it, or on a model around it."
            )
        if query is key and key is value and self.in_proj_weight is not None:
            packed = self._project(self._batch_first(query, batched), PACKED, slice(None), slice(None))
            q, k, v = packed.chunk(3, -1)
            return q, k, v
        projected = []
        for place, x in enumerate((query, key, value)):
            third = slice(place * self.embed_dim, (place + 1) * self.embed_dim)
            name, rows = (PACKED, third) if self.in_proj_weight is not None else (APART[place], slice(None))
            projected.append(self._project(self._batch_first(x, batched), name, rows, third))
        return projected[0], projected[1], projected[2]

    def _batch_first(self, x: Tensor, batched: bool) -> Tensor:
        if not batched:
            return x.unsqueeze(0)
        return x if self.batch_first else x.transpose(0, 1)

    def _project(self, x: Tensor, name: str, rows: slice, of_bias: slice) -> Tensor:
        weight = getattr(self, name)[rows]
        bias = None if self.in_proj_bias is None else self.in_proj_bias[of_bias]
        held = encoded_parameters(self).get(name)
        if held is None:
            return F.linear(x, weight, bias)
        return linear_on_rows(x, weight, held.codec, held.shape[1], bias)

    def _extended(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values, with the ones that `bias_k`, `bias_v` and `add_zero_attn` add behind them."""
        if self.bias_k is not None and self.bias_v is not None:
            k = torch.cat([k, self.bias_k.to(k.dtype).expand(len(k), 1, -1)], 1)
            v = torch.cat([v, self.bias_v.to(v.dtype).expand(len(v), 1, -1)], 1)
        if self.add_zero_attn:
            k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
        return q, k, v

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.num_heads, self.head_dim).transpose(1, 2)

    # -- masks -----------------------------------------------------------------------------------------------------

    def _mask(self, attn_mask: Tensor | None, key_padding_mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
        """What is added to scores [batch, heads, length of q, length of k]."""
        batch, heads, length = q.shape[:3]
        added = int(self.bias_k is not None) + int(self.add_zero_attn)
        source = k.shape[2] - added
        total: Tensor | None = None
        if attn_mask is not None:
            if tuple(attn_mask.shape) not in ((length, source), (batch * heads, length, source)):
                raise ShapeError(
                    f"attn_mask: expected [{length}, {source}], or one for every head of the batch "
                    f"[{batch * heads}, {length}, {source}], got {list(attn_mask.shape)}."
                )
            total = _additive(attn_mask, "attn_mask", q.dtype, added)
            total = total.view(batch, heads, length, -1) if attn_mask.dim() == 3 else total
        if key_padding_mask is not None:
            if tuple(key_padding_mask.shape) not in ((batch, source), (source,)):
                raise ShapeError(f"key_padding_mask: expected [{batch}, {source}], got {list(key_padding_mask.shape)}.")
            padding = _additive(key_padding_mask, "key_padding_mask", q.dtype, added).view(-1, 1, 1, k.shape[2])
            total = padding if total is None else total + padding
        return total

    def extra_repr(self) -> str:
        codecs = {name: held.codec.spec for name, held in encoded_parameters(self).items()}
        return f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, codecs={codecs}"


def _additive(mask: Tensor, argument: str, dtype: torch.dtype, added: int) -> Tensor:
    """A mask as floats to add to the scores; `added` keys behind it are not masked."""
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, -math.inf)
    elif not mask.is_floating_point():
        kind = checks.dtype_name(mask.dtype)
        raise DtypeError(f"{argument}: expected bool (True is left out) or floats to add, got {kind}.")
    return F.pad(mask.to(dtype), (0, added))
