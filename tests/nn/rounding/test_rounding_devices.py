"""What a rounding holds where: floats of the block that runs stay on its device, and memory is bounded."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from test_gptq_rounding import Model, batches

import narrowcast as nc
from narrowcast.nn.rounding import polish, resume, sequence

CODEC = "int4:block=16"


def test_floats_that_are_moved_out_stay_for_the_block_that_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU a block could not run with weights in a file; here the addresses show that it has its own."""
    torch.manual_seed(0)
    model = Model()
    places = {parameter.data_ptr() for parameter in model.parameters()}
    record, looked = sequence._Block.record, []

    def look(block: Any, weights: Any) -> Any:
        floats = [value for value in block.twin.parameters() if value.is_floating_point()]
        looked.append(all(value.data_ptr() in places for value in floats))
        return record(block, weights)

    monkeypatch.setattr(sequence._Block, "record", look)
    nc.quantize_(model, CODEC, rounding="gptq", data=batches(2), checkpoint=tmp_path)
    assert len(looked) > 2
    assert all(looked)


def test_scales_are_fitted_alike_however_many_rows_are_solved_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    codec, weight, x = nc.codec(CODEC), torch.randn(12, 64), torch.randn(100, 64)
    moments = x.t() @ x / 100 + 0.1 * torch.eye(64)
    rows = codec.encode(weight)
    expected = polish.polish(weight, codec, rows, moments)
    solved: list[int] = []
    solve = torch.linalg.solve_ex
    monkeypatch.setattr(torch.linalg, "solve_ex", lambda a, b: solved.append(len(a)) or solve(a, b))
    monkeypatch.setattr(polish, "SYSTEMS", 5 * 4**2)  # five rows of four blocks
    assert torch.equal(polish.polish(weight, codec, rows, moments), expected)
    assert solved == [5, 5, 2] * 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("spec", [CODEC, "nf4", "int3:zero_point=true", "int8:block=row"])
def test_gptq_on_a_gpu(spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows lie on the GPU, lose less than nearest ones, and an interrupted rounding ends in the same bytes."""
    torch.manual_seed(0)
    model, data = Model().cuda(), batches(3)
    plain = copy.deepcopy(model)
    report = nc.quantize_(plain, spec, rounding="gptq", data=data)
    assert all(entry.error <= entry.nearest_error for entry in report.entries if entry.rounding == "gptq")
    assert all(parameter.is_cuda for parameter in plain.parameters())
    keep, kept = resume.Finished.keep, []

    def stop(finished: Any, key: str, *rest: Any) -> None:
        keep(finished, key, *rest)
        kept.append(key)
        if len(kept) == 6:
            raise KeyboardInterrupt

    monkeypatch.setattr(resume.Finished, "keep", stop)
    floats = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(KeyboardInterrupt):
        nc.quantize_(model, spec, rounding="gptq", data=data, checkpoint=tmp_path)
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), floats, strict=True))
    nc.quantize_(model, spec, rounding="gptq", data=data, checkpoint=tmp_path)
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), plain.parameters(), strict=True))
