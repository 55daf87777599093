"""Bytes: what each algorithm moves at each level, tensor by tensor, and how that changes with N, SRAM and L2."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from simulator.plots.rows import Row, panel_title, pass_cells, series_names
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
    text_colour,
    tint,
    title_height_in,
    title_lines,
)
from simulator.result import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import Locator

PICTURE = "io"
LEVELS = ("HBM", "L2")
_TITLES = {"HBM": "L2 ↔ HBM", "L2": "SM ↔ L2"}


def io_rows(results: Iterable[Result]) -> list[Row]:
    """One row for each GPU, algorithm, level, tensor and direction: ``bytes``.

    At level ``HBM`` the direction ``dirty`` is what stays modified in L2 at the end of the run.
    """
    rows = []
    results = list(results)
    for result, series in zip(results, series_names(results), strict=True):
        base = {"picture": PICTURE, "gpu": result.gpu, "algorithm": series} | pass_cells(result)
        for tensor, t in result.traffic_by_tensor().items():
            for level, direction, amount in (
                ("HBM", "read", t.hbm_read_bytes),
                ("HBM", "write", t.hbm_write_bytes),
                ("L2", "read", t.l2_read_bytes),
                ("L2", "write", t.l2_write_bytes),
            ):
                if amount:
                    rows.append(base | {"level": level, "tensor": tensor, "direction": direction, "bytes": amount})
        if result.dirty_bytes_at_end:
            dirty = {"level": "HBM", "tensor": "dirty in L2", "direction": "dirty", "bytes": result.dirty_bytes_at_end}
            rows.append(base | dirty)
    return rows


def plot_io(results: Iterable[Result] = (), rows: Sequence[Row] | None = None) -> tuple[Figure, Any]:
    """Stacked bars of bytes by tensor, absolute and as shares; ``(figure, axes)``, axes ``[gpu * level, 2]``."""
    rows = io_rows(results) if rows is None else list(rows)
    gpus = list(dict.fromkeys(row["gpu"] for row in rows))
    panels = [(gpu, level) for gpu in gpus for level in LEVELS]
    most = max(len({r["algorithm"] for r in rows if r["gpu"] == gpu}) for gpu in gpus)
    parts = [[row for row in rows if row["gpu"] == gpu] for gpu, _ in panels]
    names = [panel_title(gpu, own) for (gpu, _), own in zip(panels, parts, strict=True)]
    titles = [title_lines(f"{name}, {_TITLES[level]}", 3.4) for name, (_, level) in zip(names, panels, strict=True)]
    with picture_style():
        figure = new_figure(9.0, len(panels) * (0.75 + 0.3 * most + title_height_in(titles)) + 0.4)
        axes = figure.subplots(len(panels), 2, squeeze=False, sharey="row", width_ratios=(1, 1.25))
        for (_, level), title, own, (left, right) in zip(panels, titles, parts, axes, strict=True):
            _bars(left, right, [row for row in own if row["level"] == level], title)
        axes[-1, 0].set_xlabel("bytes")
        axes[-1, 1].set_xlabel("share of the bytes, %")
        _legend(figure)
    return figure, axes


def _name_tensors(axes: Axes, place: int, algorithm: str, parts: list[Row], total: float) -> None:
    """Each tensor's name once across its neighbouring parts, where it fits: about 65 letters go across the panel."""
    start = 0.0
    for tensor, run in groupby(parts, key=lambda part: part["tensor"]):
        share = sum(part["bytes"] for part in run) / total
        if share >= (len(tensor) + 2) / 65:
            axes.text(
                100 * (start + share / 2), place, tensor, ha="center", va="center",
                fontsize=7.5, gid=f"series-{algorithm}",
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8},
            )  # fmt: skip
        start += share


