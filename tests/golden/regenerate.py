"""Rewrite the golden files: `PYTHONPATH=src NARROWCAST_KERNEL=reference python tests/golden/regenerate.py`.

Run it only to change the byte format on purpose, and say so in the commit: whoever has stored bytes will not be able to
read them any more. The files are written by the reference, which says what the bytes mean.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

import torch

import narrowcast as nc
from narrowcast.kernels import reference

FOLDER = Path(__file__).parent
SEED = 20
SPECS = (
    *["raw", "fp16", "bf16", "fp8_e4m3", "fp8_e5m2", "fp8_e4m3:scale=none", "fp8_e5m2:scale=none"],
    *["fp8_e4m3:block=8", "fp8_e5m2:block=24,scale=e8m0", "fp8_e4m3:block=row,scale=bf16"],
    *["sign", "sign:block=8,scale=fp32", "sign:block=24,scale=e8m0", "sign:block=row,scale=fp16"],
    *["int2", "int3", "int4", "int5", "int6", "int8"],
    *["int8:block=8", "int8:block=8,scale=fp16", "int8:block=24,scale=bf16", "int8:block=8,scale=e8m0"],
    *["int8:block=row", "int4:block=8", "int4:block=24,scale=e8m0", "int3:block=8,scale=fp32"],
    *["int2:block=24,scale=fp16", "int8:block=8,zero_point=true", "int4:block=24,scale=e8m0,zero_point=true"],
    *["int3:block=8,scale=fp16,zero_point=true", "int8:block=8,stochastic=true"],
    *["int4:block=8,zero_point=true,stochastic=true", "int4:block=24,stochastic=true"],
    *["int2:block=8,scale=e8m0,stochastic=true"],
    *["apot2", "apot3:block=8", "apot4", "apot4:block=8", "apot5:block=24", "apot6:block=8", "apot7", "apot8:block=8"],
    *["pot2", "pot3:block=8", "pot4:scale=fp32", "pot5:block=24", "nf4", "nf4:block=8", "nf4:block=row,scale=e8m0"],
    # fp16 scales end at 65504: blocks beyond are cut, and their codes clipped from far outside the table.
    *["apot4:block=8,scale=fp16", "pot4:block=8,scale=fp16", "nf4:block=8,scale=fp16", "int4:block=8,scale=fp16"],
    *["fp8_e4m3:block=8,scale=fp16", "int4:block=8,scale=fp16,zero_point=true"],
    *["levels:table=-0.3|-0.1|0.0|0.7|5.0,block=8", "levels:table=0.0|1.0,block=24,scale=fp32"],
)
INPUT = "input"


def file_of(spec: str) -> Path:
    return FOLDER / (spec.translate(str.maketrans(":=,|", "____")) + ".json")


def numel_of(spec: str) -> int:
    """One scale for a row that holds a NaN would leave nothing to look at: those stop before the first."""
    return 128 if "block=row" in spec else 203


def make_input() -> torch.Tensor:
    """203 floats: ties, zeros, denormals, constants, FLT_MAX, NaN and infinity, each in an aligned block of 8."""
    flt_max, inf, nan = torch.finfo(torch.float32).max, float("inf"), float("nan")
    generator = torch.Generator().manual_seed(2024)
    x = torch.randn(203, generator=generator) * torch.exp2(torch.randint(-3, 4, (203,), generator=generator).float())
    x[0:8] = torch.tensor([-128.0, 0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 127.5])
    x[8:16] = torch.tensor([8.0, -0.5, -1.5, 0.5, 1.5, 2.5, -7.5, 7.5])
    x[16:24] = torch.tensor([10.0, 0.5, 5.0, 7.0, 9.0, -0.5, -5.0, -9.0])
    x[24:32] = 0.0
    x[32:40] = torch.tensor([0.0, -0.0] * 4)
    x[40:48] = 0.1
    x[48:56] = torch.tensor([1.0, -1.0, 0.9999999, 1e-3, -1e-3, 1e-8, 448.0, -464.0])
    x[56:64] = x[56:64].abs()
    x[64:72] = torch.arange(1, 9).float() * 2.0**-149
    x[72:80] = torch.tensor([1.0, -2.0, 3.0, -4.0, 5.0, -6.0, 7.0, -8.0]) * 2.0**-126
    x[80:88] = torch.arange(-7, 1).float() * 1e-20
    x[128:136] = flt_max
    x[136:144] = torch.tensor([flt_max, -flt_max, flt_max / 2, 1.0, -1e38, 3e37, 0.0, -3.3e38])
    x[144:152][3] = nan
    x[152:160][0] = inf
    x[160:168][7] = -inf
    x[168:176] = torch.tensor([65504.0, 65520.0, -65536.0, 57344.0, 61440.0, 1e5, -3e4, 2.0**-25])
    return x


def to_hex(x: torch.Tensor) -> str:
    return b"".join(struct.pack("<I", value & 0xFFFFFFFF) for value in x.flatten().view(torch.int32).tolist()).hex()


def main() -> None:
    x = make_input()
    for old in FOLDER.glob("*.json"):
        old.unlink()
    (FOLDER / f"{INPUT}.json").write_text(json.dumps({"float32": to_hex(x)}, indent=1) + "\n")
    for spec in SPECS:
        codec, numel = nc.codec(spec), numel_of(spec)
        recipe = codec.recipe(torch.device("cpu"))
        row = reference.encode(x[:numel].unsqueeze(0), recipe, SEED)
        decoded = reference.decode(row, numel, torch.float32, recipe)
        record = {
            "spec": spec,
            "numel": numel,
            "seed": SEED,
            "row": bytes(row[0].tolist()).hex(),
            "decoded": to_hex(decoded),
        }
        file_of(spec).write_text(json.dumps(record, indent=1) + "\n")
    print(f"{len(SPECS)} golden files written to {FOLDER}")


if __name__ == "__main__":
    main()
