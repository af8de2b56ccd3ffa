"""A wheel, built from the checkout and installed into an environment that has never seen narrowcast.

What it depends on is lent to that environment from the one that runs the tests: torch alone would take minutes. The
wheel is one for every Python and torch, with the native core where there is a compiler.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.timeout(600)


def build(folder: Path, path: str = os.environ["PATH"]) -> Path:
    """`pip wheel .`, with the programs that lie in `path`.

    The core is not optimized: the install that runs the tests has compiled it as users do.
    """
    environment = {key: value for key, value in os.environ.items() if key not in ("CC", "CXX")}
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT)]
    command += ["--config-settings", f"build-dir={folder}/build"]  # not that of the checkout's own install
    command += ["--config-settings", "cmake.define.NC_UNOPTIMIZED=ON"]
    subprocess.run(command, check=True, env={**environment, "PATH": path}, timeout=600)
    (wheel,) = folder.glob("*.whl")
    return wheel


def install(wheel: Path, folder: Path) -> Path:
    """A new environment with nothing but the wheel, and the packages of this one to import; its folder of programs."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=120)
    programs = folder / "bin"
    command = [str(programs / "python"), "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(command, check=True, timeout=120)
    (packages,) = folder.glob("lib/python*/site-packages")
    # Packages of a folder that a .pth file names can be imported; its own .pth files, such as that of an editable
    # narrowcast, are not read.
    (packages / "lent.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return programs


def run(programs: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "NARROWCAST"))}
    return subprocess.run(
        [str(programs / command[0]), *command[1:]],
        capture_output=True,
        text=True,
        env=environment,
        cwd=programs,
        timeout=120,
    )


KERNEL = "import narrowcast as nc; print(nc.__file__, nc.which_kernel('int8', 'cpu'))"


def test_a_wheel_installs_into_a_clean_environment_with_its_core_its_types_and_its_command(tmp_path: Path) -> None:
    wheel = build(tmp_path / "wheel")
    assert "-py3-none-" in wheel.name
    names = zipfile.ZipFile(wheel).namelist()
    assert "narrowcast/py.typed" in names
    assert not [name for name in names if name.startswith(("tests", "bench", "docs")) or name.endswith((".cpp", ".h"))]
    programs = install(wheel, tmp_path / "clean")
    kernel = run(programs, "python", "-W", "error", "-c", KERNEL)
    assert kernel.stdout.startswith(f"{tmp_path}/clean/lib/"), kernel.stderr
    assert " native/" in kernel.stdout
    assert kernel.stderr == ""
    codecs = run(programs, "narrowcast", "codecs", "--json")
    assert codecs.returncode == 0, codecs.stderr
    assert '"codec": "int4"' in codecs.stdout
    away = run(programs, "narrowcast", "bench", "codec")  # which a wheel does not hold
    assert away.returncode == 2
    assert "Clone the repository" in away.stderr


def test_without_a_compiler_the_install_succeeds_and_says_what_runs(tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("cmake", "ninja", "make", "sh", "env", "uname"):
        found = shutil.which(name)
        if found:
            (tools / name).symlink_to(found)
    programs = install(build(tmp_path / "wheel", str(tools)), tmp_path / "clean")
    kernel = run(programs, "python", "-c", KERNEL)
    assert "reference" in kernel.stdout
    assert kernel.stderr.count("KernelWarning") == 1
    assert "no C++ compiler" in kernel.stderr
