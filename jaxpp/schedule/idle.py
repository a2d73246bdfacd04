"""Why ranks idle: the clock runs several times, each time with one more cause, and what a run adds is the idle time of that cause.

The clock runs with the durations of all stages made equal, then with the durations as they are, then with transfers and the copies
of residuals that wait in host memory, then with the times at which the host hands actions over, and with the cores that ranks
share. Costs that are given (``Simulation``) and times that were measured (a profile) are told apart in this same way. A ring
runs once more, first of all, as if no pass waited for a token.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jaxpp.schedule.action import Action
from jaxpp.schedule.clock import ActionRow, Awaited, Number, Timing, makespan, replay
from jaxpp.schedule.shared_clock import replay_shared

__all__ = ["Idle", "RingIdle", "bubble_fraction", "idle_causes"]


class Idle(NamedTuple):
    """Where a rank's idle time comes from; the parts sum to it.

    Attributes:
        fill_drain: what the schedule costs even if all stages take the same time and transfers none.
        imbalance: what stages that differ add.
        transfer: what transfers, and copies of residuals to the host and back, add that nothing hides.
        dispatch: what waiting for the host adds: until it hands an action over, or for a core that other ranks use, too.
    """

    fill_drain: Number
    imbalance: Number
    transfer: Number
    dispatch: Number


class RingIdle(NamedTuple):
    """Where a rank's idle time in a ring comes from; the parts sum to it.

    Attributes:
        fill_drain: what the passes cost at the beginning and at the end.
        token: what waiting for tokens adds, even if all stages take the same time and transfers none: too few groups.
        imbalance: what stages that differ add.
        transfer: what transfers add that nothing hides, those of tokens included.
        dispatch: what waiting for the host adds.
    """

    fill_drain: Number
    token: Number
    imbalance: Number
    transfer: Number
    dispatch: Number


def bubble_fraction(busy: Sequence[Number], length: Number) -> float:
    """Idle time over ranks x length, if each rank computes for its ``busy`` time."""
    return float(sum(length - time for time in busy) / (len(busy) * length)) if length else 0.0


def idle_causes(
    rows: Sequence[ActionRow],
    stage_to_rank: Sequence[int],
    timing: Timing,
    equal: Mapping[Action, Number],
    busy: Sequence[Number],
    length: Number,
    num_groups: Awaited = None,
) -> tuple[Idle, ...] | tuple[RingIdle, ...]:
    """Where the idle time of each rank comes from; ``equal`` is what each action would take if all stages were equal.

    The clock is followed to ``length``, the time from the beginning to the end, and no further. A rank whose stages take long idles
    less than it would with equal stages; then all its idle time counts as fill and drain. ``num_groups`` is that of a ring, as for
    ``replay``.
    """

    def length_of(run: Timing) -> Number:
        return makespan(replay_shared(rows, stage_to_rank, run, num_groups))

    on_time = timing._replace(dispatched=None, capacity=None)
    alone = on_time._replace(hops=(), offloaded=())
    level = alone._replace(durations=equal)
    even = length_of(level)
    free = even if num_groups is None else makespan(replay(rows, stage_to_rank, level))  # where no pass waits for a token
    uneven, sent, dispatched = (min(length_of(run), length) for run in (alone, on_time, timing))
    found: list[RingIdle] = []
    for row, time in zip(rows, busy, strict=True):
        idle, work = max(0, uneven - time), sum(equal.get(action, 0) for action in row)
        fill_drain, whole = (min(max(0, end - work), idle) for end in (free, even))
        found.append(RingIdle(fill_drain, whole - fill_drain, idle - whole, sent - uneven, dispatched - sent))
    if num_groups is None:
        return tuple(Idle(each.fill_drain, *each[2:]) for each in found)
    return tuple(found)
