"""Reads a profile's YAML: syntax, ``base:`` inheritance and every check, each error with its file and line.

One pass turns a file into a :class:`Draft` (values with their lines), a child draft is laid over its base's, numbers
that follow a changed one are scaled (:data:`FOLLOWERS`), and the result is checked as a whole.
"""

import re
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from simulator.calibration_section import parse_calibration
from simulator.errors import InputError, did_you_mean
from simulator.profile import (
    ARCHITECTURES,
    CAPABILITIES,
    DEFAULTS,
    GROUP_KEYS,
    KINDS,
    SCALAR_KEYS,
    Calibration,
    FrozenMapping,
    Profile,
    Quantity,
    key_of,
    profile_folder,
    profile_names,
)
from simulator.quantities import LIMITS, parse_quantity
from simulator.yaml_lines import compose, fail, nearest, pairs

IDENTITY_KEYS = ("name", "title", "architecture", "compute_capability", "capabilities", "base")

# A changed key and those that scale with it unless they are set too.
FOLLOWERS: dict[str, tuple[str, ...]] = {
    "hbm_bandwidth_bytes_per_s": ("hbm_sustained_read_bytes_per_s", "hbm_sustained_copy_bytes_per_s"),
    "smem_bytes_per_sm": ("smem_bytes_per_cta_max", "l1_smem_bytes_per_sm"),
    "max_clock_hz": ("spec_clock_hz",),
}


# A name or title longer than this is no name; tables and pictures show them.
MOST_LETTERS = 300


@dataclass
class Draft:
    """A profile under construction: what one file says, or a base with children laid over it."""

    path: str
    identity: dict[str, Any] = field(default_factory=dict)
    identity_lines: dict[str, int] = field(default_factory=dict)
    values: dict[str, Quantity] = field(default_factory=dict)
    calibration: Calibration | None = None
    calibration_from: str | None = None
    calibration_file: str = ""
    calibration_line: int = 0


def read_profile(name_or_path: str | Path) -> Profile:
    """The checked profile of a shipped name or a file; raises :class:`InputError`."""
    return _finish(_read_with_bases(_locate(name_or_path, None, ""), ()))


def _locate(name_or_path: str | Path, relative_to: Path | None, where: str) -> Path:
    """File of a shipped name or of a path (with a slash or ending in .yaml), relative to the file that names it."""
    text = str(name_or_path)
    if text.endswith((".yaml", ".yml")) or "/" in text or "\\" in text:
        path = (relative_to or Path()) / text
        if path.is_file():
            return path
        if where:
            fail(where, "base", f"no such file '{path}'", "a path is relative to the file that names it")
        raise InputError(f"{path}: no such profile file; give an existing YAML file or one of {_names()}")
    path = profile_folder() / f"{text}.yaml"
    if text in profile_names():
        return path
    message = f"unknown GPU '{text}'; {_suggest(text)}valid names: {_names()}, or a path ending in .yaml"
    raise InputError(f"{where}: base: {message}" if where else message)


def _names() -> str:
    return ", ".join(profile_names())


def _suggest(word: str) -> str:
    return did_you_mean(word, profile_names())


def _read_with_bases(path: Path, below: tuple[Path, ...]) -> Draft:
    """The file's draft laid over its base's; ``below`` is the chain of files that led here."""
    draft = _read_draft(path)
    base = draft.identity.get("base")
    if base is None:
        return draft
    where = f"{draft.path}:{draft.identity_lines['base']}"
    base_path = _locate(base, path.parent, where)
    chain = (*below, path)
    if base_path.resolve() in {p.resolve() for p in chain}:
        names = " -> ".join(p.stem for p in (*chain, base_path))
        fail(where, "base", f"the profile is its own base ({names})", "end the chain with a profile without 'base:'")
    return _lay_over(_read_with_bases(base_path, chain), draft)


def _lay_over(base: Draft, child: Draft) -> Draft:
    merged = replace(child)
    merged.identity = base.identity | {"name": child.identity["name"]} | child.identity
    merged.identity_lines = {**child.identity_lines}
    merged.values = scale_followers(base.values, base.values | child.values, set(child.values))
    if child.calibration is None and child.calibration_from is None:
        merged.calibration, merged.calibration_from = base.calibration, base.calibration_from
        merged.calibration_file, merged.calibration_line = base.calibration_file, base.calibration_line
        if base.calibration is not None:
            merged.calibration = replace(base.calibration, source=base.calibration.source or base.identity["name"])
    return merged


