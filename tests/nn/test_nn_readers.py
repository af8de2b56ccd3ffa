"""Weights that a model reads past their modules are found in its code, and left alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import narrowcast as nc
from narrowcast.nn.readers import read_past_module


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
    expected = [] if left is None else [(f"0.{left}.weight", f"{kind.__name__} reads it past its module")]
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
    assert set(read_past_module(model)) == {(model.a, "weight")}


def test_asking_for_the_device_is_no_read() -> None:
    assert {name for _, name in read_past_module(Plain())} == {"bias"}


@pytest.mark.parametrize(
    ("name", "options", "left"),
    [
        (
            "T5EncoderModel",
            {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4},
            "wo",
        ),
        (
            "ViTModel",
            {
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 1,
                "num_attention_heads": 4,
                "image_size": 32,
                "patch_size": 8,
            },
            "projection",
        ),
    ],
)
def test_models_of_transformers_that_cast_to_a_weights_dtype_still_run(
    name: str, options: dict[str, int], left: str
) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**options)).eval()
    report = nc.quantize_(model)
    assert any(skip.name.endswith(f"{left}.weight") for skip in report.skips)
    given = torch.randn(2, 3, 32, 32) if name == "ViTModel" else torch.randint(0, 64, (2, 7))
    with torch.no_grad():
        assert model(given)[0].isfinite().all()
