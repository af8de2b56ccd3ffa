"""The fenced blocks of README, CONTRIBUTING and docs: where each one stands, its language, its text."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"( *)(`{3,}|~{3,})(.*)")


@dataclass(frozen=True)
class Block:
    """A block without its fences. `line` is that of the opening one, so the text starts below it."""

    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks_of(page: Path, *languages: str) -> list[Block]:
    """A page's blocks in order: those of some languages, or all. A fence that is not closed raises."""
    found, opened, lines = [], None, []
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if opened is None:
            opened, lines, start = FENCE.fullmatch(line), [], number
        elif line.strip() == opened[2]:
            found.append(Block(page, start, opened[3].strip(), "\n".join([*lines, ""])))
            opened = None
        else:
            lines.append(line.removeprefix(opened[1]))
    assert opened is None, f"{page.name}:{start}: this fence is not closed"
    return [block for block in found if not languages or block.language in languages]


def all_blocks(*languages: str) -> list[Block]:
    """Those of every page."""
    return [block for page in PAGES for block in blocks_of(page, *languages)]


def script_command(block: Block) -> str | None:
    """How to start a block that is a script of its own, by its first line: `# torchrun --nproc-per-node 2 x.py`."""
    first = re.match(r"# (torchrun .*?\w+\.py)(?:\s.*)?\n", block.text)
    return first[1] if first else None


def run_page(page: Path) -> dict[str, object]:
    """Run a page's Python blocks that are no scripts, in order, in one namespace, which is returned."""
    names: dict[str, object] = {}
    for block in blocks_of(page, "python"):
        if script_command(block) is None:
            exec(compile("\n" * block.line + block.text, str(page), "exec"), names)
    return names
