"""Run a case list: timed rows, and the spans of single kernels as CUPTI's activity records give them."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Sequence
from typing import Any

from simulator.errors import InputError
from simulator.measure import kernels
from simulator.measure.cases import Case
from simulator.measure.results import TIMED_COLUMNS, ResultFile, describe_machine
from simulator.measure.timing import Timer, quantile

SPAN_COLUMNS = (
    "row_id",
    "case_id",
    "kernel_index",
    "kernel_name",
    "measured_kernel_us",
    "measured_gap_us",
    "measured_span_us",
    "measured_n",
    "measured_error",
)
METHOD = (
    "method: median over repetitions, after 0.1 s of idling; cold = a 512 MB buffer is read before each; "
    "graph = events around one graph replay queued behind the flush; kernel = launches queued behind the flush; "
    "eager = GPU idle at the first launch; "
    "clock = counted SM cycles over the global timer around the case"
)


def shuffled(cases: Sequence[Case], seed: int) -> list[Case]:
    """The cases in a random order that ``seed`` fixes, so that heat does not follow the list."""
    order = list(cases)
    random.Random(seed).shuffle(order)
    return order


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip()[:160]}" if not isinstance(error, InputError) else str(error)


def _fits(case: Case, torch: Any) -> None:
    if torch.cuda.memory_reserved() > 30e9:  # some launchers exit the process when the driver finds no memory left
        torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    free += torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    if case.resident_bytes() > 0.92 * free:
        raise InputError(
            f"needs about {case.resident_bytes() / 1e9:.1f} GB of GPU memory, {free / 1e9:.1f} GB are free"
        )


def run_timed(cases: Sequence[Case], path: str, seed: int, deadline_s: float) -> tuple[int, int]:
    """Measure every case not yet in ``path``; start none after ``deadline_s``. Returns (written, failed)."""
    import torch

    begin = time.monotonic()
    timer = Timer()
    header = [*describe_machine(timer.board.driver()), METHOD, f"order: random, seed {seed}"]
    results = ResultFile(path, TIMED_COLUMNS, header)
    written = failed = 0
    for case in shuffled(cases, seed):
        if case.case_id in results.done:
            continue
        elapsed = time.monotonic() - begin
        if elapsed > deadline_s:
            print(f"stopped at the time limit with {len(cases) - len(results.done)} cases left", file=sys.stderr)
            break
        row: dict[str, object] = {**case.to_row(), "measured_at_s": elapsed}
        try:
            _fits(case, torch)
            timing = timer.time_case(case)
            row |= {
                "measured_time_us": timing.median_us,
                "measured_min_us": timing.min_us,
                "measured_p90_us": timing.p90_us,
                "measured_n": timing.n,
                "measured_sm_clock_mhz": timing.sm_clock_mhz,
                "measured_power_w": timing.power_w,
                "measured_temperature_c": timing.temperature_c,
            }
        except Exception as error:  # a failing case is a row with its error; the others still run
            row["measured_error"] = _short(error)
            failed += 1
            if "illegal memory access" in str(error) or "unspecified launch failure" in str(error):
                results.append(row)
                raise SystemExit(f"the CUDA context is lost after {case.case_id}; run again to resume") from None
        results.append(row)
        written += 1
    results.close()
    return written, failed


def run_spans(cases: Sequence[Case], path: str, seed: int, deadline_s: float, chunk: int = 20) -> int:
    """Per-kernel durations of every case (median of three cold runs), under PyTorch's profiler. Returns rows written.

    A case's span is first kernel's start to last kernel's end; ``measured_gap_us`` is the idle time before a kernel.
    """
    import torch

    begin = time.monotonic()
    timer = Timer()
    results = ResultFile(
        path,
        SPAN_COLUMNS,
        [
            *describe_machine(timer.board.driver()),
            "method: CUPTI activity records, cold L2, launches queued behind the flush, median of three runs",
        ],
    )
    finished = {row_id.rsplit("/", 1)[0] for row_id in results.done}
    todo = [case for case in shuffled(cases, seed) if case.case_id not in finished]
    for start in range(0, len(todo), chunk):
        if time.monotonic() - begin > deadline_s:
            break
        runs: list[str] = []
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            for case in todo[start : start + chunk]:
                try:
                    _record_runs(case, timer, runs)
                except Exception as error:
                    failed = {"row_id": f"{case.case_id}/0", "case_id": case.case_id, "measured_error": _short(error)}
                    results.append(failed)
            torch.cuda.synchronize()
        events = [
            (event.start_ns(), event.duration_ns(), event.name())
            for event in profiler.profiler.kineto_results.events()
            if "CUDA" in str(event.device_type())
        ]
        for row in span_rows(events, runs):
            results.append(row)
    results.close()
    return len(results.done)


def _record_runs(case: Case, timer: Timer, runs: list[str]) -> None:
    import torch

    kernel = kernels.kernel_of(case)
    if reason := kernel.needs() or kernel.refuse(case):
        raise InputError(reason)
    _fits(case, torch)
    torch.manual_seed(0)
    with torch.no_grad(), torch.cuda.stream(timer.stream):
        prepared = kernel.prepare(case)
        prepared.run()
        torch.cuda.synchronize()
        for _ in range(3):
            torch.cuda._sleep(1_000_000)
            timer.flush()
            prepared.run()
            timer.module["iosim_empty"](1, 32)
            runs.append(case.case_id)
        torch.cuda.synchronize()


def span_rows(events: Sequence[tuple[int, int, str]], runs: Sequence[str]) -> list[dict[str, object]]:
    """Rows from (start_ns, duration_ns, name) records: the kernels between a flush and the closing empty kernel are one
    run.

    ``runs`` names the case of each run in order. A case whose runs differ in their kernels yields a row with an error.
    """
    groups: list[list[tuple[int, int, str]]] = []
    current: list[tuple[int, int, str]] | None = None
    for event in sorted(events):
        if event[2].startswith("iosim_flush_l2"):
            current = []
        elif event[2].startswith("iosim_empty"):
            if current is not None:
                groups.append(current)
            current = None
        elif current is not None:
            current.append(event)
    if len(groups) != len(runs):
        raise RuntimeError(f"{len(groups)} recorded runs for {len(runs)} launched ones: records were dropped")
    rows: list[dict[str, object]] = []
    for case_id in dict.fromkeys(runs):
        mine = [group for group, name in zip(groups, runs, strict=True) if name == case_id and group]
        if not mine or len({tuple(event[2] for event in group) for group in mine}) != 1:
            rows.append(
                {"row_id": f"{case_id}/0", "case_id": case_id, "measured_error": "runs differ in their kernels"}
            )
            continue
        span = quantile([(group[-1][0] + group[-1][1] - group[0][0]) / 1e3 for group in mine], 0.5)
        for index, (_, _, name) in enumerate(mine[0]):
            gap = 0.0
            if index:
                gap = quantile([(g[index][0] - g[index - 1][0] - g[index - 1][1]) / 1e3 for g in mine], 0.5)
            rows.append(
                {
                    "row_id": f"{case_id}/{index}",
                    "case_id": case_id,
                    "kernel_index": index,
                    "kernel_name": name[:160],
                    "measured_kernel_us": quantile([group[index][1] / 1e3 for group in mine], 0.5),
                    "measured_gap_us": gap,
                    "measured_span_us": span,
                    "measured_n": len(mine),
                }
            )
    return rows
