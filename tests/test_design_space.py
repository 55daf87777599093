"""Random designs: any hardware with any problem gives a sound result or one line that says why there is none.

A sample runs here; ``IOSIM_DESIGNS=5000 pytest tests/test_design_space.py`` runs all of issue 8's, in some ten minutes.
"""

import math
import os

import numpy as np
import pytest

from simulator import load_profile
from simulator.result import LIMITERS
from simulator.sweep.designs import Point
from simulator.sweep.points import Settings, evaluate, hardware_column

DESIGNS = int(os.environ.get("IOSIM_DESIGNS", "160"))
#: Designs are checked in groups, so that a failure names a few of them.
GROUPS = 10
SEED = 20_080

BASES = ("a100_sxm4_80gb", "a100_pcie_80gb", "h100_sxm", "h100_pcie", "h200_sxm", "b200", "h100_2x_smem")
PROFILES = {name: load_profile(name) for name in BASES}
ALGORITHMS = ("standard", "fa1", "fa1:flash_attn_1_paper", "fa2", "fa3", "flash_decoding")
#: Key -> the most that it is multiplied or divided by, as a power of two.
HARDWARE = {
    "num_sms": 3,
    "max_clock_hz": 2,
    "tensor_flop_per_cycle_per_sm": 5,
    "exp_per_cycle_per_sm": 5,
    "fma_per_cycle_per_sm": 5,
    "alu_per_cycle_per_sm": 5,
    "convert_per_cycle_per_sm": 5,
    "issue_slots_per_cycle_per_sm": 4,
    "registers_per_sm": 3,
    "smem_bytes_per_sm": 3,
    "smem_bandwidth_bytes_per_cycle_per_sm": 5,
    "max_threads_per_sm": 2,
    "max_ctas_per_sm": 4,
    "l2_bytes": 10,
    "l2_bandwidth_bytes_per_s": 5,
    "l2_latency_s": 3,
    "l2_to_sm_bandwidth_bytes_per_cycle_per_sm": 5,
    "hbm_bytes": 4,
    "hbm_bandwidth_bytes_per_s": 6,
    "hbm_latency_s": 3,
    "launch_overhead_s": 4,
    "power_cap_w": 2,
}


def design(index: int) -> tuple[Point, Settings]:
    """Design ``index`` of the space: the same in every process."""
    rng = np.random.default_rng([SEED, index])
    chosen = rng.random(len(HARDWARE)) < 0.5
    hardware = tuple(
        (key, f"x{2.0 ** rng.uniform(-reach, reach):.6g}")
        for (key, reach), taken in zip(HARDWARE.items(), chosen, strict=True)
        if taken
    )
    algorithm = str(rng.choice(ALGORITHMS))
    case = problem_case(rng, algorithm)
    base = str(rng.choice(BASES))
    if algorithm in ("fa3", "flash_decoding") and rng.random() < 0.6:
        base = str(rng.choice([name for name in BASES if name.startswith("h")]))
    often = algorithm in ("fa2", "fa3") and case["pass"] == "fwd"
    tiles = None
    if rng.random() < (0.4 if often else 0.15):
        forward = ["128x64x2x1", "64x48x1x1", "192x176x3x3", "256x80x2x4"]
        others = ["16x128x2x1", "64x128x2x2", "scores=128x128x4x2,output=64x64x6x1", "fwd=64x64x1x1,bwd=64x64x1x2"]
        tiles = str(rng.choice([*(forward if often else others), "auto"]))
        if tiles == "auto" and int(str(case.get("seqlen_k", 0))) > 3000:
            # a search is some fifty simulations
            tiles = "128x64x2x1"
    point = Point(index, algorithm, base, hardware, tuple((name, str(value)) for name, value in case.items()))
    keys = tuple(key for key, _ in hardware)
    return point, Settings({base: PROFILES[base]}, keys, tiles, bool(rng.random() < 0.8), 5000)


