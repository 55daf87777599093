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
import numba.core.config

#: Numba's settings, which it makes from the environment (its stubs do not know them).
_config: Any = numba.core.config

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
    base = Path(_config.CACHE_DIR) if _config.CACHE_DIR else Path(__file__).with_name("__pycache__")
    return base / f"iosim-{sources_digest()}"


_FOLDER = str(cache_folder())
#: Numba's stubs know neither ``_nrt`` nor that this decorator takes a plain function.
_njit: Any = numba.njit


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` compiled for speed: C's rules of division, no counting of references to arrays.

    Its machine code is kept in :func:`cache_folder`; where that cannot be written, where Numba would keep it.
    """
    before = _config.CACHE_DIR
    _config.CACHE_DIR = _FOLDER
    try:
        fast: Callable[..., Any] = _njit(cache=True, error_model="numpy", _nrt=False, no_cfunc_wrapper=True)(function)
        return fast
    finally:
        _config.CACHE_DIR = before


def inlined(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` compiled as part of the compiled functions that call it: Python cannot call it, and no entry for
    Python has to be made (a third of the time that a first run compiles)."""
    inside: Any = {"no_cfunc_wrapper": True, "no_cpython_wrapper": True, "forceinline": True}
    fast: Callable[..., Any] = _njit(error_model="numpy", _nrt=False, **inside)(function)
    return fast
