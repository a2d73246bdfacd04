"""Why ranks idle: the clock runs several times, each time with one more cause, and what a run adds is the idle time of that cause.

The clock runs with the durations of all stages made equal, then with the durations as they are, then with transfers, then with
the times at which the host hands actions over. Costs that are given (``Simulation``) and times that were measured (a profile) are
told apart in this same way.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jaxpp.schedule.action import Action
from jaxpp.schedule.clock import ActionRow, Number, Timing, makespan, replay

__all__ = ["Idle", "bubble_fraction", "idle_causes"]


class Idle(NamedTuple):
    """Where a rank's idle time comes from; the parts sum to it.

    Attributes:
        fill_drain: what the schedule costs even if all stages take the same time and transfers none.
        imbalance: what stages that differ add.
        transfer: what transfers add that nothing hides.
        dispatch: what waiting for the host adds.
    """

    fill_drain: Number
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
) -> tuple[Idle, ...]:
    """Where the idle time of each rank comes from; ``equal`` is what each action would take if all stages were equal.

    The clock is followed to ``length``, the time from the beginning to the end, and no further. A rank whose stages take long idles
    less than it would with equal stages; then all its idle time counts as fill and drain.
    """

    def length_of(run: Timing) -> Number:
        return makespan(replay(rows, stage_to_rank, run))

    on_time = timing._replace(dispatched=None)
    even = length_of(on_time._replace(durations=equal, hops=()))
    uneven, sent, dispatched = (min(length_of(run), length) for run in (on_time._replace(hops=()), on_time, timing))
    found = []
    for row, time in zip(rows, busy, strict=True):
        idle = max(0, uneven - time)
        fill_drain = min(max(0, even - sum(equal.get(action, 0) for action in row)), idle)
        found.append(Idle(fill_drain, idle - fill_drain, sent - uneven, dispatched - sent))
    return tuple(found)
