"""Computes every number in README: the outputs that it shows, and its tables of validation.

    python notebooks/readme_numbers.py             prints them all
    python notebooks/readme_numbers.py --write     puts them into README.md
    python notebooks/readme_numbers.py h100 a100   only these
    python notebooks/readme_numbers.py --from DIR  tables from files of 'iosim validate --csv' in DIR: h200_sxm.csv,
                                                   and the published files' names; what is missing is put there

Takes some minutes on two cores: it predicts every judged and published row. Needs iosim.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd

from simulator.atomic_write import write_text
from simulator.calibrate_command import on_side, read_split
from simulator.validation import compare_with, read_measurements, summarise

ROOT = Path(__file__).resolve().parent.parent
OURS = ROOT / "hardware_profiles" / "measurements" / "h200_sxm"
PUBLISHED = ROOT / "hardware_profiles" / "published"
#: Files of published rows, by the GPU that they were taken on.
SOURCES = {
    "fa3_h100_fwd.csv": "H100",
    "fa3_h100_bwd.csv": "H100",
    "fa3_h100_fp8_fwd.csv": "H100",
    "fa2_h100_fwd_bwd.csv": "H100",
    "fa2_a100_fwd_bwd.csv": "A100 80 GB",
    "flash_decoding_a100.csv": "A100 80 GB",
    "fa2_b200.csv": "B200",
    "fa1_paper_a100.csv": "A100 40 GB",
}
JOBS = os.cpu_count() or 1


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first column is text, the others numbers."""
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def per_cent(fraction: float, signed: bool = False) -> str:
    """``fraction`` in per cent with one digit."""
    return f"{100 * fraction:+.1f}" if signed else f"{100 * fraction:.1f}"


def errors_by(errors: pd.DataFrame, column: str, by: Sequence[str]) -> list[list[str]]:
    """One line a group: its names, n, mean, median, p90 and signed mean of the error in ``column``."""
    return [
        [*(str(row[name]) for name in by), str(int(row["n"]))]
        + [per_cent(row[name]) for name in ("mean", "median", "p90")]
        + [per_cent(row["signed"], signed=True)]
        for _, row in summarise(errors, column, by).iterrows()
    ]


def h200() -> str:
    """Errors on the judging families of our own measurements, which no fit has read."""

    def judged() -> pd.DataFrame:
        frame = read_measurements([OURS / "timed_run1.csv", OURS / "counters_run1.csv"])
        return on_side(frame, read_split(OURS / "split.csv"), "judge")

    errors = predicted("h200_sxm.csv", judged, "h200_sxm")
    rows = []
    for passes, title in (("fwd", "forward"), ("bwd", "backward")):
        own = errors[errors["pass"] == passes]
        for column, what in (("error_time", "time"), ("error_hbm", "HBM bytes"), ("error_l2_read", "L2 to SM")):
            lines = errors_by(own, column, ["algorithm"])
            lines += [["all", *line] for line in errors_by(own, column, [])]
            rows += [[f"{title}, {what}", *line] for line in lines]
    table = markdown(["H200", "algorithm", "n", "mean %", "median %", "p90 %", "signed %"], rows)
    times = errors[errors["error_time"].notna()]
    inside = times["measured_time_us"].astype(float).between(times["time_low_us"], times["time_high_us"])
    notes = [f"{per_cent(inside.mean())} % of the {len(times)} times lie in their 90 % interval."]
    for reason, count in errors["error"].replace("", pd.NA).dropna().value_counts().items():
        notes.append(f"Not predicted, in no mean: {count} rows ({reason}).")
    return table + "\n\n" + "\n".join(notes)


def published() -> str:
    """Errors of time against published rows, by source and algorithm."""
    rows = []
    for name, gpu in SOURCES.items():
        errors = published_errors(name)
        rows += [[name.removesuffix(".csv"), gpu, *line] for line in errors_by(errors, "error_time", ["algorithm"])]
    return markdown(["file", "GPU", "algorithm", "n", "mean %", "median %", "p90 %", "signed %"], rows)


def h100() -> str:
    """Measured and predicted TFLOP/s of FA2 and FA3 forward on an H100, head dim 128."""
    return side_by_side(published_errors("fa3_h100_fwd.csv"), ["fa2", "fa3"], "fwd")


def a100() -> str:
    """Measured and predicted TFLOP/s of unfused attention, FA1 and FA2, both passes, on an A100, head dim 128."""
    return side_by_side(published_errors("fa2_a100_fwd_bwd.csv"), ["standard", "fa1", "fa2"], "fwd_bwd")


def published_errors(name: str) -> pd.DataFrame:
    """Every row of a published file with its prediction."""
    return predicted(name, lambda: read_measurements([PUBLISHED / name]), None)


def predicted(name: str, measured: Callable[[], pd.DataFrame], gpu: str | None) -> pd.DataFrame:
    """``measured`` with predictions and errors: from the folder of ``--from`` if it has ``name``, else computed."""
    if name not in _PREDICTED:
        ready = _FOLDER[0] / name if _FOLDER else None
        if ready is not None and ready.exists():
            errors = pd.read_csv(ready, dtype={column: str for column in _TEXT}, keep_default_na=False, na_values=[""])
            errors[_TEXT] = errors[_TEXT].fillna("")
        else:
            print(f"predicting {name}", file=sys.stderr, flush=True)
            errors = compare_with(measured(), gpu, JOBS)
            if ready is not None:
                write_text(ready, errors.to_csv(index=False))
        errors["pass"] = errors["pass"].replace("", "fwd")
        _PREDICTED[name] = errors
    return _PREDICTED[name]


