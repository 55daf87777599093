"""Profile files: inheritance, calibration references, and one clear line with file and line for each mistake."""

import re
import textwrap

import pytest

from simulator.errors import InputError
from simulator.profile import load_profile, write_calibration


@pytest.fixture
def gpu(tmp_path):
    """A function that writes ``gpu.yaml`` (or another name) and returns its path."""

    def write(text, name="gpu.yaml"):
        path = tmp_path / name
        path.write_text(textwrap.dedent(text), encoding="utf-8")
        return path

    return write


def error_of(path):
    with pytest.raises(InputError) as caught:
        load_profile(path)
    message = str(caught.value)
    assert "\n" not in message
    return message


BASE = "name: mine\ntitle: Mine\nbase: h100_sxm\n"

# (what is wrong, the lines after BASE, line of the mistake, words that the message must have)
MISTAKES = [
    ("unknown key", "hbm_bandwith_bytes_per_s: {value: 1, kind: spec, source: x}", 4, "did you mean 'hbm_bandwidth_by"),
    ("unknown key far from all", "zzzz: 1", 4, "zzzz: unknown key; valid: name, title"),
    ("negative size", "l2_bytes: {value: -5, kind: spec, source: x}", 4, "l2_bytes: -5 is negative; .*more than 0"),
    ("zero size", "\nl2_bytes: {value: 0, kind: spec, source: x}", 5, "l2_bytes: 0 is zero; .*more than 0"),
    ("negative latency", "l2_latency_s: {value: -1ns, kind: spec, source: x}", 4, "negative; .*0 or more"),
    ("missing source", "l2_bytes: {value: 5, kind: spec}", 4, "l2_bytes: no source; say where"),
    ("empty source", "l2_bytes: {value: 5, kind: spec, source: ' '}", 4, "l2_bytes: no source"),
    ("missing kind", "l2_bytes: {value: 5, source: x}", 4, "l2_bytes: no kind; one of spec, measured, assumed"),
    (
        "wrong kind",
        "l2_bytes:\n  value: 5\n  source: x\n  kind: guess",
        7,
        "unknown kind 'guess'; one of spec, measured",
    ),
    ("missing value", "l2_bytes: {kind: spec, source: x}", 4, "l2_bytes: no value"),
    (
        "unknown part",
        "l2_bytes: {value: 5, kind: spec, sauce: x}",
        4,
        "l2_bytes.sauce: unknown key; did you mean 'source'",
    ),
    ("bare value", "l2_bytes: 5", 4, "l2_bytes: a bare value without kind and source; write {value"),
    ("no number", "l2_bytes: {value: many, kind: spec, source: x}", 4, "'many' is not a number; .*512KiB"),
    ("nan", "l2_bytes: {value: .nan, kind: spec, source: x}", 4, "is not a number"),
    ("list", "l2_bytes: {value: [1], kind: spec, source: x}", 4, "l2_bytes.value: not a single value"),
    ("fraction", "num_sms: {value: 10.5, kind: spec, source: x}", 4, "num_sms: 10.5 is not whole; .*a whole number"),
    (
        "wrong dimension",
        "l2_bytes: {value: 5GHz, kind: spec, source: x}",
        4,
        "is a frequency; expected a number of bytes",
    ),
    ("unknown unit", "l2_bytes: {value: 5 MiX, kind: spec, source: x}", 4, "unknown unit 'MiX'"),
    ("bits", "l2_bytes: {value: 5Mb, kind: spec, source: x}", 4, "unknown unit 'Mb'"),
    (
        "given twice",
        "num_sms: {value: 1, kind: spec, source: x}\nnum_sms: 3",
        5,
        "given twice .first on line 4.; keep one",
    ),
    ("unknown path", "tensor_flop_per_cycle_per_sm:\n  wgma:\n    bf16: 3", 5, "did you mean 'wgmma'"),
    (
        "unknown dtype",
        "tensor_flop_per_cycle_per_sm:\n  wgmma:\n    bf61: 3",
        6,
        "wgmma.bf61: unknown key; did you mean 'bf16'",
    ),
    ("group is a number", "spec_tensor_flops: 3", 4, "spec_tensor_flops: not a mapping; expected keys among fp16"),
    ("unknown capability", "capabilities: [wgmma, warp]", 4, "unknown capability 'warp'"),
    ("capabilities as text", "capabilities: wgmma", 4, "capabilities: not a list"),
    ("unknown architecture", "architecture: hoper", 4, "unknown architecture 'hoper'; did you mean 'hopper'"),
    ("compute capability", "compute_capability: sm90", 4, "'sm90' is no compute capability"),
    (
        "rate without capability",
        "tensor_flop_per_cycle_per_sm:\n  tcgen05:\n    bf16: {value: 8192, kind: assumed, source: x}",
        6,
        "cannot do; remove it, or add 'tcgen05' to capabilities",
    ),
    (
        "CTA limit above the SM's",
        "smem_bytes_per_cta_max: {value: 300KiB, kind: spec, source: x}",
        4,
        "307200 is more than smem_bytes_per_sm = 233472; at most smem_bytes_per_sm",
    ),
    (
        "sustained above datasheet",
        "hbm_sustained_read_bytes_per_s: {value: 4TB/s, kind: measured, source: x}",
        4,
        "more than hbm_bandwidth_bytes_per_s",
    ),
    (
        "sparse FLOP/s",
        "spec_tensor_flops:\n  bf16: {value: 1979TFLOP/s, kind: spec, source: x}",
        5,
        "rate x num_sms x spec_clock_hz is 9.894e.14; .*sparsity",
    ),
    ("calibration key", "calibration: {form: h200_sxm}", 4, "calibration.form: unknown key; did you mean 'from'"),
    ("calibration from nowhere", "calibration: {from: h300}", 4, "calibration.from: unknown GPU 'h300'"),
    ("calibration both", "calibration: {from: h200_sxm, parameters: {}}", 4, "either 'from' or 'parameters'"),
    ("calibration empty", "calibration: {}", 4, "calibration: no parameters"),
    (
        "calibration parameter outside its bounds",
        "calibration:\n  parameters:\n    a: {value: 9, unit: cycles, low: 0, high: 5}",
        6,
        "calibration.parameters.a: 9 is outside .0, 5.; low <= value <= high",
    ),
    ("calibration no unit", "calibration: {parameters: {a: {value: 1, low: 0, high: 5}}}", 4, "a.unit: missing"),
    ("calibration no bound", "calibration: {parameters: {a: {value: 1, unit: s, low: 0}}}", 4, "a.high: missing"),
    (
        "calibration text",
        "calibration: {parameters: {a: {value: b, unit: s, low: 0, high: 1}}}",
        4,
        "'b' is not a number",
    ),
    ("tmem without capability", "tmem_bytes_per_sm: {value: 5, kind: spec, source: x}", 4, "give both or neither"),
    ("syntax", "l2_bytes: {value: 5, kind: spec\nnum_sms: 3", 5, "YAML syntax: "),
    ("tab", "l2_bytes:\n\tvalue: 3", 5, "YAML syntax: "),
]


