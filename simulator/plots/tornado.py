"""The tornado: how far one step of each hardware parameter moves the time of each algorithm."""

from __future__ import annotations

from collections.abc import Iterable

from simulator.plots.rows import Row
from simulator.plots.style import MUTED, new_figure, picture_style, series_colour, tint
from simulator.sensitivity import PARAMETERS, Sensitivity

PICTURE = "sensitivity"
#: Parameters with a smaller effect than this (%) on every algorithm are left out of the picture.
LEAST_PERCENT = 0.05


def tornado_rows(found: Iterable[Sensitivity], gpu: str, step: float) -> list[Row]:
    """A row for each parameter and algorithm; ``change_below``/``change_above`` are the time's change in percent."""
    rows = []
    for one in found:
        row = {"picture": PICTURE, "gpu": gpu, "step": step} | one.row()
        for side, time in (("below", one.low_us), ("above", one.high_us)):
            row[f"change_{side}_percent"] = None if time is None else 100 * (time / one.base_us - 1)
        rows.append(row)
    return rows


def plot_tornado(rows: Iterable[Row]):
    """``(figure, axes)``: bars from today's time, the parameter with the most effect at the top."""
    rows = list(rows)
    algorithms = list(dict.fromkeys(row["algorithm"] for row in rows))
    reach: dict[str, float] = {}
    for row in rows:
        moved = max(abs(row["change_below_percent"] or 0), abs(row["change_above_percent"] or 0))
        reach[row["parameter"]] = max(reach.get(row["parameter"], 0.0), moved)
    shown = sorted((key for key in reach if reach[key] >= LEAST_PERCENT), key=lambda key: -reach[key])
    table = {(row["parameter"], row["algorithm"]): row for row in rows}
    height = 0.8 / len(algorithms)
    with picture_style():
        figure = new_figure(7.4, 1.5 + 0.22 * max(3, len(shown)) * max(1.4, len(algorithms)))
        ax = figure.subplots()
        for index, algorithm in enumerate(algorithms):
            colour = series_colour(algorithm)
            for place, key in enumerate(shown):
                row = table[key, algorithm]
                y = place + (index - (len(algorithms) - 1) / 2) * height
                for side, fill in (("below", tint(colour, 0.4)), ("above", colour)):
                    change = row[f"change_{side}_percent"]
                    if change is not None:
                        ax.barh(y, change, height * 0.9, color=fill, edgecolor=colour, linewidth=0.5)
        ax.axvline(0, color=MUTED, linewidth=0.8)
        ax.set_yticks(range(len(shown)), [PARAMETERS.get(key, key) for key in shown])
        ax.set_ylim(len(shown) - 0.4, -0.6)
        percent = 100 * rows[0]["step"]
        ax.set_xlabel("change of time, %")
        ax.set_title(f"{rows[0]['gpu']}: {percent:g} % more (solid) or less (pale) of one parameter", loc="left")
        from matplotlib.patches import Patch

        handles = [Patch(color=series_colour(a), label=_label(a, rows)) for a in algorithms]
        figure.legend(handles=handles, loc="outside lower center", ncols=min(3, len(handles)))
    return figure, ax


def _label(algorithm: str, rows: list[Row]) -> str:
    from simulator.wording import time_text

    row = next(row for row in rows if row["algorithm"] == algorithm)
    return f"{algorithm}: {time_text(row['time_us'])}, limited by {row['limiter']}"
