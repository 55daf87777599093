"""``--set key=value`` and the ``gpus`` command."""

import csv
import json
import re
from pathlib import Path

import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import simulator
from simulator import AttentionProblem, simulate
from simulator.cli import main
from simulator.errors import InputError
from simulator.gpus_command import register
from simulator.overrides import override_dimensions, parse_overrides, with_values
from simulator.profile import SCALAR_KEYS, UNREAD_KEYS, load_profile, profile_names
from simulator.quantities import format_quantity, parse_quantity

H100 = load_profile("h100_sxm")


@pytest.mark.parametrize(
    ("text", "dimension", "value"),
    [
        ("8TB/s", "bytes/s", 8e12),
        ("3350 GB/s", "bytes/s", 3350e9),
        ("512KiB", "bytes", 524288),
        ("512KB", "bytes", 512000),
        ("50 MiB", "bytes", 52428800),
        ("1GiB", "bytes", 2**30),
        ("141gb", "bytes", 141e9),
        ("1_000_000", "bytes", 1e6),
        ("1.83GHz", "hz", 1.83e9),
        ("1830MHz", "hz", 1.83e9),
        ("328ns", "s", 328e-9),
        ("2.4us", "s", 2.4e-6),
        ("2.4µs", "s", 2.4e-6),
        ("1e-6", "s", 1e-6),
        ("0.7kW", "w", 700),
        ("989.4TFLOP/s", "flop/s", 989.4e12),
        ("2.25PFLOPS", "flop/s", 2.25e15),
        ("29 cycles", "cycles", 29),
        ("128B/clk", "bytes/cycle", 128),
        (".5", "count", 0.5),
    ],
)
def test_quantities(text, dimension, value):
    assert parse_quantity(text, dimension) == value


@given(st.floats(min_value=1, max_value=1e16, allow_nan=False))
@settings(max_examples=100)
def test_formatted_sizes_parse_back_to_four_digits(number):
    for dimension in ("bytes", "bytes/s", "flop/s"):
        assert parse_quantity(format_quantity(number, dimension), dimension) == pytest.approx(number, rel=1e-3)


def set_(*texts):
    return parse_overrides(texts, H100)


def test_absolute_relative_and_nested_overrides():
    changed = set_("l2_bytes=x2", "tensor_flop_per_cycle_per_sm.wgmma.bf16=8192", "launch_overhead_s=0")
    assert changed.l2_bytes == 2 * H100.l2_bytes
    assert changed.tensor_rate("wgmma", "bf16") == 8192 and changed.tensor_rate("wgmma", "fp16") == 4096
    assert changed.launch_overhead_s == 0
    assert changed.name == "h100_sxm[l2_bytes=x2,tensor_flop_per_cycle_per_sm.wgmma.bf16=8192,launch_overhead_s=0]"
    quantity = changed.values["l2_bytes"]
    assert (quantity.kind, quantity.location) == ("assumed", "--set") and "52428800" in quantity.source.replace(
        "5.24288e+07", "52428800"
    )
    assert changed.is_hypothetical
    untouched = {k for k in H100.values if changed.values[k] == H100.values[k]}
    assert set(H100.values) - untouched == {
        "l2_bytes",
        "tensor_flop_per_cycle_per_sm.wgmma.bf16",
        "launch_overhead_s",
        "spec_tensor_flops.bf16",
    }


def test_load_profile_takes_overrides_and_overrides_stack():
    once = load_profile("h100_sxm", {"l2_bytes": "x2"})
    assert once == set_("l2_bytes=x2")
    twice = parse_overrides(["num_sms=x1.5"], once)
    assert twice.name == "h100_sxm[l2_bytes=x2,num_sms=x1.5]"
    assert (twice.num_sms, twice.l2_bytes) == (198, 2 * H100.l2_bytes)
    assert load_profile("h100_sxm", {}) == H100


