"""The hierarchical roofline: what each kernel reaches, against the ceilings of HBM, L2, shared memory and arithmetic.

One panel a GPU. A kernel is three marks at the height of its FLOP/s: its operations over the bytes that it moves
at each level of memory. Solid ceilings are the profile's numbers, dashed ones what the model says a kernel sustains.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from math import fsum
from typing import TYPE_CHECKING, Any, cast

from simulator.plots.rows import Row, panel_title, pass_cells, series_names
from simulator.plots.style import (
    FAINT,
    INK,
    MUTED,
    label_in_margin,
    new_figure,
    picture_style,
    series_colour,
    tint,
    title_height_in,
    title_lines,
)
from simulator.profile import Profile
from simulator.result import KernelResult, Result

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Text

PICTURE = "roofline"
LEVELS = ("HBM", "L2", "SMEM")
MARKERS = {"HBM": "o", "L2": "s", "SMEM": "^"}
#: The marks of one kernel may coincide: the later ones are smaller, so that all are seen.
SIZES = {"HBM": 8.5, "L2": 6.0, "SMEM": 5.0}
_ALONG_A_LINE = "along-a-line"
_DASHES = {"spec": "-", "sustained": (0, (4, 3))}


def roofline_rows(results: Iterable[Result], profiles: Iterable[Profile], measured: Iterable[Row] = ()) -> list[Row]:
    """What the picture shows: ceilings of ``profiles``, three marks a kernel of ``results``, measured points.

    Columns: ``kind`` (``bandwidth`` B/s, ``compute`` FLOP/s, ``kernel``, ``measured``), ``level``, ``quality``
    (``spec`` or ``sustained``), ``flop``, ``bytes``, ``time_us``, ``flop_per_byte``, ``flop_per_s``.
    """
    named = {profile.name: profile for profile in profiles}
    rows = [row for profile in named.values() for row in ceiling_rows(profile)]
    results = list(results)
    for result, series in zip(results, series_names(results), strict=True):
        rows += [row | {"algorithm": series} for row in kernel_rows(result, named[result.gpu])]
    rows += [{"picture": PICTURE, "kind": "measured"} | row for row in measured]
    return rows


def ceiling_rows(profile: Profile) -> list[Row]:
    """Bandwidth and compute ceilings of one GPU, from its profile and calibrated parameters."""
    from simulator.clock import Activity, loaded_clock_hz
    from simulator.physics import Physics

    physics = Physics.from_calibration(profile.calibration_parameters)
    loaded = loaded_clock_hz(profile, physics, Activity(1.0, 0.0, 0.0, 1.0, 1e-3, 1e-3))
    smem = profile.smem_bandwidth_bytes_per_cycle_per_sm * profile.num_sms
    bandwidths = {
        "HBM": (profile.hbm_bandwidth_bytes_per_s, profile.hbm_sustained_read_bytes_per_s),
        "L2": (
            profile.l2_bandwidth_bytes_per_s,
            profile.l2_bandwidth_bytes_per_s * physics.l2_bandwidth_fraction,
        ),
        "SMEM": (smem * profile.max_clock_hz, smem * loaded),
    }
    base = {"picture": PICTURE, "gpu": profile.name}
    rows = []
    for level, values in bandwidths.items():
        for quality, value in zip(("spec", "sustained"), values, strict=True):
            rows.append(base | {"kind": "bandwidth", "level": level, "quality": quality, "bytes_per_s": value})
    for path, dtypes in _distinct_rates(profile):
        rate = profile.tensor_rate(path, dtypes[0]) * profile.num_sms
        efficiency = physics.mma_sync_efficiency if path == "mma_sync" else physics.wgmma_efficiency
        for quality, value in (("spec", rate * profile.spec_clock_hz), ("sustained", rate * efficiency * loaded)):
            rows.append(
                base
                | {"kind": "compute", "path": path, "dtype": "/".join(dtypes), "quality": quality, "flop_per_s": value}
            )
    # an FMA is two operations
    vector = 2 * profile.fma_per_cycle_per_sm * profile.num_sms
    for quality, clock in (("spec", profile.spec_clock_hz), ("sustained", loaded)):
        rows.append(
            base | {"kind": "compute", "path": "fma", "dtype": "fp32", "quality": quality, "flop_per_s": vector * clock}
        )
    return rows


def _distinct_rates(profile: Profile) -> list[tuple[str, list[str]]]:
    """Instruction paths with the input types that run at one rate."""
    found = []
    for path, table in profile.tensor_flop_per_cycle_per_sm.items():
        by_rate: dict[float, list[str]] = {}
        for dtype, rate in table.items():
            by_rate.setdefault(rate, []).append(dtype)
        found += [(path, dtypes) for dtypes in by_rate.values()]
    return found


def kernel_rows(result: Result, profile: Profile) -> list[Row]:
    """Three rows (one a level) for each kernel of ``result``."""
    from algorithms import build_program
    from algorithms.tile_search import TileChoice
    from simulator.smem_traffic import smem_bytes

    chosen = cast(Mapping[str, str], result.attributes.get("tiles", {}))
    tiles = {part: TileChoice.parse(text) for part, text in chosen.items()}
    program = build_program(result.algorithm, result.problem, profile, result.implementation, True, tiles or None)
    rows = []
    for index, (kernel, schedule) in enumerate(zip(result.kernels, program.kernels, strict=True)):
        # what is still dirty at the end is written later: part of the last kernel that writes
        moved = {
            "HBM": kernel.hbm_read_bytes + kernel.hbm_write_bytes,
            "L2": kernel.l2_read_bytes + kernel.l2_write_bytes,
            "SMEM": smem_bytes(schedule, profile),
        }
        if index == len(result.kernels) - 1:
            moved["HBM"] += result.dirty_bytes_at_end
        flop = operations(kernel, result)
        for level, amount in moved.items():
            rows.append(
                {
                    "picture": PICTURE,
                    "kind": "kernel",
                    "gpu": result.gpu,
                    "algorithm": result.algorithm,
                    "kernel": kernel.name,
                    "kernel_index": index,
                    "level": level,
                    "flop": flop,
                    "bytes": amount,
                    "time_us": kernel.time_us,
                    "flop_per_byte": flop / amount if amount else None,
                    "flop_per_s": flop / kernel.time_us * 1e6 if kernel.time_us else None,
                }
                | pass_cells(result)
            )
    return rows


def operations(kernel: KernelResult, result: Result) -> float:
    """FLOPs of ``kernel``: its share of the call's nominal FLOPs by matrix work (padding and masked tiles earn
    nothing); of a kernel without matrix work, what it executes on the FP32 and special-function units."""
    matmul = fsum(k.work.get("matmul", 0.0) for k in result.kernels)
    if kernel.work.get("matmul", 0.0):
        return result.flops * kernel.work["matmul"] / matmul
    return 2 * kernel.work.get("fma", 0.0) + kernel.work.get("alu", 0.0) + kernel.work.get("exp", 0.0)


def plot_roofline(
    results: Iterable[Result] = (),
    profiles: Iterable[Profile] = (),
    measured: Iterable[Row] = (),
    rows: Sequence[Row] | None = None,
) -> tuple[Figure, Any]:
    """Draw ``results`` on their GPUs' rooflines, or the ``rows`` that :func:`roofline_rows` made; ``(figure, axes)``.

    ``axes`` is an array with one entry a GPU.
    """
    rows = roofline_rows(results, profiles, measured) if rows is None else list(rows)
    gpus = list(dict.fromkeys(row["gpu"] for row in rows))
    # a line of the margin for each label: every ceiling, and every launch of an algorithm
    labels = [
        {
            (r["kind"], r.get("path"), r.get("dtype"), r.get("algorithm"), r.get("kernel_index"))
            for r in rows
            if r["gpu"] == gpu
        }
        for gpu in gpus
    ]
    height = max(4.3, 1.4 + 0.17 * max(map(len, labels)))
    more = title_height_in(title_lines(panel_title(gpu, rows), 5.6) for gpu in gpus)
    with picture_style():
        figure = new_figure(9.0, (height + more) * len(gpus) + 0.5)
        axes = figure.subplots(len(gpus), 1, squeeze=False)[:, 0]
        for ax, gpu in zip(axes, gpus, strict=True):
            _panel(ax, gpu, [row for row in rows if row["gpu"] == gpu], height - 1.1)
        _legend(figure, rows)
        _place_labels(figure, axes)
    return figure, axes


def _place_labels(figure: Figure, axes: Iterable[Axes]) -> None:
    """Turn the labels of bandwidth lines along them and move them to where they cover no mark and cross no line.

    On log-log axes all these lines have the one slope that the layout gives; so this comes after the layout.
    """
    import numpy as np
    from matplotlib.text import Annotation

    figure.draw_without_rendering()
    for ax in axes:
        marks, lines = _obstacles(ax)
        box = ax.get_window_extent()
        for label in [t for t in ax.texts if isinstance(t, Annotation) and t.get_gid() == _ALONG_A_LINE]:
            first, second = ax.transData.transform([label.xy, (10 * label.xy[0], 10 * label.xy[1])])
            along = (second - first) / np.hypot(*(second - first))
            across = np.array([-along[1], along[0]])
            width, height = _text_size(label)
            # places along the line, from below, on either side of it; half a letter from the axes' edge
            far = min((box.x1 - first[0]) / along[0], (box.y1 - first[1]) / along[1]) - width - height
            edge = 0.4 * height - min(0.0, across[0]) * height
            best: tuple[float, np.ndarray] = (math.inf, first)
            for start in np.linspace(edge, max(far, edge), 60):
                for side in (0.25 * height, -1.35 * height):
                    corner = first + (start - side * across[0] / along[0]) * along + side * across
                    cost = _clashes(corner, along, across, width, height, marks, lines)
                    if cost < best[0]:
                        best = (cost, corner)
            label.set_rotation(np.degrees(np.arctan2(along[1], along[0])))
            x, y = ax.transData.inverted().transform(best[1])
            label.xyann = (0, 0)
            label.xy = (x, y)
            # a label is in the way of the next one
            x = np.linspace(0.0, width, 12)[:, None]
            marks = np.vstack([marks, best[1] + x * along, best[1] + x * along + height * across])


def _text_size(label: Text) -> tuple[float, float]:
    """Width and height of an unturned ``label``, pixels."""
    label.set_rotation(0.0)
    extent = label.get_window_extent()
    return extent.width, extent.height


def _obstacles(ax: Axes) -> tuple[np.ndarray, np.ndarray]:
    """Pixels of an axes' marks ``[n, 2]``, and of its lines and leaders as sampled points ``[m, 2]``."""
    import numpy as np
    from matplotlib.text import Annotation

    marks, lines = [np.zeros((0, 2))], [np.zeros((0, 2))]
    for line in ax.lines:
        points = ax.transData.transform(np.column_stack(line.get_data()))
        if line.get_marker() not in ("None", None, ""):
            marks.append(points)
        else:
            lines.append(_sampled(points))
    for text in ax.texts:
        if isinstance(text, Annotation) and text.get_gid() != _ALONG_A_LINE and text.arrow_patch is not None:
            ends = np.array([ax.transData.transform(text.xy), ax.transAxes.transform(text.xyann)])
            lines.append(_sampled(ends))
    return np.vstack(marks), np.vstack(lines)


