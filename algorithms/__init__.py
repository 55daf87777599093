"""The attention algorithms: one module each, with its schedule and the real kernels that follow it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from types import ModuleType

from algorithms.tile_search import TileChoice, Tiles, TileSpace, TileSpaces
from simulator.errors import InputError, UnsupportedError, did_you_mean
from simulator.problem import MOST_CTAS, AttentionProblem
from simulator.profile import Profile
from simulator.program import Program

#: Algorithm name -> module; imported when asked for.
MODULES = {
    "standard": "algorithms.standard",
    "fa1": "algorithms.fa1",
    "fa2": "algorithms.fa2",
    "fa3": "algorithms.fa3",
    "flash_decoding": "algorithms.flash_decoding",
}


def algorithm_module(name: str) -> ModuleType:
    """The module of algorithm ``name``; :class:`InputError` names the known ones."""
    if name not in MODULES:
        hint = did_you_mean(name, MODULES)
        raise InputError(f"algorithm: {name!r} is unknown; {hint}use one of {', '.join(MODULES)}")
    return import_module(MODULES[name])


def default_implementation(algorithm: str, gpu: Profile, problem: AttentionProblem | None = None) -> str:
    """The implementation that ``algorithm`` means on ``gpu`` when none is named (for ``problem``'s pass, if given)."""
    module = algorithm_module(algorithm)
    if problem is not None and problem.pass_ != "fwd" and hasattr(module, "BACKWARD_DEFAULT"):
        return str(module.BACKWARD_DEFAULT)
    choose = getattr(module, "default_for", None)
    return str(choose(gpu) if choose is not None else module.DEFAULT)


def build_program(
    algorithm: str,
    problem: AttentionProblem,
    gpu: Profile,
    implementation: str | None = None,
    hypothetical: bool = False,
    tiles: TileChoice | Tiles | None = None,
) -> Program:
    """The tile program of ``problem`` on ``gpu``; ``implementation`` ``None`` takes the algorithm's default there.

    ``tiles`` replaces the kernels' own: a :class:`~algorithms.tile_search.TileChoice` by part of the call, or one for
    a call of one part; :class:`~simulator.errors.UnsupportedError` where a part's tile is fixed or does not fit.
    """
    module = algorithm_module(algorithm)
    # no kernel here gives more queries than this to one CTA: refused before its grid is made
    least = problem.batch * problem.kv_heads * -(-problem.seqlen_q // 256)
    if least > MOST_CTAS:
        wrong = f"at least {least:,} CTAs (sequences x KV heads x 256 queries); up to {MOST_CTAS:,} are simulated"
        raise UnsupportedError(f"{wrong}: take fewer sequences, heads or queries")
    chosen = known_implementation(algorithm, gpu, problem, implementation)
    build: Callable[..., Program] = module.build
    if tiles is None:
        return build(problem, chosen, gpu, hypothetical)
    by_part = _by_part(tiles, algorithm, problem, chosen, gpu)
    program = build(problem, chosen, gpu, hypothetical, by_part)
    said = {part: str(choice) for part, choice in by_part.items()}
    return replace(program, attributes={**program.attributes, "tiles": said})


def known_implementation(algorithm: str, gpu: Profile, problem: AttentionProblem, implementation: str | None) -> str:
    """``implementation``, or the algorithm's default; :class:`InputError` where the algorithm has none of that name."""
    implementations = algorithm_module(algorithm).IMPLEMENTATIONS
    chosen = implementation or default_implementation(algorithm, gpu, problem)
    if chosen not in implementations:
        hint = did_you_mean(chosen, implementations)
        known = ", ".join(implementations)
        raise InputError(f"implementation: {chosen!r} is not one of {algorithm}'s; {hint}known: {known}")
    return chosen


def tile_spaces(algorithm: str, problem: AttentionProblem, gpu: Profile, implementation: str | None) -> TileSpaces:
    """By part of a call (a pass, or a product of unfused attention), what tile may be chosen, or why none."""
    chosen = known_implementation(algorithm, gpu, problem, implementation)
    found: TileSpaces = algorithm_module(algorithm).tile_spaces(problem, chosen, gpu)
    return found


def _by_part(
    tiles: TileChoice | Tiles, algorithm: str, problem: AttentionProblem, implementation: str, gpu: Profile
) -> Tiles:
    """``tiles`` by part, each of a part that is open."""
    spaces = tile_spaces(algorithm, problem, gpu, implementation)
    if isinstance(tiles, TileChoice):
        if len(spaces) > 1:
            example = ",".join(f"{part}={tiles}" for part in spaces)
            raise UnsupportedError(f"tiles: {algorithm} has {len(spaces)} parts here; say which, such as {example}")
        tiles = dict.fromkeys(spaces, tiles)
    for part in tiles:
        if part not in spaces:
            hint = did_you_mean(part, spaces)
            raise UnsupportedError(f"tiles: {algorithm} has no part {part!r} here; {hint}known: {', '.join(spaces)}")
        if not isinstance(space := spaces[part], TileSpace):
            raise UnsupportedError(f"tiles: {algorithm}'s {part} tile is fixed: {space}")
    return tiles
