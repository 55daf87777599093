"""YAML read as nodes that know their lines, and the one-line errors made of them (``file:line: key: wrong; right``)."""

import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn

import yaml

from simulator.errors import InputError

_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def fail(where: str, key: str, wrong: str, right: str) -> NoReturn:
    """Raise the one-line error that every check of a profile uses; ``where`` is ``file:line`` or ``--set``."""
    raise InputError(f"{where}: {key}: {wrong}; {right}" if key else f"{where}: {wrong}; {right}")


def nearest(word: str, words: Iterable[str]) -> str:
    """``did you mean 'x'?`` for the closest of ``words``, else the whole list."""
    known = list(words)
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f"did you mean '{close[0]}'?" if close else f"valid: {', '.join(known)}"


def compose(
    path: str | Path, what: str = "a profile", right: str = "expected 'key: {value: ..., kind: ..., source: ...}' lines"
) -> yaml.MappingNode:
    """The YAML node tree of a file (nodes know their lines); InputError on bad syntax or a non-mapping.

    ``what`` and ``right`` say in the latter's message what the file is not and what it should hold.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}:1: not UTF-8 text ({error.reason}); save the file as UTF-8") from error
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); give a readable YAML file") from error
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
    return root


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
    return node.value
