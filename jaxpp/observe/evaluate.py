"""What a step of a candidate costs: its seconds by the clock, and the bytes that each device holds at its peak.

``Pipeline(hbm=...)``, the changes that a forecast proposes, and ``jaxpp.tune`` ask this. A step begins with the call::

    call | before | the clock of the schedule: actions, transfers, copies to the host and back | after: sums, update |

The process hands over the actions one after the other, and the copies where they stand between the actions. An action starts when
its rank is free, its inputs have arrived, and it has been handed over. Handing over limits many small stages, the bubble few large.
"""

import itertools
import statistics
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

from jaxpp.errors import JaxppError
from jaxpp.lowering.plan import Instruction, Plan
from jaxpp.schedule.action import Action, Kind
from jaxpp.schedule.base import Schedule
from jaxpp.schedule.clock import Timing, makespan, replay
from jaxpp.schedule.costs import StepCosts

_Candidate = TypeVar("_Candidate", bound=Hashable)


@dataclass
class CandidateSearch(Generic[_Candidate]):
    """The search for what fits and is quick: how long a step of each candidate takes, and what each device holds, asked once."""

    price: Callable[[_Candidate], float]  # the seconds of a step, or the time in another unit
    weigh: Callable[[_Candidate], tuple[int, ...]]  # the bytes of each device at its peak
    room: int | None  # the bytes that each device has; None if that is not known
    left_out: dict[Any, JaxppError] = field(default_factory=dict)  # why candidates, or others of the user's, cannot be
    prices: dict[_Candidate, float] = field(default_factory=dict)
    weights: dict[_Candidate, tuple[int, ...]] = field(default_factory=dict)

    def seconds(self, candidate: _Candidate) -> float:
        """How long a step takes."""
        if candidate not in self.prices:
            self.prices[candidate] = self.price(candidate)
        return self.prices[candidate]

    def peaks(self, candidate: _Candidate) -> tuple[int, ...]:
        """The bytes of each device at its peak."""
        if candidate not in self.weights:
            self.weights[candidate] = self.weigh(candidate)
        return self.weights[candidate]

    def fits(self, candidate: _Candidate) -> bool:
        """Whether every device has room."""
        return self.room is None or max(self.peaks(candidate)) <= self.room

    def weighed(self, candidate: _Candidate) -> bool:
        """Whether its peaks are known; one that cannot be cut or compiled is left out from then on."""
        if candidate not in self.left_out:
            try:
                self.peaks(candidate)
            except JaxppError as error:
                self.left_out[candidate] = error
        return candidate not in self.left_out

    def fitting(self, candidates: Iterable[_Candidate]) -> Iterator[_Candidate]:
        """Those that fit, in their order, each weighed when it is asked for; without those that cannot be."""
        return (candidate for candidate in candidates if self.weighed(candidate) and self.fits(candidate))

    def quickest(self) -> list[_Candidate]:
        """The candidates whose time was asked for, the quickest first; of equally quick ones, the one that was asked for first."""
        return sorted(self.prices, key=self.seconds)

    def lightest(self) -> list[_Candidate]:
        """The candidates that were weighed, those first whose fullest device holds least."""
        return sorted(self.weights, key=lambda candidate: max(self.weights[candidate]))


class Parts(NamedTuple):
    """What the seconds of a step are made of; they sum to the step."""

    compute: float  # the actions of the rank that computes longest
    bubble: float  # what waiting for other ranks adds, if nothing but the actions takes time
    sharing: float  # what ranks that share processor cores add
    transfer: float  # what transfers add that nothing hides
    copies: float  # what copies of residuals or of the state, to the host and back, add that nothing hides
    dispatch: float  # what waiting for the process that hands over the actions adds
    rest: float  # what is done before the first action and after the last


def step_seconds(schedule: Schedule, costs: StepCosts, offload: Sequence[int | None] = (), processes: Sequence[int] = ()) -> float:
    """Seconds of a step; ``offload`` is ``except_last`` of each stage, ``processes`` hand over the actions of each rank."""
    timing = costs.timing(schedule, offload, processes)
    handed = max((timing.dispatched or {}).values(), default=0.0)
    last = [(Action(0, Kind.F, rank),) for rank in range(schedule.num_ranks)]  # what each rank does once it has all
    work, begins = (dict.fromkeys((action for (action,) in last), 0.0) for _ in range(2))
    for rank, own in zip(schedule.stage_to_rank, costs.after, strict=False):
        work[last[rank][0]] += own
    times = replay(schedule.rows, schedule.stage_to_rank, timing)
    for rank, ends in enumerate(times.ends):
        begins[last[rank][0]] = max(*ends[-1:], handed + costs.after_dispatch, times.complete.get(rank, 0.0))
    return float(makespan(replay(last, (0,), Timing(work, dispatched=begins, capacity=costs.capacity))))


