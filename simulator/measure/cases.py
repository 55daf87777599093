"""Measurement cases: the input columns of ``predict``, read from and written to CSV.

A case list is a CSV whose columns are :data:`INPUT_COLUMNS` plus ``case_id`` (unique), ``family`` (the shape family
that a split assigns as a whole), ``counters`` (1: also wanted under the profiler) and ``mix`` (1: instruction counts
wanted too).
"""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from simulator.csv_tables import read_text
from simulator.errors import InputError
from simulator.problem import DTYPE_BYTES, L2_STATES, TIMINGS

#: Those of the compiled kernels that are measured.
DTYPES = ("bf16", "fp16", "fp8")
PASSES = ("fwd", "bwd")
ALGORITHMS = ("standard", "fa1", "fa2", "fa3", "flash_decoding")

INPUT_COLUMNS = (
    "algorithm",
    "implementation",
    "pass",
    "dtype",
    "causal",
    "batch",
    "heads",
    "kv_heads",
    "seqlen_q",
    "seqlen_k",
    "head_dim",
    "head_dim_v",
    "window",
    "mask",
    "dropout",
    "num_splits",
    "page_size",
    "kv_capacity",
    "deterministic",
    "l2_state",
    "timing",
    "gpu",
    "clock_mhz",
)
CASE_COLUMNS = ("case_id", "family", "counters", "mix", *INPUT_COLUMNS)


@dataclass(frozen=True)
class Case:
    """One attention problem on one real kernel. Lengths are in tokens; ``window`` is (left, right), -1 = unlimited."""

    case_id: str
    family: str
    algorithm: str
    implementation: str
    pass_: str = "fwd"
    dtype: str = "bf16"
    causal: bool = False
    batch: int = 1
    heads: int = 1
    kv_heads: int = 1
    seqlen_q: int = 128
    seqlen_k: int = 128
    head_dim: int = 128
    head_dim_v: int | None = None
    window: tuple[int, int] | None = None
    num_splits: int | None = None
    page_size: int | None = None
    kv_capacity: int | None = None
    deterministic: bool = False
    l2_state: str = "cold"
    timing: str = "graph"
    gpu: str = ""
    counters: bool = False
    mix: bool = False

    @property
    def value_dim(self) -> int:
        """Head dimension of V and O."""
        return self.head_dim if self.head_dim_v is None else self.head_dim_v

    @property
    def element_bytes(self) -> int:
        """Bytes of one element of Q, K and V."""
        return DTYPE_BYTES[self.dtype]

    def flops(self) -> int:
        """Unpadded matrix work: 2·(d + d_v) per unmasked (query, key) pair and head; backward 2.5 times that."""
        pairs = unmasked_pairs(self.seqlen_q, self.seqlen_k, self.causal, self.window)
        forward = 2 * (self.head_dim + self.value_dim) * self.batch * self.heads * pairs
        return forward if self.pass_ == "fwd" else forward * 5 // 2

    def resident_bytes(self) -> int:
        """A generous estimate of the device memory that measuring this case allocates, in bytes."""
        rows = max(self.seqlen_k, self.kv_capacity or 0) * self.kv_heads
        inputs = (
            self.batch * (self.seqlen_q * self.heads + rows) * (self.head_dim + self.value_dim) * self.element_bytes
        )
        scores = 0
        if self.algorithm == "standard":
            scores = self.batch * self.heads * self.seqlen_q * self.seqlen_k * self.element_bytes
            scores *= 3 if self.pass_ == "fwd" else 4
        return inputs * (2 if self.pass_ == "fwd" else 6) + scores

    def to_row(self) -> dict[str, str]:
        """The case as CSV cells, every column of :data:`CASE_COLUMNS` present."""
        row = {name: "" for name in CASE_COLUMNS}
        for field in fields(self):
            name = "pass" if field.name == "pass_" else field.name
            row[name] = _cell(getattr(self, field.name))
        row["dropout"] = "0"
        return row


def unmasked_pairs(seqlen_q: int, seqlen_k: int, causal: bool, window: tuple[int, int] | None = None) -> int:
    """Number of (query, key) pairs that the bottom-right causal mask and the window leave, in closed form per row."""
    if not causal and window is None:
        return seqlen_q * seqlen_k
    left, right = (-1, -1) if window is None else window
    if causal:
        right = 0 if right < 0 else min(right, 0)
    offset = seqlen_k - seqlen_q
    total = 0
    for row in range(seqlen_q):
        first = 0 if left < 0 else max(0, row + offset - left)
        last = seqlen_k - 1 if right < 0 else min(seqlen_k - 1, row + offset + right)
        total += max(0, last - first + 1)
    return total


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "1" if value else "0"
    if isinstance(value, tuple):
        return ";".join(str(part) for part in value)
    return str(value)


def _fail(where: str, key: str, got: str, want: str) -> InputError:
    return InputError(f"{where}: {key}={got!r} is not valid; expected {want}")


