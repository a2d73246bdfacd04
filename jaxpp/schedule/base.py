"""A schedule: which rank does which action in which order, as plain data that can be checked, drawn and compared.

The constructor checks that every action is there once, on the right rank, and replays the rows on a clock where F, I and W take one
slot and B takes two. It refuses rows that wait for one another for ever, so every ``Schedule`` that exists can run. Rows without
any backward are a schedule of forwards only: that of predictions or, if ``num_groups`` is given, of a generation.
"""

import csv
import itertools
import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType

from jaxpp.errors import ScheduleError, shown
from jaxpp.errors.tracebacks import entries, entry
from jaxpp.schedule.action import Action, Kind, parse
from jaxpp.schedule.clock import UNIT, ActionRow, Number, Times, Timing, bars, replay
from jaxpp.schedule.draw.text import Drawing, Drawn
from jaxpp.schedule.validate import check_complete, check_groups, check_owners, check_runs, count, infer_owners, read_rows

_LITTLE = 0.125  # slots; a power of two, so that sums of it are exact
_PAIR = re.compile(r"\(([^();]+);([^();]+)\)OVERLAP_F_B")


@entries
@dataclass(frozen=True)
class Schedule(Drawn):
    """Rows of actions, one row for each rank, checked when made; names do not count when schedules are compared.

    Args:
        name: what to call the schedule.
        rows: ``rows[rank]`` holds the rank's actions in the order it runs them: a sequence of ``Action`` or of printed forms such
            as ``"2F0"``, or one string of them.
        stage_to_rank: ``stage_to_rank[stage]`` is the rank that owns the stage; inferred from the rows unless given.
        num_groups: makes the schedule a ring of forwards (see ``jaxpp.schedule.ring``): F of microbatch i on the first stage waits
            for F of microbatch i - num_groups on the last stage.

    Raises:
        ScheduleError: an action is missing, doubled, out of range or on the wrong rank, or the rows wait for one another for ever;
            every violation is listed, the cells marked.

    Example:
        >>> from jaxpp.schedule import Schedule
        >>> print(Schedule("mine", [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]), end="")
        mine: 2 ranks, 2 stages, 2 microbatches
        rank  0    1    2    3    4    5    6    7    8
        0     0F0  0F1            0B0  0B0       0B1  0B1
        1          1F0  1B0  1B0  1F1  1B1  1B1
    """

    name: str = field(compare=False)
    rows: tuple[ActionRow, ...]
    stage_to_rank: tuple[int, ...] = ()
    num_groups: int | None = None
    times: Times = field(init=False, repr=False, compare=False)
    """Start and end of every action on the unit clock, an as-soon-as-possible replay of the rows."""

    def __post_init__(self):
        rows = read_rows(self.name, self.rows)
        object.__setattr__(self, "rows", rows)
        object.__setattr__(self, "stage_to_rank", check_owners(self.name, self.stage_to_rank, len(rows)) or infer_owners(rows))
        check_complete(self.name, rows, self.stage_to_rank, self.num_microbatches)
        groups = check_groups(self.name, self.num_groups, rows, self.num_microbatches)
        object.__setattr__(self, "num_groups", groups)
        times = replay(rows, self.stage_to_rank, Timing({action: UNIT[action.kind] for row in rows for action in row}), groups)
        check_runs(self.name, rows, self.stage_to_rank, times, groups)
        object.__setattr__(self, "times", times)

    @property
    def num_ranks(self) -> int:
        """How many rows there are."""
        return len(self.rows)

    @property
    def num_stages(self) -> int:
        """How many stages the ranks own together."""
        return len(self.stage_to_rank)

    @cached_property
    def num_microbatches(self) -> int:
        """How many parts the batch is split into."""
        return count(action.microbatch for row in self.rows for action in row)

    @cached_property
    def forward_only(self) -> bool:
        """Whether there is no backward in it: such a schedule predicts or generates, and cannot train."""
        return all(action.kind == Kind.F for row in self.rows for action in row)

    @cached_property
    def out_of_order(self) -> Mapping[int, tuple[int, ...]]:
        """The stages that do not run their forwards in the order of the microbatches, and the order in which they do."""
        found: dict[int, tuple[int, ...]] = {}
        for stage, kind, microbatch in itertools.chain.from_iterable(self.rows):
            if kind == Kind.F:
                found[stage] = (*found.get(stage, ()), microbatch)
        return {stage: order for stage, order in sorted(found.items()) if list(order) != sorted(order)}

    @cached_property
    def starts(self) -> Mapping[Action, Number]:
        """When each action starts on the unit clock, in slots."""
        flat = itertools.chain.from_iterable
        return MappingProxyType(dict(zip(flat(self.rows), flat(self.times.starts), strict=True)))

    @cached_property
    def order(self) -> tuple[Action, ...]:
        """All actions in the order in which one thread should hand them over: as they end where a transfer takes a little.

        An action ends after all that it needs. And each is handed over, with the sends of its results, before whatever ends later:
        no transfer waits for a program beside which it could run, where transfers wait for what their receiver was handed before.
        """
        owner = self.stage_to_rank
        hops = [_LITTLE * (here != there) for here, there in itertools.pairwise((*owner, owner[0]))]
        durations = {action: UNIT[action.kind] for action in self.starts}
        times = replay(self.rows, owner, Timing(durations, hops), self.num_groups)
        return tuple(bar.action for bar in sorted(bars(self.rows, times), key=lambda bar: (bar.end, bar.start, -bar.action.stage)))

    @cached_property
    def pairs(self) -> Mapping[Action, Action]:
        """The forwards and backwards of the stages whose rank runs B right behind F, for every microbatch.

        Example:
            >>> from jaxpp.schedule import make
            >>> {str(forward): str(backward) for forward, backward in make("1f1b", 2, 2).pairs.items()}
            {'1F0': '1B0', '1F1': '1B1'}
        """
        neighbours = (pair for row in self.rows for pair in itertools.pairwise(row))
        found = {f: b for f, b in neighbours if f.kind == Kind.F and b == f._replace(kind=Kind.B)}
        counts = Counter(f.stage for f in found)
        return MappingProxyType({f: b for f, b in found.items() if counts[f.stage] == self.num_microbatches})

    @property
    def heading(self) -> str:
        """One line that says what this is."""
        passes = ((self.num_microbatches, "microbatch", "e"),)
        if self.num_groups is not None:
            passes = ((self.num_groups, "group", ""), (self.num_microbatches // self.num_groups, "turn", ""))
        counts = ((self.num_ranks, "rank", ""), (self.num_stages, "stage", ""), *passes)
        words = (f"{number} {noun}{f'{e}s' * (number != 1)}" for number, noun, e in counts)
        return f"{self.name}: {', '.join(words)}"

    def drawing(self) -> Drawing:
        """The actions on the unit clock."""
        return Drawing(self.heading, self.num_ranks, self.stage_to_rank, tuple(bars(self.rows, self.times)), self.num_groups)

    def to_csv(self) -> str:
        """The rows in PyTorch's compute-only grammar: a line for each rank, a cell for each action."""
        return "".join(",".join(map(str, row)) + "\n" for row in self.rows)

    def __str__(self) -> str:
        return self.table() + "\n"  # a line of its own for what is printed behind it


@entry
def from_csv(text: str, name: str = "csv", num_groups: int | None = None) -> Schedule:
    """Read a schedule in PyTorch's grammar (``compute_only``), as ``Schedule.to_csv`` writes it: a line for each rank.

    A cell holds an action, such as ``2F0``. Empty cells are idle slots and are skipped: the clock finds them again. A pair that
    PyTorch writes as overlapped, ``(0F8;7B0)OVERLAP_F_B``, is read as the two actions one after the other.

    Args:
        text: the CSV itself, not a path.
        name: what to call the schedule.
        num_groups: of a ring, which the cells do not tell.

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
        fix = f"read the file: from_csv(pathlib.Path({text!r}).read_text())"
        raise ScheduleError(f"from_csv({text!r})", "it takes the CSV itself, not the path of a file", repr(text), fix)
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
