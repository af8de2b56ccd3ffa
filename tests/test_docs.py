"""Every Python block in README, CONTRIBUTING and docs runs as written, each file from top to bottom."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def run_blocks(page: Path, apart: bool = False) -> None:
    """Run a page's blocks in order, in one namespace."""
    text = page.read_text()
    if "init_process_group" in text and not apart:
        # In a process of its own, which does not clean up: torch was seen to wait for its own thread when it lets go
        # of a group that DDP was the last to hold.
        load = f"import os, sys; sys.path.insert(0, {str(ROOT / 'tests')!r}); import test_docs"
        code = f"{load}; test_docs.run_blocks(test_docs.Path({str(page)!r}), True); os._exit(0)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr
        return
    names: dict[str, object] = {}
    for block in BLOCK.finditer(text):
        line = text[: block.start()].count("\n") + 1
        exec(compile("\n" * line + block[1], str(page), "exec"), names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_code_block_runs(page: Path) -> None:
    run_blocks(page)


def test_the_readme_has_code_to_run() -> None:
    assert len(BLOCK.findall(PAGES[0].read_text())) >= 2
