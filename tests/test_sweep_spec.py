"""Specs of sweeps: what they mean, the designs they give, and one line with its place for every mistake."""

import math
from pathlib import Path

import pytest
from sweep_specs import SMALL, spec_file, spec_of

import simulator.sweep
from simulator.errors import InputError
from simulator.sweep.axes import Axis
from simulator.sweep.designs import fingerprint, points_of
from simulator.sweep.spec import read_spec

HEAD = "gpu: h100_sxm\nalgorithms: [fa2]\n"


def test_a_grid_is_every_combination_times_every_algorithm(tmp_path):
    points = points_of(spec_of(tmp_path))
    assert [p.index for p in points] == list(range(12))
    seen = {(p.algorithm, dict(p.hardware)["hbm_bandwidth_bytes_per_s"], dict(p.case)["seqlen_q"]) for p in points}
    assert seen == {(a, b, n) for a in ("fa2", "fa3") for b in ("2TB/s", "x1", "x2") for n in ("256", "512")}
    assert all(dict(p.case)["heads"] == "4" and dict(p.case)["batch"] == "1" for p in points)


def test_a_logarithmic_range_has_equal_ratios_and_its_ends():
    axis = Axis("hardware", "hbm_bandwidth_bytes_per_s", low=1e12, high=8e12, scale="log", steps=4)
    assert [float(text) for text in axis.grid()] == [1e12, 2e12, 4e12, 8e12]


def test_a_range_is_rounded_to_multiples_inside_its_ends():
    axis = Axis("problem", "seqlen_q", low=100, high=1000, multiple=64, steps=40)
    values = [int(text) for text in axis.grid()]
    assert all(value % 64 == 0 and 100 <= value <= 1000 for value in values)
    assert values == sorted(set(values))
    assert (values[0], values[-1]) == (128, 960)


def test_a_relative_range_gives_factors():
    axis = Axis("hardware", "l2_bytes", low=0.5, high=2.0, relative=True, steps=3)
    assert axis.grid() == ("x0.5", "x1.25", "x2")


@pytest.mark.parametrize("kind", ["random", "sobol"])
def test_drawn_designs_are_those_of_their_seed(tmp_path, kind):
    def drawn(seed: int):
        text = (
            HEAD + f"design: {{kind: {kind}, points: 20, seed: {seed}}}\nhardware: {{l2_bytes: {{from: x1, to: x4}}}}\n"
        )
        return [p.hardware for p in points_of(spec_of(tmp_path, text))]

    assert drawn(3) == drawn(3)
    assert drawn(3) != drawn(4)
    factors = [float(text[1:]) for ((_, text),) in drawn(3)]
    assert len(set(factors)) == 20
    assert min(factors) >= 1 and max(factors) <= 4


def test_sobol_points_fill_the_space_more_evenly_than_chance(tmp_path):
    """A balanced design: of 64 points, each of 8 slices of each axis holds exactly 8."""
    text = HEAD + (
        "design: {kind: sobol, points: 64, seed: 5}\n"
        "hardware: {l2_bytes: {from: x1, to: x9}, hbm_bandwidth: {from: x1, to: x9}}\n"
    )
    points = points_of(spec_of(tmp_path, text))
    for axis in range(2):
        slices = [int(float(p.hardware[axis][1][1:]) - 1) for p in points]
        assert [slices.count(i) for i in range(8)] == [8] * 8


def test_several_gpus_are_an_axis(tmp_path):
    points = points_of(spec_of(tmp_path, "gpu: [h100_sxm, a100_sxm4_80gb]\nalgorithms: [fa2]\n"))
    assert [p.gpu for p in points] == ["h100_sxm", "a100_sxm4_80gb"]


