"""Timelines: the pipes of one SM, where FA2's gaps and FA3's ping-pong are, and the CTAs of the whole GPU."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from simulator.plots.rows import Row, series_names
from simulator.plots.style import (
    FAINT,
    MUTED,
    new_figure,
    picture_style,
    series_colour,
    tint,
    title_height_in,
    title_lines,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from simulator.observe import Observation

SM_PICTURE, GPU_PICTURE = "timeline-sm", "timeline-gpu"
#: Pipe -> what its lane is called. ``dispatch`` (issue slots of all elementwise work) is shown by the pipes it feeds.
PIPE_LANES = {
    "port": "loads (L2 → SM)",
    "tensor": "tensor",
    "exp": "exp",
    "fp32": "FP32",
    "alu": "ALU",
    "convert": "convert",
    "smem": "SMEM port",
}
#: What a role's lane shows: what it does or waits for -> one of four kinds.
ROLE_KINDS = {
    "exp": "vector work (exp, FP32, ALU)",
    "fp32": "vector work (exp, FP32, ALU)",
    "smem": "vector work (exp, FP32, ALU)",
    "tensor": "waits for the tensor core",
    "await": "waits for the tensor core",
    "consume": "waits for data",
    "load": "waits for data",
    "acquire": "waits for data",
    "barrier": "waits for a barrier or its turn",
    "wait": "waits for a barrier or its turn",
}
#: Bars of one launch in the GPU picture; more CTAs than that share bars.
MOST_BARS = 6000
#: Roles without warps of their own: their copies are seen in the pipes.
_COPIERS = ("loader", "arrivals")
#: Loop iterations in the window of the picture.
_WINDOW_PERIODS = 4.0


def sm_rows(observations: Iterable[Observation]) -> list[Row]:
    """Spans of one SM over a few loop iterations: ``lane``, ``role``, ``start_cycle``, ``end_cycle``, ``what``."""
    rows = []
    observations = list(observations)
    for seen, series in zip(observations, series_names(seen.result for seen in observations), strict=True):
        sm = seen.sm
        width = min(sm.end_cycles, _WINDOW_PERIODS * sm.period_cycles) if sm.period_cycles else sm.end_cycles
        start = max(0.0, 0.55 * sm.end_cycles - width / 2)
        base = {
            "picture": SM_PICTURE,
            "gpu": seen.result.gpu,
            "algorithm": series,
            "kernel": sm.kernel,
            "residents": sm.residents,
            "clock_mhz": sm.clock_hz / 1e6,
            "window_start": start,
            "window_end": start + width,
        }
        for span in sm.spans:
            if span.end_cycles <= start or span.start_cycles >= start + width:
                continue
            if span.track == "role" and span.role.endswith(_COPIERS):
                continue
            lane = span.track if span.track != "role" else f"role {span.role}"
            if span.track != "role" and lane not in PIPE_LANES:
                continue
            what = ROLE_KINDS.get(span.what, span.what) if span.track == "role" else span.what
            rows.append(
                base
                | {
                    "lane": lane,
                    "role": span.role,
                    "start_cycle": span.start_cycles,
                    "end_cycle": span.end_cycles,
                    "what": what,
                }
            )
    return rows


def plot_sm_timeline(observations: Iterable[Observation] = (), rows: Sequence[Row] | None = None) -> tuple[Figure, Any]:
    """One panel an algorithm: lanes of the SM's pipes, then of its warpgroups; ``(figure, axes)``.

    A warpgroup has its own strength of the algorithm's colour, in the pipes as in its own lane.
    """
    rows = sm_rows(observations) if rows is None else list(rows)
    panels: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        panels.setdefault((row["algorithm"], row["gpu"], row["kernel"]), []).append(row)
    lanes = [len(_lanes(part)) for part in panels.values()]
    titles = [title_lines(_sm_title(*names, part), 8.2) for names, part in panels.items()]
    more = title_height_in(titles)
    with picture_style():
        figure = new_figure(9.5, sum(0.3 * n + 0.95 + more for n in lanes) + 0.4)
        axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=[n + 1 for n in lanes])[:, 0]
        for ax, title, ((algorithm, _gpu, _kernel), part) in zip(axes, titles, panels.items(), strict=True):
            _sm_panel(ax, algorithm, part)
            ax.set_title(title, loc="left", fontsize=9.5)
        axes[-1].set_xlabel("SM cycles since the CTA started")
        _role_legend(figure)
    return figure, axes


def _sm_title(algorithm: str, gpu: str, kernel: str, rows: list[Row]) -> str:
    residents = rows[0]["residents"]
    share = f"{residents} CTAs on the SM" if residents > 1 else "one CTA on the SM"
    return f"{algorithm} on {gpu}: {kernel}, {share}, {rows[0]['clock_mhz']:.0f} MHz"


def _lanes(rows: list[Row]) -> list[str]:
    pipes = [name for name in PIPE_LANES if any(row["lane"] == name for row in rows)]
    return pipes + sorted({row["lane"] for row in rows if row["lane"].startswith("role ")})


def _sm_panel(ax: Axes, algorithm: str, rows: list[Row]) -> None:
    lanes = _lanes(rows)
    low, high = rows[0]["window_start"], rows[0]["window_end"]
    roles = sorted({row["role"] for row in rows if not row["role"].endswith(_COPIERS)})
    colour = series_colour(algorithm)
    strengths = {role: 1.0 - 0.62 * i / max(1, len(roles) - 1) for i, role in enumerate(roles)}
    for index, lane in enumerate(lanes):
        parts: dict[tuple[str, str], list[tuple[float, float]]] = {}
        for row in rows:
            if row["lane"] == lane:
                span = (max(low, row["start_cycle"]), min(high, row["end_cycle"]))
                parts.setdefault((row["role"], row["what"]), []).append(span)
        # streams share a pipe instruction by instruction: each has its own strip of the lane
        strips = sorted({role for role, _ in parts})
        height = 0.8 / len(strips)
        for (role, what), spans in parts.items():
            is_role = lane.startswith("role ")
            face, hatch = tint(colour, strengths.get(role, 0.5)), None
            if is_role:
                face, hatch = _role_look(what, face)
            ax.broken_barh(
                [(start, end - start) for start, end in spans], (index - 0.4 + height * strips.index(role), height),
                facecolors=face, edgecolor=MUTED if hatch else "none", hatch=hatch, linewidth=0.3 if is_role else 0.0,
                gid=f"series-{algorithm}",
            )  # fmt: skip
        if not lane.startswith("role "):
            busy = covered([span for spans in parts.values() for span in spans]) / (high - low)
            ax.annotate(
                f"{100 * busy:.0f} % busy", (1.01, index), xycoords=("axes fraction", "data"), va="center", fontsize=8
            )
    ax.set_yticks(range(len(lanes)), [PIPE_LANES.get(lane) or _role_name(lane) for lane in lanes])
    ax.set_ylim(len(lanes) - 0.4, -0.6)
    ax.set_xlim(low, high)
    ax.tick_params(axis="y", length=0)
    ax.grid(True, axis="x", color=FAINT, lw=0.5)
    ax.set_axisbelow(True)


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of ``(start, end)`` spans: when a pipe had work of any stream."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _role_name(lane: str) -> str:
    cta, _, role = lane.removeprefix("role ").partition("/")
    return f"{role} of {cta.replace('cta', 'CTA ')}"


def _role_look(what: str, face: Any) -> tuple[Any, str | None]:
    return {
        "vector work (exp, FP32, ALU)": (face, None),
        "waits for the tensor core": ("#eeeeee", None),
        "waits for data": ("white", "///"),
        "waits for a barrier or its turn": ("white", "xxx"),
    }.get(what, ("white", "xxxx"))


def _role_legend(figure: Figure) -> None:
    from matplotlib.patches import Patch

    handles = []
    for what in dict.fromkeys(ROLE_KINDS.values()):
        face, hatch = _role_look(what, tint("#000000", 0.55))
        handles.append(Patch(facecolor=face, hatch=hatch, edgecolor=MUTED, lw=0.4, label=what))
    figure.legend(
        handles=handles, loc="outside lower center", ncols=4, title="lanes of warps and warpgroups", title_fontsize=8
    )


def gpu_rows(observations: Iterable[Observation]) -> list[Row]:
    """One row a CTA: ``kernel``, ``cta``, ``sm``, ``slot``, ``start_us``, ``end_us``, ``label``.

    Launches of very many short CTAs have ``ctas`` neighbours of one slot in a row, from the first one's start to the
    last one's end. ``kernel_end_us`` is when the launch's last written byte has left.
    """
    rows = []
    observations = list(observations)
    for seen, series in zip(observations, series_names(seen.result for seen in observations), strict=True):
        for kernel in seen.kernels:
            together = -(-len(kernel.ctas) // MOST_BARS)
            base = {
                "picture": GPU_PICTURE,
                "gpu": seen.result.gpu,
                "algorithm": series,
                "kernel": kernel.name,
                "kernel_index": kernel.index,
                "num_sms": kernel.num_sms,
                "ctas_per_sm": kernel.ctas_per_sm,
                "kernel_end_us": kernel.start_us + kernel.busy_us,
            }
            on_slot: dict[int, list[int]] = {}
            for cta in np.argsort(kernel.ctas[:, 1], kind="stable"):
                on_slot.setdefault(int(kernel.ctas[cta, 0]), []).append(int(cta))
            for slot, ctas in on_slot.items():
                for first in range(0, len(ctas), together):
                    group = ctas[first : first + together]
                    rows.append(
                        base
                        | {
                            "cta": group[0],
                            "ctas": len(group),
                            "sm": slot % kernel.num_sms,
                            "slot": slot,
                            "start_us": float(kernel.ctas[group[0], 1]),
                            "end_us": float(kernel.ctas[group[-1], 2]),
                            "label": kernel.labels[group[0]],
                        }
                    )
    return rows


def plot_gpu_timeline(
    observations: Iterable[Observation] = (), rows: Sequence[Row] | None = None
) -> tuple[Figure, Any]:
    """One panel an algorithm: every CTA on its SM over time, below it the share of slots in use; ``(figure, axes)``.

    A slot's CTAs alternate between two strengths of the algorithm's colour. ``axes`` is ``[algorithm, 2]``.
    """
    rows = gpu_rows(observations) if rows is None else list(rows)
    panels: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        panels.setdefault((row["algorithm"], row["gpu"]), []).append(row)
    titles = [title_lines(_gpu_title(*names, part), 8.2) for names, part in panels.items()]
    with picture_style():
        figure = new_figure(9.5, (3.6 + title_height_in(titles)) * len(panels))
        axes = figure.subplots(2 * len(panels), 1, height_ratios=(4, 1) * len(panels)).reshape(len(panels), 2)
        for (upper, lower), title, ((algorithm, _gpu), part) in zip(axes, titles, panels.items(), strict=True):
            _gpu_panel(upper, algorithm, part)
            end = max(max(row["end_us"], row["kernel_end_us"]) for row in part)
            upper.set_title(title, loc="left")
            upper.set_ylabel("SM")
            upper.set_xlim(0, end)
            upper.tick_params(labelbottom=False)
            _mark_drains(upper, part, end)
            times, shares = occupancy_steps(part)
            lower.fill_between(times, shares, step="post", color=tint(series_colour(algorithm), 0.5), lw=0)
            lower.set(xlim=(0, end), ylim=(0, 105), ylabel="slots\nin use, %", xlabel="time, µs")
    return figure, axes


def _gpu_title(algorithm: str, gpu: str, rows: list[Row]) -> str:
    return f"{algorithm} on {gpu}: {sum(row['ctas'] for row in rows):,} work tiles, {_kernels(rows)}"


def _mark_drains(ax: Axes, rows: list[Row], end: float) -> None:
    """Hatch the time between a launch's last CTA and its end, where written bytes still leave for HBM."""
    last: dict[int, tuple[float, float]] = {}
    for row in rows:
        _, ends = last.get(row["kernel_index"], (0.0, 0.0))
        last[row["kernel_index"]] = (row["kernel_end_us"], max(ends, row["end_us"]))
    for kernel_end, cta_end in last.values():
        if kernel_end - cta_end > 0.015 * end:
            ax.axvspan(cta_end, kernel_end, facecolor="white", edgecolor=FAINT, hatch="//", lw=0)
            middle = (cta_end + kernel_end) / 2
            ax.text(middle, rows[0]["num_sms"] / 2, "writes drain", rotation=90, ha="center", va="center", fontsize=7.5)


