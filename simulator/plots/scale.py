"""Time and memory against sequence length for all algorithms, with the lengths at which two of them change places."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from simulator.plots.rows import Row, panel_title, pass_cells
from simulator.plots.style import (
    FAINT,
    INK,
    MUTED,
    bytes_text,
    label_in_margin,
    line_width,
    new_figure,
    picture_style,
    readable_log_ticks,
    series_colour,
    time_text,
    title_height_in,
    title_lines,
)
from simulator.result import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PICTURE = "scale"


def scale_rows(series: Iterable[tuple[int, str, str, Result | None, str]], memory_bytes: dict[str, float]) -> list[Row]:
    """Rows from ``(seqlen, gpu, algorithm, result or None, error)``, crossovers and each GPU's memory.

    ``kind`` is ``point``, ``crossover`` (of ``algorithm`` and ``other``, interpolated between two lengths) or
    ``memory`` (the GPU's HBM size).
    """
    rows = []
    for seqlen, gpu, algorithm, result, error in series:
        row = {"picture": PICTURE, "kind": "point", "gpu": gpu, "algorithm": algorithm, "seqlen": seqlen}
        row["queries"] = result.problem.seqlen_q if result is not None else None
        if result is not None:
            row |= pass_cells(result)
            row |= {
                "time_us": result.time_us,
                "peak_memory_bytes": result.peak_memory_bytes,
                "tflops": result.tflops,
                "limiter": result.limiter,
            }
        rows.append(row | {"error": error})
    rows += crossovers(rows)
    rows += [
        {"picture": PICTURE, "kind": "memory", "gpu": gpu, "peak_memory_bytes": amount}
        for gpu, amount in memory_bytes.items()
    ]
    return rows


def crossovers(rows: Iterable[Row]) -> list[Row]:
    """Where the times of two algorithms on one GPU cross, log-log interpolated between neighbouring lengths."""
    times: dict[tuple[str, str], dict[int, float]] = {}
    for row in rows:
        # a decode step beside prefill is another problem: their lines may cross and mean nothing
        same_problem = row.get("queries") == row["seqlen"] or row["kind"] != "point"
        if row["kind"] == "point" and row.get("time_us") and same_problem:
            times.setdefault((row["gpu"], row["algorithm"]), {})[row["seqlen"]] = row["time_us"]
    found = []
    names = list(times)
    for i, (gpu, first) in enumerate(names):
        for other_gpu, second in names[i + 1 :]:
            if other_gpu != gpu:
                continue
            a, b = times[gpu, first], times[gpu, second]
            common = sorted(a.keys() & b.keys())
            for low, high in itertools.pairwise(common):
                before, after = math.log(a[low] / b[low]), math.log(a[high] / b[high])
                if before * after >= 0:
                    continue
                part = before / (before - after)
                at = math.exp(math.log(low) + part * math.log(high / low))
                time = math.exp(math.log(a[low]) + part * math.log(a[high] / a[low]))
                faster = second if after > 0 else first
                found.append(
                    {
                        "picture": PICTURE,
                        "kind": "crossover",
                        "gpu": gpu,
                        "algorithm": faster,
                        "other": first if faster == second else second,
                        "seqlen": round(at),
                        "time_us": time,
                    }
                )
    return found


def plot_scale(rows: Sequence[Row]) -> tuple[Figure, Any]:
    """Time (left) and peak device memory (right) against sequence length; ``(figure, axes)``, axes ``[gpu, 2]``."""
    gpus = list(dict.fromkeys(row["gpu"] for row in rows))
    height = 3.9
    shown = {gpu: panel_title(gpu, [row for row in rows if row["gpu"] == gpu]) for gpu in gpus}
    kinds = ("time", "peak device memory")
    titles = {gpu: [title_lines(f"{name}: {kind}", 3.4) for kind in kinds] for gpu, name in shown.items()}
    more = title_height_in(title for pair in titles.values() for title in pair)
    with picture_style():
        figure = new_figure(10.5, (height + more) * len(gpus))
        axes = figure.subplots(len(gpus), 2, squeeze=False)
        for gpu, (left, right) in zip(gpus, axes, strict=True):
            own = [row for row in rows if row["gpu"] == gpu]
            _lines(left, own, "time_us", time_text, height - 0.9)
            _lines(right, own, "peak_memory_bytes", bytes_text, height - 0.9)
            for ax, title in zip((left, right), titles[gpu], strict=True):
                ax.set_title(title, loc="left", fontweight="bold")
            left.set_ylabel("time")
            right.set_ylabel("bytes held")
    return figure, axes


def _lines(ax: Axes, rows: list[Row], quantity: str, text: Callable[[float], str], axes_height_in: float) -> None:
    points = [row for row in rows if row["kind"] == "point" and row.get(quantity)]
    ax.set(xscale="log", yscale="log", xlabel="sequence length N, tokens")
    labels = []
    algorithms = list(dict.fromkeys(row["algorithm"] for row in points))
    for index, algorithm in enumerate(algorithms):
        own = sorted((r for r in points if r["algorithm"] == algorithm), key=lambda r: r["seqlen"])
        colour = series_colour(algorithm)
        width = line_width(index, len(algorithms))
        ax.plot(
            [r["seqlen"] for r in own], [r[quantity] for r in own], "o-", ms=width + 2, lw=width, color=colour,
            gid=f"series-{algorithm}",
        )  # fmt: skip
        decode = own[-1].get("queries") is not None and own[-1]["queries"] < own[-1]["seqlen"]
        labels.append((own[-1]["seqlen"], own[-1][quantity], algorithm + (" (1 query)" if decode else ""), colour))
    lengths = sorted({row["seqlen"] for row in points})
    ax.set_xticks(lengths, [_length(n) for n in lengths])
    ax.minorticks_off()
    if quantity == "time_us":
        _mark_crossovers(ax, [row for row in rows if row["kind"] == "crossover"])
    else:
        for row in rows:
            if row["kind"] == "memory":
                ax.axhline(row[quantity], color=INK, lw=0.9, ls=(0, (5, 3)), zorder=1)
                labels.append((lengths[-1], row[quantity], f"{bytes_text(row[quantity])} of HBM", INK))
    readable_log_ticks(ax, text)
    ax.grid(True, color=FAINT, lw=0.5)
    label_in_margin(ax, labels, axes_height_in)


def _mark_crossovers(ax: Axes, rows: list[Row]) -> None:
    # a number in a ring on the curve, and what it means below the axes: nothing lies on the data
    notes = []
    for number, row in enumerate(rows, 1):
        ax.plot(row["seqlen"], row["time_us"], "o", ms=11, mfc="white", mec=INK, mew=0.9, zorder=4)
        ax.annotate(
            str(number), (row["seqlen"], row["time_us"]), ha="center", va="center_baseline", fontsize=7, zorder=5
        )
        notes.append(f"{number}: from N ≈ {row['seqlen']:,} {row['algorithm']} beats {row['other']}")
    if notes:
        ax.annotate(
            "\n".join(notes), (0.02, 0.98), xycoords="axes fraction", va="top", fontsize=7.5, color=MUTED, zorder=1
        )


def _length(tokens: float) -> str:
    return f"{tokens / 1024:g}k" if tokens >= 1024 and tokens % 1024 == 0 else f"{tokens:g}"
