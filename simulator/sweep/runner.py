"""Runs a sweep: hands out batches, puts finished points on record, replaces workers that die, writes the table."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simulator.sweep.designs import Point, fingerprint, points_of
from simulator.sweep.journal import Journal
from simulator.sweep.output import check_output, write_rows
from simulator.sweep.points import Settings, evaluate_batch, hardware_column, hardware_number
from simulator.sweep.spec import Spec
from simulator.sweep.workers import DaskWorkers, LocalWorkers, Rows, Workers, cores

#: Seconds of work in a batch: what a kill can cost, against what handing over costs.
_BATCH_S = 1.0
#: Batches handed out beyond those that run, so that no worker waits for the next.
_SPARE_BATCHES = 1
#: A point whose worker died this often is given up.
_TRIES = 3
#: Hardware keys that change one SM's timing; points that agree on them share its simulation.
_SM_KEYS = ("tensor_flop", "exp_", "fma_", "alu_", "convert_", "issue_", "smem_", "registers_", "l2_to_sm", "max_")

Progress = Callable[[int, int, int], None]


@dataclass(frozen=True)
class Sweep:
    """A sweep's outcome: rows by point, how many were simulated now and before, and the seconds it took."""

    rows: list[dict[str, Any]]
    simulated: int
    found: int
    seconds: float
    stale: bool


def journal_path(output: Path) -> Path:
    """Where a sweep keeps what it has done; it stays, so that running again costs nothing."""
    return output.with_name(output.name + ".journal")


def run_sweep(
    spec: Spec,
    output: Path,
    *,
    jobs: int | None = None,
    scheduler: str | None = None,
    restart: bool = False,
    progress: Progress | None = None,
) -> Sweep:
    """Simulate every point of ``spec`` that is not on record yet and write the table to ``output``.

    ``jobs`` processes (default: one a core), or the workers of the Dask ``scheduler``. ``progress`` is called with
    points done, all points and points done before this run. Raises :class:`~simulator.errors.InputError` for bad input.
    """
    check_output(output)
    points, settings = points_of(spec), Settings.of(spec)
    began = time.monotonic()
    with Journal(journal_path(output), fingerprint(spec, points), len(points), restart) as journal:
        found, stale = len(journal.rows), journal.stale and bool(journal.rows)
        left = deque(sorted((p for p in points if p.index not in journal.rows), key=_likeness))
        if progress is not None:
            progress(found, len(points), found)
        if left:
            workers = DaskWorkers(scheduler) if scheduler else LocalWorkers(min(jobs or cores(), len(left)))
            try:
                _run(left, settings, workers, journal, lambda done: progress and progress(done, len(points), found))
            finally:
                workers.close()
        rows = [journal.rows[index] for index in range(len(points))]
        write_rows(output, rows, settings.columns(), spec.text)
    return Sweep(rows, len(rows) - found, found, time.monotonic() - began, stale)


def _likeness(point: Point) -> tuple[object, ...]:
    """Order of simulation: points that share an SM's timing one after another."""
    of_sm = tuple(item for item in point.hardware if item[0].startswith(_SM_KEYS))
    shape = tuple(item for item in point.case if item[0] in ("head_dim", "causal", "dtype", "pass"))
    return point.algorithm, point.gpu, of_sm, shape, point.index


def _run(
    left: deque[Point], settings: Settings, workers: Workers, journal: Journal, told: Callable[[int], object]
) -> None:
    running: dict[Rows, tuple[list[Point], float]] = {}
    tries: dict[int, int] = {}
    size = 1
    while left or running:
        while left and len(running) < workers.count() + _SPARE_BATCHES:
            batch = [left.popleft() for _ in range(min(size, len(left)))]
            # a point that may have killed its worker runs alone from then on
            suspects = [p for p in batch if p.index in tries]
            if suspects and len(batch) > 1:
                left.extendleft(reversed(batch[1:]))
                batch = batch[:1]
            running[workers.submit(batch, settings)] = (batch, time.monotonic())
        done, _ = wait(running, return_when=FIRST_COMPLETED)
        rows: list[dict[str, Any]] = []
        for future in done:
            batch, started = running.pop(future)
            error = future.exception()
            if error is None:
                rows += future.result()
                # a batch waits behind _SPARE_BATCHES others: its own time is at most what has passed
                size = _next_size(size, len(batch), time.monotonic() - started)
            elif workers.died(error):
                rows += _given_up(batch, tries, left, settings)
            else:
                raise error
        journal.append(rows)
        told(len(journal.rows))


def _next_size(size: int, points: int, seconds: float) -> int:
    """Points of the next batch, from how long the last one took; grows slowly, shrinks at once."""
    wanted = int(points * _BATCH_S / max(seconds, 1e-3))
    return max(1, min(wanted, 2 * size, 200))


def _given_up(
    batch: list[Point], tries: dict[int, int], left: deque[Point], settings: Settings
) -> list[dict[str, Any]]:
    """Put a lost batch back; rows of the points that have been lost too often."""
    rows = []
    for point in batch:
        tries[point.index] = tries.get(point.index, 0) + 1
        if tries[point.index] < _TRIES or len(batch) > 1:
            left.append(point)
            continue
        row = dict.fromkeys(settings.columns())
        row |= {"point": point.index, "algorithm": point.algorithm, "gpu": point.gpu}
        row |= {hardware_column(k): hardware_number(settings.profiles[point.gpu], k, t) for k, t in point.hardware}
        error = f"its worker died {_TRIES} times (out of memory?)"
        rows.append(row | {"limiter": "", "warnings": "", "error": error})
    return rows


def run_here(spec: Spec) -> list[dict[str, Any]]:
    """Every row of ``spec`` in this process, without files (for small designs and tests)."""
    return evaluate_batch(points_of(spec), Settings.of(spec))
