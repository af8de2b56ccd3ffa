"""All layers of a step in one call of the compiled core: the bits of many calls, and who still sees each of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import narrowcast as nc
from cases import same_bits
from narrowcast.errors import ModelKindError
from narrowcast.generate import Decoder, Shape, fuse_, generate, random_decoder
from narrowcast.generate.cache import Cache
from narrowcast.generate.decoder import MLP, Attention, Layer
from narrowcast.generate.kernels import kernels_for
from narrowcast.generate.layers import EncodedLayers, whole_layers
from narrowcast.kernels.cpu.layers import Layers

CPU = torch.device("cpu")
SHAPE = Shape(192, 2, 6, 320, 64)
BIASED = Shape(192, 2, 6, 320, 64, key_heads=2, query_bias=True, out_bias=True, mlp_bias=True)
CODECS = (
    "int8",
    "int8:block=row",
    "int4",
    "nf4",
    "apot4",
    "int3",
    "sign",
    "fp8_e4m3:scale=none",
    "int4:zero_point=true",
)
PROMPTS = [[5, 17, 3], [9, 11, 2, 3, 4, 5, 6, 1], [1]]

kinds = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def encoded(shape: Shape, codec: str, dtype: torch.dtype, fused: bool = True) -> Decoder:
    decoder = random_decoder(shape, dtype=dtype)
    with torch.no_grad():
        for parameter in decoder.parameters():  # norms of one and biases of zero would hide a wrong address
            parameter.add_(
                torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)).to(dtype), alpha=0.1
            )
    nc.quantize_(decoder, codec)
    if fused:
        fuse_(decoder)
    return decoder


def held(decoder: Decoder, batch: int, dtype: torch.dtype) -> Cache:
    cache = Cache(decoder.shape, batch, 20, dtype, CPU)
    for tensor in (cache.keys, cache.values):
        tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1)))
    return cache


def step(decoder: Decoder, batch: int, dtype: torch.dtype, whole: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, keys and values after one token of each sequence."""
    cache, kernels = held(decoder, batch, dtype), kernels_for(decoder, CPU)
    layers, why = whole_layers(decoder, cache, kernels)
    assert layers is not None, why
    at, tokens = torch.arange(batch) + 3, torch.arange(batch) % decoder.shape.words
    with torch.inference_mode():
        logits = decoder.advance(tokens, at, cache, 20, kernels, layers if whole else None)
    return logits, cache.keys, cache.values


@kinds
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(("shape", "fused"), [(SHAPE, True), (SHAPE, False), (BIASED, True), (BIASED, False)])
def test_one_call_gives_the_bits_of_many(codec: str, shape: Shape, fused: bool, dtype: torch.dtype) -> None:
    decoder = encoded(shape, codec, dtype, fused)
    for batch in (1, 3, 9):  # rows as they are, and in tiles
        for one, many in zip(step(decoder, batch, dtype, True), step(decoder, batch, dtype, False), strict=True):
            assert one.isfinite().all()
            assert same_bits(one, many)


