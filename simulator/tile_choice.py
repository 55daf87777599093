"""``--tiles``: the tiles that a kernel would be written with for a GPU, found by simulating the legal ones.

The algorithms say which parts of a call have a tile that is open, and which tiles are legal; here they are tried. A
launch with few events decides between tiles that are clearly apart; the best few and the shipped tile are then
simulated as finely as any other prediction.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from algorithms.tile_search import TileChoice, Tiles, TileSpace
from simulator.errors import InputError, UnsupportedError
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
    """One attention call whose tiles are open; ``run(program, events)`` simulates (time in us)."""

    algorithm: str
    problem: AttentionProblem
    profile: Profile
    implementation: str
    hypothetical: bool
    run: Callable[[Program, int | None], float]

    def program(self, tiles: TileChoice | Tiles | None = None) -> Program:
        from algorithms import build_program

        return build_program(self.algorithm, self.problem, self.profile, self.implementation, self.hypothetical, tiles)


@dataclass(frozen=True)
class _Part:
    """One part of a call: its kernels, with this tile or that."""

    call: _Call
    name: str
    space: TileSpace

    def time_us(self, choice: TileChoice | None, events: int | None = None) -> float:
        """Time of this part's kernels with a tile, or with the shipped one."""
        implementation = self.space.implementation or self.call.implementation
        call = replace(self.call, problem=self.space.problem, implementation=implementation)
        program = call.program(None if choice is None else {self.name: choice})
        if self.space.kernels:
            program = replace(program, kernels=tuple(k for k in program.kernels if k.name in self.space.kernels))
        return call.run(program, events)


def check_tiles(text: str | None) -> str | None:
    """``auto``, a tile such as ``128x64x2x2``, tiles by part such as ``fwd=128x64x2x2,bwd=64x128x2x2``, or ``None`` for
    the shipped kernels' (also ``kernel``); :class:`InputError` otherwise."""
    if text is None or text.strip() == "kernel":
        return None
    if text.strip() == "auto":
        return "auto"
    tiles = _parsed(text)
    if isinstance(tiles, TileChoice):
        return str(tiles)
    return ",".join(f"{part}={choice}" for part, choice in tiles.items())


def _parsed(text: str) -> TileChoice | Tiles:
    if "=" not in text:
        return TileChoice.parse(text)
    tiles: dict[str, TileChoice] = {}
    for item in text.split(","):
        part, _, choice = item.partition("=")
        if part.strip() in tiles:
            raise InputError(f"tiles: {part.strip()!r} is given twice in {text!r}")
        tiles[part.strip()] = TileChoice.parse(choice)
    return tiles


def program_with_tiles(
    tiles: str,
    algorithm: str,
    problem: AttentionProblem,
    profile: Profile,
    implementation: str | None,
    hypothetical: bool,
    run: Callable[[Program, int | None], float],
) -> tuple[Program, tuple[str, ...]]:
    """The program with the given tiles, or with the fastest legal ones (``auto``), and lines that say which and why.

    ``auto`` leaves the parts of a call whose tiles are fixed as they are.
    """
    from algorithms import known_implementation, tile_spaces

    chosen = known_implementation(algorithm, profile, problem, implementation)
    call = _Call(algorithm, problem, profile, chosen, hypothetical, run)
    if tiles != "auto":
        given = _parsed(tiles)
        return call.program(given), (f"tiles: {tiles} as asked",)
    own, why_not = _shipped(call)
    best: dict[str, TileChoice] = {}
    lines = []
    spaces = tile_spaces(algorithm, problem, profile, chosen)
    for name, space in spaces.items():
        where = f"{name} " if len(spaces) > 1 else ""
        if not isinstance(space, TileSpace):
            lines.append(f"tiles: {where}nothing to choose: {space}")
            continue
        choice, line = _fastest(_Part(call, name, space))
        lines.append(f"tiles: {where}{line}")
        if choice is not None:
            best[name] = choice
    if not best:
        if own is None:
            raise UnsupportedError(why_not)
        return own, tuple(lines)
    program = call.program(best)
    # parts are timed apart; together they must pay too
    if len(spaces) > 1 and own is not None and run(program, None) >= run(own, None):
        return own, (*lines, "tiles: the shipped kernels' kept all the same: together the chosen ones are no faster")
    return program, tuple(lines)


