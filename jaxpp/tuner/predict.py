"""How long a step of a candidate takes, from what the programs of its family cost.

A step begins with the call and ends when all its results are there::

    call | before | the clock of the schedule: actions, transfers, copies to the host and back | after: sums, update |

The process hands over the actions one after the other, in the order of ``Schedule.order``, and the copies where they stand between
the actions. An action starts when its rank is free, its inputs have arrived, and it has been handed over. Many small stages are
limited by the handing over, few large ones by the bubble.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jaxpp.schedule.action import Action, Kind
from jaxpp.schedule.clock import Number, Times, Timing, handed_over, makespan, replay
from jaxpp.schedule.offload import offloads
from jaxpp.tuner.candidate import Candidate
from jaxpp.tuner.costs import FamilyCosts

__all__ = ["Parts", "alone", "parts", "predict"]


class Parts(NamedTuple):
    """What the seconds of a step are made of; they sum to the step.

    Attributes:
        compute: the actions of the rank that computes longest.
        bubble: what waiting for other ranks adds, if nothing but the actions takes time.
        sharing: what ranks that share processor cores add.
        transfer: what transfers add that nothing hides.
        copies: what copies of residuals to the host and back add that nothing hides.
        dispatch: what waiting for the process that hands over the actions adds.
        rest: what is done before the first action and after the last.
    """

    compute: float
    bubble: float
    sharing: float
    transfer: float
    copies: float
    dispatch: float
    rest: float


def predict(candidate: Candidate, costs: FamilyCosts, processes: Sequence[int] = ()) -> float:
    """Seconds of a step.

    Args:
        candidate: what runs.
        costs: of its family.
        processes: the process that hands over the actions of each rank, side by side with the other processes; one process hands
            over all of them unless given.
    """
    timing = _timing(candidate, costs, processes)
    handed = max((timing.dispatched or {}).values())
    work = [0.0] * candidate.schedule.num_ranks
    for stage, rank in enumerate(candidate.schedule.stage_to_rank):
        work[rank] += costs.after[stage]
    begins = [max(ends[-1], handed + costs.after_dispatch) for ends in _times(candidate, timing).ends]
    return _shared_end(begins, work, costs.capacity)


def parts(candidate: Candidate, costs: FamilyCosts, processes: Sequence[int] = ()) -> Parts:
    """What the seconds of a step are made of: the clock runs again and again, each time with one more cost."""
    full = _timing(candidate, costs, processes)
    late = {action: time - costs.before for action, time in (full.dispatched or {}).items()}
    still = full._replace(dispatched=None)
    bare = still._replace(hops=(), offloaded=(), copies=(), capacity=None)
    shared = bare._replace(capacity=costs.capacity)
    sent = still._replace(offloaded=(), copies=())
    rising = [max(sum(full.durations[action] for action in row) for row in candidate.schedule.rows)]
    for timing in (bare, shared, sent, still, full._replace(dispatched=late)):
        rising.append(max(rising[-1], makespan(_times(candidate, timing))))
    step = max(rising[-1], predict(candidate, costs, processes))
    return Parts(*(float(b - a) for a, b in itertools.pairwise((0.0, *rising, step))))


def alone(candidate: Candidate, costs: FamilyCosts) -> float:
    """Seconds of the same work on one device with one process: all stages one after the other, for every microbatch."""
    order = candidate.schedule.order
    computed = sum(_seconds(costs.actions, action) for action in order)
    handed = sum(_handing(costs, action) for action in order)
    return costs.before + max(computed, handed) + max(sum(costs.after), costs.after_dispatch)


def _timing(candidate: Candidate, costs: FamilyCosts, processes: Sequence[int]) -> Timing:
    """What the clock is told; it begins with the call."""
    schedule, owner = candidate.schedule, candidate.schedule.stage_to_rank
    durations = {action: _seconds(costs.actions, action) for action in schedule.order}
    hops = tuple(0.0 if owner[s] == owner[s + 1] else costs.transfer[s] for s in range(schedule.num_stages - 1))
    handing = {action: _handing(costs, action) for action in schedule.order}
    moved = offloads(schedule.rows, candidate.offload)
    dispatchers = [processes[rank] if processes else 0 for rank in owner]
    handed = handed_over(schedule.order, handing, dispatchers, moved, costs.offload_dispatch)
    dispatched = {action: costs.before + time for action, time in handed.items()}
    return Timing(durations, hops, dispatched, costs.overlap, moved, costs.offload, costs.capacity)


def _times(candidate: Candidate, timing: Timing) -> Times:
    return replay(candidate.schedule.rows, candidate.schedule.stage_to_rank, timing)


def _seconds(table: Mapping[Kind, Sequence[float]], action: Action) -> float:
    """What an action takes; B takes I and W together where it was not measured itself."""
    if action.kind in table or action.kind != Kind.B:
        return table[action.kind][action.stage]
    return table[Kind.I][action.stage] + table[Kind.W][action.stage]


def _handing(costs: FamilyCosts, action: Action) -> float:
    """What it takes to hand over an action; B as I where it was not measured itself."""
    kind = action.kind if action.kind in costs.dispatch or action.kind != Kind.B else Kind.I
    return costs.dispatch[kind][action.stage]


def _shared_end(begins: Sequence[Number], work: Sequence[float], capacity: float) -> float:
    """When all work is done that begins at these times, if at most ``capacity`` of it runs at full speed at once.

    Example:
        >>> _shared_end([0, 0, 2], [1.0, 1.0, 1.0], capacity=1)
        3.0
    """
    if capacity >= len(work):
        return float(max(begin + own for begin, own in zip(begins, work, strict=True)))
    waiting = sorted((begin, own) for begin, own in zip(begins, work, strict=True))
    now, left = float(waiting[0][0]), list[float]()
    while waiting or left:
        while waiting and waiting[0][0] <= now:
            left.append(waiting.pop(0)[1])
        speed = min(1.0, capacity / max(1, len(left)))
        done = now + min(left) / speed if left else float(waiting[0][0])
        until = min(done, float(waiting[0][0])) if waiting else done
        left = [own - (until - now) * speed for own in left]
        left, now = [own for own in left if own > 1e-12 * max(1.0, until)], until
    return now
