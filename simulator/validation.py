"""Predictions against measurements: per-row errors and their summary by algorithm, regime and GPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from simulator.csv_tables import Table, read_table
from simulator.errors import InputError
from simulator.options import whole_number
from simulator.predict import predict_frame

if TYPE_CHECKING:
    import pandas

#: Rows that moved fewer bytes than this are left out of byte errors: rounding and side traffic dominate them.
MINIMUM_BYTES = 30e6
#: Columns of measurements that hold numbers.
MEASURED_NUMBERS = (
    "measured_time_us",
    "measured_hbm_read_bytes",
    "measured_hbm_write_bytes",
    "measured_l2_read_bytes",
    "measured_l2_write_bytes",
    "measured_sm_clock_mhz",
)
#: Below this, an error is also given in microseconds.
SHORT_US = 20.0


def read_measurements(paths: Sequence[str | Path]) -> pandas.DataFrame:
    """One DataFrame of all CSV files (``#`` lines are comments), every cell as text, with a ``file`` column.

    Rows of one ``case_id`` in several files (times in one, counters in another) become one row; where both have a
    value, the file named first wins. :class:`InputError` when a file is no table or a measured number is none.
    """
    import pandas as pd

    frames = []
    for path in paths:
        table = read_table(path, comments=True, unique=True)
        if "algorithm" not in table.columns:
            right = "a table of measurements has predict's columns and measured_*"
            raise InputError(f"{path}:1: column 'algorithm': missing; {right}")
        for name in MEASURED_NUMBERS:
            if name in table.columns:
                _check_numbers(table, name)
        frame = table.frame()
        frame["file"] = Path(path).name
        frames.append(frame)
    rows = pd.concat(frames, ignore_index=True).fillna("")
    if len(frames) == 1 or "case_id" not in rows or (rows["case_id"] == "").any():
        return rows
    merged = rows.replace("", pd.NA).groupby("case_id", sort=False, as_index=False).first()
    return merged[rows.columns].fillna("")


def _check_numbers(table: Table, name: str) -> None:
    """Every cell of a measured column is blank, ``nan`` or a number from 0 up."""
    place = table.columns.index(name)
    for line, row in zip(table.lines, table.rows, strict=True):
        try:
            number = float(row[place] or "nan")
        except ValueError:
            number = -1.0
        if number < 0 or math.isinf(number):
            unit = {"us": "microseconds", "mhz": "MHz"}.get(name.rpartition("_")[2], "bytes")
            right = f"write {unit} such as 1234.5, or leave it blank"
            raise InputError(f"{table.path}:{line}: {name}: {row[place]!r} is no measured number; {right}")


def regime(row: Mapping[str, str]) -> str:
    """Where a case lies: its pass, decode or prefill, and the size bucket by measured time."""
    passes = row.get("pass") or "fwd"
    if passes != "fwd":
        return "backward" if passes == "bwd" else "forward+backward"
    seqlen_q = _longest(row, "seqlen_q", 0)
    if seqlen_q <= 16 and _longest(row, "seqlen_k", seqlen_q) > seqlen_q:
        return "decode"
    measured = float(row.get("measured_time_us") or "nan")
    if measured < SHORT_US:
        return "prefill <20us"
    if measured < 200:
        return "prefill 20-200us"
    return "prefill 0.2-5ms" if measured < 5000 else "prefill >5ms" if measured >= 5000 else "prefill"


def _longest(row: Mapping[str, str], name: str, default: int) -> int:
    """The length, or the longest of a row's lengths; ``default`` where none can be read (the row has an error then)."""
    plural = name.replace("seqlen", "seqlens")
    text = row.get(name) or row.get(plural) or row.get("seqlens") or ""
    try:
        return max(whole_number(part) for part in text.strip("[]()").split(";"))
    except (ValueError, OverflowError):
        return default


def compare_with(
    measured: pandas.DataFrame,
    gpu: str | None,
    jobs: int = 1,
    on_row: Callable[[], object] | None = None,
    overrides: Sequence[str] = (),
) -> pandas.DataFrame:
    """Predict every row of ``measured`` (on GPUs changed by the ``--set`` texts ``overrides``) and add ``regime`` and
    signed relative errors.

    ``error_time`` is predicted over measured minus one; ``error_hbm`` and ``error_l2_read`` likewise for bytes where
    they were measured (NaN elsewhere). Rows that cannot be predicted keep their ``error`` and NaN errors.
    """
    import pandas as pd

    targets = [c for c in ("measured_time_us", "measured_hbm_read_bytes") if c in measured]
    if not targets:
        raise InputError("column 'measured_time_us': missing; nothing to compare with")
    some = pd.concat([pd.to_numeric(measured[c], errors="coerce") > 0 for c in targets], axis=1).any(axis=1)
    usable = measured[some].reset_index(drop=True)
    inputs = usable[[c for c in usable.columns if c not in _OUTPUTS]]
    out = predict_frame(inputs, gpu, overrides=overrides, jobs=jobs, on_row=on_row)

    def number(name: str) -> pandas.Series[float]:
        return pd.to_numeric(out[name], errors="coerce") if name in out else pd.Series(math.nan, out.index)

    out["regime"] = [regime(cast("Mapping[str, str]", row)) for row in usable.to_dict("records")]
    out["error_time"] = number("time_us") / number("measured_time_us") - 1
    out["error_hbm"] = math.nan
    out["error_l2_read"] = math.nan
    if "measured_hbm_read_bytes" in out:
        moved = number("measured_hbm_read_bytes") + number("measured_hbm_write_bytes")
        predicted = number("hbm_read_bytes") + number("hbm_write_bytes")
        out["error_hbm"] = (predicted / moved - 1).where(moved > MINIMUM_BYTES)
    if "measured_l2_read_bytes" in out:
        asked = number("measured_l2_read_bytes")
        out["error_l2_read"] = (number("l2_read_bytes") / asked - 1).where(asked > MINIMUM_BYTES)
    return out


_OUTPUTS = {"time_us", "cycles", "sm_clock_mhz", "hbm_read_bytes", "limiter", "warnings", "error"}


def summarise(errors: pandas.DataFrame, column: str, by: Sequence[str]) -> pandas.DataFrame:
    """``n``, mean, median, p90 and maximum absolute error and the signed mean of ``column``, per group of ``by``."""
    import pandas as pd

    rows = []
    valid = errors[errors[column].notna()]
    groups = valid.groupby(list(by), sort=True) if by else [((), valid)]
    for key, group in groups:
        size = group[column].abs()
        if size.empty:
            continue
        key = key if isinstance(key, tuple) else (key,)
        rows.append(
            dict(zip(by, key, strict=True))
            | {
                "n": len(size),
                "mean": size.mean(),
                "median": size.median(),
                "p90": size.quantile(0.9),
                "max": size.max(),
                "signed": group[column].mean(),
            }
        )
    return pd.DataFrame(rows, columns=[*by, "n", "mean", "median", "p90", "max", "signed"])
