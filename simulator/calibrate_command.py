"""``iosim calibrate``: fit a profile's physical parameters to measurements and write them into its YAML file."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from simulator.csv_tables import read_table
from simulator.errors import InputError, did_you_mean

if TYPE_CHECKING:
    import pandas

    from simulator.calibration import Fitted, StageResult
    from simulator.physics import Physics
    from simulator.profile import Profile

#: Sides of a split: families that a fit may use, and families that only judge it.
SIDES = ("calibrate", "judge")


def read_split(path: Path) -> dict[str, str]:
    """``family -> calibrate|judge`` from a CSV with the columns ``family`` and ``side``."""
    table = read_table(path, comments=True, unique=True)
    for name in ("family", "side"):
        if name not in table.columns:
            raise InputError(f"{path}:1: column '{name}': missing; a split has the columns family,side")
    sides: dict[str, str] = {}
    for line, row in table.records():
        family, side = row["family"].strip(), row["side"].strip()
        if not family:
            raise InputError(f"{path}:{line}: family: blank; name a shape family of the measurements")
        if side not in SIDES:
            raise InputError(f"{path}:{line}: side: {side!r} of family {family!r}; write calibrate or judge")
        if sides.setdefault(family, side) != side:
            raise InputError(f"{path}:{line}: family: {family!r} is on both sides; keep one of its lines")
    return sides


def on_side(frame: pandas.DataFrame, split: dict[str, str], side: str) -> pandas.DataFrame:
    """The rows of ``frame`` whose family lies on ``side``; a family that the split does not name is an error."""
    if "family" not in frame:
        raise InputError("column 'family': missing from the measurements; a split assigns each row by its family")
    unknown = sorted(set(frame["family"]) - set(split))
    if unknown:
        raise InputError(f"family {unknown[0]!r} is not in the split file; add it as calibrate or judge")
    return frame[frame["family"].map(split) == side].reset_index(drop=True)


def register(app: typer.Typer) -> None:
    """Add ``calibrate`` to ``app``."""

    @app.command()
    def calibrate(
        gpu: Annotated[str, typer.Option(help="profile whose parameters are fitted: a name or a YAML file")],
        data: Annotated[list[Path], typer.Option(help="measured CSV (columns of predict and measured_*); repeatable")],
        split: Annotated[Path | None, typer.Option(help="CSV family,side: only 'calibrate' families are used")] = None,
        stage: Annotated[list[str] | None, typer.Option(help="only these stages; repeatable")] = None,
        dry_run: Annotated[bool, typer.Option("--dry-run", help="print the fit, write nothing")] = False,
        overrides: Annotated[
            list[str] | None,
            typer.Option("--set", metavar="KEY=VALUE", help="fit as if: l2_bytes=x2 (repeatable; with --dry-run)"),
        ] = None,
    ) -> None:
        """Fit the few physical parameters that a datasheet does not give, small parts first."""
        from rich.console import Console

        from simulator.calibration import calibrate as run
        from simulator.calibration import data_hash, residual_cases, usable_rows
        from simulator.calibration_stages import STAGES
        from simulator.confidence import residual_bands
        from simulator.overrides import parse_overrides
        from simulator.physics import Physics
        from simulator.profile import load_profile, write_calibration
        from simulator.validation import read_measurements

        if overrides and not dry_run:
            wanted = "put the change into a profile with 'base:' to keep its fit, or add --dry-run to see it"
            raise InputError(f"--set: a fit on a changed GPU does not belong into the file of {gpu}; {wanted}")
        profile = parse_overrides(overrides or (), load_profile(gpu))
        frame = read_measurements(data)
        if split is not None:
            frame = on_side(frame, read_split(split), "calibrate")
        names = [s.name for s in STAGES]
        for wanted in stage or ():
            if wanted not in names:
                hint = did_you_mean(wanted, names)
                raise InputError(f"--stage: {wanted!r} is unknown; {hint}stages are {', '.join(names)}")
        stages = [s for s in STAGES if not stage or s.name in stage]
        records = cast("list[dict[str, str]]", frame.to_dict("records"))
        if not any(usable_rows(records, s, profile) for s in stages):
            wanted = "times or counters ('measured_*') of a modelled kernel, and a 'family' that a stage fits"
            raise InputError(f"{', '.join(map(str, data))}: no row that a stage can use; give rows with {wanted}")
        console = Console(stderr=True)
        start = Physics.from_calibration(profile.calibration_parameters)
        with console.status("fitting") as status:

            def report(text: str) -> None:
                status.update(text)
                if not console.is_terminal:
                    console.print(text)

            physics, fitted, results = run(profile, records, stages, start, report)
            status.update("residuals of all calibration rows")
            bands = residual_bands(residual_cases(records, profile, physics))
        _print(fitted, results)
        if dry_run:
            return
        section = calibration_section(profile, physics, fitted, results, data_hash(data), [p.name for p in data])
        section["provenance"]["residual_bands"] = bands
        write_calibration(profile.path, section)
        typer.echo(f"written to {profile.path}")


def calibration_section(
    profile: Profile,
    physics: Physics,
    fitted: Sequence[Fitted],
    results: Sequence[StageResult],
    digest: str,
    files: list[str],
) -> dict[str, Any]:
    """The ``calibration`` section: every parameter with unit, bounds and what identified it; data and residuals."""
    from importlib.metadata import PackageNotFoundError, version

    from simulator.calibration_stages import FIXED_BY_MICROBENCHMARK
    from simulator.physics import Physics

    try:
        own_version = version("iosim")
    except PackageNotFoundError:
        own_version = "source checkout"
    by_name = {f.name: f for f in fitted}
    earlier = profile.calibration.parameters
    parameters = {}
    for name in Physics.names():
        unit, _ = Physics.describe(name)
        low, high = Physics.bounds(name)
        entry = {"value": round(getattr(physics, name), 6), "unit": unit, "low": low, "high": high}
        if name in by_name and by_name[name].identified:
            f = by_name[name]
            entry["identified_by"] = f"{f.stage}: {f.identified_by}"
            entry["interval_90_percent"] = [round(f.low90, 6), round(f.high90, 6)]
        elif name in by_name:
            entry["identified_by"] = "not identified by its rows: left at its value"
        elif name in earlier and earlier[name].identified_by:
            # of a stage that was not run again
            entry["identified_by"] = earlier[name].identified_by
            if interval := earlier[name].details.get("interval_90_percent"):
                entry["interval_90_percent"] = list(interval)
        else:
            entry["identified_by"] = FIXED_BY_MICROBENCHMARK.get(name, "default")
        parameters[name] = entry
    # stages that were not run again keep what they reached
    residuals = dict(profile.calibration.provenance.get("residuals", {}))
    residuals |= {r.stage: {"rows": r.rows, "mean_abs_log_error": round(r.after, 5)} for r in results}
    provenance = {
        "data": ", ".join(files),
        "data_sha256": digest,
        "iosim": own_version,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "residuals": residuals,
    }
    return {"parameters": parameters, "provenance": provenance}


def _print(fitted: Sequence[Fitted], results: Sequence[StageResult]) -> None:
    from rich.console import Console
    from rich.markup import escape

    from simulator.physics import Physics
    from simulator.tables import print_table

    rows = []
    for f in fitted:
        interval = f"{f.low90:.4g} … {f.high90:.4g}" if f.identified else "not identified, fixed"
        rows.append((f.name, f"{f.value:.4g}", interval, Physics.describe(f.name)[0], escape(f.identified_by)))
    console = Console()
    console.print("[bold]Fitted parameters[/]")
    headings = ("parameter", "value", "90 % interval", "unit", "identified by")
    print_table(console, headings, rows, left=("unit",), prose=("identified by",))
    console.print("[bold]Mean |log(predicted / measured)|[/]")
    stages = [(r.stage, str(r.rows), f"{r.before:.4f}", f"{r.after:.4f}", f"{r.median:.4f}") for r in results]
    print_table(console, ("stage", "rows", "before", "after", "median"), stages)
