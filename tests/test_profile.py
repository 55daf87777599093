"""Shipped profiles: complete, sourced, mutually consistent, and reproducing the published ridge points."""

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from simulator.errors import InputError, UnsupportedError
from simulator.profile import GROUP_KEYS, KINDS, SCALAR_KEYS, load_profile, profile_folder, profile_names

REQUIRED = {
    "a100_sxm4_40gb",
    "a100_sxm4_80gb",
    "a100_pcie_80gb",
    "h100_sxm",
    "h100_pcie",
    "h200_sxm",
    "b200",
    "h100_2x_smem",
    "h100_half_hbm",
    "h20",
}


def test_the_required_profiles_ship():
    assert set(profile_names()) >= REQUIRED


@pytest.mark.parametrize("name", profile_names())
def test_every_value_has_unit_kind_source_and_a_line_that_holds_it(name):
    profile = load_profile(name)
    assert profile.name == name and profile.title
    assert set(SCALAR_KEYS) <= set(profile.values)
    for key, quantity in profile.values.items():
        assert quantity.kind in KINDS
        assert len(quantity.source) > 5, key
        file, line = quantity.location.rsplit(":", 1)
        text = Path(file).read_text(encoding="utf-8").splitlines()[int(line) - 1]
        assert text.strip().startswith(key.rsplit(".", 1)[-1] + ":"), f"{key} is not on {quantity.location}"


# Suffixes that name a unit; plain counts name what they count.
UNIT_SUFFIXES = ("_bytes", "_bytes_per_s", "_per_cycle_per_sm", "_hz", "_w", "_j_per_flop", "_s", "_cycles", "_flops")
COUNTED = ("num_sms", "registers_per_sm", "max_threads_per_sm", "max_ctas_per_sm", "l2_partitions", "l2_read_sharers")


@pytest.mark.parametrize("key", [*SCALAR_KEYS, *GROUP_KEYS])
def test_every_key_names_its_unit(key):
    assert key.endswith(UNIT_SUFFIXES) or key in COUNTED or "_bytes_per_" in key


@pytest.mark.parametrize(
    ("name", "flop_per_byte"),
    [("a100_sxm4_80gb", 153), ("a100_sxm4_40gb", 201), ("h100_sxm", 295), ("h200_sxm", 206)],
)
def test_ridge_point_is_datasheet_flops_over_datasheet_bandwidth(name, flop_per_byte):
    profile = load_profile(name)
    assert round(profile.ridge_flop_per_byte("bf16")) == flop_per_byte
    assert profile.ridge_flop_per_byte("fp16") == profile.ridge_flop_per_byte("bf16")


@pytest.mark.parametrize("name", profile_names())
def test_dense_rate_times_sms_times_clock_is_the_datasheets_flops(name):
    profile = load_profile(name)
    for dtype, flops in profile.spec_tensor_flops.items():
        rate = profile.tensor_rate(profile.fastest_tensor_path(dtype), dtype)
        assert flops == pytest.approx(rate * profile.num_sms * profile.spec_clock_hz, rel=0.01)


def test_facts_that_are_easily_mixed_up():
    a100, h100, h200, b200 = (load_profile(n) for n in ("a100_sxm4_80gb", "h100_sxm", "h200_sxm", "b200"))
    assert a100.num_sms == 108  # 128 is the full die
    assert (h100.hbm_bytes, h200.hbm_bytes) == (80 * 10**9, 141 * 10**9)
    assert h200.l2_bytes == 62914560
    assert h200.max_clock_hz == 1980e6 and h200.spec_clock_hz == 1830e6
    assert (a100.fma_per_cycle_per_sm, h100.fma_per_cycle_per_sm) == (64, 128)
    assert "wgmma" not in b200.capabilities and b200.tmem_bytes_per_sm == 256 * 1024
    # FA2 on newer GPUs meets the mma.sync ceiling, far below the datasheet's path.
    assert 0.6 < h100.tensor_rate("mma_sync", "bf16") / h100.tensor_rate("wgmma", "bf16") < 0.7
    assert b200.tensor_rate("mma_sync", "bf16") / b200.tensor_rate("tcgen05", "bf16") == 0.25


def test_tensor_rate_names_the_missing_capability():
    a100, h100 = load_profile("a100_sxm4_80gb"), load_profile("h100_sxm")
    with pytest.raises(UnsupportedError, match="a100_sxm4_80gb lacks the capability 'wgmma'"):
        a100.tensor_rate("wgmma", "bf16")
    with pytest.raises(UnsupportedError, match="lacks the capability 'fp8_tensor'"):
        a100.tensor_rate("mma_sync", "fp8")
    with pytest.raises(UnsupportedError, match="lacks the capability 'tcgen05'"):
        h100.tensor_rate("tcgen05", "bf16")
    with pytest.raises(UnsupportedError, match="fp8"):
        a100.ridge_flop_per_byte("fp8")
    with pytest.raises(InputError, match="unknown instruction path 'wmma'"):
        h100.tensor_rate("wmma", "bf16")


def test_equality_hash_and_fingerprint_follow_the_numbers():
    one, same = load_profile("h100_sxm"), load_profile(profile_folder() / "h100_sxm.yaml")
    other = load_profile("h100_sxm", {"l2_bytes": "x2"})
    assert one == same and hash(one) == hash(same) and one.fingerprint() == same.fingerprint()
    assert one != other and one.fingerprint() != other.fingerprint()
    assert pickle.loads(pickle.dumps(one)) == one
    assert one.with_calibration({"sync_cycles": 30.0}) != one


def test_a_profile_cannot_be_changed_in_place():
    profile = load_profile("h100_sxm")
    with pytest.raises(AttributeError):
        profile.l2_bytes = 1
    with pytest.raises(TypeError):
        profile.tensor_flop_per_cycle_per_sm["wgmma"]["bf16"] = 1


def test_fingerprint_is_the_same_in_another_process():
    code = "from simulator.profile import load_profile; print(load_profile('b200').fingerprint())"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == load_profile("b200").fingerprint()


def test_importing_profiles_pulls_in_nothing_heavy():
    code = "import sys, simulator.profile, simulator.profile_loader, simulator.overrides; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"numpy", "pandas", "numba", "scipy", "matplotlib", "pydantic", "rich"} & set(run.stdout.split())
