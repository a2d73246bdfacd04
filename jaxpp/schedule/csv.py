"""Schedules as CSV, in PyTorch's grammar (``compute_only``): a line for each rank, a cell for each action, such as ``2F0``.

Empty cells are idle slots and are skipped: the clock finds them again. A pair that PyTorch writes as overlapped,
``(0F8;7B0)OVERLAP_F_B``, is read as the two actions one after the other.
"""

import csv
import os
import re

from jaxpp.errors import ScheduleError, shown
from jaxpp.errors.tracebacks import entry
from jaxpp.schedule.action import Action, parse
from jaxpp.schedule.base import Schedule

__all__ = ["from_csv"]

_PAIR = re.compile(r"\(([^();]+);([^();]+)\)OVERLAP_F_B")


@entry
def from_csv(text: str, name: str = "csv", num_groups: int | None = None) -> Schedule:
    """Read a schedule; ``Schedule.to_csv`` writes one.

    Args:
        text: the CSV itself, not a path.
        name: what to call the schedule.
        num_groups: of a ring, which the cells do not tell.

    Returns:
        the schedule, its stages on the ranks whose lines they stand in.

    Raises:
        ScheduleError: a cell that is no action (every one is named with its line and column), or rows that break a rule.

    Example:
        >>> from jaxpp.schedule import make
        >>> s = make("zb-h1", num_ranks=2, num_microbatches=3)
        >>> from_csv(s.to_csv()) == s
        True
    """
    if not isinstance(text, str):
        fix = "read the file: from_csv(path.read_text())" if isinstance(text, os.PathLike) else "pass the text of a file"
        raise ScheduleError(f"from_csv({shown(text)})", "the CSV is text", type(text).__name__, fix)
    line = text.strip()
    if "\n" not in line and re.search(r"[/\\]|\.\w+$", line):  # it ends as a file's name does, or has folders; no action does
        raise ScheduleError(
            f"from_csv({text!r})",
            "it takes the CSV itself, not the path of a file",
            repr(text),
            f"read the file: from_csv(pathlib.Path({text!r}).read_text())",
        )
    rows: list[list[Action]] = []
    wrong: list[str] = []
    for number, cells in enumerate(csv.reader(text.lstrip("\ufeff").splitlines()), start=1):
        rows.append([])
        for column, cell in enumerate(cells, start=1):
            pair = _PAIR.fullmatch(cell.strip())
            for part in pair.groups() if pair else filter(None, [cell.strip()]):
                try:
                    rows[-1].append(parse(part))
                except ScheduleError:
                    wrong.append(f"line {number}, cell {column}: {cell!r}")
    if wrong:
        rule = "each cell is empty or an action <stage><kind><microbatch>, the kind one of F, B, I, W"
        fix = "write cells like 2F0; of PyTorch's formats use compute_only, without sends"
        raise ScheduleError(f"from_csv({name!r})", rule, wrong, fix)
    return Schedule(name, tuple(map(tuple, rows)), num_groups=num_groups)
