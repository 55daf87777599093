"""The YAML file of a sweep: its schema, read with the line of every mistake.

::

    gpu: h100_sxm                      # or a list of GPUs: names or profile files
    algorithms: [fa2, fa3]             # name or name:implementation
    design: {kind: sobol, points: 2000, seed: 1}      # or {kind: grid}, {kind: random, points: 500}
    hardware:
      hbm_bandwidth: {from: 1TB/s, to: 16TB/s, scale: log, steps: 9}
      sram_per_sm: [128KiB, 228KiB, 300KiB]
      l2_bytes: {from: x0.25, to: x4}
    problem:                           # columns of 'iosim predict', and l2_state, timing, clock_mhz
      heads: 16
      seqlen: {from: 512, to: 16384, scale: log, multiple: 64}
      head_dim: [64, 128]
    tiles: auto                        # default: the kernels' own
    hypothetical: true                 # kernels whose instructions a GPU lacks run on what it has
    event_budget: 40000                # events of one point's replay; more is slower and finer
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from simulator.errors import InputError
from simulator.options import RunOptions, whole_number
from simulator.overrides import ALIASES, apply_overrides
from simulator.predict import INPUT_COLUMNS, parse_case
from simulator.profile import GROUP_KEYS, SCALAR_KEYS, Profile, key_of
from simulator.quantities import parse_quantity
from simulator.sweep.axes import MOST_POINTS, SCALES, Axis
from simulator.yaml_lines import compose, fail, nearest, pairs

DESIGNS = ("grid", "random", "sobol")
SECTIONS = ("gpu", "algorithms", "design", "hardware", "problem", "tiles", "hypothetical", "event_budget")
_OTHER_COLUMNS = ("algorithm", "implementation", "gpu", "dispatch_framework", "dispatch_version")
#: Columns of a case that a spec's ``problem`` may set; ``seqlen`` stands for ``seqlen_q``.
PROBLEM_COLUMNS = tuple(c for c in INPUT_COLUMNS if c not in _OTHER_COLUMNS)
_PROBLEM_DEFAULTS = {"batch": "1", "heads": "16", "seqlen_q": "4096", "head_dim": "128"}
_WHOLE = ("batch", "heads", "kv_heads", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v", "num_splits", "page_size")
_RANGED = (*_WHOLE, "kv_capacity", "dropout", "softcap", "clock_mhz")
_RANGE_KEYS = ("from", "to", "steps", "scale", "multiple")
#: Events of the replay of one sweep point; tests/test_sweep_accuracy.py says what that costs in accuracy.
SWEEP_EVENT_BUDGET = 60_000


@dataclass(frozen=True)
class Spec:
    """A sweep as its file says it; ``profiles`` are the base GPUs by the name that the axis ``gpu`` uses."""

    path: str
    text: str
    algorithms: tuple[str, ...]
    axes: tuple[Axis, ...]
    design: str = "grid"
    points: int = 0
    seed: int = 0
    fixed: Mapping[str, str] = field(default_factory=dict)
    profiles: Mapping[str, Profile] = field(default_factory=dict)
    tiles: str | None = None
    hypothetical: bool = False
    event_budget: int = SWEEP_EVENT_BUDGET


def read_spec(path: str | Path, overrides: tuple[str, ...] = ()) -> Spec:
    """The checked spec of a YAML file; :class:`InputError` is one line ``file:line: key: wrong; right``.

    ``overrides`` are ``--set`` texts applied to every base GPU.
    """
    path = str(path)
    root = compose(path, "a sweep", "expected sections such as 'gpu:', 'algorithms:', 'hardware:', 'problem:'")
    nodes = {}
    for key, node in pairs(root, path, ""):
        if key.value not in SECTIONS:
            fail(_at(path, key), key.value, "unknown section", nearest(key.value, SECTIONS))
        nodes[key.value] = node
    for needed in ("gpu", "algorithms"):
        if needed not in nodes:
            fail(f"{path}:1", needed, "missing", "write 'gpu: h100_sxm' and 'algorithms: [fa2, fa3]'")
    profiles = _profiles(nodes["gpu"], path, overrides)
    kind, points, seed = _design(nodes.get("design"), path)
    axes: list[Axis] = []
    if len(profiles) > 1:
        axes.append(Axis("gpu", "gpu", tuple(profiles)))
    axes += _hardware(nodes.get("hardware"), path, kind, profiles)
    fixed, varied = _problem(nodes.get("problem"), path, kind)
    axes += varied
    if kind != "grid" and not axes:
        fail(_at(path, nodes["design"]), "design", f"nothing varies, so {kind} has nothing to draw", "give a range")
    budget = SWEEP_EVENT_BUDGET
    if "event_budget" in nodes:
        budget = _count(nodes["event_budget"], path, "event_budget", least=1000)
    return Spec(
        path,
        Path(path).read_text(encoding="utf-8"),
        _algorithms(nodes["algorithms"], path),
        tuple(axes),
        kind,
        points,
        seed,
        fixed,
        profiles,
        _tiles(nodes.get("tiles"), path),
        _boolean(nodes.get("hypothetical"), path),
        budget,
    )


def _at(path: str, node: yaml.Node) -> str:
    return f"{path}:{node.start_mark.line + 1}"


def _text(node: yaml.Node, path: str, key: str) -> str:
    if not isinstance(node, yaml.ScalarNode) or not node.value.strip():
        fail(_at(path, node), key, "not a single value", f"write '{key}: value'")
    return str(node.value).strip()


def _texts(node: yaml.Node, path: str, key: str) -> list[str]:
    """The scalar, or the scalars of the list, under ``key``; at least one, none twice."""
    found = [_text(item, path, key) for item in (node.value if isinstance(node, yaml.SequenceNode) else [node])]
    if not found:
        fail(_at(path, node), key, "an empty list", "give at least one value")
    for text in found:
        if found.count(text) > 1:
            fail(_at(path, node), key, f"'{text}' is given twice", "keep one of them")
    return found


def _count(node: yaml.Node, path: str, key: str, least: int = 1) -> int:
    text = _text(node, path, key)
    try:
        number = whole_number(text)
    except ValueError:
        number = least - 1
    if number < least:
        fail(_at(path, node), key, f"'{text}' is no whole number from {least}", f"write '{key}: {max(least, 1000)}'")
    return number


def _boolean(node: yaml.Node | None, path: str) -> bool:
    if node is None:
        return False
    text = _text(node, path, "hypothetical").lower()
    if text not in ("true", "false"):
        fail(_at(path, node), "hypothetical", f"'{text}' is neither true nor false", "write true or false")
    return text == "true"


def _tiles(node: yaml.Node | None, path: str) -> str | None:
    if node is None:
        return None
    from simulator.tile_choice import check_tiles

    text = _text(node, path, "tiles")
    try:
        return check_tiles(text)
    except InputError as error:
        raise InputError(f"{_at(path, node)}: {error}") from None


def _profiles(node: yaml.Node, path: str, overrides: tuple[str, ...]) -> dict[str, Profile]:
    found = {}
    for name in _texts(node, path, "gpu"):
        # a profile file is relative to the spec that names it
        beside = Path(path).parent / name
        place = str(beside) if beside.is_file() else name
        try:
            RunOptions().profile(place)
        except InputError as error:
            raise InputError(f"{_at(path, node)}: gpu: {error}") from None
        profile = RunOptions(overrides=overrides).profile(place)
        # a changed GPU is named with its changes: rows hold every input
        found[profile.name if overrides else name] = profile
    return found


def _algorithms(node: yaml.Node, path: str) -> tuple[str, ...]:
    from simulator.comparison import parse_algorithm

    names = _texts(node, path, "algorithms")
    for name in names:
        try:
            parse_algorithm(name)
        except InputError as error:
            raise InputError(f"{_at(path, node)}: algorithms: {error}") from None
    return tuple(names)


def _design(node: yaml.Node | None, path: str) -> tuple[str, int, int]:
    if node is None:
        return "grid", 0, 0
    if isinstance(node, yaml.ScalarNode) and node.value == "grid":
        return "grid", 0, 0
    if not isinstance(node, yaml.MappingNode):
        fail(_at(path, node), "design", "not a design", "write 'design: {kind: sobol, points: 1000, seed: 0}'")
    parts = {}
    for key, value in pairs(node, path, "design"):
        if key.value not in ("kind", "points", "seed"):
            fail(_at(path, key), f"design.{key.value}", "unknown key", nearest(key.value, ("kind", "points", "seed")))
        parts[key.value] = value
    if "kind" not in parts:
        fail(_at(path, node), "design.kind", "missing", f"one of {', '.join(DESIGNS)}")
    kind = _text(parts["kind"], path, "design.kind")
    if kind not in DESIGNS:
        fail(_at(path, parts["kind"]), "design.kind", f"'{kind}' is unknown", nearest(kind, DESIGNS))
    if kind == "grid":
        for name in ("points", "seed"):
            if name in parts:
                fail(_at(path, parts[name]), f"design.{name}", "a grid has none", "set 'steps' of its ranges")
        return "grid", 0, 0
    if "points" not in parts:
        fail(_at(path, node), "design.points", "missing", f"how many designs {kind} draws: 'points: 1000'")
    seed = _count(parts["seed"], path, "design.seed", least=0) if "seed" in parts else 0
    return kind, _count(parts["points"], path, "design.points"), seed


def _hardware(node: yaml.Node | None, path: str, design: str, profiles: Mapping[str, Profile]) -> list[Axis]:
    if node is None:
        return []
    if not isinstance(node, yaml.MappingNode):
        fail(_at(path, node), "hardware", "not a list of keys", "write 'hbm_bandwidth: [2TB/s, 4TB/s]' lines")
    axes: dict[str, Axis] = {}
    for key_node, value in pairs(node, path, "hardware"):
        written = key_node.value
        head, dot, rest = written.partition(".")
        key = ALIASES.get(head, head) + dot + rest
        group = key.split(".")[0]
        if key not in SCALAR_KEYS and group not in GROUP_KEYS:
            known = [*SCALAR_KEYS, *GROUP_KEYS, *ALIASES]
            fail(_at(path, key_node), f"hardware.{written}", "unknown key", nearest(head, known))
        if key in axes:
            fail(_at(path, key_node), f"hardware.{written}", f"sets {key} like a key above", "keep one of them")
        if isinstance(value, yaml.MappingNode):
            axis = _range(value, path, "hardware", f"hardware.{written}", key, design)
        else:
            axis = Axis("hardware", key, tuple(_texts(value, path, f"hardware.{written}")))
        # every value of a list, the ends of a range: mistakes surface before the first point runs
        for profile in profiles.values():
            for text in axis.values or axis.ends:
                _check_override(profile, key, text, _at(path, value), f"hardware.{written}")
        axes[key] = axis
    return list(axes.values())


def _check_override(profile: Profile, key: str, text: str, where: str, name: str) -> None:
    """A value that cannot be read is a mistake; one that contradicts other values may only do so at some points."""
    try:
        apply_overrides(profile, {key: text})
    except InputError as error:
        message = str(error).removeprefix("--set: ")
        if "is more than" not in message and "agree within" not in message:
            raise InputError(f"{where}: {name}: {message.removeprefix(f'{key}: ')}") from None


def _problem(node: yaml.Node | None, path: str, design: str) -> tuple[dict[str, str], list[Axis]]:
    """Columns with one value, and the axes of those with several."""
    fixed: dict[str, str] = dict(_PROBLEM_DEFAULTS)
    axes: list[Axis] = []
    if node is None:
        return fixed, axes
    if not isinstance(node, yaml.MappingNode):
        fail(_at(path, node), "problem", "not a list of columns", "write 'seqlen: [1024, 4096]' lines")
    given: dict[str, str] = {}
    for key_node, value in pairs(node, path, "problem"):
        written = key_node.value
        column = "seqlen_q" if written == "seqlen" else written
        if column not in PROBLEM_COLUMNS:
            fail(
                _at(path, key_node),
                f"problem.{written}",
                "unknown column",
                nearest(written, ["seqlen", *PROBLEM_COLUMNS]),
            )
        if column in given:
            fail(_at(path, key_node), f"problem.{written}", f"sets {column} like '{given[column]}'", "keep one of them")
        given[column] = written
        if isinstance(value, yaml.MappingNode):
            if column not in _RANGED:
                fail(_at(path, value), f"problem.{written}", "takes no range", "give a list of values")
            axis = _range(value, path, "problem", f"problem.{written}", column, design)
            checked = list(axis.ends)
            axes.append(axis)
        else:
            checked = _texts(value, path, f"problem.{written}")
            if len(checked) > 1:
                axes.append(Axis("problem", column, tuple(checked)))
            else:
                fixed[column] = checked[0]
        for text in checked:
            _check_cell(column, text, _at(path, value), f"problem.{written}")
    if "seqlens_q" in given or "seqlens" in given:
        fixed = {k: v for k, v in fixed.items() if k in given or k not in ("batch", "seqlen_q")}
    fixed = {k: v for k, v in fixed.items() if k not in {axis.name for axis in axes}}
    return fixed, axes


def _check_cell(column: str, text: str, where: str, name: str) -> None:
    """The text of one column must be readable by itself; what it means beside others is the point's business."""
    alone = {"algorithm": "fa2", "gpu": "-", **_PROBLEM_DEFAULTS, column: text}
    if column.startswith("seqlens"):
        alone = {k: v for k, v in alone.items() if k not in ("batch", "seqlen_q")} | {"seqlens": text}
    if column == "kv_heads":
        alone["heads"] = text
    try:
        parse_case(alone)
    except InputError as error:
        raise InputError(f"{where}: {name}: {str(error).removeprefix(f'{column}: ')}") from None


