"""Microbenchmarks of the chip: memory, L2, shared memory, arithmetic pipes, tensor cores, launches and the clock under
load.

Each yields rows (benchmark, parameters, quantity, value, unit). Rates "per clock and SM" divide by cycles that the SMs
counted themselves, so they do not depend on the clock; bandwidths are bytes over event time.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator

from simulator.measure import bench_compute as compute
from simulator.measure import bench_memory as memory
from simulator.measure.bench import Bench, Row
from simulator.measure.results import ResultFile, describe_machine

COLUMNS = (
    "row_id",
    "benchmark",
    "parameters",
    "quantity",
    "unit",
    "measured_value",
    "measured_best",
    "measured_n",
    "measured_sm_clock_mhz",
    "measured_error",
)

BENCHMARKS: dict[str, Callable[[Bench], Iterator[Row]]] = {
    "pipes": compute.pipes,
    "tensor": compute.tensor_paths,
    "hbm": memory.hbm_streams,
    "l2": memory.l2_bandwidth,
    "latency": memory.latency,
    "cta": memory.cta_streams,
    "launch": compute.launches,
    "gemm": compute.gemms,
    "clock": compute.clock_under_load,
}


def run_microbench(path: str, deadline_s: float, only: tuple[str, ...] = ()) -> int:
    """Run the benchmarks not yet in ``path``; a failing group is a row with its error. Returns rows in the file."""
    begin = time.monotonic()
    bench = Bench()
    results = ResultFile(
        path, COLUMNS, [*describe_machine(bench.timer.board.driver()), "method: see simulator/measure"]
    )
    for name, benchmark in BENCHMARKS.items():
        if only and name not in only:
            continue
        if time.monotonic() - begin > deadline_s:
            print(f"stopped at the time limit before {name}", file=sys.stderr)
            break
        started = time.monotonic()
        try:
            for row in benchmark(bench):
                row_id = f"{row.benchmark}[{row.parameters}]"
                if row_id in results.done:
                    continue
                results.append(
                    {
                        "row_id": row_id,
                        "benchmark": row.benchmark,
                        "parameters": row.parameters,
                        "quantity": row.quantity,
                        "unit": row.unit,
                        "measured_value": row.value,
                        "measured_best": row.best,
                        "measured_n": row.n,
                        "measured_sm_clock_mhz": row.clock_mhz,
                    }
                )
        except Exception as error:  # one broken group must not lose the others
            text = f"{type(error).__name__}: {str(error)[:200]}"
            results.append({"row_id": f"{name}[error]", "benchmark": name, "measured_error": text})
        bench.torch.cuda.empty_cache()
        print(f"{name}: {time.monotonic() - started:.1f} s", file=sys.stderr)
    results.close()
    return len(results.done)
