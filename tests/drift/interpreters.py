"""Byte-identical predictions on other Pythons: ``python tests/drift/interpreters.py python3.12 python3.13``.

This interpreter and each that is named predict ``cases.csv`` and ``mixed.csv`` (every algorithm, pass and option),
each with another hash seed and every second one in two processes; any differing byte is shown and exits 1. An
interpreter without iosim's dependencies gets them in a virtual environment under a temporary folder. Nothing is
skipped: an interpreter that does not start, or is older than 3.11, is an error.
"""

from __future__ import annotations

import difflib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent.parent
FILES = ("cases.csv", "mixed.csv")


def ready(interpreter: str, work: Path, number: int) -> str:
    """An interpreter like ``interpreter`` that has the dependencies."""
    if subprocess.run([interpreter, "-c", "import numba, simpy, pydantic, typer, scipy, pandas, yaml"]).returncode == 0:
        return interpreter
    place = work / f"venv{number}"
    subprocess.run([interpreter, "-m", "venv", place], check=True)
    python = str(place / "bin" / "python")
    subprocess.run([python, "-m", "pip", "install", "-q", "--disable-pip-version-check", str(ROOT)], check=True)
    return python


def predictions(interpreter: str, work: Path, number: int) -> str:
    """The predicted tables as ``interpreter`` writes them, from this checkout."""
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "PYTHONHASHSEED": str(number),
        "NUMBA_CACHE_DIR": str(work / f"numba{number}"),
    }
    texts = []
    for name in FILES:
        out = work / f"{number}_{name}"
        arguments = ["predict", str(FOLDER / name), "--gpu", "h200_sxm", "--jobs", str(1 + number % 2), "-o", str(out)]
        subprocess.run([interpreter, "-m", "simulator.cli", *arguments], check=True, env=environment)
        texts.append(out.read_bytes().decode())
    return "".join(texts)


def main(names: list[str]) -> int:
    """1 where bytes differ."""
    if not names:
        print(__doc__)
        return 2
    first, differ = "", False
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        for number, name in enumerate([sys.executable, *names]):
            program = "import platform, sys; assert sys.version_info >= (3, 11); print(platform.python_version())"
            version = subprocess.run([name, "-c", program], capture_output=True, text=True, check=True).stdout.strip()
            text = predictions(ready(name, work, number), work, number)
            first = first or text
            print(f"Python {version} ({name}): {'the same bytes' if text == first else 'OTHER BYTES'}", flush=True)
            if text != first:
                differ = True
                sys.stdout.writelines(difflib.unified_diff(first.splitlines(True), text.splitlines(True), n=0))
    return int(differ)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