def scale_followers(before: dict[str, Quantity], after: dict[str, Quantity], changed: set[str]) -> dict[str, Quantity]:
    """``after`` with the numbers scaled that follow one in ``changed`` and are not in it themselves."""
    result = dict(after)
    for leader, followers in FOLLOWERS.items():
        if leader in changed and leader in before:
            ratio = result[leader].value / before[leader].value
            for follower in followers:
                if follower in before and follower not in changed and ratio != 1:
                    result[follower] = _scaled(before[follower], ratio, follower, leader)
    # The datasheet's tensor FLOP/s is the fastest path's rate x SMs x clock: it follows all three.
    for dotted in [key for key in result if key.startswith("spec_tensor_flops.")]:
        dtype = dotted.split(".")[1]
        old, new = _peak_flops(before, dtype), _peak_flops(result, dtype)
        if dotted in before and dotted not in changed and old and new and new != old:
            result[dotted] = _scaled(before[dotted], new / old, dotted, "num_sms x tensor rate x spec_clock_hz")
    return result


def _scaled(quantity: Quantity, ratio: float, key: str, leader: str) -> Quantity:
    value = quantity.value * ratio
    value = int(value + 1e-6) if key_of(key).integer else value
    source = f"follows {leader} (x{ratio:.6g}) from {quantity.value:.6g}: {quantity.source}"
    return replace(quantity, value=value, kind="assumed", source=source)


def _peak_flops(values: dict[str, Quantity], dtype: str) -> float | None:
    rates = [
        q.value for k, q in values.items() if k.startswith("tensor_flop_per_cycle_per_sm.") and k.endswith(f".{dtype}")
    ]
    if not rates or "num_sms" not in values or "spec_clock_hz" not in values:
        return None
    return max(rates) * values["num_sms"].value * values["spec_clock_hz"].value


def _read_draft(path: Path) -> Draft:
    try:
        stat = path.stat()
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); give a readable YAML file") from error
    # A copy: drafts are cached per file version and must not be changed by whoever lays another over them.
    draft = _parse_file(str(path), stat.st_mtime_ns, stat.st_size)
    return replace(draft, identity=dict(draft.identity), values=dict(draft.values))


@lru_cache(maxsize=64)
def _parse_file(path: str, _mtime_ns: int, _size: int) -> Draft:
    root = compose(path)
    draft = Draft(path)
    for key_node, node in pairs(root, path, ""):
        key, line = key_node.value, key_node.start_mark.line + 1
        where = f"{path}:{line}"
        if key in IDENTITY_KEYS:
            draft.identity[key] = _identity(key, node, where)
            draft.identity_lines[key] = line
        elif key in SCALAR_KEYS:
            draft.values[key] = _quantity(key, node, path, line)
        elif key in GROUP_KEYS:
            _group(key, key, GROUP_KEYS[key][1], node, path, draft)
        elif key == "calibration":
            draft.calibration_file, draft.calibration_line = path, line
            draft.calibration, draft.calibration_from = parse_calibration(path, node)
        else:
            fail(where, key, "unknown key", nearest(key, [*IDENTITY_KEYS, *SCALAR_KEYS, *GROUP_KEYS, "calibration"]))
    draft.identity.setdefault("name", Path(path).stem)
    return draft


def _identity(key: str, node: yaml.Node, where: str) -> Any:
    if key == "capabilities":
        if not isinstance(node, yaml.SequenceNode) or not all(isinstance(n, yaml.ScalarNode) for n in node.value):
            fail(where, key, "not a list", f"write [a, b] with any of {', '.join(CAPABILITIES)}")
        names = [n.value for n in node.value]
        for name in names:
            if name not in CAPABILITIES:
                fail(where, key, f"unknown capability '{name}'", nearest(name, CAPABILITIES))
        return frozenset(names)
    if not isinstance(node, yaml.ScalarNode) or not node.value.strip():
        fail(where, key, "not a text", f"write '{key}: some text' on one line")
    text = node.value.strip()
    if len(text) > MOST_LETTERS:
        fail(where, key, f"{len(text):,} letters", f"at most {MOST_LETTERS}")
    if not text.isprintable():
        fail(where, key, "a control character", "write plain letters on one line")
    if key == "architecture" and text not in ARCHITECTURES:
        fail(where, key, f"unknown architecture '{text}'", nearest(text, ARCHITECTURES))
    if key == "compute_capability" and not re.fullmatch(r"\d+\.\d", text):
        fail(where, key, f"'{text}' is no compute capability", 'write it in quotes, such as "9.0"')
    return text


