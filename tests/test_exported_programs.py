"""Programs of torch.export and packages of AOTInductor, in a process that has imported narrowcast and nothing of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import narrowcast as nc

LOADS = """
import sys
exec(sys.argv[1])
folder, inputs = sys.argv[2], torch.arange(6).view(2, 3)
expected = torch.load(f"{folder}/expected.pt")
for name in sys.argv[3:]:
    path = f"{folder}/{name}"
    run = torch._inductor.aoti_load_package(path) if name == "aoti.pt2" else torch.export.load(path).module()
    torch.testing.assert_close(run(inputs), expected, rtol=0, atol=1e-6)
print("narrowcast.public" in sys.modules)
"""


def exported(folder: Path, codec: str) -> torch.export.ExportedProgram:
    """A quantized model, exported; and what it computes, in a file."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 64), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).eval()
    nc.quantize_(model, codec)
    inputs = torch.arange(6).view(2, 3)
    torch.save(model(inputs).detach(), folder / "expected.pt")
    return torch.export.export(model, (inputs,))


def load(imports: str, folder: Path, *names: str) -> str:
    command = [sys.executable, "-W", "ignore", "-c", LOADS, imports, str(folder), *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("imports", ["import narrowcast, torch", "import torch, narrowcast"])
def test_an_exported_program_loads_and_runs_after_import_narrowcast(imports: str, tmp_path: Path) -> None:
    torch.export.save(exported(tmp_path, "int4"), tmp_path / "program.pt2")
    assert load(imports, tmp_path, "program.pt2") == "False\n"


@pytest.mark.soak  # a minute of compiling
def test_an_aotinductor_package_loads_and_runs_after_import_narrowcast(tmp_path: Path) -> None:
    program = exported(tmp_path, "int8")
    torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "aoti.pt2"))
    assert load("import narrowcast, torch", tmp_path, "aoti.pt2") == "False\n"


def test_import_narrowcast_alone_imports_no_torch_and_prints_nothing() -> None:
    code = "import narrowcast, sys; assert 'torch' not in sys.modules; import json; assert len(sys.meta_path) < 9"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_every_operator_is_registered_by_the_import() -> None:
    code = (
        "import narrowcast, torch; ops = torch._C._dispatch_get_all_op_names()\n"
        "before = {op for op in ops if op.startswith('narrowcast::')}\n"
        "import narrowcast.public, narrowcast.compat, narrowcast.distributed\n"
        "ops = torch._C._dispatch_get_all_op_names()\n"
        "print({op for op in ops if op.startswith('narrowcast::')} - before, len(before) > 10)"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=100)
    assert done.stdout == "set() True\n", done.stderr
