"""Tables of a terminal: one look for every command, and nothing cut off in a narrow window."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

#: Characters that a column of sentences gets at least, and that a margin of labels takes.
LEAST_PROSE, LABEL_WIDTH = 26, 10


@dataclass(frozen=True)
class _Grid:
    """Cells (rich's markup) under headings; ``left``: columns that are words; ``prose``: sentences, which wrap."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: Collection[str]
    prose: Collection[str]

    def table(self, columns: Sequence[int], fold: bool = False) -> Table:
        """A table of some columns; ``fold`` breaks words where even those are too wide."""
        from rich.box import SIMPLE_HEAD
        from rich.table import Table

        named = any(self.headings)
        table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_header=named)
        for i in columns:
            heading = self.headings[i]
            sentences = heading in self.prose
            least = max(_width(heading), *(_width(row[i]) for row in self.rows)) if self.rows else _width(heading)
            if sentences:
                least = min(LEAST_PROSE, least)
            side: Literal["left", "right"] = "left" if i == 0 or sentences or heading in self.left else "right"
            table.add_column(
                heading,
                justify=side,
                overflow="fold",
                no_wrap=not (sentences or fold),
                min_width=None if fold else least,
            )
        for row in self.rows:
            table.add_row(*(row[i] for i in columns))
        return table


def print_table(
    console: Console,
    headings: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    left: Collection[str] = (),
    prose: Collection[str] = (),
) -> None:
    """Print ``rows`` (rich's markup) under ``headings``; a terminal that is too narrow for all columns gets several
    tables that each begin with the first one. Columns are right-aligned but the first, those ``left`` and ``prose``."""
    grid = _Grid(headings, [list(row) for row in rows], left, prose)
    for columns in _fitting(console, grid):
        too_wide = _least_width(console, grid.table(columns)) > console.width
        console.print(grid.table(columns, fold=too_wide))


def _fitting(console: Console, grid: _Grid) -> list[list[int]]:
    """The columns of each table: the first one, and as many of the others in turn as fit beside it."""
    tables: list[list[int]] = []
    columns = [0]
    for i in range(1, len(grid.headings)):
        if len(columns) > 1 and _least_width(console, grid.table([*columns, i])) > console.width:
            tables.append(columns)
            columns = [0]
        columns.append(i)
    return [*tables, columns]


def _least_width(console: Console, table: Table) -> int:
    """Characters that ``table`` needs."""
    from rich.measure import Measurement

    return Measurement.get(console, console.options.update(width=10_000), table).minimum


def _width(cell: str) -> int:
    """Characters of a cell's longest line, without its markup."""
    from rich.text import Text

    return max(line.cell_len for line in Text.from_markup(cell).split(allow_blank=True))


def print_labelled(console: Console, label: str, text: str, style: str = "", label_width: int = LABEL_WIDTH) -> None:
    """Print ``text`` (no markup) beside a bold ``label``, its further lines below its first."""
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 0))
    grid.add_column(width=label_width, no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row(Text(label, style="bold"), Text(text, style=style))
    console.print(grid)
