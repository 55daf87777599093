"""``iosim sweep``: a design space from a YAML file to a table, on all cores or a Dask cluster."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

#: Seconds between lines of progress where there is no terminal to draw a bar on.
_LINE_EVERY_S = 15.0


def register(app: typer.Typer) -> None:
    """Add the ``sweep`` command to ``app``."""
    app.command("sweep")(sweep)


def sweep(
    spec: Annotated[Path, typer.Argument(metavar="SPEC.yaml", help="What to vary; see the sections below.")],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="The table, .csv or .parquet (default: SPEC's name .csv)."),
    ] = None,
    jobs: Annotated[int | None, typer.Option("--jobs", "-j", min=1, help="Processes (default: one a core).")] = None,
    scheduler: Annotated[
        str | None, typer.Option("--scheduler", metavar="ADDRESS", help="Run on a Dask cluster: tcp://host:8786.")
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change every base GPU: l2_bytes=x2 (repeatable)."),
    ] = None,
    restart: Annotated[bool, typer.Option("--restart", help="Forget what an earlier run of it has done.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check the spec and count its points.")] = False,
) -> None:
    """Simulate a design space: a grid, random or Sobol points over hardware and problem, for several algorithms.

    SPEC.yaml has 'gpu', 'algorithms', 'design' (kind: grid, random or sobol; points; seed), 'hardware' (keys of --set)
    and 'problem' (columns of 'iosim predict'), each a value, a list, or {from, to, steps, scale: log, multiple};
    'tiles: auto', 'hypothetical: true' and 'event_budget' are optional. What is done is kept in FILE.journal: a sweep
    that was stopped or killed goes on where it was when the command is given again.
    """
    from simulator.errors import InputError
    from simulator.sweep.designs import points_of
    from simulator.sweep.output import check_output
    from simulator.sweep.runner import run_sweep
    from simulator.sweep.spec import read_spec

    if jobs is not None and scheduler is not None:
        raise InputError("--jobs: the cluster's workers decide that; leave it out with --scheduler")
    asked = read_spec(spec, tuple(overrides or ()))
    output = check_output(output or Path(spec.stem + ".csv"))
    if dry_run:
        points = points_of(asked)
        designs = len(points) // len(asked.algorithms)
        print(f"{len(points)} points: {designs} designs x {len(asked.algorithms)} algorithms, into {output}")
        return
    with _Progress() as progress:
        done = run_sweep(asked, output, jobs=jobs, scheduler=scheduler, restart=restart, progress=progress)
    if done.stale:
        print(
            "iosim: iosim itself changed since this sweep began; --restart simulates all points anew", file=sys.stderr
        )
    print(f"wrote {output}: {len(done.rows)} points, {done.simulated} simulated now in {done.seconds:.0f} s")
    _summary(done.rows)


def _summary(rows: list[dict[str, Any]]) -> None:
    """One line an algorithm, and the commonest reasons why points have no result."""
    import re
    from collections import Counter

    from simulator.wording import time_text

    for algorithm in dict.fromkeys(row["algorithm"] for row in rows):
        own = [row for row in rows if row["algorithm"] == algorithm and not row["error"]]
        if own:
            times = sorted(row["time_us"] for row in own)
            limiters = Counter(row["limiter"] for row in own).most_common(4)
            said = ", ".join(f"{name} {100 * n / len(own):.0f} %" for name, n in limiters)
            print(
                f"  {algorithm}: {len(own)} points, {time_text(times[0])} to {time_text(times[-1])}; limited by {said}"
            )
    # a changed GPU's name lists its changes, and what it has is its own: every design would be a reason of its own
    reasons = (re.sub(r"\[[^\]]*\]", "", row["error"]) for row in rows if row["error"])
    errors = Counter(re.sub(r"\b(has|runs) [\d.,]+", r"\1 less", text) for text in reasons)
    for text, count in errors.most_common(5):
        print(f"  {count} without a result: {text}")
    if len(errors) > 5:
        print(f"  and {len(errors) - 5} other reasons (column 'error')")


class _Progress:
    """A bar with an estimate of the time left on a terminal; a line now and then elsewhere."""

    def __init__(self) -> None:
        self._bar = None
        self._said = self._began = time.monotonic()
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                MofNCompleteColumn,
                Progress,
                TextColumn,
                TimeElapsedColumn,
                TimeRemainingColumn,
            )

            self._bar = Progress(
                TextColumn("sweep"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
            )
            self._task = self._bar.add_task("points", total=None)

    def __enter__(self) -> _Progress:
        if self._bar is not None:
            self._bar.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._bar is not None:
            self._bar.__exit__(*error)

    def __call__(self, done: int, total: int, found: int) -> None:
        """``done`` of ``total`` points, ``found`` of them by an earlier run."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total)
            return
        now = time.monotonic()
        if now - self._said < _LINE_EVERY_S or done == found:
            return
        self._said = now
        left_s = (total - done) * (now - self._began) / (done - found)
        print(f"iosim: {done} of {total} points, {left_s:.0f} s left", file=sys.stderr, flush=True)
