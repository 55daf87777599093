"""``iosim explain``: whether a measured time is possible, expected, and which known cause gives it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from simulator.errors import InputError
from simulator.options import RunOptions, takes_problem
from simulator.problem import AttentionProblem
from simulator.tables import print_labelled, print_table

if TYPE_CHECKING:
    from rich.console import Console

    from simulator.diagnosis import Diagnosis


def register(app: typer.Typer) -> None:
    """Add the ``explain`` command to ``app``."""
    app.command("explain")(explain)


@takes_problem()
def explain(
    *,
    problem: AttentionProblem,
    conditions: RunOptions,
    gpu: Annotated[str, typer.Option("--gpu", help="A name of 'iosim gpus' or a YAML file.")] = "h200_sxm",
    algorithm: Annotated[
        str | None,
        typer.Option("--algorithm", help="What should have run: fa3, fa2:torch_flash, auto (default: the fastest)."),
    ] = None,
    time_us: Annotated[float | None, typer.Option("--time-us", help="The measured time in microseconds.")] = None,
    tflops: Annotated[
        float | None, typer.Option("--tflops", help="Instead of it: the TFLOP/s that were reported.")
    ] = None,
    framework: Annotated[
        str | None, typer.Option("--framework", help="Also what this framework's dispatch runs (iosim dispatch).")
    ] = None,
    framework_version: Annotated[str | None, typer.Option("--framework-version", help="Its version.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write everything.")] = None,
) -> None:
    """Explain a measured time: its distance from the model, the physical limit, and known causes, each simulated."""
    from rich.console import Console

    from simulator.comparison import parse_algorithm
    from simulator.diagnosis import diagnose
    from simulator.dispatch.automatic import AUTO, DEFAULT_FRAMEWORK, framework_call, pick
    from simulator.dispatch.timing import fastest_algorithm

    profile = conditions.profile(gpu)
    measured_us = _measured_us(time_us, tflops, problem)
    call = framework_call(framework, framework_version)
    if algorithm == AUTO:
        default = call or framework_call(DEFAULT_FRAMEWORK)
        assert default is not None
        picked = pick(default, problem, profile)
        name, implementation, problem = picked.algorithm, picked.implementation, picked.problem
    else:
        name, implementation = parse_algorithm(algorithm or fastest_algorithm(problem, profile))
    diagnosis = diagnose(measured_us, name, problem, profile, conditions, implementation=implementation, framework=call)
    if json_file is not None:
        from simulator.atomic_write import write_json

        write_json(json_file, diagnosis_data(diagnosis))
    print_diagnosis(Console(), diagnosis)


def _measured_us(time_us: float | None, tflops: float | None, problem: AttentionProblem) -> float:
    if time_us is not None and tflops is None:
        return time_us
    if tflops is None or time_us is not None:
        raise InputError("--time-us: give the measured time, or --tflops, and not both")
    if not tflops > 0:
        raise InputError(f"--tflops: {tflops:g} is no rate; give TFLOP/s, such as 600")
    return problem.flops() / (tflops * 1e12) * 1e6


def print_diagnosis(console: Console, diagnosis: Diagnosis) -> None:
    """The verdict and the numbers behind it."""
    from rich.markup import escape

    from simulator.wording import problem_text, scaled, three_digits, time_text

    d, expected = diagnosis, diagnosis.expected
    low, high = d.interval
    tflops = three_digits(expected.flops / d.measured_us / 1e6)
    print_labelled(console, "Call", problem_text(expected.problem))
    print_labelled(console, "Measured", f"{time_text(d.measured_us)}, {tflops} TFLOP/s")
    kernel = f"{expected.algorithm}:{expected.implementation} on {expected.gpu}"
    where = "in it" if d.is_expected else "above it" if d.measured_us > high else "below it"
    about = "90 % interval" if expected.time_low_us is not None else "20 % about it (no calibration)"
    text = f"{time_text(expected.time_us)} ({kernel}), {about} {time_text(low)} to {time_text(high)}: {where}"
    print_labelled(console, "Expected", text)
    for bound in d.bounds:
        unit = "FLOP" if bound.resource == "tensor" else "B"
        state = "VIOLATED" if bound in d.violated else f"{three_digits(d.measured_us / bound.time_us)} times that"
        amount = f"{scaled(bound.amount, unit)} at {scaled(bound.rate_per_s, unit + '/s')}"
        line = f"at least {time_text(bound.time_us)} in {bound.resource} ({amount}): {state}"
        print_labelled(console, "Limit", line, "red" if bound in d.violated else "")
    rows: list[tuple[str, ...]]
    headings: tuple[str, ...]
    if d.suspicions:
        rows = [("fits" if s.fits else "does not", escape(s.name), escape(s.text)) for s in d.suspicions]
        headings = ("fits", "broken how", "the arithmetic")
        print_table(console, headings, rows, left=headings[:-1], prose=headings[-1:])
    if d.causes:
        rows = [
            (f"{100 * c.share:.0f} %", "yes" if c.fits else "no", time_text(c.result.time_us), *map(escape, said))
            for c in d.causes
            for said in [(c.name, c.about)]
        ]
        headings = ("closes", "fits", "time", "cause", "meaning")
        print_table(console, headings, rows, left=headings[:-1], prose=headings[-1:])
    print_labelled(console, "Verdict", d.verdict)
    for warning in expected.warnings:
        print_labelled(console, "", warning, "yellow")


def diagnosis_data(diagnosis: Diagnosis) -> dict[str, Any]:
    """Everything that the command prints, as JSON-ready data."""
    d = diagnosis
    low, high = d.interval
    return {
        "measured_us": d.measured_us,
        "predicted_us": d.expected.time_us,
        "interval_us": [low, high],
        "algorithm": d.expected.algorithm,
        "implementation": d.expected.implementation,
        "expected": d.is_expected,
        "bounds_us": {bound.resource: bound.time_us for bound in d.bounds},
        "violated": [bound.resource for bound in d.violated],
        "suspicions": [{"name": s.name, "text": s.text, "fits": s.fits} for s in d.suspicions],
        "causes": [
            {"name": c.name, "about": c.about, "time_us": c.result.time_us, "share": c.share, "fits": c.fits}
            for c in d.causes
        ],
        "verdict": d.verdict,
        "warnings": list(d.expected.warnings),
    }
