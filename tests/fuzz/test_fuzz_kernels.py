"""Every kernel against the reference, bit for bit, on bytes that no encoder wrote and on floats of any kind.

In a process with TRITON_INTERPRET=1, or with a GPU, Triton's kernels are among them.
"""

from __future__ import annotations

import os

import pytest
import torch
from campaign import campaign
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from cases import CODECS, DTYPES, FLT_MAX, kernels, mixed, same_bits
from narrowcast.kernels import reference
from narrowcast.kernels import triton as gpu
from processes import in_interpreter

TRITON = torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # numpy's, of the interpreter
KERNELS = {name: kernel for name, kernel in kernels("cpu").items() if name != "reference"}
if TRITON:
    triton, why = gpu.load()
    assert triton is not None, why
    KERNELS = {"triton": triton}

bytes_of_a_kind = st.sampled_from(["any", "zeros", "ones", "extreme scales"])
numels = st.one_of(st.integers(1, 300), st.sampled_from([1000, 4096, 5000]))


def some_bytes(kind: str, count: int, width: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (count, width), generator=generator, dtype=torch.uint8)
    if kind == "zeros":
        data.zero_()
    elif kind == "ones":
        data.fill_(255)
    elif (
        kind == "extreme scales"
    ):  # of all sizes, most of them huge or tiny: products overflow, and infinity meets zero
        choices = torch.tensor([0, 0x7F, 0x80, 0xFF, 0x7C, 0xFC, 0x7E, 1], dtype=torch.uint8)
        data = torch.where(data < 200, choices[data.long() % 8], data)
    return data


def some_floats(numel: int, seed: int, dtype: torch.dtype) -> Tensor:
    x = mixed(numel, seed, dtype)
    generator = torch.Generator().manual_seed(seed)
    odd = torch.tensor([float("nan"), float("inf"), float("-inf"), FLT_MAX, -FLT_MAX, -0.0, 2.0**-149]).to(dtype)
    where = torch.rand(numel, generator=generator) < 0.02
    return torch.where(where, odd[torch.randint(0, 7, (numel,), generator=generator)], x)


@campaign(60)
@given(st.sampled_from(sorted(CODECS)), numels, bytes_of_a_kind, st.integers(0, 2**20), st.sampled_from(DTYPES))
@example("fp8_e5m2:block=8,scale=fp16", 64, "extreme scales", 0, torch.float32)
@example("fp8_e5m2:block=24,scale=e8m0", 300, "extreme scales", 1, torch.float32)  # infinity times zero
@example("apot3", 1000, "extreme scales", 2, torch.float32)  # a product that overflows before it is added
def test_any_bytes_decode_and_sum_to_the_references_bits(
    spec: str, numel: int, kind: str, seed: int, dtype: torch.dtype
) -> None:
    codec, ranks = CODECS[spec], 1 + seed % 4
    recipe = codec.recipe(torch.device("cpu"))
    data = some_bytes(kind, ranks, codec.row_bytes(numel), seed)
    expected = reference.decode(data, numel, dtype, recipe)
    own = some_floats(numel, seed, DTYPES[seed % 4]) if seed % 3 else None
    summed = reference.decode_sum(data, numel, dtype, recipe, own, seed % ranks, ranks)
    again = reference.decode_sum_encode(data, numel, recipe, own, seed % ranks, ranks, seed)
    there = codec.recipe(torch.device(DEVICE))
    mine = None if own is None else own.to(DEVICE)
    for name, kernel in KERNELS.items():
        out = torch.full((ranks, numel), 7.0, dtype=dtype, device=DEVICE)
        kernel.decode(out, data.to(DEVICE), there)
        assert same_bits(out.cpu(), expected), (name, "decode")
        total = torch.full((numel,), 7.0, dtype=dtype, device=DEVICE)
        kernel.decode_sum(total, data.to(DEVICE), there, mine, seed % ranks, ranks)
        assert same_bits(total.cpu(), summed), (name, "decode_sum")
        row = torch.full((data.shape[1],), 0xA5, dtype=torch.uint8, device=DEVICE)
        kernel.decode_sum_encode(row, data.to(DEVICE), numel, there, mine, seed % ranks, ranks, seed)
        assert torch.equal(row.cpu(), again), (name, "reduce")


@campaign(60)
@given(st.sampled_from(sorted(CODECS)), numels, st.integers(0, 2**20), st.sampled_from(DTYPES))
def test_any_floats_encode_to_the_references_bytes(spec: str, numel: int, seed: int, dtype: torch.dtype) -> None:
    codec = CODECS[spec]
    rows = torch.stack([some_floats(numel, seed + i, dtype) for i in range(1 + seed % 2)])
    expected = reference.encode(rows, codec.recipe(torch.device("cpu")), seed)
    for name, kernel in KERNELS.items():
        out = torch.full(expected.shape, 0xA5, dtype=torch.uint8, device=DEVICE)
        kernel.encode(out, rows.to(DEVICE), codec.recipe(torch.device(DEVICE)), seed)
        assert torch.equal(out.cpu(), expected), name


@pytest.mark.skipif(TRITON, reason="this process runs Triton's kernels itself")
@pytest.mark.timeout(600)
def test_triton_gives_the_references_bits_in_its_interpreter_too() -> None:
    in_interpreter(__file__)
