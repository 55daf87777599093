"""The tornado: how far one step of each hardware parameter moves the time of each algorithm."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from simulator.plots.rows import Row
from simulator.plots.style import (
    MUTED,
    new_figure,
    picture_style,
    series_colour,
    time_text,
    tint,
    title_height_in,
    title_lines,
)
from simulator.sensitivity import PARAMETERS, Sensitivity

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PICTURE = "sensitivity"
#: Parameters with a smaller effect than this (%) on every algorithm are left out of the picture.
LEAST_PERCENT = 0.1
#: A step across a threshold may be many times every slope: bars end at this multiple of the longest other one.
LONGEST = 1.5


def tornado_rows(found: Iterable[Sensitivity], gpu: str, step: float) -> list[Row]:
    """A row for each parameter and algorithm; ``change_below_percent`` and ``change_above_percent`` are what one step
    does to the time by the fitted slope, or across a threshold (``threshold_below``/``_above``) what it really does."""
    rows = []
    for one in found:
        row = {"picture": PICTURE, "gpu": gpu, "step": step} | one.row()
        for side, many, time in (("below", -1, one.low_us), ("above", 1, one.high_us)):
            threshold = many in one.crossed
            change = None if time is None else (1.0 + step) ** (many * one.time) - 1.0
            if time is not None and threshold:
                change = time / one.base_us - 1.0
            row[f"change_{side}_percent"] = None if change is None else 100 * change
            row[f"threshold_{side}"] = threshold
        rows.append(row)
    return rows


def plot_tornado(rows: Iterable[Row]) -> tuple[Figure, Axes]:
    """``(figure, axes)``: bars from today's time, the parameter with the most effect at the top; hatched bars are steps
    across a threshold, whiskers the standard error of the slope."""
    rows = list(rows)
    algorithms = list(dict.fromkeys(row["algorithm"] for row in rows))
    reach: dict[str, float] = {}
    smooth = LEAST_PERCENT
    for row in rows:
        moved = max(abs(row["change_below_percent"] or 0), abs(row["change_above_percent"] or 0))
        reach[row["parameter"]] = max(reach.get(row["parameter"], 0.0), moved)
        for side in ("below", "above"):
            if not row[f"threshold_{side}"]:
                smooth = max(smooth, abs(row[f"change_{side}_percent"] or 0))
    shown = sorted((key for key in reach if reach[key] >= LEAST_PERCENT), key=lambda key: -reach[key])
    table = {(row["parameter"], row["algorithm"]): row for row in rows}
    height = 0.8 / len(algorithms)
    clipped = any(reach[key] > LONGEST * smooth for key in shown)
    with picture_style():
        percent = 100 * rows[0]["step"]
        title = f"{rows[0]['gpu']}: {percent:g} % more (solid) or less (pale) of one parameter"
        title = title_lines(title, 5.4)
        rows_height = (0.16 + 0.13 * len(algorithms)) * max(3, len(shown))
        figure = new_figure(7.4, 1.5 + rows_height + title_height_in([title]))
        ax = figure.subplots()
        for index, algorithm in enumerate(algorithms):
            for place, key in enumerate(shown):
                y = place + (index - (len(algorithms) - 1) / 2) * height
                _bars(ax, y, height * 0.9, table[key, algorithm], series_colour(algorithm), LONGEST * smooth)
        if clipped:
            ax.set_xlim(-LONGEST * smooth * 1.25, LONGEST * smooth * 1.25)
        ax.axvline(0, color=MUTED, linewidth=0.8)
        ax.set_yticks(range(len(shown)), [PARAMETERS.get(key, key) for key in shown])
        ax.set_ylim(len(shown) - 0.4, -0.6)
        ax.set_xlabel("change of time, %")
        ax.set_title(title, loc="left")
        from matplotlib.patches import Patch

        handles = [Patch(color=series_colour(a), label=_label(a, rows)) for a in algorithms]
        if any(row["threshold_below"] or row["threshold_above"] for row in rows if row["parameter"] in shown):
            handles.append(Patch(facecolor="white", edgecolor=MUTED, hatch="////", label="across a threshold"))
        figure.legend(handles=handles, loc="outside lower center", ncols=min(3, len(handles)))
    return figure, ax


def _bars(ax: Axes, y: float, height: float, row: Row, colour: str, longest: float) -> None:
    """Both sides of one parameter for one algorithm; what is longer than ``longest`` is cut and labelled."""
    for side, fill in (("below", tint(colour, 0.4)), ("above", colour)):
        change = row[f"change_{side}_percent"]
        if change is None:
            continue
        width = max(-longest, min(longest, change))
        hatch = "////" if row[f"threshold_{side}"] else None
        face = "white" if hatch else fill
        ax.barh(y, width, height, color=face, edgecolor=colour, linewidth=0.5, hatch=hatch)
        if width != change:
            ax.annotate(
                f"{change:+.0f} %",
                (width, y),
                xytext=(3 if width > 0 else -3, 0),
                textcoords="offset points",
                ha="left" if width > 0 else "right",
                va="center",
                fontsize=7,
            )
    error = 100 * row["step"] * row["time_elasticity_error"]
    if error >= LEAST_PERCENT and row["change_above_percent"] is not None and not row["threshold_above"]:
        ax.errorbar(row["change_above_percent"], y, xerr=error, color=MUTED, linewidth=0.8, capsize=2)


def _label(algorithm: str, rows: list[Row]) -> str:
    row = next(row for row in rows if row["algorithm"] == algorithm)
    return f"{algorithm}: {time_text(row['time_us'])}, limited by {row['limiter']}"