def _kernels(rows: list[Row]) -> str:
    names = list(dict.fromkeys(row["kernel"] for row in rows))
    return names[0] if len(names) == 1 else f"{len({row['kernel_index'] for row in rows})} kernels"


def _gpu_panel(ax: Axes, algorithm: str, rows: list[Row]) -> None:
    from matplotlib.collections import PolyCollection

    colour = series_colour(algorithm)
    strengths = (tint(colour, 0.95), tint(colour, 0.45))
    # a launch with few CTAs shows them as high as an SM, though more would have room beside them
    used: dict[int, int] = {}
    for row in rows:
        used[row["kernel_index"]] = max(used.get(row["kernel_index"], 1), row["slot"] // row["num_sms"] + 1)
    order: dict[int, int] = {}
    polygons, faces = [], []
    for row in sorted(rows, key=lambda r: (r["start_us"], r["cta"])):
        turn = order.get(row["slot"], 0)
        order[row["slot"]] = turn + 1
        height = 1.0 / used[row["kernel_index"]]
        bottom = row["sm"] + height * (row["slot"] // row["num_sms"])
        polygons.append(
            [
                (row["start_us"], bottom),
                (row["end_us"], bottom),
                (row["end_us"], bottom + height),
                (row["start_us"], bottom + height),
            ]
        )
        faces.append(strengths[turn % 2])
    ax.add_collection(
        PolyCollection(
            polygons, facecolors=faces, edgecolors="none", rasterized=len(polygons) > 1500, gid=f"series-{algorithm}"
        )
    )
    ax.set_ylim(rows[0]["num_sms"], 0)


def occupancy_steps(rows: Sequence[Row]) -> tuple[list[float], list[float]]:
    """Times (µs) and the share of CTA slots in use (%) from each of them on."""
    changes: dict[float, float] = {}
    for row in rows:
        share = 100.0 / (row["num_sms"] * row["ctas_per_sm"])
        changes[row["start_us"]] = changes.get(row["start_us"], 0.0) + share
        changes[row["end_us"]] = changes.get(row["end_us"], 0.0) - share
    times, shares, used = [], [], 0.0
    for time in sorted(changes):
        used = max(0.0, used + changes[time])
        times.append(time)
        shares.append(used)
    return times, shares
