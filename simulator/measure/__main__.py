"""``python -m simulator.measure``: the ``measure`` command without the rest of the application."""

import typer

from simulator.measure.command import measure

if __name__ == "__main__":
    typer.run(measure)
