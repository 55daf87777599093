"""The program that runs under ncu: ``python -m simulator.measure.counters_target CASES ERRORS DEADLINE_S``."""

from __future__ import annotations

import sys
import time

from simulator.errors import InputError
from simulator.measure import kernels
from simulator.measure.cases import load_cases
from simulator.measure.counters import MARKER
from simulator.measure.timing import Timer


def main(case_file: str, error_file: str, deadline_s: float) -> None:
    """Run each case once unprofiled, empty L2, then once profiled behind a marker launch that carries its number."""
    import torch

    begin = time.monotonic()
    cases = load_cases(case_file)
    timer = Timer()
    marker = timer.module[MARKER]
    with open(error_file, "w") as errors:
        for index, case in enumerate(cases, 1):
            if time.monotonic() - begin > deadline_s:
                break
            try:
                kernel = kernels.kernel_of(case)
                if reason := kernel.needs() or kernel.refuse(case):
                    raise InputError(reason)
                torch.manual_seed(0)
                with torch.no_grad():
                    prepared = kernel.prepare(case)
                    prepared.run()
                    timer.flush()
                    torch.cuda.synchronize()
                    torch.cuda.profiler.start()
                    marker(index, 32)
                    prepared.run()
                    torch.cuda.synchronize()
                    torch.cuda.profiler.stop()
                del prepared
            except Exception as error:
                errors.write(f"{case.case_id}\t{type(error).__name__}: {str(error)[:160]!r}\n")
                errors.flush()
    print(f"profiled in {time.monotonic() - begin:.1f} s", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
