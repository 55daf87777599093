"""What ``iosim model`` prints and writes: tables for people, rows for CSV, plain data for JSON."""

from __future__ import annotations

from math import fsum
from typing import TYPE_CHECKING, Any

from simulator.model_decode import CacheFloor, Crossing, GroupIntensity, Intensity, SplitGain, half_attention_context
from simulator.model_run import ModelRun, Swap
from simulator.tables import print_table
from simulator.wording import scaled, three_digits, time_text

if TYPE_CHECKING:
    from rich.console import Console

    from simulator.model_published import Row

PHASES = ("forward", "backward", "step")
_WHAT = {
    "training": "one training micro-batch, its share of the optimiser's step included",
    "prefill": "one prefill",
    "decode": "one decode step, a token a sequence",
}


def print_run(console: Console, run: ModelRun, swap: Swap | None, kernels: int) -> None:
    """The run: totals, groups, memory, what swapping attention does, and the longest kernels."""
    m = run.model
    context = "context" if run.kind == "decode" else "tokens"
    line = f"{m.title} on {run.gpu}: {_WHAT[run.kind]}; {run.batch} x {run.seqlen} {context}, {run.attention}"
    line += f", kernels cut as in '{run.style}'" if run.kind == "training" else ""
    # a changed GPU's name has brackets, which rich would take for a style
    console.print(line, highlight=False, markup=False)
    for note in run.notes:
        console.print(f"  {note}", style="yellow", highlight=False, markup=False)
    print_table(console, ("", ""), _totals(run))
    phases = [p for p in PHASES if p in run.phases()] if run.kind == "training" else []
    rows = []
    for group, time_us in run.groups().items():
        parts = [time_text(_part_us(run, group, phase)) for phase in phases]
        rows.append((group, *parts, time_text(time_us), f"{time_us / run.gpu_us:.1%}"))
    print_table(console, ("time by group", *phases, "total", "share"), rows)
    memory = [
        (name.removesuffix("_bytes").replace("_", " "), scaled(value, "B"))
        for name, value in vars(run.memory).items()
        if value
    ]
    print_table(console, ("memory", ""), [*memory, ("total", scaled(run.memory.total_bytes, "B"))])
    if swap is not None:
        print_swap(console, swap)
    if kernels:
        longest = sorted(run.lines, key=lambda entry: -entry.time_us)[:kernels]
        rows = [
            (
                f"{entry.work.name} ({entry.work.phase})",
                f"{entry.work.count:g}",
                time_text(entry.each.time_us),
                f"{entry.time_us / run.gpu_us:.1%}",
                f"{entry.each.flops / entry.each.time_us / 1e6:.0f}" if entry.each.flops else "",
                scaled(entry.each.hbm_bytes / entry.each.time_us * 1e6, "B/s"),
                entry.each.limiter,
            )
            for entry in longest
        ]
        print_table(console, ("longest kernels", "times", "each", "share", "TFLOP/s", "HBM", "limiter"), rows)


def _part_us(run: ModelRun, group: str, phase: str) -> float:
    return fsum(e.time_us for e in run.lines if e.work.group == group and e.work.phase == phase)


def _totals(run: ModelRun) -> list[tuple[str, str]]:
    share = f"{run.attention_share:.1%}"
    return [
        ("time", time_text(run.time_us)),
        ("tokens/s", scaled(run.tokens_per_s)),
        ("model TFLOP/s", three_digits(run.tflops)),
        (f"MFU ({run.flop_convention})", f"{run.mfu:.1%}"),
        ("tensor cores: executed FLOP over peak", f"{run.hfu:.1%}"),
        ("attention's share", share),
        ("power limit", _limit(run)),
        ("kernel launches", f"{run.launches:.0f}"),
        ("host, launching them", time_text(run.host_us)),
        *([("computed again in backward", run.recompute)] if run.kind == "training" else []),
    ]


def _limit(run: ModelRun) -> str:
    return f"holds {run.held_clock_hz / 1e6:.0f} MHz" if run.held_clock_hz else "not reached"


