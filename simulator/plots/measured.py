"""Measured points for a picture: the rows of a table of measurements that ran what was simulated."""

from __future__ import annotations

from collections.abc import Iterable
from math import fsum
from pathlib import Path

from simulator.errors import InputError
from simulator.plots.rows import Row, series_names
from simulator.result import Result


def measured_points(path: Path, results: Iterable[Result]) -> list[Row]:
    """Rows of ``path`` (predict's columns and ``measured_time_us``) with the GPU, algorithm and problem of a result.

    Byte counts come from the columns ``measured_hbm_read_bytes``, ``..._write_bytes`` and ``measured_l2_...``; a
    level without a count gets no point. ``kernel`` names the implementation where it is not the result's.
    :class:`InputError` when no row measured one of the results.
    """
    from simulator.predict import parse_case
    from simulator.validation import read_measurements

    results = list(results)
    names = series_names(results)
    frame = read_measurements([path])
    if "measured_time_us" not in frame.columns:
        raise InputError(f"{path}:1: no column 'measured_time_us'; name a table of measurements")
    found = []
    for number, cells in enumerate(frame.to_dict("records"), 2):
        row = {str(name): str(cell).strip() for name, cell in cells.items()}
        try:
            case = parse_case(row, results[0].gpu)
            time_us = float(row["measured_time_us"] or "nan")
        except (InputError, ValueError):
            continue  # rows of other kinds (failed measurements, unmodelled kernels) are no points
        if not time_us > 0:
            continue
        for result, series in zip(results, names, strict=True):
            if (case.gpu, case.algorithm, case.problem) == (result.gpu, result.algorithm, result.problem):
                points = [point | {"algorithm": series} for point in _points(row, f"{path}:{number}", result, time_us)]
                if case.implementation and case.implementation != result.implementation:
                    points = [point | {"kernel": case.implementation} for point in points]
                found += points
    if not found:
        raise InputError(f"{path}: no row measured this problem with these algorithms on these GPUs")
    return found


def _points(row: dict[str, str], where: str, result: Result, time_us: float) -> list[Row]:
    counted = {}
    for level in ("HBM", "L2"):
        texts = [row.get(f"measured_{level.lower()}_{way}_bytes", "") for way in ("read", "write")]
        try:
            counted[level] = fsum(float(text) for text in texts if text)
        except ValueError:
            raise InputError(f"{where}: measured_{level.lower()}_read_bytes: {texts} are no byte counts") from None
    base = {
        "gpu": result.gpu,
        "algorithm": result.algorithm,
        "time_us": time_us,
        "flop": result.flops,
        "flop_per_s": result.flops / time_us * 1e6,
    }
    if not any(counted.values()):
        # no counters: the measured time at the predicted bytes
        moved = result.hbm_read_bytes + result.hbm_write_bytes + result.dirty_bytes_at_end
        counted = {"HBM": moved}
    return [
        base | {"level": level, "bytes": amount, "flop_per_byte": result.flops / amount}
        for level, amount in counted.items()
        if amount
    ]
