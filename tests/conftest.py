"""How the whole suite is spread over the machine's cores."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

#: More processes gain little: the suite's longest tests are a minute each.
MOST_WORKERS = 4


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """As many workers of pytest-xdist as there are cores, for a folder of tests and unless ``-n`` says otherwise.

    Here rather than as ``-n auto`` in pyproject.toml: one file or one test starts sooner without workers, an
    environment without pytest-xdist runs the suite all the same, and a debugger needs the test in this process.
    """
    if not config.pluginmanager.hasplugin("xdist") or hasattr(config, "workerinput"):
        return
    options = config.option
    interactive = options.usepdb or options.trace or options.collectonly
    whole = any(Path(name).is_dir() for name in config.args)
    if options.numprocesses is None and not options.tx and whole and not interactive:
        options.numprocesses = min(MOST_WORKERS, len(os.sched_getaffinity(0)))
        # neighbours stay together as long as possible: a module's fixture is made once
        options.dist = "worksteal" if options.dist == "no" else options.dist
