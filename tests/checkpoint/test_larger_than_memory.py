"""Files that are larger than memory: sparse ones, in a process that may not have as much memory as they have bytes."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import narrowcast as nc
from narrowcast.checkpoint import read

GIB = 1 << 30

# The command, when the process may have 150 MB more of private memory than it has now.
LIMITED = """
import resource, sys
from pathlib import Path
import torch, numpy
import narrowcast as nc
from narrowcast.cli import app
from narrowcast.checkpoint import conversion, models
from narrowcast.cli.shared import payload_files
nc.encode(torch.ones(8), "int2")
torch.ones(1 << 20).aminmax()
status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
limit = int(status["VmData"].split()[0]) * 1024 + 150_000_000
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
app(sys.argv[1:])
"""


def sparse(path: Path, tensors: dict[str, tuple[str, int, tuple[int, ...]]]) -> Path:
    """A safetensors file of zeros that takes no room on the disk. Tensors: dtype, its bytes, shape."""
    header, end = {}, 0
    for name, (dtype, size, shape) in tensors.items():
        start, end = end, end + size * int(np.prod(shape, dtype=np.int64))
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    body = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(body)) + body)
        file.truncate(8 + len(body) + end)
    return path


def limited(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", LIMITED, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=200)


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts mapped memory on Linux only")
@pytest.mark.parametrize("command", ["quantize", "encode", "inspect", "npy"])
def test_a_command_reads_a_tile_at_a_time(command: str, tmp_path: Path) -> None:
    source = sparse(tmp_path / "x.safetensors", {"a.weight": ("BF16", 2, (2048, 131072)), "b": ("I8", 1, (9,))})
    options: list[object] = [tmp_path / "y.safetensors", "--codec", "int2"]
    if command == "inspect":
        options = ["--codecs", "int2", "--json"]
    if command == "npy":
        source, command = tmp_path / "x.npy", "encode"
        np.lib.format.open_memmap(source, "w+", np.float16, (2048, 131072)).flush()
    done = limited(command, source, *options)
    assert done.returncode == 0, done.stderr
    if command != "inspect":
        rows = read(tmp_path / "y.safetensors")
        encoding = next(iter(rows.encodings.values()))
        assert encoding.shape.numel() == 1 << 28
        back = limited("decode", tmp_path / "y.safetensors", tmp_path / "z.safetensors")
        assert back.returncode == 0, back.stderr


def test_a_file_of_40_gib_is_opened_mapped_and_loaded(tmp_path: Path) -> None:
    shape = (40 * GIB // 4 // 1024, 1024)
    path = sparse(tmp_path / "x.safetensors", {"small": ("F32", 4, (2, 8)), "large": ("F32", 4, shape)})
    assert torch.equal(read(path).read("large", shape[0] * 1024 - 3, shape[0] * 1024), torch.zeros(3))
    assert read(path).tensor("large")[-1, -1] == 0
    state = nc.load(path)
    large = state["large"]
    assert isinstance(large, torch.Tensor)
    large[5, 5] = 1.0  # stays in memory
    assert large[5].sum() == 1
    assert read(path).read("large", 5 * 1024 + 5, 5 * 1024 + 6).item() == 0
