"""``algorithm=auto``: the kernel that a framework would pick, and a warning where it would not run the one asked."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from simulator.dispatch.decide import Decision
from simulator.dispatch.rule_files import find_rules
from simulator.dispatch.timing import FrameworkCall
from simulator.errors import InputError, UnsupportedError
from simulator.problem import AttentionProblem
from simulator.profile import Profile

#: The algorithm that stands for a framework's own choice, and the framework whose choice it is unless one is named.
AUTO = "auto"
DEFAULT_FRAMEWORK = "torch"


@dataclass(frozen=True)
class Pick:
    """What ``auto`` means for one call: kernel, problem (a stand-in may need it changed), and what to say about it."""

    algorithm: str
    implementation: str | None
    problem: AttentionProblem
    note: str


def framework_call(framework: str | None, version: str | None = None) -> FrameworkCall | None:
    """The framework that options or columns name; ``None`` when none is. A version alone is an error."""
    if not framework:
        if version:
            raise InputError(f"framework version: {version!r} without a framework; name one, such as torch")
        return None
    return FrameworkCall(find_rules(framework, version or None)[0])


def pick(call: FrameworkCall, problem: AttentionProblem, profile: Profile) -> Pick:
    """The kernel of iosim for what ``call``'s framework runs; UnsupportedError when it runs none, or none modelled."""
    decision = call.decide(problem, profile)
    name = call.base.name
    if decision.chosen is None:
        reasons = "; ".join(decision.why_not(backend) for backend in decision.order.backends)
        raise UnsupportedError(f"auto: {name} runs nothing here: {reasons}")
    runs = f"{name} runs {decision.chosen.name}"
    found = decision.model()
    if found is None or not found[0].algorithm:
        raise UnsupportedError(f"auto: {runs}, whose kernel is not modelled{_refused(decision)}")
    model, note = found
    said = "; ".join(filter(None, (runs + _refused(decision), note if model.kind != "itself" else "")))
    return Pick(model.algorithm, model.implementation, replace(problem, **model.change), said)


def not_what_runs(
    call: FrameworkCall, algorithm: str, implementation: str | None, problem: AttentionProblem, profile: Profile
) -> str:
    """A warning when ``call``'s framework would not run ``algorithm`` for this call; "" when it would."""
    decision = call.decide(problem, profile)
    if decision.chosen is None:
        return f"{call.base.name} would run nothing here: {decision.why_not(decision.order.backends[0])}"
    if _is_of(decision.chosen, algorithm, implementation):
        return ""
    own = [name for name in decision.order.backends if _is_of(call.base.backends[name], algorithm, implementation)]
    if not own:
        reason = f"none of its backends is {algorithm}"
    else:
        reason = decision.why_not(own[0]) or f"{decision.chosen.name} comes before {own[0]}"
    return f"{call.base.name} would run {decision.chosen.name} here, not {algorithm}: {reason}"


def _is_of(backend: Any, algorithm: str, implementation: str | None) -> bool:
    """Whether a kernel of iosim is ``backend``'s own, or the one that times it."""
    return any(
        model.algorithm == algorithm and (implementation is None or model.implementation in (None, implementation))
        for model in backend.models
        if model.kind in ("itself", "stand_in") or model.same_schedule
    )


def _refused(decision: Decision) -> str:
    return f" ({decision.refusals})" if decision.refusals else ""
