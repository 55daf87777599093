"""Numbers and problems as short texts for people. Decimal prefixes: MB = 10**6 bytes."""

from __future__ import annotations

from simulator.problem import AttentionProblem

_PREFIXES = (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))
PASSES = {"fwd": "forward", "bwd": "backward", "fwd_bwd": "forward and backward"}


def scaled(value: float, unit: str = "") -> str:
    """Three significant digits with a decimal prefix: ``1.23 GB``."""
    for prefix, factor in _PREFIXES:
        if abs(value) >= 0.9995 * factor:
            return f"{three_digits(value / factor)} {prefix}{unit}"
    small = f"{value:.0f}" if value == int(value) else three_digits(value)
    return f"{small} {unit}".rstrip()


def time_text(time_us: float) -> str:
    """Three significant digits in us, ms or s."""
    for unit, factor in (("s", 1e6), ("ms", 1e3)):
        if time_us >= 0.9995 * factor:
            return f"{three_digits(time_us / factor)} {unit}"
    return f"{three_digits(time_us)} us"


def three_digits(value: float) -> str:
    """Three significant digits without an exponent."""
    size = abs(value)
    if size < 0.9995:
        return f"{value:.3g}"
    return f"{value:.{0 if size >= 99.95 else 1 if size >= 9.995 else 2}f}"


def _lengths(lengths: tuple[int, ...] | None, longest: int) -> str:
    if lengths is None:
        return str(longest)
    if len(lengths) > 6:
        return f"{min(lengths)} to {longest} (mean {sum(lengths) / len(lengths):.0f})"
    return "/".join(str(n) for n in lengths)


def problem_text(problem: AttentionProblem) -> str:
    """One line that says what is computed."""
    p = problem
    parts = [
        f"{PASSES[p.pass_]}, batch {p.batch}, {p.heads} heads",
        f"{p.kv_heads} KV heads" if p.kv_heads != p.heads else "",
        f"{_lengths(p.seqlens_q, p.seqlen_q)} queries x {_lengths(p.seqlens_k, p.seqlen_k)} keys",
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
