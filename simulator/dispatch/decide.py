"""The interpreter of rules: which backend runs, what each other one fails, and what to beware of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from simulator.dispatch.conditions import Condition
from simulator.dispatch.facts import known_facts, value_text
from simulator.dispatch.rule_base import Backend, Model, Order, RuleBase


@dataclass(frozen=True)
class Failure:
    """A rule that does not hold, in words about this call, and where the rule comes from."""

    rule: str
    message: str
    source: str


@dataclass(frozen=True)
class Decision:
    """What a framework does with a call.

    ``chosen`` is ``None`` when every backend refuses. ``failures`` has the rules that each backend of the order fails,
    in the framework's own sequence; a backend without any could have run, and is not tried after the chosen one.
    """

    base: RuleBase
    facts: Mapping[str, Any]
    order: Order
    chosen: Backend | None
    failures: Mapping[str, tuple[Failure, ...]]
    traps: tuple[Failure, ...]

    @property
    def rejected(self) -> tuple[str, ...]:
        """Backends that were tried before the chosen one and refused, in order."""
        names = self.order.backends
        return names[: names.index(self.chosen.name)] if self.chosen else names

    @property
    def refusals(self) -> str:
        """``not flash: why; not efficient: why`` of the backends that were tried in vain; "" if there are none."""
        return "; ".join(f"not {name}: {self.why_not(name)}" for name in self.rejected)

    @property
    def untried(self) -> tuple[str, ...]:
        """Backends behind the chosen one."""
        return self.order.backends[len(self.rejected) + 1 :]

    @property
    def why_order(self) -> str:
        """Why the backends are tried in this order, in words about this call."""
        return _said(self.base, self.order.why, self.facts)

    def why_not(self, name: str) -> str:
        """The first rule that backend ``name`` fails, in words; "" if it fails none."""
        failures = self.failures.get(name, ())
        return failures[0].message if failures else ""

    def model(self) -> tuple[Model, str] | None:
        """How the chosen backend's time is predicted for this call and the note on it; ``None`` if it is not."""
        for model in self.chosen.models if self.chosen else ():
            if _applies(model.when, self.facts):
                return model, _said(self.base, model.note, self.facts)
        return None


def decide(base: RuleBase, facts: Mapping[str, Any]) -> Decision:
    """Evaluate ``base`` over ``facts`` (the common ones and the base's settings; see ``facts.with_settings``)."""
    order = next(order for order in base.orders if _applies(order.when, facts))
    failures = {name: failed_rules(base, base.backends[name], facts) for name in order.backends}
    chosen = next((base.backends[name] for name in order.backends if not failures[name]), None)
    traps = tuple(
        Failure(trap.id, _said(base, trap.message, facts), trap.source)
        for trap in base.traps
        if (not trap.backends or (chosen is not None and chosen.name in trap.backends)) and _applies(trap.when, facts)
    )
    return Decision(base, facts, order, chosen, failures, traps)


def failed_rules(base: RuleBase, backend: Backend, facts: Mapping[str, Any]) -> tuple[Failure, ...]:
    """The rules of ``backend`` that do not hold, in its own order."""
    return tuple(
        Failure(rule.id, _said(base, rule.message, facts), rule.source)
        for rule in backend.rules
        if not rule.requires.holds(facts)
    )


def _applies(when: Condition | None, facts: Mapping[str, Any]) -> bool:
    return when is None or when.holds(facts)


def _said(base: RuleBase, message: str, facts: Mapping[str, Any]) -> str:
    known = known_facts(base.settings)
    return message.format_map({name: value_text(known[name].kind, facts[name]) for name in known})
