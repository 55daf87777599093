"""Numbers with units as people write them: ``8TB/s``, ``512KiB``, ``1.83GHz``, ``2.4us``, ``29cycles``.

Decimal prefixes are powers of 1000 (MB = 10**6 bytes), binary ones powers of 1024 (MiB = 2**20 bytes).
"""

import math
import re

from simulator.errors import InputError

# dimension -> (what a value of it is called, an example that parses)
DIMENSIONS = {
    "bytes": ("a number of bytes", "512KiB"),
    "bytes/s": ("a bandwidth", "8TB/s"),
    "bytes/cycle": ("bytes per cycle", "128B/cycle"),
    "flop/s": ("a rate of floating-point operations", "989TFLOP/s"),
    "flop/cycle": ("floating-point operations per cycle", "4096"),
    "ops/cycle": ("operations per cycle", "16"),
    "hz": ("a frequency", "1.83GHz"),
    "s": ("a time", "2.4us"),
    "cycles": ("a number of cycles", "29cycles"),
    "w": ("a power", "700W"),
    "j/flop": ("an energy per floating-point operation", "1.5pJ/FLOP"),
    "count": ("a plain number", "132"),
}

# dimension -> least and greatest value of a hardware parameter, far beyond anything that could be built: within them
# every simulation ends, and its ticks and bytes fit in 63 bits
LIMITS = {
    "bytes": (1, 1e16),
    "bytes/s": (1e3, 1e19),
    "bytes/cycle": (1e-3, 1e9),
    "flop/s": (1e3, 1e24),
    "flop/cycle": (1e-3, 1e12),
    "ops/cycle": (1e-3, 1e9),
    "hz": (1e3, 1e13),
    "s": (1e-15, 1.0),
    "cycles": (1e-6, 1e9),
    "w": (1e-3, 1e9),
    "j/flop": (1e-18, 1e-3),
    "count": (1, 1e6),
}

_DECIMAL = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def _unit_table() -> dict[str, tuple[str, float]]:
    """Every accepted unit spelling -> (dimension, factor to the base unit)."""
    table: dict[str, tuple[str, float]] = {}
    for prefix, factor in (_DECIMAL | _BINARY).items():
        table[f"{prefix}B"] = ("bytes", factor)
        table[f"{prefix}B/s"] = ("bytes/s", factor)
    for per in ("cycle", "clk", "cyc"):
        table[f"B/{per}"] = ("bytes/cycle", 1)
        table[f"FLOP/{per}"] = ("flop/cycle", 1)
        table[f"ops/{per}"] = ("ops/cycle", 1)
    for prefix, factor in _DECIMAL.items():
        table[f"{prefix}FLOP/s"] = table[f"{prefix}FLOPS"] = ("flop/s", factor)
        table[f"{prefix}Hz"] = ("hz", factor)
    table |= {"s": ("s", 1), "ms": ("s", 1e-3), "us": ("s", 1e-6), "µs": ("s", 1e-6), "ns": ("s", 1e-9)}
    table |= {"cycles": ("cycles", 1), "cycle": ("cycles", 1), "clk": ("cycles", 1)}
    table |= {"W": ("w", 1), "kW": ("w", 1e3)}
    table |= {"J/FLOP": ("j/flop", 1), "nJ/FLOP": ("j/flop", 1e-9), "pJ/FLOP": ("j/flop", 1e-12)}
    table |= {"kHz": ("hz", 1e3), "kB": ("bytes", 1e3), "kB/s": ("bytes/s", 1e3)}
    # All-lower-case spellings are accepted where they cannot be read as another unit ("Mb" would be megabits: refused).
    for spelling, meaning in list(table.items()):
        table.setdefault(spelling.lower(), meaning)
    return table


UNITS = _unit_table()

_NUMBER = re.compile(r"\s*([+-]?(?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)(?:[eE][+-]?\d+)?)\s*(.*?)\s*")


def parse_quantity(text: str, dimension: str) -> float:
    """The number in ``text`` in the base unit of ``dimension``; a bare number is already in that unit.

    Raises :class:`InputError` with a message of the form ``what is wrong; what would be right`` (no location:
    the caller knows it) when the text is no number, the unit is unknown or of another dimension.
    """
    meaning, example = DIMENSIONS[dimension]
    match = _NUMBER.fullmatch(text)
    if match is None:
        raise InputError(f"'{text}' is not a number; expected {meaning} such as {example}")
    digits, unit = match.groups()
    number = float(digits.replace("_", ""))
    if not math.isfinite(number):
        raise InputError(f"'{text}' is not finite; expected {meaning} such as {example}")
    if not unit:
        return number
    if unit not in UNITS:
        raise InputError(f"'{text}' has the unknown unit '{unit}'; expected {meaning} such as {example}")
    found, factor = UNITS[unit]
    if found != dimension:
        raise InputError(f"'{text}' is {DIMENSIONS[found][0]}; expected {meaning} such as {example}")
    # Dividing by the exact reciprocal keeps 328ns == 328e-9 exactly (328 * 1e-9 is one ulp off for some numbers).
    return number / round(1 / factor) if factor < 1 else number * factor


def format_quantity(number: float, dimension: str) -> str:
    """A short text for people: ``50 MiB``, ``3.35 TB/s``, ``142 ns``."""
    if dimension == "bytes":
        if number >= 1e9 or number < 2**10:
            return _scaled(number, "B")
        return f"{number / 2**20:.4g} MiB" if number >= 2**20 else f"{number / 2**10:.4g} KiB"
    if dimension == "bytes/s":
        return _scaled(number, "B/s")
    if dimension == "flop/s":
        return _scaled(number, "FLOP/s")
    if dimension == "hz":
        return f"{number / 1e6:,.6g} MHz"
    if dimension == "w":
        return f"{number:,.6g} W"
    if dimension == "j/flop":
        return f"{number * 1e12:.4g} pJ/FLOP"
    if dimension == "s":
        for unit, factor in (("s", 1), ("ms", 1e-3), ("us", 1e-6)):
            if number >= factor:
                return f"{number / factor:.4g} {unit}"
        return f"{number / 1e-9:.4g} ns"
    suffix = {"cycles": " cycles", "bytes/cycle": " B/cycle", "flop/cycle": " FLOP/cycle", "ops/cycle": " /cycle"}
    return f"{number:,.6g}{suffix.get(dimension, '')}"


def _scaled(number: float, unit: str) -> str:
    for prefix, factor in reversed(_DECIMAL.items()):
        if abs(number) >= factor:
            return f"{number / factor:.4g} {prefix}{unit}"
    return f"{number:.4g} {unit}"
