"""Fitting the few physical parameters to measurements, small parts first.

Each stage frees some parameters and fits them to the rows that identify them; the others stay. Residuals are
logarithms of predicted over measured, so a factor of two counts the same up or down. A parameter that its rows do
not constrain is put back to its default and said so.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import fsum
from pathlib import Path

import numpy as np

from algorithms import build_program
from simulator.errors import InputError
from simulator.physics import Physics
from simulator.predict import Case, parse_case
from simulator.problem import AttentionProblem
from simulator.profile import Profile
from simulator.result import Result

#: A parameter whose one-sigma interval is wider than this share of its bounds is not identified by its rows.
UNIDENTIFIED_SHARE = 0.5


@dataclass(frozen=True)
class Stage:
    """Parameters fitted together, the rows that identify them and what is compared.

    ``target`` is ``time`` (µs, at the modelled clock), ``time_at_clock`` (µs, at the counted clock), ``clock`` (MHz)
    or ``hbm_read`` (bytes).
    """

    name: str
    parameters: tuple[str, ...]
    rows: Callable[[Mapping[str, str]], bool]
    target: str
    identified_by: str
    most_rows: int = 30


@dataclass(frozen=True)
class Fitted:
    """One parameter's value, its 90 % interval, and the stage that fitted it."""

    name: str
    value: float
    low90: float
    high90: float
    stage: str
    identified_by: str
    identified: bool


@dataclass(frozen=True)
class StageResult:
    """What a stage achieved on its own rows: count, mean and median absolute log error before and after."""

    stage: str
    rows: int
    before: float
    after: float
    median: float


@dataclass(frozen=True)
class _Row:
    case: Case
    target: float
    clock_mhz: float | None
    family: str = ""


def _number(row: Mapping[str, str], name: str) -> float:
    text = row.get(name, "")
    return float(text) if text not in ("", None) else math.nan


_TARGETS = {
    "time": "measured_time_us",
    "time_at_clock": "measured_time_us",
    "clock": "measured_sm_clock_mhz",
    "hbm_read": "measured_hbm_read_bytes",
}


def usable_rows(rows: Iterable[Mapping[str, str]], stage: Stage, profile: Profile) -> list[_Row]:
    """The rows that ``stage`` selects, has a target for and can simulate; thinned evenly to ``most_rows``."""
    found = []
    for row in rows:
        target = _number(row, _TARGETS[stage.target])
        clock = _number(row, "measured_sm_clock_mhz")
        if not stage.rows(row) or not target > 0 or (stage.target == "time_at_clock" and not clock > 0):
            continue
        try:
            case = parse_case(dict(row), profile.name)
            build_program(case.algorithm, case.problem, profile, case.implementation)
        except InputError:
            continue
        found.append(_Row(case, target, clock if stage.target == "time_at_clock" else None, row.get("family", "")))
    if len(found) > stage.most_rows:
        keep = np.linspace(0, len(found) - 1, stage.most_rows).round().astype(int)
        found = [found[i] for i in keep]
    return found


def simulate_row(row: _Row, profile: Profile, physics: Physics, clock_mhz: float | None) -> Result:
    """The :class:`~simulator.result.Result` of one row under trial parameters, at a counted ``clock_mhz`` if given."""
    from simulator.clock import with_held_clock
    from simulator.simulation import simulate

    case = row.case
    if clock_mhz is not None:
        physics = with_held_clock(physics)
    return simulate(
        case.algorithm,
        case.problem,
        profile,
        implementation=case.implementation,
        l2_state=case.conditions.l2_state,
        timing=case.conditions.timing,
        clock_mhz=clock_mhz or case.conditions.clock_mhz,
        physics=physics,
    )


def predicted(row: _Row, profile: Profile, physics: Physics, target: str) -> float:
    """The model's value for one row under trial parameters."""
    result = simulate_row(row, profile, physics, row.clock_mhz)
    if target == "hbm_read":
        return float(result.hbm_read_bytes)
    return result.time_us


def clock_of(row: _Row, profile: Profile, physics: Physics) -> Callable[[Physics], float]:
    """The modelled SM clock (MHz) of ``row`` as a function of the clock's parameters alone.

    What the launch does to the clock is simulated once, at the counted clock; trial parameters only map it to MHz.
    """
    from simulator.clock import loaded_clock_hz
    from simulator.clock_search import kernel_activity
    from simulator.simulation import Conditions

    result = simulate_row(row, profile, physics, row.target)
    calls = Conditions(row.case.conditions.l2_state).calls
    activities = [(k.time_us, kernel_activity(k, profile, calls)) for k in result.kernels]
    total = fsum(time for time, _ in activities)

    def clock_mhz(trial: Physics) -> float:
        return fsum(t * loaded_clock_hz(profile, trial, a) for t, a in activities) / total / 1e6

    return clock_mhz


