"""The SM clock: what load takes of it, when, and that a set clock is an upper bound."""

from dataclasses import replace

import pytest

from simulator import AttentionProblem, load_profile, simulate
from simulator.clock import POWER_DELAY_S, Activity, loaded_clock_hz, loaded_share, with_held_clock
from simulator.physics import Physics

H200 = load_profile("h200_sxm")
A100 = load_profile("a100_sxm4_80gb")
PHYSICS = Physics.from_calibration(H200.calibration_parameters)
FA3 = Activity(tensor_share=0.8, exp_share=0.4, hbm_share=0.02, loaded_share=1.0, seconds=1e-3, run_seconds=1e-3)


def clock(activity, profile=H200):
    return loaded_clock_hz(profile, PHYSICS, activity) / 1e6


def test_load_lowers_the_clock_in_steps():
    few = clock(replace(FA3, loaded_share=0.0, tensor_share=0.1, exp_share=0.1))
    ampere = clock(replace(FA3, tensor_share=0.35, exp_share=0.17))
    # counted on an H200: 1970 with one CTA, 1800 in FA2, 1570 to 1660 in FA3 at head dim 128
    assert few > 1950 and 1780 < ampere < 1850 and 1570 < clock(FA3) < 1690
    assert clock(replace(FA3, seconds=20e-6)) > clock(FA3)


def test_hbm_alone_lowers_it_too():
    decode = replace(FA3, tensor_share=0.0, exp_share=0.0, hbm_share=0.8)
    assert 1700 < clock(decode) < 1820 and clock(replace(decode, hbm_share=0.05)) > clock(decode)


def test_the_power_limit_sees_the_run_of_calls():
    alone, repeated = clock(FA3), clock(replace(FA3, run_seconds=0.2))
    assert repeated < 0.93 * alone and clock(replace(FA3, run_seconds=POWER_DELAY_S)) == alone


def test_a_gpu_without_headroom_keeps_its_clock():
    assert clock(replace(FA3, run_seconds=1.0), A100) == pytest.approx(1410)


def test_a_set_clock_is_an_upper_bound():
    problem = AttentionProblem(batch=2, heads=16, seqlen_q=4096, head_dim=128)
    free, high, low = (simulate("fa3", problem, H200, clock_mhz=mhz) for mhz in (None, 1960, 1200))
    assert high.time_us == free.time_us and high.sm_clock_mhz < 1750
    assert low.sm_clock_mhz == pytest.approx(1200) and low.time_us > free.time_us
    held = simulate("fa3", problem, H200, clock_mhz=1960, physics=with_held_clock(PHYSICS))
    assert held.sm_clock_mhz == pytest.approx(1960)


def test_few_sms_at_work_lower_nothing_and_a_remainder_counts_for_its_share():
    assert loaded_share(1 / 132, 1, 132, 132) < 0.1 and loaded_share(0.5, 66, 132, 132) == 1.0
    # 133 CTAs: half of the time one SM works alone
    assert loaded_share(133 / 264, 133, 132, 132) == pytest.approx(0.5, abs=0.05)