@pytest.mark.parametrize(("lines", "line", "words"), [m[1:] for m in MISTAKES], ids=[m[0] for m in MISTAKES])
def test_a_mistake_is_one_line_with_file_and_line(gpu, lines, line, words):
    path = gpu(BASE + lines + "\n")
    message = error_of(path)
    assert message.startswith(f"{path}:{line}: "), message
    assert re.search(words, message), message


def test_mistakes_of_the_whole_file(gpu, tmp_path):
    assert "gpu.yaml:1: not a profile" in error_of(gpu("- 1\n"))
    assert "gpu.yaml:1: not a profile" in error_of(gpu(""))
    assert "gpu.yaml:1: title: missing; add it, or inherit it with 'base:'" in error_of(gpu("name: a\n"))
    complete_but = "title: A\narchitecture: hopper\ncompute_capability: '9.0'\ncapabilities: [mma_sync]\n"
    assert re.search(r"gpu.yaml:1: num_sms: missing; add it with value, kind and source", error_of(gpu(complete_but)))
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    assert "binary.yaml:1: " in error_of(tmp_path / "binary.yaml")
    assert "no such profile file" in error_of(tmp_path / "absent.yaml")
    assert "no such profile file" in error_of(tmp_path)


def test_unknown_gpu_lists_the_valid_names_and_is_not_replaced_by_another():
    message = error_of("h100_smx")
    assert "unknown GPU 'h100_smx'; did you mean 'h100_sxm'?" in message and "b200" in message
    assert "a100_sxm4_40gb" in error_of("tpu_v5")


