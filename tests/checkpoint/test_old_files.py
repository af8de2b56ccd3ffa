"""Files of earlier versions, as they were written then, are read as what they meant then."""

from __future__ import annotations

import base64
from pathlib import Path

import numpy as np
import torch

import narrowcast as nc
from narrowcast.cli.shared.payload_files import decode

# Until fp8 names had blocks, they were plain casts: `nc.save` of a Linear in "fp8_e4m3", at 5e1d24c.
MODEL = (
    "eAEAAAAAAAB7Il9fbWV0YWRhdGFfXyI6eyJmb3JtYXQiOiJwdCIsIm5hcnJvd2Nhc3QiOiJ7XCJ2ZXJzaW9uXCI6IDEsIFwidGVuc29yc1wiOiB7"
    "XCJ3ZWlnaHRcIjoge1wiY29kZWNcIjogXCJmcDhfZTRtM1wiLCBcInNoYXBlXCI6IFsyLCA4XSwgXCJkdHlwZVwiOiBcImZsb2F0MzJcIn19LCBc"
    "ImNoZWNrc3Vtc1wiOiB7XCJ3ZWlnaHRcIjogXCI3NTUyNzc0ZVwifSwgXCJ0aWVkXCI6IHt9LCBcInVzZXJcIjoge319IiwibmFycm93Y2FzdC5j"
    "cmMzMiI6IjkyMmQ3YTZkIn0sIndlaWdodCI6eyJkdHlwZSI6IlU4Iiwic2hhcGUiOlsyLDE2XSwiZGF0YV9vZmZzZXRzIjpbMCwzMl19fSAgICAg"
    "ICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgMKgBOESBBQAAAAAAAAAAAH5+rSolHRUNAAAAAAAAAAA="
)
# `narrowcast encode x.npy y.safetensors --codec fp8_e5m2`, at the same commit.
PAYLOAD = (
    "eAEAAAAAAAB7Il9fbWV0YWRhdGFfXyI6eyJmb3JtYXQiOiJwdCIsIm5hcnJvd2Nhc3QiOiJ7XCJ2ZXJzaW9uXCI6IDEsIFwidGVuc29yc1wiOiB7"
    "XCJhcnJheVwiOiB7XCJjb2RlY1wiOiBcImZwOF9lNW0yXCIsIFwic2hhcGVcIjogWzEsIDhdLCBcImR0eXBlXCI6IFwiZmxvYXQzMlwifX0sIFwi"
    "Y2hlY2tzdW1zXCI6IHtcImFycmF5XCI6IFwiOWIyMjEzYzNcIn0sIFwidGllZFwiOiB7fSwgXCJ1c2VyXCI6IHtcImVuY29kZWRfc2hhcGVzXCI6"
    "IHtcImFycmF5XCI6IFs4XX19fSIsIm5hcnJvd2Nhc3QuY3JjMzIiOiI0N2UwZGRlZSJ9LCJhcnJheSI6eyJkdHlwZSI6IlU4Iiwic2hhcGUiOlsx"
    "LDE2XSwiZGF0YV9vZmZzZXRzIjpbMCwxNl19fSAgICAgICAgICAgICAgICAgICAgOLQUPEKYIQAAAAAAAAAAAA=="
)
X = [0.5, -0.25, 0.001, 1.0, 3.0, -0.002, 0.01, 0.0]
E4M3 = [0.5, -0.25, 2.0**-9, 1.0, 3.0, -(2.0**-9), 0.009765625, 0.0]
E5M2 = [float(torch.tensor(x).to(torch.float8_e5m2)) for x in X]


def test_a_model_in_fp8_of_before_its_blocks_loads_as_the_plain_cast_that_it_is(tmp_path: Path) -> None:
    path = tmp_path / "old.safetensors"
    path.write_bytes(base64.b64decode(MODEL))
    model = torch.nn.Linear(8, 2, bias=False)
    nc.load(path, model)
    assert nc.nn.Linear.__name__ == type(model).__name__
    assert model.codec == nc.codec("fp8_e4m3:scale=none")
    nc.dequantize_(model)
    assert model.weight[0].tolist() == E4M3
    nc.quantize_(model, "fp8_e4m3:scale=none")
    nc.save(model, tmp_path / "new.safetensors")
    again = torch.nn.Linear(8, 2, bias=False)
    nc.load(tmp_path / "new.safetensors", again)
    assert again.codec == model.codec
    assert nc.dequantize_(again) is again
    assert again.weight[0].tolist() == E4M3


def test_a_payload_in_fp8_of_before_its_blocks_decodes_as_the_plain_cast_that_it_is(tmp_path: Path) -> None:
    path = tmp_path / "old.safetensors"
    path.write_bytes(base64.b64decode(PAYLOAD))
    decode(path, tmp_path / "x.npy", None, None)
    assert np.load(tmp_path / "x.npy").tolist() == E5M2