def print_swap(console: Console, swap: Swap) -> None:
    """Amdahl's law with its numbers."""
    slow, fast = swap.slower, swap.faster
    console.print(
        f"{slow.attention} -> {fast.attention}: attention {three_digits(swap.attention_speedup)}x faster, the step "
        f"{three_digits(swap.speedup)}x ({time_text(slow.time_us)} -> {time_text(fast.time_us)}).",
        highlight=False,
    )
    share = f"{slow.attention_share:.3f}"
    console.print(
        f"Amdahl: attention is {slow.attention_share:.1%} of the step with {slow.attention}, so "
        f"1 / ((1 - {share}) + {share} / {three_digits(swap.attention_speedup)}) = {three_digits(swap.amdahl)}x, "
        f"and at most {three_digits(swap.limit)}x with attention for free.",
        highlight=False,
    )
    if abs(swap.amdahl / swap.speedup - 1.0) > 0.02:
        console.print(
            "The step differs from Amdahl's figure because the rest changes too: "
            f"recomputed in backward: {slow.recompute} against {fast.recompute}; "
            f"bound by the host: {'yes' if slow.host_us > slow.gpu_us else 'no'} against "
            f"{'yes' if fast.host_us > fast.gpu_us else 'no'}; the power limit: {_limit(slow)} against {_limit(fast)}.",
            highlight=False,
        )


def print_decode(
    console: Console,
    floor: CacheFloor,
    intensity: list[Intensity],
    gains: list[SplitGain],
    crossed: list[Crossing],
    groups: list[GroupIntensity],
    group: int,
) -> None:
    """Why a faster attention kernel does little for decoding, and what does something."""
    console.print(
        f"The KV cache's {scaled(floor.cache_bytes, 'B')} at {scaled(floor.hbm_bytes_per_s, 'B/s')} take "
        f"{time_text(floor.floor_us)} of attention's {time_text(floor.attention_us)}, whatever the algorithm. Scores "
        "that are not stored, which is what FlashAttention saves, would be "
        f"{floor.score_bytes / floor.cache_bytes:.1%} more bytes: one query a sequence has one row of them.",
        highlight=False,
    )
    rows: list[tuple[str, ...]] = [
        (
            str(i.batch),
            three_digits(i.linear),
            three_digits(i.attention),
            three_digits(i.step),
            "HBM" if i.step < i.ridge else "tensor cores",
        )
        for i in intensity
    ]
    ridge = three_digits(intensity[0].ridge)
    print_table(console, ("FLOP/byte by batch", "products", "attention", "step", f"bound (ridge {ridge})"), rows)
    console.print(
        f"A weight serves the batch, a cached key only its group of {group} query heads: attention stays at "
        f"{three_digits(intensity[0].attention)} FLOP/byte at any batch.",
        highlight=False,
    )
    rows = [
        (
            f"{g.group}{' (this model)' if g.group == group else ''}",
            three_digits(g.attention),
            scaled(g.cache_bytes, "B"),
            "HBM" if g.attention < g.ridge else "tensor cores",
        )
        for g in groups
    ]
    print_table(console, ("query heads a KV head", "attention FLOP/byte", "KV cache", f"bound (ridge {ridge})"), rows)
    rows = [
        (
            str(g.batch),
            time_text(g.unsplit_us),
            time_text(g.split_us),
            f"{g.gain:.2f}x",
            scaled(g.bandwidth(g.unsplit_us), "B/s"),
            scaled(g.bandwidth(g.split_us), "B/s"),
        )
        for g in gains
    ]
    heading = f"one layer, {gains[0].context} keys: batch"
    print_table(console, (heading, "one split", "FlashDecoding", "gain", "cache read at", "with splits"), rows)
    console.print(_where_splits_help(gains), highlight=False)
    if not crossed:
        return
    rows = [
        (
            str(c.context),
            time_text(c.prefill.time_us),
            f"{c.prefill.attention_share:.0%}",
            time_text(c.decode.time_us),
            f"{c.decode.attention_share:.0%}",
            f"{c.steps_as_long_as_prefill:.0f}",
            scaled(c.decode.memory.kv_cache_bytes, "B"),
        )
        for c in crossed
    ]
    print_table(
        console,
        ("context", "prefill", "attention", "decode step", "attention", "steps as long as prefill", "KV cache"),
        rows,
    )
    for kind in ("prefill", "decode"):
        points = [(c.context, getattr(c, kind).attention_share) for c in crossed]
        half = half_attention_context(points)
        if half is not None:
            console.print(f"Attention is half of a {kind} from about {half:.0f} tokens on.", highlight=False)
        else:
            first, last = points[0], points[-1]
            side = "less" if last[1] < 0.5 else "more"
            console.print(
                f"Attention is {side} than half of a {kind} from {first[0]} to {last[0]} tokens.", highlight=False
            )


