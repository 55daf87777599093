"""Conditions of dispatch rules: comparisons of named facts, joined by all, any and not.

In YAML a comparison is ``[fact, operator, value]``; the value may be ``{fact: other}``. A group is ``{all: [...]}``,
``{any: [...]}`` or ``{not: condition}``. Nothing is evaluated as code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

#: A number counts as a multiple when the quotient is whole to rounding: 0.3 of 0.1 is one.
_ROUNDING = 1e-9


def _is_multiple(value: float, step: float) -> bool:
    if step == 0:
        return False
    quotient = value / step
    return abs(quotient - round(quotient)) < _ROUNDING


#: Operator -> (what it does, kinds of facts that it takes).
OPERATORS: dict[str, tuple[Callable[[Any, Any], bool], tuple[str, ...]]] = {
    "is": (lambda a, b: a == b, ("number", "bytes", "flag", "text")),
    "is not": (lambda a, b: a != b, ("number", "bytes", "flag", "text")),
    "<": (lambda a, b: a < b, ("number", "bytes")),
    "<=": (lambda a, b: a <= b, ("number", "bytes")),
    ">": (lambda a, b: a > b, ("number", "bytes")),
    ">=": (lambda a, b: a >= b, ("number", "bytes")),
    "in": (lambda a, b: a in b, ("number", "bytes", "text")),
    "not in": (lambda a, b: a not in b, ("number", "bytes", "text")),
    "multiple of": (_is_multiple, ("number", "bytes")),
    "has": (lambda a, b: b in a, ("set",)),
    "lacks": (lambda a, b: b not in a, ("set",)),
}


@dataclass(frozen=True)
class FactName:
    """The right side of a comparison that is another fact."""

    name: str


@dataclass(frozen=True)
class Comparison:
    """``fact operator value``."""

    fact: str
    operator: str
    value: Any

    def holds(self, facts: Mapping[str, Any]) -> bool:
        """Whether it is so."""
        value = facts[self.value.name] if isinstance(self.value, FactName) else self.value
        return OPERATORS[self.operator][0](facts[self.fact], value)

    def names(self) -> Iterator[str]:
        """The facts that it reads."""
        yield self.fact
        if isinstance(self.value, FactName):
            yield self.value.name


@dataclass(frozen=True)
class Group:
    """Conditions joined by ``all``, ``any`` or ``not`` (of its one part)."""

    kind: str
    parts: tuple[Condition, ...]

    def holds(self, facts: Mapping[str, Any]) -> bool:
        """Whether all, any or none of the parts hold."""
        if self.kind == "all":
            return all(part.holds(facts) for part in self.parts)
        found = any(part.holds(facts) for part in self.parts)
        return found if self.kind == "any" else not found

    def names(self) -> Iterator[str]:
        """The facts that its parts read."""
        for part in self.parts:
            yield from part.names()


Condition = Comparison | Group
