"""Read rule files: every mistake is one line with file, line, key and what would be right."""

from __future__ import annotations

import string
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from simulator.dispatch import rule_base as data
from simulator.dispatch.conditions import OPERATORS, Comparison, Condition, FactName, Group
from simulator.dispatch.facts import FACTS, KINDS, Fact, known_facts
from simulator.errors import InputError
from simulator.problem import AttentionProblem
from simulator.yaml_lines import compose, fail, nearest, pairs, scalar

_RIGHT = "expected 'framework:', 'version:', 'orders:' and 'backends:'"
_TOP = (
    "framework", "version", "title", "source", "base", "preferred", "settings", "orders", "backends", "traps",
    "fallback", "silence", "how_to_see", "how_to_force", "none_left",
)  # fmt: skip
_TEXTS = ("title", "source", "silence", "how_to_see", "how_to_force", "none_left")


def rules_folder() -> Path:
    """The folder of the rule files that iosim ships."""
    return Path(__file__).parent / "rules"


def rule_bases(folder: Path | None = None) -> tuple[data.RuleBase, ...]:
    """Every rule base that iosim ships and, before those of the same name, those of a user's ``folder``; sorted."""
    bases = {base.name: base for base in _shipped()}
    if folder is not None:
        bases |= {base.name: base for base in _in_folder(folder)}
    return tuple(sorted(bases.values(), key=lambda base: (base.framework, data.version_key(base.version))))


@lru_cache(maxsize=1)
def _shipped() -> tuple[data.RuleBase, ...]:
    return tuple(_in_folder(rules_folder()))


def _in_folder(folder: Path) -> list[data.RuleBase]:
    paths = sorted(folder.glob("*.yaml"))
    if not paths:
        raise InputError(f"{folder}: no rule files (*.yaml); name a folder that has some")
    bases: dict[str, data.RuleBase] = {}
    for path in paths:
        base = read_rules(path)
        if base.name in bases:
            raise InputError(f"{path}: {base.name} is also in {bases[base.name].path}; keep one of them")
        bases[base.name] = base
    return list(bases.values())


def find_rules(framework: str, version: str | None = None, folder: Path | None = None) -> tuple[data.RuleBase, str]:
    """The newest rule base of ``framework`` that is not newer than ``version``, and a line to say about the choice.

    ``version`` ``None`` takes the base marked as preferred, else the newest.
    """
    bases = rule_bases(folder)
    frameworks = list(dict.fromkeys(base.framework for base in bases))
    if framework not in frameworks:
        raise InputError(f"framework: {framework!r} is unknown; {nearest(framework, frameworks)}")
    own = [base for base in bases if base.framework == framework]
    if version is None:
        return next((base for base in own if base.preferred), own[-1]), ""
    try:
        asked = data.version_key(version)
    except ValueError:
        raise InputError(f"version: {version!r} is no version; write for example {own[-1].version}") from None
    fitting = [base for base in own if data.version_key(base.version) <= asked]
    versions = ", ".join(base.version for base in own)
    if not fitting:
        raise InputError(f"version: no rules for {framework} {version}; there are rules for {versions}")
    base = fitting[-1]
    same = asked[: len(data.version_key(base.version))] == data.version_key(base.version)
    return base, "" if same else f"no rules for {framework} {version}: those of {base.version} are used"


def read_rules(path: Path) -> data.RuleBase:
    """The rule base of one file; a ``base:`` names the file in its folder that it changes."""
    reader = _Reader(str(path))
    top = reader.mapping(compose(path, "a rule file", _RIGHT), "", _TOP)
    base = _base_of(reader, top, path)
    framework = reader.text(top, "framework", base.framework if base else None)
    version = reader.text(top, "version", None)
    try:
        data.version_key(version)
    except ValueError:
        fail(reader.at(top["version"]), "version", f"{version!r} is no version", 'write for example "2.11"')
    settings = dict(base.settings) if base else {}
    if "settings" in top:
        settings |= reader.settings(top["settings"], settings)
    reader.facts = known_facts(settings)
    backends = reader.backends(top, base)
    fallback = reader.text(top, "fallback", base.fallback if base else None)
    if fallback not in data.FALLBACKS:
        fail(reader.at(top["fallback"]), "fallback", f"{fallback!r} is unknown", nearest(fallback, data.FALLBACKS))
    return data.RuleBase(
        framework=framework,
        version=version,
        settings=settings,
        orders=reader.orders(top["orders"], backends) if "orders" in top else _needed(reader, base, "orders").orders,
        backends=backends,
        traps=reader.traps(top.get("traps"), base.traps if base else (), backends),
        fallback=fallback,
        preferred=bool(reader.value(top["preferred"])) if "preferred" in top else False,
        path=str(path),
        **{name: reader.text(top, name, getattr(base, name) if base else None) for name in _TEXTS},
    )


