"""iosim: an IO-aware GPU memory-hierarchy simulator for attention kernels.

``simulate(algorithm, problem, profile) -> Result`` is the one way in; names are imported when first used.
"""

import sys
from importlib import import_module
from types import ModuleType

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


class _Package(ModuleType):
    """The package: ``simulator.simulation`` stays the function when the submodule of that name is imported."""

    def __setattr__(self, name: str, value) -> None:
        if name == "simulate" and isinstance(value, ModuleType):
            value = value.simulate
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str):
    if name in _EXPORTS:
        value = getattr(import_module(_EXPORTS[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'simulator' has no attribute {name!r}")
