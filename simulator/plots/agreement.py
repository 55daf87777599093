"""Predicted against measured: how far the model can be trusted, seen at a glance."""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum
from typing import TYPE_CHECKING, Any

from simulator.plots.rows import Row
from simulator.plots.style import (
    FAINT,
    INK,
    MUTED,
    label_in_margin,
    new_figure,
    picture_style,
    series_colour,
    time_text,
)

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

PICTURE = "agreement"


def agreement_rows(errors: pandas.DataFrame) -> list[Row]:
    """Rows of a frame of :func:`simulator.validation.compare_with` that have both times."""
    rows = []
    for record in errors.to_dict("records"):
        try:
            measured, predicted = float(record["measured_time_us"]), float(record["time_us"])
        except (TypeError, ValueError):
            continue
        if measured > 0 and predicted > 0:
            rows.append(
                {
                    "picture": PICTURE,
                    "gpu": record.get("gpu", ""),
                    "algorithm": record["algorithm"],
                    "regime": record["regime"],
                    "measured_time_us": measured,
                    "predicted_time_us": predicted,
                    "error": predicted / measured - 1,
                }
            )
    return rows


def plot_agreement(rows: Sequence[Row]) -> tuple[Figure, Any]:
    """Predicted against measured time (left), signed error against measured time (right); ``(figure, axes)``."""
    height = 3.8
    with picture_style():
        figure = new_figure(9.5, height)
        left, right = axes = figure.subplots(1, 2)
        names = list(dict.fromkeys(row["algorithm"] for row in rows))
        for name in names:
            own = [row for row in rows if row["algorithm"] == name]
            measured = [row["measured_time_us"] for row in own]
            style = {"ls": "", "marker": "o", "ms": 4, "alpha": 0.75, "mew": 0, "color": series_colour(name)}
            style["gid"] = f"series-{name}"
            left.plot(measured, [row["predicted_time_us"] for row in own], **style)
            right.plot(measured, [100 * row["error"] for row in own], **style)
        limits = [f(row[k] for row in rows for k in ("measured_time_us", "predicted_time_us")) for f in (min, max)]
        limits = [limits[0] / 1.5, limits[1] * 1.5]
        left.plot(limits, limits, color=INK, lw=0.8, zorder=1)
        for factor in (0.9, 1.1):
            left.plot(limits, [factor * v for v in limits], color=MUTED, lw=0.6, ls=(0, (4, 3)), zorder=1)
        left.set(xscale="log", yscale="log", xlim=limits, ylim=limits, xlabel="measured time", ylabel="predicted time")
        left.set_title("predicted against measured (dashed: ±10 %)", loc="left")
        left.yaxis.set_major_formatter(lambda value, _: time_text(value))
        worst = max(20.0, min(100.0, 1.15 * max(abs(100 * row["error"]) for row in rows)))
        right.axhline(0, color=INK, lw=0.8, zorder=1)
        right.axhspan(-10, 10, color=FAINT, alpha=0.4, lw=0, zorder=0)
        right.set(xscale="log", xlim=limits, ylim=(-worst, worst), xlabel="measured time", ylabel="error of time, %")
        right.set_title("(predicted - measured) / measured", loc="left")
        means = []
        for name in names:
            own = [row for row in rows if row["algorithm"] == name]
            mean = 100 * fsum(abs(row["error"]) for row in own) / len(own)
            last = max(own, key=lambda row: row["measured_time_us"])
            y = max(-worst, min(worst, 100 * last["error"]))
            means.append((last["measured_time_us"], y, f"{name} mean |error| {mean:.1f} %", series_colour(name)))
        for ax in axes:
            ax.xaxis.set_major_formatter(lambda value, _: time_text(value))
            ax.grid(True, color=FAINT, lw=0.5)
        label_in_margin(right, means, height - 0.9)
    return figure, axes
