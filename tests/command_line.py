"""Running ``iosim`` inside a test."""

from __future__ import annotations

from simulator.cli import main


def failure(capsys, *arguments: str) -> str:
    """The one line that ``iosim`` says when it refuses ``arguments`` with exit code 2."""
    assert main(list(arguments)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert len(lines) == 1, captured.err
    return lines[0]
