"""The decoder, beside transformers' own Llama and Qwen2 on the same checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import narrowcast as nc
from narrowcast.generate import Decoder, Sampling, Shape, fuse_, generate, load_decoder, random_decoder
from narrowcast.generate.cache import Cache
from narrowcast.generate.sampling import NONE

transformers = pytest.importorskip("transformers")
import small_llama  # noqa: E402

SIZES = small_llama.SMALL | {"max_position_embeddings": 128, "eos_token_id": 7}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "tied": ("Llama", {"tie_word_embeddings": True}),
    "biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "one key for all": ("Llama", {"num_key_value_heads": 1}),
    "llama 3": ("Llama", {"rope_parameters": LLAMA3}),
    "linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "wide heads": ("Llama", {"head_dim": 32}),
    "qwen2": ("Qwen2", {}),
    "mistral": ("Mistral", {"sliding_window": None}),
}
PROMPTS = [[5, 17, 3, 88], [42, 9, 11, 2, 3, 4, 5, 6, 1], [1]]


def reference(kind: str, folder: Path) -> nn.Module:
    """A model of transformers with random weights, saved to the folder; then in fp64, norms too.

    The norms of transformers round to fp32 on their way: with torch's in their place nothing does.
    """
    family, options = KINDS[kind]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES | options)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    model.save_pretrained(folder)
    model.double()
    for name, module in [*model.named_modules()]:
        if type(module).__name__.endswith("RMSNorm"):
            norm = nn.RMSNorm(module.weight.shape, module.variance_epsilon, dtype=torch.float64)
            norm.weight = module.weight
            model.set_submodule(name, norm)
    return model


def logits_of(decoder: Decoder, tokens: list[int]) -> torch.Tensor:
    """Logits after every token: the first by `prefill`, the others by `advance`."""
    cache = Cache(decoder.shape, 1, len(tokens), torch.float64, torch.device("cpu"))
    with torch.no_grad():
        rows = [decoder.prefill(torch.tensor(tokens[:1]), cache, 0)]
        for at in range(1, len(tokens)):
            rows += decoder.advance(torch.tensor(tokens[at : at + 1]), torch.tensor([at]), cache, at + 1)
    return torch.stack(rows)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_texts_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    model = reference(kind, tmp_path)
    decoder = load_decoder(tmp_path).double()
    tokens = PROMPTS[1] + list(range(20, 60))
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0]
    # Sums of up to 128 products in fp64, of numbers below 100, through two layers: far below 1e-10.
    torch.testing.assert_close(logits_of(decoder, tokens), expected, rtol=0, atol=1e-10)
    fuse_(decoder)
    torch.testing.assert_close(logits_of(decoder, tokens), expected, rtol=0, atol=1e-10)
    written = generate(decoder, PROMPTS, 16).run()
    for prompt, text in zip(PROMPTS, written, strict=True):
        wanted = model.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False)
        assert text == wanted[0, len(prompt) :].tolist()


@pytest.mark.parametrize("codec", ["int8", "int4:block=64", "nf4"])
def test_a_quantized_folder_writes_what_its_decoded_weights_write(codec: str, tmp_path: Path) -> None:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    nc.quantize_(model, codec)
    nc.save(model, tmp_path / "rows")
    model.config.save_pretrained(tmp_path / "rows")
    encoded, decoded = load_decoder(tmp_path / "rows"), load_decoder(tmp_path / "rows")
    nc.dequantize_(decoded)
    assert type(encoded.lm_head) is nc.nn.Linear
    assert type(decoded.lm_head) is nn.Linear
    before = logits_of(encoded.double(), PROMPTS[1])
    # Both decode to the same fp64 weights; only the order of sums differs.
    torch.testing.assert_close(before, logits_of(decoded.double(), PROMPTS[1]), rtol=0, atol=1e-10)
    assert fuse_(encoded).joined == 2 * SIZES["num_hidden_layers"]
    torch.testing.assert_close(logits_of(encoded, PROMPTS[1]), before, rtol=0, atol=1e-10)


def test_joined_rows_are_the_bytes_of_their_parts() -> None:
    decoder = random_decoder(Shape(64, 1, 4, 128, 32, key_heads=2), dtype=torch.float32)
    nc.quantize_(decoder, "int4")
    attention = decoder.model.layers[0].self_attn
    parts = [attention.get_submodule(name).weight for name in ("q_proj", "k_proj", "v_proj")]
    size = decoder.weight_bytes
    fuse_(decoder)
    assert torch.equal(attention.joined.weight, torch.cat(parts))
    assert attention.joined.out_features == 64 + 32 + 32
    assert decoder.weight_bytes == size


def test_what_is_of_several_codecs_is_not_joined_and_said_so() -> None:
    decoder = random_decoder(Shape(64, 1, 4, 128, 32), dtype=torch.float32)
    nc.quantize_(decoder, "int4", rules={"k_proj": "int8", "up_proj": None})
    joined, skips = fuse_(decoder)
    assert joined == 0
    assert "several codecs: int4" in skips["model.layers.0.self_attn"]
    assert "not all of one kind" in skips["model.layers.0.mlp"]
    assert len(generate(decoder, [[1]], 3, stop_at_end=False).run()[0]) == 3


@pytest.mark.untried
def test_gradients_flow_through_a_decoder_that_has_written(device: str) -> None:
    decoder = random_decoder(Shape(64, 1, 4, 128, 32), dtype=torch.float32, device=device)
    generate(decoder, [[1, 2]], 3).run()
    decoder.requires_grad_(True)
    cache = Cache(decoder.shape, 1, 3, torch.float32, torch.device(device))
    decoder.prefill(torch.tensor([1, 2, 3], device=device), cache, 0).sum().backward()
    gradient = decoder.model.layers[0].self_attn.q_proj.weight.grad
    assert gradient is not None
    assert gradient.isfinite().all()


def test_a_sequence_writes_the_same_alone_and_in_a_batch() -> None:
    decoder = random_decoder(Shape(64, 2, 4, 128, 32, key_heads=2), dtype=torch.float64)
    together = generate(decoder, PROMPTS_32, 12).run()
    assert together == [generate(decoder, [prompt], 12).run()[0] for prompt in PROMPTS_32]


PROMPTS_32 = [[5, 17, 3], [9, 11, 2, 3, 4, 5, 6, 1], [1], [31, 0]]


@pytest.mark.parametrize("codec", [None, "int8", "nf4"])
def test_under_autocast_a_cache_of_wider_numbers_holds_what_one_of_autocasts_own_does(codec: str | None) -> None:
    decoder = random_decoder(Shape(64, 2, 4, 96, 100, key_heads=2), dtype=torch.float32)
    if codec is not None:
        nc.quantize_(decoder, codec)
    logits = []
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        for dtype in (torch.float32, torch.bfloat16):
            cache = Cache(decoder.shape, 2, 8, dtype, torch.device("cpu"))
            for sequence, prompt in enumerate(([5, 17, 3], [9, 2, 4])):
                decoder.prefill(torch.tensor(prompt), cache, sequence)
            logits.append(decoder.advance(torch.tensor([3, 7]), torch.tensor([3, 3]), cache, 4))
    torch.testing.assert_close(*logits, rtol=0, atol=0)


def test_a_generation_runs_under_autocast_and_says_how() -> None:
    decoder = random_decoder(Shape(64, 2, 4, 96, 100), dtype=torch.float32)
    nc.quantize_(decoder, "int8")
    with torch.autocast("cpu", torch.bfloat16):
        generation = generate(decoder, PROMPTS, 4)
        texts = [list(text) for text in generation.run()]
    assert [len(text) for text in texts] == [4] * len(PROMPTS)
    assert "autocast" in generation.layers


@pytest.mark.parametrize("codec", [None, "int8"])
@pytest.mark.parametrize("other", ["model.norm", "model.embed_tokens", "lm_head"])
def test_floats_of_two_dtypes_are_refused_with_the_way_to_one(codec: str | None, other: str) -> None:
    decoder = random_decoder(Shape(64, 1, 4, 128, 32), dtype=torch.bfloat16)
    decoder.get_submodule(other).float()
    if codec is not None:
        nc.quantize_(decoder, codec, rules={"lm_head": None})
    with pytest.raises(nc.errors.DtypeError, match=r"bfloat16 \(.*float32|float32 \(.*bfloat16"):
        generate(decoder, [[1, 2]], 3)
    assert len(generate(decoder.to(torch.bfloat16), [[1, 2]], 3).run()[0]) == 3


class WideHead(nn.Module):
    """A head in fp32 that casts what comes in."""

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.inner = head.float()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.float())  # type: ignore[no-any-return]


@pytest.mark.parametrize("cast_by", ["a module around it", "a hook", "a forward of its own"])
def test_a_module_of_another_dtype_that_casts_what_comes_in_is_taken(cast_by: str) -> None:
    decoder = random_decoder(Shape(64, 1, 4, 128, 32), dtype=torch.bfloat16)
    decoder.value_head = nn.Linear(64, 1)  # which the decoder does not call
    head = decoder.lm_head
    if cast_by == "a module around it":
        decoder.lm_head = WideHead(head)  # type: ignore[assignment]
    elif cast_by == "a hook":
        head.float().register_forward_pre_hook(lambda module, given: (given[0].float(),))
    else:
        head.float().forward = lambda input: nn.functional.linear(input.float(), head.weight)  # type: ignore[method-assign]
    assert len(generate(decoder, [[1, 2]], 3).run()[0]) == 3


def test_an_end_token_ends_its_sequence_alone() -> None:
    shape = Shape(64, 1, 4, 128, 32)
    decoder = random_decoder(shape, dtype=torch.float64)
    free = generate(decoder, PROMPTS_32, 10).run()
    end = free[0][3]
    cut = random_decoder(Shape(64, 1, 4, 128, 32, ends=(end,)), dtype=torch.float64)
    generation = generate(cut, PROMPTS_32, 10)
    steps = [*generation]
    for text, whole in zip(generation.tokens, free, strict=True):
        expected = whole[: whole.index(end) + 1] if end in whole else whole
        assert text == expected
    assert [step[0] for step in steps[4:]] == [None] * (len(steps) - 4)
    assert generate(cut, PROMPTS_32, 10, stop_at_end=False).run() == free


@pytest.mark.parametrize(
    ("options", "allowed"),
    [({}, 4), ({"top_k": 2}, 2), ({"top_k": 1}, 1), ({"top_p": 0.6}, 2), ({"top_p": 1e-9}, 1), ({"top_p": 1.0}, 4)],
)
def test_draws_come_from_the_tokens_that_are_allowed(options: dict[str, Any], allowed: int) -> None:
    """Probabilities 0.5, 0.3, 0.15, 0.05; the first two have 0.8, and the first alone less than 0.6."""
    logits = torch.tensor([0.15, 0.5, 0.05, 0.3]).log().expand(4000, 4)
    sampling = Sampling(temperature=1.0, seed=3, **options)
    drawn = sampling.choose(logits, sampling.generator(torch.device("cpu")))
    order = [1, 3, 0, 2]
    assert set(drawn.tolist()) == set(order[:allowed])
    assert torch.equal(drawn, sampling.choose(logits, sampling.generator(torch.device("cpu"))))


@pytest.mark.parametrize("options", [{"top_p": 0.5}, {"top_p": 0.25}, {"top_k": 3, "top_p": 0.6}, {"top_k": 3}])
def test_of_equally_likely_tokens_those_that_transformers_keeps_are_drawn(options: dict[str, Any]) -> None:
    for logits in (torch.zeros(1, 8), torch.tensor([[1.0, 2.0, 1.0, 2.0, 2.0, 0.0, 1.0, 2.0]])):
        kept = transformers.TemperatureLogitsWarper(0.7)(None, logits)
        if "top_k" in options:
            kept = transformers.TopKLogitsWarper(options["top_k"])(None, kept)
        if "top_p" in options:
            kept = transformers.TopPLogitsWarper(options["top_p"])(None, kept)
        sampling = Sampling(temperature=0.7, **options)
        drawn = sampling.choose(logits.expand(2000, 8), sampling.generator(logits.device))
        assert set(drawn.tolist()) == set(kept[0].isfinite().nonzero().flatten().tolist())


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 2, "top_p": 0.5}])
def test_no_token_is_chosen_where_logits_are_nan(options: dict[str, Any]) -> None:
    logits = torch.tensor([[1.0, 9.0, -3.0], [1.0, torch.nan, -3.0], [torch.nan] * 3, [-60.0, -70.0, 60.0]])
    sampling = Sampling(**options)
    assert sampling.choose(logits, sampling.generator(logits.device)).tolist() == [1, NONE, NONE, 2]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (([], 3), "prompts: is empty"),
        (([[]], 3), r"prompts\[0\]: expected at least one token"),
        (([[1], [[2]]], 3), r"prompts\[1\]"),
        (([[1, 32]], 3), "from 0 to 31"),
        (([[-1]], 3), "from -1 to -1"),
        (([[1]], 0), "max_new_tokens=0"),
        (([[1]], 1.5), "max_new_tokens=1.5: must be a whole number"),
        (([[1] * 500], 13), "take 513 positions"),
        ((None, 3), "prompts: expected a list of prompts"),
        (([1, 2], 3), r"prompts\[0\]: expected at least one token"),
    ],
)
def test_wrong_arguments_are_refused_in_words(arguments: tuple[Any, ...], words: str) -> None:
    decoder = random_decoder(Shape(64, 1, 4, 128, 32), dtype=torch.float32)
    with pytest.raises(nc.errors.ShapeError, match=words):
        generate(decoder, *arguments)


@pytest.mark.parametrize(
    "prompts",
    ["text", ["text"], [[1], ["a", "b"]], [[1.5]], [torch.tensor([1.0])], [torch.tensor([True])], [[None]], [[[1], 2]]],
    ids=str,
)
def test_what_is_no_list_of_tokens_is_refused_in_words(prompts: Any) -> None:
    decoder = random_decoder(Shape(64, 1, 4, 128, 32), dtype=torch.float32)
    with pytest.raises(nc.errors.DtypeError, match=rf"prompts\[{len(prompts) - 1 if prompts != 'text' else 0}\]"):
        generate(decoder, prompts, 3)


def test_tokens_of_any_integer_dtype_are_taken() -> None:
    decoder = random_decoder(Shape(64, 1, 4, 128, 32), dtype=torch.float32)
    kinds = [torch.tensor([5, 17, 3], dtype=dtype) for dtype in (torch.uint8, torch.int16, torch.uint16, torch.int64)]
    texts = [generate(decoder, [prompt], 4).run() for prompt in (*kinds, kinds[0].numpy(), (5, 17, 3))]
    assert all(text == texts[0] for text in texts)
    assert generate(decoder, [kinds[0]], np.int64(4)).run() == texts[0]  # type: ignore[arg-type]


def test_a_sampling_that_is_none_is_refused_in_words() -> None:
    decoder = random_decoder(Shape(64, 1, 4, 128, 32), dtype=torch.float32)
    with pytest.raises(nc.errors.SpecError, match="sampling='greedy': expected a Sampling"):
        generate(decoder, [[1]], 3, "greedy")  # type: ignore[arg-type]


def test_what_is_no_decoder_is_refused_with_the_way_to_get_one() -> None:
    with pytest.raises(nc.errors.ModelKindError, match=r"got a Linear\. .*load_decoder"):
        generate(nn.Linear(2, 2), [[1]])  # type: ignore[arg-type]


@pytest.mark.parametrize("codec", [None, "int8"])
def test_a_decoder_whose_second_layer_accelerate_keeps_on_disk_writes_the_same(
    codec: str | None, tmp_path: Path
) -> None:
    accelerate = pytest.importorskip("accelerate")
    decoder = random_decoder(Shape(64, 2, 4, 128, 32), dtype=torch.float32)
    if codec is not None:
        nc.quantize_(decoder, codec)
    expected = generate(decoder, PROMPTS_32, 6).run()
    here = dict.fromkeys(("model.embed_tokens", "model.norm", "lm_head", "model.layers.0"), "cpu")
    accelerate.dispatch_model(decoder, here | {"model.layers.1": "disk"}, main_device="cpu", offload_dir=tmp_path)
    assert decoder.model.layers[1].mlp.down_proj.weight.is_meta
    assert generate(decoder, PROMPTS_32, 6).run() == expected


@pytest.mark.parametrize("name", ["", "lm_head", "model.layers.0.mlp.down_proj", "model.norm"])
def test_a_decoder_without_numbers_is_refused_with_the_way_to_load_them(name: str) -> None:
    decoder = random_decoder(Shape(64, 1, 4, 128, 32), dtype=torch.float32)
    decoder.get_submodule(name).to("meta")
    with pytest.raises(
        nc.errors.ModelKindError, match=rf"such as {name or 'model'}\..*on the meta device.*load_decoder"
    ):
        generate(decoder, [[1]])


WRONG_SAMPLINGS: list[dict[str, Any]] = [
    *({"temperature": value} for value in (-1.0, float("nan"), float("inf"), 1e-40)),  # divided by 1e-40, all is inf
    *({"temperature": None}, {"temperature": "1"}, {"top_p": "0.9"}),
    *({"top_k": 0}, {"top_k": 2.5}, {"top_p": 0.0}, {"top_p": 1.5}, {"seed": None}),
    *({"seed": seed} for seed in (2**64, -(2**63) - 1)),
]


@pytest.mark.parametrize("options", WRONG_SAMPLINGS, ids=str)
def test_wrong_samplings_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(nc.errors.SpecError, match=next(iter(options))):
        Sampling(**options)


def test_every_seed_of_torch_draws() -> None:
    decoder = random_decoder(Shape(64, 1, 4, 128, 32), dtype=torch.float32)
    for seed in (-(2**63), -1, 2**64 - 1):
        assert len(generate(decoder, [[1]], 3, Sampling(1.0, seed=seed)).run()[0]) == 3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "gpt2"}, "model_type is 'gpt2'"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"model_type": "mistral", "sliding_window": 16}, "sliding_window is 16"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "yarn"),
        ({"hidden_size": None}, "hidden_size"),
    ],
)
def test_models_that_the_decoder_would_run_wrongly_are_refused(change: dict[str, Any], words: str) -> None:
    from narrowcast.generate.shape import shape_of

    config = {"model_type": "llama", **SIZES, **change}
    config = {key: value for key, value in config.items() if value is not None}
    with pytest.raises(nc.errors.ModelKindError, match=words):
        shape_of(config)


def test_the_shapes_have_as_many_weights_as_they_say() -> None:
    for shape in (Shape(64, 2, 4, 128, 32, key_heads=2), Shape(64, 1, 4, 96, 32, tied=True, head_size=32)):
        decoder = random_decoder(shape, dtype=torch.float32)
        assert shape.weights == sum(one.numel() for one in decoder.parameters() if one.dim() == 2)
