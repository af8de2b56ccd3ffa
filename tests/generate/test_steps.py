"""Steps of a generation: compiled layers, tokens read one step behind, and CUDA graphs where there is a GPU."""

from __future__ import annotations

import pytest
import torch

import narrowcast as nc
from compile_cases import check_compiled
from narrowcast.errors import LogitsError
from narrowcast.generate import Decoder, Sampling, Shape, fuse_, generate, random_decoder
from narrowcast.generate.cache import Cache
from narrowcast.generate.decoder import Layer
from narrowcast.generate.kernels import Torch, kernels_for
from narrowcast.generate.run import Generation
from narrowcast.generate.steps import Eager, explained

SHAPE = Shape(128, 2, 4, 256, 64, key_heads=2)
PROMPTS = [[5, 17, 3], [9, 11, 2, 3, 4, 5, 6, 1], [1]]
CODECS = ("int8", "int4", "nf4", "apot4")


class Behind(Eager):
    """Tokens are read one step behind, as those of a graph are."""

    ahead = 1
    begun = 0

    def begin(self) -> None:
        super().begin()
        type(self).begun += 1
        self._unread = [*getattr(self, "_unread", []), super().read()]

    def read(self) -> list[int]:
        return self._unread.pop(0)


def read_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Generation._make_steps

    def behind(self: Generation, chosen: torch.Tensor, generator: torch.Generator) -> Behind:
        eager = plain(self, chosen, generator)
        assert isinstance(eager, Eager)
        eager.__class__ = Behind
        assert isinstance(eager, Behind)
        return eager

    monkeypatch.setattr(Generation, "_make_steps", behind)


