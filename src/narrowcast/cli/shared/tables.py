"""How a command prints a table: every figure whole, however narrow the terminal is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.cells import cell_len

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def show_table(table: Table, console: Console) -> None:
    """Print a table. Cells fold between words; a word is never cut, so a line may be wider than the terminal."""
    texts = [[str(text) for text in (column.header, *column.cells)] for column in table.columns]
    widths = [max(map(cell_len, cells)) for cells in texts]
    words = [max(cell_len(word) for text in cells for word in text.split() or [""]) for cells in texts]
    room = console.width - 3 * len(widths) - 1  # a border and two blanks for each column, and a border
    while sum(widths) > room and widths != words:
        spare = [width - word for width, word in zip(widths, words, strict=True)]
        widths[spare.index(max(spare))] -= 1
    for column, width in zip(table.columns, widths, strict=True):
        column.min_width = column.max_width = width
    console.print(table, markup=False, crop=False, soft_wrap=False)
