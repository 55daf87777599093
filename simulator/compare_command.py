"""``iosim compare``: attention algorithms side by side, as tables, CSV, JSON and a picture."""

from __future__ import annotations

import csv
import io
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from simulator.errors import InputError
from simulator.options import RunOptions, comma_list, takes_problem
from simulator.problem import AttentionProblem

if TYPE_CHECKING:
    from simulator.comparison import Comparison

#: Runs from which more than one process is worth its start.
MANY_RUNS = 8
PICTURE_SUFFIXES = (".png", ".svg", ".pdf")


def register(app: typer.Typer) -> None:
    """Add the ``compare`` command to ``app``."""
    app.command("compare")(compare)


@takes_problem()
def compare(
    *,
    problem: AttentionProblem,
    conditions: RunOptions,
    gpu: Annotated[
        str, typer.Option("--gpu", help="GPUs, with commas: names of 'iosim gpus' or YAML files.")
    ] = "a100_sxm4_80gb,h100_sxm,b200",
    algorithm: Annotated[
        str | None,
        typer.Option("--algorithm", help="Algorithms, with commas; fa1:flash_attn_1_paper picks a kernel; or auto."),
    ] = None,
    framework: Annotated[
        str | None, typer.Option("--framework", help="Who picks for auto (default torch); warns of what would not run.")
    ] = None,
    framework_version: Annotated[
        str | None, typer.Option("--framework-version", help="Its version (see iosim dispatch --list).")
    ] = None,
    hypothetical: Annotated[
        bool, typer.Option("--hypothetical", help="Also simulate what a GPU lacks the capability for.")
    ] = False,
    jobs: Annotated[
        int | None, typer.Option("--jobs", "-j", min=1, help="Processes (default: one a core for many runs).")
    ] = None,
    csv_file: Annotated[Path | None, typer.Option("--csv", metavar="FILE", help="Write a row a result.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write everything.")] = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw bars (.png, .svg, .pdf) and write their CSV.")
    ] = None,
) -> None:
    """Compare attention algorithms on GPUs: time, work, bytes at each level, limiter.

    flash_decoding runs its own decode problem: one query token on the same keys. With --seqlens what takes lengths by
    sequence runs with them and, beside it, padded to the longest.
    """
    from rich.console import Console

    from simulator.compare_table import print_comparison
    from simulator.comparison import all_algorithms
    from simulator.comparison import compare as simulate_all
    from simulator.dispatch.automatic import framework_call

    if plot_file is not None and plot_file.suffix.lower() not in PICTURE_SUFFIXES:
        raise InputError(f"--plot: {plot_file} is no picture; end it in {', '.join(PICTURE_SUFFIXES)}")
    # the picture's CSV says what --csv says: the two may be one file
    beside = plot_file.with_suffix(".csv") if plot_file and csv_file is None else None
    check_files(csv_file, json_file, plot_file, beside)
    profiles = [conditions.profile(name) for name in comma_list(gpu, "--gpu")]
    algorithms = comma_list(algorithm, "--algorithm") if algorithm is not None else all_algorithms()
    if jobs is None:
        # starting a worker costs about as long as two or three runs
        jobs = os.cpu_count() or 1 if len(profiles) * len(algorithms) >= MANY_RUNS else 1
    call = framework_call(framework, framework_version)
    comparison = simulate_all(
        problem, profiles, algorithms, conditions, hypothetical=hypothetical, framework=call, jobs=jobs
    )
    print_comparison(Console(), comparison)
    write_files(comparison, csv_file, json_file, plot_file)


def check_files(*paths: Path | None) -> None:
    """:class:`InputError` before any work when a file to write has no folder, or two would be the same."""
    named = [path.resolve() for path in paths if path is not None]
    for path in named:
        if not path.parent.is_dir():
            raise InputError(f"{path}: the folder {path.parent} does not exist; create it first")
        if named.count(path) > 1:
            raise InputError(f"{path}: two results would be written to it; name different files")


def write_files(comparison: Comparison, csv_file: Path | None, json_file: Path | None, plot_file: Path | None) -> None:
    """Write the files that were asked for; a picture comes with the CSV that it shows."""
    from simulator.atomic_write import replace_file, write_json, write_text

    if csv_file is not None:
        write_text(csv_file, comparison_csv(comparison))
    if json_file is not None:
        write_json(json_file, comparison_data(comparison))
    if plot_file is not None:
        from simulator.compare_plot import plot_comparison

        figure, _ = plot_comparison(comparison)
        replace_file(plot_file, lambda path: figure.savefig(path, dpi=150))
        write_text(plot_file.with_suffix(".csv"), comparison_csv(comparison))


def comparison_csv(comparison: Comparison) -> str:
    """One row an entry, at full precision."""
    rows = [entry.row() for entry in comparison.entries]
    stream = io.StringIO()
    writer = csv.DictWriter(stream, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue()


def comparison_data(comparison: Comparison) -> list[dict[str, Any]]:
    """One JSON-ready object an entry: its CSV row, and the whole result under ``result``."""
    return [
        _finite(entry.row() | {"result": entry.result.to_json() if entry.result else None})
        for entry in comparison.entries
    ]


def _finite(data: Any) -> Any:
    """``data`` without the infinities that JSON has no word for, and with plain keys and numbers."""
    if isinstance(data, dict):
        return {str(key): _finite(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_finite(value) for value in data]
    if hasattr(data, "item"):
        data = data.item()
    return None if isinstance(data, float) and not math.isfinite(data) else data