def fit_stage(
    stage: Stage,
    rows: Sequence[_Row],
    profile: Profile,
    physics: Physics,
    report: Callable[[str], None] = lambda s: None,
) -> tuple[Physics, list[Fitted], StageResult]:
    """Fit ``stage``'s parameters to ``rows``, starting from ``physics``."""
    from scipy.optimize import least_squares

    names = stage.parameters
    bounds = np.array([Physics.bounds(n) for n in names])
    span = bounds[:, 1] - bounds[:, 0]
    start = np.clip([getattr(physics, n) for n in names], bounds[:, 0] + 1e-3 * span, bounds[:, 1] - 1e-3 * span)

    clocks = [clock_of(r, profile, physics) for r in rows] if stage.target == "clock" else []

    def residuals(unit: np.ndarray) -> np.ndarray:
        values = bounds[:, 0] + unit * span
        trial = replace(physics, **dict(zip(names, map(float, values), strict=True)))
        if clocks:
            out = np.array([math.log(clock(trial) / r.target) for clock, r in zip(clocks, rows, strict=True)])
        else:
            out = np.array([math.log(predicted(r, profile, trial, stage.target) / r.target) for r in rows])
        report(f"{stage.name}: mean |log error| {np.abs(out).mean():.4f}")
        return out

    unit0 = (start - bounds[:, 0]) / span
    before = residuals(unit0)
    fit = least_squares(
        residuals,
        unit0,
        bounds=(0.0, 1.0),
        loss="soft_l1",
        f_scale=0.05,
        diff_step=0.04,
        max_nfev=9,
        xtol=3e-4,
        ftol=3e-4,
    )
    after = residuals(fit.x)
    sigma = _sigmas(fit.jac, after)
    fitted, values = [], {}
    for i, name in enumerate(names):
        identified = bool(sigma[i] < UNIDENTIFIED_SHARE)
        value = float(bounds[i, 0] + fit.x[i] * span[i]) if identified else float(getattr(physics, name))
        margin = 1.645 * min(sigma[i], 1.0) * span[i]
        values[name] = value
        low, high = max(bounds[i, 0], value - margin), min(bounds[i, 1], value + margin)
        fitted.append(Fitted(name, value, float(low), float(high), stage.name, stage.identified_by, identified))
    size = np.abs(after)
    mean_before = float(np.abs(before).mean())
    summary = StageResult(stage.name, len(rows), mean_before, float(size.mean()), float(np.median(size)))
    return replace(physics, **values), fitted, summary


def _sigmas(jacobian: np.ndarray, residuals: np.ndarray) -> np.ndarray:
    """One-sigma uncertainties (in units of the bounds' width) from the fit's curvature."""
    n, k = jacobian.shape
    variance = float((residuals**2).sum()) / max(1, n - k)
    normal = jacobian.T @ jacobian + 1e-9 * np.eye(k)
    sigmas: np.ndarray = np.sqrt(np.clip(np.diag(np.linalg.inv(normal)) * variance, 0, None))
    return sigmas


def calibrate(
    profile: Profile,
    rows: Sequence[Mapping[str, str]],
    stages: Sequence[Stage],
    physics: Physics | None = None,
    report: Callable[[str], None] = lambda s: None,
) -> tuple[Physics, list[Fitted], list[StageResult]]:
    """Run ``stages`` in order on the calibration ``rows`` (text cells; columns of ``predict`` and ``measured_*``)."""
    physics = physics or Physics()
    fitted: list[Fitted] = []
    results: list[StageResult] = []
    for stage in stages:
        chosen = usable_rows(rows, stage, profile)
        if len(chosen) < len(stage.parameters) + 2:
            report(f"{stage.name}: only {len(chosen)} rows, {len(stage.parameters)} parameters left at their values")
            continue
        physics, found, result = fit_stage(stage, chosen, profile, physics, report)
        fitted += found
        results.append(result)
    return physics, fitted, results


def residual_cases(
    rows: Sequence[Mapping[str, str]], profile: Profile, physics: Physics
) -> Iterator[tuple[str, AttentionProblem, float, float, str]]:
    """(algorithm, problem, predicted µs, measured µs, family) of every row that can be simulated."""
    everything = Stage("residuals", (), lambda row: (row.get("timing") or "kernel") != "eager", "time", "", 10**9)
    for row in usable_rows(rows, everything, profile):
        yield row.case.algorithm, row.case.problem, predicted(row, profile, physics, "time"), row.target, row.family


def data_hash(paths: Iterable[str | Path]) -> str:
    """SHA-256 (first 16 hex digits) of the files' contents in order."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(Path(path).read_bytes())
    return digest.hexdigest()[:16]
