"""``iosim roofline``, ``io``, ``scale`` and ``timeline``: pictures, each written with the CSV that it shows."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from simulator.errors import InputError, unknown
from simulator.options import RunOptions, comma_list, takes_problem, whole_number
from simulator.problem import AttentionProblem

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from simulator.observe import Observation
    from simulator.plot_runs import Run
    from simulator.plots.rows import Row
    from simulator.profile import Profile
    from simulator.result import Result

_Gpu = Annotated[str, typer.Option("--gpu", help="GPUs, with commas: names of 'iosim gpus' or YAML files.")]
_Algorithm = Annotated[str | None, typer.Option("--algorithm", help="Algorithms, with commas (default: all).")]
_Plot = Annotated[
    Path | None,
    typer.Option("--plot", "-o", metavar="FILE", help="The picture (.png, .svg, .pdf); its CSV lies beside it."),
]
_From = Annotated[
    Path | None,
    typer.Option("--from", metavar="FILE", help="Draw a saved picture's CSV, or results of --json, again."),
]
_Json = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Save the results, for --from.")]
_Hypothetical = Annotated[
    bool, typer.Option("--hypothetical", help="Also simulate what a GPU lacks the capability for.")
]


def register(app: typer.Typer) -> None:
    """Add the picture commands to ``app``."""
    app.command("roofline")(roofline)
    app.command("io")(io)
    app.command("scale")(scale)
    app.command("timeline")(timeline)


@takes_problem()
def roofline(
    *,
    problem: AttentionProblem,
    conditions: RunOptions,
    gpu: _Gpu = "h100_sxm",
    algorithm: _Algorithm = None,
    plot: _Plot = None,
    data: Annotated[
        Path | None, typer.Option("--data", metavar="CSV", help="Measurements: their points beside the predicted ones.")
    ] = None,
    source: _From = None,
    json_file: _Json = None,
    hypothetical: _Hypothetical = False,
) -> None:
    """Hierarchical roofline: each kernel's FLOP/s against its FLOPs per HBM, L2 and shared-memory byte.

    Solid ceilings are the profile's numbers, dashed ones what a kernel sustains in the model; FLOPs are nominal.
    """
    from simulator.plots.roofline import plot_roofline, roofline_rows

    plot = _prepare(plot, "roofline.png", json_file)

    def shown(results: list[Result]) -> list[Row]:
        from simulator.plots.measured import measured_points

        measured = measured_points(data, results) if data is not None else []
        return roofline_rows(results, _profiles_of(results, gpu, conditions), measured)

    rows = _rows("roofline", shown, source, json_file, problem, gpu, algorithm, conditions, hypothetical)
    _write(plot, plot_roofline(rows=rows)[0], rows)


@takes_problem()
def io(
    *,
    problem: AttentionProblem,
    conditions: RunOptions,
    gpu: _Gpu = "h100_sxm",
    algorithm: _Algorithm = None,
    against: Annotated[
        str | None, typer.Option("--against", help="seqlen, sram or l2: bytes against it (default: bytes by tensor).")
    ] = None,
    values: Annotated[
        str | None, typer.Option("--values", help="Values of --against, with commas: tokens, KiB or MB.")
    ] = None,
    plot: _Plot = None,
    source: _From = None,
    json_file: _Json = None,
    hypothetical: _Hypothetical = False,
) -> None:
    """Bytes by tensor and level of memory; against sequence length, SRAM size or L2 size."""
    from simulator.plots.io import io_rows, plot_io, plot_io_sweep

    if against is None:
        plot = _prepare(plot, "io.png", json_file)
        rows = _rows("io", io_rows, source, json_file, problem, gpu, algorithm, conditions, hypothetical)
        _write(plot, plot_io(rows=rows)[0], rows)
        return
    from simulator.io_sweeps import AGAINST, SRAM_ALGORITHMS, sweep

    if against not in AGAINST:
        raise unknown("--against", against, ("seqlen", "sram", "l2"))
    if json_file is not None:
        raise InputError("--json: a sweep is saved by the CSV beside its picture; leave --json out")
    plot = _prepare(plot, f"io-{against}.png")
    saved = _saved_rows(source, f"io-{against}", only_csv=True)
    if saved is not None:
        rows = saved
    else:
        profiles = [conditions.profile(name) for name in comma_list(gpu, "--gpu")]
        plain = against == "sram" and algorithm is None
        algorithms = list(SRAM_ALGORITHMS) if plain else _algorithms(algorithm)
        points = _numbers(values)
        rows, found = sweep(against, problem, profiles, algorithms, points, conditions, hypothetical)
        _report_skipped(found)
    _write(plot, plot_io_sweep(rows)[0], rows)


@takes_problem()
def scale(
    *,
    problem: AttentionProblem,
    conditions: RunOptions,
    gpu: _Gpu = "h100_sxm",
    algorithm: _Algorithm = None,
    lengths: Annotated[
        str | None, typer.Option("--lengths", help="Sequence lengths, with commas (default: 512 to 16384).")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option("--tokens", min=1, help="Keep batch times length at this (default: keep --batch).")
    ] = None,
    plot: _Plot = None,
    source: _From = None,
    hypothetical: _Hypothetical = False,
) -> None:
    """Time and memory against sequence length; where two algorithms change places is marked."""
    from simulator import plot_runs
    from simulator.plots.scale import plot_scale, scale_rows

    plot = _prepare(plot, "scale.png")
    rows = _saved_rows(source, "scale", only_csv=True)
    if rows is None:
        wanted = [int(v) for v in _numbers(lengths, "--lengths") or plot_runs.SEQLENS]
        profiles = [conditions.profile(name) for name in comma_list(gpu, "--gpu")]
        found = plot_runs.seqlen_runs(
            problem, profiles, _algorithms(algorithm), conditions, wanted, tokens, hypothetical
        )
        _report_skipped(found)
        rows = scale_rows(
            [(one.problem.seqlen_k, one.profile.name, one.algorithm, one.result, one.error) for one in found],
            {profile.name: profile.hbm_bytes for profile in profiles},
        )
    _write(plot, plot_scale(rows)[0], rows)


@takes_problem()
def timeline(
    *,
    problem: AttentionProblem,
    conditions: RunOptions,
    gpu: _Gpu = "h100_sxm",
    algorithm: Annotated[str, typer.Option("--algorithm", help="Algorithms, with commas.")] = "fa2,fa3",
    view: Annotated[str, typer.Option("--view", help="sm: pipes of one SM; gpu: CTAs of all SMs.")] = "sm",
    kernel: Annotated[
        str | None, typer.Option("--kernel", help="Launch to look into, by name or number (default: the longest).")
    ] = None,
    perfetto: Annotated[
        Path | None,
        typer.Option("--perfetto", metavar="F.json", help="Write a trace for Perfetto or chrome://tracing."),
    ] = None,
    plot: _Plot = None,
    source: _From = None,
    hypothetical: _Hypothetical = False,
) -> None:
    """Who waits for what: one SM's pipes and warpgroups, or the GPU's CTAs, over time; a trace for Perfetto."""
    from simulator.plots.timeline import gpu_rows, plot_gpu_timeline, plot_sm_timeline, sm_rows

    if view not in ("sm", "gpu"):
        raise unknown("--view", view, ("sm", "gpu"))
    if perfetto is None or plot is not None:
        plot = _prepare(plot, f"timeline-{view}.png", perfetto)
    rows = _saved_rows(source, f"timeline-{view}", only_csv=True)
    if rows is not None and perfetto is not None:
        raise InputError("--perfetto: a saved picture holds no whole trace; leave --from out")
    if rows is None:
        seen = observations(problem, conditions, gpu, algorithm, kernel, hypothetical)
        if perfetto is not None:
            from simulator.trace import write_trace

            write_trace(perfetto, seen, command_line())
            print(f"wrote {perfetto} (open it in ui.perfetto.dev or chrome://tracing)")
        rows = sm_rows(seen) if view == "sm" else gpu_rows(seen)
    if plot is not None:
        _write(plot, (plot_sm_timeline if view == "sm" else plot_gpu_timeline)(rows=rows)[0], rows)


def observations(
    problem: AttentionProblem,
    conditions: RunOptions,
    gpu: str,
    algorithm: str,
    kernel: str | None = None,
    hypothetical: bool = False,
) -> list[Observation]:
    """Recorded runs of each algorithm on each GPU; what cannot run is told on stderr."""
    from simulator.comparison import asked_of, parse_algorithm
    from simulator.observe import Call, observe_each

    profiles = [conditions.profile(name) for name in comma_list(gpu, "--gpu")]
    wanted = [parse_algorithm(name) for name in comma_list(algorithm, "--algorithm")]
    calls = [Call(*known, asked_of(known[0], problem), profile) for profile in profiles for known in wanted]
    seen, errors = observe_each(calls, conditions.arguments(), hypothetical, kernel)
    if not seen:
        raise InputError(errors[0][1])
    for call, error in errors:
        print(f"iosim: {call.algorithm} on {call.profile.name} left out: {error}", file=sys.stderr)
    return seen


def command_line() -> str:
    """The command that is running, as a user would type it."""
    return shlex.join(["iosim", *sys.argv[1:]])


def _algorithms(text: str | None) -> list[str]:
    from simulator.comparison import all_algorithms

    return comma_list(text, "--algorithm") if text is not None else all_algorithms()


def _numbers(text: str | None, option: str = "--values") -> list[float] | None:
    if text is None:
        return None
    try:
        numbers = [float(whole_number(part)) for part in text.split(",") if part.strip()]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1 or sorted(set(numbers)) != sorted(numbers):
        raise InputError(f"{option}: {text!r} is no list of different whole numbers; write 512,1024,2048")
    return numbers


def _rows(
    picture: str, shown: Callable[[list[Any]], list[Row]], source: Path | None, json_file: Path | None, *asked: Any
) -> list[Row]:
    """What ``picture`` shows: a saved picture's rows, or ``shown`` of saved or (then saved) simulated results."""
    rows = _saved_rows(source, picture)
    if rows is None:
        results = _results(source, *asked)
        rows = shown(results)
        _save(json_file, results)
    return rows