def parts(schedule: Schedule, costs: StepCosts, offload: Sequence[int | None] = (), processes: Sequence[int] = ()) -> Parts:
    """What the seconds of a step are made of: the clock runs again and again, each time with one more cost."""
    full = costs.timing(schedule, offload, processes)
    late = {action: time - costs.before for action, time in (full.dispatched or {}).items()}
    still = full._replace(dispatched=None)
    bare = still._replace(hops=(), offloaded=(), copies=(), capacity=None, visits={})
    shared = bare._replace(capacity=costs.capacity)
    sent = still._replace(offloaded=(), copies=(), visits={})
    rising = [max(sum(full.durations[action] for action in row) for row in schedule.rows)]
    for timing in (bare, shared, sent, still, full._replace(dispatched=late or None)):
        rising.append(max(rising[-1], makespan(replay(schedule.rows, schedule.stage_to_rank, timing))))
    step = max(rising[-1], step_seconds(schedule, costs, offload, processes))
    return Parts(*(float(b - a) for a, b in itertools.pairwise((0.0, *rising, step))))


def alone(schedule: Schedule, costs: StepCosts) -> float:
    """Seconds of the same work on one device with one process: all stages one after the other, for every microbatch."""
    computed, handed = (sum(map(each, schedule.order)) for each in (costs.of, costs.handing))
    return costs.before + max(computed, handed) + max(sum(costs.after), costs.after_dispatch)


def costs_of_plan(
    plan: Plan,
    num_stages: int,
    alone: Sequence[float],
    handing: Sequence[float],
    begun: float = 0.0,
    usual: Callable[[Iterable[float]], float] = statistics.median,
) -> StepCosts:
    """The costs of a step whose instructions take so long alone, and to hand over.

    ``begun`` is when the first of them begins to be handed over. Of the microbatches, each kind of action takes what ``usual``
    makes of their times.
    """
    lines = plan.instructions
    acting = [number for number, line in enumerate(lines) if line.about.action is not None]
    first, last = acting[0], acting[-1]
    lanes = [turn.lane for turn in plan.turns] or [0] * len(lines)  # a thread for each rank hands over its own
    begins = (seconds * (lane == lanes[first]) for seconds, lane in zip(handing, lanes, strict=True))
    handed_over = list(itertools.accumulate(begins, initial=0.0))
    own = (k for k in range(first) if lines[k].about.stage == lines[first].about.stage and lines[k].about.program)
    ready = [handed_over[k + 1] + alone[k] for k in own]
    taken: defaultdict[tuple[Kind, int], list[float]] = defaultdict(list)
    handed: defaultdict[Action, float] = defaultdict(float)
    now = None
    for number in range(first, last + 1):  # lines of no action count to the one before them
        about = lines[number].about
        now = about.action or now
        assert isinstance(now, Action), "the first of these lines is an action"
        handed[now] += handing[number]
        if about.program and about.action is not None:
            share = 1.0 if about.fused is None else about.fused.share
            taken[now.kind, now.stage].append(share * alone[number])
        if about.fused is not None:
            behind = about.fused.action
            taken[behind.kind, behind.stage].append((1.0 - about.fused.share) * alone[number])
    dispatch: defaultdict[tuple[Kind, int], list[float]] = defaultdict(list)
    for action, seconds in handed.items():
        dispatch[action.kind, action.stage].append(seconds)
    kinds = {kind for kind, _ in taken}
    kinds |= {Kind.I} if Kind.W in kinds else set()  # of a single stage, whose I does nothing

    def table(pools: Mapping[tuple[Kind, int], Sequence[float]]) -> Mapping[Kind, tuple[float, ...]]:
        each = range(num_stages)
        return {kind: tuple(usual(pools.get((kind, s), (0.0,))) for s in each) for kind in Kind if kind in kinds}

    after, copied = [0.0] * num_stages, [0.0] * num_stages
    ended = [last] * num_stages  # updates of a state that visits follow the last action of their stage
    for number in acting:
        ended[lines[number].about.stage] = number
    for number, line in enumerate(lines):
        about = line.about
        if about.copies is not None and about.action is not None:
            copied[about.stage] = max(copied[about.stage], alone[number])
        if number > last or (about.program and about.action is None and number > ended[about.stage]):
            after[about.stage] += alone[number]
    return StepCosts(
        actions=table(taken),
        dispatch=table(dispatch),
        transfer=_transfers(lines, alone, num_stages),
        offload=tuple(copied),
        offload_dispatch=(0.0,) * num_stages,
        before=begun + max([handed_over[first], *ready]),
        after=tuple(after),
        after_dispatch=max(sum(handing[k] for k in range(last + 1, len(lines)) if lanes[k] == lane) for lane in set(lanes)),
    )


def _transfers(lines: Sequence[Instruction], alone: Sequence[float], num_stages: int) -> tuple[float, ...]:
    """What crosses each boundary for one action; a boundary between stages of one device is like the others."""
    sums: defaultdict[tuple[int, Action], float] = defaultdict(float)
    for number, line in enumerate(lines):
        action, target = line.about.action, line.about.stage
        if line.about.sends and isinstance(action, Action) and target != action.stage:
            sums[target - 1 if target > action.stage else target, action] += alone[number]
    usual = statistics.median(sums.values()) if sums else 0.0
    pools = [[seconds for (boundary, _), seconds in sums.items() if boundary == stage] for stage in range(num_stages - 1)]
    return tuple(statistics.median(pool) if pool else usual for pool in pools)