_TEXT = ["algorithm", "pass", "causal", "head_dim", "seqlen_q", "error"]
_FOLDER: list[Path] = []
_PREDICTED: dict[str, pd.DataFrame] = {}


def side_by_side(errors: pd.DataFrame, algorithms: Sequence[str], passes: str) -> str:
    """TFLOP/s measured / predicted by mask and length, under the source's FLOP convention."""
    own = errors[(errors["head_dim"] == "128") & (errors["pass"] == passes) & errors["error_time"].notna()]
    own = own.assign(
        queries=own["seqlen_q"].astype(int),
        measured=own["measured_tflops"].astype(float),
        predicted=own["measured_tflops"].astype(float) / (1 + own["error_time"]),
    )
    rows = []
    for (causal, queries), shape in own.groupby(["causal", "queries"]):
        cells = []
        for algorithm in algorithms:
            found = shape[shape["algorithm"] == algorithm]
            pairs = [f"{m:.0f} / {p:.0f}" for m, p in zip(found["measured"], found["predicted"], strict=True)]
            cells.append("; ".join(pairs) or "–")
        rows.append(["causal" if causal == "1" else "full", str(queries), *cells])
    return markdown(["mask", "N", *algorithms], rows)


def output(command: str, until: str = "") -> str:
    """What ``iosim command`` prints, as a Markdown block, up to the line that contains ``until``."""
    ran = subprocess.run(
        [sys.executable, "-m", "simulator.cli", *shlex.split(command)],
        env=os.environ | {"COLUMNS": "110", "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    lines = [line.rstrip() for line in ran.stdout.splitlines()]
    if until:
        lines = lines[: next(index for index, line in enumerate(lines) if until in line)]
    return "```text\n" + re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip("\n") + "\n```"


def models() -> str:
    """Published whole-model rates by framework and attention, from the committed table of predictions."""
    lines = (PUBLISHED / "training_table.md").read_text(encoding="utf-8").splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    table = pd.DataFrame(cells[1:], columns=cells[0])
    table = table[table["what"].isin(["TFLOP/s a GPU", "tokens/s"])]
    errors = table["error"].str.rstrip("%").astype(float) / 100
    rows = [
        [str(framework), str(attention), str(len(e)), per_cent(e.abs().mean()), per_cent(e.abs().max()),
         per_cent(e.mean(), signed=True), f"{(e.abs() <= 0.2).sum()}"]
        for (framework, attention), e in errors.groupby([table["framework"], table["attention"]], sort=False)
    ]  # fmt: skip
    whole = ["all", "", str(len(errors)), per_cent(errors.abs().mean()), per_cent(errors.abs().max())]
    rows.append([*whole, per_cent(errors.mean(), signed=True), f"{(errors.abs() <= 0.2).sum()}"])
    return markdown(["framework", "attention", "rates", "mean", "worst", "signed mean", "within 20 %"], rows)


TABLES: dict[str, Callable[[], str]] = {
    "compare": lambda: output("compare --gpu h100_sxm"),
    "why": lambda: output("why fa1 standard --gpu a100_sxm4_80gb", until="fa1  standard"),
    "dispatch": lambda: output("dispatch --gpu h200_sxm --dtype fp32 --gqa 4 --seqlen 2048"),
    "explain": lambda: output("explain --gpu h200_sxm --time-us 1850"),
    "sensitivity": lambda: output(
        "sensitivity --algorithm fa3 --parameters num_sms,tensor_rate,exp_rate,l2_bandwidth,l2_bytes,hbm_bandwidth,sram"
    ),
    "require": lambda: output(
        "require --target 'fa3 <= 600us' --parameters num_sms,tensor_rate,l2_bandwidth,hbm_bandwidth,sram"
    ),
    "h200": h200,
    "h100": h100,
    "a100": a100,
    "published": published,
    "models": models,
}


def main(arguments: Sequence[str]) -> None:
    """Print the tables named (all by default); with ``--write`` also replace them in README.md."""
    arguments = list(arguments)
    if "--from" in arguments:
        at = arguments.index("--from")
        _FOLDER.append(Path(arguments[at + 1]))
        del arguments[at : at + 2]
    names = [name for name in arguments if name != "--write"] or list(TABLES)
    readme = ROOT / "README.md"
    for name in names:
        table = TABLES[name]()
        print(f"{name}\n{table}\n", flush=True)
        if "--write" in arguments:
            text = readme.read_text(encoding="utf-8")
            place = re.compile(rf"<!-- numbers: {name} -->\n.*?<!-- end -->", re.DOTALL)
            if len(place.findall(text)) != 1:
                raise SystemExit(f"README.md: needs one place '<!-- numbers: {name} --> ... <!-- end -->'")
            before, after = place.split(text)[0], place.split(text)[-1]
            write_text(readme, f"{before}<!-- numbers: {name} -->\n{table}\n<!-- end -->{after}")


if __name__ == "__main__":
    main(sys.argv[1:])
