"""``iosim validate``: predictions beside measurements, summarised by algorithm and regime."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console


def register(app: typer.Typer) -> None:
    """Add ``validate`` to ``app``."""

    @app.command()
    def validate(
        data: Annotated[list[Path], typer.Option(help="measured CSV (columns of predict and measured_*); repeatable")],
        gpu: Annotated[str | None, typer.Option(help="GPU of rows whose gpu column is blank")] = None,
        split: Annotated[Path | None, typer.Option(help="CSV family,side")] = None,
        side: Annotated[str, typer.Option(help="side of the split to validate: judge, calibrate or all")] = "judge",
        by: Annotated[str, typer.Option(help="comma list of columns to group by")] = "algorithm,pass,regime",
        csv: Annotated[Path | None, typer.Option(help="write every row with prediction and errors here")] = None,
        plot: Annotated[Path | None, typer.Option(help="draw predicted and measured, and error by size")] = None,
        jobs: Annotated[int, typer.Option(help="processes", min=1)] = 1,
        overrides: Annotated[
            list[str] | None,
            typer.Option("--set", metavar="KEY=VALUE", help="change every GPU first: l2_bytes=x2 (repeatable)"),
        ] = None,
    ) -> None:
        """Errors of time, HBM bytes and SM-L2 reads against measurements: n, mean, median, p90, max, signed."""
        import sys

        from rich.console import Console
        from rich.markup import escape
        from rich.progress import Progress

        from simulator.atomic_write import write_text
        from simulator.calibrate_command import SIDES, on_side, read_split
        from simulator.errors import InputError, unknown
        from simulator.predict_command import check_gpus
        from simulator.validation import compare_with, read_measurements, summarise

        if side not in (*SIDES, "all"):
            raise unknown("--side", side, (*SIDES, "all"))

        if plot is not None:
            from simulator.plots.style import check_picture_path

            check_picture_path(plot)
        frame = read_measurements(data)
        if overrides:
            check_gpus(frame, gpu, tuple(overrides), data[0])
        if split is not None and side != "all":
            frame = on_side(frame, read_split(split), side)
        if "pass" not in frame:
            frame["pass"] = "fwd"
        if "gpu" in frame and frame["gpu"].nunique() > 1 and "gpu" not in by.split(","):
            by = f"gpu,{by}"
        frame["pass"] = frame["pass"].replace("", "fwd")
        with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
            task = progress.add_task("predicting", total=len(frame))
            try:
                errors = compare_with(frame, gpu, jobs, lambda: progress.advance(task), overrides or ())
            except InputError as error:
                raise InputError(f"{', '.join(map(str, data))}: {error}") from None
        groups = [name for name in by.split(",") if name]
        for name in groups:
            if name not in errors:
                raise unknown("--by", name, errors.columns)
        console = Console()
        if overrides:
            # escaped, or a key in brackets would be taken for markup
            console.print(escape(f"Predicted with {' '.join(overrides)}, measured without"))
        for column, title in (("error_time", "time"), ("error_hbm", "HBM bytes"), ("error_l2_read", "SM-L2 reads")):
            if errors[column].notna().any():
                if groups:
                    _print(console, summarise(errors, column, groups), f"Error of {title}", groups)
                if len(groups) > 1:
                    first = groups[:1]
                    by_first = f"Error of {title}, by {escape(groups[0])}"
                    _print(console, summarise(errors, column, first), by_first, first)
                _print(console, summarise(errors, column, []), f"Error of {title}, all rows", [])
        covered = errors["error"].fillna("") != ""
        if covered.any():
            first_error = errors["error"][covered].iloc[0]
            console.print(escape(f"{int(covered.sum())} rows could not be predicted; the first: {first_error}"))
        if csv is not None:
            write_text(csv, errors.to_csv(index=False))
        console.print(_remarks(errors))
        if plot is not None:
            from simulator.plots.agreement import agreement_rows, plot_agreement
            from simulator.plots.rows import rows_csv
            from simulator.plots.style import save_figure

            rows = agreement_rows(errors)
            save_figure(plot_agreement(rows)[0], plot)
            write_text(plot.with_suffix(".csv"), rows_csv(rows))


def _remarks(errors: Any) -> str:
    """Errors of short rows in microseconds, and how many measured times lie in their predicted 90 % interval."""
    import pandas as pd

    from simulator.validation import SHORT_US

    measured = pd.to_numeric(errors["measured_time_us"], errors="coerce") if "measured_time_us" in errors else None
    if measured is None:
        return ""
    predicted = pd.to_numeric(errors["time_us"], errors="coerce")
    low, high = (pd.to_numeric(errors[name], errors="coerce") for name in ("time_low_us", "time_high_us"))
    lines = []
    short = (measured < SHORT_US) & predicted.notna()
    if short.any():
        off = (predicted - measured)[short]
        lines.append(f"{int(short.sum())} rows under {SHORT_US:.0f} µs: mean error {off.abs().mean():.1f} µs")
    known = low.notna() & measured.notna()
    if known.any():
        inside = ((measured >= low) & (measured <= high))[known].mean()
        lines.append(f"{100 * inside:.0f} % of {int(known.sum())} measured times lie in their predicted 90 % interval")
    return "\n".join(lines)


def _print(console: Console, summary: Any, title: str, groups: list[str]) -> None:
    from rich.markup import escape

    from simulator.tables import print_table

    rows = []
    for _, row in summary.iterrows():
        values = [f"{100 * row[c]:.1f} %" for c in ("mean", "median", "p90", "max")]
        cells = (str(int(row["n"])), *values, f"{100 * row['signed']:+.1f} %")
        rows.append((*(escape(str(row[g])) for g in groups), *cells))
    console.print(f"[bold]{title}[/]")
    names = tuple(map(escape, groups))
    print_table(console, (*names, "n", "mean", "median", "p90", "max", "signed"), rows, left=names)
