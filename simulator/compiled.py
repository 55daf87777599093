"""How the hot loops are compiled, and where their machine code is kept between runs.

Numba keeps a function's machine code under its own file's age. That is not enough here: the replay holds the code of
the L2's functions, so an edit of one file would leave stale code of both in use, and a process that began before the
edit could load what another one compiled after it. Each state of the sources has a folder of its own instead.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from numba.core import config

#: Files whose functions are compiled; an edit of any of them compiles all of them anew.
SOURCES = ("compiled.py", "l2_blocks.py", "replay.py")


def sources_digest() -> str:
    """A short digest of :data:`SOURCES` and of the compiler's version."""
    digest = hashlib.sha256(numba.__version__.encode())
    for name in SOURCES:
        digest.update(Path(__file__).with_name(name).read_bytes())
    return digest.hexdigest()[:16]


def cache_folder() -> Path:
    """Where machine code is kept: under ``NUMBA_CACHE_DIR``, or else beside Python's own compiled files."""
    base = Path(config.CACHE_DIR) if config.CACHE_DIR else Path(__file__).with_name("__pycache__")
    return base / f"iosim-{sources_digest()}"


_FOLDER = str(cache_folder())


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` compiled for speed: C's rules of division, no counting of references to arrays.

    Its machine code is kept in :func:`cache_folder`; where that cannot be written, where Numba would keep it.
    """
    before = config.CACHE_DIR
    config.CACHE_DIR = _FOLDER
    try:
        return numba.njit(cache=True, error_model="numpy", _nrt=False)(function)
    finally:
        config.CACHE_DIR = before
