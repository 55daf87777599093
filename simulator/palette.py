"""One colour means one algorithm in every picture.

The colours are Okabe and Ito's set, told apart under the common kinds of colour blindness
(https://jfly.uni-koeln.de/color/).
"""

from __future__ import annotations

#: Algorithm -> colour; ``fa4`` is reserved for Blackwell's native kernels.
ALGORITHM_COLOURS = {
    "standard": "#000000",
    "fa1": "#E69F00",
    "fa2": "#56B4E9",
    "fa3": "#0072B2",
    "flash_decoding": "#009E73",
    "fa4": "#CC79A7",
}
#: Any algorithm that is not in the table.
OTHER_COLOUR = "#D55E00"


def algorithm_colour(algorithm: str) -> str:
    """The colour of ``algorithm``."""
    return ALGORITHM_COLOURS.get(algorithm, OTHER_COLOUR)
