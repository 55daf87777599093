"""The attention algorithms: one module each, with its schedule and the real kernels that follow it."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from types import ModuleType

from algorithms.tile_search import TileChoice
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
    tiles: TileChoice | None = None,
) -> Program:
    """The tile program of ``problem`` on ``gpu``; ``implementation`` ``None`` takes the algorithm's default there.

    ``tiles`` (a :class:`~algorithms.tile_search.TileChoice`) replaces the kernel's own tile in algorithms that can
    choose; :class:`~simulator.errors.UnsupportedError` in others.
    """
    module = algorithm_module(algorithm)
    # no kernel here gives more queries than this to one CTA: refused before its grid is made
    least = problem.batch * problem.kv_heads * -(-problem.seqlen_q // 256)
    if least > MOST_CTAS:
        wrong = f"at least {least:,} CTAs (sequences x KV heads x 256 queries); up to {MOST_CTAS:,} are simulated"
        raise UnsupportedError(f"{wrong}: take fewer sequences, heads or queries")
    chosen = implementation or default_implementation(algorithm, gpu, problem)
    if chosen not in module.IMPLEMENTATIONS:
        hint = did_you_mean(chosen, module.IMPLEMENTATIONS)
        known = ", ".join(module.IMPLEMENTATIONS)
        raise InputError(f"implementation: {chosen!r} is not one of {algorithm}'s; {hint}known: {known}")
    build: Callable[..., Program] = module.build
    if tiles is None:
        return build(problem, chosen, gpu, hypothetical)
    if not hasattr(module, "forward_tile"):
        raise UnsupportedError(f"tiles: {algorithm}'s tiles are fixed in its kernels; only fa2 and fa3 can choose")
    return build(problem, chosen, gpu, hypothetical, tiles)
