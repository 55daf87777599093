"""Pictures: the CSV says what is drawn, saved ones draw again without simulating, marks and labels do not collide."""

from __future__ import annotations

import csv
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from picture_checks import PROBLEM, assert_inside, assert_texts_keep_apart, boxes

from simulator import InputError, load_profile, simulate
from simulator.cli import main
from simulator.observe import observe
from simulator.palette import ALGORITHM_COLOURS
from simulator.plots.agreement import plot_agreement
from simulator.plots.io import io_rows, plot_io, plot_io_sweep, sweep_rows
from simulator.plots.roofline import plot_roofline, roofline_rows
from simulator.plots.rows import read_rows, rows_csv
from simulator.plots.scale import crossovers, plot_scale, scale_rows
from simulator.plots.style import axes_fraction, save_figure, series_colour, spread, svg_text, tint
from simulator.plots.timeline import (
    covered,
    gpu_rows,
    occupancy_steps,
    plot_gpu_timeline,
    plot_sm_timeline,
    sm_rows,
)
from simulator.saved_results import load_results, results_json

SMALL = ["--batch", "1", "--heads", "8", "--seqlen", "1024", "--algorithm", "fa2,fa3"]


@pytest.fixture(scope="module")
def profile():
    return load_profile("h100_sxm")


@pytest.fixture(scope="module")
def results(profile):
    return [simulate(algorithm, PROBLEM, profile) for algorithm in ("standard", "fa2", "fa3")]


@pytest.fixture(scope="module")
def seen(profile):
    return [observe(algorithm, PROBLEM, profile) for algorithm in ("fa2", "fa3")]


# bytes --------------------------------------------------------------------------------------------------------------


def test_io_rows_add_up_to_the_result(results):
    rows = io_rows(results)
    for result in results:
        own = [r for r in rows if r["algorithm"] == result.algorithm]
        by = {(r["level"], r["direction"]): 0 for r in own}
        for row in own:
            by[row["level"], row["direction"]] += row["bytes"]
        assert by["HBM", "read"] == result.hbm_read_bytes
        assert by.get(("HBM", "write"), 0) == result.hbm_write_bytes
        assert by.get(("HBM", "dirty"), 0) == result.dirty_bytes_at_end
        assert by["L2", "read"] == result.l2_read_bytes


def test_io_bars_are_as_long_as_their_bytes(results):
    rows = io_rows(results)
    figure, axes = plot_io(rows=rows)
    for panel, level in enumerate(("HBM", "L2")):
        drawn = sum(bar.get_width() for bar in axes[panel, 0].patches)
        assert drawn == pytest.approx(sum(r["bytes"] for r in rows if r["level"] == level))
        shares = sum(bar.get_width() for bar in axes[panel, 1].patches)
        assert shares == pytest.approx(100 * len(results))
    assert_texts_keep_apart(figure)
    assert_inside(figure)


def test_pictures_of_a_backward_pass_say_so(profile, results):
    """Forward ones stay as they are, so that a CSV of either draws its own title again."""
    backward = simulate("fa2", PROBLEM.with_(pass_="bwd"), profile)
    for drawn, word in (([backward], "backward"), (results[:1], None)):
        rows = {
            "io": io_rows(drawn),
            "scale": scale_rows([(512, r.gpu, r.algorithm, r, "") for r in drawn], {profile.name: 8e10}),
            "roofline": roofline_rows(drawn, [profile]),
        }
        for name, draw in (
            ("io", lambda r: plot_io(rows=r)),
            ("scale", plot_scale),
            ("roofline", lambda r: plot_roofline(rows=r)),
        ):
            axes = np.ravel(draw(rows[name])[1])
            titles = [ax.get_title(loc="left") for ax in axes if ax.get_title(loc="left")]
            assert titles and all((word is not None) == (", backward" in title) for title in titles), name
            assert ("pass" in rows[name][-1] or "pass" in rows[name][0]) == (word is not None), name


def test_sweep_picture_has_floor_and_guide(results):
    series = [
        (float(i), r.algorithm, r, {"base_gpu": "h100_sxm", "guide_bytes": 1e9 / i}) for i, r in enumerate(results, 1)
    ]
    rows = sweep_rows("sram", [(x, n, r, m) for x, n, _, m in series for r in results if r.algorithm == n])
    figure, (ax,) = plot_io_sweep(rows)
    labels = {text for text, _ in boxes(figure)}
    assert {"Θ(N²d²/M)", "compulsory floor", "fa2 HBM", "fa2 SM↔L2"} <= labels
    assert ax.get_xlabel().endswith("KiB")
    assert_texts_keep_apart(figure)


