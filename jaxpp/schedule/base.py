"""A schedule: which rank does which action in which order, as plain data.

Problem: a schedule written as a loop with side effects cannot be checked, drawn or compared. Idea: it is a value, one row of
actions a rank. Mechanism: the constructor replays the rows on a clock where F takes one slot and B two; what cannot be replayed
(an action missing, doubled, on the wrong rank, or waiting for ever) is refused there, so every ``Schedule`` that exists runs.

The dependencies are those of the mathematics, no more: F(s, i) needs F(s - 1, i); B(s, i) needs F(s, i) and B(s + 1, i). Nothing
ties one microbatch to another.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from jaxpp.errors import ScheduleError
from jaxpp.schedule.action import Action, Kind

__all__ = ["Row", "Schedule", "dependencies"]

Row = tuple[Action, ...]
_DURATION = {Kind.F: 1, Kind.B: 2, Kind.I: 1, Kind.W: 1}


def dependencies(action: Action, num_stages: int, present: frozenset[Action]) -> Iterator[Action]:
    """What must be done before ``action``, among the actions that are ``present``."""
    stage, kind, microbatch = action
    if kind == Kind.F:
        if stage > 0:
            yield Action(stage - 1, Kind.F, microbatch)
        return
    if kind == Kind.W:
        yield Action(stage, Kind.I, microbatch)
        return
    yield Action(stage, Kind.F, microbatch)
    if stage + 1 < num_stages:
        full = Action(stage + 1, Kind.B, microbatch)
        yield full if full in present else Action(stage + 1, Kind.I, microbatch)


@dataclass(frozen=True)
class Schedule:
    """Rows of actions, one row a rank, checked when made.

    Args:
        name: what to call it.
        rows: ``rows[rank]`` is the rank's actions in the order it runs them.
        stage_to_rank: ``stage_to_rank[stage]`` is the rank that owns the stage; stage ``s`` on rank ``s`` unless said.

    Raises:
        ScheduleError: an action is missing, doubled or on the wrong rank, or the rows wait for one another for ever; every
            violation is listed.

    Example:
        >>> from jaxpp import schedule
        >>> print(schedule.make("1f1b", num_ranks=2, num_microbatches=2))
        1f1b: 2 ranks, 2 stages, 2 microbatches
        rank  0    1    2    3    4    5    6    7    8
        0     0F0  0F1            0B0  0B0       0B1  0B1
        1          1F0  1B0  1B0  1F1  1B1  1B1
    """

    name: str
    rows: tuple[Row, ...]
    stage_to_rank: tuple[int, ...] = ()
    starts: dict[Action, int] = field(init=False, repr=False, compare=False)
    """When each action starts on the unit clock (F one slot, B two), an as-soon-as-possible replay of the rows."""

    def __post_init__(self):
        object.__setattr__(self, "rows", tuple(tuple(row) for row in self.rows))
        if not self.stage_to_rank:
            object.__setattr__(self, "stage_to_rank", tuple(range(len(self.rows))))
        _check_complete(self)
        object.__setattr__(self, "starts", _replay(self))

    @property
    def num_ranks(self) -> int:
        """How many rows there are."""
        return len(self.rows)

    @property
    def num_stages(self) -> int:
        """How many stages the ranks own together."""
        return len(self.stage_to_rank)

    @property
    def num_microbatches(self) -> int:
        """How many parts the batch is split into."""
        return 1 + max(action.microbatch for row in self.rows for action in row)

    @property
    def order(self) -> tuple[Action, ...]:
        """All actions in the order they start on the unit clock: the order in which one thread should dispatch them."""
        return tuple(sorted(self.starts, key=lambda a: (self.starts[a], -a.stage)))

    def __str__(self) -> str:
        makespan = max((start + _DURATION[a.kind] for a, start in self.starts.items()), default=0)
        width = max(len(str(a)) for a in self.starts)
        head = f"{self.name}: {self.num_ranks} ranks, {self.num_stages} stages, {self.num_microbatches} microbatches"
        lines = [head, "rank  " + "  ".join(str(t).ljust(width) for t in range(makespan)).rstrip()]
        for rank, row in enumerate(self.rows):
            cells = [""] * makespan
            for action in row:
                start = self.starts[action]
                cells[start : start + _DURATION[action.kind]] = [str(action)] * _DURATION[action.kind]
            lines.append(f"{rank:<6}" + "  ".join(cell.ljust(width) for cell in cells).rstrip())
        return "\n".join(lines)


def _check_complete(schedule: Schedule) -> None:
    actions = Counter(action for row in schedule.rows for action in row)
    where = f"schedule {schedule.name!r}"
    if not actions:
        raise ScheduleError(where, "a schedule needs at least one action", "no action in any row", "fill the rows")
    wrong = [f"{a} appears {n} times" for a, n in sorted(actions.items()) if n > 1]
    for rank, row in enumerate(schedule.rows):
        for a in row:
            owner = schedule.stage_to_rank[a.stage] if a.stage < schedule.num_stages else None
            if owner != rank:
                wrong.append(f"{a} stands in the row of rank {rank}, its stage belongs to rank {owner}")
    for stage in range(schedule.num_stages):
        for microbatch in range(schedule.num_microbatches):
            has = {kind: Action(stage, kind, microbatch) in actions for kind in Kind}
            if not has[Kind.F]:
                wrong.append(f"{stage}F{microbatch} is missing")
            if (has[Kind.I], has[Kind.W]) not in ((True, True), (False, False)) or has[Kind.B] == has[Kind.I]:
                wrong.append(f"stage {stage}, microbatch {microbatch} needs one B, or one I and one W")
    if wrong:
        raise ScheduleError(
            where,
            "each stage runs each microbatch's forward once and its backward once (B, or I and W), on the rank that owns it",
            wrong,
            "write each action once, in the row of its stage's rank",
            "\n".join(f"rank {r}: " + " ".join(map(str, row)) for r, row in enumerate(schedule.rows)),
        )


def _replay(schedule: Schedule) -> dict[Action, int]:
    """Start of every action when each rank runs its row in order, each action as soon as what it needs has ended."""
    present = frozenset(action for row in schedule.rows for action in row)
    starts: dict[Action, int] = {}
    ends: dict[Action, int] = {}
    heads, clocks = [0] * schedule.num_ranks, [0] * schedule.num_ranks
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(schedule.rows):
            while heads[rank] < len(row):
                action = row[heads[rank]]
                needs = tuple(dependencies(action, schedule.num_stages, present))
                if any(need not in ends for need in needs):
                    break
                starts[action] = max([clocks[rank], *(ends[need] for need in needs)])
                ends[action] = clocks[rank] = starts[action] + _DURATION[action.kind]
                heads[rank] += 1
                moved = True
    if len(starts) < len(present):
        stuck = [(rank, row[heads[rank]]) for rank, row in enumerate(schedule.rows) if heads[rank] < len(row)]
        needs = {a: [n for n in dependencies(a, schedule.num_stages, present) if n not in ends] for _, a in stuck}
        waits = [f"rank {rank} waits at {a} for {', '.join(map(str, needs[a]))}" for rank, a in stuck]
        raise ScheduleError(
            f"schedule {schedule.name!r}",
            "the rows must not wait for one another in a circle",
            waits,
            "order each row so that what an action needs can run before it",
            "\n".join(
                f"rank {r}: " + " ".join(f">{a}<" if (r, a) in stuck else str(a) for a in row)
                for r, row in enumerate(schedule.rows)
            ),
        )
    return starts
