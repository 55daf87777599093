"""``iosim sensitivity``: what 1 % more of each hardware parameter buys, as a table and a tornado."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from simulator.options import RunOptions, comma_list, takes_problem
from simulator.problem import AttentionProblem
from simulator.tables import print_table

if TYPE_CHECKING:
    from simulator.sensitivity import Change, Sensitivity

#: Elasticities below this are printed as 0: half of the model's own noise of arbitration.
_SHOWN = 0.005


def register(app: typer.Typer) -> None:
    """Add the ``sensitivity`` command to ``app``."""
    app.command("sensitivity")(sensitivity)


@takes_problem()
def sensitivity(
    *,
    problem: AttentionProblem,
    conditions: RunOptions,
    gpu: Annotated[str, typer.Option("--gpu", help="A GPU of 'iosim gpus' or a YAML file.")] = "h100_sxm",
    algorithm: Annotated[str, typer.Option("--algorithm", help="Algorithms, with commas.")] = "fa2,fa3",
    parameters: Annotated[
        str | None, typer.Option("--parameters", help="Hardware keys, with commas (default: all that matter).")
    ] = None,
    step: Annotated[float, typer.Option("--step", help="Step on each side, in percent.")] = 5.0,
    limits: Annotated[
        bool, typer.Option("--limits/--no-limits", help="Look where the limiter changes, up to a factor of 8.")
    ] = True,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", "-o", metavar="FILE", help="The tornado (.png, .svg, .pdf); its CSV lies beside it."),
    ] = None,
    csv_file: Annotated[Path | None, typer.Option("--csv", metavar="FILE", help="Write the table as CSV.")] = None,
    hypothetical: Annotated[
        bool, typer.Option("--hypothetical", help="Also simulate what the GPU lacks the capability for.")
    ] = False,
) -> None:
    """Elasticity of time and bytes to each hardware parameter, per algorithm; where the limiter changes.

    An elasticity of -0.8 says: 1 % more of the parameter takes 0.8 % of the time away. What stands behind ± is the
    standard error of the slope: reshuffled CTAs move the end of a launch by chance.
    """
    from simulator.atomic_write import write_text
    from simulator.compare_command import check_files
    from simulator.errors import InputError
    from simulator.plots.rows import rows_csv
    from simulator.plots.style import check_picture_path, save_figure
    from simulator.plots.tornado import plot_tornado, tornado_rows
    from simulator.sensitivity import PARAMETERS, sensitivities

    if not 0.1 <= step <= 50:
        raise InputError(f"--step: {step:g} is not between 0.1 and 50 %; write for example 5")
    names = comma_list(algorithm, "--algorithm")
    if plot is not None:
        check_picture_path(plot)
        check_files(plot, plot.with_suffix(".csv"), csv_file)
    else:
        check_files(csv_file)
    profile = conditions.profile(gpu)
    keys = hardware_keys(parameters, "--parameters") if parameters else list(PARAMETERS)
    with counting("parameters", len(keys) * len(names)) as count:
        found = sensitivities(
            problem,
            profile,
            names,
            conditions,
            parameters=keys,
            step=step / 100,
            limits=limits,
            hypothetical=hypothetical,
            on_parameter=count,
        )
    rows = tornado_rows(found, profile.name, step / 100)
    _print(found, profile.name, problem)
    if csv_file is not None:
        write_text(csv_file, rows_csv(rows))
        print(f"wrote {csv_file}")
    if plot is not None:
        save_figure(plot_tornado(rows)[0], plot)
        write_text(plot.with_suffix(".csv"), rows_csv(rows))
        print(f"wrote {plot} and {plot.with_suffix('.csv')}")


def hardware_keys(text: str, option: str) -> list[str]:
    """Canonical profile keys of a list such as ``hbm_bandwidth,sram``; :class:`InputError` names the nearest."""
    from simulator.errors import InputError
    from simulator.overrides import ALIASES
    from simulator.profile import GROUP_KEYS, SCALAR_KEYS
    from simulator.yaml_lines import nearest

    keys = []
    for written in comma_list(text, option):
        key = ALIASES.get(written, written)
        if key not in SCALAR_KEYS and key not in GROUP_KEYS:
            raise InputError(
                f"{option}: unknown key '{written}'; {nearest(written, [*SCALAR_KEYS, *GROUP_KEYS, *ALIASES])}"
            )
        if key in keys:
            raise InputError(f"{option}: '{written}' is given twice; keep one of them")
        keys.append(key)
    return keys


class counting:
    """A progress bar on a terminal, nothing elsewhere; yields a function that counts one."""

    def __init__(self, what: str, total: int) -> None:
        import sys

        self._bar = None
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task(what, total=total)

    def __enter__(self) -> Any:
        if self._bar is None:
            return lambda: None
        self._bar.__enter__()
        return lambda: self._bar.advance(self._task)

    def __exit__(self, *error: Any) -> None:
        if self._bar is not None:
            self._bar.__exit__(*error)


def _print(found: list[Sensitivity], gpu: str, problem: AttentionProblem) -> None:
    from rich.console import Console
    from rich.markup import escape

    from simulator.wording import problem_text, time_text

    console = Console(highlight=False)
    console.print(f"[bold]Problem[/]: {problem_text(problem)}")
    for algorithm in dict.fromkeys(one.algorithm for one in found):
        own = [one for one in found if one.algorithm == algorithm]
        # a changed GPU's name has brackets, which rich would take for a style
        title = escape(f"{algorithm} on {gpu}: {time_text(own[0].base_us)}, limited by {own[0].limiter}")
        console.print(f"[bold]{title}[/]")
        rows = []
        for one in own:
            cells = [_elasticity(x) for x in (one.time, one.hbm_bytes, one.l2_bytes)]
            if one.time_error >= _SHOWN:
                cells[0] += f" ±{one.time_error:.2f}"
            rows.append((one.name + ("*" if one.note else ""), *cells, _change(one.below), _change(one.above)))
        slopes, changes = ("time, %", "HBM\nbytes, %", "L2\nbytes, %"), ("limiter\nwith less", "limiter\nwith more")
        print_table(console, ("1 % more", *slopes, *changes), rows)
        for one in own:
            if one.note:
                console.print(escape(f"* {one.name}: {one.note}"), style="dim")

    if any(one.limiter == "fp32" for one in found):
        console.print("fp32: arithmetic of the FP32, ALU and conversion pipes, and the issue slots that feed them")


def _elasticity(value: float) -> str:
    return "0" if abs(value) < _SHOWN else f"{value:+.2f}"


def _change(change: Change | None) -> str:
    return f"{change.limiter} at x{change.factor:.2g}" if change else ""
