"""What a rule file says, as plain data: see ``rules/torch_2_11.yaml`` for one with everything in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from simulator.dispatch.conditions import Condition

#: How a backend's time is known: its kernel is modelled, another kernel stands in for it, or one that cannot be slower
#: than it gives a bound.
MODEL_KINDS = ("itself", "stand_in", "at_least", "not_modelled")
#: What happens to a call that a backend refuses: the next one is tried without a word, with a line in the log, or the
#: call fails.
FALLBACKS = ("silent", "logged", "error")


@dataclass(frozen=True)
class Setting:
    """A fact that the framework adds: a switch or a property of the call that the problem does not have.

    ``default`` is a value or the name of the fact that it follows (``follows``); ``words`` are a text's values (empty:
    any).
    """

    name: str
    kind: str
    about: str
    default: Any = None
    follows: str | None = None
    words: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rule:
    """What a backend requires; ``message`` says in words what is wrong when it does not hold."""

    id: str
    requires: Condition
    message: str
    source: str


@dataclass(frozen=True)
class Model:
    """The kernel of iosim that times a backend, under a condition; ``change`` replaces fields of the problem.

    ``algorithm`` is "" for the kind ``not_modelled``; ``same_schedule``: a lower bound of the backend's own schedule.
    """

    kind: str
    algorithm: str = ""
    implementation: str | None = None
    when: Condition | None = None
    change: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""
    same_schedule: bool = False


@dataclass(frozen=True)
class Backend:
    """One kernel family of a framework, what it requires, and how its time is predicted."""

    name: str
    title: str
    rules: tuple[Rule, ...]
    models: tuple[Model, ...]
    force: str = ""


@dataclass(frozen=True)
class Order:
    """Backends in the order in which they are tried, under a condition."""

    backends: tuple[str, ...]
    why: str
    source: str
    when: Condition | None = None


@dataclass(frozen=True)
class Trap:
    """What a user should know although nothing was refused; with ``backends``, only if one of them is chosen."""

    id: str
    message: str
    source: str
    when: Condition | None = None
    backends: tuple[str, ...] = ()


@dataclass(frozen=True)
class RuleBase:
    """One framework at one version."""

    framework: str
    version: str
    title: str
    source: str
    settings: Mapping[str, Setting]
    orders: tuple[Order, ...]
    backends: Mapping[str, Backend]
    traps: tuple[Trap, ...]
    fallback: str
    silence: str
    how_to_see: str
    how_to_force: str
    none_left: str
    preferred: bool
    path: str

    @property
    def name(self) -> str:
        """``torch 2.11``."""
        return f"{self.framework} {self.version}"


def version_key(version: str) -> tuple[int, ...]:
    """``2.11.0+cu130`` as (2, 11), without zeros at the end; ValueError when it is no version."""
    plain = version.strip().lstrip("v").partition("+")[0]
    parts = [int(part) for part in plain.split(".")]
    while len(parts) > 1 and parts[-1] == 0:
        parts.pop()
    return tuple(parts)
