"""A comparison as text for people: two tables a GPU (more in a narrow terminal), and below
them what they cannot say."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, cast

from algorithms.varlen import padding_share
from simulator.comparison import Comparison, Entry
from simulator.problem import AttentionProblem
from simulator.tables import print_table
from simulator.wording import problem_text, scaled, three_digits, time_text

if TYPE_CHECKING:
    from rich.console import Console

    from simulator.profile import Profile


def print_comparison(console: Console, comparison: Comparison) -> None:
    """Print everything."""
    console.print(f"[bold]Problem[/]: {problem_text(comparison.problem)}", highlight=False)
    if comparison.decode_problem is not None:
        text = problem_text(comparison.decode_problem)
        console.print(
            f"[bold]Decode*[/]: {text} (* runs this, and so does the standard it is compared with)", highlight=False
        )
    if any(entry.padded for entry in comparison.entries):
        share = padding_share(comparison.problem)
        console.print(
            f"[bold]Padded[/]: every sequence as long as the longest; {share:.0%} of the score elements are padding",
            highlight=False,
        )
    for profile, entries in comparison.by_gpu():
        console.print()
        _print_gpu(console, profile, entries, comparison)


def _print_gpu(console: Console, profile: Profile, entries: list[Entry], comparison: Comparison) -> None:
    from rich.markup import escape
    from rich.padding import Padding
    from rich.text import Text

    console.print(f"[bold]{escape(profile.name)}[/]: {_roofline_text(profile, comparison.problem)}", highlight=False)
    _print_times(console, entries)
    ran = [entry for entry in entries if entry.result is not None]
    if ran:
        _print_bytes(console, ran)
    for line in notes(profile, entries):
        console.print(Padding(Text(line), (0, 0, 0, 1)))


def _roofline_text(profile: Profile, problem: AttentionProblem) -> str:
    bandwidth = profile.hbm_bandwidth_bytes_per_s
    if problem.dtype not in profile.spec_tensor_flops:
        return f"no {problem.dtype} tensor rate, HBM {scaled(bandwidth, 'B/s')} (datasheet)"
    flops, ridge = profile.spec_flops(problem.dtype), profile.ridge_flop_per_byte(problem.dtype)
    rates = f"{scaled(flops, 'FLOP/s')} {problem.dtype} over {scaled(bandwidth, 'B/s')}"
    return f"{rates} (datasheet), ridge at {ridge:.0f} FLOP/byte"


def _print_times(console: Console, entries: list[Entry]) -> None:
    results = ("algorithm", "time", "TFLOP\n/s", "% of\npeak", "peak\nTFLOP/s", "limiter", "speed-\nup")
    heads = (*results, "mat-\nmul\nFLOP", "exp\nops", "other\nops")
    rows: list[tuple[str, ...]] = []
    for entry in entries:
        r, row = entry.result, entry.row()
        if r is None:
            rows.append((entry.label, "—", "—", "—", "cannot run", *[""] * (len(heads) - 5)))
            continue
        percent = entry.percent_of_peak
        cells = (
            entry.label,
            time_text(r.time_us),
            three_digits(r.tflops),
            "" if percent is None else f"{percent:.1f}",
            f"{entry.peak_path} {entry.peak_flops / 1e12:.0f}" if entry.peak_path else "",
            r.limiter,
            "" if entry.speedup is None else f"x{three_digits(entry.speedup)}",
            scaled(cast(float, row["matmul_flop"])),
            scaled(cast(float, row["exp_ops"])),
            scaled(cast(float, row["other_ops"])),
        )
        rows.append(cells)
    print_table(console, heads, rows)


def _print_bytes(console: Console, entries: list[Entry]) -> None:
    heads = ("algorithm", "HBM\nread", "HBM\nwritten", "dirty\nin L2", "L2 to\nSM", "SM to\nL2", "FLOP/\nHBM\nbyte")
    rows = []
    for entry in entries:
        r = entry.result
        assert r is not None
        full = r.peak_memory_bytes > entry.profile.hbm_bytes
        cells = (
            entry.label,
            scaled(r.hbm_read_bytes, "B"),
            scaled(r.hbm_write_bytes, "B"),
            scaled(r.dirty_bytes_at_end, "B"),
            scaled(r.l2_read_bytes, "B"),
            scaled(r.l2_write_bytes, "B"),
            three_digits(r.arithmetic_intensity),
            f"[red]{scaled(r.peak_memory_bytes, 'B')}[/]" if full else scaled(r.peak_memory_bytes, "B"),
            entry.implementation,
        )
        rows.append(cells)
    print_table(console, (*heads, "peak\nmemory", "kernels"), rows)


def notes(profile: Profile, entries: list[Entry]) -> list[str]:
    """What the tables of one GPU cannot say: who cannot run and why, substitutions, warnings, what is not modelled."""
    lines = []
    warned: dict[str, list[str]] = {}
    for entry in entries:
        if entry.result is None:
            hint = " (--hypothetical simulates it all the same)" if entry.lacking else ""
            lines.append(f"{entry.label} cannot run: {entry.error}{hint}")
            continue
        r = entry.result
        if r.substitutions:
            lines.append(f"{entry.label} is hypothetical on {profile.name}: {'; '.join(r.substitutions)}")
        if r.peak_memory_bytes > profile.hbm_bytes:
            needs, has = scaled(r.peak_memory_bytes, "B"), scaled(profile.hbm_bytes, "B")
            lines.append(f"{entry.label} does not fit: it needs {needs}, {profile.name} has {has}")
        for warning in r.warnings:
            warned.setdefault(warning, []).append(entry.label)
    kept = [
        f"{entry.label} {scaled(cast(float, held), 'B')} ({', '.join(cast(Iterable[str], attributes['kept']))})"
        for entry in entries
        if entry.result is not None and (held := (attributes := entry.result.attributes).get("kept_bytes"))
    ]
    if kept:
        lines.append(f"kept from the forward for the backward pass, beside Q, K and V: {', '.join(kept)}")
    everyone = sum(entry.result is not None for entry in entries)
    for warning, labels in warned.items():
        lines.append(f"{'all' if len(labels) == everyone > 1 else ', '.join(labels)}: {warning}")
    if "tcgen05" in profile.capabilities:
        lines.append(
            f"{profile.name}'s native kernels (FA4: tcgen05 instructions, tensor memory) are not modelled yet; "
            "what runs here are older kernels, on a path that reaches a part of its tensor rate"
        )
    return lines
