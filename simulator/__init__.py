"""iosim: an IO-aware GPU memory-hierarchy simulator for attention kernels.

``simulate(algorithm, problem, profile) -> Result`` is the one way in; names are imported when first used.
"""

from importlib import import_module
from typing import Any

_EXPORTS = {
    "simulate": "simulator.simulation",
    "load_profile": "simulator.profile",
    "Profile": "simulator.profile",
    "AttentionProblem": "simulator.problem",
    "Result": "simulator.result",
    "InputError": "simulator.errors",
    "UnsupportedError": "simulator.errors",
}
__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        value = getattr(import_module(_EXPORTS[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'simulator' has no attribute {name!r}")
