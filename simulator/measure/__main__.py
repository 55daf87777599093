"""``python -m simulator.measure``: the ``measure`` command, which needs no other module of the application."""

import sys

from simulator.cli import main

if __name__ == "__main__":
    sys.exit(main(["measure", *sys.argv[1:]]))
