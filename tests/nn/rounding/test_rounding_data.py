"""Data that cannot be used, and interruptions: the model is as it was, and the error says why."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from test_gptq_rounding import Model, batches
from torch import Tensor, nn

import narrowcast as nc


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def raising(error: BaseException) -> Iterator[Tensor]:
    yield batches(1)[0]
    raise error


def refused(model: nn.Module, data: Any, error: type[BaseException], message: str = "") -> None:
    """quantize_ raises, and the model has the same classes, parameters, hooks and modes."""
    before = {name: (type(module), module.training, dict(vars(module))) for name, module in model.named_modules()}
    parameters = dict(model.named_parameters())
    values = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    with pytest.raises(error, match=message):
        nc.quantize_(model, "int4:block=16", rounding="gptq", data=data)
    for name, module in model.named_modules():
        kind, training, attributes = before[name]
        assert (type(module), module.training) == (kind, training)
        assert vars(module).keys() == attributes.keys()
        assert all(vars(module)[key] is value for key, value in attributes.items())
        assert not module._forward_pre_hooks
        assert not module._forward_hooks
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert all(torch.equal(parameter, values[name]) for name, parameter in model.named_parameters())


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (lambda: None, "needs inputs of the model"),
        (list, "it gave no batch"),
        (lambda: iter(()), "it gave no batch"),
        (lambda: batches(1)[0], "got a Tensor"),
        (lambda: "text", "got a str"),
        (lambda: 3, "got a int"),
        (lambda: ["a sentence"], "Tokenize text first"),
        (lambda: raising(OSError("disk gone")), "it raised OSError after 1 batches: disk gone"),
        (lambda: [batches(1)[0], torch.empty(0, 12, dtype=torch.int64)], "batch 1 is empty"),
        (lambda: [torch.randn(2, 5)], "the model cannot run batch 0"),
        (lambda: [batches(1)[0], torch.full((2, 5), 400)], "the model cannot run batch 1"),
        (lambda: [batches(1)[0], torch.full((2, 5), float("nan"))], "batch 1 holds an infinity or a NaN"),
    ],
)
def test_data_that_cannot_be_used(data: Callable[[], Any], message: str) -> None:
    refused(Model(), data(), nc.errors.CalibrationError, message)


def test_the_error_names_its_cause() -> None:
    with pytest.raises(nc.errors.CalibrationError) as caught:
        nc.quantize_(Model(), "int4", rounding="gptq", data=raising(OSError("disk gone")))
    assert isinstance(caught.value.__cause__, OSError)


def test_an_interruption_by_the_data_leaves_the_model_as_it_was() -> None:
    refused(Model(), raising(KeyboardInterrupt()), KeyboardInterrupt)


@pytest.mark.parametrize("calls", [1, 3, 9, 14])
def test_an_interruption_at_work_leaves_the_model_as_it_was(calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C arrives at any weight: here from a rounding that raises at its n-th."""
    from narrowcast.nn.rounding.gptq import GPTQ

    done: list[int] = []
    original = GPTQ.round_rows

    def interrupted(self: GPTQ, *arguments: Any) -> Tensor:
        done.append(1)
        if len(done) == calls:
            raise KeyboardInterrupt
        return original(self, *arguments)

    monkeypatch.setattr(GPTQ, "round_rows", interrupted)
    refused(Model(), batches(2), KeyboardInterrupt)


def test_a_model_that_overflows_names_the_layer() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with torch.no_grad():
        model[0].weight.fill_(1e38)
    with pytest.raises(nc.errors.CalibrationError, match=r"the inputs of 1\.weight hold an infinity"):
        nc.quantize_(model, "int4", rounding="gptq", data=[torch.full((4, 8), 100.0)])
    assert type(model[0]) is nn.Linear


def test_one_sample_will_do() -> None:
    model = Model()
    report = nc.quantize_(model, "int4:block=16", rounding="gptq", data=[torch.randint(0, 40, (1, 1))])
    # One input of k features: an output's error is a sum of k products in fp32, k * 2**-24 of the squared output.
    assert all(entry.error <= entry.nearest_error + 1e-5 for entry in report.entries if entry.rounding == "gptq")
    assert bool(model(batches(1)[0]).isfinite().all())


@pytest.mark.parametrize("batch", [lambda t: {"tokens": t}, lambda t: (t, "label"), lambda t: [t]])
def test_batches_are_tensors_mappings_and_tuples(batch: Callable[[Tensor], Any]) -> None:
    report = nc.quantize_(Model(), "int4:block=16", rounding="gptq", data=[batch(tokens) for tokens in batches(2)])
    assert {entry.rounding for entry in report.entries} == {"gptq", "search"}


def test_data_for_nearest_rounding_is_only_measured() -> None:
    one, other = nn.Linear(16, 4), nn.Linear(16, 4)
    other.load_state_dict(one.state_dict())
    nc.quantize_(one, "int4")
    (entry,) = nc.quantize_(other, "int4", data=[torch.randn(9, 16)]).entries
    assert torch.equal(one.weight, other.weight)
    assert entry.error == entry.nearest_error
    assert entry.error > 0


def test_a_model_that_writes_into_its_buffers_has_them_back() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(16, 16)
            self.register_buffer("calls", torch.zeros(2))
            self.register_buffer("unknown", torch.full((2,), float("nan")))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.inner(x)  # type: ignore[no-any-return]

    model = Counting()
    nc.quantize_(model, "int4:block=16", rounding="gptq", data=[torch.randn(9, 16)])
    assert model.calls.tolist() == [0.0, 0.0]
    refused(model := Counting(), [torch.randn(9, 16), torch.randn(9, 15)], nc.errors.CalibrationError, "batch 1")
    assert model.calls.tolist() == [0.0, 0.0]


def test_an_output_with_a_nan_is_rounded_to_nearest_and_others_do_not_notice() -> None:
    layer, x = nn.Linear(32, 4), torch.randn(99, 8) @ torch.randn(8, 32)
    clean = nn.Linear(32, 4)
    with torch.no_grad():
        clean.load_state_dict(layer.state_dict())
        layer.weight[1, 20] = float("nan")
    for some in (layer, clean):
        nc.quantize_(some, "int4:block=16", rounding="gptq", data=[x], allow_nonfinite=True)
    assert torch.equal(layer.weight[[0, 2, 3]], clean.weight[[0, 2, 3]])
    assert bool(layer.decoded()[1, :16].isfinite().all())
    assert bool(layer.decoded()[1, 16:].isnan().all())