@pytest.mark.parametrize("end", [None, 2])
def test_reading_one_step_behind_gives_the_same_texts(end: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = random_decoder(SHAPE, dtype=torch.float64)
    limit = 9
    if end is not None:
        last = generate(decoder, PROMPTS[:1], limit).run()[0][end]
        decoder = random_decoder(Shape(128, 2, 4, 256, 64, key_heads=2, ends=(last,)), dtype=torch.float64)
    prompts = PROMPTS if end is None else PROMPTS[:1]
    expected = generate(decoder, prompts, limit).run()
    read_behind(monkeypatch)
    Behind.begun = 0
    assert generate(decoder, prompts, limit).run() == expected
    # No step is begun beyond the last position, and at most one that nobody reads.
    assert Behind.begun <= limit - 1
    assert Behind.begun <= max(map(len, expected))


@pytest.mark.untried
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("behind", [False, True])
def test_a_weight_that_is_nan_ends_a_generation_in_words(
    device: str, behind: bool, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read behind; on a GPU, out of a graph."""
    decoder, sampling = random_decoder(SHAPE, dtype=torch.float32).to(device), Sampling(temperature)
    written = [3, *generate(decoder, [[3]], 2, sampling, cuda_graph=behind).run()[0]]
    if behind and device == "cpu":
        read_behind(monkeypatch)
    for token in written:
        weights, number = decoder.model.embed_tokens.weight.detach(), written.index(token)
        kept = weights[token].clone()
        weights[token] = torch.nan
        generation = generate(decoder, [[3]], 4, sampling, cuda_graph=behind)
        with pytest.raises(LogitsError, match=f"sequence 0 has logits of NaN or infinity after {number} new tokens"):
            generation.run()
        assert generation.tokens == [written[1 : number + 1]]
        weights[token] = kept
    assert generate(decoder, [[3]], 2, sampling, cuda_graph=behind).run() == [written[1:]]


@pytest.mark.untried
@pytest.mark.parametrize("logit", [float("inf"), -float("inf")])
def test_no_token_is_drawn_from_infinite_logits(device: str, logit: float) -> None:
    decoder = random_decoder(SHAPE, dtype=torch.float32).to(device)
    decoder.lm_head.register_forward_hook(lambda module, given, logits: torch.full_like(logits, logit))
    with pytest.raises(LogitsError, match="logits of NaN or infinity"):
        generate(decoder, [[3]], 2, Sampling(0.7)).run()
    assert len(generate(decoder, [[3]], 2).run()[0]) == 2


def test_on_a_cpu_the_compiled_core_runs_and_says_so() -> None:
    decoder = random_decoder(SHAPE, dtype=torch.float32)
    assert generate(decoder, PROMPTS, 2).kernels == "native"
    assert kernels_for(decoder, torch.device("cpu")).name == "native"
    assert kernels_for(decoder.double(), torch.device("cpu")).name == "torch"
    assert kernels_for(decoder.double(), torch.device("cuda")).name.startswith("torch (norms are torch.float64")


def test_a_layer_compiles_into_one_graph_for_every_batch() -> None:
    decoder = random_decoder(Shape(96, 1, 6, 160, 64, key_heads=2), dtype=torch.float32)
    nc.quantize_(decoder, "int4")
    fuse_(decoder)
    batches = (5, 4, 7)  # no other size is 5: torch.compile takes equal sizes for the same
    expected = [logits_of(decoder, batch) for batch in batches]
    torch._dynamo.reset()
    decoder.step = torch.compile(Layer.advance, fullgraph=True, dynamic=True, backend="eager")
    first = logits_of(decoder, 5)
    with torch._dynamo.config.patch(error_on_recompile=True):
        given = [first, *(logits_of(decoder, batch) for batch in batches[1:])]
    for one, other in zip(given, expected, strict=True):
        assert torch.equal(one, other)


def logits_of(decoder: Decoder, batch: int) -> torch.Tensor:
    cache = Cache(decoder.shape, batch, 16, torch.float32, torch.device("cpu"))
    at = torch.arange(batch) + 1
    with torch.no_grad():
        return decoder.advance(torch.arange(batch), at, cache, 16, Torch())


@pytest.mark.parametrize(("backend", "codec"), [("aot_eager", "int8"), ("aot_eager", "nf4"), ("eager", "int4")])
def test_an_mlp_compiles_into_one_graph_for_every_batch(backend: str, codec: str) -> None:
    check_compiled("cpu", codec, backend=backend)


def test_an_error_of_a_capture_says_where_and_what_to_do() -> None:
    def asks() -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    try:
        asks()
    except RuntimeError as error:
        message = explained(error)
    assert "cannot be captured as a CUDA graph: operation not permitted when stream is capturing at " in message
    assert "(asks)" in message
    assert "cuda_graph=False" in message


# -- with a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("codec", [None, *CODECS])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, 20, 0.95)])
def test_a_graph_writes_what_eager_steps_write(codec: str | None, sampling: Sampling) -> None:
    decoder = random_decoder(SHAPE, dtype=torch.bfloat16, device="cuda")
    if codec:
        nc.quantize_(decoder, codec)
    fuse_(decoder)
    generation = generate(decoder, PROMPTS, 24, sampling)
    written = generation.run()
    assert generation.kernels == "triton"
    assert generation.capture_seconds > 0
    assert written == generate(decoder, PROMPTS, 24, sampling).run()
    if not sampling.temperature:
        assert written == generate(decoder, PROMPTS, 24, cuda_graph=False).run()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("key_heads", [2, 4])
def test_attention_in_cuda_reads_its_cache_early_and_writes_what_it_writes_late(
    key_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from narrowcast.kernels.cuda import launch

    decoder = random_decoder(Shape(256, 2, 4, 512, 64, key_heads=key_heads), dtype=torch.bfloat16, device="cuda")
    nc.quantize_(decoder, "int4")
    fuse_(decoder)
    early = generate(decoder, PROMPTS, 100).run()
    assert early == generate(decoder, PROMPTS, 100, cuda_graph=False).run()
    monkeypatch.setattr(launch, "may_read_weights_early", lambda: False)
    assert early == generate(decoder, PROMPTS, 100).run()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_longer_generation_in_between_does_not_change_one_that_is_under_way() -> None:
    decoder = random_decoder(SHAPE, dtype=torch.bfloat16, device="cuda")
    alone = generate(decoder, PROMPTS, 16).run()
    under_way = generate(decoder, PROMPTS, 16)
    steps = iter(under_way)
    next(steps)
    generate(decoder, PROMPTS, 100).run()
    overwritten = [torch.full((1 << size,), float("nan"), device="cuda") for size in range(4, 20)]  # what was freed
    for _ in steps:
        pass
    assert under_way.tokens == alone, len(overwritten)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_what_cannot_be_captured_is_refused_with_the_way_out() -> None:
    class Asking(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * float(x.sum() > 0)

    decoder = random_decoder(SHAPE, dtype=torch.bfloat16, device="cuda")
    mlp = decoder.model.layers[0].mlp
    mlp.down_proj = torch.nn.Sequential(mlp.down_proj, Asking())
    with pytest.raises(nc.errors.CaptureError, match="cuda_graph=False"):
        generate(decoder, PROMPTS, 4).run()
    assert len(generate(decoder, PROMPTS, 4, cuda_graph=False).run()[0]) == 4
    assert torch.randn(8, device="cuda").isfinite().all()  # torch's own generator does not wait for the capture's end
    with pytest.raises(nc.errors.CaptureError, match="cuda_graph=False"):
        generate(decoder, PROMPTS, 4, Sampling(0.8)).run()
    assert len(generate(decoder, PROMPTS, 4, Sampling(0.8), cuda_graph=False).run()[0]) == 4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("codec", CODECS)
def test_cuda_graphs_of_torch_compile_hold_our_kernels(codec: str) -> None:
    check_compiled("cuda", codec, mode="reduce-overhead")
