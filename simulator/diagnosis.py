"""What a measured time says: is it possible, is it expected, and if not, which known cause gives it.

Every cause is simulated: the fallback path, the older instructions, the launches, other splits and so on. Nothing is
looked up in a table of symptoms.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from simulator.diagnosis_causes import Candidate, candidates
from simulator.dispatch.timing import FrameworkCall, time_of_chosen
from simulator.errors import InputError
from simulator.options import RunOptions
from simulator.physical_bounds import Bound, least_bytes, least_flops, peak_flops, physical_bounds
from simulator.physics import Physics
from simulator.problem import AttentionProblem, unmasked_pairs
from simulator.profile import Profile
from simulator.result import Result
from simulator.wording import scaled, three_digits, time_text

#: A cause is shown when it leaves no more than this share of the gap, and comes near when it leaves no more than that.
SHOWN_REST, NEAR_REST = 0.9, 0.35
#: A time this many times above the slowest cause, and this many times above the physical limit, is nothing that
#: hardware does.
FAULT_OVER_CAUSES, FAULT_OVER_LIMIT = 2.0, 10.0
#: An asynchronous timing sees the host's time for a call, which varies by about this factor.
_HOST_VARIES = 1.5


@dataclass(frozen=True)
class Suspicion:
    """A way in which a benchmark can be broken; ``fits`` when its own arithmetic gives the measured time."""

    name: str
    text: str
    fits: bool


@dataclass(frozen=True)
class Cause:
    """A known cause, simulated. ``share`` of the gap (in the logarithm of time) that it closes: 1 is all of it, more
    than 1 too much.

    ``fits``: the measured time lies in the cause's own 90 % interval.
    """

    name: str
    about: str
    result: Result
    share: float
    fits: bool


@dataclass(frozen=True)
class Diagnosis:
    """Everything that ``iosim explain`` says about ``measured_us``."""

    measured_us: float
    expected: Result
    bounds: tuple[Bound, ...]
    suspicions: tuple[Suspicion, ...]
    causes: tuple[Cause, ...]
    verdict: str

    @property
    def ratio(self) -> float:
        """Measured over predicted time."""
        return self.measured_us / self.expected.time_us

    @property
    def interval(self) -> tuple[float, float]:
        """The 90 % interval of the prediction in us; 20 % about it where the GPU has no calibration."""
        return interval_of(self.expected)

    @property
    def is_expected(self) -> bool:
        """Whether the measured time lies in the interval."""
        low, high = self.interval
        return low <= self.measured_us <= high

    @property
    def violated(self) -> tuple[Bound, ...]:
        """The physical bounds that the measured time is below."""
        return tuple(bound for bound in self.bounds if self.measured_us < bound.time_us)


def interval_of(result: Result) -> tuple[float, float]:
    """The 90 % interval of a prediction in us; 20 % about it where there is none."""
    if result.time_low_us is None or result.time_high_us is None:
        return 0.8 * result.time_us, 1.2 * result.time_us
    return result.time_low_us, result.time_high_us


def diagnose(
    measured_us: float,
    algorithm: str,
    problem: AttentionProblem,
    profile: Profile,
    conditions: RunOptions | None = None,
    *,
    implementation: str | None = None,
    framework: FrameworkCall | None = None,
) -> Diagnosis:
    """Explain ``measured_us`` of ``algorithm`` on ``problem``; ``framework`` adds what its dispatch would run instead.

    Raises :class:`InputError` for a time that is not positive and where ``algorithm`` itself cannot run.
    """
    from simulator import simulate

    if not (math.isfinite(measured_us) and measured_us > 0):
        raise InputError(f"time_us: {measured_us:g} is no time; give microseconds, such as 7400")
    conditions = conditions or RunOptions()
    expected = simulate(algorithm, problem, profile, implementation=implementation, **conditions.arguments())
    bounds = physical_bounds(problem, profile, conditions.l2_state)
    diagnosis = Diagnosis(measured_us, expected, bounds, (), (), "")
    if diagnosis.violated:
        suspicions = sorted(_suspicions(diagnosis, problem, profile, conditions), key=lambda one: not one.fits)
        diagnosis = replace(diagnosis, suspicions=tuple(suspicions))
    elif not diagnosis.is_expected:
        tried = list(_tried(diagnosis, problem, profile, conditions, framework))
        tried.sort(key=lambda cause: (not cause.fits, abs(1.0 - cause.share)))
        shown = tuple(cause for cause in tried if abs(1.0 - cause.share) <= SHOWN_REST)
        diagnosis = replace(diagnosis, causes=shown)
        return replace(diagnosis, verdict=_verdict(diagnosis, max((c.result.time_us for c in tried), default=0.0)))
    return replace(diagnosis, verdict=_verdict(diagnosis, 0.0))


def _tried(
    diagnosis: Diagnosis,
    problem: AttentionProblem,
    profile: Profile,
    conditions: RunOptions,
    framework: FrameworkCall | None,
) -> Iterator[Cause]:
    """The causes that can be simulated for this call."""
    expected, measured = diagnosis.expected, diagnosis.measured_us
    gap = math.log(measured / expected.time_us)

    def cause(name: str, about: str, result: Result) -> Cause:
        low, high = interval_of(result)
        share = math.log(result.time_us / expected.time_us) / gap
        return Cause(name, about, result, share, low <= measured <= high)

    if framework is not None:
        decision = framework.decide(problem, profile)
        timed = time_of_chosen(decision, problem, profile, conditions)
        chosen = decision.chosen
        if chosen and timed.result and timed.result.implementation != expected.implementation:
            about = f"{framework.base.name} runs {chosen.name}: {decision.why_order}"
            if decision.rejected:
                about = f"{framework.base.name} runs {chosen.name} ({decision.refusals})"
            yield cause("dispatch", about, timed.result)
    best: dict[str, Cause] = {}
    for candidate in candidates(expected, problem, profile, conditions):
        result = _simulated(candidate, profile)
        if result is None:
            continue
        found = cause(candidate.name, candidate.about, result)
        # of several values of one cause (splits, head dims) the nearest speaks for it
        if candidate.name not in best or abs(1.0 - found.share) < abs(1.0 - best[candidate.name].share):
            best[candidate.name] = found
    yield from best.values()


def _simulated(candidate: Candidate, profile: Profile) -> Result | None:
    from simulator import simulate

    try:
        result: Result = simulate(
            candidate.algorithm,
            candidate.problem,
            profile,
            implementation=candidate.implementation,
            **candidate.conditions.arguments(),
        )
        return result
    except InputError:
        # the cause cannot apply to this call: its kernels do not take it
        return None


def _suspicions(
    diagnosis: Diagnosis, problem: AttentionProblem, profile: Profile, conditions: RunOptions
) -> Iterator[Suspicion]:
    """What breaks a benchmark so that it beats physics, each with the arithmetic that speaks for or against it."""
    measured, expected = diagnosis.measured_us, diagnosis.expected
    low, high = diagnosis.interval
    physics = Physics.from_calibration(profile.calibration_parameters)
    from algorithms.host_calls import host_call_us

    host_us = host_call_us(
        expected.implementation, expected.problem.pass_, len(expected.kernels), physics.host_launch_us
    )
    yield Suspicion(
        "asynchronous timing",
        f"the host needs about {time_text(host_us)} to launch the call: a clock stopped without waiting for the GPU "
        f"shows that; synchronise, or time with events",
        measured <= _HOST_VARIES * host_us,
    )
    implied, dense = least_flops(problem) / measured * 1e6, peak_flops(problem.dtype, profile)
    yield Suspicion(
        "sparse peak",
        f"the time means {scaled(implied, 'FLOP/s')}; the dense peak is {scaled(dense, 'FLOP/s')}, with 2:4 sparsity "
        f"{scaled(2 * dense, 'FLOP/s')}, which attention cannot use",
        dense < implied <= 2 * dense,
    )
    for name, factor in _miscounts(problem):
        true_us = measured * factor
        yield Suspicion(
            "double-counted FLOPs",
            f"{name}: if the time was computed from TFLOP/s counted so, it was {time_text(true_us)}; "
            f"expected are {time_text(low)} to {time_text(high)}",
            low <= true_us <= high,
        )
    if conditions.l2_state == "cold" and any(bound.resource == "hbm" for bound in diagnosis.violated):
        read = least_bytes(problem)
        warm_us = max(bound.time_us for bound in physical_bounds(problem, profile, "warm"))
        yield Suspicion(
            "warm L2",
            f"the inputs are {scaled(read, 'B')}, L2 holds {scaled(profile.l2_bytes, 'B')}: repeated calls read them "
            f"from L2, in no less than {time_text(warm_us)}; flush it between calls",
            measured >= warm_us,
        )


def _miscounts(problem: AttentionProblem) -> Iterator[tuple[str, float]]:
    """Usual ways to count too many FLOPs, and by what factor."""
    pairs = sum(unmasked_pairs(q, k, -1, -1) for q, k in problem.sequences())
    if pairs != problem.unmasked_pairs():
        yield "the whole square counted, though the mask leaves a part of it", pairs / problem.unmasked_pairs()
    yield "a multiply-add counted twice", 2.0
    if problem.pass_ == "fwd":
        yield "the backward pass counted too", 3.5


def _verdict(diagnosis: Diagnosis, slowest_us: float) -> str:
    measured, ratio = diagnosis.measured_us, diagnosis.ratio
    if diagnosis.violated:
        worst = diagnosis.violated[0]
        fitting = [s.name for s in diagnosis.suspicions if s.fits]
        text = f"impossible: {three_digits(worst.time_us / measured)} times faster than {worst.resource} allows"
        likely = f", and {' or '.join(dict.fromkeys(fitting))} fits" if fitting else ""
        return f"{text}: a broken benchmark{likely}"
    if diagnosis.is_expected:
        return "as expected: the time lies in the model's 90 % interval"
    direction = f"{three_digits(max(ratio, 1 / ratio))} times the model" + ("" if ratio > 1 else "'s speed")
    causes = [cause for cause in diagnosis.causes if cause.fits]
    if causes:
        return f"{direction}: {causes[0].name} explains it"
    roofline = measured / diagnosis.bounds[0].time_us
    slowest_us = max(slowest_us, diagnosis.expected.time_us)
    if measured > FAULT_OVER_CAUSES * slowest_us and roofline > FAULT_OVER_LIMIT:
        return (
            f"{direction}, {three_digits(roofline)} times the physical limit and far above every cause: a software "
            f"fault (first call, compilation, host synchronisation, another process), not bandwidth or FLOPs"
        )
    if diagnosis.causes and abs(1.0 - diagnosis.causes[0].share) <= NEAR_REST:
        best = diagnosis.causes[0]
        return f"{direction}: {best.name} comes nearest ({time_text(best.result.time_us)})"
    return f"{direction}: no single known cause explains it"
