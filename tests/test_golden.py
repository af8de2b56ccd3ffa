"""Literal bytes: what each codec wrote once, it writes on every path, and anyone can read it.

The second half is a decoder that shares nothing with the library, not even torch: it was written from the description
of the format, and must give the golden values bit for bit.
"""

from __future__ import annotations

import itertools
import json
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import narrowcast as nc
from cases import kernels, same_bits

sys.path.insert(0, str(Path(__file__).parent / "golden"))
from regenerate import INPUT, SPECS, file_of, make_input, numel_of

FOLDER = Path(__file__).parent / "golden"


def read(path: Path) -> dict[str, Any]:
    assert path.exists(), f"{path.name} is missing: golden files are part of the format and are never skipped"
    return dict(json.loads(path.read_text()))


def floats(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.float32)


def golden_input() -> torch.Tensor:
    return floats(read(FOLDER / f"{INPUT}.json")["float32"])


def test_there_is_a_golden_file_for_each_spec_and_no_other() -> None:
    assert {path.name for path in FOLDER.glob("*.json")} == {f"{INPUT}.json", *(file_of(spec).name for spec in SPECS)}


def test_every_codec_has_golden_bytes() -> None:
    assert {nc.codec(spec).name for spec in SPECS} == {*nc.list_codecs(), "levels"}


def test_the_golden_input_holds_what_is_difficult() -> None:
    x = golden_input()
    assert same_bits(x, make_input())
    assert int(x.isnan().sum()) == 1
    assert int(x.isinf().sum()) == 2
    assert int((x == 0).sum()) >= 17
    assert int((x.abs() == torch.finfo(torch.float32).max).sum()) == 10
    assert int(((x != 0) & (x.abs() < 2.0**-126)).sum()) == 8


@pytest.mark.parametrize("spec", SPECS)
def test_every_path_writes_the_golden_bytes_and_reads_the_golden_values(spec: str, device: str) -> None:
    golden = read(file_of(spec))
    numel = golden["numel"]
    assert (golden["spec"], numel) == (spec, numel_of(spec))
    codec = nc.codec(spec)
    x = golden_input()[:numel].to(device)
    row = torch.frombuffer(bytearray.fromhex(golden["row"]), dtype=torch.uint8).to(device)
    decoded = floats(golden["decoded"]).to(device)
    recipe = codec.recipe(x.device)
    for name, kernel in kernels(device).items():
        out = torch.full((1, len(row)), 255, dtype=torch.uint8, device=device)
        kernel.encode(out, x.view(1, -1), recipe, golden["seed"])
        assert torch.equal(out[0], row), name
        back = torch.empty(1, numel, device=device)
        kernel.decode(back, row.view(1, -1), recipe)
        assert same_bits(back[0], decoded), name
    assert torch.equal(nc.encode(x, codec, seed=golden["seed"]).data, row)
    assert same_bits(codec.decode(row, numel), decoded)


# -- a decoder from the description alone ------------------------------------------------------------------------------

FLT_MAX = (2 - 2.0**-23) * 2.0**127
NAN = float("nan")
NF4 = (
    *[-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635],
    *[-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725],
    *[0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0],
)


def float32(value: float) -> float:
    """Rounded to fp32; products of two fp32 numbers are exact in Python, so this rounds them once."""
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")


def small_float(code: int, exponent_bits: int, mantissa_bits: int, has_infinity: bool) -> float:
    """An IEEE-like float of 1 + exponent_bits + mantissa_bits bits; e4m3 has no infinity and one NaN."""
    sign = -1.0 if code >> (exponent_bits + mantissa_bits) else 1.0
    exponent = code >> mantissa_bits & (2**exponent_bits - 1)
    mantissa = code & (2**mantissa_bits - 1)
    bias = 2 ** (exponent_bits - 1) - 1
    if exponent == 2**exponent_bits - 1:
        if has_infinity:
            return NAN if mantissa else sign * float("inf")
        if mantissa == 2**mantissa_bits - 1:
            return NAN
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (2**mantissa_bits + mantissa) * 2.0 ** (exponent - bias - mantissa_bits)


FLOAT_BITS = {"fp16": (5, 10, True), "bf16": (8, 7, True), "fp8_e4m3": (4, 3, False), "fp8_e5m2": (5, 2, True)}


