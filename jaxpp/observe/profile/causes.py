"""Why ranks idle: idle time told apart by the virtual clock, run on the *measured* durations.

The clock runs once with the durations of all stages made equal, once with them as they were, once with transfers, once with the
times at which the host handed actions over. What each run adds to the one before is one cause; the rest of a step (splitting the
batch, the optimizer) is what is left. The parts sum to the idle time.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jaxpp.schedule.action import Action, Kind
from jaxpp.schedule.base import Schedule
from jaxpp.schedule.clock import Bar, Times, bars, replay

__all__ = ["Causes", "Measured", "causes", "simulated"]


class Causes(NamedTuple):
    """Where a rank's idle time comes from, in seconds.

    Attributes:
        fill_drain: what the schedule costs even with equal stages.
        imbalance: what stages that differ add.
        transfer: what transfers add that nothing hides.
        dispatch: what waiting for the host adds.
        optimizer: the rest of the step: splitting the batch before, summing tied gradients and the optimizer after.
    """

    fill_drain: float
    imbalance: float
    transfer: float
    dispatch: float
    optimizer: float


class Measured(NamedTuple):
    """What the virtual clock is told of a step, in seconds.

    Attributes:
        durations: of each action that ran; one with nothing to do takes no time.
        hops: the median time of a transfer over each boundary, either way.
        handed: when the host began to hand each action over.
    """

    durations: Mapping[Action, float]
    hops: tuple[float, ...]
    handed: Mapping[Action, float]


def simulated(schedule: Schedule, measured: Measured) -> tuple[Bar, ...]:
    """The actions on the virtual clock, with measured durations of actions and transfers, in seconds."""
    return tuple(bars(schedule.rows, _times(schedule, measured.durations, measured.hops)))


def causes(schedule: Schedule, measured: Measured, busy: Sequence[float], seconds: float) -> tuple[Causes, ...]:
    """Where each rank's idle time comes from.

    Args:
        schedule: that ran.
        measured: how long things took.
        busy: seconds in which each rank ran an action.
        seconds: the length of the step.
    """
    durations, hops, handed = measured
    mean = {kind: _mean([time for action, time in durations.items() if action.kind == kind]) for kind in Kind}
    equal = {action: mean[action.kind] for action in durations}
    even = _makespan(_times(schedule, equal))
    runs = [_times(schedule, durations), _times(schedule, durations, hops), _times(schedule, durations, hops, handed)]
    uneven, sent, dispatched = (min(_makespan(run), seconds) for run in runs)
    found = []
    for rank, time in enumerate(busy):
        same = sum(equal.get(action, 0.0) for action in schedule.rows[rank])
        idle = max(0.0, uneven - time)
        fill_drain = min(max(0.0, even - same), idle)
        rest = seconds - time - idle - (sent - uneven) - (dispatched - sent)
        found.append(Causes(fill_drain, idle - fill_drain, sent - uneven, dispatched - sent, rest))
    return tuple(found)


def _times(
    schedule: Schedule,
    durations: Mapping[Action, float],
    hops: Sequence[float] = (),
    handed: Mapping[Action, float] | None = None,
) -> Times:
    return replay(
        schedule.rows,
        schedule.stage_to_rank,
        schedule.num_microbatches,
        lambda action: durations.get(action, 0.0),
        hop=hops,
        dispatched=handed,
    )


def _makespan(times: Times) -> float:
    return float(max(ends[-1] for ends in times.ends))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
