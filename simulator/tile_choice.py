"""``--tiles``: the tile that a kernel would be written with for a GPU, found by simulating the legal ones.

The algorithms say which tiles are legal; here they are tried. A launch with few events decides between tiles that
are clearly apart; the best few and the shipped tile are then simulated as finely as any other prediction.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from simulator.errors import UnsupportedError
from simulator.problem import AttentionProblem
from simulator.profile import Profile
from simulator.program import Program

#: Events of a replay that only ranks tiles, and how many of the best are then simulated in full.
RANKING_EVENTS = 20_000
FINALISTS = 4
#: Keys of a tile that the first round tries, beside the most that fit.
FIRST_KEYS = (64, 128)
FIRST_STAGES = (1, 2)
#: Gains below this are the model's noise, not a reason to leave the shipped tile.
LEAST_GAIN = 0.002


@dataclass(frozen=True)
class _Call:
    """One attention call whose tile is open; ``run(program, events)`` simulates (time in us)."""

    algorithm: str
    problem: AttentionProblem
    profile: Profile
    implementation: str | None
    hypothetical: bool
    run: Callable[[Program, int | None], float]

    def program(self, tiles: Any = None) -> Program:
        from algorithms import build_program

        return build_program(self.algorithm, self.problem, self.profile, self.implementation, self.hypothetical, tiles)


def check_tiles(text: str | None) -> str | None:
    """``auto``, a tile such as ``128x64x2x2``, or ``None`` for the shipped kernel's (also ``kernel``);
    :class:`InputError` otherwise."""
    from algorithms.tile_search import TileChoice

    if text is None or text.strip() == "kernel":
        return None
    return "auto" if text.strip() == "auto" else str(TileChoice.parse(text))


def program_with_tiles(
    tiles: str,
    algorithm: str,
    problem: AttentionProblem,
    profile: Profile,
    implementation: str | None,
    hypothetical: bool,
    run: Callable[[Program, int | None], float],
) -> tuple[Program, str]:
    """The program with the given tile, or with the fastest legal one (``auto``), and a line that says which and why.

    ``auto`` leaves kernels whose tiles are fixed as they are.
    """
    from algorithms import algorithm_module
    from algorithms.tile_search import TileChoice

    call = _Call(algorithm, problem, profile, implementation, hypothetical, run)
    if tiles != "auto":
        choice = TileChoice.parse(tiles)
        return call.program(choice), f"tiles: {choice} as asked (rows x keys x stages x warpgroups)"
    if problem.pass_ != "fwd" or not hasattr(algorithm_module(algorithm), "forward_tile"):
        elsewhere = getattr(algorithm_module(algorithm), "OTHER_TILES", "") if problem.pass_ == "fwd" else ""
        said = f"tiles: those of {algorithm}'s {problem.pass_} kernels are fixed; nothing to choose"
        return call.program(), "; ".join(filter(None, (said, elsewhere)))
    return _fastest(call)


def legal_tiles(algorithm: str, problem: AttentionProblem, profile: Profile) -> list:
    """Every candidate tile (:class:`~algorithms.tile_search.TileChoice`) that fits ``profile``, in order."""
    from algorithms import algorithm_module
    from algorithms.tile_search import candidates

    module, found = algorithm_module(algorithm), []
    for choice in candidates(algorithm):
        try:
            module.forward_tile(problem, profile, choice)
        except UnsupportedError:
            continue
        found.append(choice)
    return found


def _fastest(call: _Call) -> tuple[Program, str]:
    legal = legal_tiles(call.algorithm, call.problem, call.profile)
    own, why_not = _shipped(call)
    if own is not None and _tile_of(own) in legal:
        legal.remove(_tile_of(own))
    if not legal and own is None:
        raise UnsupportedError(f"tiles: no legal tile of {call.algorithm} fits {call.profile.name} ({why_not})")
    ranked = _ranked(call, legal)
    finalists = [call.program(choice) for _, choice in ranked[:FINALISTS]]
    timed = [(call.run(program, None), _tile_of(program), program) for program in finalists]
    best_time, best, program = min(timed, key=lambda t: t[:2]) if timed else (float("inf"), None, None)
    searched = f"{len(ranked)} of {len(legal)} other legal tiles simulated"
    if own is None:
        return program, f"tiles: auto chose {best}; the shipped kernel does not fit ({why_not}); {searched}"
    own_time, own_tile = call.run(own, None), _tile_of(own) or "split-KV kernel"
    if best_time >= own_time * (1.0 - LEAST_GAIN):
        return own, f"tiles: auto keeps the shipped kernel's {own_tile}; {searched}"
    gain = 100 * (1 - best_time / own_time)
    said = f"{gain:.1f} % less time than the shipped kernel's {own_tile}"
    return program, f"tiles: auto chose {best} (rows x keys x stages x warpgroups), {said}; {searched}"


def _shipped(call: _Call) -> tuple[Program | None, str]:
    try:
        return call.program(), ""
    except UnsupportedError as error:
        # a kernel that lacks capabilities, not space, has no business here
        if "SMEM" not in str(error):
            raise
        return None, str(error)


def _ranked(call: _Call, legal: list) -> list[tuple[float, object]]:
    """Tiles by time: a first round over shapes with one stage and with two, then the neighbours of the best."""
    times: dict[object, float] = {}

    def look(choices) -> None:
        for choice in choices:
            if choice in fits and choice not in times:
                times[choice] = call.run(call.program(choice), RANKING_EVENTS)

    fits = set(legal)
    shapes = sorted({(c.tile_m, c.warpgroups) for c in legal})
    for tile_m, warpgroups in shapes:
        same = [c for c in legal if (c.tile_m, c.warpgroups) == (tile_m, warpgroups)]
        for stages in FIRST_STAGES:
            keys = [c.tile_n for c in same if c.stages == stages]
            look(c for c in same if c.stages == stages and c.tile_n in (*FIRST_KEYS, max(keys)))
    for _ in range(2):
        for choice in sorted(times, key=lambda c: (times[c], c))[:FINALISTS]:
            look(replace(choice, tile_n=choice.tile_n + step) for step in (-32, -16, 16, 32))
            look(replace(choice, stages=choice.stages + step) for step in (-1, 1))
    return sorted((time, choice) for choice, time in times.items())


def _tile_of(program: Program) -> tuple[int, int] | None:
    """The program's tile; ``None`` for a split-KV kernel, whose tile is not open."""
    from algorithms.tile_search import TileChoice

    if "stages" not in program.attributes:
        return None
    return TileChoice(*program.attributes["tile"], program.attributes["stages"], program.attributes["warpgroups"])
