"""Hardware counters under Nsight Compute: one cold start a case, no flush between its kernels, one pass a metric set.

``ncu --cache-control all`` would flush before every kernel and so hide the reuse between a case's kernels. The target
process empties L2 itself, then profiles the case's launches only. A marker launch whose grid size is the case's number
opens each case.
"""

from __future__ import annotations

import csv
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from simulator.errors import InputError
from simulator.measure.cases import CASE_COLUMNS, Case, load_cases, write_cases
from simulator.measure.results import ResultFile, describe_machine
from simulator.measure.timing import Board

SECTOR_BYTES = 32
MARKER = "iosim_empty"

# name -> metrics that the profiler collects in one pass on GH100
METRIC_SETS: dict[str, tuple[str, ...]] = {
    "hbm": (
        "dram__bytes_read.sum",
        "dram__bytes_write.sum",
        "gpu__time_duration.sum",
    ),
    "l2": (
        "lts__t_sectors_srcunit_tex_op_read.sum",
        "lts__t_sectors_srcunit_tex_op_write.sum",
        "sm__cycles_elapsed.max",
        "sm__cycles_elapsed.avg.per_second",
    ),
    "all": (
        "dram__bytes_read.sum",
        "dram__bytes_write.sum",
        "gpu__time_duration.sum",
        "lts__t_sectors_srcunit_tex_op_read.sum",
        "lts__t_sectors_srcunit_tex_op_write.sum",
        "sm__cycles_elapsed.max",
        "sm__cycles_elapsed.avg.per_second",
    ),
    "mix": (
        "smsp__inst_executed.sum",
        "sm__inst_executed_pipe_alu.sum",
        "sm__inst_executed_pipe_fma.sum",
        "sm__inst_executed_pipe_fmaheavy.sum",
        "sm__inst_executed_pipe_xu.sum",
        "sm__inst_executed_pipe_lsu.sum",
        "sm__inst_executed_pipe_uniform.sum",
        "sm__inst_executed_pipe_fp16.sum",
        "sm__inst_executed_pipe_tensor_op_hmma.sum",
        "sm__inst_executed_pipe_tensor_op_gmma.sum",
        "sm__pipe_tensor_op_hmma_cycles_active.sum",
        "smsp__inst_executed_op_local_ld.sum",
        "smsp__inst_executed_op_local_st.sum",
        "l1tex__data_bank_reads.sum",
        "l1tex__data_bank_writes.sum",
        "sm__cycles_active.sum",
        "sm__warps_active.sum",
        "gpu__time_duration.sum",
    ),
}
LAUNCH_COLUMNS = ("launch_id", "case_id", "launch_index", "kernel_name", "grid", "block")
CASE_RESULTS = (
    "measured_hbm_read_bytes",
    "measured_hbm_write_bytes",
    "measured_l2_read_bytes",
    "measured_l2_write_bytes",
    "measured_kernel_time_us",
    "measured_cycles",
    "measured_sm_clock_mhz",
    "measured_launches",
    "measured_error",
)
COUNTER_COLUMNS = (*CASE_COLUMNS, *CASE_RESULTS)


def ncu_command(metric_set: str, case_file: str, log: str, errors: str, deadline_s: float) -> list[str]:
    """The profiler's command line for one metric set over a case list."""
    ncu = shutil.which("ncu")
    if ncu is None:
        raise InputError("ncu is not on the PATH; expected Nsight Compute's command line (part of the CUDA toolkit)")
    return [
        ncu,
        "--clock-control",
        "none",
        "--cache-control",
        "none",
        "--profile-from-start",
        "off",
        "--csv",
        "--page",
        "raw",
        "--print-units",
        "base",
        "--metrics",
        ",".join(METRIC_SETS[metric_set]),
        "--log-file",
        log,
        sys.executable,
        "-m",
        "simulator.measure.counters_target",
        case_file,
        errors,
        str(deadline_s),
    ]


def number(text: str) -> float | None:
    """A number of ncu's CSV (thousands separators allowed), or None for ``n/a`` and blanks."""
    cleaned = text.replace(",", "").strip()
    try:
        return float(cleaned)
    except ValueError:
        return None


def parse_ncu_csv(lines: Iterable[str]) -> list[dict[str, str]]:
    """Rows of ``--csv --page raw`` output; ncu's own ``==PROF==`` lines, blank lines and the units row are skipped.

    Raises :class:`InputError` when there is no header (the profiled program failed, or profiling is not permitted).
    """
    kept = [line for line in lines if line.startswith('"')]
    if not kept:
        raise InputError("the profiler's output holds no table; its log says why (permission, or the program failed)")
    rows = list(csv.DictReader(kept))
    return [row for row in rows if (row.get("ID") or "").strip().isdigit()]


