"""What all pictures share: fonts, sizes, tints of an algorithm's colour, labels that keep apart, saving."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from simulator.errors import InputError
from simulator.palette import algorithm_colour

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PICTURE_SUFFIXES = (".png", ".svg", ".pdf")
#: Text and lines that belong to no algorithm.
INK, MUTED, FAINT = "#222222", "#6b6b6b", "#d9d9d9"
_SETTINGS = {
    "font.family": "sans-serif",
    # DejaVu comes with matplotlib; Verdana is as wide, for an SVG on a machine without it
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial", "sans-serif"],
    "font.size": 8.5,
    "axes.titlesize": 9.5,
    "axes.labelsize": 8.5,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "text.color": INK,
    "lines.linewidth": 1.6,
    "hatch.linewidth": 0.6,
    # text stays text in an SVG: it can be selected and searched
    "svg.fonttype": "none",
    "svg.hashsalt": "iosim",
    "pdf.fonttype": 42,
}


@contextmanager
def picture_style() -> Iterator[None]:
    """Draw and save inside this: the pictures' fonts and lines, without touching a user's own settings."""
    import matplotlib

    with matplotlib.rc_context(cast(Any, _SETTINGS)):
        yield


def new_figure(width_in: float, height_in: float) -> Figure:
    """An empty figure that lays itself out; inches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width_in, height_in), layout="constrained")
    # Jupyter shows a Figure made without pyplot through this hook
    cast(Any, figure)._repr_png_ = lambda: _png(figure)
    return figure


def _png(figure: Figure) -> bytes:
    import io

    stream = io.BytesIO()
    with picture_style():
        figure.savefig(stream, format="png", dpi=90)
    return stream.getvalue()


def save_figure(figure: Figure, path: str | Path, dpi: int = 160) -> None:
    """Write ``figure`` as PNG, SVG or PDF, by suffix; :class:`InputError` for any other."""
    from simulator.atomic_write import replace_file

    path = check_picture_path(path)
    stamp = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(path.suffix.lower())
    with picture_style():
        replace_file(path, lambda temporary: figure.savefig(temporary, dpi=dpi, metadata=stamp))


def check_picture_path(path: str | Path) -> Path:
    """``path``, if its suffix is a picture's; :class:`InputError` otherwise."""
    path = Path(path)
    if path.suffix.lower() not in PICTURE_SUFFIXES:
        raise InputError(f"{path}: is no picture; end the name in {', '.join(PICTURE_SUFFIXES)}")
    return path


def svg_text(figure: Figure) -> str:
    """``figure`` as an ``<svg>`` element, for a page (no XML header)."""
    import io

    stream = io.StringIO()
    with picture_style():
        figure.savefig(stream, format="svg", metadata={"Date": None})
    text = stream.getvalue()
    return text[text.index("<svg") :]


def tint(colour: str, strength: float) -> tuple[float, float, float]:
    """``colour`` mixed with white: strength 1 is the colour itself, 0 is white."""
    from matplotlib.colors import to_rgb

    red, green, blue = (1.0 - strength * (1.0 - part) for part in to_rgb(colour))
    return red, green, blue


def series_colour(series: str) -> str:
    """The colour of a series named after its algorithm, such as ``fa2`` or ``fa1:flash_attn_1_paper``."""
    return algorithm_colour(series.partition(":")[0])


#: Height of a further line of a title, inches.
TITLE_LINE_IN = 0.17


def title_lines(text: str, width_in: float, size_pt: float = 9.5) -> str:
    """``text`` in lines that fit ``width_in`` inches, broken behind commas and at spaces: the name of a changed GPU
    lists its changes."""
    most = max(12, int(width_in * 72 / (0.66 * size_pt)))
    lines = [""]
    for part in re.findall(r"[^ ,]*(?:,(?=\S)|,? +|$)", text):
        if lines[-1] and len((lines[-1] + part).rstrip()) > most:
            lines.append("")
        lines[-1] += part
    return "\n".join(line.rstrip() for line in lines)


