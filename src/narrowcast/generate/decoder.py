"""A Llama-like decoder whose names are those of transformers' checkpoints, for generating and nothing else.

`Decoder.prefill` reads the prompt of one sequence, `Decoder.advance` one token of each. Both return the logits of what
comes next and keep keys and values in a `Cache`. Modules are plain torch.nn, so `nc.quantize_`, `nc.load` and `nc.save`
know them; `fuse_` then joins the products that share an input. What `advance` does between products is that of a
`Kernels` (kernels.py). Norms, rotations and attention run in the dtype of the activations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from narrowcast.generate.cache import Cache
from narrowcast.generate.kernels import Kernels, Place, Torch, is_untouched
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

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of every position of x [..., width]: [..., heads * head_size] each."""
        if self.joined is None:
            return self.q_proj(x), self.k_proj(x), self.v_proj(x)
        own, shared = self.heads * self.head_size, self.key_heads * self.head_size
        return self.joined(x).split((own, shared, shared), -1)  # type: ignore[no-any-return]

    def turned(self, x: Tensor, by: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, each [batch, heads, time, head_size]; the first two turned."""
        queries, keys, values = (self._by_head(part) for part in self.project(x))
        return turn(queries, by), turn(keys, by), values

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """[batch, time, width]: each position attends to itself and those before it."""
        mixed = F.scaled_dot_product_attention(
            queries, keys, values, is_causal=True, enable_gqa=self.heads != self.key_heads
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

    def project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The gate, and what it is multiplied by."""
        return (self.gate_proj(x), self.up_proj(x)) if self.joined is None else self.joined(x).chunk(2, -1)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.project(x)
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

    def advance(
        self, x: Tensor, delta: Tensor | None, cache: tuple[Tensor, Tensor], place: Place, kernels: Kernels
    ) -> tuple[Tensor, Tensor]:
        """One position of each sequence. x + delta, [batch, width], comes in, and goes out, as its two terms."""
        x, y = kernels.add_norm(x, delta, self.input_layernorm)
        mixed = kernels.attend(self.self_attn.project(y), cache, place)
        x, y = kernels.add_norm(x, self.self_attn.o_proj(mixed), self.post_attention_layernorm)
        mlp = self.mlp
        if type(mlp) is not MLP or not is_untouched(mlp):
            return x, mlp(y)
        return x, mlp.down_proj(kernels.gate(*mlp.project(y)))


class Body(nn.Module):
    """All but the output matrix: checkpoints have it under `model`."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.words, shape.width)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width, shape.norm_eps)


class WholeLayers(Protocol):
    """All layers in one call (layers.py)."""

    def takes(self, x: Tensor) -> bool:
        """Whether a call would do what the layers do one by one."""

    def __call__(self, x: Tensor, at: Tensor, turns: Tensor) -> tuple[Tensor, Tensor]:
        """x [batch, width] at positions `at` through all layers: the two terms of what comes out."""


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
        self.step: Callable[..., tuple[Tensor, Tensor]] = Layer.advance
        """What a step calls for each layer: replace it by torch.compile of itself, for one."""

    @property
    def weight_bytes(self) -> int:
        """What all parameters take, tied ones once."""
        return sum(parameter.nbytes for parameter in self.parameters())

    def turns_up_to(self, positions: int, device: torch.device) -> Tensor:
        """The rotations of the first positions, computed once for the longest that were asked for."""
        if self._turns is None or len(self._turns) < positions or self._turns.device != device:
            with torch.inference_mode(False):  # they outlive a generation, and autograd takes no tensor made in one
                self._turns = turns(self.shape, positions).to(device)
        return self._turns[:positions]

    def prefill(self, tokens: Tensor, cache: Cache, sequence: int) -> Tensor:
        """Read the prompt `tokens` [time] of one sequence; the logits [words] of what follows it."""
        x = self.model.embed_tokens(tokens[None])
        by = self.turns_up_to(len(tokens), tokens.device)[None]
        for number, layer in enumerate(self._layers()):
            queries, keys, values = layer.self_attn.turned(layer.input_layernorm(x), by)
            cache.prefill(number, sequence, keys, values)
            x = layer.mix(x + layer.self_attn.attend(queries, keys, values))
        return self.lm_head(self.model.norm(x[0, -1]))  # type: ignore[no-any-return]

    def advance(
        self,
        tokens: Tensor,
        at: Tensor,
        cache: Cache,
        longest: int,
        kernels: Kernels | None = None,
        whole: WholeLayers | None = None,
    ) -> Tensor:
        """Read one token of each sequence, `tokens` [batch] at positions `at` [batch]; the logits [batch, words].

        `longest`: all positions are below it. `kernels`: by default plain torch. `whole`: in place of them, where it
        takes the call.
        """
        chosen = kernels or Torch()
        x: Tensor = self.model.embed_tokens(tokens)
        delta: Tensor | None = None
        turns = self.turns_up_to(cache.positions, tokens.device)
        if whole is not None and self.step is Layer.advance and whole.takes(x):
            x, delta = whole(x, at, turns)
        else:
            place = chosen.place(at, turns, longest)
            for number, layer in enumerate(self._layers()):
                given = x, delta, cache.layer(number), place, chosen
                x, delta = layer.advance(*given) if self.step is Layer.advance else self.step(layer, *given)
        return self.lm_head(chosen.add_norm(x, delta, self.model.norm)[1])  # type: ignore[no-any-return]

    def _layers(self) -> list[Layer]:
        return list(self.model.layers)  # type: ignore[arg-type]