def _group(
    group: str, dotted: str, levels: tuple[tuple[str, ...], ...], node: yaml.Node, path: str, draft: Draft
) -> None:
    where = f"{path}:{node.start_mark.line + 1}"
    if not isinstance(node, yaml.MappingNode):
        fail(where, dotted, "not a mapping", f"expected keys among {', '.join(levels[0])}")
    for key_node, child in pairs(node, path, dotted):
        line = key_node.start_mark.line + 1
        name = f"{dotted}.{key_node.value}"
        if key_node.value not in levels[0]:
            fail(f"{path}:{line}", name, "unknown key", nearest(key_node.value, levels[0]))
        if len(levels) == 1:
            draft.values[name] = _quantity(name, child, path, line)
        else:
            _group(group, name, levels[1:], child, path, draft)


def _quantity(key: str, node: yaml.Node, path: str, line: int) -> Quantity:
    where = f"{path}:{line}"
    shape = "write {value: ..., kind: spec|measured|assumed, source: ...}"
    if not isinstance(node, yaml.MappingNode):
        fail(where, key, "a bare value without kind and source", shape)
    parts: dict[str, tuple[str, str]] = {}
    for key_node, child in pairs(node, path, key):
        part_where = f"{path}:{key_node.start_mark.line + 1}"
        if key_node.value not in ("value", "kind", "source"):
            suggestion = nearest(key_node.value, ("value", "kind", "source"))
            fail(part_where, f"{key}.{key_node.value}", "unknown key", suggestion)
        if not isinstance(child, yaml.ScalarNode):
            fail(part_where, f"{key}.{key_node.value}", "not a single value", shape)
        parts[key_node.value] = (child.value.strip(), part_where)
    if "value" not in parts:
        fail(where, key, "no value", shape)
    if not parts.get("source", ("", ""))[0]:
        fail(where, key, "no source", "say where the number comes from: 'source: ...'")
    if "kind" not in parts:
        fail(where, key, "no kind", f"one of {', '.join(KINDS)}")
    kind, kind_where = parts["kind"]
    if kind not in KINDS:
        fail(kind_where, key, f"unknown kind '{kind}'", f"one of {', '.join(KINDS)}")
    text, value_where = parts["value"]
    value = checked_number(key, text, value_where)
    return Quantity(value, key_of(key).unit, kind, parts["source"][0], where)


def checked_number(key: str, text: str, where: str) -> float:
    """The number that ``text`` gives for a schema key: unit, whole number where one is needed, bound."""
    schema = key_of(key)
    try:
        value = parse_quantity(text, schema.dimension)
    except InputError as error:
        raise InputError(f"{where}: {key}: {error}") from None
    return bounded_number(key, value, where)


def bounded_number(key: str, value: float, where: str) -> float:
    """``value`` as the key's type, or an error when it is fractional, zero or negative against the schema."""
    schema = key_of(key)
    if value < 0 or (value == 0 and not schema.zero_allowed):
        bound = "0 or more" if schema.zero_allowed else "more than 0"
        fail(where, key, f"{value:.6g} is {'negative' if value < 0 else 'zero'}", f"{schema.about}: {bound}")
    low, high = LIMITS[schema.dimension]
    if value and not low <= value <= high:
        unit = f", in {schema.unit}" if schema.unit else ""
        fail(where, key, f"{value:.6g} is outside {low:g} .. {high:g}", schema.about + unit)
    if schema.integer:
        if value != int(value):
            fail(where, key, f"{value:.10g} is not whole", f"{schema.about}: a whole number")
        return int(value)
    return value


