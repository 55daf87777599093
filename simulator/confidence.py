"""How far to trust a prediction: its interval from calibration residuals, and what was never checked.

A calibration keeps, per algorithm, pass and kind of case (decode, short, long), the 5th and 95th percentile of
measured over predicted time and the ranges of the shapes that it saw. They are read from the profile's
``calibration.provenance.residual_bands``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from simulator.problem import AttentionProblem
from simulator.profile import UNREAD_KEYS, Profile, profile_folder
from simulator.result import Result

#: Predicted times below this are judged with the short cases of their group.
SHORT_US = 40.0
#: A group needs this many residuals for a band of its own; smaller ones take their algorithm's.
LEAST_ROWS = 12
_RANGES = ("seqlen_q", "seqlen_k", "head_dim", "heads_total", "group")


def kind_of(problem: AttentionProblem, time_us: float) -> str:
    """``decode``, ``short`` or ``long``: residuals differ between them."""
    if problem.pass_ == "fwd" and problem.seqlen_q <= 16 < problem.seqlen_k:
        return "decode"
    return "short" if time_us < SHORT_US else "long"


def shape_of(problem: AttentionProblem) -> dict[str, int]:
    """The quantities whose validated range is recorded."""
    return {
        "seqlen_q": problem.seqlen_q,
        "seqlen_k": problem.seqlen_k,
        "head_dim": problem.head_dim,
        "heads_total": problem.batch * problem.heads,
        "group": problem.group,
    }


def residual_bands(cases: Iterable[tuple[str, AttentionProblem, float, float, str]]) -> dict[str, dict[str, Any]]:
    """Bands and ranges of ``cases``: an iterable of (algorithm, problem, predicted µs, measured µs, shape family).

    A band is the 5th to 95th percentile of measured over predicted time, stretched about its middle until, family by
    family, the band of the *other* families holds nine tenths of the left-out one: new shapes err more than old ones.
    """
    groups: dict[str, list[tuple[float, dict[str, int], str]]] = {}
    for algorithm, problem, predicted, measured, family in cases:
        ratio = math.log(measured / predicted)
        group = f"{algorithm}/{problem.pass_}"
        for key in (f"{group}/{kind_of(problem, predicted)}", group, "all"):
            groups.setdefault(key, []).append((ratio, shape_of(problem), family))
    bands = {}
    for key, rows in sorted(groups.items()):
        if len(rows) < LEAST_ROWS and key != "all":
            continue
        stretch = _stretch([(ratio, family) for ratio, _, family in rows])
        low, high = _band([ratio for ratio, _, _ in rows], stretch)
        entry: dict[str, Any] = {"n": len(rows), "stretch": stretch, "low": round(math.exp(low), 4)}
        entry["high"] = round(math.exp(high), 4)
        for name in _RANGES:
            values = [shape[name] for _, shape, _ in rows]
            entry[name] = [min(values), max(values)]
        bands[key] = entry
    return bands


def _band(ratios: list[float], stretch: float) -> tuple[float, float]:
    ordered = sorted(ratios)
    low, high = _quantile(ordered, 0.05), _quantile(ordered, 0.95)
    middle = _quantile(ordered, 0.5)
    return middle + stretch * (low - middle), middle + stretch * (high - middle)


def _stretch(rows: list[tuple[float, str]]) -> float:
    """The least stretch at which bands of the other families hold 90 % of the left-out families' rows."""
    families = sorted({family for _, family in rows})
    if len(families) < 2:
        return 1.5
    for stretch in (1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0):
        held = 0
        for family in families:
            low, high = _band([r for r, f in rows if f != family], stretch)
            held += sum(low <= r <= high for r, f in rows if f == family)
        if held >= 0.9 * len(rows):
            return stretch
    return 3.0


def _quantile(ordered: list[float], q: float) -> float:
    """Quantile of sorted values with the finite-sample correction of a prediction interval."""
    n = len(ordered)
    edge = q * (n + 1) - 1
    low = min(max(math.floor(edge), 0), n - 1)
    high = min(low + 1, n - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * min(max(edge - low, 0.0), 1.0)


def with_confidence(result: Result, profile: Profile) -> Result:
    """``result`` with its 90 % interval, and warnings about what the calibration never saw and what of a changed GPU
    changes nothing."""
    unread = unread_changes(profile)
    if unread:
        line = f"{', '.join(unread)}: changed, but the time of one attention call does not depend on it"
        result = replace(result, warnings=(*result.warnings, line))
    bands = profile.calibration.provenance.get("residual_bands")
    if not bands:
        return replace(result, warnings=(*result.warnings, f"{profile.name} has no calibration: time is unvalidated"))
    problem = result.problem
    # both passes in one call were never measured as such: it is as good as the worse of them
    passes = ("fwd", "bwd") if problem.pass_ == "fwd_bwd" else (problem.pass_,)
    keys = [_band_key(bands, result.algorithm, pass_, kind_of(problem, result.time_us)) for pass_ in passes]
    low = result.time_us * min(bands[key]["low"] for key in keys)
    high = result.time_us * max(bands[key]["high"] for key in keys)
    warnings = list(result.warnings)
    if "all" in keys:
        never = [pass_ for pass_, key in zip(passes, keys, strict=True) if key == "all"]
        rest = "too few calibrating rows for an interval of its own, it has that of all cases"
        warnings.append(f"{result.algorithm} {' and '.join(never)}: {rest}")
    else:
        warnings += dict.fromkeys(text for key in keys for text in _outside(bands[key], problem))
    source = profile.calibration.source
    if source is not None and source != profile.name:
        warnings.append(f"interval is {source}'s: {profile.name} was not calibrated itself")
    return replace(result, time_low_us=low, time_high_us=high, warnings=tuple(warnings))


def unread_changes(profile: Profile) -> list[str]:
    """Keys that ``--set``, or a user's own file with ``base:``, changed although no prediction reads them."""
    own = profile.path if profile.base and not Path(profile.path).is_relative_to(profile_folder()) else None
    return [
        key
        for key in sorted(UNREAD_KEYS & set(profile.values))
        if profile.values[key].source.startswith("--set ")
        or (own is not None and profile.values[key].location.rpartition(":")[0] == own)
    ]


def _band_key(bands: Mapping[str, Any], algorithm: str, pass_: str, kind: str) -> str:
    """The narrowest group of residuals that holds such a call."""
    return next(key for key in (f"{algorithm}/{pass_}/{kind}", f"{algorithm}/{pass_}", "all") if key in bands)


def _outside(band: Mapping[str, Any], problem: AttentionProblem) -> list[str]:
    found = []
    for name, value in shape_of(problem).items():
        low, high = band.get(name, (value, value))
        if value < low or value > high:
            found.append(f"{name} {value} lies outside the validated {low} to {high}")
    return found
