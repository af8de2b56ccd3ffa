"""Weights that a parent module reads directly are found in its code, and skipped."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest
import torch
from read_probe import note_reads
from torch import Tensor, nn

import narrowcast as nc
from narrowcast.nn.direct_reads import find_direct_reads


def logged(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def wrapper(*arguments: Any) -> Any:
        return function(*arguments)

    return wrapper


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Sequential()
        self.b.c = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b.c(self.a(x))


class Plain(Base):
    """Nothing is read: mentions of self.a.weight in words, or where forward does not go, do not count."""

    def reset(self) -> None:
        nn.init.zeros_(self.a.weight)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.a.weight.device)) + self.a.bias.sum() * 0


class Casts(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(x.to(self.a.weight.dtype))


class Deep(Base):
    def forward(self, x: Tensor) -> Tensor:
        return x @ self.b.c.weight


class Helped(Base):
    def helper(self, x: Tensor) -> Tensor:
        return torch.stack([x @ self.a.weight for _ in range(2)])

    @logged
    def forward(self, x: Tensor) -> Tensor:
        return self.helper(x)


class ByProperty(Base):
    @property
    def dtype(self) -> torch.dtype:
        return self.a.weight.dtype

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x.to(self.dtype))


class Inherited(Casts):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


@pytest.mark.parametrize(
    ("kind", "left"),
    [(Base, None), (Plain, None), (Casts, "a"), (Deep, "b.c"), (Helped, "a"), (ByProperty, "a"), (Inherited, "a")],
)
def test_a_weight_that_forward_reads_itself_is_left_alone(kind: type[Base], left: str | None) -> None:
    model = nn.Sequential(kind())
    report = nc.quantize_(model)
    expected = (
        []
        if left is None
        else [
            (
                f"0.{left}.weight",
                f"the parent module {kind.__name__} reads `.weight` directly instead of calling the layer",
            )
        ]
    )
    assert report.skips == expected
    assert len(report.entries) == 2 - len(expected)
    reference = nc.dequantize_(copy.deepcopy(model))
    x = torch.randn(3, 4)
    with torch.no_grad():
        mine, other = model(x), reference(x)
    # Two products of 4 terms, of the size of 1 at most: fewer than 32 roundings.
    assert float((mine - other).abs().max()) <= 32 * 2.0**-24 * max(1.0, float(other.abs().max()))


def test_a_read_in_a_long_function_is_found() -> None:
    # More than 256 names, so that instructions need a prefix for those behind.
    lines = "\n    ".join(f"x = getattr(x, 'no', x) or x.name_{i}" for i in range(300))
    space: dict[str, Any] = {}
    exec(f"def forward(self, x):\n    {lines}\n    return x @ self.a.weight", space)
    model = type("Long", (Base,), {"forward": space["forward"]})()
    assert set(find_direct_reads(model)) == {(model.a, "weight")}


def test_asking_for_the_device_is_no_read() -> None:
    assert {name for _, name in find_direct_reads(Plain())} == {"bias"}


# -- proofs: what a probe sees of real runs ------------------------------------------------------------------------


def static_reads(model: nn.Module) -> set[tuple[str, str]]:
    names = {module: name for name, module in model.named_modules()}
    return {(names[module], parameter) for module, parameter in find_direct_reads(model)}


@pytest.mark.parametrize("kind", [Base, Casts, Deep, Helped, ByProperty, Inherited])
def test_the_probe_sees_what_the_search_finds(kind: type[Base]) -> None:
    model = kind()
    expected = static_reads(model)
    with note_reads(model) as reads:
        model(torch.randn(3, 4))
    assert reads == expected


def test_the_probe_sees_that_torchs_attention_reads_its_output_projection() -> None:
    # Torch's own code is not searched: modules/attention.py knows this read. The fast path of an encoder layer is never
    # taken with a probe in it; modules/test_module_attention.py runs it.
    attention = nn.MultiheadAttention(8, 2)
    x = torch.randn(3, 1, 8)
    with note_reads(attention) as reads:
        attention(x, x, x)
    assert ("out_proj", "weight") in reads
    assert static_reads(attention) == set()


TEXT = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
IMAGE = {key: value for key, value in TEXT.items() if key != "vocab_size"} | {"image_size": 32, "patch_size": 8}
MODELS: dict[str, tuple[dict[str, int], list[str]]] = {
    "T5EncoderModel": (
        {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4},
        ["wo"],
    ),
    "ViTModel": (IMAGE, ["projection"]),
    "CLIPVisionModel": (IMAGE, ["patch_embedding"]),
    "BertModel": (TEXT, []),
    "LlamaForCausalLM": (TEXT | {"tie_word_embeddings": True}, []),
    "GPT2LMHeadModel": ({"vocab_size": 64, "n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 32}, []),
    "OPTForCausalLM": (TEXT | {"ffn_dim": 48, "word_embed_proj_dim": 32, "max_position_embeddings": 32}, []),
}


@pytest.mark.parametrize("name", MODELS)
def test_every_read_of_a_transformers_model_is_found_and_the_quantized_model_runs(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    options, expected = MODELS[name]
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**options)).eval()
    given = torch.randn(2, 3, 32, 32) if "image_size" in options else torch.randint(3, 64, (2, 7))
    with note_reads(model) as reads, torch.no_grad():
        model(given)
    assert sorted(module.rpartition(".")[2] for module, _ in reads) == expected
    assert reads <= static_reads(model)  # the search also finds reads in branches that this run did not take
    report = nc.quantize_(model)
    assert {f"{module}.{parameter}" for module, parameter in reads} <= {skip.name for skip in report.skips}
    with torch.no_grad():
        assert model(given)[0].isfinite().all()
