"""What tests of pictures share: the problem that they draw, and whether texts keep apart and inside."""

from simulator import AttentionProblem
from simulator.plots.style import picture_style

PROBLEM = AttentionProblem(batch=1, heads=8, seqlen_q=2048, head_dim=128, causal=True)


def boxes(figure) -> list:
    """Extents (pixels) of the visible texts of a figure, with the texts."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Text

    canvas = FigureCanvasAgg(figure)
    with picture_style():
        canvas.draw()
    renderer = canvas.get_renderer()
    hidden = set()
    for axis in (axis for ax in figure.axes for axis in (ax.xaxis, ax.yaxis)):
        low, high = sorted(axis.get_view_interval())
        for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks()):
            if not low * (1 - 1e-9) <= tick.get_loc() <= high * (1 + 1e-9):
                hidden |= {id(tick.label1), id(tick.label2)}
    texts = [t for t in figure.findobj(Text) if t.get_visible() and t.get_text().strip() and id(t) not in hidden]
    # of an annotation, the text alone: its leader may pass under other texts
    return [(t.get_text(), Text.get_window_extent(t, renderer)) for t in texts if t.get_rotation() == 0]


def assert_texts_keep_apart(figure) -> None:
    placed = boxes(figure)
    for i, (text, box) in enumerate(placed):
        for other_text, other in placed[i + 1 :]:
            wide = min(box.x1, other.x1) - max(box.x0, other.x0)
            high = min(box.y1, other.y1) - max(box.y0, other.y0)
            assert wide <= 1.5 or high <= 1.5, f"{text!r} lies on {other_text!r}"


def assert_inside(figure) -> None:
    width, height = figure.canvas.get_width_height()
    for text, box in boxes(figure):
        assert box.x0 > -2 and box.y0 > -2 and box.x1 < width + 2 and box.y1 < height + 2, f"{text!r} is cut off"
