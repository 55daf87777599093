"""Published whole-model numbers beside predictions, as rows of text.

``python -m simulator.model_published_table`` writes them to ``training_table.md`` beside
``hardware_profiles/published/training.csv`` (minutes).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from math import fsum
from pathlib import Path

from simulator.model_published import Row, predict_published, published_rows
from simulator.published import published_directory
from simulator.wording import three_digits

HEADINGS = (
    "model",
    "framework",
    "attention",
    "batch x length",
    "what",
    "published",
    "predicted",
    "error",
    "recomputed",
)
_METRICS = {"model_tflops_per_gpu": "TFLOP/s a GPU", "tokens_per_s_all_gpus": "tokens/s"}
WITHIN = 0.2


def cells(row: Row) -> tuple[str, ...]:
    """One row's cells in the order of :data:`HEADINGS`."""
    return (
        row.model,
        row.framework,
        row.algorithm,
        f"{row.sequences} x {row.seqlen}",
        _METRICS.get(row.metric, row.metric),
        "" if math.isnan(row.measured) else three_digits(row.measured),
        three_digits(row.predicted),
        "" if math.isnan(row.error) else f"{row.error:+.1%}",
        row.recompute,
    )


def summary(rows: Sequence[Row]) -> list[str]:
    """Mean errors, and how many rows are within 20 %: rates, then speed-ups over another row."""
    speedup = [r.metric.startswith("speed-up") for r in rows]
    rates = [abs(r.error) for r, ratio in zip(rows, speedup, strict=True) if not ratio and not math.isnan(r.error)]
    # the first row of a table of speed-ups is one by definition
    ratios = [abs(r.error) for r, ratio in zip(rows, speedup, strict=True) if ratio and r.error]
    return [
        f"{name}: mean error {fsum(errors) / len(errors):.1%}, {sum(e <= WITHIN for e in errors)} of {len(errors)} "
        f"within {WITHIN:.0%}"
        for name, errors in (("rates", rates), ("speed-ups", ratios))
        if errors
    ]


def remarks(rows: Sequence[Row]) -> list[str]:
    """What slowed published runs and is not modelled, with the frameworks that it is said of."""
    by_remark: dict[str, list[str]] = {}
    for row in rows:
        names = by_remark.setdefault(row.remark, [])
        if row.framework not in names:
            names.append(row.framework)
    return [f"{', '.join(names)}: {remark}" for remark, names in by_remark.items()]


def markdown(rows: Sequence[Row]) -> str:
    """The text of ``training_table.md``."""
    lines = [
        "# Published whole-model numbers: published, predicted",
        "",
        "Written by `python -m simulator.model_published_table`; rows and sources: `training.csv`. How each row is "
        "predicted: `simulator/model_published.py`. No row has a parameter of its own.",
        "",
        *(f"- {line}" for line in summary(rows)),
        "",
        "| " + " | ".join(HEADINGS) + " |",
        "|" + "---|" * len(HEADINGS),
        *("| " + " | ".join(cells(row)) + " |" for row in rows),
        "",
        "Not modelled, by framework:",
        "",
        *(f"- {line}" for line in remarks(rows)),
    ]
    return "\n".join(lines) + "\n"


def table_path() -> Path:
    """The committed table."""
    return published_directory() / "training_table.md"


def main() -> int:
    """Predict all rows and write the table."""
    from simulator.atomic_write import write_text

    write_text(table_path(), markdown(predict_published(published_rows())))
    print(f"wrote {table_path()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
