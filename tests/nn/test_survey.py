"""What quantize_ skips, and the reason that it gives."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import narrowcast as nc
from cases import same_bits
from narrowcast.errors import QuantizeError


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


class Scaled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


class Renamed(nn.Linear):
    """A subclass that only builds itself in its own way."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4))


def normed() -> nn.Module:
    return nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))


def pruned() -> nn.Module:
    from torch.nn.utils import prune

    return prune.l1_unstructured(nn.Linear(4, 4), "weight", 0.5)


def patched() -> nn.Module:
    linear = nn.Linear(4, 4)
    linear.forward = lambda x: x  # type: ignore[method-assign]
    return linear


def sparse() -> nn.Module:
    linear = nn.Linear(4, 4)
    linear.weight = nn.Parameter(torch.eye(4).to_sparse())
    return linear


@pytest.mark.parametrize(
    ("module", "skips"),
    [
        (Scaled(4, 4), [("0.weight", "Scaled changes torch.nn.Linear (forward)")]),
        (nn.LazyLinear(4), [("0.weight", "not initialized yet: run one batch through the model first")]),
        (nn.Bilinear(2, 3, 4), [("0.weight", "torch.nn.Bilinear has no encoded form")]),
        (
            nn.GRUCell(4, 2),
            [(f"0.{name}", "torch.nn.GRUCell has no encoded form") for name in ("weight_ih", "weight_hh")],
        ),
        (nn.EmbeddingBag(4, 2), [("0.weight", "torch.nn.EmbeddingBag has no encoded form")]),
        (
            nn.Linear(4, 4, dtype=torch.complex64),
            [("0.weight", "complex64, and codecs take float32, bfloat16, float16 or float64")],
        ),
        (sparse(), [("0.weight", "sparse_coo, not dense")]),
        (patched(), [("0.weight", "forward was replaced on this instance (accelerate does that): quantize before")]),
        (Gate(), [("0.weight", "held by Gate itself, where only 3-D weights have an encoded form")]),
        (nn.LayerNorm(4), []),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_encoded_is_skipped_with_the_reason(module: nn.Module, skips: list[tuple[str, str]]) -> None:
    model = nn.Sequential(module)
    report = nc.quantize_(model)
    assert report.entries == []
    assert report.skips == skips
    assert not any(isinstance(child, nc.nn.Encoded) for child in model.modules())


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("sizes", [(0, 4), (4, 0)])
def test_a_weight_without_elements_is_skipped(sizes: tuple[int, int]) -> None:
    assert nc.quantize_(nn.Sequential(nn.Linear(*sizes))).skips == [("0.weight", "no elements")]


def test_parametrized_and_pruned_layers_are_skipped_and_still_work() -> None:
    model = nn.Sequential(normed(), pruned())
    x = torch.randn(2, 4)
    y = model(x)
    report = nc.quantize_(model)
    assert report.entries == []
    reasons = dict(report.skips)
    assert "parametrized" in reasons["0.weight"]
    assert "computed from other parameters" in reasons["1.weight"]
    assert same_bits(model(x), y)


def test_a_subclass_that_adds_nothing_is_taken_and_given_back() -> None:
    model = nn.Sequential(Renamed(4))
    assert len(nc.quantize_(model).entries) == 1
    assert type(model[0]) is nc.nn.Linear
    nc.dequantize_(model)
    assert type(model[0]) is Renamed


def test_a_row_that_is_smaller_than_its_padding_is_encoded_and_the_report_says_so() -> None:
    model = nn.Sequential(nn.Linear(1, 4))
    report = nc.quantize_(model, "int8")
    assert (report.bytes_before, report.bytes_after) == (16, 64)
    assert "larger than before (rows are padded to 16 bytes): 0.weight" in str(report)
    assert model(torch.ones(2, 1)).shape == (2, 4)


@pytest.mark.parametrize(
    "model", [torch.zeros(2), {"weight": torch.zeros(2)}, "model.pt"], ids=lambda x: type(x).__name__
)
def test_what_is_no_module_is_refused(model: object) -> None:
    for function in (nc.quantize_, nc.dequantize_, nc.nn.encodings):
        with pytest.raises(QuantizeError, match=rf"model: expected a torch.nn.Module, got {type(model).__name__}"):
            function(model)  # type: ignore[arg-type]
