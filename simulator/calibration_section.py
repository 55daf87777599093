"""The ``calibration:`` section of a profile: what a fit found, kept apart from the datasheet's values.

Either ``{from: other_profile}`` or ``{parameters: {...}, provenance: {...}}``, where a parameter is
``name: {value, unit, low, high, identified_by}`` and may hold further notes.
"""

import difflib
import math
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from simulator.errors import InputError
from simulator.profile import Calibration, CalibrationParameter, FrozenMapping
from simulator.yaml_lines import compose, fail, nearest, pairs, scalar

_PARAMETER_KEYS = ("value", "unit", "low", "high", "identified_by")


def parse_calibration(path: str, node: yaml.Node) -> tuple[Calibration | None, str | None]:
    """(calibration, None) or (None, name in ``from:``) of the section's YAML node; InputError with file and line."""
    where = f"{path}:{node.start_mark.line + 1}"
    if not isinstance(node, yaml.MappingNode):
        fail(where, "calibration", "not a mapping", "write {from: profile_name} or {parameters: {}}")
    entries = {
        key.value: (child, f"{path}:{key.start_mark.line + 1}") for key, child in pairs(node, path, "calibration")
    }
    for key, (_, key_where) in entries.items():
        if key not in ("from", "parameters", "provenance"):
            fail(key_where, f"calibration.{key}", "unknown key", nearest(key, ("from", "parameters", "provenance")))
    if "from" in entries:
        child, from_where = entries["from"]
        if len(entries) > 1:
            fail(from_where, "calibration.from", "given with other keys", "either 'from' or 'parameters'")
        if not isinstance(child, yaml.ScalarNode) or not child.value:
            fail(from_where, "calibration.from", "not a name", "write {from: profile_name}")
        return None, child.value
    if "parameters" not in entries:
        fail(where, "calibration", "no parameters", "write {from: profile_name} or {parameters: {}}")
    child, parameters_where = entries["parameters"]
    if not isinstance(child, yaml.MappingNode):
        fail(parameters_where, "calibration.parameters", "not a mapping", "name: {value, unit, low, high}")
    parameters = {
        key.value: _parameter(path, key, entry) for key, entry in pairs(child, path, "calibration.parameters")
    }
    provenance: Any = {}
    if "provenance" in entries:
        provenance = _plain(entries["provenance"][0])
        if not isinstance(provenance, dict):
            fail(entries["provenance"][1], "calibration.provenance", "not a mapping", "write 'key: text' lines")
    return Calibration(None, FrozenMapping(parameters), FrozenMapping(provenance)), None


def _parameter(path: str, key_node: yaml.Node, node: yaml.Node) -> CalibrationParameter:
    where = f"{path}:{key_node.start_mark.line + 1}"
    name = f"calibration.parameters.{key_node.value}"
    shape = "write {value: 1.2, unit: cycles, low: 0, high: 5, identified_by: ...}"
    if not isinstance(node, yaml.MappingNode):
        fail(where, name, "not a mapping", shape)
    parts = {key.value: child for key, child in pairs(node, path, name)}
    details = {part: _plain(child) for part, child in parts.items() if part not in _PARAMETER_KEYS}
    for part in details:
        # Other keys are the fit's own notes, but not one that looks like a misspelt key of ours.
        if difflib.get_close_matches(part, _PARAMETER_KEYS, n=1, cutoff=0.75):
            line = parts[part].start_mark.line + 1
            fail(f"{path}:{line}", f"{name}.{part}", "unknown key", nearest(part, _PARAMETER_KEYS))
    numbers: dict[str, float] = {}
    for part in ("value", "low", "high"):
        try:
            numbers[part] = float(parts[part].value)
            if not math.isfinite(numbers[part]):
                raise ValueError
        except KeyError:
            fail(where, f"{name}.{part}", "missing", shape)
        except (TypeError, ValueError):
            fail(where, f"{name}.{part}", f"'{parts[part].value}' is not a number", shape)
    unit = parts["unit"].value if "unit" in parts else ""
    if not unit:
        fail(where, f"{name}.unit", "missing", "name the unit ('1' for a ratio)")
    if not numbers["low"] <= numbers["value"] <= numbers["high"]:
        wrong = f"{numbers['value']:.6g} is outside [{numbers['low']:.6g}, {numbers['high']:.6g}]"
        fail(where, name, wrong, "low <= value <= high")
    identified_by = str(parts["identified_by"].value) if "identified_by" in parts else ""
    return CalibrationParameter(
        numbers["value"], unit, numbers["low"], numbers["high"], identified_by, FrozenMapping(details)
    )


def _plain(node: yaml.Node) -> Any:
    """Plain data of a node (texts stay texts, numbers become numbers)."""
    if isinstance(node, yaml.MappingNode):
        return {key.value: _plain(child) for key, child in node.value}
    if isinstance(node, yaml.SequenceNode):
        return [_plain(child) for child in node.value]
    assert isinstance(node, yaml.ScalarNode)
    return scalar(node)


def write_calibration(path: str | Path, section: Mapping[str, Any]) -> None:
    """Replace the ``calibration:`` section of the profile file ``path`` by ``section``; every other byte stays.

    ``section`` is plain data in one of the two forms of this module; it is appended where the file has none. The
    result is checked before it replaces the file (temporary file, then rename); InputError leaves the file as it was.
    """
    path = Path(path)
    root = compose(path)
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    text = yaml.safe_dump({"calibration": _builtin(section)}, sort_keys=False, allow_unicode=True, width=110)
    new = "".join(_with_section(root, lines, text))
    node = yaml.compose(new)
    assert node is not None
    keys = {key.value: child for key, child in node.value}
    parse_calibration(str(path), keys["calibration"])
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(new)
        os.chmod(temporary, path.stat().st_mode & 0o777)
        os.replace(temporary, path)
    except OSError as error:
        Path(temporary).unlink(missing_ok=True)
        raise InputError(f"{path}: cannot be written ({error.strerror}); make the file writable") from error


def _with_section(root: yaml.MappingNode, lines: list[str], text: str) -> list[str]:
    """The file's lines with the section's own lines replaced (appended when there is no section)."""
    for key, node in root.value:
        if key.value == "calibration":
            start, end = key.start_mark.line, min(node.end_mark.line + (node.end_mark.column > 0), len(lines))
            break
    else:
        if lines and not lines[-1].endswith("\n"):
            lines[-1] += "\n"
        return [*lines, text]
    # A block mapping ends where the next key starts: what is blank or a comment before that key stays with it.
    while end > start + 1 and (not lines[end - 1].strip() or lines[end - 1].startswith("#")):
        end -= 1
    return [*lines[:start], text, *lines[end:]]


def _builtin(data: Any) -> Any:
    """Plain dicts, lists, ints and floats of mappings, tuples and NumPy scalars, so that YAML stays readable."""
    if isinstance(data, Mapping):
        return {str(key): _builtin(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_builtin(value) for value in data]
    return data.item() if hasattr(data, "item") else data
