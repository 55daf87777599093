"""``iosim predict``: a CSV of cases in, the same CSV with predictions out."""

from __future__ import annotations

import csv
import difflib
import io
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from simulator.csv_tables import read_table
from simulator.errors import InputError

if TYPE_CHECKING:
    import pandas

#: Rows from which a progress bar is worth its lines.
_LONG_FILE_ROWS = 20


def register(app: typer.Typer) -> None:
    """Add the ``predict`` command to ``app``."""
    app.command("predict")(predict)


def predict(
    cases: Annotated[Path, typer.Argument(metavar="CASES.csv", help="One attention call a row.")],
    gpu: Annotated[str | None, typer.Option("--gpu", help="GPU of rows whose gpu column is blank.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="OUT.csv", help="Where to write (default: stdout).")
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change every GPU: l2_bytes=x2 (repeatable)."),
    ] = None,
    hypothetical: Annotated[
        bool, typer.Option("--hypothetical", help="Also simulate what the GPU lacks the capability for.")
    ] = False,
    tiles: Annotated[
        str | None,
        typer.Option("--tiles", help="Tiles of every row's kernels: kernel (shipped), auto, or 128x64x2x2."),
    ] = None,
    framework: Annotated[
        str | None,
        typer.Option("--framework", help="Whose dispatch: picks for algorithm auto, warns where another kernel runs."),
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 when a row has an error.")] = False,
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=1, help="Processes to share the rows.")] = 1,
) -> None:
    """Predict time, bytes and limiter of every row of a CSV file.

    Columns read: algorithm, batch, heads, seqlen_q, head_dim (these five are needed), implementation, pass, dtype,
    causal, kv_heads, seqlen_k, head_dim_v, window, mask, dropout, softcap, num_splits, page_size, kv_capacity,
    deterministic, seqlens, seqlens_q, seqlens_k, l2_state, timing, gpu, clock_mhz,
    dispatch_framework, dispatch_version. Blank means the default; other
    columns pass through. A row that cannot be predicted says why in its 'error' column.
    """
    from simulator.atomic_write import write_text
    from simulator.predict import check_columns, predict_frame

    frame = read_table(cases).frame()
    try:
        check_columns(list(frame.columns))
    except InputError as error:
        raise InputError(f"{cases}:1: {error}") from None
    check_gpus(frame, gpu, tuple(overrides or ()), cases)
    if output is not None and output.exists() and output.samefile(cases):
        raise InputError(f"{output}: would replace the cases by their predictions; write to another file")
    warn_of_near_misses(list(frame.columns))
    if framework is not None:
        from simulator.dispatch.automatic import framework_call

        framework_call(framework)
    if tiles is not None:
        from simulator.tile_choice import check_tiles

        tiles = check_tiles(tiles)
    with _progress(len(frame)) as on_row:
        predicted = predict_frame(
            frame,
            gpu,
            overrides=overrides or (),
            hypothetical=hypothetical,
            framework=framework,
            tiles=tiles,
            jobs=jobs,
            on_row=on_row,
        )
    text = csv_text(predicted)
    if output is None:
        sys.stdout.write(text)
    else:
        write_text(output, text)
    failed = int((predicted["error"] != "").sum())
    if failed:
        print(f"iosim: {failed} of {len(predicted)} rows have an error (column 'error')", file=sys.stderr)
    if failed and strict:
        raise typer.Exit(1)


def check_gpus(frame: pandas.DataFrame, gpu: str | None, overrides: tuple[str, ...], cases: Path) -> None:
    """:class:`InputError` for mistakes of the command line; a bad ``gpu`` cell is only its row's error."""
    from simulator.options import RunOptions

    if gpu is not None:
        RunOptions(overrides=overrides).profile(gpu)
    elif "gpu" not in frame.columns:
        raise InputError(f"{cases}:1: no column 'gpu' and no --gpu; name a GPU of 'iosim gpus'")
    if overrides and "gpu" in frame.columns:
        for name in sorted({cell.strip() for cell in frame["gpu"]} - {""}):
            try:
                RunOptions().profile(name)
            except InputError:
                continue
            RunOptions(overrides=overrides).profile(name)


def csv_text(frame: pandas.DataFrame) -> str:
    """``frame`` as CSV: cells that passed through unchanged, numbers at full precision, ``None`` blank."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(frame.columns)
    for row in frame.itertuples(index=False, name=None):
        writer.writerow("" if cell is None else cell for cell in row)
    return stream.getvalue()


def warn_of_near_misses(names: list[str]) -> None:
    """One line on stderr for each column that passes through but looks like a misspelt one of predict's."""
    from simulator.predict import INPUT_COLUMNS

    for name in names:
        if name in INPUT_COLUMNS:
            continue
        close = difflib.get_close_matches(name.lower(), INPUT_COLUMNS, n=1, cutoff=0.8)
        if close and close[0] not in names:
            print(
                f"iosim: column '{name}' is not read (did you mean '{close[0]}'?); it passes through", file=sys.stderr
            )


class _progress:
    """A progress bar on stderr for a long file on a terminal; entering gives the function to call after each row."""

    def __init__(self, rows: int) -> None:
        self._bar = None
        if rows >= _LONG_FILE_ROWS and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (TextColumn("predicting"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task("rows", total=rows)

    def __enter__(self) -> Any:
        if self._bar is None:
            return None
        self._bar.__enter__()
        return lambda: self._bar.advance(self._task)

    def __exit__(self, *error: Any) -> None:
        if self._bar is not None:
            self._bar.__exit__(*error)