def _sampled(points: np.ndarray) -> np.ndarray:
    """Points a few pixels apart along a polyline."""
    import numpy as np

    parts = [points[-1:]]
    for a, b in itertools.pairwise(points):
        steps = max(2, int(np.hypot(*(b - a)) / 3))
        parts.append(a + np.linspace(0.0, 1.0, steps)[:, None] * (b - a))
    return np.vstack(parts)


def _clashes(
    corner: np.ndarray,
    along: np.ndarray,
    across: np.ndarray,
    width: float,
    height: float,
    marks: np.ndarray,
    lines: np.ndarray,
) -> float:
    """How much a turned text box with its lower left at ``corner`` covers: marks weigh most."""

    def inside(points: np.ndarray, margin: float) -> int:
        x, y = (points - corner) @ along, (points - corner) @ across
        return int(((x > -margin) & (x < width + margin) & (y > -margin) & (y < height + margin)).sum())

    return 1000.0 * inside(marks, 0.5 * height) + inside(lines, -0.05 * height)


def _panel(ax: Axes, gpu: str, rows: list[Row], axes_height_in: float) -> None:
    points = [row for row in rows if row["kind"] in ("kernel", "measured") and row.get("flop_per_byte")]
    bandwidth = {(r["level"], r["quality"]): r["bytes_per_s"] for r in rows if r["kind"] == "bandwidth"}
    compute = [row for row in rows if row["kind"] == "compute"]
    top = max(row["flop_per_s"] for row in compute)
    x_values = [row["flop_per_byte"] for row in points] or [1.0, 1e3]
    ridge = top / bandwidth["HBM", "spec"]
    x_low = 10 ** math.floor(math.log10(min(*x_values, 4.0) / 2))
    x_high = max(*x_values, ridge) * 4
    y_low = min([row["flop_per_s"] for row in points] + [x_low * bandwidth["HBM", "spec"] * 4, top / 100]) / 3
    ax.set(xscale="log", yscale="log", xlim=(x_low, x_high), ylim=(y_low, top * 2.2))
    ax.set_xlabel("FLOP per byte moved at the level of the mark")
    ax.set_ylabel("TFLOP/s")
    ax.yaxis.set_major_formatter(lambda value, _: f"{value / 1e12:g}")
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.set_title(title_lines(panel_title(gpu, rows), 5.6), loc="left", fontweight="bold")
    ax.grid(True, which="major", color=FAINT, lw=0.5)
    ax.set_axisbelow(True)
    _bandwidth_lines(ax, bandwidth, top, x_low, y_low)
    labels = _compute_lines(ax, compute, max(bandwidth.values()), x_high)
    by_kernel: dict[tuple[str, str, int | None], list[Row]] = {}
    for row in points:
        by_kernel.setdefault((row["kind"], row["algorithm"], row.get("kernel_index")), []).append(row)
    several = {a for _, a, index in by_kernel if index}
    for (kind, algorithm, _), group in by_kernel.items():
        colour = series_colour(algorithm)
        gid = f"series-{algorithm}"
        xs = [row["flop_per_byte"] for row in group]
        y = group[0]["flop_per_s"]
        ax.plot(xs, [y] * len(xs), color=tint(colour, 0.45), lw=0.8, zorder=2, gid=gid)
        for row in group:
            hollow = kind == "measured"
            edge: dict[str, Any] = (
                {"mfc": "white", "mec": colour, "mew": 1.2} if hollow else {"mfc": colour, "mec": "white", "mew": 0.6}
            )
            mark, size = MARKERS[row["level"]], SIZES[row["level"]]
            ax.plot(row["flop_per_byte"], y, mark, ms=size, zorder=4 if hollow else 3, gid=gid, **edge)
        said: tuple[str, ...]
        if kind == "measured":
            # another kernel of the same algorithm is no measurement of the one beside it
            said = ("measured", f"({group[0]['kernel']})" if group[0].get("kernel") else "")
        else:
            said = (group[0].get("kernel") or "",) if algorithm in several else ()
        labels.append((max(xs), y, " ".join(filter(None, (algorithm, *said))), colour))
    label_in_margin(ax, labels, axes_height_in)


