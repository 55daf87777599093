"""Why one algorithm is faster than another: the chain from work and bytes to the limiter, in computed numbers.

Every sentence is chosen by the two results; nothing is said that they do not show.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import fsum

from simulator.comparison import matmul_path
from simulator.profile import Profile
from simulator.result import Result, TensorTraffic
from simulator.wording import scaled, three_digits, time_text

#: Ratios within this of one count as equal.
_EQUAL_WITHIN = 0.01
#: Shares of the difference below this are not worth a word.
_WORTH_SAYING = 0.05


@dataclass(frozen=True)
class Explanation:
    """``first`` against ``second``: the sentences by topic, and the numbers by row for tables.

    ``rows`` are (what, first, second); ``causes`` are (cause, us in first, us in second), the largest first;
    ``tensors`` are (tensor, HBM bytes in first, in second).
    """

    names: tuple[str, str]
    results: tuple[Result, Result]
    headline: str
    sentences: Mapping[str, str]
    rows: tuple[tuple[str, str, str], ...]
    causes: tuple[tuple[str, float, float], ...]
    tensors: tuple[tuple[str, int, int], ...]


def explain(first: Result, second: Result, profile: Profile, names: tuple[str, str] | None = None) -> Explanation:
    """Explain the difference between two results on the same problem and GPU; ``names`` are how to call them."""
    names = names or (first.algorithm, second.algorithm)
    causes = _causes(first, second)
    tensors = _tensors(first, second)
    sentences = {
        "Work": _work_sentence(first, second, names),
        "Bytes": _bytes_sentence(first, second, names, profile, tensors),
        "Intensity": _intensity_sentence(first, second, names),
        "Limiter": _limiter_sentence(first, second, names),
        "Time": _time_sentence(first, second, names, causes),
    }
    return Explanation(
        names,
        (first, second),
        _headline(first, second, names, profile),
        sentences,
        _rows(first, second, profile),
        causes,
        tensors,
    )


def moved_bytes(result: Result) -> int:
    """HBM bytes read, written, or written and still in L2 at the end."""
    return result.hbm_read_bytes + result.hbm_write_bytes + result.dirty_bytes_at_end


def _ratio_text(a: float, b: float, more: str, less: str, same: str = "the same") -> str:
    """How ``a`` compares with ``b``: ``3.2x fewer``."""
    if abs(a - b) <= _EQUAL_WITHIN * max(a, b):
        return same
    if not a or not b:
        return more if a else less
    return f"{three_digits(a / b)}x {more}" if a > b else f"{three_digits(b / a)}x {less}"


def _headline(first: Result, second: Result, names: tuple[str, str], profile: Profile) -> str:
    a, b = names
    verdict = _ratio_text(second.time_us, first.time_us, "faster", "slower", "as fast")
    times = f"{a} takes {time_text(first.time_us)}, {b} {time_text(second.time_us)}"
    return f"On {profile.name}, {times}: {a} is {verdict}."


def _units(result: Result) -> dict[str, float]:
    work = dict(result.work)
    return {"matmul": work.pop("matmul", 0.0), "exp": work.pop("exp", 0.0), "other": fsum(work.values())}


def _work_sentence(first: Result, second: Result, names: tuple[str, str]) -> str:
    a, b = names
    ours, theirs = _units(first), _units(second)
    parts = []
    for unit, what in (("matmul", "FLOP of matmul"), ("exp", " exp operations"), ("other", " others")):
        compared = _ratio_text(ours[unit], theirs[unit], "more", "fewer")
        parts.append(f"{scaled(ours[unit])}{what} against {scaled(theirs[unit])} ({compared})")
    text = f"{a} does {', '.join(parts)}."
    needed = first.flops
    if needed and abs(first.executed_flops - second.executed_flops) > _EQUAL_WITHIN * second.executed_flops:
        text += (
            f" What the mask leaves needs {scaled(needed)}FLOP: {a} executes {first.executed_flops / needed:.2f}x of "
            f"it, {b} {second.executed_flops / needed:.2f}x."
        )
    if ours["matmul"] >= (1 - _EQUAL_WITHIN) * theirs["matmul"] and first.time_us < second.time_us:
        text += f" So {a} is not faster by doing less arithmetic."
    paths = [(name, matmul_path(r), r.path_peak_flops) for name, r in zip(names, (first, second), strict=True)]
    if paths[0][1:] != paths[1][1:]:
        listed = ", ".join(f"{name} on {path} ({scaled(peak, 'FLOP/s')})" for name, path, peak in paths if path)
        text += f" Their matrix work runs on different instructions: {listed}."
    return text


def _bytes_sentence(
    first: Result, second: Result, names: tuple[str, str], profile: Profile, tensors: tuple[tuple[str, int, int], ...]
) -> str:
    a, b = names
    ours, theirs = moved_bytes(first), moved_bytes(second)
    bandwidth = profile.hbm_bandwidth_bytes_per_s
    text = (
        f"{a} moves {scaled(ours, 'B')} between HBM and L2, {b} {scaled(theirs, 'B')}: "
        f"{_ratio_text(ours, theirs, 'more', 'fewer')}. At the datasheet's {scaled(bandwidth, 'B/s')} that alone takes "
        f"{time_text(ours / bandwidth * 1e6)} and {time_text(theirs / bandwidth * 1e6)}."
    )
    gap = theirs - ours
    large = [(name, y - x) for name, x, y in tensors if gap and abs(y - x) > _WORTH_SAYING * abs(gap)]
    if large and abs(gap) > _EQUAL_WITHIN * max(ours, theirs):
        listed = ", ".join(f"{name} {'-' if d > 0 else '+'}{scaled(abs(d), 'B')}" for name, d in large[:5])
        text += f" By tensor, from {b} to {a}: {listed}."
    return text


def _intensity_sentence(first: Result, second: Result, names: tuple[str, str]) -> str:
    a, b = names
    ours, theirs, ridge = first.arithmetic_intensity, second.arithmetic_intensity, first.ridge_flop_per_byte
    text = f"From {b} to {a} the intensity moves from {three_digits(theirs)} to {three_digits(ours)} FLOP/byte"
    if not ridge:
        return text + "."
    sides = ["compute" if value >= ridge else "bandwidth" for value in (theirs, ours)]
    where = f"the ridge at {ridge:.0f}"
    if sides[0] != sides[1]:
        return f"{text}, across {where}: from the {sides[0]} side to the {sides[1]} side."
    return f"{text}; both are on the {sides[0]} side of {where}."


def _limiter_sentence(first: Result, second: Result, names: tuple[str, str]) -> str:
    a, b = names
    if first.limiter != second.limiter:
        text = f"The limiter changes from {second.limiter} ({b}) to {first.limiter} ({a})."
    else:
        text = f"The limiter is {first.limiter} in both."
    for name, r in ((a, first), (b, second)):
        memory_side = r.arithmetic_intensity < r.ridge_flop_per_byte
        if r.ridge_flop_per_byte and memory_side and r.limiter in ("tensor", "exp", "fp32"):
            text += f" The roofline would call {name} bandwidth-bound; its kernels wait for {r.limiter} first."
        elif not memory_side and r.limiter == "hbm":
            text += f" The roofline would call {name} compute-bound; it waits for HBM in the kernels named below."
    return text


def _causes(first: Result, second: Result) -> tuple[tuple[str, float, float], ...]:
    names = sorted({*first.waits, *second.waits})
    rows = [(c, first.waits.get(c, 0.0) * first.time_us, second.waits.get(c, 0.0) * second.time_us) for c in names]
    return tuple(sorted((row for row in rows if max(row[1:]) > 0), key=lambda row: -max(row[1:])))


def _tensors(first: Result, second: Result) -> tuple[tuple[str, int, int], ...]:
    ours, theirs = first.traffic_by_tensor(), second.traffic_by_tensor()
    empty = TensorTraffic("")
    rows = []
    for name in {**theirs, **ours}:
        x, y = ours.get(name, empty), theirs.get(name, empty)
        rows.append((name, x.hbm_read_bytes + x.hbm_write_bytes, y.hbm_read_bytes + y.hbm_write_bytes))
    return tuple(sorted(rows, key=lambda row: (-abs(row[1] - row[2]), row[0])))


def _time_sentence(
    first: Result, second: Result, names: tuple[str, str], causes: tuple[tuple[str, float, float], ...]
) -> str:
    a, b = names
    gap = second.time_us - first.time_us
    if abs(gap) <= _EQUAL_WITHIN * max(first.time_us, second.time_us):
        return "There is no difference in time to explain."
    verb = "saves" if gap > 0 else "loses"
    # positive: explains the difference in the direction that it has
    shares = sorted(((c, (y - x) * (1 if gap > 0 else -1)) for c, x, y in causes), key=lambda row: -row[1])
    with_it = [f"{time_text(d)} in {c}" for c, d in shares if d > _WORTH_SAYING * abs(gap)]
    against = [f"{time_text(-d)} in {c}" for c, d in reversed(shares) if -d > _WORTH_SAYING * abs(gap)]
    text = f"Of the time of {b}, {a} {verb} {time_text(abs(gap))}: {', '.join(with_it)}"
    if against:
        text += f"; against that it {'spends' if gap > 0 else 'saves'} {', '.join(against)}"
    longest = max(second.kernels, key=lambda k: k.time_us)
    share = 100 * longest.time_us / second.time_us
    return (
        f"{text}. The longest kernel of {b} is {longest.name}: {share:.0f} % of its time, limited by {longest.limiter}."
    )


def _rows(first: Result, second: Result, profile: Profile) -> tuple[tuple[str, str, str], ...]:
    def both(what: str, text: Callable[[Result], str]) -> tuple[str, str, str]:
        return what, text(first), text(second)

    return (
        both("time", lambda r: time_text(r.time_us)),
        both("matmul executed, FLOP", lambda r: scaled(_units(r)["matmul"])),
        both("exp operations", lambda r: scaled(_units(r)["exp"])),
        both("other operations", lambda r: scaled(_units(r)["other"])),
        both("HBM read", lambda r: scaled(r.hbm_read_bytes, "B")),
        both("HBM written", lambda r: scaled(r.hbm_write_bytes, "B")),
        both("dirty in L2 at the end", lambda r: scaled(r.dirty_bytes_at_end, "B")),
        both("L2 to SM", lambda r: scaled(r.l2_read_bytes, "B")),
        both("SM to L2", lambda r: scaled(r.l2_write_bytes, "B")),
        both("FLOP per HBM byte", lambda r: three_digits(r.arithmetic_intensity)),
        both("least time: HBM alone", lambda r: time_text(moved_bytes(r) / profile.hbm_bandwidth_bytes_per_s * 1e6)),
        both(
            "least time: matmul alone",
            lambda r: time_text(r.executed_flops / r.path_peak_flops * 1e6) if r.path_peak_flops else "",
        ),
        both("limiter", lambda r: r.limiter),
        both("peak memory", lambda r: scaled(r.peak_memory_bytes, "B")),
    )
