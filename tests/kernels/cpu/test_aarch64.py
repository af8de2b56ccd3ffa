"""The native core for aarch64: built by a cross compiler, run under an emulator, the bytes and floats of this machine.

Debian's and Ubuntu's packages: g++-aarch64-linux-gnu, qemu-user-static. Without them the test is skipped.
"""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

import narrowcast as nc
from cases import CODECS
from narrowcast.kernels.layout import layout, scaling

ROOT = Path(__file__).parents[3]
COMPILER = "aarch64-linux-gnu-g++"
EMULATOR = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
ROWS, SEED = 3, 7
pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(
        not (shutil.which(COMPILER) and EMULATOR), reason=f"needs {COMPILER} and qemu-aarch64: apt install them"
    ),
]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """foreign_core.cpp, linked with the core as CMake builds it for aarch64: the command that runs it."""
    folder = tmp_path_factory.mktemp("aarch64")
    target = ["-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64", f"-DCMAKE_CXX_COMPILER={COMPILER}"]
    subprocess.run(["cmake", "-S", ROOT, "-B", folder, *target], check=True)
    subprocess.run(["cmake", "--build", folder, "--parallel", "2"], check=True)
    source, headers = Path(__file__).with_name("foreign_core.cpp"), ROOT / "src/narrowcast/kernels/cpu/core"
    core = folder / "_narrowcast_core.so"
    command = [COMPILER, "-std=c++17", "-I", headers, source, core, f"-Wl,-rpath,{folder}", "-o", folder / "program"]
    subprocess.run(command, check=True)
    found = subprocess.run([COMPILER, "-print-file-name=libc.so.6"], check=True, capture_output=True, text=True)
    assert EMULATOR is not None
    return [EMULATOR, "-L", str(Path(found.stdout.strip()).resolve().parents[1]), str(folder / "program")]


def case_of(codec: nc.codecs.Codec, x: Tensor) -> bytes:
    """A Spec without its addresses, rows, the seed, the length of the table; the table; the floats."""
    format, peak, table = codec.recipe(torch.device("cpu"))
    numel = x.shape[1]
    where = layout(format, numel)
    told = (format.element, format.bits, format.scale, format.stochastic, format.signed_scale, 0)
    sizes = (numel, where.blocks, where.block_size, where.codes_bytes, where.scales_offset, where.zeros_offset)
    spec = struct.pack("<6i2f7q", *told, *scaling(format, peak), *sizes, where.row_bytes)
    levels = b"" if table is None else table.numpy().tobytes()
    return spec + struct.pack("<2qqQq", 0, 0, len(x), SEED, len(levels) // 4) + levels + x.numpy().tobytes()


def inputs(numel: int) -> Tensor:
    """Rows that are plain, that are difficult, and that are not finite here and there."""
    x = torch.randn(ROWS, numel, generator=torch.Generator().manual_seed(numel))
    x[1] *= torch.logspace(-44, 38, numel)
    x[2, :: max(2, numel // 3)] = float("nan")
    x[2, 1 :: max(2, numel // 2)] = float("inf")
    return x


@pytest.mark.timeout(1800)
def test_aarch64_gives_the_bytes_and_the_floats_of_this_machine(program: list[str]) -> None:
    cases = [(codec, inputs(numel)) for codec in CODECS.values() for numel in (1, 33, 1000, 70_001)]
    given = b"".join(case_of(codec, x) for codec, x in cases)
    done = subprocess.run(program, input=given, check=True, stdout=subprocess.PIPE)
    results, place = torch.frombuffer(bytearray(done.stdout), dtype=torch.uint8), 0
    for codec, x in cases:
        data = codec.encode(x, seed=SEED)
        for expected in (data, codec.decode(data, x.shape[1]), codec.decode_sum(data, x.shape[1])):
            end = place + expected.nbytes
            same = torch.equal(results[place:end], expected.contiguous().view(torch.uint8).flatten())
            assert same, f"{codec}, {x.shape[1]} elements"
            place = end
    assert place == len(results)