def title_height_in(titles: Iterable[str]) -> float:
    """What the longest of ``titles`` needs beyond one line, inches."""
    return TITLE_LINE_IN * max((title.count("\n") for title in titles), default=0)


def bytes_text(amount: float) -> str:
    """``amount`` bytes for a label: ``256 MB``, ``1.5 GB``."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(amount) >= size:
            return f"{amount / size:.3g} {unit}"
    return f"{amount:.0f} B"


def time_text(time_us: float) -> str:
    """``time_us`` for a label: ``52.6 µs``, ``1.46 ms``."""
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if abs(time_us) >= size:
            return f"{time_us / size:.3g} {unit}"
    return f"{time_us:.3g} µs"


def spread(values: Iterable[float], gap: float, low: float = 0.0, high: float = 1.0) -> list[float]:
    """Positions near ``values`` that are at least ``gap`` apart and, where they fit, within ``low .. high``."""
    values = list(values)
    order = sorted(range(len(values)), key=lambda i: values[i])
    placed: list[float] = []
    for i in order:
        placed.append(max(values[i], placed[-1] + gap) if placed else max(values[i], low))
    # push back down what ran over the top, then shift groups back towards their own values
    for k in range(len(placed) - 1, -1, -1):
        limit = high if k == len(placed) - 1 else placed[k + 1] - gap
        placed[k] = min(placed[k], limit)
    result = [0.0] * len(values)
    for position, i in zip(placed, order, strict=True):
        result[i] = position
    return result


def axes_fraction(ax: Axes, y: float) -> float:
    """Where ``y`` lies between the bottom (0) and the top (1) of ``ax``, on its linear or logarithmic scale."""
    import math

    low, high = ax.get_ylim()
    if ax.get_yscale() == "log":
        return (math.log(y) - math.log(low)) / (math.log(high) - math.log(low))
    return (y - low) / (high - low)


def label_in_margin(ax: Axes, labels: Iterable[tuple[float, float, str, str]], height_in: float) -> None:
    """Write ``(x, y, text, colour)`` in the right margin beside their points, apart from each other, with leaders.

    Call it last: the axes' limits must be final. ``height_in`` is about the height of the axes.
    """
    labels = list(labels)
    gap = 12.0 / (72.0 * height_in)
    fractions = [axes_fraction(ax, y) for _, y, _, _ in labels]
    for (x, y, text, colour), place in zip(labels, spread(fractions, gap), strict=True):
        ax.annotate(
            text,
            (x, y),
            xytext=(1.03, place),
            textcoords="axes fraction",
            va="center",
            fontsize=8,
            color=_dark_enough(colour),
            arrowprops={
                "arrowstyle": "-",
                "color": colour,
                "lw": 0.6,
                "alpha": 0.6,
                "shrinkA": 0,
                "shrinkB": 2,
                "relpos": (0.0, 0.5),
            },
            annotation_clip=False,
            zorder=1.5,
            gid=f"series-{text.split()[0]}" if text.split() else None,
        )


def _dark_enough(colour: str) -> tuple[float, float, float]:
    """``colour`` darkened until it reads as text on white."""
    from matplotlib.colors import to_rgb

    rgb = red, green, blue = to_rgb(colour)
    light = 0.299 * red + 0.587 * green + 0.114 * blue
    if light <= 0.45:
        return rgb
    shade = min(1.0, 0.45 / light)
    return red * shade, green * shade, blue * shade


def text_colour(series: str) -> tuple[float, float, float]:
    """The colour of ``series`` for text: dark enough on white."""
    return _dark_enough(series_colour(series))


def line_width(index: int, count: int) -> float:
    """Points: earlier series are drawn wider, so that lines that lie on each other all show."""
    return 1.4 + 0.5 * (count - 1 - index)


def readable_log_ticks(ax: Axes, text: Callable[[float], str]) -> None:
    """Label a logarithmic y axis with ``text(value)``, at 1, 2, 5 where it spans few decades."""
    from matplotlib.ticker import LogLocator, NullLocator

    low, high = ax.get_ylim()
    ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high / low < 1000 else (1.0,), numticks=20))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(lambda value, _: text(value))