@kinds
def test_products_of_several_codecs_and_threads_change_no_bit(dtype: torch.dtype) -> None:
    decoder = random_decoder(Shape(768, 2, 12, 2048, 64), dtype=dtype)  # large enough for a team of threads
    nc.quantize_(decoder, "int4", rules={"k_proj": "int8", "up_proj": "nf4", "o_proj": "int8:block=row"})
    before, results = torch.get_num_threads(), []
    try:
        for threads, whole in ((1, True), (3, True), (3, False)):
            torch.set_num_threads(threads)
            results.append(step(decoder, 2, dtype, whole))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(same_bits(one, two) for one, two in zip(results[0], other, strict=True))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for every call of the core for all layers."""
    counted: list[int] = []
    plain = Layers.__call__

    def count(self: Layers, *given: Any) -> tuple[Tensor, Tensor]:
        counted.append(1)
        return plain(self, *given)

    monkeypatch.setattr(Layers, "__call__", count)
    return counted


def test_a_generation_takes_one_call_a_step_and_says_so(calls: list[int]) -> None:
    generation = generate(encoded(SHAPE, "int4", torch.bfloat16), PROMPTS, 6, stop_at_end=False)
    assert generation.layers == "native"
    generation.run()
    assert len(calls) == 5


def with_float_layer(decoder: Decoder) -> None:
    down = decoder.model.layers[1].mlp.down_proj
    decoder.model.layers[1].mlp.down_proj = nn.Linear(down.in_features, down.out_features).bfloat16()


def with_other_norm(decoder: Decoder) -> None:
    decoder.model.layers[1].input_layernorm.weight = nn.Parameter(torch.ones(96).bfloat16().repeat_interleave(4)[::2])


def with_norm_of_another_class(decoder: Decoder) -> None:
    class Own(nn.RMSNorm):
        pass

    decoder.model.layers[1].input_layernorm.__class__ = Own


OBSTACLES = [
    (with_float_layer, "layer 1: Linear is no"),
    (with_other_norm, "layer 1: dtypes, shapes or strides"),
    (with_norm_of_another_class, "layer 1: it, or a module of it, is of another class"),
]


@pytest.mark.parametrize(("change", "why"), OBSTACLES)
def test_what_the_core_does_not_take_goes_layer_by_layer_and_is_said(
    change: Callable[[Decoder], None], why: str, calls: list[int]
) -> None:
    decoder = encoded(SHAPE, "int4", torch.bfloat16)
    change(decoder)
    generation = generate(decoder, PROMPTS, 3, stop_at_end=False)
    generation.run()
    assert why in generation.layers
    assert not calls


def test_whoever_watches_sees_every_product(calls: list[int]) -> None:
    decoder = encoded(SHAPE, "int8", torch.float32)
    cache, kernels = held(decoder, 1, torch.float32), kernels_for(decoder, CPU)
    whole, _ = whole_layers(decoder, cache, kernels)
    assert isinstance(whole, EncodedLayers)

    def advance() -> Tensor:
        with torch.inference_mode():
            return decoder.advance(torch.tensor([1]), torch.tensor([3]), cache, 20, kernels, whole)

    alone, seen = advance(), []
    assert len(calls) == 1
    hook = decoder.model.layers[1].mlp.down_proj.register_forward_hook(lambda *given: seen.append(1))
    assert same_bits(advance(), alone)
    hook.remove()
    assert seen == [1]
    with torch.autocast("cpu", torch.bfloat16):
        assert not whole.takes(torch.zeros(1, 192))
    assert whole.takes(torch.zeros(1, 192))
    assert not whole.takes(torch.zeros(1, 192, dtype=torch.bfloat16))
    decoder.step = lambda *given: Layer.advance(*given)
    assert same_bits(advance(), alone)
    assert len(calls) == 1
    decoder.step = Layer.advance
    assert same_bits(advance(), alone)
    assert len(calls) == 2


CALLED = ["self_attn.o_proj", "mlp", "mlp.down_proj", "input_layernorm", "post_attention_layernorm"]


@pytest.mark.parametrize("name", CALLED)
@pytest.mark.parametrize("way", ["hook", "hook before", "hook of all modules", "forward"])
def test_a_module_that_was_given_a_hook_or_a_forward_runs_it_at_every_token(name: str, way: str) -> None:
    decoder, seen = encoded(SHAPE, "int8", torch.float32), []
    changed = decoder.model.layers[1].get_submodule(name)
    plain, handle = changed.forward, None

    def see(module: nn.Module, *given: Any) -> None:
        seen.append(module)

    def forward(x: Tensor) -> Tensor:
        seen.append(changed)
        return plain(x)

    if way == "hook":
        changed.register_forward_hook(see)
    elif way == "hook before":
        changed.register_forward_pre_hook(see)
    elif way == "forward":
        changed.forward = forward
    else:
        handle = nn.modules.module.register_module_forward_hook(see)
    try:
        generate(decoder, PROMPTS[:1], 5, stop_at_end=False).run()
    finally:
        if handle is not None:
            handle.remove()
    assert sum(module is changed for module in seen) == 5


class TurnedNorm(nn.RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).flip(-1)


class ScaledMLP(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return 3 * super().forward(x)


class DoubledMLP(nn.Module):
    """In place of an MLP, and nothing like it inside."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


class TurnedLayer(Layer):
    def mix(self, x: Tensor) -> Tensor:
        return super().mix(x).flip(-1)

    def advance(self, *given: Any) -> tuple[Tensor, Tensor]:
        x, delta = super().advance(*given)
        return x.flip(-1), delta.flip(-1)


def with_own_norm(decoder: Decoder) -> None:
    decoder.model.layers[1].input_layernorm.__class__ = TurnedNorm


