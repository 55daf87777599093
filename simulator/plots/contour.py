"""Iso-performance: lines of equal time (or bytes) over two hardware parameters, on a map of what limits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from simulator.plots.rows import Row
from simulator.plots.style import (
    INK,
    MUTED,
    new_figure,
    picture_style,
    text_colour,
    time_text,
    tint,
    title_lines,
)

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from simulator.require import Cell, Target

PICTURE = "require"
#: Limiter -> colour of its region (Okabe and Ito's set, very pale: the lines carry the numbers).
LIMITER_COLOURS = {
    "tensor": "#0072B2",
    "exp": "#CC79A7",
    "fp32": "#56B4E9",
    "smem": "#009E73",
    "l2": "#F0E442",
    "hbm": "#E69F00",
    "latency": "#999999",
    "imbalance": "#D55E00",
    "launch": "#000000",
}


def contour_rows(cells: Iterable[Cell], keys: tuple[str, str], values: Sequence[float], target: Target) -> list[Row]:
    """A row for each design; ``values`` are today's values of the two ``keys`` (1 for a group of rates)."""
    return [
        {
            "picture": PICTURE,
            "algorithm": target.algorithm,
            "metric": target.metric,
            "target": target.limit,
            "x_parameter": keys[0],
            "y_parameter": keys[1],
            "x_factor": cell.x,
            "y_factor": cell.y,
            "x_value": values[0] * cell.x,
            "y_value": values[1] * cell.y,
            "value": cell.value,
            "limiter": cell.limiter,
            "error": cell.error,
        }
        for cell in cells
    ]


def plot_contour(rows: Sequence[Row], gpu: str) -> tuple[Figure, Axes]:
    """``(figure, axes)``: lines of equal metric, the target's drawn thick, today's design as a dot."""
    import numpy as np
    from matplotlib.colors import ListedColormap
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    from simulator.wording import scaled

    shown = time_text if rows[0]["metric"] == "time" else lambda v: scaled(v, "B")
    x = sorted({row["x_factor"] for row in rows})
    y = sorted({row["y_factor"] for row in rows})
    table = {(row["x_factor"], row["y_factor"]): row for row in rows}
    values = np.array([[table[a, b]["value"] or np.nan for a in x] for b in y], float)
    limiters = [name for name in LIMITER_COLOURS if any(row["limiter"] == name for row in rows)]
    index = {name: i for i, name in enumerate(limiters)}
    regions = np.array([[index.get(table[a, b]["limiter"], np.nan) for a in x] for b in y], float)
    algorithm, target = rows[0]["algorithm"], rows[0]["target"]
    with picture_style():
        figure = new_figure(6.4, 5.2)
        ax = figure.subplots()
        colours = ListedColormap([tint(LIMITER_COLOURS[name], 0.22) for name in limiters])
        ax.pcolormesh(x, y, np.ma.masked_invalid(regions), cmap=colours, vmin=-0.5, vmax=len(limiters) - 0.5)
        data = np.ma.masked_invalid(values)
        met = ""
        if data.count() and not data.min() < target < data.max():
            met = ": met everywhere here" if data.max() <= target else ": met nowhere here"
        ax.set_xscale("log", base=2)
        ax.set_yscale("log", base=2)
        if data.count() and data.min() < data.max():
            levels = np.geomspace(data.min(), data.max(), 9)[1:-1]
            lines = ax.contour(x, y, data, levels, colors=MUTED, linewidths=0.8)
            wanted = []
            if met == "":
                thick = ax.contour(x, y, data, [target], colors=[text_colour(algorithm)], linewidths=2.4)
                wanted = [segment for segments in thick.allsegs for segment in segments]
            places = _label_places(ax, lines.allsegs, wanted)
            if places:
                ax.clabel(lines, fmt=shown, fontsize=7, manual=places)
        ax.plot(1.0, 1.0, "o", color=INK, markersize=5)
        ax.annotate("today", (1.0, 1.0), xytext=(5, 4), textcoords="offset points", fontsize=8)
        for axis, name in ((ax.xaxis, rows[0]["x_parameter"]), (ax.yaxis, rows[0]["y_parameter"])):
            axis.set_major_formatter(lambda value, _: f"x{value:g}")
            axis.set_label_text(f"{_name(name)}, times today's")
        what = "time" if rows[0]["metric"] == "time" else f"{rows[0]['metric'].upper()} bytes"
        ax.set_title(title_lines(f"{algorithm} on {gpu}: {what}", 5.2), loc="left")
        handles: list[Artist] = [
            Patch(color=tint(LIMITER_COLOURS[name], 0.22), label=f"limited by {name}") for name in limiters
        ]
        if data.count() < data.size:
            handles.append(Patch(facecolor="white", edgecolor=MUTED, label="cannot run"))
        said = f"target {shown(target)}{met}"
        handles.append(Line2D([], [], color=text_colour(algorithm), linewidth=2.4, label=said))
        figure.legend(handles=handles, loc="outside lower center", ncols=3)
    return figure, ax