def _integer(row: Mapping[str, str], key: str, where: str, low: int = 1) -> int | None:
    """The cell's number, from ``low`` up; ``None`` where it is blank."""
    text = (row.get(key) or "").strip()
    if not text:
        return None
    try:
        value = int(text)
    except ValueError:
        raise _fail(where, key, text, f"an integer >= {low}") from None
    if value < low:
        raise _fail(where, key, text, f"an integer >= {low}")
    return value


def _flag(row: Mapping[str, str], key: str, where: str) -> bool:
    text = (row.get(key) or "").strip().lower()
    if text in ("", "0", "false", "no"):
        return False
    if text in ("1", "true", "yes"):
        return True
    raise _fail(where, key, text, "0 or 1")


def _choice(row: Mapping[str, str], key: str, where: str, choices: tuple[str, ...], default: str) -> str:
    text = (row.get(key) or "").strip().lower() or default
    if text not in choices:
        raise _fail(where, key, text, "one of " + ", ".join(choices))
    return text


def parse_row(row: Mapping[str, str], where: str, default_id: str) -> Case:
    """Turn one CSV row into a :class:`Case`; raise :class:`InputError` naming file, line and key when it is wrong."""
    algorithm = _choice(row, "algorithm", where, ALGORITHMS, "")
    heads = _integer(row, "heads", where) or 1
    kv_heads = _integer(row, "kv_heads", where) or heads
    seqlen_q = _integer(row, "seqlen_q", where)
    if seqlen_q is None:
        raise InputError(f"{where}: seqlen_q is missing; expected a number of query tokens")
    if heads % kv_heads:
        raise _fail(where, "kv_heads", str(kv_heads), f"a divisor of heads={heads}")
    if (row.get("mask") or "").strip():
        raise _fail(where, "mask", row["mask"], "an empty cell: no measurable kernel takes an arbitrary mask here")
    if (row.get("dropout") or "").strip() not in ("", "0", "0.0"):
        raise _fail(where, "dropout", row["dropout"], "0: dropout is not measured")
    window = None
    if text := (row.get("window") or "").strip():
        parts = text.replace(",", ";").split(";")
        try:
            window = (int(parts[0]), int(parts[1]) if len(parts) > 1 else -1)
        except ValueError:
            raise _fail(where, "window", text, "left;right in tokens, -1 for unlimited") from None
    return Case(
        case_id=(row.get("case_id") or "").strip() or default_id,
        family=(row.get("family") or "").strip() or "unnamed",
        algorithm=algorithm,
        implementation=(row.get("implementation") or "").strip(),
        pass_=_choice(row, "pass", where, PASSES, "fwd"),
        dtype=_choice(row, "dtype", where, DTYPES, "bf16"),
        causal=_flag(row, "causal", where),
        batch=_integer(row, "batch", where) or 1,
        heads=heads,
        kv_heads=kv_heads,
        seqlen_q=seqlen_q,
        seqlen_k=_integer(row, "seqlen_k", where) or seqlen_q,
        head_dim=_integer(row, "head_dim", where) or 128,
        head_dim_v=_integer(row, "head_dim_v", where),
        window=window,
        num_splits=_integer(row, "num_splits", where),
        page_size=_integer(row, "page_size", where),
        kv_capacity=_integer(row, "kv_capacity", where),
        deterministic=_flag(row, "deterministic", where),
        l2_state=_choice(row, "l2_state", where, L2_STATES, "cold"),
        timing=_choice(row, "timing", where, TIMINGS, "graph"),
        gpu=(row.get("gpu") or "").strip(),
        counters=_flag(row, "counters", where),
        mix=_flag(row, "mix", where),
    )


def data_lines(path: str | os.PathLike[str]) -> Iterator[str]:
    """Lines of a CSV without its ``#`` header lines."""
    text = read_text(Path(path))
    return (line for line in text.splitlines() if line.strip() and not line.startswith("#"))


def load_cases(path: str | os.PathLike[str]) -> list[Case]:
    """Read a case list. Errors name the file, the data row and the key; a repeated ``case_id`` is an error."""
    reader = csv.DictReader(data_lines(path))
    if not reader.fieldnames or "algorithm" not in reader.fieldnames or "seqlen_q" not in reader.fieldnames:
        raise InputError(f"{path}: not a case list; expected a header with at least algorithm and seqlen_q")
    cases = [parse_row(row, f"{path}, row {number}", f"row{number}") for number, row in enumerate(reader, 1)]
    seen: set[str] = set()
    for number, case in enumerate(cases, 1):
        if case.case_id in seen:
            raise InputError(f"{path}, row {number}: case_id={case.case_id!r} appears twice; expected unique ids")
        seen.add(case.case_id)
    return cases


def write_cases(path: str | os.PathLike[str], cases: Iterable[Case]) -> None:
    """Write a case list through a temporary file and a rename."""
    target = Path(path)
    temporary = target.with_name(target.name + ".tmp")
    with temporary.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, CASE_COLUMNS, lineterminator="\n")
        writer.writeheader()
        for case in cases:
            writer.writerow(case.to_row())
    temporary.replace(target)
