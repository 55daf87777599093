"""How fast iosim is: ``python tests/benchmarks/bench_simulate.py [--quick]``. Not collected by pytest.

Wanted: a warm ``simulate`` of one forward kernel in 100 ms typically and 1 s at worst up to 1M tokens, ``iosim
compare`` in 5 s from a cold start, ``iosim --help`` in 0.5 s. Times are wall-clock, the least of a few repetitions.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

from simulator import AttentionProblem, load_profile, simulate
from simulator.errors import InputError

LENGTHS = (512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072, 262_144, 524_288, 1_048_576)
ALGORITHMS = ("standard", "fa1", "fa2", "fa3", "flash_decoding")


def least_seconds(call: Callable[[], object], repetitions: int) -> float:
    """The shortest of ``repetitions`` runs."""
    times = []
    for _ in range(repetitions):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def cold_seconds(*arguments: str, repetitions: int = 3) -> float:
    """Wall-clock of ``iosim`` in a new process."""
    command = [sys.executable, "-m", "simulator.cli", *arguments]
    return least_seconds(lambda: subprocess.run(command, check=True, capture_output=True), repetitions)


def problem_of(algorithm: str, seqlen: int, causal: bool, gqa: bool) -> AttentionProblem:
    """16 heads, at least one sequence and 16k tokens; flash_decoding has one query a sequence."""
    queries = 1 if algorithm == "flash_decoding" else seqlen
    return AttentionProblem(
        batch=max(1, 16_384 // seqlen),
        heads=16,
        kv_heads=4 if gqa else 16,
        seqlen_q=queries,
        seqlen_k=seqlen,
        head_dim=128,
        causal=causal,
    )


def main() -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpu", default="h200_sxm")
    parser.add_argument("--quick", action="store_true", help="every other length, one repetition")
    parser.add_argument("--algorithm", choices=ALGORITHMS, action="append")
    arguments = parser.parse_args()
    lengths = LENGTHS[1::2] if arguments.quick else LENGTHS
    repetitions = 1 if arguments.quick else 3
    profile = load_profile(arguments.gpu)

    print(f"--help {cold_seconds('--help'):.2f} s (wanted: 0.5), compare {cold_seconds('compare'):.2f} s (wanted: 5)")
    print(f"warm simulate on {profile.name}, ms (wanted: 100 typical, 1000 worst)")
    print("algorithm       mask       " + "".join(f"{n:>9}" for n in lengths))
    every: list[float] = []
    for algorithm in arguments.algorithm or ALGORITHMS:
        for causal in (False, True) if algorithm != "flash_decoding" else (False,):
            for gqa in (False, True):
                mask = ("causal" if causal else "none") + (" gqa" if gqa else "")
                print(f"{algorithm:15} {mask:11}", end="", flush=True)
                for seqlen in lengths:
                    problem = problem_of(algorithm, seqlen, causal, gqa)
                    try:
                        simulate(algorithm, problem, profile)  # warm up
                    except InputError:
                        print(f"{'-':>9}", end="", flush=True)
                        continue
                    taken = least_seconds(lambda a=algorithm, p=problem: simulate(a, p, profile), repetitions)
                    every.append(taken)
                    print(f"{1e3 * taken:>9.0f}", end="", flush=True)
                print()
    print(f"median {1e3 * statistics.median(every):.0f} ms, worst {1e3 * max(every):.0f} ms of {len(every)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
