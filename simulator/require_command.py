"""``iosim require``: the least hardware that reaches a target, one parameter at a time; a contour over two."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from simulator.options import RunOptions, takes_problem
from simulator.problem import AttentionProblem
from simulator.tables import print_table

if TYPE_CHECKING:
    from simulator.profile import Profile
    from simulator.require import Answer, Target
    from simulator.sensitivity import Bench

#: Factors of a contour's grid on each axis: a quarter to four times today's value.
_CONTOUR_FACTORS = tuple(2.0 ** (i / 3) for i in range(-6, 7))


def register(app: typer.Typer) -> None:
    """Add the ``require`` command to ``app``."""
    app.command("require")(require)


@takes_problem()
def require(
    *,
    problem: AttentionProblem,
    conditions: RunOptions,
    target: Annotated[
        list[str],
        typer.Option(
            "--target", help="'fa3 <= 1ms', 'fa3 >= 600TFLOP/s' or 'fa2 hbm <= 4GB' (also l2); several: all must hold."
        ),
    ],
    gpu: Annotated[str, typer.Option("--gpu", help="A GPU of 'iosim gpus' or a YAML file.")] = "h100_sxm",
    parameters: Annotated[
        str | None,
        typer.Option(
            "--parameters", help="Hardware keys, with commas (default: HBM bandwidth, SMEM, L2, tensor rate)."
        ),
    ] = None,
    contour: Annotated[
        str | None,
        typer.Option("--contour", metavar="X,Y", help="Two hardware keys for a picture of equal performance."),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", "-o", metavar="FILE", help="The contour (.png, .svg, .pdf); its CSV lies beside it."),
    ] = None,
    csv_file: Annotated[Path | None, typer.Option("--csv", metavar="FILE", help="Write the answers as CSV.")] = None,
    hypothetical: Annotated[
        bool, typer.Option("--hypothetical", help="Also simulate what the GPU lacks the capability for.")
    ] = False,
) -> None:
    """The least HBM bandwidth, SRAM, L2 or tensor rate that reaches a target, holding the rest; or what stops it.

    With several targets the answer is the least with which all of them hold. With --tiles auto every design gets the
    tiles that suit it.
    """
    from simulator.compare_command import check_files
    from simulator.errors import InputError
    from simulator.plots.style import check_picture_path
    from simulator.require import DEFAULT_PARAMETERS, bench_for, parse_target, required_for_all
    from simulator.sensitivity_command import counting, hardware_keys

    asked = [parse_target(text, problem) for text in target]
    if len({one.text for one in asked}) < len(asked):
        raise InputError("--target: one is given twice; keep one of them")
    keys = hardware_keys(parameters, "--parameters") if parameters else list(DEFAULT_PARAMETERS)
    axes = hardware_keys(contour, "--contour") if contour else []
    if contour and len(axes) != 2:
        raise InputError("--contour: needs two keys; write --contour hbm_bandwidth,tensor_rate")
    if axes and len(asked) > 1:
        raise InputError("--contour: draws one target; give a single --target")
    if plot is not None and not axes:
        raise InputError("--plot: nothing to draw; name two keys with --contour")
    if axes:
        plot = check_picture_path(plot or Path("require.png"))
        check_files(plot, plot.with_suffix(".csv"), csv_file)
    else:
        check_files(csv_file)
    profile = conditions.profile(gpu)
    goals = [(bench_for(one, problem, profile, conditions, hypothetical), one) for one in asked]
    now, today_runs, why_not = [], False, ""
    for bench, one in goals:
        try:
            today = one.value(bench.result({}))
            now.append(f"{'meets' if today <= one.limit else 'misses'} it: {one.shown(today)}")
            today_runs = True
        except InputError as error:
            # more of something may be just what lets it run
            why_not = str(error)
            now.append(f"cannot run it: {why_not}")
    answers = []
    with counting("parameters", len(keys)) as count:
        for key in keys:
            answers.append(required_for_all(goals, key))
            count()
    if not today_runs and all(answer.factor is None for answer in answers):
        raise InputError(why_not)
    _print(goals, now, answers, profile)
    if csv_file is not None:
        _write_csv(csv_file, answers)
    if axes and plot is not None:
        _draw(plot, goals[0][0], axes, asked[0], profile)


def _print(goals: list[tuple[Bench, Target]], now: list[str], answers: list[Answer], profile: Profile) -> None:
    from rich.console import Console
    from rich.markup import escape

    from simulator.sensitivity import PARAMETERS
    from simulator.wording import problem_text

    console = Console(highlight=False)
    shown = ""
    for (bench, target), said in zip(goals, now, strict=True):
        if problem_text(bench.problem) != shown:
            # flash_decoding has a problem of its own
            shown = problem_text(bench.problem)
            console.print(f"[bold]Problem[/]: {shown}", soft_wrap=True)
        # a changed GPU's name has brackets, which rich would take for a style
        console.print(f"[bold]Target[/]: {escape(f'{target.text}. {profile.name} {said}')}", soft_wrap=True)
    rows = []
    for answer in answers:
        name, value = PARAMETERS.get(answer.key, answer.key), _quantity(answer.key, answer.today, profile)
        if answer.factor is None or answer.value is None:
            rows.append((name, value, "not reachable", "", "", answer.limiter))
        else:
            needed = _quantity(answer.key, answer.value, profile)
            rows.append((name, value, needed, f"x{answer.factor:.3g}", answer.then, answer.limiter))
    print_table(console, ("parameter", "today", "needed", "factor", "then", "limited by"), rows)
    for answer in answers:
        if answer.why:
            console.print(escape(f"{PARAMETERS.get(answer.key, answer.key)}: {answer.why}"))


def _quantity(key: str, value: float, profile: Profile) -> str:
    from simulator.profile import GROUP_KEYS, key_of
    from simulator.quantities import format_quantity

    if key in GROUP_KEYS:
        return f"x{value:.3g}"
    return format_quantity(value, key_of(key).dimension)


def _write_csv(path: Path, answers: list[Answer]) -> None:
    from dataclasses import asdict

    from simulator.atomic_write import write_text
    from simulator.plots.rows import rows_csv

    write_text(path, rows_csv(asdict(answer) for answer in answers))
    print(f"wrote {path}")


def _draw(plot: Path, bench: Bench, axes: list[str], target: Target, profile: Profile) -> None:
    from simulator.atomic_write import write_text
    from simulator.plots.contour import contour_rows, plot_contour
    from simulator.plots.rows import rows_csv
    from simulator.plots.style import save_figure
    from simulator.require import grid

    values = [profile.values[key].value if key in profile.values else 1.0 for key in axes]
    rows = contour_rows(grid(bench, (axes[0], axes[1]), target, _CONTOUR_FACTORS), (axes[0], axes[1]), values, target)
    save_figure(plot_contour(rows, profile.name)[0], plot)
    write_text(plot.with_suffix(".csv"), rows_csv(rows))
    print(f"wrote {plot} and {plot.with_suffix('.csv')}")
