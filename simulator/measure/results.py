"""Result files: a ``#`` header that says where and how, then CSV rows that are appended one case at a time and
resumed.
"""

from __future__ import annotations

import csv
import datetime
import importlib
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from simulator.errors import InputError
from simulator.measure.cases import CASE_COLUMNS, data_lines

TIMED_COLUMNS = (
    *CASE_COLUMNS,
    "measured_time_us",
    "measured_min_us",
    "measured_p90_us",
    "measured_n",
    "measured_sm_clock_mhz",
    "measured_power_w",
    "measured_temperature_c",
    "measured_at_s",
    "measured_error",
)


def describe_machine(driver: str = "") -> list[str]:
    """Header lines: GPU, driver, CUDA, PyTorch and kernel package versions, date (UTC)."""
    import torch

    properties = torch.cuda.get_device_properties(0)
    lines = [
        f"gpu: {properties.name}, {properties.multi_processor_count} SMs, {properties.total_memory} bytes, "
        f"L2 {getattr(properties, 'L2_cache_size', 0)} bytes, compute capability {properties.major}.{properties.minor}",
        f"driver: {driver or 'unknown'}; CUDA: {torch.version.cuda}; PyTorch: {torch.__version__}; "
        f"cuDNN: {torch.backends.cudnn.version()}; Python: {platform.python_version()}",
    ]
    versions = []
    metadata = importlib.import_module("importlib.metadata")
    for package in ("triton", "tokenspeed-fa3", "fa3-fwd", "flash-attn-4", "nvidia-cutlass-dsl"):
        try:
            versions.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            continue
    lines.append("kernel packages: " + ("; ".join(versions) or "none beside PyTorch"))
    lines.append("date: " + datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"))
    return lines


class ResultFile:
    """Append-only CSV. An existing file is resumed when its columns match; else it is an :class:`InputError`.

    Failed rows of an existing file are dropped, so that resuming tries them again.
    """

    def __init__(self, path: str | os.PathLike[str], columns: Sequence[str], header: Iterable[str]) -> None:
        self.path = Path(path)
        self.columns = tuple(columns)
        self.done: set[str] = set()
        if self.path.exists() and self.path.stat().st_size:
            self._drop_failures()
            self._stream = self.path.open("a", encoding="utf-8", newline="")
            self._writer = csv.DictWriter(self._stream, self.columns, lineterminator="\n")
        else:
            self._stream = self.path.open("w", encoding="utf-8", newline="")
            for line in header:
                self._stream.write(f"# {line}\n")
            self._writer = csv.DictWriter(self._stream, self.columns, lineterminator="\n")
            self._writer.writeheader()
        self._stream.flush()

    def _drop_failures(self) -> None:
        """Note the rows that are done; rewrite the file without the failed ones, which are tried again."""
        reader = csv.DictReader(data_lines(self.path))
        if tuple(reader.fieldnames or ()) != self.columns:
            raise InputError(f"{self.path}: other columns than this command writes; expected a new file name")
        rows = list(reader)
        kept = [row for row in rows if not row.get("measured_error")]
        self.done = {row[self.columns[0]] for row in kept}
        if len(kept) == len(rows):
            return
        header = [line for line in self.path.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
        temporary = self.path.with_name(self.path.name + ".tmp")
        with temporary.open("w", encoding="utf-8", newline="") as stream:
            stream.writelines(line + "\n" for line in header)
            writer = csv.DictWriter(stream, self.columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(kept)
        temporary.replace(self.path)

    def append(self, row: Mapping[str, object]) -> None:
        """Write one row and flush it to the file; missing columns stay empty."""
        self._writer.writerow({name: format_cell(row.get(name, "")) for name in self.columns})
        self._stream.flush()
        self.done.add(str(row[self.columns[0]]))

    def close(self) -> None:
        """Close the file."""
        self._stream.close()


def format_cell(value: object) -> str:
    """Text of a cell: floats with six significant digits, None empty, line breaks and ``#`` removed."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(value).replace("\n", " ").replace("\r", " ").replace("#", "no.")
