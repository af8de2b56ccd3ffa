"""CONTRIBUTING.md adds a codec in one file and one line. Added just so, it passes the suite of every other codec."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
SUITES = ["tests/codecs/test_conformance.py", "tests/codecs/test_bounds.py"]


def conform(folder: Path, block: str) -> tuple[int, str]:
    """The exit code and the words of the suites, run on the codec that `block` defines under its line of the page."""
    (line,) = re.findall(r"^nc\.register_codec\(.*\)$", TEXT, re.MULTILINE)
    name = line.split('"')[1]
    plugin = f"{block}\nimport narrowcast as nc\n{line}\n"
    (folder / "worked_example.py").write_text(plugin)
    paths = os.pathsep.join([str(folder), *filter(None, sys.path)])
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-q", "-p", "worked_example", "-p", "no:cacheprovider"]
    command += ["-k", f"{name} and not soak", "-n", "0", *SUITES]
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    return done.returncode, done.stdout + done.stderr


def test_the_codec_of_the_worked_example_passes_the_suite_of_every_codec(tmp_path: Path) -> None:
    code, words = conform(tmp_path, re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)[0])
    assert code == 0, words
    (passed,) = re.findall(r"(\d+) passed", words)
    assert int(passed) > 50
