"""CSV files from users, read as texts with their lines; a mistake in one is the line ``file:line: wrong; right``."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from simulator.bounded_read import read_at_most
from simulator.errors import InputError, file_reason

if TYPE_CHECKING:
    import pandas


#: Columns of a table: those of predict and some hundred of a user's own pass through.
MOST_COLUMNS = 1_000


@dataclass(frozen=True)
class Table:
    """A CSV file: its column names, the cells of each row as they stand, and the line on which each row ends."""

    path: Path
    columns: list[str]
    rows: list[list[str]]
    lines: list[int]

    def frame(self) -> pandas.DataFrame:
        """The cells as a DataFrame of texts."""
        import pandas

        return pandas.DataFrame(self.rows, columns=self.columns, dtype=object)

    def records(self) -> list[tuple[int, dict[str, str]]]:
        """Line and cells by column of each row."""
        return [
            (line, dict(zip(self.columns, row, strict=True))) for line, row in zip(self.lines, self.rows, strict=True)
        ]


def read_table(path: str | Path, *, comments: bool = False, unique: bool = False) -> Table:
    """The table in a UTF-8 CSV file (a byte order mark and any line ends are fine, blank lines are skipped).

    ``comments``: lines that start with ``#`` are skipped too; ``unique``: no column name may come twice.
    :class:`InputError` when the file is no such table or a row has not as many fields as the header.
    """
    path = Path(path)
    text = read_text(path)
    lines = io.StringIO(text, newline="")
    # a skipped line stays as a blank one, so that line numbers are those of the file
    source = ("\n" if comments and line.startswith("#") else line for line in lines)
    reader = csv.reader(source, strict=True)
    rows: list[list[str]] = []
    numbers: list[int] = []
    try:
        for fields in reader:
            if len(fields) <= 1 and not any(field.strip() for field in fields):
                continue
            if rows and len(fields) != len(rows[0]):
                raise InputError(
                    f"{path}:{reader.line_num}: {len(fields)} fields where the header has {len(rows[0])}; "
                    "give every row as many, or quote a cell that holds commas"
                )
            rows.append(fields)
            numbers.append(reader.line_num)
    except csv.Error as error:
        raise InputError(f"{path}:{reader.line_num}: not CSV ({error}); write cells with commas between") from None
    if not rows:
        raise InputError(f"{path}: empty; its first line must name the columns, as in 'algorithm,batch,heads,...'")
    columns = [name.strip() for name in rows[0]]
    if len(columns) > MOST_COLUMNS:
        raise InputError(f"{path}:{numbers[0]}: {len(columns):,} columns; a table has at most {MOST_COLUMNS:,}")
    if len(columns) == 1 and (other := next((mark for mark in ";\t|" if mark in columns[0]), None)):
        raise InputError(f"{path}:{numbers[0]}: cells have {other!r} between them; write commas")
    for name in dict.fromkeys(columns) if unique else ():
        if columns.count(name) > 1:
            raise InputError(f"{path}:{numbers[0]}: column '{name}': comes {columns.count(name)} times; keep one")
    return Table(path, columns, rows[1:], numbers[1:])


def read_text(path: Path) -> str:
    """The text of a CSV file without its byte order mark; :class:`InputError` when it cannot be read."""
    try:
        return read_at_most(path).decode("utf-8-sig")
    except InputError:
        raise
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise InputError(f"{path}:{line}: not UTF-8 text; save the table as CSV in UTF-8") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read ({file_reason(error)}); name a CSV file") from None