def _results(
    source: Path | None,
    problem: AttentionProblem,
    gpu: str,
    algorithm: str | None,
    conditions: RunOptions,
    hypothetical: bool,
) -> list[Result]:
    if source is not None:
        from simulator.saved_results import load_results

        return load_results(source)
    from simulator.plot_runs import runs

    profiles = [conditions.profile(name) for name in comma_list(gpu, "--gpu")]
    found = runs(problem, profiles, _algorithms(algorithm), conditions, hypothetical)
    _report_skipped(found)
    return [one.result for one in found if one.result is not None]


def _report_skipped(found: Iterable[Run]) -> None:
    told = set()
    for one in found:
        line = f"iosim: {one.algorithm} on {one.profile.name} left out: {one.error}"
        if one.result is None and line not in told:
            told.add(line)
            print(line, file=sys.stderr)


def _profiles_of(results: Iterable[Result], gpu: str, conditions: RunOptions) -> list[Profile]:
    """The profiles of the results' GPUs: those given, or shipped ones by name (``h100_sxm[l2_bytes=x2]`` too)."""
    given = {}
    for name in comma_list(gpu, "--gpu"):
        profile = conditions.profile(name)
        given[profile.name] = profile
    found = []
    for name in dict.fromkeys(result.gpu for result in results):
        stem, _, changes = name.partition("[")
        texts = tuple(changes.rstrip("]").split(",")) if changes else ()
        found.append(given[name] if name in given else RunOptions(overrides=texts).profile(stem))
    return found


def _saved_rows(source: Path | None, picture: str, only_csv: bool = False) -> list[Row] | None:
    from simulator.plots.rows import read_rows

    if source is None or (source.suffix.lower() == ".json" and not only_csv):
        return None
    return read_rows(source, picture)


def _prepare(plot: Path | None, default: str, *others: Path | None) -> Path:
    """The picture's path, checked with the other files to write before any work."""
    from simulator.compare_command import check_files
    from simulator.plots.style import check_picture_path

    plot = check_picture_path(plot or Path(default))
    check_files(plot, plot.with_suffix(".csv"), *others)
    return plot


def _save(json_file: Path | None, results: Iterable[Result]) -> None:
    if json_file is not None:
        from simulator.atomic_write import write_text
        from simulator.saved_results import results_json

        write_text(json_file, results_json(results, command_line()))
        print(f"wrote {json_file}")


def _write(plot: Path, figure: Figure, rows: Iterable[Row]) -> None:
    from simulator.atomic_write import write_text
    from simulator.plots.rows import rows_csv
    from simulator.plots.style import save_figure

    save_figure(figure, plot)
    write_text(plot.with_suffix(".csv"), rows_csv(rows))
    print(f"wrote {plot} and {plot.with_suffix('.csv')}")
