"""The documentation as a whole: links lead somewhere, figures are those of the results, every public name is
described, and the site builds without a warning. What its code blocks do is for test_docs.py."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from decimal import Decimal
from pathlib import Path

import pytest

import narrowcast as nc
from narrowcast import distributed, errors
from narrowcast.cli import app

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
RESULTS = sorted((ROOT / "bench/results").glob("*.md"))
LINK = re.compile(r"\]\(([^)\s#]*)(?:#([^)\s]*))?\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
NUMBER = re.compile(r"[\d,]*\d(?:\.\d+)?%?")


def anchors(page: Path) -> set[str]:
    """The names that headings have, in the site and on GitHub."""
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in HEADING.findall(page.read_text())}


def broken_links(page: Path, text: str) -> list[str]:
    broken = []
    for target, anchor in LINK.findall(text):
        found = page.parent / target if target else page
        if "://" not in target and (not found.exists() or (anchor and anchor not in anchors(found))):
            broken.append(f"{target}#{anchor}" if anchor else target)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_to_a_heading_in_it(page: Path) -> None:
    assert broken_links(page, page.read_text()) == []


def test_a_link_that_leads_nowhere_is_found() -> None:
    text = "[a](format.md#tables), [b](../Makefile), [c](https://example.org), [d](formats.md), [e](format.md#chairs)"
    assert broken_links(ROOT / "docs/limits.md", text) == ["formats.md", "format.md#chairs"]


def test_every_page_is_in_the_menu_of_the_site() -> None:
    menu = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    assert pages <= set(re.findall(r"[\w/]+\.md", menu))


# -- figures --------------------------------------------------------------------------------------------------------


def unfounded(section: str) -> list[str]:
    """The numbers in the tables of a section of docs/figures.md that its result file does not hold."""
    (name,) = re.findall(r"^\[.*?\]\(\.\./bench/results/(.*?\.md)\)", section, re.MULTILINE)
    known = set(NUMBER.findall((ROOT / "bench/results" / name).read_text()))
    tables = re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE)
    rows = [row for table in tables for row in table.splitlines()[2:]]
    cells = [cell.strip() for row in rows for cell in row.strip("|").split("|")[1:]]
    return [cell for cell in cells if NUMBER.fullmatch(cell) and cell not in known]


def sections() -> list[str]:
    return re.split(r"^## ", (ROOT / "docs/figures.md").read_text(), flags=re.MULTILINE)[1:]


@pytest.mark.parametrize("section", sections(), ids=lambda section: section.partition("\n")[0])
def test_a_figure_stands_in_the_result_file_that_its_section_names(section: str) -> None:
    assert unfounded(section) == []


def test_a_figure_that_nobody_measured_is_found() -> None:
    (section,) = (each for each in sections() if each.startswith("What codecs leave"))
    assert unfounded(section.replace("0.99976", "0.99977")) == ["0.99977"]


@pytest.mark.parametrize("result", RESULTS, ids=lambda result: result.name)
def test_every_result_file_has_a_section_among_the_figures(result: Path) -> None:
    assert sum(f"](../bench/results/{result.name}) · " in section for section in sections()) == 1


def rows_of(text: str) -> list[list[str]]:
    """The cells of every row of every table, without their markup."""
    rows = re.findall(r"^\|(.*)\|$", text, re.MULTILINE)
    return [[re.sub(r"[*`]", "", cell).strip() for cell in row.split("|")] for row in rows]


def unfounded_in_readme(text: str) -> list[str]:
    """The numbers of README's table that its group's result file does not have in a row of that name.

    A group starts with a row that links to the file and says after a colon whose figures it has. A name ends with what
    the file calls it, or the other way round. Numbers may be rounded.
    """
    wrong: list[str] = []
    measured: list[list[str]] = []
    for name, *cells in rows_of(text.partition("\n| | ")[2].partition("\n\n")[0])[1:]:
        if file := re.search(r"\((bench/results/.*?)\)", name):
            measured = rows_of((ROOT / file[1]).read_text())
            name = name.rpartition(": ")[2]
        name = name.removeprefix("narrowcast ")
        same = [row for row in measured if any(each and (name.endswith(each) or each.endswith(name)) for each in row)]
        known = [Decimal(number) for row in same for number in re.findall(r"\d+(?:\.\d+)?", " ".join(row))]
        for told in (Decimal(number) for cell in cells for number in re.findall(r"\d+(?:\.\d+)?", cell)):
            if all(number.quantize(told) != told for number in known):
                wrong.append(f"{name}: {told}")
    return wrong


def test_the_table_of_the_readme_is_of_the_result_files() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(re.findall(r"^\| \*\*.*bench/results/", text, re.MULTILINE)) >= 4
    assert unfounded_in_readme(text) == []


def test_a_figure_of_the_readme_that_nobody_measured_is_found() -> None:
    text = (ROOT / "README.md").read_text()
    (row,) = re.findall(r"^\| narrowcast `int4\+EF` \|.*$", text, re.MULTILINE)
    changed = re.sub(r"\d\.\d\d s", "9.99 s", row)
    assert unfounded_in_readme(text.replace(row, changed)) == ["int4+EF: 9.99"]
    assert unfounded_in_readme(text.replace("DDP, fp32 | 68.2 MB", "DDP, fp32 | 68.3 MB")) == ["DDP, fp32: 68.3"]


# -- the site -------------------------------------------------------------------------------------------------------


def test_every_public_name_has_its_place_on_an_api_page() -> None:
    text = "".join(page.read_text() for page in (ROOT / "docs/api").glob("*.md"))
    headings = set(re.findall(r"heading: (.*)", text))
    parts = {"codecs", "errors", "integrations", "nn", "optim"}  # which have pages of their own
    names = {f"nc.{name}" for name in nc.__all__ if name not in parts}
    names |= {f"nc.codecs.{name}" for name in nc.codecs.__all__ if name not in nc.__all__}
    names |= {f"nc.nn.{name}" for name in nc.nn.__all__ if name not in nc.__all__}
    names |= {f"nc.optim.{name}" for name in nc.optim.__all__}
    names |= {f"ncd.{name}" for name in distributed.__all__ if name not in (*nc.__all__, "functional")}
    assert names <= headings
    assert "::: narrowcast.errors" in text
    assert errors.__doc__


def test_the_figure_is_what_its_script_draws() -> None:
    script = ROOT / "docs/two_stage_figure.py"
    spec = importlib.util.spec_from_file_location("two_stage_figure", script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.drawing() == script.with_name("two_stage.svg").read_text()


def test_every_command_is_on_the_page_of_the_command_line() -> None:
    named = {info.name for info in (*app.registered_commands, *app.registered_groups)}
    described = set(re.findall(r"`narrowcast (\w+)`", (ROOT / "docs/commands.md").read_text()))
    assert named == described


@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="needs mkdocs: pip install 'narrowcast[docs]'")
def test_the_site_builds_without_a_warning_and_its_links_between_pages_hold(tmp_path: Path) -> None:
    # Without --quiet, which keeps warnings from --strict, too.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert 'href="results/wire.html"' in (tmp_path / "limits.html").read_text()  # ../bench/results/wire.md in docs/
    assert "narrowcast.codecs.payload.encode" in (tmp_path / "api/codecs.html").read_text()