def _base_of(reader: _Reader, top: Mapping[str, yaml.Node], path: Path) -> data.RuleBase | None:
    if "base" not in top:
        return None
    name = reader.text(top, "base", None)
    folders = list(dict.fromkeys((path.parent, rules_folder())))
    for folder in folders:
        other = folder / f"{name}.yaml"
        if other != path and other.exists():
            return read_rules(other)
    known = [p.stem for folder in folders for p in sorted(folder.glob("*.yaml")) if p != path]
    fail(reader.at(top["base"]), "base", f"no rule file {name}.yaml beside this one or shipped", nearest(name, known))


def _needed(reader: _Reader, base: data.RuleBase | None, key: str) -> data.RuleBase:
    if base is None:
        fail(f"{reader.path}:1", key, "missing", _RIGHT)
    return base


class _Reader:
    """Nodes of one file as data; ``facts`` are those that its conditions may read."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.facts: dict[str, Fact] = dict(FACTS)

    def at(self, node: yaml.Node) -> str:
        return f"{self.path}:{node.start_mark.line + 1}"

    def mapping(self, node: yaml.Node, parent: str, allowed: Iterable[str] | None) -> dict[str, yaml.Node]:
        if not isinstance(node, yaml.MappingNode):
            fail(self.at(node), parent, "not a mapping", "write 'key: value' lines under it")
        found = {}
        for key, value in pairs(node, self.path, parent):
            if allowed is not None and key.value not in allowed:
                dotted = f"{parent}.{key.value}" if parent else key.value
                fail(self.at(key), dotted, "unknown key", nearest(key.value, allowed))
            found[key.value] = value
        return found

    def sequence(self, node: yaml.Node, parent: str) -> list[yaml.Node]:
        if not isinstance(node, yaml.SequenceNode):
            fail(self.at(node), parent, "not a list", "write '- ' lines or [a, b]")
        return list(node.value)

    def value(self, node: yaml.Node) -> Any:
        if isinstance(node, yaml.SequenceNode):
            return [self.value(one) for one in node.value]
        if isinstance(node, yaml.MappingNode):
            return {key.value: self.value(one) for key, one in pairs(node, self.path, "")}
        assert isinstance(node, yaml.ScalarNode)
        return scalar(node)

    def text(self, found: Mapping[str, yaml.Node], key: str, default: str | None) -> str:
        if key not in found:
            if default is None:
                fail(f"{self.path}:1", key, "missing", f"add '{key}: ...'")
            return default
        if not isinstance(found[key], yaml.ScalarNode):
            fail(self.at(found[key]), key, "not a text", "write it on one line or with '>-'")
        return " ".join(found[key].value.split())

    def entry(
        self, node: yaml.Node, parent: str, allowed: Iterable[str], needed: Iterable[str]
    ) -> dict[str, yaml.Node]:
        found = self.mapping(node, parent, allowed)
        for key in needed:
            if key not in found:
                fail(self.at(node), f"{parent}.{key}", "missing", f"an entry has {', '.join(needed)}")
        return found

    def settings(self, node: yaml.Node, known: Mapping[str, data.Setting]) -> dict[str, data.Setting]:
        settings = {}
        for name, one in self.mapping(node, "settings", None).items():
            if name in FACTS:
                fail(self.at(one), f"settings.{name}", "is a fact of every call already", "give it another name")
            found = self.entry(one, f"settings.{name}", ("kind", "default", "about", "values"), ("default",))
            earlier = known.get(name)
            kind = self.text(found, "kind", earlier.kind if earlier else None)
            if kind not in KINDS:
                fail(self.at(found["kind"]), f"settings.{name}.kind", f"{kind!r} is unknown", nearest(kind, KINDS))
            default, follows = found["default"], None
            if isinstance(default, yaml.MappingNode):
                follows = self.text(self.mapping(default, f"settings.{name}.default", ("fact",)), "fact", None)
                self.check_fact(default, follows)
            about = self.text(found, "about", earlier.about if earlier else None)
            words = tuple(self.value(found["values"])) if "values" in found else earlier.words if earlier else ()
            settings[name] = data.Setting(name, kind, about, None if follows else self.value(default), follows, words)
        return settings

    def check_fact(self, node: yaml.Node, name: str) -> None:
        if name not in self.facts:
            fail(self.at(node), "fact", f"{name!r} is unknown", nearest(str(name), self.facts))

    def condition(self, node: yaml.Node) -> Condition:
        if isinstance(node, yaml.MappingNode):
            found = self.mapping(node, "condition", ("all", "any", "not"))
            if len(found) != 1:
                fail(self.at(node), "condition", f"{len(found)} keys", "write one of all, any, not")
            [(kind, inner)] = found.items()
            parts = [inner] if kind == "not" else self.sequence(inner, kind)
            return Group(kind, tuple(self.condition(part) for part in parts))
        parts = self.sequence(node, "condition")
        if len(parts) != 3 or not all(isinstance(part, yaml.ScalarNode) for part in parts[:2]):
            fail(self.at(node), "condition", "not [fact, operator, value]", "write for example [head_dim, <=, 256]")
        fact, operator = parts[0].value, parts[1].value
        self.check_fact(parts[0], fact)
        if operator not in OPERATORS:
            fail(self.at(parts[1]), f"condition on {fact}", f"{operator!r} is unknown", nearest(operator, OPERATORS))
        kind = self.facts[fact].kind
        if kind not in OPERATORS[operator][1]:
            usable = [name for name, (_, kinds) in OPERATORS.items() if kind in kinds]
            fail(self.at(parts[1]), f"condition on {fact}", f"{operator!r} does not fit a {kind}", nearest("", usable))
        return Comparison(fact, operator, self.right_side(parts[2], fact, operator))

    def right_side(self, node: yaml.Node, fact: str, operator: str) -> Any:
        if isinstance(node, yaml.MappingNode):
            name = self.text(self.mapping(node, f"condition on {fact}", ("fact",)), "fact", None)
            self.check_fact(node, name)
            return FactName(name)
        value = self.value(node)
        several = operator in ("in", "not in")
        if several != isinstance(value, list):
            right = "write [a, b]" if several else "write one value"
            fail(self.at(node), f"condition on {fact}", f"{operator!r} with {value!r}", right)
        expected = {"number": (int, float), "bytes": (int, float), "flag": (bool,), "text": (str,), "set": (str,)}
        kind = self.facts[fact].kind
        for one in value if several else [value]:
            right_type = isinstance(one, expected[kind]) and (kind == "flag" or not isinstance(one, bool))
            words = self.facts[fact].words
            if not right_type or (words and one not in words):
                right = nearest(str(one), words) if words else f"{fact} is a {kind}"
                fail(self.at(node), f"condition on {fact}", f"{one!r} is no value of it", right)
        return tuple(value) if several else value

    def message(self, found: Mapping[str, yaml.Node], key: str = "message") -> str:
        text = self.text(found, key, None)
        try:
            names = [name for _, name, _, _ in string.Formatter().parse(text) if name is not None]
        except ValueError as error:
            fail(self.at(found[key]), key, f"braces: {error}", "write {fact}, or double a brace that is meant")
        for name in names:
            self.check_fact(found[key], name)
        return text

    def when(self, found: Mapping[str, yaml.Node]) -> Condition | None:
        return self.condition(found["when"]) if "when" in found else None

    def orders(self, node: yaml.Node, backends: Mapping[str, data.Backend]) -> tuple[data.Order, ...]:
        orders = []
        for one in self.sequence(node, "orders"):
            found = self.entry(one, "orders", ("when", "backends", "why", "source"), ("backends", "why", "source"))
            names = tuple(self.value(found["backends"]))
            self.check_backends(found["backends"], names, backends)
            orders.append(
                data.Order(names, self.message(found, "why"), self.text(found, "source", None), self.when(found))
            )
        if not orders or orders[-1].when is not None:
            fail(self.at(node), "orders", "every order has a condition", "end with one that has no 'when:'")
        return tuple(orders)

    def check_backends(self, node: yaml.Node, names: Iterable[str], backends: Mapping[str, data.Backend]) -> None:
        for name in names:
            if name not in backends:
                fail(self.at(node), "backends", f"{name!r} is none of this file", nearest(str(name), backends))

    def backends(self, top: Mapping[str, yaml.Node], base: data.RuleBase | None) -> dict[str, data.Backend]:
        backends = dict(base.backends) if base else {}
        if "backends" not in top:
            return dict(_needed(self, base, "backends").backends)
        for name, node in self.mapping(top["backends"], "backends", None).items():
            parent = f"backends.{name}"
            found = self.mapping(node, parent, ("title", "rules", "without", "models", "force"))
            old = backends.get(name)
            rules = {rule.id: rule for rule in old.rules} if old else {}
            for dropped in self.value(found["without"]) if "without" in found else ():
                if rules.pop(dropped, None) is None:
                    where = self.at(found["without"])
                    fail(where, f"{parent}.without", f"no rule {dropped!r}", nearest(str(dropped), rules))
            rules |= self.rules(found["rules"], parent) if "rules" in found else {}
            models = self.models(found["models"], parent) if "models" in found else old.models if old else ()
            title = self.text(found, "title", old.title if old else None)
            force = self.text(found, "force", old.force if old else "")
            backends[name] = data.Backend(name, title, tuple(rules.values()), models, force)
        return backends

    def rules(self, node: yaml.Node, parent: str) -> dict[str, data.Rule]:
        needed = ("id", "requires", "message", "source")
        rules: dict[str, data.Rule] = {}
        for one in self.sequence(node, f"{parent}.rules"):
            found = self.entry(one, f"{parent}.rules", needed, needed)
            name = self.text(found, "id", None)
            if name in rules:
                fail(self.at(one), f"{parent}.rules", f"rule {name!r} comes twice", "rename one of them")
            source = self.text(found, "source", None)
            rules[name] = data.Rule(name, self.condition(found["requires"]), self.message(found), source)
        return rules

    def models(self, node: yaml.Node, parent: str) -> tuple[data.Model, ...]:
        from algorithms import MODULES, algorithm_module

        models = []
        allowed = ("when", "as", "algorithm", "implementation", "change", "note", "same_schedule")
        for one in self.sequence(node, f"{parent}.models"):
            found = self.entry(one, f"{parent}.models", allowed, ("as",))
            kind = self.text(found, "as", None)
            if kind not in data.MODEL_KINDS:
                right = nearest(kind, data.MODEL_KINDS)
                fail(self.at(found["as"]), f"{parent}.models.as", f"{kind!r} is unknown", right)
            note = self.message(found, "note") if "note" in found else ""
            if kind == "not_modelled":
                models.append(data.Model(kind, when=self.when(found), note=note))
                continue
            algorithm = self.text(found, "algorithm", None)
            if algorithm not in MODULES:
                fail(self.at(found["algorithm"]), "algorithm", f"{algorithm!r} is unknown", nearest(algorithm, MODULES))
            implementation = self.text(found, "implementation", "") or None
            known = algorithm_module(algorithm).IMPLEMENTATIONS
            if implementation and implementation not in known:
                where, wrong = self.at(found["implementation"]), f"{implementation!r} is unknown"
                fail(where, "implementation", wrong, nearest(implementation, known))
            change = self.value(found["change"]) if "change" in found else {}
            fields = AttentionProblem.__dataclass_fields__
            for name in change:
                if name not in fields:
                    fail(self.at(found["change"]), "change", f"{name!r} is no part of a problem", nearest(name, fields))
            same = bool(self.value(found["same_schedule"])) if "same_schedule" in found else False
            models.append(data.Model(kind, algorithm, implementation, self.when(found), change, note, same))
        return tuple(models)

    def traps(
        self, node: yaml.Node | None, inherited: tuple[data.Trap, ...], backends: Mapping[str, data.Backend]
    ) -> tuple[data.Trap, ...]:
        traps = {trap.id: trap for trap in inherited}
        for one in self.sequence(node, "traps") if node is not None else ():
            allowed = ("id", "when", "backends", "message", "source")
            found = self.entry(one, "traps", allowed, ("id", "message", "source"))
            names = tuple(self.value(found["backends"])) if "backends" in found else ()
            if names:
                self.check_backends(found["backends"], names, backends)
            name = self.text(found, "id", None)
            source = self.text(found, "source", None)
            traps[name] = data.Trap(name, self.message(found), source, self.when(found), names)
        return tuple(traps.values())
