"""The points of a design space, in a fixed order: the same spec gives the same points in every process.

A point is one kernel on one design: one algorithm, one GPU with some numbers changed, one problem.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from simulator.errors import InputError
from simulator.sweep.axes import MOST_POINTS, Axis
from simulator.sweep.spec import Spec


@dataclass(frozen=True)
class Point:
    """One simulation of a sweep: texts as a user would write them."""

    index: int
    algorithm: str
    gpu: str
    hardware: tuple[tuple[str, str], ...]
    case: tuple[tuple[str, str], ...]


def points_of(spec: Spec) -> list[Point]:
    """Every point of ``spec``; the algorithms of one design follow each other."""
    designs = _grid(spec.axes) if spec.design == "grid" else _drawn(spec)
    gpu = next(iter(spec.profiles))
    found: list[Point] = []
    for values in designs:
        by_kind: dict[str, dict[str, str]] = {"gpu": {"gpu": gpu}, "hardware": {}, "problem": {}}
        for axis, value in zip(spec.axes, values, strict=True):
            by_kind[axis.kind][axis.name] = value
        hardware = tuple(by_kind["hardware"].items())
        case = tuple((dict(spec.fixed) | by_kind["problem"]).items())
        for algorithm in spec.algorithms:
            found.append(Point(len(found), algorithm, by_kind["gpu"]["gpu"], hardware, case))
    return found


def _grid(axes: tuple[Axis, ...]) -> Iterator[tuple[str, ...]]:
    """Every combination; the last axis varies fastest."""
    values = [axis.grid() for axis in axes]
    size = math.prod(len(v) for v in values)
    if size > MOST_POINTS:
        raise InputError(f"design: a grid of {size:,} designs; use fewer steps, or draw them with kind: sobol")
    return itertools.product(*values)


def _drawn(spec: Spec) -> Iterator[tuple[str, ...]]:
    """Designs drawn uniformly over the axes (Owen-scrambled Sobol points, or pseudo-random ones)."""
    if spec.points > MOST_POINTS:
        raise InputError(f"design: {spec.points:,} points; at most {MOST_POINTS:,}")
    dimensions = len(spec.axes)
    if spec.design == "sobol":
        from scipy.stats import qmc

        if dimensions > qmc.Sobol.MAXDIM:
            raise InputError(f"design: {dimensions} axes; Sobol points exist for up to {qmc.Sobol.MAXDIM}")
        engine = qmc.Sobol(dimensions, scramble=True, seed=np.random.default_rng(spec.seed))
        # a Sobol sequence is balanced in powers of two: draw the next one and keep the first points of it
        shares = engine.random_base2(max(0, math.ceil(math.log2(spec.points))))[: spec.points]
    else:
        shares = np.random.default_rng(spec.seed).random((spec.points, dimensions))
    return (tuple(axis.at(float(u)) for axis, u in zip(spec.axes, row, strict=True)) for row in shares)


def fingerprint(spec: Spec, points: list[Point]) -> str:
    """A digest of everything that decides a sweep's rows beside iosim itself: points, base GPUs, settings."""
    digest = hashlib.sha256()
    for point in points:
        digest.update(json.dumps([point.algorithm, point.gpu, point.hardware, point.case]).encode())
    profiles = {name: profile.fingerprint() for name, profile in spec.profiles.items()}
    digest.update(json.dumps([profiles, spec.tiles, spec.hypothetical, spec.event_budget]).encode())
    return digest.hexdigest()
