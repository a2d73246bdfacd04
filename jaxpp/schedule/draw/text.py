"""How a ``Schedule``, a ``Simulation`` and a ``Profile``, which are all ``Drawn``, show themselves: as text, and as figures."""

import base64
import html
import io
import os
import string
from collections.abc import Sequence
from typing import NamedTuple

from jaxpp.errors.tracebacks import entries
from jaxpp.schedule.clock import Bar
from jaxpp.schedule.draw.canvas import CSS_DPI, Figure, has_matplotlib
from jaxpp.schedule.draw.pebbles import pebble_gif, pebbles
from jaxpp.schedule.draw.timeline import Copied, Timeline, timeline
from jaxpp.tables import fold_lines, printable, terminal_columns

_GROUPS = string.digits + string.ascii_lowercase
_MOST_LINES = 64
_MOST_VECTORS = 1000  # bars; more are shown as pixels, or a notebook would grow by megabytes
_FITS = "max-width:100%;height:auto"


class Drawing(NamedTuple):
    """What a picture needs; each group of a ring has a colour of its own."""

    heading: str
    num_ranks: int
    stage_to_rank: Sequence[int]
    bars: Sequence[Bar]
    num_groups: int | None = None
    copies: Sequence[Copied] = ()


@entries
class Drawn:
    """Bars in time, and the pictures of them."""

    def drawing(self) -> Drawing:
        """What to draw."""
        raise NotImplementedError

    def table(self, width: int | None = None) -> str:
        """The bars as text, a column for each slot, wrapped into panels of ``width`` characters, by default the terminal's.

        It is the ``overview`` if the panels would fill more than a screen or two, or if times are not whole.
        """
        width = width or terminal_columns()
        heading, num_ranks, _, bars, *_ = self.drawing()
        if any(bar.start % 1 or bar.end % 1 for bar in bars):
            return self.overview(width)
        makespan = int(max(bar.end for bar in bars))
        cell = max(len(str(bar.action)) for bar in bars)
        each = max(1, (width - 4) // (cell + 2))
        panels = -(-makespan // each)
        if panels * (num_ranks + 2) > _MOST_LINES and panels > 1:
            return self.overview(width)
        cells = [[""] * makespan for _ in range(num_ranks)]
        for rank, action, start, end in bars:
            cells[rank][int(start) : int(end)] = [str(action)] * int(end - start)
        lines = []
        for first in range(0, makespan, each):
            slots = range(first, min(makespan, first + each))
            lines += [""] * bool(lines)
            lines.append("rank  " + "  ".join(str(t).ljust(cell) for t in slots).rstrip())
            lines += [f"{rank:<6}" + "  ".join(row[t].ljust(cell) for t in slots).rstrip() for rank, row in enumerate(cells)]
        return "\n".join([*fold_lines([heading], width), *(line.rstrip() for line in lines)])

    def overview(self, width: int | None = None) -> str:
        """All bars in one line for each rank: the kind that runs, ``·`` where the rank idles; ``width`` is as for ``table``.

        In a ring it is the group that runs: 0 to 9, then a to z, then 0 again.
        """
        width = width or terminal_columns()
        heading, num_ranks, _, bars, num_groups, _ = self.drawing()
        makespan = max(bar.end for bar in bars)
        columns = max(1, width - 6)
        whole = makespan == int(makespan) and makespan <= columns
        columns = int(makespan) if whole else columns
        lines = [[printable("·")] * columns for _ in range(num_ranks)]
        for rank, action, start, end in bars:
            first, last = (int(time * columns / (makespan or 1) + 0.5) for time in (start, end))
            mark = _GROUPS[action.microbatch % num_groups % len(_GROUPS)] if num_groups else str(action.kind)
            lines[rank][first:last] = [mark] * (last - first)
        return "\n".join([*fold_lines([heading], width), *(f"{rank:<6}" + "".join(line) for rank, line in enumerate(lines))])

    def figure(self, width: float | None = None) -> Figure:
        """The timeline as a matplotlib ``Figure``: a row for each rank, a colour for each kind, microbatch numbers, idle time grey.

        Copies of residuals to host memory and back are lines at the lower edge of their rank's row. A ring has a colour for each
        group, and the numbers of its turns. The figure shows itself as the last line of a notebook's cell;
        ``figure().savefig("timeline.png")`` writes a file. Numbers are left out where bars are too narrow for them. ``width`` is in
        inches, of which a page shows 96 pixels each; as many as the bars need, up to 9.4, unless given. Needs matplotlib.
        """
        heading, _, stage_to_rank, bars, num_groups, copies = self.drawing()
        return timeline(Timeline("", bars, num_groups=num_groups, copies=copies), stage_to_rank, heading, width)

    def pebble_figure(self, width: float | None = None) -> Figure:
        """The pebble graph: a row for each computation along the pipeline, a pebble for each residual; otherwise as ``figure``."""
        heading, _, stage_to_rank, bars, *_ = self.drawing()
        return pebbles(bars, stage_to_rank, heading, width=width)

    def pebble_gif(self, path: str | os.PathLike[str]) -> None:
        """Write the pebble graph as an animated GIF, slot by slot, in at most 120 frames; it needs matplotlib, too."""
        heading, _, stage_to_rank, bars, *_ = self.drawing()
        pebble_gif(bars, stage_to_rank, heading, path)

    def _repr_html_(self) -> str:
        return self._picture_html() or f"<pre>{html.escape(str(self))}</pre>"

    def _picture_html(self) -> str:
        """The figure as SVG or pixels, no wider than the page; nothing without matplotlib."""
        if not has_matplotlib():
            return ""
        return figure_html(self.figure(), self.drawing().heading, vectors=len(self.drawing().bars) <= _MOST_VECTORS)


def figure_html(figure: Figure, heading: str, *, vectors: bool = True) -> str:
    """A figure as SVG, or as an image of pixels, for a page of any width; the heading is read to those who cannot see it."""
    alt, out = html.escape(heading, quote=True), io.BytesIO()
    figure.savefig(out, format="svg" if vectors else "png")
    if vectors:
        text = out.getvalue().decode()
        return text[text.index("<svg") :].replace("<svg ", f'<svg role="img" aria-label="{alt}" style="{_FITS}" ', 1)
    wide, data = round(CSS_DPI * figure.get_figwidth()), base64.b64encode(out.getvalue()).decode()
    return f'<img alt="{alt}" width="{wide}" style="{_FITS}" src="data:image/png;base64,{data}">'
