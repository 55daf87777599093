"""Pictures of what people ask for in practice: a GPU whose name lists five changes, two implementations of one
algorithm, tiles that were chosen."""

import re

import numpy as np
import pytest
from matplotlib.text import Text
from picture_checks import PROBLEM, assert_inside, assert_texts_keep_apart, boxes

from simulator import AttentionProblem, load_profile, simulate
from simulator.observe import observe
from simulator.plots.contour import _label_places, plot_contour
from simulator.plots.io import io_rows, plot_io
from simulator.plots.roofline import plot_roofline, roofline_rows
from simulator.plots.scale import plot_scale, scale_rows
from simulator.plots.style import new_figure, title_lines
from simulator.plots.timeline import plot_gpu_timeline, plot_sm_timeline, sm_rows

CHANGES = {
    "smem_bytes_per_sm": "x2",
    "registers_per_sm": "x2",
    "l2_bytes": "x0.5",
    "hbm_bandwidth_bytes_per_s": "8TB/s",
    "num_sms": "x1.3",
}
SMALL = AttentionProblem(batch=1, heads=4, seqlen_q=512, head_dim=64, causal=True)


@pytest.fixture(scope="module")
def changed():
    return load_profile("h100_sxm", CHANGES)


def test_titles_of_a_changed_gpu_stay_in_the_picture_and_say_all(changed):
    result, seen = simulate("fa3", SMALL, changed), observe("fa3", SMALL, changed)
    series = [(n, changed.name, "fa3", result, "") for n in (256, 512)]
    pictures = [
        plot_io([result]),
        plot_roofline([result], [changed]),
        plot_sm_timeline([seen]),
        plot_gpu_timeline([seen]),
        plot_scale(scale_rows(series, {changed.name: changed.hbm_bytes})),
    ]
    for figure, axes in pictures:
        titles = [title for ax in np.ravel(axes) if (title := ax.get_title(loc="left"))]
        assert titles
        for title in titles:
            assert all(f"{key}={text}" in title.replace("\n", "") for key, text in CHANGES.items())
        assert_inside(figure)
        assert_texts_keep_apart(figure)


@pytest.mark.parametrize("width_in", [2.0, 4.0, 8.0])
def test_a_title_keeps_its_words_and_its_width(width_in):
    text = "fa2 on h100_sxm[smem_bytes_per_sm=x2,registers_per_sm=x2,l2_bytes=x0.5]: flash_fwd, 2 CTAs on the SM"
    lines = title_lines(text, width_in)
    assert re.sub(r"\s", "", lines) == re.sub(r"\s", "", text)
    figure = new_figure(9, 2)
    ax = figure.subplots()
    longest = max(lines.splitlines(), key=len)
    title = ax.set_title(longest, fontweight="bold", fontsize=9.5)
    figure.draw_without_rendering()
    # a single word may be longer than the narrowest picture
    if len(longest) > 30 or width_in > 3:
        assert title.get_window_extent().width / figure.dpi <= width_in * 1.1


def test_two_implementations_of_one_algorithm_are_two_series():
    gpu = load_profile("h100_sxm")
    both = [simulate("fa1", SMALL, gpu, implementation=name) for name in ("flash_attn_1", "flash_attn_1_paper")]
    names = ["fa1:flash_attn_1", "fa1:flash_attn_1_paper"]
    rows = io_rows(both)
    assert list(dict.fromkeys(row["algorithm"] for row in rows)) == names
    for name, result in zip(names, both, strict=True):
        read = sum(r["bytes"] for r in rows if (r["algorithm"], r["level"], r["direction"]) == (name, "L2", "read"))
        assert read == result.l2_read_bytes
    marks = [row for row in roofline_rows(both, [gpu]) if row["kind"] == "kernel"]
    assert {row["algorithm"] for row in marks} == set(names)
    seen = [observe("fa1", SMALL, gpu, implementation=name.partition(":")[2]) for name in names]
    assert {row["algorithm"] for row in sm_rows(seen)} == set(names)
    assert {row["algorithm"] for row in io_rows(both[:1])} == {"fa1"}, "no more words than needed"


def test_a_roofline_counts_the_shared_memory_of_the_tiles_that_ran():
    """64 rows a CTA read K and V twice as often as 128."""
    gpu = load_profile("h100_sxm")
    own, narrow = (simulate("fa3", PROBLEM, gpu, tiles=tiles) for tiles in (None, "64x128x2x1"))

    def smem_bytes(result):
        (row,) = [
            r for r in roofline_rows([result], [gpu]) if r["kind"] == "kernel" and r["level"] == "SMEM" and r["bytes"]
        ]
        return row["bytes"]

    assert smem_bytes(narrow) > 1.2 * smem_bytes(own)


def test_numbers_on_contour_lines_keep_off_the_target_and_today():
    rows = [
        {
            "picture": "require", "algorithm": "fa3", "metric": "time", "target": 600.0, "x_parameter": "num_sms",
            "y_parameter": "l2_bytes", "x_factor": x, "y_factor": y, "value": 800.0 / (x**0.05 * y**0.9),
            "limiter": "tensor", "error": "",
        }
        for x in 2.0 ** np.linspace(-2, 2, 13)
        for y in 2.0 ** np.linspace(-2, 2, 13)
    ]  # fmt: skip
    figure, ax = plot_contour(rows, "h100_sxm")
    assert_inside(figure)
    (today,) = [box for text, box in boxes(figure) if text == "today"]
    texts = [text for text in ax.findobj(Text) if text.get_text().endswith(("µs", "ms"))]
    numbers = [text.get_window_extent() for text in texts]
    assert len(numbers) >= 4
    for i, box in enumerate(numbers):
        assert not any(box.overlaps(other) for other in (*numbers[:i], today))
    thick = max(ax.collections, key=lambda c: max(np.ravel(c.get_linewidth()), default=0))
    points = np.vstack([ax.transData.transform(path.vertices) for path in thick.get_paths()])
    assert not any(box.contains(x, y) for box in numbers for x, y in points)
    assert _label_places(ax, [[np.array([(0.9, 1.0), (1.1, 1.0)])]], []) == [], "no room, no number"
