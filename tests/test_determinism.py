"""Identical input gives identical bytes: across processes, hash seeds, runs and Pythons' ways to add floats."""

import os
import subprocess
import sys

from hypothesis import given
from law_settings import laws
from test_laws import hardware, problems, run

_SCRIPT = """
import json
from simulator import simulate, load_profile, AttentionProblem as P
gpu = load_profile("h200_sxm")
for algorithm, problem in (
    ("fa2", P(batch=2, heads=12, kv_heads=4, seqlen_q=3000, head_dim=128, causal=True)),
    ("fa3", P(batch=2, heads=12, kv_heads=4, seqlen_q=3000, head_dim=64)),
    ("fa3", P(batch=2, heads=12, kv_heads=4, seqlen_q=3000, head_dim=128, causal=True)),
    ("standard", P(batch=2, heads=12, kv_heads=4, seqlen_q=1000, head_dim=128, causal=True)),
    ("fa2", P(batch=2, heads=12, kv_heads=4, seqlen_q=1000, head_dim=128, causal=True, pass_="fwd_bwd")),
):
    print(json.dumps(simulate(algorithm, problem, gpu).to_json()))
"""


#: Python 3.12 began to add floats with compensation: a plain ``sum`` of floats has other last bits than on 3.11.
_SUMS = {
    "one after another": "total += value",
    "compensated": "more = total + value; lost += _rest(total, value, more); total = more",
}
_OTHER_SUM = """
import builtins
plain = builtins.sum
def _rest(a, b, total):
    return (a - total) + b if abs(a) >= abs(b) else (b - total) + a
def other(values, /, start=0):
    values = list(values)
    if not any(isinstance(value, float) for value in values):
        return plain(values, start)
    total, lost = float(start), 0.0
    for value in values:
        {step}
    return total + lost
builtins.sum = other
"""


def output(script: str, seed: str = "0") -> bytes:
    """What ``script`` prints in a process of its own."""
    environment = os.environ | {"PYTHONHASHSEED": seed}
    return subprocess.run([sys.executable, "-c", script], capture_output=True, env=environment, check=True).stdout


def test_predictions_are_byte_identical_across_processes_hash_seeds_and_sums():
    outputs = {output(_SCRIPT, seed) for seed in ("0", "4242")}
    outputs |= {output(_OTHER_SUM.format(step=step) + _SCRIPT) for step in _SUMS.values()}
    assert len(outputs) == 1
    assert len(outputs.pop().splitlines()) == 5


def test_the_two_sums_differ():
    """The test above would notice."""
    program = "print(repr(sum([0.1] * 10)), sum([1, 2]), sum([[1], [2]], []))"
    texts = [output(_OTHER_SUM.format(step=step) + program).decode() for step in _SUMS.values()]
    assert texts == ["0.9999999999999999 3 [1, 2]\n", "1.0 3 [1, 2]\n"]


@laws(8)
@given(problem=problems(), gpu=hardware())
def test_a_second_run_in_the_process_is_the_same(problem, gpu):
    for algorithm in ("fa2", "fa3"):
        assert run(algorithm, problem, gpu).to_json() == run(algorithm, problem, gpu).to_json()