def _bars(left: Axes, right: Axes, rows: list[Row], title: str) -> None:
    algorithms = list(dict.fromkeys(row["algorithm"] for row in rows))
    totals = {a: sum(r["bytes"] for r in rows if r["algorithm"] == a) for a in algorithms}
    largest = max(totals.values(), default=1) or 1
    for place, algorithm in enumerate(algorithms):
        colour = series_colour(algorithm)
        parts = sorted((r for r in rows if r["algorithm"] == algorithm), key=_order)
        tensors = list(dict.fromkeys(part["tensor"] for part in parts))
        start = 0.0
        for part in parts:
            share = part["bytes"] / totals[algorithm]
            # neighbouring tensors differ in strength; written bytes are hatched
            strength = 0.85 if _place(part["tensor"], tensors) % 2 == 0 else 0.5
            face = "white" if part["direction"] == "dirty" else tint(colour, strength)
            direction = part["direction"]
            style: dict[str, Any] = {
                "color": face,
                "edgecolor": "white" if direction == "read" else tint(colour, 1.0),
                "lw": 0.8,
                "hatch": {"read": None, "write": "///", "dirty": "xxx"}[direction],
                "gid": f"series-{algorithm}",
            }
            left.barh(place, part["bytes"], left=start * totals[algorithm], height=0.7, **style)
            right.barh(place, 100 * share, left=100 * start, height=0.7, **style)
            start += share
        _name_tensors(right, place, algorithm, parts, totals[algorithm])
        left.text(
            totals[algorithm] + 0.02 * largest, place, bytes_text(totals[algorithm]), va="center", fontsize=8,
            color=text_colour(algorithm), gid=f"series-{algorithm}",
        )  # fmt: skip
    left.set_yticks(range(len(algorithms)), algorithms)
    left.set_ylim(len(algorithms) - 0.5, -0.5)
    left.set_xlim(0, 1.28 * largest)
    left.xaxis.set_major_locator(_few_ticks())
    left.xaxis.set_major_formatter(lambda value, _: bytes_text(value) if value else "0")
    left.set_title(title, loc="left", fontweight="bold")
    right.set_xlim(0, 100)
    right.tick_params(labelleft=False)


def _close(one: list[tuple[float, float]], other: list[tuple[float, float]]) -> bool:
    there = dict(other)
    return all(x in there and abs(y / there[x] - 1) < 0.05 for x, y in one)


def _few_ticks() -> Locator:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(4)


_TENSORS = ("Q", "K", "V", "O", "LSE", "S", "P")


def _order(row: Row) -> tuple[bool, int, str, str]:
    tensor = row["tensor"]
    known = _TENSORS.index(tensor) if tensor in _TENSORS else len(_TENSORS)
    return row["direction"] == "dirty", known, tensor, row["direction"]


def _place(tensor: str, tensors: list[str]) -> int:
    """Q, K, V and O have the same strength in every bar; what else there is alternates."""
    return _TENSORS.index(tensor) if tensor in _TENSORS[:4] else tensors.index(tensor)


def _legend(figure: Figure) -> None:
    from matplotlib.patches import Patch

    grey = tint("#000000", 0.35)
    handles = [
        Patch(facecolor=grey, edgecolor="white", label="read"),
        Patch(facecolor=grey, edgecolor="black", hatch="///", label="written"),
        Patch(facecolor="white", edgecolor="black", hatch="xxx", label="written, still in L2 at the end"),
    ]
    figure.legend(handles=handles, loc="outside upper right", ncols=3)


SWEEPS = {
    "seqlen": ("sequence length N, tokens", "keys"),
    "sram": ("shared memory of an SM, KiB", "KiB"),
    "l2": ("L2 size, MB", "MB"),
}


def sweep_rows(swept: str, series: Iterable[tuple[float, str, Result | None, dict[str, Any]]]) -> list[Row]:
    """Rows of a sweep from ``(x, series name, result or None, more columns)``.

    ``hbm_bytes`` is read + written + left dirty, ``l2_bytes`` what SMs read and wrote; ``compulsory_bytes`` is each
    input read and each output written once.
    """
    rows = []
    for x, name, result, more in series:
        row = {"picture": f"{PICTURE}-{swept}", "series": name, "x": x, **more}
        row |= pass_cells(result) if result is not None else {}
        if result is not None:
            row |= {
                "gpu": result.gpu,
                "hbm_bytes": result.hbm_read_bytes + result.hbm_write_bytes + result.dirty_bytes_at_end,
                "l2_bytes": result.l2_read_bytes + result.l2_write_bytes,
                "compulsory_bytes": result.unique_bytes,
            }
        rows.append(row)
    return rows


