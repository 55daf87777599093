"""YAML read as nodes that know their lines, and the one-line errors made of them (``file:line: key: wrong; right``)."""

from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn

import yaml

from simulator.bounded_read import read_at_most
from simulator.errors import InputError, did_you_mean, file_reason

_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_STANDARD = "str int float bool null map seq timestamp merge value binary"
#: Tags that a plain value gets by itself.
_TAGS = frozenset(f"tag:yaml.org,2002:{name}" for name in _STANDARD.split())
#: Size above which a file is not one of iosim's; the shipped ones have up to 15 kB.
MOST_BYTES = 2_000_000


def fail(where: str, key: str, wrong: str, right: str) -> NoReturn:
    """Raise the one-line error that every check of a profile uses; ``where`` is ``file:line`` or ``--set``."""
    raise InputError(f"{where}: {key}: {wrong}; {right}" if key else f"{where}: {wrong}; {right}")


def nearest(word: str, words: Iterable[str]) -> str:
    """``did you mean 'x'?`` for the closest of ``words``, else the whole list."""
    known = list(words)
    return did_you_mean(word, known).strip() or f"valid: {', '.join(known)}"


def compose(
    path: str | Path, what: str = "a profile", right: str = "expected 'key: {value: ..., kind: ..., source: ...}' lines"
) -> yaml.MappingNode:
    """The YAML node tree of a file (nodes know their lines): plain mappings, lists and texts, every node once.

    :class:`InputError` on bad syntax, a non-mapping, an alias or a tag; ``what`` and ``right`` say in the second's
    message what the file is not and what it should hold.
    """
    text = _text(path)
    try:
        root = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        raise InputError(f"{path}:{line}: YAML syntax: {error.problem}; fix the line or the one above it") from error
    except yaml.YAMLError as error:
        raise InputError(f"{path}:1: YAML syntax: {' '.join(str(error).split())}; save plain text") from error
    if not isinstance(root, yaml.MappingNode):
        fail(f"{path}:1", "", f"not {what}", right)
    _check_plain(root, str(path))
    return root


def _text(path: str | Path) -> str:
    try:
        data = read_at_most(path, MOST_BYTES, "a file of this kind has a few thousand")
    except InputError:
        raise
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read ({file_reason(error)}); give a readable YAML file") from error
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise InputError(f"{path}:{line}: not UTF-8 text ({error.reason}); save the file as UTF-8") from error


def _check_plain(root: yaml.Node, path: str) -> None:
    """No node twice (an alias could hold itself, or grow a small file into gigabytes) and no tag of one's own."""
    seen: set[int] = set()
    waiting = [root]
    while waiting:
        node = waiting.pop()
        where = f"{path}:{node.start_mark.line + 1}"
        if id(node) in seen:
            fail(where, "", "used again by an alias (*name)", "aliases are not read: write the value where it is used")
        seen.add(id(node))
        if node.tag not in _TAGS:
            fail(where, "", f"the tag '{node.tag}'", "tags are not read: write the plain value")
        if isinstance(node, yaml.MappingNode):
            waiting += [part for pair in reversed(node.value) for part in reversed(pair)]
        elif isinstance(node, yaml.SequenceNode):
            waiting += reversed(node.value)


def scalar(node: yaml.ScalarNode) -> str | int | float | bool | None:
    """A scalar as plain data: numbers, truth values and null as YAML reads them, everything else a text."""
    kind = node.tag.rsplit(":", 1)[-1]
    if kind not in ("int", "float", "bool", "null"):
        return str(node.value)
    try:
        plain: str | int | float | bool | None = yaml.SafeLoader("").construct_object(node)
        return plain
    except (ValueError, LookupError):
        return str(node.value)  # what only looks like a number (0x_, !!int before nothing, or one of 5,000 digits)


def pairs(node: yaml.Node, path: str, parent: str) -> list[tuple[yaml.ScalarNode, yaml.Node]]:
    """Key and value nodes of a mapping; duplicate and non-text keys are errors."""
    seen: dict[str, int] = {}
    for key_node, _ in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode):
            fail(f"{path}:{line}", parent, "a key that is not plain text", "write 'key: value'")
        if key_node.value in seen:
            dotted = f"{parent}.{key_node.value}" if parent else key_node.value
            fail(f"{path}:{line}", dotted, f"given twice (first on line {seen[key_node.value]})", "keep one of them")
        seen[key_node.value] = line
    return list(node.value)