def levels_of(name: str, table: str | None) -> list[float]:
    """The levels behind the codes: published tables, or sums of powers of two with the smallest one at 1."""
    if table is not None:
        return [float32(float(item)) for item in table.split("|")]
    if name == "nf4":
        return list(NF4)
    width = int(name[-1]) - 1
    if name.startswith("pot"):
        grid = [0, *(2**i for i in range(2**width - 1))]
    else:  # two bits a term; exponents 0, 1, 2, ... are dealt in turns, the odd bit's comes before the last turn
        pairs, single = divmod(width, 2)
        if pairs == 0:
            pairs, single, turns = 1, 0, 1
        else:
            turns = 3
        exponents = iter(range(100))
        terms: list[list[int]] = [[] for _ in range(pairs)]
        odd: list[list[int]] = []
        for turn in range(turns):
            if single and turn == turns - 1:
                odd = [[next(exponents)]]
            for term in terms:
                term.append(next(exponents))
        last = next(exponents) - 1
        choices = [[0, *(2 ** (last - e) for e in term)] for term in terms + odd]
        grid = sorted(sum(choice) for choice in itertools.product(*choices))
    return [float(-level) for level in reversed(grid[1:])] + [float(level) for level in grid]


def decode_row(spec: str, numel: int, row: bytes) -> list[float]:
    """The floats of one encoded row, in plain Python."""
    name, _, rest = spec.partition(":")
    options = dict(part.split("=") for part in rest.split(",") if part)
    levels = levels_of(name, options.get("table")) if name[:3] in ("apo", "pot", "nf4", "lev") else []
    fixed = {"raw": 32, "fp16": 16, "bf16": 16, "fp8_e4m3": 8, "fp8_e5m2": 8, "sign": 1}
    bits = fixed.get(name) or ((len(levels) - 1).bit_length() if levels else int(name[-1]))

    stream = int.from_bytes(row, "little")
    codes = [stream >> (i * bits) & (2**bits - 1) for i in range(numel)]
    if name == "raw":
        return [struct.unpack("<f", struct.pack("<I", code))[0] for code in codes]
    if name in ("fp16", "bf16") or options.get("scale") == "none":
        return [small_float(code, *FLOAT_BITS[name]) for code in codes]

    small = bits <= 4
    block = options.get("block", "64" if small else "128")
    size = numel if block == "row" else int(block)
    groups = -(-numel // size)
    kind = options.get("scale", "bf16" if small else "fp32")
    width = {"fp32": 4, "bf16": 2, "fp16": 2, "e8m0": 1}[kind]
    codes_bytes = (numel * bits + 7) // 8
    offset = (codes_bytes + width - 1) // width * width
    scales = []
    for group in range(groups):
        raw = row[offset + group * width : offset + (group + 1) * width]
        if kind == "fp32":
            scales.append(struct.unpack("<f", raw)[0])
        elif kind == "fp16":
            scales.append(struct.unpack("<e", raw)[0])
        elif kind == "bf16":
            scales.append(struct.unpack("<f", b"\0\0" + raw)[0])
        else:
            scales.append(NAN if raw[0] == 255 else 0.0 if raw[0] == 0 else 2.0 ** (raw[0] - 127))
    zeros = [0] * groups
    if options.get("zero_point") == "true":
        zeros = list(row[offset + groups * width : offset + groups * width + groups])

    values = []
    for i, code in enumerate(codes):
        scale, zero = scales[i // size], zeros[i // size]
        if name == "sign":
            value = -scale if code else scale
        elif name in FLOAT_BITS:
            value = small_float(code, *FLOAT_BITS[name]) * scale
        elif levels:
            value = levels[code] * scale
        elif options.get("zero_point") == "true":
            value = max(-FLT_MAX, min((code - zero) * scale, FLT_MAX)) if scale == scale else NAN
        else:
            whole = code - 2**bits if code >> (bits - 1) else code
            value = whole * scale + 0.0
        values.append(float32(value))
    return values


@pytest.mark.parametrize("spec", SPECS)
def test_a_decoder_written_from_the_description_reads_the_golden_values(spec: str) -> None:
    golden = read(file_of(spec))
    values = decode_row(spec, golden["numel"], bytes.fromhex(golden["row"]))
    expected = floats(golden["decoded"])
    found = torch.tensor(values, dtype=torch.float32)
    nan = torch.tensor(NAN)
    assert same_bits(torch.where(found.isnan(), nan, found), torch.where(expected.isnan(), nan, expected))


def test_the_second_decoder_would_notice_a_changed_bit() -> None:
    golden = read(file_of("int3"))
    row = bytearray.fromhex(golden["row"])
    row[0] ^= 1
    assert decode_row("int3", golden["numel"], bytes(row)) != decode_row(
        "int3", golden["numel"], bytes.fromhex(golden["row"])
    )
