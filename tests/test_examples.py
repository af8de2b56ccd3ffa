"""Every example runs, at a tiny size, and says what it promises to."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_the_digits_train_are_packed_and_are_told_apart(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    picture = tmp_path / "digits.png"
    options = ["--epochs", "2", "--seeds", "1", "--bits", "4", "--plot", str(picture)]
    command = [sys.executable, str(EXAMPLES / "qat_digits.py"), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=True)
    rows = {
        cells[1].strip(): cells[2:]
        for cells in (line.split("│") for line in done.stdout.splitlines())
        if len(cells) > 5
    }
    assert {"float", "4 bits, apot", "4 bits, pot", "4 bits, int"} <= set(rows)
    # Chance is 10%; two epochs are enough to be far from it.
    assert all(float(rows[name][0]) > 60 for name in ("float", "4 bits, apot", "4 bits, int"))
    assert picture.stat().st_size > 1000


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_an_example_is_short_and_says_how_to_run_it(example: Path) -> None:
    text = example.read_text()
    assert len(text.splitlines()) < 100
    assert f"python examples/{example.name}" in text
