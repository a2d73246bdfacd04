"""What a search found, as a table, as sentences, and as a figure."""

import html
import io
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from jaxpp.errors import JaxppError
from jaxpp.errors.tracebacks import entries
from jaxpp.runtime.progress import progress
from jaxpp.schedule.draw.panel import Figure, has_matplotlib
from jaxpp.stages.stage_table import bytes_in_words
from jaxpp.tables import fold_lines, html_remarks, html_table, table_lines
from jaxpp.tuner.candidate import Candidate
from jaxpp.tuner.figure import tuning_figure
from jaxpp.tuner.reasons import reasons, time_in_words
from jaxpp.tuner.search import Found, Row
from jaxpp.types import Arguments

__all__ = ["Findings"]

_MOST_ROWS = 12  # of a table; of more candidates it shows the best of each schedule
_MOST_REMARKS = 4  # about what was left out
_PATIENCE = 1  # seconds before a progress bar shows


class _Peaks(Protocol):
    def __call__(self, candidate: Candidate) -> tuple[int, ...]: ...


@entries
@dataclass(frozen=True, eq=False, repr=False)
class Findings:
    """All candidates with their times and memory, and which is the best.

    Attributes:
        found: what the search found.
        given: options of ``Pipeline`` that all candidates share.
        hbm: bytes that each device has; None if that is not known.
        processes: the process of each rank's device; one process if there are none.
        ask: the peaks of a candidate, for the figure.
        remark: what should be known of how it was measured; empty if nothing.
    """

    found: Found
    given: Arguments
    hbm: int | None
    processes: tuple[int, ...]
    ask: _Peaks
    remark: str

    @property
    def rows(self) -> tuple[Row, ...]:
        """All candidates that were simulated, the fastest by prediction first."""
        return self.found.rows

    @property
    def best(self) -> Arguments:
        """The options of the best pipeline: ``jaxpp.Pipeline(loss_fn, optimizer, **tuning.best)``."""
        return {**self.given, **self.found.best.candidate.options}

    @cached_property
    def why(self) -> tuple[str, ...]:
        """Why these options: one sentence for each choice."""
        return reasons(self.found, self.hbm, self.processes)

    @cached_property
    def measured(self) -> tuple[Row, ...]:
        """The candidates that ran, the fastest first."""
        ran = [row for row in self.rows if row.measured is not None]
        return tuple(sorted(ran, key=lambda row: row.measured or 0.0))

    @cached_property
    def with_memory(self) -> tuple[Row, ...]:
        """All candidates with their peaks, as far as they are known; asks for those that the search did not need."""
        with progress(self.rows, after=_PATIENCE, desc="memory of all candidates") as bar:
            return tuple(map(self._asked, bar))

    def _asked(self, row: Row) -> Row:
        if row.peaks is not None or row.candidate in self.found.left_out:
            return row
        try:
            return row._replace(peaks=self.ask(row.candidate))
        except JaxppError:
            return row

    def figure(self, width: float | None = None) -> Figure:
        """Predicted time of a step against the memory of the fullest device, a mark for each candidate, as a matplotlib ``Figure``.

        The *frontier* is drawn as a line: candidates of which none other is both faster and smaller. Candidates that ran have a
        second mark at the time that they took. As the last line of a notebook's cell the figure shows itself.

        Args:
            width: of the figure in inches, of which a page shows 96 pixels each; 9.4 unless given.

        Raises:
            ImportError: without matplotlib, saying how to install it.
        """
        return tuning_figure(self.with_memory, self.found.best, self.hbm, width)

    @property
    def heading(self) -> str:
        """One line that says what was looked at."""
        families = len(self.found.costs)
        return f"{len(self.rows)} candidates of {families} families, {len(self.measured)} of them run"

    def _shown(self) -> list[Row]:
        """The rows of the table: all, or the chosen, those that ran, and the best of each schedule."""
        if len(self.rows) <= _MOST_ROWS:
            return list(self.rows)
        firsts = {row.candidate.schedule.name: row for row in reversed(self.rows)}
        kept = {self.found.best.candidate, *(row.candidate for row in (*self.measured, *firsts.values()))}
        return [row for row in self.rows if row.candidate in kept]

    def _cells(self) -> list[list[str]]:
        shown = self._shown()
        several = len({row.candidate.schedule.num_ranks for row in self.rows}) > 1
        head = ["schedule", *["ranks"] * several, "microbatches", "stages a rank", "balance", "remat", "predicted", "measured"]
        table = [["", *head, "peak of each device"]]
        for row in shown:
            each = row.candidate
            counts = [*[each.schedule.num_ranks] * several, each.schedule.num_microbatches, each.stages_per_rank]
            ran = "" if row.measured is None else time_in_words(row.measured)
            choice = ">" * (each == self.found.best.candidate)
            cells = [choice, each.schedule.name, *map(str, counts), each.balance, each.remat, time_in_words(row.predicted), ran]
            table.append([*cells, self._memory(row)])
        return table

    def _memory(self, row: Row) -> str:
        if row.peaks is None:
            return "not asked"
        return _sizes(row.peaks) + " (too much)" * (self.hbm is not None and max(row.peaks) > self.hbm)

    def remarks(self) -> list[str]:
        """What the table leaves out, and why the choice was made."""
        shown, found = len(self._shown()), self.found
        room = "" if self.hbm is None else f", of {bytes_in_words(self.hbm)}"
        lines = [f"> the choice; peak: the most bytes at once{room}"]
        if shown < len(self.rows):
            lines.append(f"{self.heading}: the table has {shown}, with the best of each schedule, and tuning.rows has all")
        if found.unseen:
            some = "; ".join(family.words for family in found.unseen[:_MOST_REMARKS])
            more = f"; and {len(found.unseen) - _MOST_REMARKS} more" * (len(found.unseen) > _MOST_REMARKS)
            lines.append(f"not looked at, because the budget was spent: {some}{more}")
        told: dict[str, list[str]] = {}
        for what, error in found.left_out.items():
            told.setdefault(str(error).splitlines()[0], []).append(what.words)
        for message, names in list(told.items())[:_MOST_REMARKS]:
            lines.append(f"left out: {'; '.join(names[:_MOST_REMARKS])}{'; ...' * (len(names) > _MOST_REMARKS)}: {message}")
        return [*lines, *[self.remark] * bool(self.remark), "", *self.why]

    def __str__(self) -> str:
        return "\n".join([*table_lines(self._cells(), keep=2), "", *fold_lines(self.remarks())])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return f"{self._picture()}{html_table(self._cells())}{html_remarks(self.remarks())}"

    def _picture(self) -> str:
        """The figure, no wider than the page; nothing without matplotlib."""
        if not has_matplotlib():
            return ""
        out = io.BytesIO()
        self.figure().savefig(out, format="svg")
        text, alt = out.getvalue().decode(), html.escape(self.heading, quote=True)
        style = f'<svg role="img" aria-label="{alt}" style="max-width:100%;height:auto" '
        return text[text.index("<svg") :].replace("<svg ", style, 1)


def _sizes(peaks: Sequence[int]) -> str:
    """Bytes of several devices, in the unit of the largest: ``12.3 11.8 MiB``."""
    most = max(peaks)
    unit = bytes_in_words(most).rpartition(" ")[2]
    scale = 1024 ** ("B", "KiB", "MiB", "GiB", "TiB").index(unit)
    return f"{' '.join(f'{peak / scale:.3g}' if peak / scale < 100 else f'{peak / scale:.0f}' for peak in peaks)} {unit}"