def test_unknown_base_names_its_line(gpu):
    path = gpu("name: a\nbase: h100_sx\n")
    assert error_of(path).startswith(f"{path}:2: base: unknown GPU 'h100_sx'; did you mean 'h100_sxm'?")
    path = gpu("name: a\nbase: other.yaml\n")
    assert error_of(path).startswith(f"{path}:2: base: no such file")


def test_base_cycle_is_an_error_that_shows_the_cycle(gpu):
    first = gpu("name: a\nbase: ./b.yaml\n", "a.yaml")
    gpu("name: b\n# comment\nbase: ./a.yaml\n", "b.yaml")
    message = error_of(first)
    assert "b.yaml:3: base: the profile is its own base (a -> b -> a)" in message
    itself = gpu("name: c\nbase: c.yaml\n", "c.yaml")
    assert "its own base" in error_of(itself)


def test_calibration_cycle_is_an_error(gpu):
    first = gpu(BASE + "calibration: {from: ./b.yaml}\n", "a.yaml")
    gpu(BASE + "\ncalibration: {from: ./a.yaml}\n", "b.yaml")
    assert re.search(r"[ab].yaml:[45]: calibration.from: the calibration comes from itself", error_of(first))


def test_inheritance_takes_the_base_and_keeps_what_is_overridden(gpu):
    path = gpu(BASE + "l2_bytes: {value: 75MiB, kind: assumed, source: half as much again}\n")
    mine, base = load_profile(path), load_profile("h100_sxm")
    assert (mine.name, mine.title, mine.base) == ("mine", "Mine", "h100_sxm")
    assert mine.l2_bytes == 75 * 2**20
    assert mine.values["l2_bytes"].location == f"{path}:4"
    assert mine.values["num_sms"] == base.values["num_sms"]
    assert {k for k, q in mine.values.items() if q.value != base.values[k].value} == {"l2_bytes"}
    assert mine.is_hypothetical and not base.is_hypothetical


def test_inheritance_chains_through_files(gpu):
    gpu(BASE + "l2_bytes: {value: 75MiB, kind: assumed, source: grown}\n", "mid.yaml")
    top = load_profile(
        gpu("name: top\nbase: mid.yaml\nnum_sms: {value: 200, kind: assumed, source: more}\n", "top.yaml")
    )
    assert (top.title, top.l2_bytes, top.num_sms) == ("Mine", 75 * 2**20, 200)


def test_numbers_that_follow_a_changed_one_scale_with_it_unless_given():
    base, twice, half = (load_profile(n) for n in ("h100_sxm", "h100_2x_smem", "h100_half_hbm"))
    assert twice.smem_bytes_per_sm == 2 * base.smem_bytes_per_sm
    assert twice.smem_bytes_per_cta_max == 2 * base.smem_bytes_per_cta_max
    assert twice.l1_smem_bytes_per_sm == 2 * base.l1_smem_bytes_per_sm
    assert half.hbm_sustained_read_bytes_per_s == pytest.approx(base.hbm_sustained_read_bytes_per_s / 2)
    assert half.values["hbm_sustained_read_bytes_per_s"].kind == "assumed"
    assert "follows hbm_bandwidth_bytes_per_s" in half.values["hbm_sustained_read_bytes_per_s"].source
    # The H200 gives its own sustained bandwidth: nothing is scaled from the H100's.
    assert load_profile("h200_sxm").values["hbm_sustained_read_bytes_per_s"].kind == "measured"


def test_an_edited_file_is_read_again(gpu):
    path = gpu(BASE)
    assert load_profile(path).num_sms == 132
    gpu(BASE + "num_sms: {value: 100, kind: assumed, source: fewer}\n")
    assert load_profile(path).num_sms == 100


