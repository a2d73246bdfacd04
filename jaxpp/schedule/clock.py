"""The clock: when each action starts, if every rank runs its row in order and each action as soon as what it needs is there.

One pass over the rows: a rank runs until it needs something that another rank has not done yet, and is woken when that is done.
The unit clock of a ``Schedule`` and the costs of a ``Simulation`` are both this replay.

The dependencies are those of the mathematics, no more: F(s, i) needs F(s - 1, i); B(s, i) and I(s, i) need F(s, i) and the
cotangent of B(s + 1, i) or I(s + 1, i); W(s, i) needs I(s, i). Nothing ties one microbatch to another: that the backward of
microbatch k waits for that of k + 1, as one sometimes reads, is true only where a row is ordered so.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from jaxpp.schedule.action import Action, Kind

__all__ = ["UNIT", "Bar", "Number", "Row", "Times", "bars", "dependencies", "replay"]

Row = tuple[Action, ...]
Number = int | float

UNIT: Mapping[Kind, int] = {Kind.F: 1, Kind.B: 2, Kind.I: 1, Kind.W: 1}
"""Slots of each kind on the unit clock."""


def dependencies(action: Action, num_stages: int, present: frozenset[Action]) -> Iterator[Action]:
    """What must be done before an action may start: the rules, one by one.

    Args:
        action: of a schedule.
        num_stages: of the schedule.
        present: all its actions; they tell whether a stage runs B or I.

    Yields:
        actions.

    Example:
        >>> rows = frozenset({Action(0, Kind.F, 0), Action(1, Kind.F, 0), Action(1, Kind.B, 0), Action(0, Kind.B, 0)})
        >>> [str(need) for need in dependencies(Action(0, Kind.B, 0), 2, rows)]
        ['0F0', '1B0']
    """
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


class Times(NamedTuple):
    """``starts[rank][k]`` and ``ends[rank][k]`` of the rank's k-th action; shorter than the row where the rank is stuck."""

    starts: tuple[tuple[Number, ...], ...]
    ends: tuple[tuple[Number, ...], ...]


class Bar(NamedTuple):
    """An action in time: what a timeline draws."""

    rank: int
    action: Action
    start: Number
    end: Number


def bars(rows: Sequence[Row], times: Times) -> Iterator[Bar]:
    """Every action with its rank, start and end, rank by rank."""
    for rank, (row, starts, ends) in enumerate(zip(rows, times.starts, times.ends, strict=True)):
        for action, start, end in zip(row, starts, ends, strict=True):
            yield Bar(rank, action, start, end)


def replay(
    rows: Sequence[Row],
    stage_to_rank: Sequence[int],
    num_microbatches: int,
    duration: Callable[[Action], Number],
    *,
    hop: Sequence[Number] = (),
    overlap: bool = True,
    dispatched: Mapping[Action, Number] | None = None,
) -> Times:
    """Run the rows on a clock.

    Args:
        rows: one a rank.
        stage_to_rank: the rank of each stage.
        num_microbatches: how many there are.
        duration: of an action, in any unit of time.
        hop: ``hop[s]`` is the time from the end of an action to its result's arrival across the boundary of stages s and s + 1,
            either way; no time at all unless given.
        overlap: whether a rank computes on while it sends.
        dispatched: when the host has handed over each action; at the start unless given.

    Returns:
        the times of all actions that can run.
    """
    num_stages = len(stage_to_rank)
    hop = (*hop, 0) if hop else (0,) * num_stages
    done: dict[int, Number] = {}
    starts: list[list[Number]] = [[] for _ in rows]
    ends: list[list[Number]] = [[] for _ in rows]
    clocks: list[Number] = [0] * len(rows)
    waiting: dict[int, int] = {}
    ready = list(range(len(rows)))
    while ready:
        rank = ready.pop()
        row, begun, ended, clock = rows[rank], starts[rank], ends[rank], clocks[rank]
        for action in row[len(begun) :]:
            own, source, boundary, result = _needs(action, num_stages, num_microbatches)
            if own is not None and own not in done:
                break
            start = clock
            if source is not None:
                if source not in done:
                    waiting[source] = rank
                    break
                start = max(start, done[source] + hop[boundary])
            if dispatched is not None:
                start = max(start, dispatched[action])
            clock = start + duration(action)
            begun.append(start)
            ended.append(clock)
            done[result] = clock
            if result in waiting:
                ready.append(waiting.pop(result))
            if not overlap:
                clock += hop[action.stage - (action.kind != Kind.F)] if action.kind != Kind.W else 0
        clocks[rank] = clock
    return Times(tuple(map(tuple, starts)), tuple(map(tuple, ends)))


def _needs(action: Action, num_stages: int, num_microbatches: int) -> tuple[int | None, int | None, int, int]:
    """``dependencies``, in numbers: what an action needs of its own stage, what of another and over which boundary, what it makes.

    The forward of a stage and microbatch is even, its cotangent odd, its gradient negative.
    """
    stage, kind, microbatch = action
    at = 2 * (stage * num_microbatches + microbatch)
    if kind == "F":
        return None, at - 2 * num_microbatches if stage else None, stage - 1, at
    if kind == "W":
        return at + 1, None, 0, ~at
    return at, at + 1 + 2 * num_microbatches if stage + 1 < num_stages else None, stage, at + 1
