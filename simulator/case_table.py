"""The public cases as a table: what was asked, measured and predicted, and whether the model explains it.

``python -m simulator.case_table`` predicts every row of ``hardware_profiles/published/cases.csv`` that it can, answers
the questions of :mod:`simulator.case_questions`, and writes ``cases_table.md`` beside that file (``--check``: says
whether the committed one still is what the model gives). Nothing here is fitted to a case.
"""

from __future__ import annotations

import csv
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from simulator.atomic_write import write_text
from simulator.case_questions import NOTES, QUESTIONS
from simulator.published import published_directory
from simulator.wording import three_digits, time_text

#: Predicted over measured within this factor counts as explained: two public campaigns on one kernel differ by as much.
WITHIN = 1.2
#: Parts of the GPU note by which rows of GPUs without a name in the table find a profile.
GPU_OF_NOTE = {"H20": "h20"}
#: Kernels that are not modelled, and a modelled one of the same schedule that stands in for them.
STAND_INS = {"FlashMLA": ("flash_decoding", "flash_attn_3_kvcache")}
#: (case, GPU) whose variant is not stated: another one that it may have been.
ALSO_ON = {("1", "h100_sxm"): "h100_pcie"}
SHAPE = ("batch", "heads", "kv_heads", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v")


@dataclass(frozen=True)
class Line:
    """One row of the table."""

    case: int
    asked: str
    measured: str
    predicted: str
    ratio: str
    explained: str
    note: str = ""

    def cells(self) -> tuple[str, ...]:
        """The row's cells in the order of :data:`HEADINGS`."""
        return (str(self.case), self.asked, self.measured, self.predicted, self.ratio, self.explained, self.note)


HEADINGS = ("case", "asked", "measured", "predicted", "pred./meas.", "explained", "note")


def case_rows() -> list[dict[str, str]]:
    """The rows of ``cases.csv``."""
    with open(published_directory() / "cases.csv", newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def asked(row: dict[str, str]) -> str:
    """A row's kernel, shape and GPU as a short text."""
    shape = "/".join(row[name] for name in SHAPE)
    lengths = f"Sq/Sk/D {row['seqlen_q']}/{row['seqlen_k']}/{row['head_dim']}"
    parts = [
        row["kernel_label"],
        row["pass"],
        row["dtype"],
        "causal" if row["causal"] == "1" else "",
        f"B/H/Hkv/Sq/Sk/D/Dv {shape}" if row["batch"] else lengths,
        f"page {row['page_size']}" if row["page_size"] else "",
        f"cache {row['kv_capacity']}" if row["kv_capacity"] else "",
        row["gpu"] or row["gpu_note"].split(":")[0],
        f"at {row['clock_mhz']} MHz" if row["clock_mhz"] else "",
    ]
    return " ".join(part for part in parts if part)


def runnable(row: dict[str, str]) -> tuple[dict[str, str] | None, str]:
    """The row as ``predict`` can take it (or ``None``), and what has to be said about it."""
    row, remark = dict(row), ""
    if not row["gpu"]:
        found = next((gpu for note, gpu in GPU_OF_NOTE.items() if row["gpu_note"].startswith(note + ":")), None)
        if found is None:
            return None, "no profile" if row["algorithm"] else "kernel not modelled"
        row["gpu"] = found
    if not row["algorithm"]:
        label = next((name for name in STAND_INS if row["kernel_label"].startswith(name)), None)
        if label is None or "sparse" in row["kernel_label"]:
            return None, "kernel not modelled"
        row["algorithm"], row["implementation"] = STAND_INS[label]
        remark = f"stand-in: {row['implementation']}"
        if "varlen" in row["kernel_label"]:
            return None, "lengths not stated"
    if not row["batch"] or not row["head_dim"]:
        return None, "shape incomplete"
    return row, remark


def has_number(row: dict[str, str]) -> bool:
    """Whether a row holds a measured time or rate."""
    return bool(row["measured_time_us"]) or row["source_metric"] == "tflops"


def number_line(row: dict[str, str], output: dict[str, object] | None, remark: str) -> Line:
    """The table's row of one measured number."""
    measured_us = float(row["measured_time_us"]) if row["measured_time_us"] else None
    measured = time_text(measured_us) if measured_us else f"{row['measured_tflops']} TFLOP/s"
    case = int(row["case"])
    if output is None or output["error"]:
        note = remark if output is None else f"{remark} {output['error']}".strip()
        return Line(case, asked(row), measured, "—", "", "not asked of the model" if output is None else "no", note)
    predicted_us = float(output["time_us"])
    ratio = predicted_us / measured_us if measured_us else None
    explained = "" if ratio is None else "yes" if 1 / WITHIN <= ratio <= WITHIN else "no"
    note = "; ".join(part for part in (remark, f"limiter {output['limiter']}") if part)
    return Line(
        case, asked(row), measured, time_text(predicted_us), three_digits(ratio) if ratio else "", explained, note
    )


def _predict(row: dict[str, str] | None) -> dict[str, object] | None:
    from simulator.predict import predict_row

    return None if row is None else predict_row(row)


def lines(jobs: int = 1) -> list[Line]:
    """Every line of the table, by case; ``jobs`` processes, the same result."""
    rows = case_rows()
    for row in tuple(rows):
        if other := ALSO_ON.get((row["case"], row["gpu"])):
            rows.append(row | {"gpu": other, "kernel_label": f"{row['kernel_label']} (if it was another variant)"})
    inputs = [runnable(row) for row in rows]
    if jobs > 1:
        import multiprocessing
        from concurrent.futures import ProcessPoolExecutor

        with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
            outputs = list(pool.map(_predict, [row for row, _ in inputs], chunksize=4))
    else:
        outputs = [_predict(row) for row, _ in inputs]
    found = [
        number_line(row, output, remark)
        for row, output, (_, remark) in zip(rows, outputs, inputs, strict=True)
        if has_number(row)
    ]
    found += [Line(q.case, q.asked, q.measured, *q.answer()) for q in QUESTIONS]
    return sorted(found, key=lambda line: line.case)


def table(found: list[Line]) -> str:
    """``found`` as the Markdown file's text."""
    ran = [line for line in found if line.explained in ("yes", "no")]
    within = sum(line.explained == "yes" for line in ran)
    head = [
        "# Public cases: asked, measured, predicted, explained or not",
        "",
        "Written by `python -m simulator.case_table`; sources and shapes: `cases.csv` (B/H/Hkv/Sq/Sk/D/Dv). A time is "
        f"explained when the prediction is within a factor of {WITHIN}; nothing was fitted to a case. A *stand-in* is "
        "a modelled kernel of the same schedule in place of one that is not.",
        "",
        f"{len(found)} lines in {len({line.case for line in found})} cases; {within} of the {len(ran)} that the model "
        "answers are explained.",
        "",
        "| " + " | ".join(HEADINGS) + " |",
        "|" + "---|" * len(HEADINGS),
    ]
    body = ["| " + " | ".join(cell.replace("|", "/") for cell in line.cells()) + " |" for line in found]
    notes = ["", "## What the model says of each case", ""]
    notes += [f"- **{case}** {text}" for case, text in sorted(NOTES.items())]
    return "\n".join(head + body + notes) + "\n"


def table_path() -> Path:
    """The committed table."""
    return published_directory() / "cases_table.md"


def main(arguments: list[str]) -> int:
    """Write the table, or with ``--check`` compare it with the committed one (1 if they differ)."""
    text = table(lines(os.cpu_count() or 1))
    if "--check" in arguments:
        same = table_path().is_file() and table_path().read_text(encoding="utf-8") == text
        print("cases_table.md is up to date" if same else "cases_table.md differs: run python -m simulator.case_table")
        return 0 if same else 1
    write_text(table_path(), text)
    print(f"{table_path()}: {len(text.splitlines())} lines")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
