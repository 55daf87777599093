"""The parts of the page, as HTML text. Every text that comes from outside is escaped here."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from math import fsum
from typing import Any

from simulator.comparison import Comparison, Entry
from simulator.palette import algorithm_colour
from simulator.plots.style import bytes_text, time_text
from simulator.profile import Profile
from simulator.result import KernelResult
from simulator.wording import three_digits

#: What launches wait for, as people say it.
CAUSES = {
    "tensor": "tensor cores",
    "exp": "exponentials",
    "fp32": "FP32 and ALU work",
    "smem": "shared memory",
    "l2": "L2 bandwidth",
    "hbm": "HBM bandwidth",
    "latency": "latency, barriers",
    "imbalance": "idle SMs",
    "launch": "launches",
}
#: Greys and hues that are no algorithm's colour; each cause is also written out.
CAUSE_COLOURS = {
    "tensor": "#4d4d4d",
    "exp": "#7a7a7a",
    "fp32": "#a6a6a6",
    "smem": "#c9c9c9",
    "l2": "#8c6bb1",
    "hbm": "#88419d",
    "latency": "#d9c7b8",
    "imbalance": "#e9e9e9",
    "launch": "#f2e6d9",
}
COLUMNS = (
    ("gpu", "GPU", "text"),
    ("algorithm", "Algorithm", "text"),
    ("time", "Time", "number"),
    ("speedup", "Speed-up", "number"),
    ("tflops", "TFLOP/s", "number"),
    ("peak", "% of peak", "number"),
    ("limiter", "Limited by", "text"),
    ("hbm", "HBM bytes", "number"),
    ("l2", "SM↔L2 bytes", "number"),
    ("intensity", "FLOP/HBM byte", "number"),
    ("memory", "Peak memory", "number"),
)


def comparison_table(comparison: Comparison) -> str:
    """A row an entry, followed by a row with its launches that the page opens on a click."""
    head = "".join(
        f'<th scope="col" aria-sort="none" data-kind="{kind}"><button type="button">{label}</button></th>'
        for _, label, kind in COLUMNS
    )
    times = [entry.result.time_us for entry in comparison.entries if entry.result]
    slowest = max(times, default=1.0)
    body = "".join(_entry_rows(entry, slowest, len(COLUMNS)) for entry in comparison.entries)
    return f'<table id="comparison" class="data"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def _entry_rows(entry: Entry, slowest_us: float, width: int) -> str:
    name = f"{entry.algorithm}:{entry.implementation}" if entry.several else entry.algorithm
    name += " *" if entry.decode else ""
    keys = f'data-gpu="{escape(entry.profile.name)}" data-series="{escape(entry.algorithm)}"'
    chip = f'<span class="chip" style="background:{algorithm_colour(entry.algorithm)}"></span>'
    gpu = escape(entry.profile.name).replace(",", ",<wbr>").replace("[", "<wbr>[")
    first = f'<td class="gpu">{gpu}</td>'
    first += f"<td>{chip}{escape(name)}</td>"
    if entry.result is None:
        why = f"lacks {', '.join(entry.lacking)}" if entry.lacking else entry.error
        empty = f'<td data-value="" colspan="{width - 2}" class="absent">cannot run: {escape(why)}</td>'
        return f'<tr class="entry" {keys}>{first}{empty}</tr>'
    r = entry.result
    moved = r.hbm_read_bytes + r.hbm_write_bytes
    bar = f'<span class="bar" style="width:{max(0.5, 100 * r.time_us / slowest_us):.2f}%"></span>'
    cells = [
        (r.time_us, f"{time_text(r.time_us)}{bar}"),
        (entry.speedup, f"×{entry.speedup:.3g}" if entry.speedup is not None else "–"),
        (r.tflops, three_digits(r.tflops)),
        (entry.percent_of_peak, f"{entry.percent_of_peak:.0f}" if entry.percent_of_peak is not None else "–"),
        (r.limiter, CAUSES.get(r.limiter, r.limiter)),
        (moved, bytes_text(moved)),
        (r.l2_read_bytes + r.l2_write_bytes, bytes_text(r.l2_read_bytes + r.l2_write_bytes)),
        (r.arithmetic_intensity, three_digits(r.arithmetic_intensity)),
        (r.peak_memory_bytes, bytes_text(r.peak_memory_bytes)),
    ]
    rest = "".join(f'<td data-value="{"" if value is None else value}">{text}</td>' for value, text in cells)
    opener = 'class="entry" tabindex="0" role="button" aria-expanded="false"'
    detail = f'<tr class="detail" {keys} hidden><td colspan="{width}">{_details(entry)}</td></tr>'
    return f"<tr {opener} {keys}>{first}{rest}</tr>{detail}"


def _details(entry: Entry) -> str:
    r = entry.result
    assert r is not None
    lines = [f"<p>{escape(r.implementation)}; {wait_bar(r.waits)}</p>"]
    labels = ("Launch", "Time", "Work tiles", "Waves", "HBM", "SM↔L2", "Waits for")
    head = "".join(f"<th>{label}</th>" for label in labels)
    rows = "".join(_kernel_row(kernel) for kernel in r.kernels)
    lines.append(f'<table class="inner"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>')
    for note in (*r.warnings, *r.notes, *(f"hypothetical: {line}" for line in r.substitutions)):
        lines.append(f"<p>{escape(note)}</p>")
    return "".join(lines)


def _kernel_row(kernel: KernelResult) -> str:
    cells = (
        escape(kernel.name),
        time_text(kernel.time_us),
        f"{kernel.ctas:,} ({kernel.ctas_per_sm} at once an SM)",
        f"{kernel.waves:.2f}",
        bytes_text(kernel.hbm_read_bytes + kernel.hbm_write_bytes),
        bytes_text(kernel.l2_read_bytes + kernel.l2_write_bytes),
        wait_bar(kernel.waits),
    )
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def wait_bar(waits: Mapping[str, float]) -> str:
    """Shares of time by cause as a bar, the larger ones written out beside it."""
    shares = sorted(((share, cause) for cause, share in waits.items() if share > 0.005), reverse=True)
    parts = "".join(
        f'<span style="width:{100 * share:.1f}%;background:{CAUSE_COLOURS.get(cause, "#fff")}" '
        f'title="{CAUSES.get(cause, cause)} {100 * share:.0f} %"></span>'
        for share, cause in shares
    )
    text = ", ".join(f"{CAUSES.get(cause, cause)} {100 * share:.0f} %" for share, cause in shares[:4])
    return f'<span class="waits">{parts}</span> {text}'


def profile_table(profile: Profile) -> str:
    """Every number of a profile with unit, kind, source and place, and the calibrated parameters."""
    rows = []
    for key, q in profile.values.items():
        place = q.location.rsplit("/", 1)[-1]
        rows.append((key, quantity_text(q.value, q.unit), q.kind, q.source, place))
    for name, p in profile.calibration.parameters.items():
        about = p.identified_by or "fitted"
        source = f"{about}; bounds {p.low:g} to {p.high:g}"
        rows.append((name, f"{p.value:.6g} {p.unit}".strip(), "calibrated", source, profile.calibration.source or ""))
    head = "".join(f"<th>{label}</th>" for label in ("Key", "Value", "Kind", "Source", "Where"))
    body = "".join(
        f'<tr class="value"><td><code>{escape(key)}</code></td><td>{escape(value)}</td>'
        f'<td class="kind-{escape(kind)}">{escape(kind)}</td><td>{escape(source)}</td><td>{escape(place)}</td></tr>'
        for key, value, kind, source, place in rows
    )
    return f'<table class="data values"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def quantity_text(value: float, unit: str) -> str:
    """``value`` as people write it: ``1.98 GHz``, ``3.35 TB/s``, ``52,428,800 B``, ``640 ns``."""
    prefixes = {"Hz": "GMk", "B/s": "TGMk", "FLOP/s": "PTGMk"}.get(unit, "")
    for prefix in prefixes:
        size = {"P": 1e15, "T": 1e12, "G": 1e9, "M": 1e6, "k": 1e3}[prefix]
        if value >= size:
            return f"{value / size:.6g} {prefix}{unit}"
    if unit == "s" and 0 < value < 1:
        return f"{value * 1e6:.6g} µs" if value >= 1e-6 else f"{value * 1e9:.6g} ns"
    text = f"{value:,}" if isinstance(value, int) else f"{value:.6g}"
    return f"{text} {unit}".strip()


def errors_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Mean, median, largest and signed error of time by GPU, algorithm and regime."""
    groups: dict[tuple[str, str, str], list[float]] = {}
    for row in rows:
        groups.setdefault((row["gpu"], row["algorithm"], row["regime"]), []).append(row["error"])
    labels = ("GPU", "Algorithm", "Regime", "n", "Mean |error|", "Median |error|", "Largest", "Signed mean")
    head = "".join(f"<th>{label}</th>" for label in labels)
    body = []
    for (gpu, algorithm, regime), errors in sorted(groups.items()):
        sizes = sorted(abs(error) for error in errors)
        middle = (sizes[(len(sizes) - 1) // 2] + sizes[len(sizes) // 2]) / 2
        numbers = (fsum(sizes) / len(sizes), middle, sizes[-1])
        signed = fsum(errors) / len(errors)
        cells = (
            gpu,
            algorithm,
            regime,
            str(len(sizes)),
            *(f"{100 * x:.1f} %" for x in numbers),
            f"{100 * signed:+.1f} %",
        )
        keys = f'data-gpu="{escape(gpu)}" data-series="{escape(algorithm)}"'
        body.append(f"<tr {keys}>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    return f'<table class="data"><thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody></table>'


def figure(svg: str, name: str, caption: str, gpu: str | None = None) -> str:
    """An SVG of :func:`simulator.plots.style.svg_text` inside the page: its ids made unique, its series switchable."""
    svg = re.sub(r'id="series-([^":]*)[^"]*"', r'data-series="\1"', svg)
    svg = svg.replace(' id="along-a-line"', "")
    svg = re.sub(r'\bid="([^"]*)"', rf'id="{name}-\1"', svg)
    svg = re.sub(r'(xlink:href="|href="|url\()#', rf"\g<1>#{name}-", svg)
    svg = re.sub(r'<svg([^>]*?) height="([^"]*)" ', r"<svg\1 ", svg, count=1)
    svg = re.sub(r'<svg([^>]*?) width="([^"]*)"', rf'<svg role="img" aria-label="{escape(caption)}"\1', svg, count=1)
    keys = f' data-gpu="{escape(gpu)}"' if gpu else ""
    return (
        f'<figure id="{name}"{keys}><div class="scroll">{svg}</div><figcaption>{escape(caption)}</figcaption></figure>'
    )


def switches(kind: str, names: Iterable[str]) -> str:
    """Check boxes that show and hide everything of a GPU or an algorithm."""
    boxes = []
    for name in names:
        chip = f'<span class="chip" style="background:{algorithm_colour(name)}"></span>' if kind == "series" else ""
        box = f'<input type="checkbox" data-switch="{kind}" value="{escape(name)}" checked>'
        boxes.append(f"<label>{box}{chip}{escape(name)}</label>")
    return "".join(boxes)