#: Room that the number on a line takes, as a share of the axes; its line is left out where there is less of it.
_LABEL_WIDTH, _LABEL_HEIGHT = 0.11, 0.035


def _label_places(
    ax: Axes, lines: Sequence[Sequence[np.ndarray]], target: Sequence[np.ndarray]
) -> list[tuple[float, float]]:
    """A point on each line for its number: away from the target's line, today's design, other lines and the edges.

    ``lines``: by level, its polylines ``[n, 2]`` in data coordinates; ``target``: polylines.
    """
    import numpy as np

    def fractions(points: Any) -> np.ndarray:
        return np.asarray(ax.transAxes.inverted().transform(ax.transData.transform(points)))

    room = np.array([_LABEL_WIDTH, _LABEL_HEIGHT])
    today = fractions([(1.0, 1.0)]) + np.array([[0.0, 0.0], [0.05, 0.02]])
    fixed = [today, *(fractions(_dense(segment)) for segment in target)]
    drawn = [[fractions(_dense(segment)) for segment in segments] for segments in lines]
    places: list[tuple[float, float]] = []
    for level, segments in enumerate(drawn):
        others = [points for i, parts in enumerate(drawn) if i != level for points in parts]
        taken = [np.array([place]) for place in places]
        obstacles = np.vstack([*fixed, *others, *taken])
        best = None
        for points in segments:
            if np.abs(np.diff(points, axis=0)).sum(axis=0).max() < 1.5 * _LABEL_WIDTH:
                continue
            apart = (np.abs(points[:, None, :] - obstacles[None]) / room).max(axis=2).min(axis=1)
            edge = (np.minimum(points, 1.0 - points) / room).min(axis=1)
            clear = np.minimum(apart, edge)
            # of places with room enough the one nearest the middle, so that numbers stand above each other
            score = np.minimum(clear, 1.0) - 0.2 * np.abs(points[:, 0] - 0.5)
            at = int(score.argmax())
            if clear[at] > 0.6 and (best is None or score[at] > best[0]):
                best = (score[at], tuple(points[at]))
        if best is not None:
            places.append(best[1])
    return [tuple(ax.transData.inverted().transform(ax.transAxes.transform(place))) for place in places]


def _dense(points: np.ndarray, steps: int = 12) -> np.ndarray:
    """A polyline with points between its own."""
    import numpy as np

    along = np.linspace(0.0, 1.0, steps, endpoint=False)[:, None, None]
    between = points[None, :-1] + along * (points[1:] - points[:-1])[None]
    return np.vstack([between.transpose(1, 0, 2).reshape(-1, 2), points[-1:]])


def _name(key: str) -> str:
    from simulator.sensitivity import PARAMETERS

    return PARAMETERS.get(key, key)
