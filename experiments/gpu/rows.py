"""What a measurement says: one row of the table, with its numbers for the JSON; and what a part is told."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.gpu.sizes import Sizes
from experiments.results import columns

__all__ = ["Job", "Row", "first_line", "markdown", "markdown_table", "spread", "text"]

HEADING = ("part", "case", "what", "measured", "aim", "note")


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        part: of the experiment.
        case: of the part, such as a model.
        what: was measured.
        measured: the result, with its unit.
        aim: what it should be, if anything was promised.
        note: what else there is to know.
        numbers: the same and more, for the JSON.
    """

    part: str
    case: str
    what: str
    measured: str
    aim: str = ""
    note: str = ""
    numbers: Mapping[str, Any] = field(default_factory=dict)

    @property
    def cells(self) -> tuple[str, ...]:
        """What the table shows."""
        return tuple(getattr(self, name) for name in HEADING)


class Job(NamedTuple):
    """One case of a part, which a process of its own measures.

    Attributes:
        part: its name.
        case: its name.
        sizes: of all models and rounds.
        out: folder for files.
        seconds: after which the process is stopped.
    """

    part: str
    case: str
    sizes: Sizes
    out: Path
    seconds: float

    def row(self, what: str, measured: str, aim: str = "", note: str = "", **numbers: Any) -> Row:
        """A row of this job."""
        return Row(self.part, self.case, what, measured, aim, note, numbers)


def first_line(error: BaseException) -> str:
    """The kind of an exception, and the first line of its message."""
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}".removesuffix(": ")[:300]


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """The median and the quartiles: ``(low, middle, high)``."""
    low, middle, high = np.quantile(np.asarray(values), (0.25, 0.5, 0.75))
    return float(low), float(middle), float(high)


def _heading(said: str) -> tuple[str, ...]:
    return tuple(said if name == "measured" else name for name in HEADING)


def text(rows: Sequence[Row], said: str = "measured") -> str:
    """The rows as a table for the screen; ``said`` is what they say of each thing."""
    return "\n".join(columns([_heading(said), *(row.cells for row in rows)], left=(0, 1, 2, 4, 5)))


def markdown(rows: Sequence[Row], said: str = "measured") -> str:
    """The rows as a table in Markdown; ``said`` is what they say of each thing."""
    return markdown_table([_heading(said), *(row.cells for row in rows)])


def markdown_table(cells: Sequence[Sequence[str]]) -> str:
    """Cells as a table in Markdown; the first row is the heading."""
    heading, *others = cells
    lines = [heading, ("---",) * len(heading), *others]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
