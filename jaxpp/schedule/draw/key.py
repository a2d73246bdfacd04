"""The key of a figure: what its colours mean, in one line, or in several where one would be too long."""

from collections.abc import Iterable, Iterator, Sequence, Set

from jaxpp.schedule.action import Kind
from jaxpp.schedule.clock import Bar
from jaxpp.schedule.draw.canvas import IDLE, INK, Cell, Figure, Labels, Panel, text_inches

__all__ = ["ANY", "DOT", "LINE", "Entry", "bar_key", "draw_key", "key_lines", "key_width", "legend", "several_stages"]

Entry = tuple[str, Kind | str, int]
"""Words of a key, what they explain (a kind, a colour, ``DOT``, or nothing), and for a kind which stage of its rank."""
DOT = "dot"
ANY = (Labels(kinds=frozenset(Kind)),)
"""Numbers in bars of all kinds: for a key of the usual width."""
LINE = 0.24
"""Inches from a line of a key to the next."""
_WORDS = {Kind.F: "F forward", Kind.B: "B backward", Kind.I: "I input part", Kind.W: "W weight part"}
_SIZE, _SWATCH, _TO_WORDS, _APART = 8.0, 0.22, 0.06, 0.22  # points of the words; inches of a colour, to its words, to the next


def bar_key(
    bars: Sequence[Bar], stage_to_rank: Sequence[int], labels: Sequence[Labels], *, pebble: str = "", more: Sequence[Entry] = ()
) -> list[Entry]:
    """What the colours of bars mean, and the numbers in them.

    Args:
        bars: that are drawn.
        stage_to_rank: the rank of each stage.
        labels: how each panel writes numbers; ``ANY`` before that is known.
        pebble: what stands for residuals: ``DOT``, or a colour; nothing if they are not drawn.
        more: what is explained besides.
    """
    entries: list[Entry] = [(_WORDS[kind], kind, 0) for kind in Kind if any(bar.action.kind == kind for bar in bars)]
    entries += [("later stage of its rank", Kind.F, 1)] * several_stages(stage_to_rank)
    entries += [*more, ("idle", IDLE, 0)]
    entries += [("residuals alive", pebble, 0)] * bool(pebble)
    return [*entries, *_about_numbers({bar.action.kind for bar in bars}, labels)]


def _about_numbers(present: Set[Kind], labels: Sequence[Labels]) -> list[Entry]:
    """What the numbers in bars are, and which kinds have none anywhere; nothing if there are no numbers."""
    numbered = {kind for panel in labels for kind in panel.kinds}
    without = ", ".join(kind for kind in Kind if kind in present - numbered)
    words = "numbers: microbatches" + f" (no room in {without})" * bool(without)
    return [(words, "", 0)] * bool(numbered)


def several_stages(stage_to_rank: Sequence[int]) -> bool:
    """Whether some rank has more than one."""
    return len(stage_to_rank) > max(stage_to_rank) + 1


def key_width(entries: Iterable[Entry]) -> float:
    """Inches of a key in one line."""
    return sum(_wide(entry) + _APART for entry in entries) - _APART


def key_lines(entries: Sequence[Entry], width: float) -> int:
    """How many lines a key has that is at most so many inches wide."""
    return 1 + max((line for line, _, _ in _laid_out(entries, width)), default=0)


def draw_key(figure: Figure, entries: Sequence[Entry], left: float, bottom: float, width: float) -> None:
    """Draw a key whose last line has its lower edge at ``bottom``; all in inches from the left and lower edge of the figure."""
    tall = LINE * key_lines(entries, width)
    panel, cells = Panel(figure, (left, bottom, width, tall), width, tall), []
    panel.axes.set(xticks=[], yticks=[])
    for line, x, (words, what, order) in _laid_out(entries, width):
        top, bottom = LINE * line + 0.04, LINE * line + 0.2
        if isinstance(what, Kind):
            cells.append(Cell(x, x + _SWATCH, top, bottom, what, order))
        elif what == DOT:
            panel.dots(3, [(x + _SWATCH / 2, (top + bottom) / 2)])
        elif what:
            panel.rectangles([(x, x + _SWATCH, top, bottom)], what, words)
        start = x + (_SWATCH + _TO_WORDS) * bool(what)
        panel.axes.text(start, (top + bottom) / 2, words, size=_SIZE, va="center_baseline", color=INK)
    if cells:
        panel.cells(cells, Labels())


def legend(panel: Panel, entries: Sequence[Entry], above: float) -> None:
    """A key that many inches above a panel, as wide as the figure allows."""
    figure, (left, bottom, _, tall) = panel.axes.figure, panel.box
    draw_key(figure, entries, left, bottom + tall + above, figure.get_figwidth() - left)


def _wide(entry: Entry) -> float:
    words, what, _ = entry
    return (_SWATCH + _TO_WORDS) * bool(what) + text_inches(words, _SIZE)


def _laid_out(entries: Iterable[Entry], width: float) -> Iterator[tuple[int, float, Entry]]:
    """Each entry with its line and where it begins there, evenly spaced."""
    line, x = 0, 0.0
    for entry in entries:
        wide = _wide(entry)
        if x and x + wide > width:
            line, x = line + 1, 0.0
        yield line, x, entry
        x += wide + _APART