SECTION = {
    "parameters": {
        "barrier_cycles": {"value": 31.5, "unit": "cycles", "low": 0, "high": 200, "identified_by": "FA3 rows"},
        "cta_start_s": {"value": 1.25e-06, "unit": "s", "low": 0.0, "high": 1e-5, "standard_error": 2e-8},
    },
    "provenance": {"command": "iosim calibrate", "rows": 312},
}


@pytest.mark.parametrize(
    "text",
    [
        BASE
        + "# above\ncalibration: {from: h200_sxm}\n# below\nnum_sms: {value: 9, kind: assumed, source: few} # few\n",
        BASE
        + "# above\ncalibration:\n  parameters: {}\n\n# below\nnum_sms: {value: 9, kind: assumed, source: few} # few\n",
        BASE + "# above\nnum_sms: {value: 9, kind: assumed, source: few} # few\n# below\n",
        BASE
        + "# above\n# below\nnum_sms: {value: 9, kind: assumed, source: few} # few\ncalibration:\n  parameters: {}",
    ],
    ids=["flow", "block", "absent", "last without newline"],
)
def test_write_calibration_changes_only_its_section(gpu, text):
    path = gpu(text)
    before = load_profile(path)
    write_calibration(path, SECTION)
    after = load_profile(path)
    assert after.calibration_parameters == {"barrier_cycles": 31.5, "cta_start_s": 1.25e-06}
    assert after.calibration_source == "mine"
    assert after.calibration.parameters["barrier_cycles"].identified_by == "FA3 rows"
    assert after.calibration.parameters["cta_start_s"].details == {"standard_error": 2e-8}
    assert after.calibration.provenance == {"command": "iosim calibrate", "rows": 312}
    assert {k: q.value for k, q in after.values.items()} == {k: q.value for k, q in before.values.items()}
    lines = path.read_text(encoding="utf-8").splitlines()
    start = lines.index("calibration:")
    rest = [line for line in lines[:start] if line] + [
        line for line in lines[start:] if line.startswith(("#", "num_sms"))
    ]
    kept = [line for line in text.splitlines() if line and not line.startswith(("calibration", " "))]
    assert rest == kept
    again = path.read_text(encoding="utf-8")
    write_calibration(path, SECTION)
    assert path.read_text(encoding="utf-8") == again
    assert [p.name for p in path.parent.iterdir()] == ["gpu.yaml"]


def test_a_bad_calibration_leaves_the_file_as_it_was(gpu):
    path = gpu(BASE + "calibration: {from: h200_sxm}\n")
    before = path.read_bytes()
    with pytest.raises(InputError, match="outside"):
        write_calibration(path, {"parameters": {"a": {"value": 3, "unit": "s", "low": 0, "high": 1}}})
    with pytest.raises(InputError, match="no parameters"):
        write_calibration(path, {"provenance": {}})
    assert path.read_bytes() == before


def test_calibration_is_resolved_through_from_and_through_base(gpu):
    source = gpu(BASE + "calibration: {parameters: {a: {value: 2, unit: s, low: 0, high: 3}}}\n", "source.yaml")
    sibling = load_profile(gpu("name: sib\nbase: h200_sxm\ncalibration: {from: ./source.yaml}\n", "sibling.yaml"))
    assert (sibling.calibration_source, sibling.calibration_parameters) == ("mine", {"a": 2.0})
    child = load_profile(gpu("name: child\nbase: ./source.yaml\n", "child.yaml"))
    assert (child.calibration_source, child.calibration_parameters) == ("mine", {"a": 2.0})
    grandchild = load_profile(gpu("name: grandchild\nbase: ./sibling.yaml\n", "grandchild.yaml"))
    assert grandchild.calibration_parameters == {"a": 2.0}
    assert "a" not in load_profile(source).values  # kept apart from the datasheet's values


def test_siblings_take_the_h200s_calibration():
    h200 = load_profile("h200_sxm")
    for name in ("h100_sxm", "h100_pcie", "a100_sxm4_40gb", "a100_sxm4_80gb", "a100_pcie_80gb", "b200", "h100_2x_smem"):
        profile = load_profile(name)
        assert profile.calibration_source == "h200_sxm"
        assert profile.calibration_parameters == h200.calibration_parameters