def test_aliases_and_what_follows():
    changed = set_("hbm_bandwidth=x2", "sram_per_sm=512KiB")
    assert changed.hbm_bandwidth_bytes_per_s == 2 * H100.hbm_bandwidth_bytes_per_s
    assert changed.hbm_sustained_read_bytes_per_s == pytest.approx(2 * H100.hbm_sustained_read_bytes_per_s)
    assert changed.hbm_sustained_copy_bytes_per_s == pytest.approx(2 * H100.hbm_sustained_copy_bytes_per_s)
    assert changed.smem_bytes_per_sm == 512 * 1024
    assert changed.smem_bytes_per_cta_max == H100.smem_bytes_per_cta_max * 512 * 1024 // H100.smem_bytes_per_sm
    assert changed.smem_bytes_per_cta_max <= changed.smem_bytes_per_sm <= changed.l1_smem_bytes_per_sm
    own = set_("hbm_bandwidth=8TB/s", "hbm_sustained_read=6TB/s")
    assert own.hbm_sustained_read_bytes_per_s == 6e12


def test_peak_follows_tensor_rate_sms_and_clock():
    changed = set_("tensor_rate=x2", "num_sms=264", "max_clock=x0.5")
    assert changed.spec_tensor_flops["bf16"] == pytest.approx(H100.spec_tensor_flops["bf16"] * 2 * 2 * 0.5)
    assert changed.tensor_rate("mma_sync", "fp16") == 2 * H100.tensor_rate("mma_sync", "fp16")
    # mma.sync is not what the datasheet quotes on Hopper.
    assert set_("tensor_flop_per_cycle_per_sm.mma_sync.bf16=x1.2").spec_tensor_flops == H100.spec_tensor_flops


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["l2_byte=4"], r"^--set: l2_byte: unknown key; did you mean 'l2_bytes'\?"),
        (["hbm_bandwith=8TB/s"], "did you mean 'hbm_bandwidth'"),
        (["hbm_bandwidth=8TB"], "hbm_bandwidth_bytes_per_s: '8TB' is a number of bytes; expected a bandwidth"),
        (["l2_bytes=5GHz"], "is a frequency; expected a number of bytes such as 512KiB"),
        (["l2_bytes=-4MiB"], "negative; .*more than 0"),
        (["l2_bytes=0"], "zero"),
        (["l2_bytes=x0"], "zero"),
        (["l2_bytes=x"], "not a number"),
        (["l2_bytes=xtwo"], "'xtwo' is not a factor; write x and a number"),
        (["l2_bytes=xinf"], "not a factor"),
        (["l2_bytes"], "'l2_bytes' is not an override; write key=value"),
        (["l2_bytes="], "not an override"),
        (["l2_bytes=x2", "l2_bytes=x3"], "given twice; keep one"),
        (["l2_bytes=x2", "l2=x3"], "changes l2_bytes like 'l2_bytes'"),
        (["num_sms=1.5"], "1.5 is not whole"),
        (["tensor_rate=8192"], "names 5 values .*scale them all with xN"),
        (["tensor_rate.tcgen05.bf16=1"], "h100_sxm has no such value; it has .*wgmma.bf16"),
        (["smem_bytes_per_cta_max=1MiB"], "more than smem_bytes_per_sm"),
        (["hbm_sustained_read=9TB/s"], "more than hbm_bandwidth_bytes_per_s"),
        (["name=3"], "unknown key"),
    ],
)
def test_a_bad_override_is_one_clear_line(texts, words):
    with pytest.raises(InputError) as caught:
        parse_overrides(texts, H100)
    assert "\n" not in str(caught.value) and re.search(words, str(caught.value)), str(caught.value)


def test_every_scalar_key_of_every_profile_can_be_scaled_alone():
    for name in profile_names():
        profile = load_profile(name)
        for key in SCALAR_KEYS:
            factor = 0.5 if key.startswith("hbm_sustained") or key in ("smem_bytes_per_cta_max", "spec_clock_hz") else 2
            if key == "tmem_bytes_per_sm" and profile.tmem_bytes_per_sm == 0:
                continue
            changed = parse_overrides([f"{key}=x{factor}"], profile)
            assert changed.values[key].value == profile.values[key].value * factor, key


