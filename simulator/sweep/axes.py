"""One dimension of a design space: the values of one hardware key or problem column, as texts.

Texts are what a user would write (``x2``, ``8TB/s``, ``4096``), so that a point of a sweep means exactly what
``--set`` and a row of ``iosim predict`` mean.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

SCALES = ("linear", "log")
#: Designs beyond which a grid is a mistake rather than a plan (a week on one core).
MOST_POINTS = 5_000_000


@dataclass(frozen=True)
class Axis:
    """Values of ``name``: the listed texts ``values``, or a range ``low .. high`` that is cut on demand.

    ``kind`` is ``hardware``, ``problem`` or ``gpu``. A range is in base units, or factors of the GPU's own value when
    ``relative``; ``multiple`` rounds to multiples of it (0: no rounding), ``steps`` is its size in a grid.
    """

    kind: str
    name: str
    values: tuple[str, ...] = ()
    low: float = 0.0
    high: float = 0.0
    relative: bool = False
    scale: str = "linear"
    multiple: float = 0.0
    steps: int = 0

    @property
    def is_range(self) -> bool:
        """Whether the axis is a range rather than a list."""
        return not self.values

    @property
    def ends(self) -> tuple[str, str]:
        """The least and the greatest value that a range can give."""
        return self._text(self._number(0.0)), self._text(self._number(1.0))

    def at(self, share: float) -> str:
        """The value at ``share`` (0 <= share < 1) of the axis: part of a range, or the item of a list."""
        if not self.is_range:
            return self.values[min(int(share * len(self.values)), len(self.values) - 1)]
        return self._text(self._number(share))

    def grid(self) -> tuple[str, ...]:
        """The values of a grid over the axis, ends included; values that rounding made equal come once."""
        if not self.is_range:
            return self.values
        shares = [i / (self.steps - 1) for i in range(self.steps)] if self.steps > 1 else [0.0]
        return tuple(dict.fromkeys(self._text(self._number(share)) for share in shares))

    def _number(self, share: float) -> float:
        if self.scale == "log":
            number = math.exp(math.log(self.low) + share * (math.log(self.high) - math.log(self.low)))
        else:
            number = self.low + share * (self.high - self.low)
        if self.multiple:
            # rounding never leaves the range
            least = math.ceil(self.low / self.multiple) * self.multiple
            most = math.floor(self.high / self.multiple) * self.multiple
            return min(max(round(number / self.multiple) * self.multiple, least), most)
        # twelve digits: exp(log(x)) is an ulp off, and may be outside
        return min(max(float(f"{number:.12g}"), self.low), self.high)

    def _text(self, number: float) -> str:
        text = repr(int(number)) if float(number).is_integer() else repr(float(number))
        return f"x{text}" if self.relative else text