def problem_case(rng: np.random.Generator, algorithm: str) -> dict[str, object]:
    """A call that ``algorithm`` takes more often than not, from the smallest to long ones, with its rarer features."""
    decoding, hopper = algorithm == "flash_decoding", algorithm in ("fa3", "flash_decoding")
    kv_heads = int(rng.choice([1, 2, 3, 8]))
    # one in a hundred is no problem at all
    heads = kv_heads * int(rng.choice([1, 2, 5, 8])) if rng.random() < 0.99 else kv_heads + 1
    most = 15 if rng.random() < 0.05 else 12
    head_dims = [32, 40, 64, 80, 96, 128] if algorithm.startswith("fa1") else [40, 64, 96, 128, 160, 192, 256]
    dtypes = [0.5, 0.3, 0.19, 0.01] if hopper else [0.6, 0.38, 0.01, 0.01]
    case: dict[str, object] = {
        "batch": int(rng.integers(1, 5)),
        "heads": heads,
        "kv_heads": kv_heads,
        "seqlen_q": int(rng.integers(1, 5)) if decoding else max(1, int(2.0 ** rng.uniform(0, most - 0.5))),
        "seqlen_k": max(1, int(2.0 ** rng.uniform(0, most))),
        "head_dim": int(rng.choice(head_dims)) if rng.random() < 0.96 else 512,
        "dtype": str(rng.choice(["bf16", "fp16", "fp8", "fp32"], p=dtypes)),
        "causal": int(rng.integers(2)),
        "pass": "fwd" if decoding else str(rng.choice(["fwd", "bwd", "fwd_bwd"], p=[0.7, 0.2, 0.1])),
        "l2_state": str(rng.choice(["cold", "warm"])),
        "timing": str(rng.choice(["kernel", "graph", "eager"])),
    }
    if rng.random() < 0.1:
        case["clock_mhz"] = f"{rng.uniform(300, 3000):.1f}"
    if rng.random() < 0.12 and not algorithm.startswith("fa1"):
        case["window"] = f"{int(rng.integers(0, 3000))},{int(rng.choice([-1, 0, 64, 700]))}"
    if rng.random() < 0.08 and algorithm in ("fa2", "fa3", "flash_decoding"):
        case["softcap"] = 30
    if rng.random() < 0.15 and algorithm in ("standard", "fa1", "fa2"):
        case["dropout"] = f"{rng.uniform(0.01, 0.9):.2f}"
    if rng.random() < 0.2 and algorithm == "standard":
        case["mask"] = str(rng.choice(["additive", "bool", "padding"]))
    if decoding and rng.random() < 0.4:
        splits = rng.random() < 0.5
        case |= {"num_splits": int(rng.integers(1, 40))} if splits else {"page_size": 2 ** int(rng.integers(0, 9))}
    if case["pass"] != "fwd" and rng.random() < 0.3 and algorithm in ("fa2", "fa3"):
        case["deterministic"] = 1
    if rng.random() < 0.1 and algorithm in ("fa2", "fa3"):
        lengths = [max(1, int(2.0 ** rng.uniform(0, 12))) for _ in range(int(case["batch"]))]
        case = {k: v for k, v in case.items() if k not in ("batch", "seqlen_q", "seqlen_k")}
        case["seqlens"] = ";".join(map(str, lengths))
    return case


def faults(row: dict, settings: Settings) -> list[str]:
    """What is unsound about a row; nothing for a sound one."""
    if row["error"]:
        found = []
        if "internal error" in row["error"] or "\n" in row["error"] or len(row["error"].split()) < 4:
            found.append(f"not an explanation: {row['error']}")
        if row["time_us"] is not None:
            found.append("an error beside a result")
        return found
    found = [
        f"{name} is {value}"
        for name, value in row.items()
        if isinstance(value, float | int) and (not math.isfinite(value) or value < 0)
    ]
    if not row["time_us"] > 0 or not row["cycles"] > 0:
        found.append(f"takes no time: {row['time_us']} us")
    if row["limiter"] not in LIMITERS:
        found.append(f"limited by {row['limiter']!r}")
    if row["executed_flops"] < row["flops"] * 0.999 and row["pass"] == "fwd":
        found.append("executes fewer FLOPs than the mask leaves")
    base = settings.profiles[row["gpu"]]
    bandwidth = row.get("hbm_bandwidth_bytes_per_s") or base.hbm_bandwidth_bytes_per_s
    moved = row["hbm_read_bytes"] + row["hbm_write_bytes"]
    if row["time_us"] * 1e-6 * bandwidth < 0.999 * moved:
        found.append(f"moves {moved} HBM bytes in {row['time_us']} us at {bandwidth:.3g} B/s")
    # reads that neighbouring SMs share are counted once, before L2 sees them
    l2 = row.get("l2_bandwidth_bytes_per_s") or base.l2_bandwidth_bytes_per_s
    if row["time_us"] * 1e-6 * l2 < 0.999 * (row["l2_read_bytes"] + row["l2_write_bytes"]):
        found.append(f"moves L2 bytes faster than {l2:.3g} B/s")
    if not math.isclose(row["cycles"], row["time_us"] * row["sm_clock_mhz"], rel_tol=1e-6):
        found.append(f"{row['cycles']} cycles in {row['time_us']} us at {row['sm_clock_mhz']} MHz")
    missing = [key for key in settings.hardware if row[hardware_column(key)] is None]
    return found + [f"no input {key}" for key in missing]


