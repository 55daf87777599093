"""``iosim report``: the page, from a problem or from files of measurements."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from simulator.errors import InputError, unknown
from simulator.options import RunOptions, comma_list, takes_problem
from simulator.problem import AttentionProblem

if TYPE_CHECKING:
    from simulator.plots.rows import Row


def register(app: typer.Typer) -> None:
    """Add the ``report`` command to ``app``."""
    app.command("report")(report)


@takes_problem()
def report(
    *,
    problem: AttentionProblem,
    conditions: RunOptions,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE.html", help="Where to write the page.")],
    gpu: Annotated[str, typer.Option("--gpu", help="GPUs, with commas: names or YAML files.")] = "h100_sxm",
    algorithm: Annotated[
        str | None, typer.Option("--algorithm", help="Algorithms, with commas (default: all).")
    ] = None,
    timelines: Annotated[
        str, typer.Option("--timelines", help="Algorithms whose timelines are shown, with commas; '' for none.")
    ] = "fa2,fa3",
    data: Annotated[
        list[Path] | None,
        typer.Option("--data", metavar="CSV", help="Measurements to validate against (repeatable; default: shipped)."),
    ] = None,
    rows: Annotated[
        int, typer.Option("--validation-rows", min=0, help="Most rows that are predicted for the validation.")
    ] = 60,
    hypothetical: Annotated[
        bool, typer.Option("--hypothetical", help="Also simulate what a GPU lacks the capability for.")
    ] = False,
) -> None:
    """One self-contained interactive HTML page: comparison, rooflines, bytes, timelines, validation, profiles."""
    from simulator.atomic_write import write_text
    from simulator.compare_command import check_files
    from simulator.comparison import all_algorithms, compare
    from simulator.plot_commands import command_line
    from simulator.report.page import render

    if output.suffix.lower() not in (".html", ".htm"):
        raise InputError(f"--output: {output} is no page; end its name in .html")
    check_files(output)
    profiles = [conditions.profile(name) for name in comma_list(gpu, "--gpu")]
    algorithms = comma_list(algorithm, "--algorithm") if algorithm is not None else all_algorithms()
    shown = [name.strip() for name in timelines.split(",") if name.strip()]
    for name in shown:
        if name not in all_algorithms():
            raise unknown("--timelines", name, all_algorithms())
    comparison = compare(problem, profiles, algorithms, conditions, hypothetical=hypothetical)
    validation, note = validate([p.name for p in profiles], data, rows)
    page = render(
        comparison,
        command=command_line(),
        conditions=conditions,
        timelines=shown,
        validation=validation,
        validation_note=note,
        hypothetical=hypothetical,
    )
    write_text(output, page)
    print(f"wrote {output} ({len(page.encode()) / 1e6:.1f} MB, opens without a network)")


def validate(gpus: list[str], files: list[Path] | None, most: int) -> tuple[list[Row], str]:
    """Predicted and measured times of up to ``most`` rows on ``gpus``, evenly taken from ``files`` or shipped data."""
    from simulator.plots.agreement import agreement_rows
    from simulator.validation import compare_with, read_measurements

    paths = files or shipped_measurements(gpus)
    if not paths or most == 0:
        return [], ""
    measured = read_measurements(paths)
    if "measured_time_us" not in measured.columns:
        raise InputError(f"{paths[0]}:1: no column 'measured_time_us'; name a table of measurements")
    if "gpu" in measured.columns:
        measured = measured[measured["gpu"].isin([*gpus, ""])]
    timed = measured[measured["measured_time_us"] != ""]
    # every k-th row: no row is chosen by how well it is predicted
    step = max(1, -(-len(timed) // most))
    sample = timed.iloc[::step].reset_index(drop=True)
    if sample.empty:
        return [], ""
    rows = agreement_rows(compare_with(sample, gpus[0]))
    for row in rows:
        row["gpu"] = row["gpu"] or gpus[0]
    skipped = len(sample) - len(rows)
    names = ", ".join(dict.fromkeys(Path(path).name for path in paths))
    note = f"Times of {len(rows)} rows, one in {step} of the {len(timed)} rows on these GPUs in {names}."
    if step == 1:
        note = f"Times of all {len(rows)} rows on these GPUs in {names}."
    if skipped:
        note += f" {skipped} more rows are not modelled and have no prediction."
    if not rows:
        print("iosim: no row of the measurements could be predicted; the validation is left out", file=sys.stderr)
    return rows, note


def shipped_measurements(gpus: list[str]) -> list[Path]:
    """The measurements that iosim ships of these GPUs: its own, or else published ones."""
    from simulator.profile import profile_folder

    own = [profile_folder() / "measurements" / gpu / "timed_run1.csv" for gpu in gpus]
    found = [path for path in own if path.exists()]
    if found:
        return found
    published = sorted((profile_folder() / "published").glob("fa[123]_*.csv"))
    return [path for path in published if any(f",{gpu}," in path.read_text(encoding="utf-8") for gpu in gpus)]
