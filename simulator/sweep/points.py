"""One point of a sweep as a row: every input, every output, and why there is no output if there is none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from simulator.errors import InputError
from simulator.overrides import apply_overrides
from simulator.predict import OUTPUT_COLUMNS, Case, parse_case
from simulator.profile import Profile, key_of
from simulator.quantities import parse_quantity
from simulator.result import Result
from simulator.sweep.designs import Point
from simulator.sweep.spec import PROBLEM_COLUMNS, Spec

#: Columns of a row beside those of the swept hardware, in order.
INPUTS = ("point", "algorithm", "implementation", "gpu")
CASE_COLUMNS = tuple(c for c in PROBLEM_COLUMNS if c != "seqlens")
TILE_COLUMNS = ("tiles", "tile")
_TEXTS = {"algorithm", "implementation", "gpu", "dtype", "pass", "window", "mask", "seqlens_q", "seqlens_k"}
_TEXTS |= {"l2_state", "timing", "tiles", "tile", "limiter", "warnings", "error"}
_FLOATS = {"dropout", "softcap", "clock_mhz"}


@dataclass(frozen=True)
class Settings:
    """What all points of a sweep share; small, because it travels with every batch."""

    profiles: Mapping[str, Profile]
    hardware: tuple[str, ...] = ()
    tiles: str | None = None
    hypothetical: bool = False
    event_budget: int | None = None

    @classmethod
    def of(cls, spec: Spec) -> Settings:
        """The settings of ``spec``."""
        hardware = tuple(axis.name for axis in spec.axes if axis.kind == "hardware")
        return cls(spec.profiles, hardware, spec.tiles, spec.hypothetical, spec.event_budget)

    def columns(self) -> dict[str, str]:
        """Column -> ``text``, ``int``, ``float`` or ``bool``, in the order in which rows are written."""
        found = {}
        for name in (*INPUTS, *(hardware_column(k) for k in self.hardware), *CASE_COLUMNS, *TILE_COLUMNS):
            found[name] = "text" if name in _TEXTS else "float" if name in _FLOATS else "int"
        for key in self.hardware:
            found[hardware_column(key)] = "int" if "." not in key and _is_whole(key) else "float"
        found |= dict.fromkeys(("causal", "deterministic"), "bool")
        for name in OUTPUT_COLUMNS:
            whole = "bytes" in name or "flops" in name
            found[name] = "text" if name in _TEXTS else "int" if whole else "float"
        return found


def hardware_column(key: str) -> str:
    """The column of a swept hardware key: the key, or for a whole group of rates its common factor."""
    return f"{key}_factor" if _is_group(key) else key


def _is_group(key: str) -> bool:
    from simulator.profile import GROUP_KEYS

    return key in GROUP_KEYS


def _is_whole(key: str) -> bool:
    return not _is_group(key) and key_of(key).integer


def hardware_number(profile: Profile, key: str, text: str) -> float:
    """The number that the text of a hardware axis means on ``profile`` (a group's: its factor)."""
    factor = float(text[1:]) if text[0] in "x*×" else None
    if _is_group(key):
        return factor if factor is not None else float("nan")
    if factor is None:
        value = parse_quantity(text, key_of(key).dimension)
    else:
        value = profile.values[key].value * factor if key in profile.values else float("nan")
    return round(value) if _is_whole(key) else value


def evaluate(point: Point, settings: Settings) -> dict[str, Any]:
    """The row of one point. A point that cannot be simulated has an ``error`` and empty outputs."""
    row: dict[str, Any] = dict.fromkeys(settings.columns())
    row |= {"point": point.index, "algorithm": point.algorithm, "gpu": point.gpu, "tiles": settings.tiles or "kernel"}
    profile = settings.profiles[point.gpu]
    for key, text in point.hardware:
        row[hardware_column(key)] = hardware_number(profile, key, text)
    row |= {"limiter": "", "warnings": "", "error": ""}
    try:
        cells = dict(point.case)
        algorithm, _, implementation = point.algorithm.partition(":")
        case = parse_case(cells | {"algorithm": algorithm, "implementation": implementation, "gpu": point.gpu})
        row |= case_cells(case)
        result = _simulated(case, profile, point.hardware, settings)
        attributes: Mapping[str, Any] = result.attributes
        tile = attributes.get("tile") or attributes.get("backward_tile")
        row |= result.row()
        # products of unfused attention have one each, where they were chosen
        chosen = ",".join(f"{part}={choice}" for part, choice in attributes.get("tiles", {}).items())
        row |= {"implementation": result.implementation, "tile": "x".join(map(str, tile)) if tile else chosen}
        lines = [f"hypothetical: {line}" for line in result.substitutions]
        row["warnings"] = "; ".join([*filter(None, [row["warnings"]]), *lines])
    except InputError as error:
        row["error"] = " ".join(str(error).split())
    except Exception as error:
        # a defect of iosim at one point must not cost a user the other ten thousand
        row["error"] = f"internal error, please report it: {type(error).__name__}: {' '.join(str(error).split())}"
    return row


def _simulated(case: Case, base: Profile, hardware: tuple[tuple[str, str], ...], settings: Settings) -> Result:
    from simulator import simulate

    result: Result = simulate(
        case.algorithm,
        case.problem,
        _changed(base, hardware),
        implementation=case.implementation,
        hypothetical=settings.hypothetical,
        tiles=settings.tiles,
        event_budget=settings.event_budget,
        **case.conditions.arguments(),
    )
    return result


@lru_cache(maxsize=8)
def _changed(base: Profile, hardware: tuple[tuple[str, str], ...]) -> Profile:
    """The GPU of a design; its algorithms follow each other, so the last few are all it takes."""
    return apply_overrides(base, dict(hardware)) if hardware else base


def case_cells(case: Case) -> dict[str, Any]:
    """A case's problem and conditions as the columns of a row."""
    p, c = case.problem, case.conditions
    cells: dict[str, Any] = {
        name: getattr(p, "pass_" if name == "pass" else name)
        for name in CASE_COLUMNS
        if name not in ("l2_state", "timing", "clock_mhz")
    }
    for name, separator in (("window", ","), ("seqlens_q", ";"), ("seqlens_k", ";")):
        cells[name] = separator.join(map(str, cells[name])) if cells[name] is not None else ""
    cells["mask"] = cells["mask"] or ""
    return cells | {"l2_state": c.l2_state, "timing": c.timing, "clock_mhz": c.clock_mhz}


def evaluate_batch(points: list[Point], settings: Settings) -> list[dict[str, Any]]:
    """The rows of several points (what one task of a worker does)."""
    return [evaluate(point, settings) for point in points]