def _finish(draft: Draft) -> Profile:
    """Check a complete draft and make the profile."""
    for key in ("title", "architecture", "compute_capability", "capabilities"):
        if key not in draft.identity:
            fail(f"{draft.path}:1", key, "missing", "add it, or inherit it with 'base:'")
    for key, (value, source) in DEFAULTS.items():
        draft.values.setdefault(key, Quantity(value, key_of(key).unit, "assumed", source, f"{draft.path}:1"))
    for key in [*SCALAR_KEYS, *GROUP_KEYS]:
        if not any(name == key or name.startswith(f"{key}.") for name in draft.values):
            fail(f"{draft.path}:1", key, "missing", "add it with value, kind and source, or inherit it with 'base:'")
    identity = draft.identity
    check_consistency(draft.values, identity["capabilities"], identity["name"])
    return Profile(
        name=identity["name"],
        title=identity["title"],
        architecture=identity["architecture"],
        compute_capability=identity["compute_capability"],
        capabilities=identity["capabilities"],
        base=identity.get("base") if "base" in draft.identity_lines else None,
        values=FrozenMapping(in_schema_order(draft.values)),
        calibration=_resolve_calibration(draft, (identity["name"],)),
        path=draft.path,
    )


def in_schema_order(values: dict[str, Quantity]) -> dict[str, Quantity]:
    """The same values, groups first after the clocks, for people who read the list."""
    order = {key: index for index, key in enumerate(SCALAR_KEYS)}
    group_rank = order["power_cap_w"] + 0.5
    return dict(sorted(values.items(), key=lambda item: (order.get(item[0], group_rank), "." in item[0])))


def _resolve_calibration(draft: Draft, chain: tuple[str, ...]) -> Calibration:
    if draft.calibration_from is None:
        if draft.calibration is None:
            return Calibration()
        return replace(draft.calibration, source=draft.calibration.source or draft.identity["name"])
    other = draft.calibration_from
    where = f"{draft.calibration_file}:{draft.calibration_line}"
    if other in chain:
        names = " -> ".join((*chain, other))
        fail(where, "calibration.from", f"the calibration comes from itself ({names})", "name a calibrated profile")
    try:
        path = _locate(other, Path(draft.calibration_file).parent, "")
    except InputError as error:
        raise InputError(f"{where}: calibration.from: {error}") from None
    return _resolve_calibration(_read_with_bases(path, ()), (*chain, other))


def check_consistency(values: dict[str, Quantity], capabilities: frozenset[str], name: str) -> None:
    """Relations between values: limits that contain each other, capabilities and rates, dense against sparse FLOP/s."""
    no_more_than = (
        ("smem_bytes_per_cta_max", "smem_bytes_per_sm"),
        ("smem_bytes_per_sm", "l1_smem_bytes_per_sm"),
        ("spec_clock_hz", "max_clock_hz"),
        ("hbm_sustained_read_bytes_per_s", "hbm_bandwidth_bytes_per_s"),
        ("hbm_sustained_copy_bytes_per_s", "hbm_bandwidth_bytes_per_s"),
    )
    for small, large in no_more_than:
        if values[small].value > values[large].value:
            wrong = f"{values[small].value:.10g} is more than {large} = {values[large].value:.10g}"
            fail(values[small].location, small, wrong, f"at most {large}")
    for key, quantity in values.items():
        if key.startswith("tensor_flop_per_cycle_per_sm."):
            _, tensor_path, dtype = key.split(".")
            for needed in (tensor_path, *(("fp8_tensor",) if dtype == "fp8" else ())):
                if needed not in capabilities:
                    wrong = f"a rate for something that {name} cannot do"
                    fail(quantity.location, key, wrong, f"remove it, or add '{needed}' to capabilities")
        if key.startswith("spec_tensor_flops."):
            peak = _peak_flops(values, key.split(".")[1])
            if peak is None:
                fail(quantity.location, key, "no tensor rate for this type", "add it to tensor_flop_per_cycle_per_sm")
            if not 0.95 <= quantity.value / peak <= 1.05:
                wrong = f"{quantity.value:.4g} FLOP/s, but rate x num_sms x spec_clock_hz is {peak:.4g}"
                fail(quantity.location, key, wrong, "the two agree within 5 % (datasheets double it for sparsity)")
    if ("tmem" in capabilities) != (values["tmem_bytes_per_sm"].value > 0):
        wrong = "tensor memory and the capability 'tmem' do not go together"
        fail(values["tmem_bytes_per_sm"].location, "tmem_bytes_per_sm", wrong, "give both or neither")
