"""How bars in time show themselves: as text that fits a terminal, and as figures; and tables as text and as HTML.

``Drawn`` is what a ``Schedule`` (on the unit clock), a ``Simulation`` (under costs) and a ``Profile`` (measured) have in common.
"""

import base64
import html
import io
import os
import shutil
from collections.abc import Sequence
from typing import NamedTuple

from jaxpp.schedule.clock import Bar
from jaxpp.schedule.draw.panel import Figure, has_matplotlib
from jaxpp.schedule.draw.pebbles import pebble_gif, pebbles
from jaxpp.schedule.draw.timeline import timeline

__all__ = ["Drawing", "Drawn", "html_table", "table_lines"]

_MOST_LINES = 64
_MOST_VECTORS = 1000  # bars; more are shown as pixels, or a notebook would grow by megabytes


class Drawing(NamedTuple):
    """What a picture needs: one line that says what it is, and every action with its rank, start and end."""

    heading: str
    num_ranks: int
    stage_to_rank: Sequence[int]
    bars: Sequence[Bar]


class Drawn:
    """Bars in time, and the pictures of them."""

    def drawing(self) -> Drawing:
        """What to draw."""
        raise NotImplementedError

    def table(self, width: int | None = None) -> str:
        """The bars as text, a column for each slot, wrapped into panels.

        Args:
            width: characters in a line; the width of the terminal unless given.

        Returns:
            the heading and the panels; or ``overview`` if the panels would fill more than a screen or two, or times are not whole.
        """
        width = width or shutil.get_terminal_size((120, 24)).columns
        heading, num_ranks, _, bars = self.drawing()
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
        return "\n".join([heading, *(line.rstrip() for line in lines)])

    def overview(self, width: int | None = None) -> str:
        """All bars in one line for each rank: the kind that runs, ``·`` where the rank idles.

        Args:
            width: characters in a line; the width of the terminal unless given.
        """
        width = width or shutil.get_terminal_size((120, 24)).columns
        heading, num_ranks, _, bars = self.drawing()
        makespan = max(bar.end for bar in bars)
        columns = max(1, width - 6)
        whole = makespan == int(makespan) and makespan <= columns
        columns = int(makespan) if whole else columns
        lines = [["·"] * columns for _ in range(num_ranks)]
        for rank, action, start, end in bars:
            first, last = (int(time * columns / (makespan or 1) + 0.5) for time in (start, end))
            lines[rank][first:last] = [str(action.kind)] * (last - first)
        return "\n".join([heading, *(f"{rank:<6}" + "".join(line) for rank, line in enumerate(lines))])

    def figure(self) -> Figure:
        """The timeline as a matplotlib ``Figure``: a row for each rank, a colour for each kind, microbatch numbers, idle time grey.

        In a notebook the schedule draws itself; a figure alone shows after ``%matplotlib inline``.

        Raises:
            ImportError: without matplotlib, saying how to install it.
        """
        heading, _, stage_to_rank, bars = self.drawing()
        return timeline(bars, stage_to_rank, heading)

    def pebble_figure(self) -> Figure:
        """The pebble graph as a matplotlib ``Figure``: a row for each computation along the pipeline, a pebble for each residual.

        Raises:
            ImportError: without matplotlib, saying how to install it.
        """
        heading, _, stage_to_rank, bars = self.drawing()
        return pebbles(bars, stage_to_rank, heading)

    def pebble_gif(self, path: str | os.PathLike[str]) -> None:
        """Write the pebble graph as an animated GIF, slot by slot, in at most 120 frames.

        Raises:
            ImportError: without matplotlib, saying how to install it.
        """
        heading, _, stage_to_rank, bars = self.drawing()
        pebble_gif(bars, stage_to_rank, heading, path)

    def _repr_html_(self) -> str:
        if not has_matplotlib():
            return f"<pre>{html.escape(str(self))}</pre>"
        out = io.BytesIO()
        small = len(self.drawing().bars) <= _MOST_VECTORS
        self.figure().savefig(out, format="svg" if small else "png")
        picture = f'<img src="data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}">'
        if small:
            text = out.getvalue().decode()
            picture = text[text.index("<svg") :]
        return f'<div style="overflow-x:auto">{picture}</div>'


def table_lines(rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table, every column as wide as its widest cell and flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def html_table(rows: Sequence[Sequence[str]]) -> str:
    """A table for a notebook; the first row is the head."""
    tags = ["th"] + ["td"] * (len(rows) - 1)
    lines = ["".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row) for tag, row in zip(tags, rows, strict=True)]
    return "<table>" + "".join(f'<tr style="text-align:right">{line}</tr>' for line in lines) + "</table>"
