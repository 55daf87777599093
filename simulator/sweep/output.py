"""The finished sweep as a table: CSV, or Parquet with the spec in its metadata."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simulator.atomic_write import replace_file
from simulator.errors import InputError

if TYPE_CHECKING:
    import pandas

SUFFIXES = (".csv", ".parquet")
_PANDAS_TYPES: dict[str, Any] = {"text": "string", "int": "Int64", "float": "Float64", "bool": "boolean"}


def check_output(path: Path) -> Path:
    """``path`` if a sweep can be written there; :class:`InputError` before any work otherwise."""
    if path.suffix.lower() not in SUFFIXES:
        raise InputError(f"--output: {path} is neither .csv nor .parquet; name one of them")
    if path.suffix.lower() == ".parquet" and find_spec("pyarrow") is None:
        raise InputError("--output: Parquet needs pyarrow; install 'iosim[sweep]', or write .csv")
    if path.is_dir():
        raise InputError(f"--output: {path} is a folder; name a file")
    if not path.parent.is_dir():
        raise InputError(f"--output: the folder {path.parent} does not exist; create it first")
    return path


def frame_of(rows: Iterable[Mapping[str, Any]], columns: Mapping[str, str]) -> pandas.DataFrame:
    """Rows as a table in the order of their points; whole numbers stay whole beside empty cells."""
    import pandas

    ordered = sorted(rows, key=lambda row: row["point"])
    return pandas.DataFrame(
        {name: pandas.array([row[name] for row in ordered], _PANDAS_TYPES[kind]) for name, kind in columns.items()}
    )


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]], columns: Mapping[str, str], spec_text: str) -> None:
    """Write the table to ``path``, complete or not at all; Parquet carries the spec as ``iosim_sweep``."""
    frame = frame_of(rows, columns)
    if path.suffix.lower() == ".csv":
        replace_file(path, lambda temporary: frame.to_csv(temporary, index=False, lineterminator="\n"))
        return
    import pyarrow
    from pyarrow import parquet

    table = pyarrow.Table.from_pandas(frame, preserve_index=False)
    table = table.replace_schema_metadata({**(table.schema.metadata or {}), b"iosim_sweep": spec_text.encode()})
    replace_file(path, lambda temporary: parquet.write_table(table, temporary))
