"""The roofline: ceilings are the profile's, marks the results', and neither marks nor labels collide."""

from __future__ import annotations

import numpy as np
import pytest
from picture_checks import PROBLEM, assert_inside, assert_texts_keep_apart, boxes

from simulator import InputError, load_profile, simulate
from simulator.palette import ALGORITHM_COLOURS
from simulator.plots.roofline import ceiling_rows, plot_roofline, roofline_rows


@pytest.fixture(scope="module")
def profile():
    return load_profile("h100_sxm")


@pytest.fixture(scope="module")
def results(profile):
    return [simulate(algorithm, PROBLEM, profile) for algorithm in ("standard", "fa2", "fa3")]


def test_ceilings_are_the_profiles_numbers(profile):
    rows = ceiling_rows(profile)
    spec = {r.get("level") or (r["path"], r["dtype"]): r for r in rows if r["quality"] == "spec"}
    assert spec["HBM"]["bytes_per_s"] == profile.hbm_bandwidth_bytes_per_s
    assert spec["SMEM"]["bytes_per_s"] == 128 * 132 * profile.max_clock_hz
    tensor = next(r for key, r in spec.items() if key[0] == "wgmma" and "bf16" in key[1])
    assert tensor["flop_per_s"] == pytest.approx(profile.spec_flops("bf16"), rel=0.01)
    assert ("mma_sync", "fp16/bf16") in spec
    sustained = {r.get("level") or (r["path"], r["dtype"]): r for r in rows if r["quality"] == "sustained"}
    assert spec.keys() == sustained.keys()
    for key, row in sustained.items():
        unit = "bytes_per_s" if "bytes_per_s" in row else "flop_per_s"
        assert 0.3 * spec[key][unit] < row[unit] <= 1.2 * spec[key][unit]


def test_a_mark_for_each_kernel_and_level(profile, results):
    rows = [r for r in roofline_rows(results, [profile]) if r["kind"] == "kernel"]
    for result in results:
        own = [r for r in rows if r["algorithm"] == result.algorithm]
        assert len(own) == 3 * len(result.kernels)
        total = {level: sum(r["bytes"] for r in own if r["level"] == level) for level in ("HBM", "L2", "SMEM")}
        assert total["HBM"] == result.hbm_read_bytes + result.hbm_write_bytes + result.dirty_bytes_at_end
        assert total["L2"] == result.l2_read_bytes + result.l2_write_bytes
        # what reaches an SM's registers by way of shared memory was loaded into it first
        assert total["SMEM"] > 0
        flop = sum(r["flop"] for r in own if r["level"] == "HBM" and result.kernels[r["kernel_index"]].work["matmul"])
        assert flop == pytest.approx(result.flops)


def test_no_mark_is_above_its_ceilings(profile, results):
    rows = roofline_rows(results, [profile])
    bandwidth = {r["level"]: r["bytes_per_s"] for r in rows if r["kind"] == "bandwidth" and r["quality"] == "spec"}
    top = max(r["flop_per_s"] for r in rows if r["kind"] == "compute")
    for row in rows:
        if row["kind"] == "kernel" and row["flop_per_byte"]:
            # sustained L2 bandwidth may exceed the profile's by what the parameter's bound allows
            assert row["flop_per_s"] <= 1.2 * row["flop_per_byte"] * bandwidth[row["level"]]
            assert row["flop_per_s"] <= top


def test_roofline_draws_every_mark_in_its_algorithms_colour(profile, results):
    from matplotlib.colors import to_hex

    rows = roofline_rows(results, [profile])
    figure, axes = plot_roofline(rows=rows)
    marks = [line for line in axes[0].lines if line.get_marker() in ("o", "s", "^")]
    expected = [r for r in rows if r["kind"] == "kernel" and r["flop_per_byte"]]
    drawn = sorted((float(m.get_xdata()[0]), float(m.get_ydata()[0])) for m in marks)
    assert np.allclose(drawn, sorted((r["flop_per_byte"], r["flop_per_s"]) for r in expected))
    colours = {to_hex(m.get_markerfacecolor()).upper() for m in marks}
    assert colours == {ALGORITHM_COLOURS[r.algorithm].upper() for r in results}
    assert_texts_keep_apart(figure)
    assert_inside(figure)


def test_many_launches_have_room_for_their_labels(profile):
    both = PROBLEM.with_(pass_="fwd_bwd")
    figure, _ = plot_roofline([simulate(a, both, profile) for a in ("standard", "fa1", "fa2", "fa3")], [profile])
    assert len({text for text, _ in boxes(figure) if text.startswith("standard ")}) > 6
    assert_texts_keep_apart(figure)
    assert_inside(figure)


def test_labels_of_bandwidth_lines_lie_along_them_and_cover_no_mark(profile, results):
    figure, (ax,) = plot_roofline(results, [profile])
    figure.draw_without_rendering()
    labels = [t for t in ax.texts if t.get_text().endswith("TB/s")]
    marks = [line for line in ax.lines if line.get_marker() not in ("None", "")]
    points = ax.transData.transform([(line.get_xdata()[0], line.get_ydata()[0]) for line in marks])
    assert [t.get_text().split()[0] for t in labels] == ["HBM", "L2", "SMEM"] and len(points) > 9
    for label in labels:
        angle = np.radians(label.get_rotation())
        (low, high) = ax.transData.transform([(1.0, 1e12), (10.0, 1e13)])
        assert np.tan(angle) == pytest.approx((high - low)[1] / (high - low)[0], rel=1e-3)
        label.set_rotation(0)
        box = label.get_window_extent()
        along, across = (
            (points - ax.transData.transform(label.xy)) @ np.array(v)
            for v in ((np.cos(angle), np.sin(angle)), (-np.sin(angle), np.cos(angle)))
        )
        covered_marks = (along > 0) & (along < box.width) & (across > 0) & (across < box.height)
        assert not covered_marks.any(), label.get_text()


def test_measured_points_stand_beside_the_predicted_ones(profile, results, tmp_path):
    from simulator.plots.measured import measured_points

    path = tmp_path / "measured.csv"
    path.write_text(
        "algorithm,batch,heads,seqlen_q,head_dim,causal,gpu,measured_time_us,measured_hbm_read_bytes\n"
        "fa2,1,8,2048,128,1,h100_sxm,80,16000000\n"
        "fa2,1,8,4096,128,1,h100_sxm,90,16000000\n"
    )
    points = measured_points(path, results)
    assert [(p["algorithm"], p["level"], p["bytes"], p["time_us"]) for p in points] == [("fa2", "HBM", 16e6, 80.0)]
    _, axes = plot_roofline(results, [profile], points)
    hollow = [line for line in axes[0].lines if line.get_markerfacecolor() == "white" and line.get_marker() == "o"]
    assert [float(h.get_xdata()[0]) for h in hollow] == [pytest.approx(results[1].flops / 16e6)]
    with pytest.raises(InputError, match="no row measured this problem"):
        measured_points(path, [simulate("fa3", PROBLEM, profile)])
