"""All layers of a step in one call of the compiled core, where a CPU and encoded rows allow it.

Between the products of a small decoder Python takes as long as the products do. The core makes the same calls itself
(kernels/cpu/layers.py). `whole_layers` says why it does not where it does not: each linear must be a plain
`nc.nn.Linear`, and norms, biases and the cache of one dtype. Weights are read where they lie when a generation begins.
Whoever watches (hooks, a module's own forward, autocast, a profiler, a mode of torch's dispatcher) sees the layers one
by one.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from narrowcast.generate.cache import Cache
from narrowcast.generate.decoder import MLP, Attention, Decoder, Layer
from narrowcast.generate.kernels import Compiled, Kernels, is_untouched
from narrowcast.kernels.cpu.binding import DTYPES, Native
from narrowcast.kernels.cpu.layers import LayerParts, Layers, Product
from narrowcast.kernels.operators.dispatch import kernel_for, unwatched
from narrowcast.nn.modules.linear import Linear


class EncodedLayers:
    """`WholeLayers` (decoder.py) of one decoder with the cache of one generation."""

    def __init__(self, core: Layers, replaced: list[nn.Module]) -> None:
        self._core, self._replaced = core, replaced
        """`_replaced`: modules that a call of the core stands for."""

    def takes(self, x: Tensor) -> bool:
        return (
            x.dtype == self._core.dtype
            and unwatched(x)
            and not torch.is_autocast_enabled("cpu")
            and all(is_untouched(module) for module in self._replaced)
        )

    def __call__(self, x: Tensor, at: Tensor, turns: Tensor) -> tuple[Tensor, Tensor]:
        return self._core(x, at, turns)


def whole_layers(decoder: Decoder, cache: Cache, kernels: Kernels) -> tuple[EncodedLayers | None, str]:
    """All layers as one call and "native", or None and the reason."""
    if not isinstance(kernels, Compiled):
        return None, f"what runs between products is {kernels.name}"
    if torch.is_autocast_enabled("cpu"):
        return None, "under autocast, each product chooses its dtype"
    core, dtype = kernel_for("cpu"), cache.keys.dtype
    assert isinstance(core, Native)
    if cache.batch > core.max_batch[dtype]:
        return None, f"{cache.batch} sequences: for more than {core.max_batch[dtype]}, weights are decoded"
    parts, replaced = [], list[nn.Module]()
    for number, layer in enumerate(decoder.model.layers):
        if not is_plain(layer):
            return None, f"layer {number}: it, or a module of it, is of another class than the decoder's own"
        assert isinstance(layer, Layer)
        own = linears_of(layer)
        for linear in own:
            if type(linear) is not Linear:
                return None, f"layer {number}: {type(linear).__name__} is no Linear on encoded rows"
        described = parts_of(layer, cache, number)
        if not fits(described, dtype, layer.self_attn):
            return None, f"layer {number}: dtypes, shapes or strides are not those of a layer of {dtype}"
        parts.append(described)
        replaced += [*own, layer.input_layernorm, layer.post_attention_layernorm, layer.mlp]
    return EncodedLayers(Layers(core, dtype, parts), replaced), "native"


def is_plain(layer: nn.Module) -> bool:
    """Whether a layer is of the decoder's own classes, norms with weights included."""
    if type(layer) is not Layer or type(layer.self_attn) is not Attention or type(layer.mlp) is not MLP:
        return False
    norms = layer.input_layernorm, layer.post_attention_layernorm
    return all(type(norm) is nn.RMSNorm and norm.elementwise_affine for norm in norms)


def linears_of(layer: Layer) -> list[nn.Module]:
    attention, mlp = layer.self_attn, layer.mlp
    first = [attention.q_proj, attention.k_proj, attention.v_proj] if attention.joined is None else [attention.joined]
    second = [mlp.gate_proj, mlp.up_proj] if mlp.joined is None else [mlp.joined]
    return [*first, attention.o_proj, *second, mlp.down_proj]


def parts_of(layer: Layer, cache: Cache, number: int) -> LayerParts:
    *products, narrow = (_product(linear) for linear in linears_of(layer))
    count = 3 if layer.self_attn.joined is None else 1
    norms = layer.input_layernorm, layer.post_attention_layernorm
    first, second = ((norm.weight, norm.eps or 0.0) for norm in norms)
    return LayerParts(
        (first, second), products[:count], products[count], products[count + 1 :], narrow, *cache.layer(number)
    )


def _product(linear: nn.Module) -> Product:
    assert isinstance(linear, Linear)
    rows = linear.weight
    return Product(rows, linear.codec.recipe(rows.device), linear.in_features, linear.bias)


def fits(layer: LayerParts, dtype: torch.dtype, attention: Attention) -> bool:
    """Whether the core may be given these addresses: every tensor of the dtype and size that it takes it for."""
    queries, keys = attention.heads * attention.head_size, attention.key_heads * attention.head_size
    width, hidden = layer.out.rows.shape[0], layer.narrow.numel
    project = [queries + 2 * keys] if len(layer.project) == 1 else [queries, keys, keys]
    widen = [2 * hidden] if len(layer.widen) == 1 else [hidden, hidden]
    sizes = [
        *((rows, width) for rows in project),
        (width, queries),
        *((rows, width) for rows in widen),
        (width, hidden),
    ]
    products = layer.products()
    rows_fit = all(
        (len(one.rows), one.numel) == size
        and one.rows.dtype == torch.uint8
        and one.rows.is_cpu
        and one.rows.is_contiguous()
        and (one.bias is None or (one.bias.shape == one.rows.shape[:1] and one.bias.is_contiguous()))
        and (one.bias is None or one.bias.dtype in DTYPES)
        for one, size in zip(products, sizes, strict=True)
    )
    norms_fit = all(
        weight.dtype == dtype and weight.shape == (width,) and weight.is_contiguous() and eps > 0
        for weight, eps in layer.norms
    )
    return rows_fit and norms_fit and layer.keys.dtype == dtype and layer.keys.stride() == layer.values.stride()
