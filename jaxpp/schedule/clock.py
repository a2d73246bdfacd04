"""The clock: when each action starts if every rank runs its row in order, and each action as soon as its inputs are there.

One pass over the rows: a rank runs until it needs something that another rank has not done yet, and goes on when that is done. The
unit clock of a ``Schedule``, the costs of a ``Simulation`` and the measured times of a profile are all given to this ``replay``.

The dependencies are what the mathematics needs, no more: F(s, i) needs F(s - 1, i); B(s, i) and I(s, i) need F(s, i) and the
cotangent of B(s + 1, i) or I(s + 1, i); W(s, i) needs I(s, i). Microbatches do not depend on one another: the backward of
microbatch k waits for that of k + 1 only if a row puts them in that order.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from jaxpp.schedule.action import Action, Kind

__all__ = ["UNIT", "ActionRow", "Bar", "Number", "Times", "Timing", "bars", "dependencies", "makespan", "replay"]

ActionRow = tuple[Action, ...]
Number = int | float

UNIT: Mapping[Kind, int] = {Kind.F: 1, Kind.B: 2, Kind.I: 1, Kind.W: 1}
"""Slots of each kind on the unit clock."""


def dependencies(action: Action, num_stages: int, present: frozenset[Action]) -> Iterator[Action]:
    """What must be done before an action may start.

    Args:
        action: an action of a schedule.
        num_stages: how many stages the schedule has.
        present: all actions of the schedule; they tell whether a stage runs B or I.

    Yields:
        the actions that it needs.

    Example:
        >>> rows = frozenset({Action(0, Kind.F, 0), Action(1, Kind.F, 0), Action(1, Kind.B, 0), Action(0, Kind.B, 0)})
        >>> [str(need) for need in dependencies(Action(0, Kind.B, 0), 2, rows)]
        ['0F0', '1B0']
    """
    stage, kind, microbatch = action
    if kind != Kind.F:
        yield Action(stage, Kind.I if kind == Kind.W else Kind.F, microbatch)
        if kind != Kind.W and stage + 1 < num_stages:
            full = Action(stage + 1, Kind.B, microbatch)
            yield full if full in present else Action(stage + 1, Kind.I, microbatch)
    elif stage:
        yield Action(stage - 1, Kind.F, microbatch)


class Timing(NamedTuple):
    """How long things take, in one unit of time.

    Attributes:
        durations: of each action; an action that is not in it takes no time.
        hops: ``hops[s]`` is the time from the end of an action to the arrival of its result across the boundary between stages s
            and s + 1, in either direction; transfers take no time unless given.
        dispatched: when the host has handed over each action; at the start unless given.
        overlap: whether a rank goes on computing while it sends.
    """

    durations: Mapping[Action, Number]
    hops: Sequence[Number] = ()
    dispatched: Mapping[Action, Number] | None = None
    overlap: bool = True


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


def bars(rows: Sequence[ActionRow], times: Times) -> Iterator[Bar]:
    """Every action with its rank, start and end, rank by rank."""
    for rank, (row, starts, ends) in enumerate(zip(rows, times.starts, times.ends, strict=True)):
        for action, start, end in zip(row, starts, ends, strict=True):
            yield Bar(rank, action, start, end)


def makespan(times: Times) -> Number:
    """The end of the last action."""
    return max(ends[-1] for ends in times.ends if ends)


def replay(rows: Sequence[ActionRow], stage_to_rank: Sequence[int], timing: Timing) -> Times:
    """Run the rows on a clock; what comes back ends where a rank is stuck, for rows that wait for one another for ever."""
    num_stages, last, forward, weight = len(stage_to_rank), len(stage_to_rank) - 1, Kind.F, Kind.W
    durations, hops, dispatched, overlap = timing
    hops = (*hops, 0) if hops else (0,) * num_stages  # nothing is sent beyond the last boundary, or (index -1) before the first
    done: dict[int, Number] = {-1: -math.inf}  # a microbatch has three numbers in a stage: its forward, cotangent and gradient
    starts: list[list[Number]] = [[] for _ in rows]
    ends: list[list[Number]] = [[] for _ in rows]
    clocks: list[Number] = [0] * len(rows)
    waiting: dict[int, int] = {}
    ready = list(range(len(rows)))
    while ready:
        rank = ready.pop()
        row, begun, ended, clock = rows[rank], starts[rank], ends[rank], clocks[rank]
        for action in row[len(begun) :]:
            stage, kind, microbatch = action
            at = 3 * (microbatch * num_stages + stage)
            if kind == forward:
                own, beside, result, arrives, sent = -1, at - 3 if stage else -1, at, stage - 1, stage
            elif kind == weight:
                own, beside, result, arrives, sent = at + 1, -1, at + 2, -1, -1
            else:
                own, beside, result, arrives, sent = at, at + 4 if stage < last else -1, at + 1, stage, stage - 1
            if own not in done:
                break
            if beside not in done:
                waiting[beside] = rank
                break
            arrived = done[beside] + hops[arrives]
            start = arrived if arrived > clock else clock
            if dispatched is not None:
                start = max(start, dispatched[action])
            clock = done[result] = start + durations.get(action, 0)
            begun.append(start)
            ended.append(clock)
            if result in waiting:
                ready.append(waiting.pop(result))
            if not overlap:
                clock += hops[sent]
        clocks[rank] = clock
    return Times(tuple(map(tuple, starts)), tuple(map(tuple, ends)))