def _range(node: yaml.MappingNode, path: str, kind: str, name: str, key: str, design: str) -> Axis:
    parts = {}
    for key_node, value in pairs(node, path, name):
        if key_node.value not in _RANGE_KEYS:
            fail(_at(path, key_node), f"{name}.{key_node.value}", "unknown key", nearest(key_node.value, _RANGE_KEYS))
        parts[key_node.value] = value
    where = _at(path, node)
    for needed in ("from", "to"):
        if needed not in parts:
            fail(where, name, f"a range without '{needed}'", "write {from: x0.5, to: x2} or a list of values")
    ends, relative = [], []
    for end in ("from", "to"):
        number, is_factor = _end(_text(parts[end], path, f"{name}.{end}"), kind, key, _at(path, parts[end]), name)
        ends.append(number)
        relative.append(is_factor)
    if relative[0] != relative[1]:
        fail(where, name, "one end is a factor and the other is not", "write both as xN or both with units")
    if ends[0] >= ends[1]:
        fail(where, name, f"'from' {ends[0]:.6g} is not below 'to' {ends[1]:.6g}", "swap them, or give a single value")
    scale = _text(parts["scale"], path, f"{name}.scale") if "scale" in parts else "linear"
    if scale not in SCALES:
        fail(_at(path, parts["scale"]), f"{name}.scale", f"'{scale}' is unknown", nearest(scale, SCALES))
    if scale == "log" and ends[0] <= 0:
        fail(where, name, "a logarithmic range cannot start at or below 0", "start above 0, or use scale: linear")
    steps = _count(parts["steps"], path, f"{name}.steps", least=2) if "steps" in parts else 0
    if steps > MOST_POINTS:
        fail(_at(path, parts["steps"]), f"{name}.steps", f"{steps:,} steps", f"at most {MOST_POINTS:,}")
    if design == "grid" and not steps:
        fail(where, name, "a range without 'steps' in a grid", "add 'steps: 5', or list the values")
    multiple = 0.0
    if "multiple" in parts:
        multiple, _ = _end(_text(parts["multiple"], path, f"{name}.multiple"), kind, key, where, name)
        if multiple <= 0 or math.ceil(ends[0] / multiple) * multiple > ends[1]:
            fail(where, f"{name}.multiple", f"no multiple of {multiple:.6g} in the range", "take a smaller one")
    whole = key in (*_WHOLE, "kv_capacity") if kind == "problem" else key_of(key).integer and not relative[0]
    if whole and not multiple:
        multiple = 1.0
    return Axis(kind, key, (), ends[0], ends[1], relative[0], scale, multiple, steps)


def _end(text: str, kind: str, key: str, where: str, name: str) -> tuple[float, bool]:
    """The number of a range's end, and whether it is a factor."""
    try:
        if kind == "problem" or text[0] in "x*×":
            number, relative = (float(text), False) if kind == "problem" else (float(text[1:]), True)
            if not math.isfinite(number):
                raise ValueError(text)
            return number, relative
        return parse_quantity(text, key_of(key).dimension), False
    except InputError as error:
        raise InputError(f"{where}: {name}: {error}") from None
    except ValueError:
        fail(where, name, f"'{text}' is not a number", "write a number, with a unit or as xN for hardware")
