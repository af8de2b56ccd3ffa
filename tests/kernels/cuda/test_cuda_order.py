"""What the compiler makes of `after_the_last`: machine code reads nothing that another kernel may be writing before it.

A kernel may start while the one before it runs, and the order of its loads is the compiler's. The emulator runs them in
the order of the source, so this is looked up in the machine code: nvcc compiles without a GPU, and Triton's package
brings cuobjdump. (`const __restrict__` queries were once read ahead of the wait; the texts of decoders were wrong.)
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

import triton

import narrowcast as nc
from narrowcast.kernels.cuda.attention import division
from narrowcast.kernels.cuda.cuts import choose_cut
from narrowcast.kernels.cuda.formats import block_of, codes_of, fp8_of, scaling_of, sources
from narrowcast.kernels.cuda.ring import choose_ring
from narrowcast.kernels.cuda.slices import choose_slices
from narrowcast.kernels.cuda.wide import choose_wide

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
Defines = Iterable[tuple[str, int]]

pytestmark = [
    pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc, of a CUDA toolkit"),
    pytest.mark.skipif(not CUOBJDUMP.exists(), reason="needs cuobjdump, which this build of Triton does not bring"),
]


def plan(name: str, spec: str, batch: int) -> Defines:
    """How an H200 multiplies `batch` bf16 rows of x with a bias by 4096x4096 weights, with the kernel of that name."""
    format = nc.codec(spec).recipe(torch.device("cpu")).format
    codes, block, scale = codes_of(format), block_of(format, 4096), int(format.scale)
    assert codes is not None
    if name in ("dot", "tile"):
        cut = choose_cut(codes, format, batch, 4096, 4096, 2, 2, 132)
        assert cut is not None
        assert cut.name == name
        return cut.defines
    if name == "ring":
        ring = choose_ring(format, 4096, 4096, nc.codec(spec).row_bytes(4096), 2, 2, 132)
        assert ring is not None
        return ring.defines
    if name == "slices":
        slices = choose_slices(codes, block, scale, batch, 4096, 4096, 2, 2, 132, 227 << 10, True)
        assert slices is not None
        return slices.defines
    scaling, fp8 = scaling_of(nc.codec(spec).recipe(torch.device("cpu")), torch.bfloat16, 4096), fp8_of(format)
    wide = choose_wide(codes, block, scale, scaling, fp8, batch, 4096, 4096, 2, 2, 132, 227 << 10)
    assert wide is not None
    return wide.defines


def attention(blocks: int, heads: int) -> Defines:
    warps, ahead, resident = division(blocks, heads)
    defines = {"X": 2, "SIZE": 128, "HEADS": heads, "KS": warps, "UNROLL": ahead, "RESIDENT": resident}
    return (defines | {"SCALE": 0, "BLOCK": 0, "BIAS": -1}).items()


SUMS = {"X": 2, "SCALE": 0, "BLOCK": 0, "BIAS": 2, "UNROLL": 1, "PARTS": 4}
CASES: dict[str, tuple[str, Defines]] = {
    "dot": ("dot", plan("dot", "int8", 1)),
    "tile": ("tile", plan("tile", "int4", 1)),
    "tile, nf4": ("tile", plan("tile", "nf4", 1)),
    "tile, 3 rows": ("tile", plan("tile", "int4", 3)),
    "ring": ("ring", plan("ring", "int4", 1)),
    "slices": ("slices", plan("slices", "int8", 24)),
    "slices, wgmma": ("slices", plan("slices", "int4", 40)),
    "wide": ("wide", plan("wide", "int4", 64)),
    "total": ("total", (SUMS | {"WIDE": 4}).items()),
    "join": ("join", (SUMS | {"TILES": 8, "TEAMS": 2}).items()),
    "attend": ("attend", attention(32, 1)),
    "attend, 2 queries to a key": ("attend", attention(32, 2)),
    "attend, 4 queries to a key": ("attend", attention(256, 4)),
}


def machine_code(name: str, defines: Defines, folder: Path, source: str | None = None) -> list[str]:
    """The instructions of a kernel, as an H200 runs them."""
    text = "".join(f"#define {key} {value}\n" for key, value in defines)
    text += "".join(file.read_text() for file in sources(name)) if source is None else source
    (folder / "kernel.cu").write_text(text)
    build = ["nvcc", "-gencode=arch=compute_90a,code=sm_90a", "-cubin", "-w", "-o", "kernel.cubin", "kernel.cu"]
    subprocess.run(build, cwd=folder, check=True, capture_output=True)
    said = subprocess.run(
        [CUOBJDUMP, "-sass", "kernel.cubin"], cwd=folder, check=True, capture_output=True, text=True
    ).stdout
    return re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*?);", said, re.MULTILINE)


def before_the_wait(code: list[str]) -> tuple[list[str], list[str]]:
    """Reads of memory in front of the first wait: of what nobody writes while the kernel runs, and of all else."""
    wait = next(i for i, line in enumerate(code) if "ACQBULK" in line)
    reads = [line for line in code[:wait] if re.search(r"\b(LDG|LD|UBLKCP|UTMALDG|LDGSTS)\b", line)]
    constant = [line for line in reads if re.search(r"CONSTANT|\.EF\.|\.NA\.|LDGSTS", line)]
    return constant, [line for line in reads if line not in constant]


@pytest.mark.parametrize("case", CASES)
def test_nothing_is_read_before_the_kernel_before_has_ended(case: str, tmp_path: Path) -> None:
    name, defines = CASES[case]
    constant, others = before_the_wait(machine_code(name, [*defines, ("READ_WEIGHTS_EARLY", 0)], tmp_path))
    assert constant == others == []


@pytest.mark.parametrize("case", CASES)
def test_where_weights_were_written_long_ago_nothing_else_is_read_early(case: str, tmp_path: Path) -> None:
    name, defines = CASES[case]
    constant, others = before_the_wait(machine_code(name, [*defines, ("READ_WEIGHTS_EARLY", 1)], tmp_path))
    if name == "attend":  # where the sequence is, and as many keys and values as are read ahead; angles are constant
        assert len(others) == 1 + 2 * dict(defines)["UNROLL"]
        assert all("128" not in line for line in constant)
    else:  # codes, scales and tables; the copies of ring.cu and wide.cu stand behind a branch
        assert others == []
        assert name not in ("total", "join") or constant == []


def test_a_load_that_is_taken_ahead_of_the_wait_is_noticed(tmp_path: Path) -> None:
    """attend.cu as it was: the compiler reads queries and keys first."""
    source = "".join(file.read_text() for file in sources("attend"))
    for name in ("queries", "keys", "values"):
        assert f"const u16* {name}" in source
        source = source.replace(f"const u16* {name}", f"const u16* __restrict__ {name}")
    code = machine_code("attend", [*attention(32, 1), ("READ_WEIGHTS_EARLY", 1)], tmp_path, source)
    constant, _ = before_the_wait(code)
    assert any("128" in line for line in constant)
