"""Published attention measurements that ship with iosim, in the columns that ``predict`` reads.

The numbers are in ``hardware_profiles/published/``; its README names each source, how it measured and how
it was converted. Nothing here computes: a table is loaded as it stands.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import hardware_profiles

if TYPE_CHECKING:
    import pandas

_KERNEL_TABLES = (
    "fa1_paper_a100.csv",
    "fa1_other.csv",
    "fa2_a100_fwd_bwd.csv",
    "fa2_h100_fwd_bwd.csv",
    "fa2_b200.csv",
    "fa3_h100_fwd.csv",
    "fa3_h100_bwd.csv",
    "fa3_h100_fp8_fwd.csv",
    "flash_decoding_a100.csv",
)


def published_directory() -> Path:
    """Folder of all published tables, also of those that :func:`published_files` leaves out (see its README)."""
    return Path(hardware_profiles.__file__).parent / "published"


def published_files() -> list[Path]:
    """Tables of measured kernels whose algorithm iosim models; each one is a valid input of ``iosim predict``."""
    return [published_directory() / name for name in _KERNEL_TABLES]


def load_published() -> pandas.DataFrame:
    """All rows of :func:`published_files`, in order, with the column ``file`` in front.

    Times are in µs (``measured_time_us``; blank where ``measured_outcome`` is ``OOM``), rates in TFLOP/s
    (``measured_tflops``, under the source's FLOP convention), ``measured_hbm_bytes`` in bytes.
    Text columns hold ``""`` where the table is blank, number columns NaN.
    """
    import pandas

    tables = []
    for path in published_files():
        table = pandas.read_csv(path)
        table.insert(0, "file", path.name)
        tables.append(table)
    rows = pandas.concat(tables, ignore_index=True)
    text = ["implementation", "window", "mask", "gpu", "note"]
    rows[text] = rows[text].astype(object).where(rows[text].notna(), "")
    return rows
