"""Users' files in memory: no more of them than their kind can hold (a path may name a device without an end)."""

from __future__ import annotations

from pathlib import Path

from simulator.errors import InputError

#: Of tables and saved results: a hundred thousand rows with a kilobyte each, twice.
MOST_TABLE_BYTES = 200_000_000


def read_at_most(path: str | Path, most: int = MOST_TABLE_BYTES, about: str = "split it") -> bytes:
    """All of a file; :class:`InputError` when it has more than ``most`` bytes (``about``: what to do, or why not).
    OSError and ValueError as ``open`` raises them."""
    with Path(path).open("rb") as stream:
        data = stream.read(most + 1)
    if len(data) > most:
        raise InputError(f"{path}: more than {most:,} bytes; {about}")
    return data
