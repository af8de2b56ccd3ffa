"""Wheels from scratch: one for every Python and torch, with the native core where there is a compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.soak


def build(folder: Path, path: str) -> Path:
    environment = {key: value for key, value in os.environ.items() if key not in ("CC", "CXX")}
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, env={**environment, "PATH": path}, timeout=600)
    (wheel,) = folder.glob("*.whl")
    return wheel


def kernel_of(wheel: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    script = "import narrowcast as nc; print(nc.__file__, nc.which_kernel('int8', 'cpu'))"
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=True)


def test_a_wheel_serves_every_python_and_holds_the_core(tmp_path: Path) -> None:
    wheel = build(tmp_path / "wheel", os.environ["PATH"])
    assert "-py3-none-" in wheel.name
    run = kernel_of(wheel, tmp_path / "site")
    assert str(tmp_path) in run.stdout
    assert "native/" in run.stdout
    assert not run.stderr


def test_without_a_compiler_the_install_succeeds_and_says_what_runs(tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("cmake", "ninja", "make", "sh", "env", "uname"):
        found = shutil.which(name)
        if found:
            (tools / name).symlink_to(found)
    wheel = build(tmp_path / "wheel", str(tools))
    run = kernel_of(wheel, tmp_path / "site")
    assert "reference" in run.stdout
    assert run.stderr.count("KernelWarning") == 1
    assert "no C++ compiler" in run.stderr
