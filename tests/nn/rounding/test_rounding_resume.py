"""quantize_(checkpoint=...): after an interruption the same call goes on where it stopped, to the same bytes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from test_gptq_rounding import Model, batches
from torch import nn

import narrowcast as nc
from narrowcast.nn.rounding.gptq import GPTQ

CODEC = "int4:block=16"


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return Model()


class Interrupted:
    """GPTQ that counts the weights it rounds, and stops at the n-th as Ctrl-C does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls, self.last = 0, -1
        rounding = GPTQ.__call__

        def call(*arguments: Any, **options: Any) -> Any:
            if self.calls == self.last:
                raise KeyboardInterrupt
            self.calls += 1
            return rounding(*arguments, **options)

        monkeypatch.setattr(GPTQ, "__call__", call)


def parameters(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("calls", [0, 1, 4, 8])
def test_finished_weights_are_not_rounded_again(
    model: nn.Module, calls: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, expected, counted = batches(3), copy.deepcopy(model), Interrupted(monkeypatch)
    floats = [values.clone() for values in parameters(model)]
    report = nc.quantize_(expected, CODEC, rounding="gptq", data=data)
    total, counted.calls, counted.last = counted.calls, 0, calls
    with pytest.raises(KeyboardInterrupt):
        nc.quantize_(model, CODEC, rounding="gptq", data=data, checkpoint=tmp_path / "kept")
    assert all(torch.equal(*pair) for pair in zip(parameters(model), floats, strict=True))  # as it was
    assert not list((tmp_path / "kept").glob("*.part"))
    counted.calls, counted.last = 0, -1
    again = nc.quantize_(model, CODEC, rounding="gptq", data=iter(data), checkpoint=str(tmp_path / "kept"))
    assert counted.calls == total - calls
    assert all(torch.equal(*pair) for pair in zip(parameters(model), parameters(expected), strict=True))
    assert again.entries == report.entries


@pytest.mark.parametrize("other", ["model", "data", "codec", "rounding"])
def test_a_folder_of_another_rounding_is_refused(model: nn.Module, other: str, tmp_path: Path) -> None:
    data, arguments = batches(2), {"rounding": "gptq", "checkpoint": tmp_path}
    nc.quantize_(copy.deepcopy(model), CODEC, data=data, **arguments)
    if other == "model":
        next(model.parameters()).data[0] += 1.0
    options = {**arguments, "data": batches(3) if other == "data" else data}
    options |= {"rounding": GPTQ(damping=0.1)} if other == "rounding" else {}
    floats = [values.clone() for values in parameters(model)]
    with pytest.raises(nc.errors.CalibrationError, match="rows of another rounding"):
        nc.quantize_(model, "int3" if other == "codec" else CODEC, **options)
    assert all(torch.equal(*pair) for pair in zip(parameters(model), floats, strict=True))


def test_a_damaged_file_is_named(model: nn.Module, tmp_path: Path) -> None:
    data = batches(2)
    nc.quantize_(copy.deepcopy(model), CODEC, rounding="gptq", data=data, checkpoint=tmp_path)
    damaged = sorted(tmp_path.glob("*.rows.pt"))[0]
    damaged.write_bytes(damaged.read_bytes()[:100])
    with pytest.raises(nc.errors.CalibrationError, match=damaged.name):
        nc.quantize_(model, CODEC, rounding="gptq", data=data, checkpoint=tmp_path)
    assert not any(isinstance(module, nc.nn.Linear) for module in model.modules())


def test_a_place_that_cannot_be_a_folder_is_refused(model: nn.Module, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(nc.errors.CalibrationError, match="checkpoint="):
        nc.quantize_(model, CODEC, rounding="gptq", data=batches(1), checkpoint=tmp_path / "file")


def test_a_folder_without_data_is_refused(model: nn.Module, tmp_path: Path) -> None:
    with pytest.raises(nc.errors.CalibrationError, match="Pass data"):
        nc.quantize_(model, CODEC, rounding="search", checkpoint=tmp_path)


def test_float_weights_leave_memory_once_they_are_rounded(
    model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They lie in unlinked files, so that an interruption can put them back."""
    weights = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    places = {id(weight): weight.data_ptr() for weight in weights}
    counted = Interrupted(monkeypatch)
    counted.last = 6
    moved: list[int] = []
    move_back = nc.nn.rounding.resume.Finished.move_back

    def look(finished: Any) -> None:
        moved.extend(id(weight) for weight in weights if weight.data_ptr() != places[id(weight)])
        move_back(finished)

    monkeypatch.setattr(nc.nn.rounding.resume.Finished, "move_back", look)
    with pytest.raises(KeyboardInterrupt):
        nc.quantize_(model, CODEC, rounding="gptq", data=batches(2), checkpoint=tmp_path)
    assert len(moved) >= counted.calls > 0
