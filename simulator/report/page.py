"""Puts the page together: simulates what is missing, draws the pictures, fills the template."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from simulator.comparison import Comparison
from simulator.observe import Call, observe_each
from simulator.options import RunOptions
from simulator.plots.agreement import plot_agreement
from simulator.plots.io import plot_io
from simulator.plots.roofline import plot_roofline
from simulator.plots.rows import Row
from simulator.plots.style import svg_text
from simulator.plots.timeline import plot_gpu_timeline, plot_sm_timeline
from simulator.profile import Profile
from simulator.report.sections import comparison_table, errors_table, figure, profile_table, switches
from simulator.wording import problem_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_HERE = Path(__file__).parent


def render(
    comparison: Comparison,
    *,
    command: str = "",
    conditions: RunOptions | None = None,
    timelines: Sequence[str] = ("fa2", "fa3"),
    validation: Sequence[Row] = (),
    validation_note: str = "",
    hypothetical: bool = False,
) -> str:
    """The HTML text of ``comparison``: table, rooflines, bytes, timelines, validation, profiles.

    ``timelines`` are the algorithms whose SM and CTAs are shown on every GPU that runs them; ``validation`` rows are
    :func:`simulator.plots.agreement.agreement_rows`, ``validation_note`` says where they come from.
    """
    conditions = conditions or RunOptions()
    profiles = [profile for profile, _ in comparison.by_gpu()]
    parts = [_comparison(comparison), *_pictures(comparison, profiles)]
    parts.append(_timelines(comparison, profiles, conditions, timelines, hypothetical))
    parts.append(_validation(validation, validation_note))
    parts.append(_profiles(profiles))
    algorithms = dict.fromkeys(entry.algorithm for entry in comparison.entries)
    gpus = [profile.name for profile in profiles]
    text = (_HERE / "report.html").read_text(encoding="utf-8")
    filled = {
        "TITLE": escape(f"Attention on {', '.join(gpus)}"),
        "PROBLEM": escape(_problem(comparison)),
        "STYLE": (_HERE / "report.css").read_text(encoding="utf-8"),
        "SCRIPT": (_HERE / "report.js").read_text(encoding="utf-8"),
        "GPUS": switches("gpu", gpus),
        "ALGORITHMS": switches("series", algorithms),
        "SECTIONS": "\n".join(part for part in parts if part),
        "COMMAND": escape(command or "simulator.report.page.render"),
        "VERSION": escape(_version()),
    }
    # one pass, so that a text that contains a mark is not filled again
    pieces = text.split("@@")
    return "".join(piece if i % 2 == 0 else filled[piece] for i, piece in enumerate(pieces))


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("iosim")
    except PackageNotFoundError:
        return "(not installed)"


def _problem(comparison: Comparison) -> str:
    text = problem_text(comparison.problem)
    if comparison.decode_problem is not None:
        text += f". * runs the decode step: {problem_text(comparison.decode_problem)}"
    return text


def _section(anchor: str, title: str, note: str, *content: str) -> str:
    return f'<section id="{anchor}"><h2>{title}</h2><p class="note">{note}</p>{"".join(content)}</section>'


def _comparison(comparison: Comparison) -> str:
    note = (
        "A click on a heading sorts, a click on a row opens its launches and what they wait for. Speed-up is over "
        "standard attention on the same problem; bytes are read plus written during the run."
    )
    return _section("compare", "Comparison", note, f'<div class="scroll">{comparison_table(comparison)}</div>')


def _of_gpu(drawn: Figure, anchor: str, caption: str, profile: Profile) -> str:
    """The picture ``drawn`` as a figure that goes with its GPU's switch."""
    return figure(svg_text(drawn), anchor, f"{caption} {profile.name}", profile.name)


def _pictures(comparison: Comparison, profiles: list[Profile]) -> list[str]:
    rooflines, bars = [], []
    for index, profile in enumerate(profiles):
        results = [e.result for e in comparison.entries if e.result and e.profile is profile]
        if not results:
            continue
        roofline, io = plot_roofline(results, [profile])[0], plot_io(results)[0]
        rooflines.append(_of_gpu(roofline, f"roofline{index}", "Roofline of", profile))
        bars.append(_of_gpu(io, f"io{index}", "Bytes by tensor on", profile))
    roof_note = (
        "One mark for each launch and level of memory: its FLOP/s against its FLOPs per byte at that level. A launch "
        "under a slanted line is held by that level's bandwidth when its mark of the same level touches it."
    )
    io_note = "Left: bytes moved. Right: the same bytes as shares by tensor. Hatched bytes are written."
    return [_section("roofline", "Roofline", roof_note, *rooflines), _section("io", "Bytes", io_note, *bars)]


def _timelines(
    comparison: Comparison,
    profiles: list[Profile],
    conditions: RunOptions,
    algorithms: Sequence[str],
    hypothetical: bool,
) -> str:
    content = []
    for index, profile in enumerate(profiles):
        calls = [
            Call(entry.algorithm, entry.implementation, entry.problem, profile)
            for entry in comparison.entries
            if entry.profile is profile and entry.result is not None and entry.algorithm in algorithms
        ]
        seen, errors = observe_each(calls, conditions.arguments(), hypothetical)
        for call, error in errors:
            content.append(f'<p data-gpu="{escape(profile.name)}">{escape(call.algorithm)}: {escape(error)}</p>')
        if seen:
            content.append(_of_gpu(plot_sm_timeline(seen)[0], f"sm{index}", "Pipes of one SM of", profile))
            content.append(_of_gpu(plot_gpu_timeline(seen)[0], f"ctas{index}", "CTAs on the SMs of", profile))
    note = (
        "The pipes of one SM over a few loop iterations, each stream of instructions with its own strip; then every "
        "CTA on its SM: the alternating strengths show one CTA following another."
    )
    return _section("timeline", "Timeline", note, *content) if content else ""


def _validation(rows: Sequence[Row], note: str) -> str:
    if not rows:
        text = "No measurements were given: iosim report --data FILE.csv compares this model with yours."
        return _section("validation", "Validation", text)
    drawn = plot_agreement(rows)[0]
    caption = f"Predicted against measured time of {len(rows)} rows"
    return _section(
        "validation",
        "Validation",
        escape(note),
        figure(svg_text(drawn), "agreement", caption),
        f'<div class="scroll">{errors_table(rows)}</div>',
    )


def _profiles(profiles: list[Profile]) -> str:
    content = [
        '<p><input type="search" id="search" aria-label="Search the values" placeholder="Search keys, sources…"></p>'
    ]
    for profile in profiles:
        title = f"{profile.name}: {profile.title}" + (" (hypothetical)" if profile.is_hypothetical else "")
        table = f'<div class="scroll">{profile_table(profile)}</div>'
        content.append(f'<div data-gpu="{escape(profile.name)}"><h3>{escape(title)}</h3>{table}</div>')
    note = (
        "Every number that the predictions rest on: spec from a datasheet, measured by the source named, assumed where "
        "there is neither, calibrated by a fit."
    )
    return _section("profiles", "Profiles", note, *content)