def with_layer_norm(decoder: Decoder) -> None:
    norm = nn.LayerNorm(192)
    nn.init.normal_(norm.bias)
    decoder.model.layers[1].input_layernorm = norm


def with_norm_without_weight(decoder: Decoder) -> None:
    decoder.model.layers[1].input_layernorm = nn.RMSNorm(192, elementwise_affine=False)


def with_last_norm_of_another_class(decoder: Decoder) -> None:
    decoder.model.norm.__class__ = TurnedNorm


def with_own_mlp(decoder: Decoder) -> None:
    decoder.model.layers[1].mlp.__class__ = ScaledMLP


def with_foreign_mlp(decoder: Decoder) -> None:
    decoder.model.layers[1].mlp = DoubledMLP()


def with_own_layer(decoder: Decoder) -> None:
    decoder.model.layers[1].__class__ = TurnedLayer


@pytest.mark.parametrize(
    "change",
    [
        *(with_own_norm, with_layer_norm, with_norm_without_weight, with_last_norm_of_another_class),
        *(with_own_mlp, with_foreign_mlp, with_own_layer),
    ],
)
def test_tokens_go_through_modules_of_other_classes_as_prompts_do(change: Callable[[Decoder], None]) -> None:
    decoder = encoded(SHAPE, "int8", torch.float32)
    change(decoder)
    written = generate(decoder, [PROMPTS[1]], 6).run()[0]
    cache = Cache(decoder.shape, 1, 20, torch.float32, CPU)
    for count, token in enumerate(written):
        whole = torch.tensor(PROMPTS[1] + written[:count])
        with torch.inference_mode():
            assert decoder.prefill(whole, cache, 0).argmax() == token


@pytest.mark.parametrize("name", ["", "model", "model.layers.1", "model.layers.1.self_attn"])
@pytest.mark.parametrize("way", ["hook", "forward"])
def test_a_hook_that_would_never_run_is_refused(name: str, way: str) -> None:
    decoder = encoded(SHAPE, "int8", torch.float32)
    module = decoder.get_submodule(name)
    if way == "hook":
        module.register_forward_hook(lambda *given: None)
    else:
        module.forward = lambda x: x
    with pytest.raises(ModelKindError, match=f"decoder: {name or 'it'}, a .* which would not run"):
        generate(decoder, PROMPTS, 3)


def test_a_method_of_a_subclass_that_would_run_for_prompts_alone_is_refused() -> None:
    class Mixed(Layer):
        def mix(self, x: Tensor) -> Tensor:
            return 2 * super().mix(x)

    class Attending(Attention):
        def attend(self, *given: Any) -> Tensor:
            return 2 * super().attend(*given)

    for name, other in (("model.layers.1", Mixed), ("model.layers.1.self_attn", Attending)):
        decoder = encoded(SHAPE, "int8", torch.float32)
        decoder.get_submodule(name).__class__ = other
        with pytest.raises(ModelKindError, match=rf"{other.__name__}\.\w+ of model.layers.1 would run for prompts"):
            generate(decoder, PROMPTS, 3)


@pytest.mark.parametrize("codec", ["int8", None])
def test_linears_with_hooks_are_not_joined_and_said_so(codec: str | None) -> None:
    decoder, seen = random_decoder(SHAPE, dtype=torch.float32), []
    if codec is not None:
        nc.quantize_(decoder, codec)
    decoder.model.layers[1].mlp.up_proj.register_forward_hook(lambda *given: seen.append(1))
    joined, skips = fuse_(decoder)
    assert joined == 3
    assert "hooks" in skips["model.layers.1.mlp"]
    generate(decoder, PROMPTS[:1], 5, stop_at_end=False).run()
    assert len(seen) == 5


def test_weights_that_a_generation_began_with_stay_while_it_runs() -> None:
    decoder = encoded(SHAPE, "int4", torch.bfloat16)
    expected = generate(decoder, PROMPTS, 12).run()
    generation = generate(decoder, PROMPTS, 12)
    steps = iter(generation)
    next(steps)
    weight = decoder.model.layers[0].mlp.down_proj.weight
    weight.data = weight.data.clone()  # the memory before is freed but for what the generation keeps
    overwritten = [torch.full((1 << size,), 255, dtype=torch.uint8) for size in range(10, 20)]
    for _ in steps:
        pass
    assert generation.tokens == expected, len(overwritten)