@given(
    sms=st.integers(1, 1000),
    l2=st.floats(1e5, 1e9),
    bandwidth=st.floats(1e11, 1e14),
    smem=st.floats(3e4, 4e6),
)
@settings(max_examples=60, deadline=None)
def test_random_designs_keep_the_profiles_own_relations(sms, l2, bandwidth, smem):
    design = with_values(
        H100,
        {"num_sms": sms, "l2_bytes": l2, "hbm_bandwidth_bytes_per_s": bandwidth, "smem_bytes_per_sm": smem},
        name="design",
    )
    assert design.name == "design" and design.num_sms == sms and design.l2_bytes == round(l2)
    assert design.hbm_sustained_read_bytes_per_s <= design.hbm_bandwidth_bytes_per_s == bandwidth
    assert design.smem_bytes_per_cta_max <= design.smem_bytes_per_sm <= design.l1_smem_bytes_per_sm
    assert all(isinstance(design.values[k].value, int) for k, key in SCALAR_KEYS.items() if key.integer)


def test_override_dimensions_covers_aliases():
    dimensions = override_dimensions()
    assert dimensions["hbm_bandwidth"] == "bytes/s" and dimensions["sram_per_sm"] == "bytes"


def run_gpus(*arguments):
    app = typer.Typer()
    register(app)
    app.command("other")(lambda: None)  # a single command would lose its name
    return CliRunner().invoke(app, ["gpus", *arguments], env={"COLUMNS": "200"}, terminal_width=200)


def test_gpus_lists_shows_and_compares():
    listed = run_gpus()
    assert listed.exit_code == 0 and all(name in listed.output for name in profile_names())
    shown = run_gpus("h200_sxm").output
    for key, quantity in load_profile("h200_sxm").values.items():
        assert key in shown
        assert quantity.location.rsplit("/", 1)[-1] in shown
    difference = run_gpus("diff", "h100_sxm", "h200_sxm").output
    assert "hbm_bandwidth_bytes_per_s" in difference and "x1.432" in difference
    assert "smem_bytes_per_sm" not in difference
    relative = run_gpus("diff", "h100_sxm", "h100_sxm", "--set", "l2_bytes=x2").output
    assert "x2" in relative and "100 MiB" in relative


def test_gpus_json_has_every_value_with_its_source():
    data = json.loads(run_gpus("b200", "--json").output)
    assert data["values"]["l2_bytes"]["value"] == load_profile("b200").l2_bytes
    assert all(entry["source"] and entry["kind"] for entry in data["values"].values())


@pytest.mark.parametrize("arguments", [("diff", "h100_sxm"), ("h100_sxm", "b200"), ("--set", "l2_bytes=x2"), ("h10",)])
def test_gpus_misuse_is_an_input_error(arguments):
    result = run_gpus(*arguments)
    assert isinstance(result.exception, InputError) and "\n" not in str(result.exception)


def test_changing_what_no_prediction_reads_is_told(tmp_path):
    """A knob that turns nothing must say so, from the command line and from a user's file; a real one does not."""
    problem = AttentionProblem(heads=2, seqlen_q=256, head_dim=64)
    file = tmp_path / "mine.yaml"
    value = '{value: 1us, kind: assumed, source: "what if"}'
    file.write_text(f"name: mine\ntitle: Mine\nbase: h100_sxm\nlaunch_overhead_s: {value}\n", encoding="utf-8")
    for profile in (load_profile("h100_sxm", {"launch_overhead": "x0.1", "l2": "x2"}), load_profile(file)):
        lines = simulate("fa2", problem, profile).warnings
        assert "launch_overhead_s: changed, but the time of one attention call does not depend on it" in lines
    for profile in (load_profile("h100_sxm", {"l2": "x2", "sram": "x2"}), load_profile("h20")):
        assert not any("does not depend on it" in line for line in simulate("fa2", problem, profile).warnings)


