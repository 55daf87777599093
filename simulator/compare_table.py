"""A comparison as text for people: two narrow tables a GPU, and below them what they cannot say."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from simulator.comparison import Comparison, Entry
from simulator.problem import AttentionProblem

if TYPE_CHECKING:
    from rich.console import Console

    from simulator.profile import Profile

_PREFIXES = (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))
_PASSES = {"fwd": "forward", "bwd": "backward", "fwd_bwd": "forward and backward"}


def scaled(value: float, unit: str = "") -> str:
    """Three significant digits with a decimal prefix: ``1.23 GB``."""
    for prefix, factor in _PREFIXES:
        if abs(value) >= 0.9995 * factor:
            return f"{_three_digits(value / factor)} {prefix}{unit}"
    return f"{_three_digits(value)} {unit}".rstrip()


def time_text(time_us: float) -> str:
    """Three significant digits in us, ms or s."""
    for unit, factor in (("s", 1e6), ("ms", 1e3)):
        if time_us >= 0.9995 * factor:
            return f"{_three_digits(time_us / factor)} {unit}"
    return f"{_three_digits(time_us)} us"


def _three_digits(value: float) -> str:
    size = abs(value)
    if size == 0 or size == int(size) < 1000:
        return f"{value:.0f}"
    decimals = 0 if size >= 99.95 else 1 if size >= 9.995 else 2 if size >= 0.9995 else 4
    return f"{value:.{decimals}f}"


def problem_text(problem: AttentionProblem) -> str:
    """One line that says what is computed."""
    p = problem
    parts = [
        f"{_PASSES[p.pass_]}, batch {p.batch}, {p.heads} heads",
        f"{p.kv_heads} KV heads" if p.kv_heads != p.heads else "",
        f"{p.seqlen_q} queries x {p.seqlen_k} keys",
        f"head dim {p.head_dim}" + (f"/{p.head_dim_v}" if p.head_dim_v != p.head_dim else ""),
        p.dtype,
        "causal" if p.causal else "no mask",
        f"window {p.window[0]},{p.window[1]}" if p.window else "",
        f"mask {p.mask}" if p.mask else "",
        f"dropout {p.dropout:g}" if p.dropout else "",
        f"softcap {p.softcap:g}" if p.softcap else "",
        f"{p.num_splits} splits" if p.num_splits else "",
        f"pages of {p.page_size} keys" if p.page_size else "",
        f"cache of {p.kv_capacity} keys" if p.kv_capacity else "",
        "deterministic" if p.deterministic else "",
    ]
    return ", ".join(part for part in parts if part)


def print_comparison(console: Console, comparison: Comparison) -> None:
    """Print everything."""
    console.print(f"[bold]Problem[/]: {problem_text(comparison.problem)}", highlight=False)
    if comparison.decode_problem is not None:
        text = problem_text(comparison.decode_problem)
        console.print(f"[bold]Decode *[/]: {text}; * is compared with standard on this problem", highlight=False)
    for profile, entries in comparison.by_gpu():
        console.print()
        _print_gpu(console, profile, entries, comparison)


def _print_gpu(console: Console, profile: Profile, entries: list[Entry], comparison: Comparison) -> None:
    from rich.markup import escape
    from rich.padding import Padding
    from rich.text import Text

    console.print(f"[bold]{escape(profile.name)}[/]: {_roofline_text(profile, comparison.problem)}", highlight=False)
    console.print(_time_table(entries))
    ran = [entry for entry in entries if entry.result is not None]
    if ran:
        console.print(_bytes_table(ran))
    for line in notes(profile, entries):
        console.print(Padding(Text(line), (0, 0, 0, 1)))


def _roofline_text(profile: Profile, problem: AttentionProblem) -> str:
    bandwidth = profile.hbm_bandwidth_bytes_per_s
    if problem.dtype not in profile.spec_tensor_flops:
        return f"no {problem.dtype} tensor rate, HBM {scaled(bandwidth, 'B/s')} (datasheet)"
    flops, ridge = profile.spec_flops(problem.dtype), profile.ridge_flop_per_byte(problem.dtype)
    rates = f"{scaled(flops, 'FLOP/s')} {problem.dtype} over {scaled(bandwidth, 'B/s')}"
    return f"{rates} (datasheet), ridge at {ridge:.0f} FLOP/byte"


def _name(entry: Entry) -> str:
    return entry.algorithm + (" *" if entry.decode else "")


def _table(headings: Iterable[str]):
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for i, heading in enumerate(headings):
        # a narrow terminal breaks a cell into lines; it never cuts a number off
        table.add_column(heading, justify="left" if i == 0 else "right", overflow="fold", min_width=5)
    return table


def _time_table(entries: list[Entry]):
    heads = ("algorithm", "time", "TFLOP/s", "% of\npeak", "peak\nTFLOP/s", "limiter", "speed-\nup")
    table = _table((*heads, "matmul\nFLOP", "exp\nops", "other\nops"))
    for entry in entries:
        r, row = entry.result, entry.row()
        if r is None:
            table.add_row(_name(entry), "cannot run")
            continue
        percent = entry.percent_of_peak
        table.add_row(
            _name(entry),
            time_text(r.time_us),
            _three_digits(r.tflops),
            "" if percent is None else f"{percent:.1f}",
            f"{entry.peak_path} {entry.peak_flops / 1e12:.0f}" if entry.peak_path else "",
            r.limiter,
            "" if entry.speedup is None else f"x{_three_digits(entry.speedup)}",
            scaled(row["matmul_flop"]),
            scaled(row["exp_ops"]),
            scaled(row["other_ops"]),
        )
    return table


def _bytes_table(entries: list[Entry]):
    heads = ("algorithm", "HBM\nread", "HBM\nwritten", "dirty\nin L2", "L2 to\nSM", "SM to\nL2", "FLOP/\nHBM byte")
    table = _table((*heads, "peak\nmemory", "kernels"))
    for entry in entries:
        r = entry.result
        full = r.peak_memory_bytes > entry.profile.hbm_bytes
        table.add_row(
            _name(entry),
            scaled(r.hbm_read_bytes, "B"),
            scaled(r.hbm_write_bytes, "B"),
            scaled(r.dirty_bytes_at_end, "B"),
            scaled(r.l2_read_bytes, "B"),
            scaled(r.l2_write_bytes, "B"),
            _three_digits(r.arithmetic_intensity),
            f"[red]{scaled(r.peak_memory_bytes, 'B')}[/]" if full else scaled(r.peak_memory_bytes, "B"),
            entry.implementation,
        )
    return table


def notes(profile: Profile, entries: list[Entry]) -> list[str]:
    """What the tables of one GPU cannot say: who cannot run and why, substitutions, warnings, what is not modelled."""
    lines = []
    for entry in entries:
        if entry.result is None:
            hint = " (--hypothetical simulates it all the same)" if entry.lacking else ""
            lines.append(f"{entry.algorithm} cannot run: {entry.error}{hint}")
            continue
        r = entry.result
        if r.substitutions:
            lines.append(f"{entry.algorithm} is hypothetical on {profile.name}: {'; '.join(r.substitutions)}")
        if r.peak_memory_bytes > profile.hbm_bytes:
            needs, has = scaled(r.peak_memory_bytes, "B"), scaled(profile.hbm_bytes, "B")
            lines.append(f"{entry.algorithm} does not fit: it needs {needs}, {profile.name} has {has}")
        lines += [f"{entry.algorithm}: {warning}" for warning in r.warnings]
    if "tcgen05" in profile.capabilities:
        lines.append(
            f"{profile.name}'s native kernels (FA4: tcgen05 instructions, tensor memory) are not modelled yet; "
            "what runs here are older kernels, on a path that reaches a part of its tensor rate"
        )
    return lines