def split_by_case(rows: Sequence[dict[str, str]], cases: Sequence[Case]) -> dict[str, list[dict[str, str]]]:
    """Launch rows by case id: a marker launch of grid (n, 1, 1) opens case number n (from 1)."""
    found: dict[str, list[dict[str, str]]] = {}
    current: list[dict[str, str]] | None = None
    for row in rows:
        if row["Kernel Name"].startswith(MARKER):
            index = int(row["Grid Size"].strip("() ").split(",")[0])
            if not 1 <= index <= len(cases):
                raise InputError(f"marker {index} in the profiler's output has no case; expected 1 to {len(cases)}")
            current = found.setdefault(cases[index - 1].case_id, [])
            current.clear()
        elif current is not None:
            current.append(row)
    return found


def summarise(launches: Sequence[dict[str, str]]) -> dict[str, object]:
    """Sums over a case's launches: bytes, time, cycles; the clock is cycles over time where both were counted."""

    def total(metric: str, factor: float = 1.0) -> float | None:
        values = [number(row.get(metric, "")) for row in launches]
        known = [value for value in values if value is not None]
        return factor * sum(known) if values and len(known) == len(values) else None

    clocks = [
        (number(row.get("sm__cycles_elapsed.avg.per_second", "")), number(row.get("sm__cycles_elapsed.max", "")))
        for row in launches
    ]
    clock = None
    known = [(rate, cycles) for rate, cycles in clocks if rate and cycles]
    if clocks and len(known) == len(clocks):
        clock = sum(cycles for _, cycles in known) / sum(cycles / rate for rate, cycles in known) / 1e6
    integers = {
        "measured_hbm_read_bytes": total("dram__bytes_read.sum"),
        "measured_hbm_write_bytes": total("dram__bytes_write.sum"),
        "measured_l2_read_bytes": total("lts__t_sectors_srcunit_tex_op_read.sum", SECTOR_BYTES),
        "measured_l2_write_bytes": total("lts__t_sectors_srcunit_tex_op_write.sum", SECTOR_BYTES),
        "measured_cycles": total("sm__cycles_elapsed.max"),
    }
    return {
        **{name: None if value is None else int(value) for name, value in integers.items()},
        "measured_kernel_time_us": total("gpu__time_duration.sum", 1e-3),
        "measured_sm_clock_mhz": clock,
        "measured_launches": len(launches),
    }


def run_counters(
    cases: Sequence[Case], path: str, metric_set: str, deadline_s: float, launches_path: str | None = None
) -> int:
    """Profile every case not yet in ``path`` in one process under ncu. Returns the number of rows written."""
    metrics = METRIC_SETS[metric_set]
    header = [
        *describe_machine(Board().driver()),
        f"method: ncu, metric set {metric_set}: {' '.join(metrics)}; L2 emptied once a case",
    ]
    results = ResultFile(path, COUNTER_COLUMNS, header)
    launches_file = None
    if launches_path:
        launches_file = ResultFile(launches_path, (*LAUNCH_COLUMNS, *metrics), header)
    todo = [case for case in cases if case.case_id not in results.done]
    written = 0
    with tempfile.TemporaryDirectory() as folder:
        case_file, log, errors = (str(Path(folder) / name) for name in ("cases.csv", "ncu.csv", "errors.csv"))
        write_cases(case_file, todo)
        command = ncu_command(metric_set, case_file, log, errors, deadline_s)
        finished = subprocess.run(command, check=False, capture_output=True, text=True)
        print(finished.stdout[-2000:], finished.stderr[-2000:], file=sys.stderr)
        lines = Path(log).read_text(errors="replace").splitlines() if Path(log).exists() else []
        print("\n".join(line for line in lines if line.startswith("==") and "PROF" not in line)[:2000], file=sys.stderr)
        passes = Counter(line.rsplit(" - ", 1)[1] for line in lines if line.startswith("==PROF==") and " pass" in line)
        print(f"passes: {dict(passes)}", file=sys.stderr)
        failures = read_failures(errors)
        by_case = split_by_case(parse_ncu_csv(lines), load_cases(case_file)) if todo else {}
    for case in todo:
        if case.case_id in failures:
            results.append({**case.to_row(), "measured_error": failures[case.case_id]})
        elif by_case.get(case.case_id):
            results.append({**case.to_row(), **summarise(by_case[case.case_id])})
            for index, row in enumerate(by_case[case.case_id]):
                if launches_file is None:
                    break
                launch = {"launch_id": f"{case.case_id}/{index}", "case_id": case.case_id, "launch_index": index}
                launch |= {
                    "kernel_name": row["Kernel Name"][:160],
                    "grid": row["Grid Size"],
                    "block": row["Block Size"],
                }
                launches_file.append(launch | {metric: number(row.get(metric, "")) for metric in metrics})
        else:
            continue
        written += 1
    results.close()
    return written


def read_failures(path: str) -> dict[str, str]:
    """case_id -> error of the target's error file (``case_id<tab>message`` lines); empty when there is none."""
    if not Path(path).exists():
        return {}
    pairs = (line.split("\t", 1) for line in Path(path).read_text().splitlines() if "\t" in line)
    return dict(pairs)