def test_guide_line_falls_with_the_sram():
    from simulator.plot_runs import guide_bytes

    assert guide_bytes(PROBLEM, 200_000) == pytest.approx(guide_bytes(PROBLEM, 100_000) / 2)
    assert guide_bytes(PROBLEM.with_(seqlen_q=4096, seqlen_k=4096), 1e5) == pytest.approx(4 * guide_bytes(PROBLEM, 1e5))


# scale --------------------------------------------------------------------------------------------------------------


def test_crossovers_are_where_two_power_laws_meet():
    rows = []
    for n in (512, 1024, 2048, 4096):
        for name, time in (("a", 0.001 * n**2), ("b", 1.0 * n)):
            rows.append({"kind": "point", "gpu": "g", "algorithm": name, "seqlen": n, "queries": n, "time_us": time})
    # 0.001 n² = n at n = 1000, exactly on log-log lines
    (found,) = crossovers(rows)
    assert (found["algorithm"], found["other"], found["seqlen"]) == ("b", "a", 1000)
    assert found["time_us"] == pytest.approx(1000, rel=1e-3)


def test_a_decode_step_crosses_nothing():
    rows = [
        {"kind": "point", "gpu": "g", "algorithm": name, "seqlen": n, "queries": q, "time_us": t}
        for n, times in ((512, (1.0, 2.0)), (1024, (4.0, 3.0)))
        for name, q, t in (("fa2", n, times[0]), ("flash_decoding", 1, times[1]))
    ]
    assert crossovers(rows) == []


def test_scale_marks_memory_and_lengths(profile, results):
    series = [(n, "h100_sxm", r.algorithm, r, "") for n in (1024, 2048) for r in results]
    figure, axes = plot_scale(scale_rows(series, {"h100_sxm": profile.hbm_bytes}))
    labels = {text for text, _ in boxes(figure)}
    assert {"80 GB of HBM", "1k", "2k", "standard", "fa2", "fa3"} <= labels
    assert axes.shape == (1, 2)
    assert_texts_keep_apart(figure)
    assert_inside(figure)


# timelines ----------------------------------------------------------------------------------------------------------


def test_fa3_keeps_the_tensor_cores_busier_than_fa2(seen):
    busy = {}
    for one in seen:
        rows = [r for r in sm_rows([one]) if r["lane"] == "tensor"]
        low, high = rows[0]["window_start"], rows[0]["window_end"]
        busy[one.result.algorithm] = covered(
            [(max(low, r["start_cycle"]), min(high, r["end_cycle"])) for r in rows]
        ) / (high - low)
    assert busy["fa2"] < busy["fa3"]


def test_fa3_warpgroups_take_turns(seen):
    # ping-pong: while one warpgroup's GEMMs run, the other one's do not
    rows = [r for r in sm_rows([seen[1]]) if r["lane"] == "tensor"]
    roles = sorted({r["role"] for r in rows})
    assert len(roles) == 2
    spans = [[(r["start_cycle"], r["end_cycle"]) for r in rows if r["role"] == role] for role in roles]
    together = covered(spans[0] + spans[1])
    assert together == pytest.approx(covered(spans[0]) + covered(spans[1]))


def test_gpu_timeline_has_every_cta_once(seen):
    rows = gpu_rows(seen)
    for one in seen:
        own = [r for r in rows if r["algorithm"] == one.result.algorithm]
        assert sum(r["ctas"] for r in own) == sum(k.ctas for k in one.result.kernels)
        # each kernel has slots of its own: look at the one with most CTAs
        main = max(one.result.kernels, key=lambda k: k.ctas).name
        own = [r for r in own if r["kernel"] == main]
        times, shares = occupancy_steps(own)
        assert max(shares) <= 100 + 1e-9
        assert shares[-1] == pytest.approx(0, abs=1e-9)
        # slot time under the curve is the CTAs' own
        area = sum(s * (b - a) for s, a, b in zip(shares, times, times[1:], strict=False)) / 100
        slots = own[0]["num_sms"] * own[0]["ctas_per_sm"]
        assert area * slots == pytest.approx(sum(r["end_us"] - r["start_us"] for r in own))