def test_a_gpu_file_lies_beside_its_spec(tmp_path, monkeypatch):
    (tmp_path / "mine.yaml").write_text(
        "name: mine\ntitle: Mine\nbase: h100_sxm\nl2_bytes: {value: 100MB, kind: assumed, source: a test}\n"
    )
    monkeypatch.chdir("/")
    spec = spec_of(tmp_path, "gpu: mine.yaml\nalgorithms: [fa2]\n")
    assert spec.profiles["mine.yaml"].l2_bytes == 100_000_000


def test_the_fingerprint_follows_what_decides_the_rows(tmp_path):
    def of(text: str) -> str:
        spec = spec_of(tmp_path, text)
        return fingerprint(spec, points_of(spec))

    assert of(SMALL) == of("# a comment\n" + SMALL)
    for changed in (
        SMALL.replace("x2]", "x3]"),
        SMALL.replace("[fa2, fa3]", "[fa3, fa2]"),
        SMALL.replace("h100_sxm", "h200_sxm"),
        SMALL.replace("5000", "6000"),
        SMALL + "tiles: auto\n",
        SMALL + "hypothetical: true\n",
    ):
        assert of(changed) != of(SMALL)


@pytest.mark.parametrize("path", sorted((Path(simulator.sweep.__file__).parent / "examples").glob("*.yaml")))
def test_the_examples_are_specs(path):
    spec = read_spec(path)
    assert len(points_of(spec)) >= 50


def test_the_largest_example_is_ten_thousand_points():
    path = Path(simulator.sweep.__file__).parent / "examples" / "design_space.yaml"
    assert len(points_of(read_spec(path))) == 10_000


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("algorithms: [fa2]\n", 1, "gpu: missing"),
        ("gpu: h100_sxm\n", 1, "algorithms: missing"),
        ("- 1\n", 1, "not a sweep"),
        ("gpu: [\n", 2, "YAML syntax"),
        (HEAD + "hardwear: {}\n", 3, "did you mean 'hardware'?"),
        ("gpu: h100\nalgorithms: [fa2]\n", 1, "unknown GPU 'h100'"),
        ("gpu: h100_sxm\nalgorithms: [fa9]\n", 2, "'fa9' is unknown"),
        ("gpu: h100_sxm\nalgorithms: []\n", 2, "empty list"),
        (HEAD + "gpu: h200_sxm\n", 3, "given twice"),
        (HEAD + "hardware:\n  hbm_bandwith: [x1]\n", 4, "did you mean 'hbm_bandwidth'?"),
        (HEAD + "hardware:\n  hbm_bandwidth: [8TiB]\n", 4, "hbm_bandwidth: '8TiB' is a number of bytes"),
        (HEAD + "hardware:\n  l2_bytes: [-1MB]\n", 4, "negative"),
        (HEAD + "hardware:\n  l2_bytes: [x1, x1]\n", 4, "'x1' is given twice"),
        (HEAD + "hardware:\n  l2: [x1]\n  l2_bytes: [x2]\n", 5, "like a key above"),
        (HEAD + "hardware:\n  l2: {from: x1}\n", 4, "without 'to'"),
        (HEAD + "hardware:\n  l2: {from: x1, to: x2}\n", 4, "without 'steps' in a grid"),
        (HEAD + "hardware:\n  l2: {from: x1, to: 4GB, steps: 2}\n", 4, "one end is a factor"),
        (HEAD + "hardware:\n  l2: {from: x2, to: x1, steps: 2}\n", 4, "is not below"),
        (HEAD + "hardware:\n  l2: {from: x1, to: x2, steps: 1}\n", 4, "whole number from 2"),
        (HEAD + "hardware:\n  l2: {from: x1, to: x2, step: 3}\n", 4, "did you mean 'steps'?"),
        (HEAD + "hardware:\n  l2: {from: x1, to: x2, steps: 3, scale: lg}\n", 4, "did you mean 'log'?"),
        (HEAD + "hardware:\n  l2: {from: x0, to: x2, steps: 3, scale: log}\n", 4, "a logarithmic range"),
        (HEAD + "hardware:\n  tensor_rate: [1000]\n", 4, "scale them all with xN"),
        (HEAD + "problem:\n  seq_len: [1]\n", 4, "did you mean 'seqlen'?"),
        (HEAD + "problem:\n  seqlen: [0]\n", 4, "'0' cannot be read"),
        (HEAD + "problem:\n  seqlen: 1\n  seqlen_q: 2\n", 5, "sets seqlen_q like 'seqlen'"),
        (HEAD + "problem:\n  dtype: [int4]\n", 4, "write fp16, bf16 or fp8"),
        (HEAD + "problem:\n  dtype: {from: 1, to: 2, steps: 2}\n", 4, "takes no range"),
        (HEAD + "problem:\n  l2_state: tepid\n", 4, "'tepid' is unknown"),
        (HEAD + "problem:\n  seqlen: {from: 10, to: 20, steps: 3, multiple: 64}\n", 4, "no multiple of 64"),
        (HEAD + "design: {kind: sobl, points: 3}\n", 3, "did you mean 'sobol'?"),
        (HEAD + "design: {kind: sobol}\n", 3, "design.points: missing"),
        (HEAD + "design: {kind: sobol, points: 0}\n", 3, "whole number from 1"),
        (HEAD + "design: {kind: grid, points: 3}\n", 3, "a grid has none"),
        (HEAD + "design: {kind: random, points: 3}\n", 3, "nothing varies"),
        (HEAD + "tiles: 128x128\n", 3, "'128x128' is not a tile"),
        (HEAD + "hypothetical: maybe\n", 3, "neither true nor false"),
        (HEAD + "event_budget: 10\n", 3, "whole number from 1000"),
    ],
)
def test_a_mistake_is_one_line_with_its_place(tmp_path, text, line, said):
    path = spec_file(tmp_path, text)
    with pytest.raises(InputError) as caught:
        read_spec(path)
    message = str(caught.value)
    assert message.startswith(f"{path}:{line}: "), message
    assert said in message
    assert "\n" not in message