@pytest.mark.parametrize("key", sorted(SCALAR_KEYS))
def test_unread_keys_are_those_that_nothing_reads(key):
    """By the attribute's name in the sources of both packages, where only the profile's own modules do not count."""
    own = {"profile.py", "profile_loader.py", "overrides.py", "sensitivity.py"}
    # whole models have readers of their own
    own |= {"power.py"}
    root = Path(simulator.__file__).parent.parent
    packages = (root / "simulator", root / "algorithms")
    sources = [p for package in packages for p in package.rglob("*.py") if p.name not in own]
    readers = [p for p in sources if not p.name.startswith("model_") and f".{key}" in p.read_text(encoding="utf-8")]
    assert (key in UNREAD_KEYS) == (not readers), readers


_SMALL = "--batch 1 --heads 2 --seqlen 256 --head-dim 64"


@pytest.mark.parametrize(
    "command",
    [
        f"compare {_SMALL}",
        f"why fa2 fa3 {_SMALL}",
        f"dispatch {_SMALL}",
        f"explain --time-us 30 {_SMALL}",
        "gpus h100_sxm",
        f"sensitivity --no-limits --parameters num_sms --algorithm fa2 {_SMALL}",
        f"require --target fa2<=1s --parameters num_sms {_SMALL}",
        "model gpt2-small --prefill --batch 1 --seqlen 256",
    ],
)
def test_every_command_takes_set_and_shows_the_changed_gpu(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    gpu = [] if command.startswith("gpus") else ["--gpu", "h100_sxm"]
    assert main([*command.split(), *gpu, "--set", "l2_bytes=x1.5", "--set", "hbm_bandwidth=4TB/s"]) == 0
    shown = "".join(capsys.readouterr().out.split())
    assert "h100_sxm[l2_bytes=x1.5,hbm_bandwidth_bytes_per_s=4TB/s]" in shown


@pytest.mark.parametrize("command", ["io", "roofline", "scale", "timeline", "report"])
def test_every_picture_takes_set_and_names_the_changed_gpu_in_its_file(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = "out.html" if command == "report" else "out.png"
    arguments = [command, *_SMALL.split(), "--gpu", "h100_sxm", "-o", file]
    assert main([*arguments, "--set", "l2_bytes=x1.5"]) == 0
    written = tmp_path / (file if command == "report" else "out.csv")
    assert "h100_sxm[l2_bytes=x1.5]" in written.read_text(encoding="utf-8")


MEASURED = "algorithm,batch,heads,seqlen_q,head_dim,family,measured_time_us\nfa2,1,8,640,64,a,20\n"


def test_measurements_are_compared_with_a_changed_gpu(tmp_path, capsys):
    (tmp_path / "m.csv").write_text(MEASURED)
    arguments = ["validate", "--gpu", "h100_sxm", "--data", str(tmp_path / "m.csv"), "--csv", str(tmp_path / "e.csv")]
    times = []
    for changes in ([], ["--set", "max_clock=x0.5", "--set", "launch_overhead_s=9us"]):
        assert main([*arguments, *changes]) == 0
        assert ("Predicted with max_clock=x0.5 launch_overhead_s=9us" in capsys.readouterr().out) == bool(changes)
        with (tmp_path / "e.csv").open(newline="") as file:
            times += [float(row["time_us"]) for row in csv.DictReader(file)]
    assert times[1] > times[0] + 3
    assert main([*arguments, "--set", "l2_bites=x2"]) == 2
    assert "l2_bytes" in capsys.readouterr().err


def test_a_fit_on_a_changed_gpu_is_shown_and_not_kept(tmp_path, capsys):
    (tmp_path / "m.csv").write_text(MEASURED)
    (tmp_path / "mine.yaml").write_text("name: mine\nbase: h100_sxm\ncalibration: {from: h200_sxm}\n")
    before = (tmp_path / "mine.yaml").read_bytes()
    arguments = ["calibrate", "--gpu", str(tmp_path / "mine.yaml"), "--data", str(tmp_path / "m.csv")]
    assert main([*arguments, "--set", "l2_bytes=x2"]) == 2
    assert "--dry-run" in capsys.readouterr().err
    assert (tmp_path / "mine.yaml").read_bytes() == before
    assert main([*arguments, "--dry-run", "--set", "l2_bites=x2"]) == 2
    assert "l2_bytes" in capsys.readouterr().err
