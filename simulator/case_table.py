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
from typing import Any

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
#: Kernels whose label says more than their row: the implementation that ran.
LABELLED = {
    # flash-attention's benchmark script: Q, K, V lie as (batch, seqlen, heads, head_dim) and are copied first
    "standard (PyTorch unfused)": ("standard", "torch_eager_bshd"),
    "cuDNN": ("fa3", "cudnn_sm90"),
    # 48 keys a tile and two stages, as the version has that was counted
    "FA4-sm90 64x48 2-stage": ("fa3", "flash_attn_4_sm90"),
}
#: Batch and heads of rows that state a rate and lengths alone: enough of both to fill the GPU.
ASSUMED_SIZES = {"batch": "1", "heads": "16", "kv_heads": "16"}
#: (case, GPU or "", beginning of the kernel's label) -> what explains a time outside the factor.
CAUSES = {
    ("1", "h100_pcie", ""): "5 us more than the kernel: the time around it, as in case 10",
    ("1", "h100_sxm", ""): "the card's variant is not stated; as the PCIe one it is explained (next lines)",
    ("4", "", "FA3"): (
        "fp8: 24 to 37 us more at every length from 4k to 256k, other launches of that path and not attention; "
        "fp16: 4 us around the kernel, as in case 10"
    ),
    ("10", "", "FA3"): "2 to 6 us more at every length of this case: the time around the kernel",
    ("18", "h100_pcie", ""): "the card's 350 W: its clock is the last line of this case",
    ("19", "", "FA3"): "another machine: its clock is the last line of this case; the other one's rows are explained",
    ("21", "", "FA3"): (
        "an early build: the FA3 paper's rows at 16k and this head dim reach 648 (forward) and 561 TFLOP/s (backward) "
        "where this has 500 and 305"
    ),
    ("23", "", "FA3 C++"): "FA3's own backward; the modelled one is this case's 64x48 line, which is explained",
    ("27", "b200", "FA2"): "8 to 14 us more at 128 to 512 tokens: the time around the kernel",
    ("32", "", "FA3"): "FA3's own backward of 2024; the modelled one is FA4's Hopper kernel, which came a year later",
}
#: The longest sequences that a cause speaks of, where it does not of all.
LONGEST = {("27", "b200", "FA2"): 512}
#: What ``explained`` says where a cause is known.
BY_CAUSE = "by its cause"
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
    labelled = LABELLED.get(row["kernel_label"])
    if labelled is not None and (labelled[1] != "cudnn_sm90" or row["gpu"].startswith("h")):
        row["algorithm"], row["implementation"] = labelled
    states_rate = row["source_metric"] == "tflops" and row["seqlen_q"] and row["head_dim"]
    if row["algorithm"] and states_rate and not row["batch"]:
        row |= ASSUMED_SIZES
        remark = "batch and heads not stated: 1 and 16"
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


def cause_of(row: dict[str, str]) -> str:
    """What explains that a row's time lies outside the factor, "" if nothing known does."""
    for (case, gpu, label), cause in CAUSES.items():
        matches = row["case"] == case and gpu in ("", row["gpu"]) and row["kernel_label"].startswith(label)
        longest = LONGEST.get((case, gpu, label))
        if matches and (longest is None or int(row["seqlen_q"]) <= longest):
            return cause
    return ""


def number_line(row: dict[str, str], output: dict[str, Any] | None, remark: str) -> Line:
    """The table's row of one measured number."""
    measured_us = float(row["measured_time_us"]) if row["measured_time_us"] else None
    measured = time_text(measured_us) if measured_us else f"{row['measured_tflops']} TFLOP/s"
    case = int(row["case"])
    if output is None or output["error"]:
        note = remark if output is None else f"{remark} {output['error']}".strip()
        return Line(case, asked(row), measured, "—", "", "not asked of the model" if output is None else "no", note)
    predicted_us = float(output["time_us"])
    predicted = time_text(predicted_us)
    if measured_us is None:
        rate = float(output["flops"]) / predicted_us / 1e6
        predicted, measured_us = f"{rate:.0f} TFLOP/s", predicted_us * rate / float(row["measured_tflops"])
    ratio = predicted_us / measured_us
    cause = "" if 1 / WITHIN <= ratio <= WITHIN else cause_of(row)
    explained = "yes" if 1 / WITHIN <= ratio <= WITHIN else BY_CAUSE if cause else "no"
    note = "; ".join(part for part in (remark, f"limiter {output['limiter']}", cause) if part)
    return Line(case, asked(row), measured, predicted, three_digits(ratio), explained, note)


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
    ran = [line for line in found if line.explained in ("yes", "no", BY_CAUSE)]
    within, caused = (sum(line.explained == word for line in ran) for word in ("yes", BY_CAUSE))
    head = [
        "# Public cases: asked, measured, predicted, explained or not",
        "",
        "Written by `python -m simulator.case_table`; sources and shapes: `cases.csv` (B/H/Hkv/Sq/Sk/D/Dv). A time is "
        f"explained when the prediction is within a factor of {WITHIN}; nothing was fitted to a case. A *stand-in* is "
        "a modelled kernel of the same schedule in place of one that is not. *By its cause*: outside the factor, and "
        "the note names what the thread's number holds that the model's does not.",
        "",
        f"{len(found)} lines in {len({line.case for line in found})} cases; {within} of the {len(ran)} that the model "
        "answers are explained, "
        f"{caused} more by their cause.",
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
