"""Bytes against sequence length, shared memory or L2 size: the simulations behind ``iosim io --against``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from simulator import plot_runs
from simulator.options import RunOptions
from simulator.plots.io import sweep_rows
from simulator.problem import AttentionProblem
from simulator.profile import Profile

AGAINST = ("seqlen", "sram", "l2")
#: The algorithm whose blocks follow the size of the SRAM; the others' tiles are fixed in their kernels.
SRAM_ALGORITHMS = ("fa1:flash_attn_1_sram",)
#: Where on the axis, the run there, further columns of its row.
_Point = tuple[float, plot_runs.Run, dict[str, Any]]


def sweep(
    against: str,
    problem: AttentionProblem,
    profiles: Iterable[Profile],
    algorithms: Sequence[str],
    values: Sequence[float] | None = None,
    conditions: RunOptions | None = None,
    hypothetical: bool = False,
) -> tuple[list[dict[str, Any]], list[plot_runs.Run]]:
    """Rows for :func:`simulator.plots.io.plot_io_sweep`, and every run behind them.

    ``values`` are in tokens, KiB or MB; ``None`` takes a spread that fits.
    """
    conditions = conditions or RunOptions()
    rows, runs = [], []
    for profile in profiles:
        series = _series(against, problem, profile, algorithms, values, conditions, hypothetical)
        runs += [run for _, run, _ in series]
        rows += sweep_rows(
            against, [(x, run.algorithm, run.result, {"base_gpu": profile.name, **more}) for x, run, more in series]
        )
    return rows, runs


def _series(
    against: str,
    problem: AttentionProblem,
    profile: Profile,
    algorithms: Sequence[str],
    values: Sequence[float] | None,
    conditions: RunOptions,
    hypothetical: bool,
) -> list[_Point]:
    if against == "seqlen":
        lengths = [int(value) for value in values] if values else list(plot_runs.SEQLENS)
        found = plot_runs.seqlen_runs(problem, [profile], algorithms, conditions, lengths, None, hypothetical)
        return [(run.problem.seqlen_k, run, {}) for run in found]
    key, unit = ("l2_bytes", 1e6) if against == "l2" else ("smem_bytes_per_sm", 1024)
    if values is None and against == "l2":
        values = [round(profile.l2_bytes * factor / 1e6, 1) for factor in plot_runs.L2_FACTORS]
    points = [value * unit for value in values or plot_runs.SRAM_KIB]
    changed = plot_runs.changed_runs(key, points, problem, profile, algorithms, conditions)
    series: list[_Point] = [(value / unit, run, {}) for value, run in changed]
    return _with_guide(series) if against == "sram" else series


def _with_guide(series: list[_Point]) -> list[_Point]:
    """Add FlashAttention-1's Θ(N²d²/M), scaled to the bytes of its first point."""
    scale, found = None, []
    for x, run, more in series:
        if run.result is not None and run.algorithm.startswith("fa1"):
            sram = run.profile.smem_bytes_per_cta_max
            moved = run.result.l2_read_bytes + run.result.l2_write_bytes
            scale = scale or moved / plot_runs.guide_bytes(run.problem, sram)
            more = more | {"guide_bytes": scale * plot_runs.guide_bytes(run.problem, sram), "sram_bytes": sram}
        found.append((x, run, more))
    return found