@pytest.mark.parametrize("group", range(GROUPS))
def test_random_designs_are_sound_or_explained(group):
    wrong, ran = {}, 0
    for index in range(group, DESIGNS, GROUPS):
        point, settings = design(index)
        row = evaluate(point, settings)
        ran += not row["error"]
        found = faults(row, settings)
        if found:
            wrong[index] = (point, settings.tiles, found)
    assert not wrong
    assert ran >= DESIGNS // GROUPS // 2, "a space of errors would prove nothing"


def test_the_check_finds_faults():
    """The rows above are not sound because nothing is looked at."""
    point, settings = next((p, s) for p, s in map(design, range(100)) if not evaluate(p, s)["error"])
    row = evaluate(point, settings)
    assert faults(row, settings) == []
    for name, value in (
        ("time_us", float("nan")),
        ("time_us", 1e-6),
        ("hbm_read_bytes", -1),
        ("limiter", "luck"),
        ("error", "ValueError"),
        ("executed_flops", 0),
    ):
        assert faults(row | {"pass": "fwd", name: value}, settings), name


@pytest.mark.parametrize(
    ("algorithm", "tiles", "case"),
    [
        ("fa2", "64x224x1x1", {"seqlens": "9;3;211", "head_dim": 96}),
        ("fa2", None, {"seqlens": "93;2", "head_dim": 192, "pass": "bwd", "softcap": 30}),
        (
            "flash_decoding",
            None,
            {"batch": 2, "heads": 10, "kv_heads": 2, "seqlen_q": 1, "seqlen_k": 853}
            | {"head_dim": 256, "dtype": "fp8", "page_size": 32},
        ),
    ],
)
def test_calls_whose_keys_fit_one_tile_run(algorithm, tiles, case):
    """Found among random designs: as many CTAs with rows as key iterations, and the former were taken for the loop; a
    loader of four warps that peels the only iteration of its loop."""
    cells = {"heads": 2, "kv_heads": 1, "causal": 1} | case
    settings = Settings({"h200_sxm": PROFILES["h200_sxm"]}, (), tiles, False, 5000)
    row = evaluate(Point(0, algorithm, "h200_sxm", (), tuple((k, str(v)) for k, v in cells.items())), settings)
    assert not row["error"] and row["time_us"] > 0


@pytest.mark.parametrize(
    ("algorithm", "hardware", "said"),
    [
        ("fa3", {"smem_bytes_per_sm": "64KiB"}, "bytes of SMEM"),
        ("fa2", {"smem_bytes_per_sm": "32KiB"}, "bytes of SMEM"),
        ("fa2", {"registers_per_sm": "x0.25"}, "registers"),
        ("fa3", {"registers_per_sm": "x0.5"}, "registers"),
        ("fa2", {"max_threads_per_sm": "96"}, "threads"),
    ],
)
def test_a_kernel_that_cannot_be_resident_is_explained(algorithm, hardware, said):
    """Too little of something that a CTA needs whole: the resource, what it needs and what there is."""
    case = (("batch", "1"), ("heads", "8"), ("seqlen_q", "1024"), ("head_dim", "128"))
    settings = Settings({"h100_sxm": PROFILES["h100_sxm"]}, tuple(hardware), None, False, 5000)
    row = evaluate(Point(0, algorithm, "h100_sxm", tuple(hardware.items()), case), settings)
    assert said in row["error"], row["error"] or row["time_us"]