def test_ctas_of_one_slot_follow_each_other(seen):
    slots: dict = {}
    for row in gpu_rows(seen):
        slots.setdefault((row["algorithm"], row["slot"]), []).append((row["start_us"], row["end_us"]))
    for spans in slots.values():
        spans.sort()
        assert all(a[1] <= b[0] + 1e-9 for a, b in itertools.pairwise(spans))


def test_timelines_draw_without_collisions(seen):
    for figure, _ in (plot_sm_timeline(seen), plot_gpu_timeline(seen)):
        assert_texts_keep_apart(figure)
        assert_inside(figure)


def test_agreement_picture():
    rows = [
        {"gpu": "g", "algorithm": a, "regime": "r", "measured_time_us": m, "predicted_time_us": p, "error": p / m - 1}
        for a, m, p in (("fa2", 10.0, 11.0), ("fa2", 1000.0, 900.0), ("fa3", 50.0, 52.0))
    ]  # fmt: skip
    figure, _ = plot_agreement(rows)
    labels = {text for text, _ in boxes(figure)}
    assert "fa2 mean |error| 10.0 %" in labels
    assert "fa3 mean |error| 4.0 %" in labels
    assert_inside(figure)


# style, files, commands ---------------------------------------------------------------------------------------------


def test_spread_keeps_a_gap_and_the_order():
    values = [0.5, 0.5, 0.5, 0.98, 0.99, 0.0]
    placed = spread(values, 0.1)
    ordered = sorted(placed)
    assert all(b - a >= 0.1 - 1e-12 for a, b in itertools.pairwise(ordered))
    assert np.argsort(placed, kind="stable").tolist() == np.argsort(values, kind="stable").tolist()
    assert max(placed) <= 1.0 + 1e-12
    assert spread([0.2, 0.8], 0.1) == [0.2, 0.8]


def test_axes_fraction_follows_the_scale():
    from matplotlib.figure import Figure

    ax = Figure().subplots()
    ax.set_yscale("log")
    ax.set_ylim(1, 100)
    assert axes_fraction(ax, 10) == pytest.approx(0.5)


def test_series_have_their_algorithms_colour():
    assert series_colour("fa1:flash_attn_1_sram") == ALGORITHM_COLOURS["fa1"]
    assert tint("#000000", 0.0) == (1.0, 1.0, 1.0)
    assert tint("#0072B2", 1.0) == pytest.approx((0, 0x72 / 255, 0xB2 / 255))


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_pictures_are_reproducible_in_each_format(tmp_path, results, suffix):
    magic = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}
    for name in ("a", "b"):
        save_figure(plot_io(results)[0], tmp_path / f"{name}{suffix}")
    first, second = ((tmp_path / f"{name}{suffix}").read_bytes() for name in "ab")
    assert first == second
    assert first.startswith(magic[suffix])


def test_svg_text_is_text(results):
    text = svg_text(plot_io(results)[0])
    assert text.startswith("<svg")
    assert ">standard</text>" in text
    assert 'id="series-fa2"' in text


def test_other_suffixes_are_refused(tmp_path, results):
    with pytest.raises(InputError, match=r"x.gif: is no picture; end the name in .png, .svg, .pdf"):
        save_figure(plot_io(results)[0], tmp_path / "x.gif")


def test_results_load_as_they_were_saved(tmp_path, results):
    path = tmp_path / "r.json"
    path.write_text(results_json(results, "iosim io"))
    assert json.loads(path.read_text())["command"] == "iosim io"
    loaded = load_results(path)
    assert io_rows(loaded) == io_rows(results)
    assert [r.problem for r in loaded] == [r.problem for r in results]
    assert [r.kernels for r in loaded] == [r.kernels for r in results]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "r.json:1: not JSON"),
        ("{}", "r.json: no list of results in it"),
        ("[]", "r.json: holds no result that ran"),
        ('[{"algorithm": "fa2"}]', r"r.json: results\[0\]: key 'problem'"),
        ("[1]", r"r.json: results\[0\]"),
    ],
)
def test_bad_result_files_say_what_is_wrong(tmp_path, text, message):
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        load_results(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "p.csv:1: no column 'picture'"),
        ("a,b\n1,2\n", "p.csv:1: no column 'picture'"),
        ("picture,a\n", "p.csv: no rows below the header"),
        ("picture,a\nscale,1\n", "p.csv:2: picture: 'scale' is not 'io'; draw it with iosim scale"),
        ("picture,a\nio,1,2\n", "p.csv:2: not as many fields"),
    ],
)
def test_bad_picture_files_say_what_is_wrong(tmp_path, text, message):
    path = tmp_path / "p.csv"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        read_rows(path, "io")


