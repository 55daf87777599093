"""The drift gate's record: predictions of a fixed set of cases, rewritten only on purpose.

``python tests/drift/update.py`` predicts ``cases.csv`` again, prints what moved and rewrites ``record.csv``.
``tests/test_drift.py`` compares predictions with the record; see there for what may differ.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pandas

from simulator.atomic_write import write_text
from simulator.csv_tables import read_table
from simulator.predict import OUTPUT_COLUMNS, predict_frame
from simulator.predict_command import csv_text

FOLDER = Path(__file__).parent
CASES = FOLDER / "cases.csv"
RECORD = FOLDER / "record.csv"

#: Numbers may move by this share without a new record: room for another libm, not for another model.
TOLERANCE = 0.001
TEXTS = ("limiter", "error")
NUMBERS = tuple(name for name in OUTPUT_COLUMNS if name not in (*TEXTS, "warnings"))


def predictions() -> pandas.DataFrame:
    """The cases and what is predicted for them now, as the texts that the record holds."""
    predicted = predict_frame(read_table(CASES).frame()).drop(columns="warnings")
    return predicted.map(lambda cell: "" if cell is None else str(cell))


def differences(record: pandas.DataFrame, now: pandas.DataFrame) -> list[str]:
    """One readable line for each number or text of ``now`` that is not the record's; empty when nothing moved."""
    inputs = [name for name in now.columns if name not in (*NUMBERS, *TEXTS)]
    same_columns = list(record.columns) == list(now.columns)
    if not same_columns or record[inputs].to_numpy().tolist() != now[inputs].to_numpy().tolist():
        return ["cases.csv and record.csv list different cases; run 'python tests/drift/update.py' and review"]
    lines = []
    for (_, old), (_, new) in zip(record.iterrows(), now.iterrows(), strict=True):
        moved = [_moved(name, old[name], new[name]) for name in NUMBERS]
        moved += [f"{name} '{old[name]}' -> '{new[name]}'" for name in TEXTS if old[name] != new[name]]
        if any(moved):
            lines.append(f"{new['case']} on {new['gpu']}: {', '.join(filter(None, moved))}")
    return lines


def _moved(name: str, old: str, new: str) -> str:
    if old == new:
        return ""
    if not old or not new:
        return f"{name} {old or 'none'} -> {new or 'none'}"
    before, after = float(old), float(new)
    if math.isclose(before, after, rel_tol=TOLERANCE):
        return ""
    change = f" ({100 * (after / before - 1):+.2f} %)" if before else ""
    return f"{name} {before:.6g} -> {after:.6g}{change}"


def main() -> int:
    """Rewrite the record; 0."""
    now = predictions()
    if RECORD.exists():
        lines = differences(read_table(RECORD).frame(), now)
        print("\n".join(lines) or "nothing moved by more than the tolerance")
    write_text(RECORD, csv_text(now))
    print(f"wrote {len(now)} cases to {RECORD}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
