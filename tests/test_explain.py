"""``iosim explain``: a time made by a known cause is traced back to it; one that physics forbids is called broken."""

import functools
import json
import math

import pytest
from command_line import failure

import simulator
from simulator import AttentionProblem, load_profile
from simulator.cli import main
from simulator.diagnosis import diagnose
from simulator.dispatch.automatic import framework_call
from simulator.options import RunOptions
from simulator.physical_bounds import least_bytes, least_flops, peak_flops, physical_bounds

H100, H200, A100 = (load_profile(name) for name in ("h100_sxm", "h200_sxm", "a100_sxm4_80gb"))
PREFILL = AttentionProblem(1, 16, seqlen_q=2048, causal=True)
DECODE = AttentionProblem(8, 32, 8, 1, 4096)
#: 34 MB of keys and values, which an H100's L2 holds.
CACHE = DECODE.with_(batch=4, seqlen_k=2048)
LONG = PREFILL.with_(batch=2 * PREFILL.batch, seqlen_q=8192, seqlen_k=8192)


#: The causes of one call are asked for again and again: each is simulated once.
REMEMBERED = functools.lru_cache(maxsize=None)(simulator.simulate)


@pytest.fixture(autouse=True)
def remember(monkeypatch):
    """``simulate`` with a memory; the predictions are its own."""
    monkeypatch.setattr(simulator, "simulate", REMEMBERED)


def time_of(algorithm, problem, profile, **more) -> float:
    """The time that ``simulate`` predicts."""
    more = {"implementation": None, **RunOptions(**more).arguments()}
    return REMEMBERED(algorithm, problem, profile, **more).time_us


def test_bounds_by_hand():
    """550 GFLOP at 4096 FLOP x 132 SMs x 1.98 GHz; Q, K, V of 201 MB at 4.8 TB/s."""
    problem = AttentionProblem(2, 16, seqlen_q=8192, causal=True)
    pairs = 8192 * 8193 // 2
    assert least_flops(problem) == 4 * 2 * 16 * pairs * 128
    assert least_bytes(problem) == 3 * 2 * 16 * 8192 * 128 * 2
    assert peak_flops("bf16", H200) == 4096 * 132 * 1.98e9
    tensor, hbm, l2 = physical_bounds(problem, H200)
    assert (tensor.resource, hbm.resource, l2.resource) == ("tensor", "hbm", "l2")
    assert tensor.time_us == pytest.approx(1e6 * 4 * 2 * 16 * pairs * 128 / (4096 * 132 * 1.98e9))
    assert hbm.time_us == pytest.approx(1e6 * least_bytes(problem) / 4.8e12)
    small = AttentionProblem(1, 1, seqlen_q=128)
    assert {b.resource: b.amount for b in physical_bounds(small, H200, "warm")}["hbm"] == 0
    window = DECODE.with_(window=(255, 0))
    assert least_bytes(window) == 2 * 8 * (32 * 128 + 2 * 8 * 256 * 128)
    backward = PREFILL.with_(pass_="bwd")
    assert least_flops(backward) == 2 * least_flops(PREFILL) and least_bytes(backward) > least_bytes(PREFILL)


@pytest.mark.parametrize("profile", [H100, A100])
@pytest.mark.parametrize("algorithm", ["standard", "fa2"])
def test_no_prediction_is_below_the_bounds(algorithm, profile):
    full = AttentionProblem(1, 8, seqlen_q=1024, head_dim=64)
    for problem in (full, full.with_(causal=True), full.with_(pass_="bwd"), full.with_(seqlen_q=64)):
        assert time_of(algorithm, problem, profile) > physical_bounds(problem, profile)[0].time_us


def test_the_expected_time_needs_no_cause():
    found = diagnose(time_of("fa3", PREFILL, H200), "fa3", PREFILL, H200)
    assert found.is_expected and found.ratio == 1.0 and not found.causes and not found.violated
    assert found.verdict.startswith("as expected")


#: name of the cause -> (what should have run, problem, profile, what did run).
MADE = {
    "fallback": ("fa3", PREFILL, H200, lambda: time_of("standard", PREFILL, H200)),
    "mma.sync path": ("fa3", PREFILL, H100, lambda: time_of("fa2", PREFILL, H100)),
    "wgmma path": ("fa2", PREFILL, H200, lambda: time_of("fa3", PREFILL, H200)),
    "launch floor": (
        "standard", AttentionProblem(1, 2, seqlen_q=128, head_dim=64), H200,
        lambda: time_of("standard", AttentionProblem(1, 2, seqlen_q=128, head_dim=64), H200, timing="eager"),
    ),
    "splits": ("flash_decoding", DECODE, H200, lambda: time_of("flash_decoding", DECODE.with_(num_splits=64), H200)),
    "padded head dim": (
        "fa3", PREFILL.with_(head_dim=64, head_dim_v=64), H200,
        lambda: time_of("fa3", PREFILL.with_(head_dim=256, head_dim_v=256), H200),
    ),
    "masked half not skipped": ("fa3", PREFILL, H200, lambda: time_of("fa3", PREFILL.with_(causal=False), H200)),
    "expanded KV heads": (
        "flash_decoding", DECODE, H200, lambda: time_of("flash_decoding", DECODE.with_(kv_heads=32), H200)
    ),
    "cold L2": ("flash_decoding", CACHE, H100, lambda: time_of("flash_decoding", CACHE, H100)),
    "warm L2": ("flash_decoding", CACHE, H100, lambda: time_of("flash_decoding", CACHE, H100, l2_state="warm")),
}  # fmt: skip


