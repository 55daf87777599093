"""What pytest-benchmark measured, as a table: ``table.py BENCH.json > results.md`` (in this folder)."""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(path: str) -> None:
    """Print a row for each benchmark: its least and median seconds, and memory where it was asked for."""
    measured = json.loads(Path(path).read_text())
    machine = measured["machine_info"]
    print(f"{machine['cpu'].get('brand_raw', machine['machine'])}, {machine['cpu'].get('count')} cores, ", end="")
    print(f"Python {machine['python_version']}, {measured['datetime'][:10]}; warm unless the name says otherwise.\n")
    print("| benchmark | least (s) | median (s) | peak memory (MB) |\n|---|---|---|---|")
    for row in measured["benchmarks"]:
        stats, peak = row["stats"], row["extra_info"].get("peak_mb")
        print(f"| {row['name']} | {stats['min']:.3f} | {stats['median']:.3f} | {f'{peak:.0f}' if peak else ''} |")


if __name__ == "__main__":
    main(*sys.argv[1:])
