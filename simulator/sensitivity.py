"""What each number of a GPU is worth: elasticities of time and bytes, and where the limiter changes.

An elasticity ``e`` says that 1 % more of a parameter changes the time by ``e`` %: -1 is full worth, 0 none. It is the
slope of log time over log parameter, fitted to a few steps on each side. Which CTA ends last is a matter of luck that
every change reshuffles, most where long CTAs come last; the fit's standard error says how much of a slope that may be.
A step across a threshold (another number of resident CTAs, another tile) is no slope: it is left out and told.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import fsum
from typing import Any, cast

from simulator.errors import InputError
from simulator.options import RunOptions
from simulator.overrides import apply_overrides
from simulator.problem import AttentionProblem
from simulator.profile import GROUP_KEYS, Profile, key_of
from simulator.result import Result
from simulator.sweep.spec import SWEEP_EVENT_BUDGET

#: The numbers of a profile that the model's results depend on -> how people call them.
PARAMETERS = {
    "hbm_bandwidth_bytes_per_s": "HBM bandwidth",
    "hbm_latency_s": "HBM latency",
    "l2_bytes": "L2 size",
    "l2_bandwidth_bytes_per_s": "L2 bandwidth",
    "l2_latency_s": "L2 latency",
    "l2_to_sm_bandwidth_bytes_per_cycle_per_sm": "SM's port to L2",
    "smem_bytes_per_sm": "SMEM size",
    "smem_bandwidth_bytes_per_cycle_per_sm": "SMEM bandwidth",
    "registers_per_sm": "registers",
    "tensor_flop_per_cycle_per_sm": "tensor rate",
    "exp_per_cycle_per_sm": "exp rate",
    "fma_per_cycle_per_sm": "FP32 rate",
    "alu_per_cycle_per_sm": "ALU rate",
    "convert_per_cycle_per_sm": "conversion rate",
    "issue_slots_per_cycle_per_sm": "issue slots",
    "num_sms": "SMs",
    "max_clock_hz": "SM clock",
}
#: Size of a step as a share of the parameter, and the steps that a slope is fitted to; where that slope is uncertain
#: by more than UNCERTAIN, further ones too.
STEP = 0.05
STEPS = (-2, -1, 1, 2)
FURTHER_STEPS = (-4, -3, 3, 4)
UNCERTAIN = 0.03
#: Factors at which the limiter is looked for, and how closely its change is then located.
LADDER = (1 / 8, 1 / 4, 1 / 2, 2**-0.5, 2**0.5, 2.0, 4.0, 8.0)
LIMITER_PRECISION = 0.03


@dataclass(frozen=True)
class Change:
    """The limiter becomes ``limiter`` when the parameter is multiplied by ``factor``."""

    factor: float
    limiter: str


@dataclass(frozen=True)
class Sensitivity:
    """What one parameter is worth to one algorithm.

    ``time`` and the bytes are elasticities, ``time_error`` the standard error of the first. ``low_us``/``high_us`` are
    the times one step below and above (``None``: cannot run there). ``note`` names steps that the slopes leave out and
    why: cannot run, or across a threshold; ``crossed`` are those across a threshold. ``below``/``above`` are the
    nearest changes of the limiter, ``None`` where there is none within a factor of 8.
    """

    algorithm: str
    key: str
    name: str
    value: float
    base_us: float
    limiter: str
    time: float
    time_error: float
    hbm_bytes: float
    l2_bytes: float
    low_us: float | None
    high_us: float | None
    below: Change | None = None
    above: Change | None = None
    note: str = ""
    crossed: tuple[int, ...] = ()

    def row(self) -> dict[str, Any]:
        """The numbers as a row of a CSV file."""
        row = {
            "algorithm": self.algorithm,
            "parameter": self.key,
            "value": self.value,
            "time_elasticity": self.time,
            "time_elasticity_error": self.time_error,
            "hbm_bytes_elasticity": self.hbm_bytes,
            "l2_bytes_elasticity": self.l2_bytes,
            "time_us": self.base_us,
            "time_us_one_step_below": self.low_us,
            "time_us_one_step_above": self.high_us,
            "limiter": self.limiter,
        }
        for side, change in (("below", self.below), ("above", self.above)):
            row[f"limiter_{side}_factor"] = change.factor if change else None
            row[f"limiter_{side}"] = change.limiter if change else ""
        return row | {"note": self.note}


@dataclass
class Bench:
    """One algorithm on one problem, simulated on variants of one GPU; remembers what it has simulated."""

    algorithm: str
    problem: AttentionProblem
    profile: Profile
    conditions: RunOptions
    hypothetical: bool = False
    _seen: dict[tuple[object, ...], Result | str] = field(default_factory=dict)

    def result(self, texts: dict[str, str], event_budget: int | None = None) -> Result:
        """With ``--set`` texts applied; :class:`InputError` (also from memory) when that cannot run."""
        from simulator import simulate
        from simulator.comparison import parse_algorithm

        known = (tuple(texts.items()), event_budget)
        if known not in self._seen:
            name, implementation = parse_algorithm(self.algorithm)
            try:
                self._seen[known] = simulate(
                    name,
                    self.problem,
                    apply_overrides(self.profile, texts),
                    implementation=implementation,
                    hypothetical=self.hypothetical,
                    event_budget=event_budget,
                    **self.conditions.arguments(),
                )
            except InputError as error:
                # the name of a changed GPU says no more than the factor, in many digits
                changed = re.escape(self.profile.name.partition("[")[0]) + r"\[[^]]*\]"
                self._seen[known] = re.sub(changed, lambda _: self.profile.name, str(error))
        found = self._seen[known]
        if isinstance(found, str):
            raise InputError(found)
        return found

    def scaled(self, key: str, factor: float, event_budget: int | None = None) -> Result:
        """With ``key`` multiplied by ``factor``."""
        return self.result({key: f"x{factor!r}"} if factor != 1.0 else {}, event_budget)


def actual_factor(profile: Profile, key: str, factor: float) -> float:
    """The factor that ``x{factor}`` comes to: whole numbers are rounded."""
    if key in GROUP_KEYS or not key_of(key).integer:
        return factor
    return max(1, round(profile.values[key].value * factor)) / profile.values[key].value


def sensitivities(
    problem: AttentionProblem,
    profile: Profile,
    algorithms: Iterable[str],
    conditions: RunOptions,
    *,
    parameters: Iterable[str] = tuple(PARAMETERS),
    step: float = STEP,
    limits: bool = True,
    hypothetical: bool = False,
    on_parameter: Callable[[], object] | None = None,
) -> list[Sensitivity]:
    """Every parameter for every algorithm, the most valuable first. ``limits`` looks for changes of the limiter too.

    Raises :class:`InputError` when an algorithm does not run on ``profile`` itself.
    """
    found = []
    for algorithm in algorithms:
        bench = Bench(algorithm, problem, profile, conditions, hypothetical)
        own = []
        for key in parameters:
            own.append(_sensitivity(bench, key, step, limits))
            if on_parameter is not None:
                on_parameter()
        found += sorted(own, key=lambda s: -abs(s.time))
    return found


def _sensitivity(bench: Bench, key: str, step: float, limits: bool) -> Sensitivity:
    base = bench.scaled(key, 1.0)
    near: dict[int, float] = {}
    crossed: list[int] = []
    points, notes = [(1.0, base)], []

    def look(steps: Iterable[int]) -> None:
        for many in steps:
            factor = actual_factor(bench.profile, key, (1.0 + step) ** many)
            try:
                if factor == 1.0:
                    raise InputError(f"a step of {100 * step:g} % rounds to nothing")
                there = bench.scaled(key, factor)
            except InputError as error:
                notes.append(f"x{factor:.3g}: {error}")
                continue
            near[many] = there.time_us
            threshold = _threshold(base, there)
            if threshold:
                crossed.append(many)
                notes.append(f"x{factor:.3g}: {threshold}")
            else:
                points.append((factor, there))

    look(STEPS)
    time, error = _slope([(factor, r.time_us) for factor, r in points])
    if error > UNCERTAIN and not notes:
        look(FURTHER_STEPS)
        time, error = _slope([(factor, r.time_us) for factor, r in points])
    hbm, _ = _slope([(factor, r.hbm_read_bytes + r.hbm_write_bytes) for factor, r in points])
    l2, _ = _slope([(factor, r.l2_read_bytes + r.l2_write_bytes) for factor, r in points])
    return Sensitivity(
        bench.algorithm,
        key,
        PARAMETERS.get(key, key),
        bench.profile.values[key].value if key in bench.profile.values else 1.0,
        base.time_us,
        base.limiter,
        time,
        error,
        hbm,
        l2,
        near.get(-1),
        near.get(1),
        _limiter_change(bench, key, -1) if limits else None,
        _limiter_change(bench, key, 1) if limits else None,
        "; ".join(notes),
        tuple(crossed),
    )


def _threshold(base: Result, there: Result) -> str:
    """What makes ``there`` another schedule than ``base``: CTAs an SM or tile; "" when nothing does."""
    if base.attributes.get("tile") != there.attributes.get("tile"):
        before, after = ("x".join(map(str, cast(Sequence[int], r.attributes["tile"]))) for r in (base, there))
        return f"tile {after} instead of {before}, a threshold"
    for a, b in zip(base.kernels, there.kernels, strict=False):
        if a.ctas_per_sm != b.ctas_per_sm:
            plural = "" if b.ctas_per_sm == 1 else "s"
            return f"{b.ctas_per_sm} CTA{plural} of {b.name} an SM instead of {a.ctas_per_sm}, a threshold"
    return "" if len(base.kernels) == len(there.kernels) else "other kernels, a threshold"


def _slope(points: list[tuple[float, float]]) -> tuple[float, float]:
    """Least-squares slope of log quantity over log factor, and its standard error (0 for fewer than three points)."""
    if len(points) < 2 or any(quantity <= 0 for _, quantity in points):
        return 0.0, 0.0
    x = [math.log(factor) for factor, _ in points]
    y = [math.log(quantity) for _, quantity in points]
    middle_x, middle_y = fsum(x) / len(x), fsum(y) / len(y)
    spread = fsum((a - middle_x) ** 2 for a in x)
    slope = fsum((a - middle_x) * (b - middle_y) for a, b in zip(x, y, strict=True)) / spread
    left = fsum((b - middle_y - slope * (a - middle_x)) ** 2 for a, b in zip(x, y, strict=True))
    return slope, math.sqrt(left / (len(points) - 2) / spread) if len(points) > 2 else 0.0


def _limiter_change(bench: Bench, key: str, side: int) -> Change | None:
    """The nearest factor above (``side`` 1) or below (-1) at which something else limits."""

    def limiter(factor: float) -> str | None:
        """``None`` where it cannot run, or where rounding leaves nothing of the factor."""
        factor = actual_factor(bench.profile, key, factor)
        try:
            return bench.scaled(key, factor, SWEEP_EVENT_BUDGET).limiter
        except InputError:
            return None

    base, last = limiter(1.0), 1.0
    for factor in sorted((f for f in LADDER if (f > 1) == (side > 0)), key=lambda f: abs(math.log(f))):
        there = limiter(factor)
        if there is None:
            return None
        if there != base:
            while abs(math.log(factor / last)) > LIMITER_PRECISION:
                middle = math.sqrt(factor * last)
                between = limiter(middle)
                if between in (base, None):
                    last = middle
                else:
                    factor, there = middle, between
            return Change(factor, there)
        last = factor
    return None
