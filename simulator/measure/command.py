"""The ``measure`` command: what runs here, timed rows, kernel spans, hardware counters, microbenchmarks."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from simulator.errors import InputError

if TYPE_CHECKING:
    from simulator.measure.cases import Case


def measure(
    cases: Annotated[Path | None, typer.Option(help="case list (CSV, the columns of predict)")] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="result CSV; an existing one is resumed")
    ] = None,
    counters: Annotated[bool, typer.Option("--counters", help="hardware counters under Nsight Compute")] = False,
    spans: Annotated[bool, typer.Option("--spans", help="duration of each kernel (CUPTI activity records)")] = False,
    microbench: Annotated[bool, typer.Option("--microbench", help="measure the chip itself")] = False,
    check: Annotated[bool, typer.Option("--check", help="compare each kernel with float32 attention")] = False,
    list_: Annotated[bool, typer.Option("--list", help="list the kernels, and why one cannot run here")] = False,
    metrics: Annotated[str, typer.Option(help="counter set: all, hbm, l2 or mix")] = "all",
    launches: Annotated[Path | None, typer.Option(help="with --counters: one row a kernel launch")] = None,
    only: Annotated[str, typer.Option(help="with --microbench: comma-separated groups")] = "",
    family: Annotated[str, typer.Option(help="only cases whose family starts with this")] = "",
    marked: Annotated[str, typer.Option(help="only cases with this mark: counters or mix")] = "",
    seed: Annotated[int, typer.Option(help="order of the timed cases")] = 1,
    deadline: Annotated[float, typer.Option(help="seconds after which no new case starts")] = 1e9,
) -> None:
    """Measure attention kernels or the chip on this machine's GPU (needs the extra 'measure')."""
    from simulator.measure import kernels

    if list_:
        for kernel in kernels.KERNELS.values():
            reason = kernel.needs()
            state = "runs here" if reason is None else f"cannot run here: {reason}"
            typer.echo(f"{kernel.name:22s} {'/'.join(kernel.algorithms):15s} {kernel.describe} - {state}")
        return
    chosen = [flag for flag, given in (("--counters", counters), ("--spans", spans), ("--check", check)) if given]
    if len(chosen) + microbench > 1:
        raise InputError("choose one of --counters, --spans, --check and --microbench")
    if reason := kernels.need_cuda():
        raise InputError(f"nothing can be measured here: {reason}")
    if microbench:
        from simulator.measure.microbench import BENCHMARKS, run_microbench

        groups = tuple(name for name in only.split(",") if name)
        if unknown := set(groups) - set(BENCHMARKS):
            raise InputError(f"--only: unknown group {sorted(unknown)[0]!r}; expected some of {', '.join(BENCHMARKS)}")
        typer.echo(f"{run_microbench(str(_required(output)), deadline, groups)} rows in {output}")
        return
    if cases is None:
        raise InputError("--cases is missing; expected a CSV of cases (or --list, --microbench)")
    from simulator.measure.cases import load_cases

    todo = [case for case in load_cases(cases) if case.family.startswith(family)]
    if marked not in ("", "counters", "mix"):
        raise InputError(f"--marked={marked!r} is not valid; expected counters or mix")
    if marked:
        todo = [case for case in todo if getattr(case, marked)]
    if check:
        _check(todo)
    elif counters:
        from simulator.measure.counters import METRIC_SETS, run_counters

        if metrics not in METRIC_SETS:
            raise InputError(f"--metrics={metrics!r} is not valid; expected one of {', '.join(METRIC_SETS)}")
        table = None if launches is None else str(launches)
        typer.echo(f"{run_counters(todo, str(_required(output)), metrics, deadline, table)} rows written to {output}")
    elif spans:
        from simulator.measure.run_timed import run_spans

        typer.echo(f"{run_spans(todo, str(_required(output)), seed, deadline)} rows in {output}")
    else:
        from simulator.measure.run_timed import run_timed

        written, failed = run_timed(todo, str(_required(output)), seed, deadline)
        typer.echo(f"{written} rows written to {output}, {failed} of them with an error")


def _required(output: Path | None) -> Path:
    if output is None:
        raise InputError("-o is missing; expected the CSV to write")
    if not output.parent.is_dir():
        raise InputError(f"-o {output}: the folder does not exist; expected a path in an existing folder")
    return output


def _check(todo: Iterable[Case]) -> None:
    from simulator.measure import exactness, kernels

    worst: dict[str, float] = {}
    for case in todo:
        kernel = kernels.kernel_of(case)
        reason = kernel.needs() or kernel.refuse(case)
        if reason:
            typer.echo(f"{case.case_id:40s} not run: {reason}")
            continue
        try:
            error = exactness.relative_error(case, kernel.prepare(case))
        except Exception as failure:
            typer.echo(f"{case.case_id:40s} FAILED {type(failure).__name__}: {str(failure)[:200]}")
            continue
        worst[kernel.name] = max(worst.get(kernel.name, 0.0), error)
        typer.echo(f"{case.case_id:40s} relative error {error:.2e}")
    for name, error in worst.items():
        typer.echo(f"{name:24s} worst relative error {error:.2e}")


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("measure")(measure)