def _where_splits_help(gains: list[SplitGain]) -> str:
    """One sentence on FlashDecoding's gain by batch."""
    helped = [g for g in gains if g.gain > 1.1]
    if not helped:
        return "FlashDecoding's splits gain less than 10 % at these batches: one split keeps all SMs reading."
    best, last = max(helped, key=lambda g: g.gain), helped[-1]
    text = f"FlashDecoding's splits help up to batch {last.batch} ({best.gain:.2f}x at batch {best.batch})"
    if last is gains[-1]:
        return text + "."
    return text + ": from there on one split keeps all SMs reading."


def print_published(console: Console, rows: list[Row]) -> None:
    """Predicted against published, with signed errors."""
    from simulator.model_published_table import HEADINGS, cells, remarks, summary

    print_table(console, HEADINGS, [cells(row) for row in rows])
    for line in (*summary(rows), "Not modelled, by framework:", *(f"  {line}" for line in remarks(rows))):
        console.print(line, highlight=False)


def run_summary(run: ModelRun) -> dict[str, Any]:
    """Totals of a run as plain data."""
    return {
        "model": run.model.name,
        "gpu": run.gpu,
        "kind": run.kind,
        "attention": run.attention,
        "fusion": run.style,
        "batch": run.batch,
        "seqlen": run.seqlen,
        "time_us": run.time_us,
        "gpu_us": run.gpu_us,
        "host_us": run.host_us,
        "tokens_per_s": run.tokens_per_s,
        "model_flops": run.model_flops,
        "model_tflops": run.tflops,
        "flop_convention": run.flop_convention,
        "mfu": run.mfu,
        "executed_flops": run.executed_flops,
        "hfu": run.hfu,
        "attention_us": run.attention_us,
        "attention_share": run.attention_share,
        "launches": run.launches,
        "power_limited_clock_mhz": run.held_clock_hz / 1e6 if run.held_clock_hz else None,
        "recompute": run.recompute,
        **vars(run.memory),
        "memory_bytes": run.memory.total_bytes,
        "memory_fits": run.memory_fits,
        "notes": "; ".join(run.notes),
    }


def kernel_rows(run: ModelRun) -> list[dict[str, Any]]:
    """One row a kernel, the longest first."""
    return [
        {
            "model": run.model.name,
            "gpu": run.gpu,
            "kind": run.kind,
            "attention": run.attention,
            "kernel": e.work.name,
            "group": e.work.group,
            "phase": e.work.phase,
            "count": e.work.count,
            "time_us_each": e.each.time_us,
            "time_us": e.time_us,
            "share": e.time_us / run.gpu_us,
            "launches_each": e.each.launches,
            "flops_each": e.each.flops,
            "hbm_bytes_each": e.each.hbm_bytes,
            "limiter": e.each.limiter,
        }
        for e in sorted(run.lines, key=lambda e: -e.time_us)
    ]


def published_data(rows: list[Row]) -> list[dict[str, Any]]:
    """Predicted against published as plain data."""
    return [vars(r) | {"error": r.error} for r in rows]
