"""A comparison as a picture: time by algorithm, one panel a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from simulator.comparison import Comparison
from simulator.palette import algorithm_colour
from simulator.plots.style import time_text, title_height_in, title_lines
from simulator.wording import problem_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_comparison(comparison: Comparison) -> tuple[Figure, Any]:
    """Horizontal bars of time (ms, from zero, one scale for all GPUs), limiter and speed-up beside them;
    ``(figure, axes)``."""
    from matplotlib.figure import Figure

    groups = comparison.by_gpu()
    rows = max(len(entries) for _, entries in groups)
    titles = [title_lines(profile.name, 6.0, 10) for profile, _ in groups]
    height = 0.9 + len(groups) * (0.7 + 0.34 * rows + title_height_in(titles))
    figure = Figure(figsize=(8, height), layout="constrained")
    axes = figure.subplots(len(groups), 1, squeeze=False, sharex=True)[:, 0]
    for ax, title, (_, entries) in zip(axes, titles, groups, strict=True):
        names = [entry.label for entry in entries]
        times = [entry.result.time_us / 1e3 if entry.result else 0.0 for entry in entries]
        places = range(len(entries))
        ax.barh(places, times, color=[algorithm_colour(entry.algorithm) for entry in entries])
        for place, entry, time in zip(places, entries, times, strict=True):
            r = entry.result
            text = f"{time_text(r.time_us)}, {r.limiter}" if r else f"cannot run: lacks {', '.join(entry.lacking)}"
            if r is None and not entry.lacking:
                text = "cannot run"
            if entry.speedup is not None and entry.algorithm != "standard":
                text += f", x{entry.speedup:.3g}"
            ax.text(time, place, f" {text}", va="center", fontsize=8)
        ax.set_yticks(places, names)
        ax.invert_yaxis()
        ax.set_title(title, loc="left", fontsize=10)
        ax.tick_params(labelbottom=True)
        ax.spines[["top", "right"]].set_visible(False)
    # room to the right of the longest bar for its text
    longest = max((entry.result.time_us / 1e3 for entry in comparison.entries if entry.result), default=0.0)
    axes[-1].set_xlim(0, 1.45 * longest or 1.0)
    axes[-1].set_xlabel("time, ms (beside the bars: time, limiter, speed-up over standard)")
    asked = problem_text(comparison.problem)
    if comparison.decode_problem is not None:
        asked += "\n* decode: one query a sequence, same keys"
    figure.suptitle(asked, fontsize=9)
    return figure, axes