def test_rows_come_back_from_their_csv(tmp_path, profile, results):
    rows = roofline_rows(results, [profile])
    path = tmp_path / "p.csv"
    path.write_text(rows_csv(rows))
    back = read_rows(path, "roofline")
    for row, again in zip(rows, back, strict=True):
        assert {k: v for k, v in again.items() if v is not None} == {k: v for k, v in row.items() if v is not None}


@pytest.fixture
def no_simulation(monkeypatch):
    """Once called, running the engine fails the test."""

    def refuse(*arguments, **options):
        raise AssertionError("simulated")

    def forbid():
        monkeypatch.setattr("simulator.simulation.run_program", refuse)
        monkeypatch.setattr("simulator.clock_search.run_kernel", refuse)

    return forbid


@pytest.mark.parametrize(
    ("command", "picture"),
    [
        (["roofline"], "roofline"),
        (["io"], "io"),
        (["io", "--against", "seqlen", "--values", "512,1024"], "io-seqlen"),
        (["io", "--against", "l2", "--values", "10,50"], "io-l2"),
        (["scale", "--lengths", "512,1024"], "scale"),
        (["timeline"], "timeline-sm"),
        (["timeline", "--view", "gpu"], "timeline-gpu"),
    ],
)
def test_commands_draw_and_draw_again_without_simulating(
    tmp_path, monkeypatch, capsys, no_simulation, command, picture
):
    monkeypatch.chdir(tmp_path)
    assert main([*command, *SMALL]) == 0
    assert f"wrote {picture}.png and {picture}.csv" in capsys.readouterr().out
    first = Path(f"{picture}.csv").read_text()
    with open(f"{picture}.csv", newline="") as stream:
        assert {row["picture"] for row in csv.DictReader(stream)} == {picture}
    no_simulation()
    assert main([*command, *SMALL, "--from", f"{picture}.csv", "-o", "again.png"]) == 0
    assert Path("again.png").read_bytes() == Path(f"{picture}.png").read_bytes()
    assert Path("again.csv").read_text() == first


def test_one_json_serves_several_pictures(tmp_path, monkeypatch, no_simulation):
    monkeypatch.chdir(tmp_path)
    assert main(["roofline", *SMALL, "--json", "r.json"]) == 0
    no_simulation()
    assert main(["io", "--from", "r.json", "-o", "io.svg"]) == 0
    assert main(["roofline", "--from", "r.json", "-o", "again.png"]) == 0
    assert Path("again.png").read_bytes() == Path("roofline.png").read_bytes()


def test_changed_gpus_and_lists(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    gpus = "h100_sxm,a100_sxm4_80gb"
    assert main(["roofline", *SMALL, "--gpu", gpus, "--set", "l2_bytes=x2", "--json", "r.json"]) == 0
    rows = read_rows("roofline.csv", "roofline")
    assert {r["gpu"] for r in rows} == {"h100_sxm[l2_bytes=x2]", "a100_sxm4_80gb[l2_bytes=x2]"}
    # the changed GPUs are found again by the names in the results
    assert main(["roofline", "--from", "r.json", "-o", "again.png"]) == 0
    assert Path("again.csv").read_text() == Path("roofline.csv").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["io", "--against", "width"], "--against: 'width' is unknown; use seqlen, sram, l2"),
        (["io", "--against", "l2", "--values", "a,b"], "--values: 'a,b' is no list"),
        (["roofline", "-o", "x.gif"], "x.gif: is no picture"),
        (["roofline", "-o", "no/x.png"], "does not exist; create it first"),
        (["scale", "--from", "absent.csv"], "absent.csv: cannot be read"),
        (["timeline", "--view", "x"], "--view: 'x' is unknown; use sm, gpu"),
        (["timeline", "--algorithm", "fa9"], "algorithm: 'fa9' is unknown"),
        (["roofline", "--gpu", "h100_smx"], "h100_sxm"),
    ],
)
def test_mistakes_are_one_line(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