@pytest.mark.parametrize("name", MADE)
def test_a_time_made_by_a_cause_is_traced_to_it(name):
    """The cause closes the whole gap, fits, comes first among the fitting, and the verdict names it."""
    algorithm, problem, profile, made = MADE[name]
    conditions = RunOptions(l2_state="warm") if name == "cold L2" else RunOptions()
    found = diagnose(made(), algorithm, problem, profile, conditions)
    assert not found.is_expected and not found.violated
    causes = {cause.name: cause for cause in found.causes}
    assert causes[name].share == pytest.approx(1.0) and causes[name].fits
    assert found.causes[0].name == name and found.verdict.endswith(f"{name} explains it")


def test_the_power_cap_is_a_cause():
    """It is smaller than the interval, so it shows in a time that nothing explains wholly."""
    measured = 1.6 * time_of("fa3", PREFILL, H200)
    [cap] = [cause for cause in diagnose(measured, "fa3", PREFILL, H200).causes if cause.name == "power cap"]
    assert 0.1 < cap.share < 0.9 and 1300 < cap.result.sm_clock_mhz < 1700
    assert f"{cap.result.sm_clock_mhz:.0f} MHz" in cap.about


def test_shares_are_of_the_logarithm_of_time():
    expected, measured = time_of("fa3", PREFILL, H200), 3 * time_of("fa3", PREFILL, H200)
    for cause in diagnose(measured, "fa3", PREFILL, H200).causes:
        assert cause.share == pytest.approx(math.log(cause.result.time_us / expected) / math.log(3))


def broken(measured_us, problem=LONG, profile=H200, algorithm="fa3"):
    """The diagnosis of a time that is below a physical bound, and the names of what fits."""
    found = diagnose(measured_us, algorithm, problem, profile)
    assert found.violated and "impossible" in found.verdict and "broken benchmark" in found.verdict
    assert not found.causes
    return found, [suspicion.name for suspicion in found.suspicions if suspicion.fits]


def test_broken_benchmarks():
    long = LONG
    predicted = time_of("fa3", long, H200)
    limit = physical_bounds(long, H200)[0].time_us
    assert broken(10.0)[1] == ["asynchronous timing"]
    assert "sparse peak" in broken(0.6 * limit)[1]
    found, fits = broken(predicted * long.unmasked_pairs_per_head() / 8192**2)
    assert "double-counted FLOPs" in fits and "asynchronous timing" not in fits
    assert any(s.fits and "whole square" in s.text for s in found.suspicions)
    full = long.with_(causal=False)
    assert not any("whole square" in s.text for s in broken(200.0, full)[0].suspicions)


def test_a_warm_l2_can_beat_hbm_but_not_physics():
    decode = DECODE.with_(batch=1)
    below_hbm = 0.9 * physical_bounds(decode, A100)[0].time_us
    found, fits = broken(below_hbm, decode, A100, "flash_decoding")
    assert found.violated[0].resource == "hbm" and "warm L2" in fits
    warm = diagnose(below_hbm, "flash_decoding", decode, A100, RunOptions(l2_state="warm"))
    assert not warm.violated


def test_frameworks_dispatch_is_a_cause():
    """FA3 hoped for, PyTorch 2.5 on Hopper: it never tries cuDNN, so FA2 runs."""
    measured = time_of("fa2", PREFILL, H200)
    found = diagnose(measured, "fa3", PREFILL, H200, framework=framework_call("torch", "2.5"))
    [dispatch] = [cause for cause in found.causes if cause.name == "dispatch"]
    assert dispatch.fits and dispatch.about.startswith("torch 2.5 runs flash")


def test_far_above_everything_is_a_software_fault():
    """vLLM#27437: FA3 decode on an H100 at about 50 GB/s, 70 times its roofline (the thread gives no shape)."""
    measured = least_bytes(CACHE) / 50e9 * 1e6
    found = diagnose(measured, "flash_decoding", CACHE, H100)
    assert 60 < measured / found.bounds[0].time_us < 75
    assert "software fault" in found.verdict and "not bandwidth" in found.verdict


def test_the_command(capsys, tmp_path):
    file = tmp_path / "d.json"
    shape = ("--batch", "1", "--seqlen", "2048", "--gpu", "h200_sxm", "--algorithm", "fa3")
    measured = time_of("fa2", PREFILL, H200)
    assert main(["explain", *shape, "--time-us", f"{measured}", "--json", str(file)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "mma.sync path explains it" in out and "90 % interval" in out and "Limit at least" in out
    data = json.loads(file.read_text())
    assert data["causes"][0]["name"] == "mma.sync path" and data["violated"] == [] and not data["expected"]
    assert main(["explain", *shape, "--tflops", "1500"]) == 0
    assert "VIOLATED" in capsys.readouterr().out
    automatic = ("--batch", "1", "--seqlen", "2048", "--gpu", "a100_sxm4_80gb", "--algorithm", "auto")
    assert main(["explain", *automatic, "--framework", "torch", "--time-us", "200"]) == 0
    assert "fa2:torch_flash on a100_sxm4_80gb" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give the measured time"),
        (("--time-us", "10", "--tflops", "10"), "not both"),
        (("--time-us", "0"), "is no time"),
        (("--time-us", "nan"), "is no time"),
        (("--tflops", "-1"), "is no rate"),
        (("--time-us", "10", "--algorithm", "fa9"), "fa9"),
        (("--time-us", "10", "--framework", "torhc"), "did you mean 'torch'?"),
    ],
)
def test_a_mistake_is_one_line(capsys, arguments, message):
    assert message in failure(capsys, "explain", *arguments)
