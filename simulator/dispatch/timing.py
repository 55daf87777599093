"""The predicted time of what a framework runs, and of what the user hoped for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from simulator.dispatch.decide import Decision, decide
from simulator.dispatch.facts import facts_of, parse_facts, with_settings
from simulator.dispatch.rule_base import Model, RuleBase
from simulator.errors import InputError
from simulator.options import RunOptions
from simulator.problem import AttentionProblem
from simulator.profile import Profile
from simulator.result import Result

#: Up to this many queries on more keys, a call is a decode step and the split-KV kernels are what one hopes for.
_DECODE_QUERIES = 8
_KIND_WORDS = {
    "itself": "",
    "stand_in": "stands in for it",
    "at_least": "",
    "not_modelled": "not modelled",
}


@dataclass(frozen=True)
class Timed:
    """A predicted time: ``kind`` as in ``rule_base.MODEL_KINDS``; ``result`` is ``None`` where ``note`` says why."""

    kind: str
    kernel: str
    result: Result | None
    note: str

    @property
    def words(self) -> str:
        """What the time is, beside the kernel's name."""
        return _KIND_WORDS[self.kind]


@dataclass(frozen=True)
class FrameworkCall:
    """Which framework gets the call: a rule base and the facts that the problem does not have."""

    base: RuleBase
    facts: tuple[str, ...] = ()

    def decide(self, problem: AttentionProblem, profile: Profile) -> Decision:
        """What the framework does with ``problem`` on ``profile``."""
        given = parse_facts(self.base, self.facts)
        return decide(self.base, with_settings(self.base, facts_of(problem, profile), given))


def time_of_chosen(
    decision: Decision, problem: AttentionProblem, profile: Profile, conditions: RunOptions, hypothetical: bool = False
) -> Timed:
    """The predicted time of the backend that runs."""
    found = decision.model()
    if decision.chosen is None:
        return Timed("not_modelled", "", None, decision.base.none_left)
    if found is None or found[0].kind == "not_modelled":
        note = found[1] if found else ""
        return Timed("not_modelled", "", None, note or f"{decision.chosen.title}: its kernel is not modelled")
    model, note = found
    return _timed(model, problem, profile, conditions, note, hypothetical)


def time_of_hoped(wanted: str | None, problem: AttentionProblem, profile: Profile, conditions: RunOptions) -> Timed:
    """The predicted time of ``wanted`` (``fa3`` or ``fa2:torch_flash``; ``None``: the fastest that the GPU has the
    instructions for), without a mask and in bf16 instead of fp32 where that is what keeps it out."""
    from simulator.comparison import parse_algorithm

    algorithm, implementation = parse_algorithm(wanted) if wanted else (fastest_algorithm(problem, profile), None)
    change: dict[str, Any] = {}
    left_out = []
    if algorithm != "standard" and problem.mask is not None:
        change["mask"] = None
        left_out.append("without the mask")
    if problem.dtype == "fp32":
        change["dtype"] = "bf16"
        left_out.append("in bf16")
    model = Model("itself", algorithm, implementation, change=change)
    return _timed(model, problem, profile, conditions, ", ".join(left_out))


def fastest_algorithm(problem: AttentionProblem, profile: Profile) -> str:
    """The algorithm that one hopes for: the newest that the GPU has the instructions for."""
    if problem.pass_ == "fwd" and problem.seqlen_q <= _DECODE_QUERIES < problem.seqlen_k:
        return "flash_decoding"
    return "fa3" if {"wgmma", "tma"} <= profile.capabilities and problem.dropout == 0 else "fa2"


def _timed(
    model: Model,
    problem: AttentionProblem,
    profile: Profile,
    conditions: RunOptions,
    note: str,
    hypothetical: bool = False,
) -> Timed:
    from simulator import simulate

    kernel = ":".join(filter(None, (model.algorithm, model.implementation)))
    try:
        result = simulate(
            model.algorithm,
            replace(problem, **model.change),
            profile,
            implementation=model.implementation,
            hypothetical=hypothetical,
            **conditions.arguments(),
        )
    except InputError as error:
        return Timed(model.kind, kernel, None, f"not predicted: {error}")
    return Timed(model.kind, f"{result.algorithm}:{result.implementation}", result, note)
