"""A Llama-like decoder whose names are those of transformers' checkpoints, for generating and nothing else.

`Decoder.prefill` reads the prompt of one sequence, `Decoder.advance` one token of each. Both return the logits of what
comes next and keep keys and values in a `Cache`. Modules are plain torch.nn, so `nc.quantize_`, `nc.load` and `nc.save`
know them; `fuse_` then joins the products that share an input. Norms, rotations and attention run in the dtype of the
activations.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from narrowcast.generate.cache import Cache
from narrowcast.generate.rotary import turn, turns
from narrowcast.generate.shape import Shape


class Attention(nn.Module):
    """Attention of several queries to each key. After `fuse_`, `joined` holds the three first products as one."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.key_heads, self.head_size = shape.heads, shape.key_heads, shape.head_size
        queries, keys = shape.heads * shape.head_size, shape.key_heads * shape.head_size
        self.q_proj = nn.Linear(shape.width, queries, bias=shape.query_bias)
        self.k_proj = nn.Linear(shape.width, keys, bias=shape.query_bias)
        self.v_proj = nn.Linear(shape.width, keys, bias=shape.query_bias)
        self.o_proj = nn.Linear(queries, shape.width, bias=shape.out_bias)
        self.joined: nn.Module | None = None

    def project(self, x: Tensor, by: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, each [batch, heads, time, head_size]; the first two turned."""
        if self.joined is None:
            queries, keys, values = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        else:
            own, shared = self.heads * self.head_size, self.key_heads * self.head_size
            queries, keys, values = self.joined(x).split((own, shared, shared), -1)
        return turn(self._by_head(queries), by), turn(self._by_head(keys), by), self._by_head(values)

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, seen: Tensor | None) -> Tensor:
        """[batch, time, width]. Without `seen`, each position attends to itself and those before it."""
        mixed = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=seen, is_causal=seen is None, enable_gqa=self.heads != self.key_heads
        )
        return self.o_proj(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def _by_head(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], -1, self.head_size).transpose(1, 2)


class MLP(nn.Module):
    """Two linear layers, the first of them gated. After `fuse_`, `joined` holds the gate and the first as one."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.width, shape.hidden, bias=shape.mlp_bias)
        self.up_proj = nn.Linear(shape.width, shape.hidden, bias=shape.mlp_bias)
        self.down_proj = nn.Linear(shape.hidden, shape.width, bias=shape.mlp_bias)
        self.joined: nn.Module | None = None

    def forward(self, x: Tensor) -> Tensor:
        gate, up = (self.gate_proj(x), self.up_proj(x)) if self.joined is None else self.joined(x).chunk(2, -1)
        return self.down_proj(F.silu(gate) * up)  # type: ignore[no-any-return]


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.width, shape.norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.width, shape.norm_eps)
        self.mlp = MLP(shape)

    def mix(self, x: Tensor) -> Tensor:
        """What follows attention."""
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]


class Body(nn.Module):
    """All but the output matrix: checkpoints have it under `model`."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.words, shape.width)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width, shape.norm_eps)


class Decoder(nn.Module):
    """A decoder of a given shape."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Body(shape)
        self.lm_head = nn.Linear(shape.width, shape.words, bias=False)
        if shape.tied:
            self.lm_head.weight = self.model.embed_tokens.weight
        self._turns: Tensor | None = None

    @property
    def weight_bytes(self) -> int:
        """What all parameters take, tied ones once."""
        return sum(parameter.nbytes for parameter in self.parameters())

    def turns_up_to(self, positions: int, device: torch.device) -> Tensor:
        """The rotations of the first positions, computed once for the longest that were asked for."""
        if self._turns is None or len(self._turns) < positions or self._turns.device != device:
            self._turns = turns(self.shape, positions).to(device)
        return self._turns[:positions]

    def prefill(self, tokens: Tensor, cache: Cache, sequence: int) -> Tensor:
        """Read the prompt `tokens` [time] of one sequence; the logits [words] of what follows it."""
        x = self.model.embed_tokens(tokens[None])
        by = self.turns_up_to(len(tokens), tokens.device)[None]
        for number, layer in enumerate(self._layers()):
            queries, keys, values = layer.self_attn.project(layer.input_layernorm(x), by)
            cache.prefill(number, sequence, keys, values)
            x = layer.mix(x + layer.self_attn.attend(queries, keys, values, None))
        return self.lm_head(self.model.norm(x[0, -1]))  # type: ignore[no-any-return]

    def advance(self, tokens: Tensor, at: Tensor, cache: Cache, longest: int) -> Tensor:
        """Read one token of each sequence, `tokens` [batch] at positions `at` [batch]; the logits [batch, words].

        `longest`: all positions are below it.
        """
        x = self.model.embed_tokens(tokens)[:, None]
        by = self.turns_up_to(cache.positions, tokens.device)[at][:, None]
        seen = cache.seen(at, longest)
        for number, layer in enumerate(self._layers()):
            queries, keys, values = layer.self_attn.project(layer.input_layernorm(x), by)
            cache.append(number, at, keys, values)
            known = cache.keys[number, :, :, :longest], cache.values[number, :, :, :longest]
            x = layer.mix(x + layer.self_attn.attend(queries, *known, seen))
        return self.lm_head(self.model.norm(x[:, 0]))  # type: ignore[no-any-return]

    def _layers(self) -> list[Layer]:
        return list(self.model.layers)  # type: ignore[arg-type]
