"""Tables of the commands: a figure that does not fit the terminal is not cut, as rich would."""

from __future__ import annotations

import pytest
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from typer.testing import CliRunner

from narrowcast.cli import app
from narrowcast.cli.shared.tables import show_table


def shown(width: int, *lines: tuple[str, str]) -> list[str]:
    table = Table("what it is", "MB a step", show_edge=True)
    for line in lines:
        table.add_row(*line)
    console = Console(width=width)
    with console.capture() as capture:
        show_table(table, console)
    return capture.get().splitlines()


def test_cells_fold_between_words_and_no_figure_is_cut() -> None:
    (*_, first, second, _) = shown(20, ("one thing", "55,125.0"))
    assert (first.split(), second.split()) == (["│", "one", "│", "55,125.0", "│"], ["│", "thing", "│", "│"])
    assert any("55,125.0" in line for line in shown(8, ("[red]", "55,125.0")))
    assert any("[red]" in line for line in shown(80, ("[red]", "1")))


def test_a_table_is_as_wide_as_the_terminal_where_its_words_allow() -> None:
    assert {len(line) for line in shown(22, ("a long cell of many short words", "1"))} == {22}


@pytest.mark.parametrize("width", [10, 80])
def test_letters_that_take_two_columns_are_not_cut(width: int) -> None:
    lines = shown(width, ("模型.層.重み", "1"))
    assert any("模型.層.重み" in line for line in lines)
    assert len({cell_len(line) for line in lines}) == 1


@pytest.mark.parametrize("columns", [20, 80])
def test_a_plan_shows_all_its_figures_in_a_narrow_terminal(columns: int) -> None:
    words = "plan --params 7B --hosts 8 --ranks-per-host 8 --bandwidth 25gbit --device H100 --codecs none,int8"
    unset = {"RANK": None, "WORLD_SIZE": None}
    result = CliRunner().invoke(app, words.split(), env={"COLUMNS": str(columns), **unset})
    assert result.exit_code == 0
    assert "…" not in result.stdout
    rows = [line.strip("│ ").split("│") for line in result.stdout.splitlines() if line.startswith("│")]
    assert [row[1].strip() for row in rows] == ["55,125", "12,633"]
    if columns == 80:
        assert max(len(line) for line in result.stdout.splitlines() if line[:1] in "┏┃┡│└") <= 80
