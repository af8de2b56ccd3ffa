"""Products that share an input, as one product on joined rows.

Rows of one codec are independent of each other, so the rows of several weights, one after the other, are the rows of
the joined weight, byte for byte. Queries, keys and values of an attention become one product, the gate and the first
layer of an MLP another: fewer calls and launches for each token.

Weights of different codecs are left as they are; `fuse_` says which and why. A fused model has other names in its state
dict: save it before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from narrowcast.generate.decoder import MLP, Attention, Decoder
from narrowcast.generate.kernels import is_changed
from narrowcast.nn.modules.base import Held, as_parameter, begin, float_dtype_of, hold
from narrowcast.nn.modules.linear import Linear


class Fused(NamedTuple):
    """What `fuse_` did."""

    joined: int
    """Products that stand for several."""
    skips: dict[str, str]
    """Modules that were left as they are, with the reason."""


def fuse_(decoder: Decoder) -> Fused:
    """Join what shares an input, in place, layer by layer."""
    joined, skips = 0, {}
    for name, module in decoder.named_modules():
        if not isinstance(module, Attention | MLP) or module.joined is not None:
            continue
        parts = ("q_proj", "k_proj", "v_proj") if isinstance(module, Attention) else ("gate_proj", "up_proj")
        linears = [module.get_submodule(part) for part in parts]
        result = join(linears)
        if isinstance(result, str):
            skips[name] = result
            continue
        module.joined = result
        joined += 1
        for part in parts:
            delattr(module, part)
    return Fused(joined, skips)


def join(modules: Sequence[nn.Module]) -> nn.Module | str:
    """One Linear whose outputs are those of all modules, one after the other; or why there cannot be one."""
    if any(is_changed(module) for module in modules):
        return "some of its modules have hooks, or a forward of their own"
    plain = [module for module in modules if type(module) is nn.Linear]
    encoded = [module for module in modules if type(module) is Linear]
    if len(plain) == len(modules):
        biases = [module.bias for module in plain]
        return _same_bias(biases) or _join_floats(plain)
    if len(encoded) == len(modules):
        specs = sorted({module.codec.spec for module in encoded})
        if len(specs) > 1:
            return f"its weights are of several codecs: {', '.join(specs)}"
        return _same_bias([module.bias for module in encoded]) or _join_rows(encoded)
    kinds = sorted({f"{type(module).__module__}.{type(module).__name__}" for module in modules})
    return f"its modules are not all of one kind: {', '.join(kinds)}"


def _same_bias(biases: Sequence[Tensor | None]) -> str:
    """Why biases cannot be joined; empty where they can."""
    return "some of its modules have a bias and others none" if len({bias is None for bias in biases}) > 1 else ""


def _join_floats(linears: Sequence[nn.Linear]) -> nn.Linear:
    weight = nn.Parameter(torch.cat([linear.weight.detach() for linear in linears]), requires_grad=False)
    whole = nn.Linear(weight.shape[1], len(weight), bias=False, device="meta", dtype=weight.dtype)
    whole.weight = weight
    whole.register_parameter("bias", _join_biases([linear.bias for linear in linears]))
    return whole


def _join_rows(linears: Sequence[Linear]) -> Linear:
    first, rows = linears[0], as_parameter(torch.cat([linear.weight for linear in linears]))
    whole = Linear.__new__(Linear)
    nn.Module.__init__(whole)
    begin(whole, nn.Linear, float_dtype_of(first))
    hold(whole, "weight", rows, Held(first.codec, torch.Size((len(rows), first.in_features)), trained=False))
    whole.register_parameter("bias", _join_biases([linear.bias for linear in linears]))
    return whole


def _join_biases(biases: Sequence[Tensor | None]) -> nn.Parameter | None:
    present = [bias.detach() for bias in biases if bias is not None]
    return nn.Parameter(torch.cat(present), requires_grad=False) if present else None
