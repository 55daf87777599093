"""``pytest tests/benchmarks/bench_pytest.py``: iosim's own speed with pytest-benchmark; the suite does not collect it.

No time is asserted: they are this machine's. With ``--benchmark-json F``, ``python tests/benchmarks/table.py F``
writes the table of results. CPU seconds, which other work disturbs less; wall-clock where processes are timed.
"""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pandas
import pytest
from bench_simulate import problem_of

from simulator import AttentionProblem, load_profile, simulate, sweep
from simulator.errors import InputError
from simulator.predict import predict_frame
from simulator.sweep.designs import points_of
from simulator.sweep.points import Settings, evaluate_batch
from simulator.sweep.spec import read_spec

pytest.importorskip("pytest_benchmark", reason="pip install '.[test]' brings pytest-benchmark")

GPU = load_profile("h200_sxm")
LENGTHS = {"1k": 1024, "8k": 8192, "64k": 65_536, "512k": 524_288, "1M": 1_048_576}
#: 10,000 points: every rate of the GPU and the size of the problem.
SPACE = Path(sweep.__file__).parent / "examples" / "design_space.yaml"
ALGORITHMS = ("standard", "fa1", "fa2", "fa3")
#: Most memory of a process (MB) by its own address space: ``getrusage`` also counts what its parent had.
PEAK_MB = "import re; peak_mb = lambda: int(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1]) / 1e3"
cpu_seconds = pytest.mark.benchmark(timer=time.process_time)


def time_of(benchmark, algorithm: str, problem: AttentionProblem) -> None:
    """A warm ``simulate``; kernels that refuse the problem have no time."""
    try:
        simulate(algorithm, problem, GPU)
    except InputError as error:
        pytest.skip(str(error))
    benchmark.pedantic(simulate, (algorithm, problem, GPU), rounds=3)


@cpu_seconds
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_forward(benchmark, algorithm, length):
    time_of(benchmark, algorithm, problem_of(algorithm, LENGTHS[length], causal=True, gqa=False))


@cpu_seconds
@pytest.mark.parametrize("algorithm", ["standard", "fa1", "fa2", "fa3"])
def test_backward_8k(benchmark, algorithm):
    time_of(benchmark, algorithm, problem_of(algorithm, 8192, causal=True, gqa=False).with_(pass_="bwd"))


@cpu_seconds
@pytest.mark.parametrize("length", LENGTHS)
def test_decode(benchmark, length):
    time_of(benchmark, "flash_decoding", problem_of("flash_decoding", LENGTHS[length], causal=False, gqa=True))


def mixed_rows(count: int) -> pandas.DataFrame:
    """``count`` different forward and decode cases of five algorithms."""
    names = (*ALGORITHMS, "flash_decoding")
    rows = []
    for i in range(count):
        name, keys = names[i % 5], 256 + 64 * (i * 7 % 120)
        queries = 1 if name == "flash_decoding" else min(keys, 2048)
        row = {"algorithm": name, "batch": 1 + i % 4, "heads": 16, "kv_heads": 4, "seqlen_q": queries}
        rows.append(row | {"seqlen_k": keys if queries == 1 else queries, "head_dim": (64, 128)[i // 5 % 2]})
    return pandas.DataFrame(rows)


@pytest.mark.parametrize("jobs", [1, 2])
def test_predict_a_thousand_rows(benchmark, jobs):
    """Wall-clock; the work is what both processes share."""
    frame = mixed_rows(1000)
    out = benchmark.pedantic(predict_frame, (frame, "h200_sxm"), {"jobs": jobs}, rounds=1)
    assert (out["error"] == "").all()


@cpu_seconds
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_forty_points_of_a_sweep(benchmark, algorithm):
    """The first of the shipped design space, with this algorithm, in one process."""
    spec = read_spec(SPACE)
    points = [replace(point, algorithm=algorithm) for point in points_of(spec)[:80:2]]
    rows = benchmark.pedantic(evaluate_batch, (points, Settings.of(spec)), rounds=1)
    assert len(rows) == 40


@pytest.mark.parametrize("arguments", [("--help",), ("gpus",), ("compare",)], ids=["help", "gpus", "compare"])
def test_from_a_new_process(benchmark, arguments):
    """Machine code is there already; the first run of all compiles it."""
    command = [sys.executable, "-m", "simulator.cli", *arguments]
    benchmark.pedantic(lambda: subprocess.run(command, check=True, capture_output=True), rounds=3, warmup_rounds=1)


def test_the_very_first_run(benchmark, tmp_path, monkeypatch):
    """``compare`` with nothing compiled yet."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    command = [sys.executable, "-m", "simulator.cli", "compare"]
    benchmark.pedantic(lambda: subprocess.run(command, check=True, capture_output=True), rounds=1)


def test_memory_of_a_long_call(benchmark):
    """Most memory (MB) of a process that simulates 1M tokens of each flash algorithm."""
    script = (
        f"{PEAK_MB}; from bench_simulate import problem_of; from simulator import load_profile, simulate\n"
        "for a in ('fa1', 'fa2', 'fa3'): simulate(a, problem_of(a, 1048576, True, False), load_profile('h200_sxm'))\n"
        "print(peak_mb())"
    )

    def peak_mb() -> float:
        command = [sys.executable, "-c", script]
        here = Path(__file__).parent
        return float(subprocess.run(command, check=True, capture_output=True, text=True, cwd=here).stdout)

    benchmark.extra_info["peak_mb"] = benchmark.pedantic(peak_mb, rounds=1)
