"""The CSV beside a picture: exactly the numbers that it shows, enough to draw it again."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simulator.bounded_read import read_at_most
from simulator.errors import InputError
from simulator.wording import PASSES

if TYPE_CHECKING:
    from simulator.result import Result

if TYPE_CHECKING:
    from simulator.result import Result

Row = dict[str, Any]


def pass_cells(result: Result) -> Row:
    """The ``pass`` column of a result's rows: a forward pass needs none."""
    return {"pass": result.problem.pass_} if result.problem.pass_ != "fwd" else {}


def panel_title(gpu: str, rows: Iterable[Mapping[str, Any]]) -> str:
    """A panel's GPU, and which pass its rows are of where it is not forward."""
    passes = dict.fromkeys(PASSES[row["pass"]] for row in rows if row.get("pass") in PASSES)
    return ", ".join((gpu, *passes))


def series_names(results: Iterable[Result]) -> list[str]:
    """What a picture calls each result: its algorithm, with the implementation where one GPU ran several of them."""
    results = list(results)
    ran: dict[tuple[str, str], set[str]] = {}
    for result in results:
        ran.setdefault((result.gpu, result.algorithm), set()).add(result.implementation)
    several = {algorithm for (_, algorithm), implementations in ran.items() if len(implementations) > 1}
    return [f"{r.algorithm}:{r.implementation}" if r.algorithm in several else r.algorithm for r in results]


def rows_csv(rows: Iterable[Mapping[str, Any]]) -> str:
    """``rows`` as CSV; the columns are those of all rows in order of appearance, absent cells blank."""
    rows = list(rows)
    columns = list(dict.fromkeys(name for row in rows for name in row))
    stream = io.StringIO()
    writer = csv.DictWriter(stream, columns, restval="", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({name: "" if value is None else value for name, value in row.items()})
    return stream.getvalue()


def read_rows(path: str | Path, picture: str) -> list[Row]:
    """Rows of a CSV that ``iosim`` wrote beside a ``picture``; numbers are parsed, blank cells are ``None``.

    Raises :class:`InputError` naming the file (and line) when it is not such a file.
    """
    path = Path(path)
    try:
        text = read_at_most(path).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise InputError(f"{path}: not UTF-8 text; name the CSV that iosim {picture} wrote") from None
    except OSError as error:
        why = error.strerror
        raise InputError(f"{path}: cannot be read ({why}); name the CSV that iosim {picture} wrote") from None
    reader = csv.DictReader(io.StringIO(text, newline=""))
    if "picture" not in (reader.fieldnames or []):
        raise InputError(f"{path}:1: no column 'picture'; name the CSV that iosim {picture} wrote beside its picture")
    rows = []
    for raw in reader:
        if None in raw or None in raw.values():
            raise InputError(f"{path}:{reader.line_num}: not as many fields as the header names")
        if raw["picture"] != picture:
            raise InputError(
                f"{path}:{reader.line_num}: picture: {raw['picture']!r} is not {picture!r}; "
                f"draw it with iosim {raw['picture'].split('-')[0] or picture}"
            )
        rows.append({name: _parsed(cell) for name, cell in raw.items()})
    if not rows:
        raise InputError(f"{path}: no rows below the header; name a complete CSV")
    return rows


def _parsed(cell: str) -> Any:
    if cell == "":
        return None
    for kind in (int, float):
        try:
            return kind(cell)
        except ValueError:
            continue
    return cell


def column(rows: Iterable[Row], path: str, *names: str) -> None:
    """:class:`InputError` when a row lacks one of ``names``: a CSV from elsewhere, or cut."""
    for index, row in enumerate(rows):
        for name in names:
            if row.get(name) is None:
                raise InputError(f"{path}:{index + 2}: {name}: blank; the picture needs it")
