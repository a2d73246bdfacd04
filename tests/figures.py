"""What the tests of figures ask of matplotlib: which bars and numbers there are, and whether anything lies over anything else."""

from collections import Counter

from matplotlib.text import Text


def drawn_bars(axes):
    """Kind, start and end of every bar."""
    collections = [c for c in axes.collections if c.get_label().partition(" ")[2].isdigit()]
    boxes = ((c.get_label()[0], path.get_extents()) for c in collections for path in c.get_paths())
    return Counter((kind, round(box.x0, 6), round(box.x1, 6)) for kind, box in boxes)


def spans_of(bars):
    """The same of what was to be drawn."""
    return Counter((str(bar.action.kind), round(float(bar.start), 6), round(float(bar.end), 6)) for bar in bars)


def numbers(axes):
    """The numbers in bars; what stands beside a row is no number of a bar."""
    return [text for text in axes.texts if text.get_ha() == "center"]


def key_words(figure):
    """The words of all keys, line by line."""
    return [text.get_text() for key in figure.legends for text in key.get_texts()]


def words(axes):
    """What stands in and above axes."""
    return [axes.get_title(loc="left"), *(text.get_text() for text in axes.texts)]


def assert_apart(figure):
    """All that is written lies on the page, and no two of it over one another."""
    figure.canvas.draw()
    texts = [text for text in figure.findobj(Text) if text.get_text().strip() and text.get_visible()]
    hidden = {id(label) for axes in figure.axes for axis in (axes.xaxis, axes.yaxis) for label in _outside(axis)}
    inside = {id(text) for axes in figure.axes for text in numbers(axes)}
    spans = [(text, text.get_window_extent()) for text in texts if id(text) not in hidden | inside]
    for k, (text, one) in enumerate(spans):
        where = text.get_text()
        assert figure.bbox.x0 <= one.x0 + 1 and one.x1 <= figure.bbox.x1 + 1, where
        assert figure.bbox.y0 <= one.y0 + 1 and one.y1 <= figure.bbox.y1 + 1, where
        assert not [other.get_text() for other, span in spans[:k] if one.overlaps(span)], where


def _outside(axis):
    """Labels of ticks that are not drawn, as they lie beyond the axis; and the second labels of each tick."""
    low, high = sorted(axis.get_view_interval())
    for tick in [*axis.get_major_ticks(), *axis.get_minor_ticks()]:
        yield tick.label2
        if not low <= tick.get_loc() <= high:
            yield tick.label1
