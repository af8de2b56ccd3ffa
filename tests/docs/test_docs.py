"""Every fenced block of README, CONTRIBUTING and docs is put to the test. Here: Python, TOML and plain text.

Shell is for test_docs_shell.py, and diffs are for test_docs_diffs.py.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fences import PAGES, ROOT, Block, all_blocks, blocks_of, run_page, script_command
from running import run
from typer.testing import CliRunner

import narrowcast as nc
from narrowcast.cli import app
from narrowcast.codecs import registry

LANGUAGES = {"python", "sh", "diff", "toml", ""}


def put(folder: Path, text: str) -> Path:
    page = folder / "page.md"
    page.write_text(text)
    return page


# -- blocks -----------------------------------------------------------------------------------------------------------


def test_every_block_has_a_language_that_the_tests_know() -> None:
    assert [f"{block} {block.language}" for block in all_blocks() if block.language not in LANGUAGES] == []


def test_blocks_are_found_wherever_they_are_indented_and_whatever_their_fence(tmp_path: Path) -> None:
    page = put(tmp_path, "a\n```rust\nx\n\n```\n- b\n\n  ~~~ toml\n  [y]\n    z\n  ~~~\n````\n```\n````\n")
    found = [(block.line, block.language, block.text) for block in blocks_of(page)]
    assert found == [(2, "rust", "x\n\n"), (8, "toml", "[y]\n  z\n"), (12, "", "```\n")]


def test_a_fence_that_is_not_closed_is_found(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"page.md:3: this fence is not closed"):
        blocks_of(put(tmp_path, "a\n\n```python\n1 / 0\n"))


# -- Python -----------------------------------------------------------------------------------------------------------


def run_python(page: Path) -> None:
    """Run a page's blocks; in a process of its own, which does not clean up, where they make a process group: torch
    was seen to wait for its own thread when it lets go of a group that DDP was the last to hold."""
    if not any("init_process_group" in b.text and not script_command(b) for b in blocks_of(page, "python")):
        run_page(page)
        return
    load = f"import os, sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); from fences import Path, run_page"
    code = f"{load}; run_page(Path({str(page)!r})); os._exit(0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


def run_script(block: Block, folder: Path) -> str:
    """Save a block under the name that its first line gives it, and run that line."""
    command = script_command(block)
    assert command is not None
    (folder / command.split()[-1]).write_text(block.text)
    return run(command, folder)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_python_blocks_of_a_page_run_in_order(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_codecs", dict(registry._codecs))  # a page may register one of its own
    run_python(page)


@pytest.mark.parametrize("block", [*filter(script_command, all_blocks("python"))], ids=str)
def test_a_block_that_says_how_torchrun_starts_it_runs_so(block: Block, tmp_path: Path) -> None:
    run_script(block, tmp_path)


def test_the_readme_has_code_to_run() -> None:
    assert len(blocks_of(PAGES[0], "python")) >= 2


SCRIPT = """```python
# torchrun --nproc-per-node 2 meet.py   (and more words)
import os, sys

print(f"{os.environ['WORLD_SIZE']} ranks in {sys.argv[0]}")
sys.exit(int(os.environ["RANK"]))
```
"""


def test_a_script_gets_its_ranks_and_one_that_fails_is_found(tmp_path: Path) -> None:
    (script,) = blocks_of(put(tmp_path, SCRIPT))
    with pytest.raises(AssertionError, match=r"exitcode +: 1 ") as caught:
        run_script(script, tmp_path)
    assert "2 ranks in meet.py" in str(caught.value)


def test_the_blocks_around_a_script_have_one_namespace_without_it(tmp_path: Path) -> None:
    names = run_page(put(tmp_path, f"```python\nx = 1\n```\n{SCRIPT}```python\nassert x == 1\nx = 2\n```\n"))
    assert names["x"] == 2
    assert "sys" not in names


def test_a_block_that_fails_is_found_at_its_line(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        run_python(put(tmp_path, "# Title\n\n```python\nx = 0\n1 / x\n```\n"))
    assert caught.traceback[-1].lineno == 5 - 1
    with pytest.raises(AssertionError, match=r'page.md", line 2, in <module>\n(.*\n)*.*ZeroDivisionError'):
        run_python(put(tmp_path, "```python\n1 / 0  # init_process_group\n```\n"))


# -- TOML -------------------------------------------------------------------------------------------------------------


def unused_rules(block: Block, folder: Path) -> list[str]:
    """The rules of a block that decide nothing in a small Llama, which `narrowcast quantize` is given with them."""
    names = ("model.embed_tokens", "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.up_proj", "lm_head")
    nc.save({f"{name}.weight": torch.randn(16, 256) for name in names}, folder / "llama")
    (folder / "rules.toml").write_text(block.text)
    words = ["quantize", str(folder / "llama"), str(folder / "small"), "--rules", str(folder / "rules.toml"), "--json"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    return list(json.loads(result.stdout)["unused_rules"])


@pytest.mark.parametrize("block", all_blocks("toml"), ids=str)
def test_rules_are_accepted_and_each_of_them_decides_something(block: Block, tmp_path: Path) -> None:
    assert unused_rules(block, tmp_path) == []


def test_rules_that_decide_nothing_or_are_none_are_found(tmp_path: Path) -> None:
    (idle, wrong) = blocks_of(put(tmp_path, "```toml\n[rules]\nmpl = 'int4'\n```\n```toml\n[rule]\n```\n"))
    assert unused_rules(idle, tmp_path / "a") == ["mpl"]
    with pytest.raises(AssertionError, match="expected one table"):
        unused_rules(wrong, tmp_path / "b")


# -- plain text -------------------------------------------------------------------------------------------------------


def missing(text: str) -> list[str]:
    """The names of a map, one folder deeper every two spaces, that are not there."""
    folders, absent = {0: ROOT}, []
    for line in text.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        names = re.split(r"  +", line.strip())[0].split(", ")
        absent += [name for name in names if not [*folders[depth].glob(name.rstrip("/"))]]
        folders[depth + 1] = folders[depth] / names[0]
    return absent


def map_is_right(block: Block) -> bool:
    return missing(block.text) == []


def report_is_what_is_printed(block: Block) -> bool:
    """By the code above it; but for the noise, as weights are drawn at random."""
    names: dict[str, object] = {}
    code = [other for other in blocks_of(block.page, "python") if other.line < block.line][-1]
    exec(compile(code.text, str(code), "exec"), names)
    said, shown = (re.sub(r" *[\d.]+ dB", "", text).strip() for text in (str(names["report"]), block.text))
    return said == shown


def levels_are_those_of_nf4(block: Block) -> bool:
    return [float(word) for word in block.text.split()] == nc.codec("nf4").levels.tolist()


def row_is_one_of_the_asserts_below(block: Block) -> bool:
    return f'"{" ".join(block.text.replace("|", " ").split())}"' in block.page.read_text()


# By page and first words: the check of each block without a language, or why there is none.
TEXTS: dict[tuple[str, str], Callable[[Block], bool] | str] = {
    ("CONTRIBUTING.md", "src/narrowcast/"): map_is_right,
    ("weights.md", "weight    kind"): report_is_what_is_printed,
    ("format.md", "-1.0  "): levels_are_those_of_nf4,
    ("format.md", "3f b0 "): row_is_one_of_the_asserts_below,
    ("format.md", "[codes][gap]"): "a picture, which the row and its asserts make exact",
    ("architecture.md", "errors <- kernels"): "arrows, which tests/test_architecture.py checks",
    ("architecture.md", "ddp hook ->"): "the way of a gradient, in words",
    ("bounds.md", "B = "): "a formula; the page's own code holds errors against it",
}


def check_of(block: Block) -> Callable[[Block], bool] | str | None:
    fits = [key for key in TEXTS if key[0] == block.page.name and block.text.startswith(key[1])]
    return TEXTS[fits[0]] if fits else None


@pytest.mark.parametrize("block", all_blocks(""), ids=str)
def test_plain_text_says_what_is_so(block: Block) -> None:
    check = check_of(block)
    assert check is not None, "a block without a language is no code: name its language, or check it in TEXTS"
    assert isinstance(check, str) or check(block)


def test_a_map_of_what_is_not_there_is_found() -> None:
    text = "src/narrowcast/\n  errors.py    words\n  nn/    words\n    quantize.py, quantise.py    x.py\n    gpu_*.py\n"
    text += "tests/\nbenches/\n"
    assert missing(text) == ["quantise.py", "gpu_*.py", "benches/"]
