"""The clock that a launch causes: one replay stands for another clock near it, and the clock is the run's own."""

import pytest

from algorithms import build_program
from simulator import AttentionProblem, load_profile, simulate
from simulator import clock_search as search
from simulator.clock import loaded_clock_hz
from simulator.device import run_kernel
from simulator.physics import Physics
from simulator.simulation import new_cache

P = AttentionProblem
GPU = load_profile("h200_sxm")
PHYSICS = Physics.from_calibration(GPU.calibration_parameters)
#: The last wave's CTAs end in another order at another clock: share of the cycles.
ORDER = 0.002
CASES = {
    "fa1": ("fa1", P(batch=2, heads=16, seqlen_q=4096, head_dim=128, causal=True)),
    "fa3-memory": ("fa3", P(batch=32, heads=16, seqlen_q=512, head_dim=128)),
    "standard": ("standard", P(batch=16, heads=16, seqlen_q=1024, head_dim=128, causal=True)),
    "standard-backward": ("standard", P(batch=4, heads=16, seqlen_q=1024, head_dim=64, pass_="bwd")),
    "fa3-backward": ("fa3", P(batch=4, heads=16, seqlen_q=2048, head_dim=128, pass_="bwd")),
    "decode": ("flash_decoding", P(batch=64, heads=32, kv_heads=8, seqlen_q=1, seqlen_k=8192, head_dim=128)),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("other_hz", [1.70e9, 1.85e9])
def test_a_replay_stands_for_another_clock(name, other_hz):
    algorithm, problem = CASES[name]
    program, clock_hz = build_program(algorithm, problem, GPU), 1.78e9
    caches = [new_cache(program, GPU, PHYSICS, "cold") for _ in range(2)]
    change = other_hz / clock_hz - 1.0
    for kernel in program.kernels:
        run, other = (
            run_kernel(kernel, l2, GPU, PHYSICS, hz) for l2, hz in zip(caches, (clock_hz, other_hz), strict=True)
        )
        assert 0.0 <= run.clock_share <= 1.0
        unsure = search._unsure(run) or search.UNSURE
        said = run.cycles * (1.0 + run.clock_share * change)
        # a launch that no memory binds is said not to depend on the clock
        assert said == pytest.approx(
            other.cycles, rel=unsure * abs(change) + ORDER + (0.02 if not search._binds(run) else 0.0)
        )


@pytest.mark.parametrize("name", CASES)
def test_the_clock_is_the_one_that_the_launch_causes(name):
    algorithm, problem = CASES[name]
    for kernel in simulate(algorithm, problem, GPU).kernels:
        caused = loaded_clock_hz(GPU, PHYSICS, search.kernel_activity(kernel, GPU)) / 1e6
        assert kernel.cycles / kernel.time_us == pytest.approx(caused, rel=0.004)


def test_a_long_launch_is_guessed_from_some_waves():
    problem = P(heads=16, seqlen_q=16384, head_dim=128, causal=True)
    kernel = build_program("fa1", problem, GPU).kernels[-1]
    slots = 2 * GPU.num_sms
    some = search._some_waves(kernel, slots, 25_000)
    assert 3 * slots <= some.ctas < 8 * slots
    assert kernel.ctas > 2 * some.ctas