def test_a_grid_beyond_reason_is_refused(tmp_path):
    axes = "".join(
        f"  {key}: {{from: x0.5, to: x2, steps: 1000}}\n" for key in ("l2_bytes", "hbm_bandwidth", "exp_rate")
    )
    with pytest.raises(InputError, match="a grid of 1,000,000,000 designs"):
        points_of(spec_of(tmp_path, HEAD + "hardware:\n" + axes))


def test_values_that_contradict_others_are_left_to_their_points(tmp_path):
    """SMEM below what one CTA may have is scaled with it; a rate that contradicts the datasheet is a point's error."""
    text = HEAD + "hardware:\n  smem_bytes_per_cta_max: [100KiB, 400KiB]\n"
    assert len(points_of(spec_of(tmp_path, text))) == 2


def test_log_of_a_range_is_exact_enough():
    axis = Axis("hardware", "l2_bytes", low=1.0, high=10.0, relative=True, scale="log", steps=3)
    assert math.isclose(float(axis.grid()[1][1:]), math.sqrt(10), rel_tol=1e-11)


def test_overrides_change_every_base_gpu_and_show_in_its_name(tmp_path):
    path = spec_file(tmp_path, "gpu: [h100_sxm, h200_sxm]\nalgorithms: [fa2]\nhardware: {l2_bytes: [x2]}\n")
    spec = read_spec(path, ("l2_bytes=x2",))
    assert list(spec.profiles) == ["h100_sxm[l2_bytes=x2]", "h200_sxm[l2_bytes=x2]"]
    assert [p.gpu for p in points_of(spec)] == list(spec.profiles)
    assert spec.profiles["h100_sxm[l2_bytes=x2]"].l2_bytes == 2 * read_spec(path).profiles["h100_sxm"].l2_bytes
    with pytest.raises(InputError, match=r"--set: .*unknown key"):
        read_spec(path, ("l3=x2",))