def plot_io_sweep(rows: Sequence[Row]) -> tuple[Figure, Any]:
    """HBM bytes (solid) and SM ↔ L2 bytes (dashed) against N, SRAM or L2 size, a panel a GPU; ``(figure, axes)``.

    Rows with ``guide_bytes`` also draw FlashAttention-1's Θ(N²d²/M) line, scaled to its first point.
    """
    swept = rows[0]["picture"].split("-", 1)[1]
    drawn = [row for row in rows if row.get("hbm_bytes") is not None]
    gpus = list(dict.fromkeys(row["base_gpu"] for row in drawn))
    height = 4.2
    parts = [[row for row in drawn if row["base_gpu"] == gpu] for gpu in gpus]
    names = [panel_title(gpu, own) for gpu, own in zip(gpus, parts, strict=True)]
    titles = [title_lines(f"{name}: bytes moved", 5.4) for name in names]
    with picture_style():
        figure = new_figure(8.2, (height + title_height_in(titles)) * len(gpus))
        axes = figure.subplots(len(gpus), 1, squeeze=False)[:, 0]
        for ax, title, own in zip(axes, titles, parts, strict=True):
            _sweep_panel(ax, own, SWEEPS[swept][0], height - 0.9)
            ax.set_title(title, loc="left", fontweight="bold")
    return figure, axes


def _sweep_panel(ax: Axes, drawn: list[Row], x_label: str, axes_height_in: float) -> None:
    ax.set(xscale="log", yscale="log", xlabel=x_label, ylabel="bytes")
    labels = []
    floors: list[tuple[list[tuple[float, float]], str]] = []
    names = list(dict.fromkeys(row["series"] for row in drawn))
    for index, name in enumerate(names):
        points = sorted((r for r in drawn if r["series"] == name), key=lambda r: r["x"])
        xs, colour = [r["x"] for r in points], series_colour(name)
        width = line_width(index, len(names))
        style: dict[str, Any] = {"color": colour, "gid": f"series-{name}"}
        ax.plot(xs, [r["hbm_bytes"] for r in points], "o-", ms=width + 2, lw=width, zorder=3, **style)
        ax.plot(xs, [r["l2_bytes"] for r in points], ls=(0, (3, 2)), lw=0.75 * width, zorder=2, **style)
        labels.append((xs[-1], points[-1]["hbm_bytes"], f"{name} HBM", colour))
        labels.append((xs[-1], points[-1]["l2_bytes"], f"{name} SM↔L2", colour))
        floor = [(r["x"], r["compulsory_bytes"]) for r in points]
        # with or without the LSE is one floor to the eye; a decode step's is another
        if not any(_close(floor, known) for known, _ in floors):
            floors.append((floor, name))
    for floor, name in floors:
        ax.plot([x for x, _ in floor], [y for _, y in floor], ":", color=INK, lw=1.3, zorder=4)
        labels.append((*floor[-1], "compulsory floor" + (f" of {name}" if name == "flash_decoding" else ""), INK))
    guide = sorted({(r["x"], r["guide_bytes"]) for r in drawn if r.get("guide_bytes")})
    if guide:
        ax.plot([x for x, _ in guide], [y for _, y in guide], "-.", color=MUTED, lw=1.2, zorder=1)
        labels.append((*guide[-1], "Θ(N²d²/M)", MUTED))
    xs = sorted({row["x"] for row in drawn})
    ax.set_xticks(xs, [f"{x:g}" for x in xs], rotation=0 if len(xs) < 9 else 40)
    ax.minorticks_off()
    low, high = ax.get_ylim()
    if high / low < 30:
        middle = (low * high) ** 0.5
        ax.set_ylim(middle / 6, middle * 6)
    readable_log_ticks(ax, bytes_text)
    ax.grid(True, axis="y", color=FAINT, lw=0.5)
    label_in_margin(ax, labels, axes_height_in)
