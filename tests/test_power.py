"""The power limit of a load that lasts: the energy balance, the GPUs that it was measured on, and whole models."""

from pathlib import Path

import pytest

from simulator.model_run import train
from simulator.model_times import Simulator
from simulator.model_zoo import load_model
from simulator.power import HBM_J_PER_BYTE, Load, board_power_w, sustained_clock_hz
from simulator.profile import load_profile

A100 = load_profile("a100_sxm4_80gb")
H200 = load_profile("h200_sxm")


def gemm(gpu, clock_hz, efficiency, n=8192):
    """A square product for which the tensor cores work at ``efficiency`` of their cycles."""
    rate = max(table["bf16"] for table in gpu.tensor_flop_per_cycle_per_sm.values()) * gpu.num_sms * efficiency
    return Load(2 * n**3 / rate / clock_hz, clock_hz, 2 * n**3, 0.0, 3 * 2 * n * n, True)


def test_h200_holds_the_clock_counted_under_a_second_of_products():
    """micro_run1.csv: 1352 MHz after a second of bf16 products (802 TFLOP/s at 1615 MHz when they begin)."""
    clock = sustained_clock_hz(H200, [gemm(H200, 1615e6, 802e12 / (4096 * 132 * 1615e6))])
    assert clock == pytest.approx(1352e6, rel=0.02)


def test_a100_holds_the_published_rate_on_random_data():
    """295 TFLOP/s on zeros, 257 on random data (He 2024)."""
    load = gemm(A100, 1410e6, 295 / 312)
    clock = sustained_clock_hz(A100, [load])
    assert load.tensor_flops / load.seconds_at(clock) == pytest.approx(257e12, rel=0.02)


def test_streams_and_idle_time_do_not_reach_the_limit():
    stream = Load(1.0, 1980e6, 0.0, 0.0, 4.54e12, False)
    assert sustained_clock_hz(H200, [stream]) is None
    # micro_run1.csv: 651 W
    assert board_power_w(H200, [stream], 1980e6) == pytest.approx(651, rel=0.01)
    busy = gemm(A100, 1410e6, 0.95)
    assert sustained_clock_hz(A100, [busy]) < 1410e6
    assert sustained_clock_hz(A100, [busy], least_seconds=10 * busy.seconds) is None


def test_energy_is_conserved_over_a_mixture():
    """Kernels that draw little leave room: the mixture's power is the time-weighted mean of its parts'."""
    products, stream = gemm(A100, 1410e6, 0.95), Load(4e-3, 1410e6, 0.0, 0.0, 4e-3 * 1.7e12, False)
    parts = [board_power_w(A100, [load], 1410e6) * load.seconds for load in (products, stream)]
    both = board_power_w(A100, [products, stream], 1410e6)
    assert both == pytest.approx(sum(parts) / (products.seconds + stream.seconds))
    assert sustained_clock_hz(A100, [products, stream]) >= sustained_clock_hz(A100, [products])
    assert A100.power_cap_w > HBM_J_PER_BYTE * 1.7e12


def test_a_higher_limit_never_slows_a_step_and_a_lower_one_always_does_where_it_binds():
    times, clocks = [], []
    for watts in (300, 400, 4000):
        simulator = Simulator(load_profile("a100_sxm4_80gb", {"power_cap_w": str(watts)}))
        run = train(load_model("gpt2-small"), simulator, batch=16, seqlen=1024)
        times.append(run.time_us)
        clocks.append(run.held_clock_hz)
    assert times[0] > times[1] > times[2]
    assert clocks[0] < clocks[1] < A100.max_clock_hz
    assert clocks[2] is None


def test_no_figure_of_a_gpu_means_the_one_measured_here(tmp_path):
    path = tmp_path / "mine.yaml"
    lines = Path(A100.path).read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join(x for x in lines if not x.startswith("tensor_energy_j_per_flop")), encoding="utf-8")
    quantity = load_profile(path).values["tensor_energy_j_per_flop"]
    assert (quantity.value, quantity.kind) == (1.48e-12, "assumed")