def _bandwidth_lines(
    ax: Axes, bandwidth: Mapping[tuple[str, str], float], top: float, x_low: float, y_low: float
) -> None:
    for (level, quality), value in bandwidth.items():
        ax.plot(
            [y_low / value / 10, top / value], [y_low / 10, top], color=MUTED if quality == "sustained" else INK,
            lw=1.1 if quality == "spec" else 0.8, ls=_DASHES[quality], zorder=1,
        )  # fmt: skip
        if quality == "spec":
            # where it stands along the line is found when the layout is known
            x = max(x_low, y_low / value)
            ax.annotate(
                f"{level} {value / 1e12:.3g} TB/s", (x, x * value), xytext=(0, 0), textcoords="offset points",
                va="bottom", rotation_mode="anchor", fontsize=7.5, color=INK, zorder=1.2, gid=_ALONG_A_LINE,
            )  # fmt: skip


def _compute_lines(ax: Axes, compute: list[Row], steepest: float, x_high: float) -> list[tuple[float, float, str, str]]:
    """Draw the flat ceilings; their labels, for the margin."""
    sustained = {(r["path"], r["dtype"]): r["flop_per_s"] for r in compute if r["quality"] == "sustained"}
    labels = []
    for row in compute:
        value, spec = row["flop_per_s"], row["quality"] == "spec"
        ax.plot(
            [value / steepest, x_high], [value, value], color=INK if spec else MUTED, lw=1.1 if spec else 0.8,
            ls=_DASHES[row["quality"]], zorder=1,
        )  # fmt: skip
        if spec:
            reached = sustained[row["path"], row["dtype"]]
            text = f"{row['path']} {row['dtype']}: {_tera(value)} (sustained {_tera(reached)}) TFLOP/s"
            labels.append((x_high, value, text, MUTED))
    return labels


def _tera(value: float) -> str:
    return f"{value / 1e12:.0f}" if value >= 1e14 else f"{value / 1e12:.3g}"


def _legend(figure: Figure, rows: list[Row]) -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], ls="", marker=MARKERS[level], ms=SIZES[level], color=MUTED, label=f"FLOP per {level} byte")
        for level in LEVELS
    ]
    handles.append(Line2D([], [], color=INK, lw=1.1, label="ceiling: profile"))
    handles.append(Line2D([], [], color=MUTED, lw=0.8, ls=_DASHES["sustained"], label="ceiling: sustained"))
    if any(row["kind"] == "measured" for row in rows):
        handles.append(Line2D([], [], ls="", marker="o", mfc="white", color=MUTED, label="measured"))
    figure.legend(handles=handles, loc="outside upper left", ncols=3, columnspacing=1.4, handletextpad=0.4)