def legal_tiles(
    algorithm: str, problem: AttentionProblem, profile: Profile, implementation: str | None = None
) -> list[TileChoice]:
    """Every candidate tile that fits ``profile``, in order; of a call of one part, whose tile is open."""
    from algorithms import tile_spaces

    (space,) = tile_spaces(algorithm, problem, profile, implementation).values()
    assert isinstance(space, TileSpace), space
    return space.legal()


def _fastest(part: _Part) -> tuple[TileChoice | None, str]:
    """The tile to leave the shipped one for, if any, and what to say of it."""
    space, call = part.space, part.call
    legal = [choice for choice in space.legal() if choice != space.shipped]
    own_time, why_not = _shipped_time_us(part)
    if not legal and why_not:
        raise UnsupportedError(f"tiles: no legal tile of {call.algorithm} fits {call.profile.name} ({why_not})")
    ranked = _ranked(part, legal)
    timed = [(part.time_us(choice), choice) for _, choice in ranked[:FINALISTS]]
    best_time, best = min(timed, default=(float("inf"), None))
    searched = f"{len(ranked)} of {len(legal)} other legal tiles simulated" if legal else "no other fits"
    if why_not:
        return best, f"auto chose {best}; the shipped kernel does not fit ({why_not}); {searched}"
    if best_time >= own_time * (1.0 - LEAST_GAIN):
        return None, f"auto keeps {space.shipped_says}; {searched}"
    gain = f"{100 * (1 - best_time / own_time):.1f} % less time than {space.shipped_says}"
    return best, f"auto chose {best} ({space.meaning}), {gain}; {searched}"


def _shipped(call: _Call) -> tuple[Program | None, str]:
    try:
        return call.program(), ""
    except UnsupportedError as error:
        # a kernel that lacks capabilities, not space, has no business here
        if "SMEM" not in str(error):
            raise
        return None, str(error)


def _shipped_time_us(part: _Part) -> tuple[float, str]:
    try:
        return part.time_us(None), ""
    except UnsupportedError as error:
        if "SMEM" not in str(error):
            raise
        return float("inf"), str(error)


def _ranked(part: _Part, legal: list[TileChoice]) -> list[tuple[float, TileChoice]]:
    """Tiles by time: a first round over shapes, then the neighbours of the best."""
    times: dict[TileChoice, float] = {}
    fits = set(legal)

    def look(choices: list[TileChoice]) -> None:
        for choice in choices:
            if choice in fits and choice not in times:
                try:
                    times[choice] = part.time_us(choice, RANKING_EVENTS)
                except UnsupportedError:
                    # this call asks more of a tile than that it fits
                    fits.discard(choice)

    look(part.space.first(legal) if part.space.first else _first_round(legal))
    for _ in range(2):
        for choice in sorted(times, key=lambda c: (times[c], c))[:FINALISTS]:
            look([replace(choice, tile_n=choice.tile_n + step) for step in (-32, -16, 16, 32)])
            look([replace(choice, stages=choice.stages + step) for step in (-1, 1)])
    return sorted((time, choice) for choice, time in times.items())


def _first_round(legal: list[TileChoice]) -> list[TileChoice]:
    """Every shape with one stage and with two, at two usual numbers of keys and the most that fit."""
    found = []
    for tile_m, warpgroups in sorted({(c.tile_m, c.warpgroups) for c in legal}):
        same = [c for c in legal if (c.tile_m, c.warpgroups) == (tile_m, warpgroups)]
        for stages in FIRST_STAGES:
            keys = [c.tile_n for c in same if c.stages == stages]
            found += [c for c in same if c.stages == stages and c.tile_n in (*FIRST_KEYS, max(keys))]
    return found
