"""The clock: when each action starts if every rank runs its row in order, and each action as soon as its inputs are there.

``replay`` is one pass over the rows, for the unit clock of a ``Schedule``, the costs of a ``Simulation`` and of a search, and the
times of a profile: a rank runs until it needs something that another rank has not done yet, and goes on when it is done. Residuals
that wait in host memory are copied there and back beside the computation (``offload.py``), on one link of each rank in each
direction. Ranks may share cores, as forced CPU devices do: four of them on two cores compute side by side at half speed.

Actions are what a schedule knows. What was compiled has lines, and a clock of its own for them (``jaxpp.observe.profile.spans``).
"""

import bisect
import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from jaxpp.schedule.action import Action, Kind
from jaxpp.schedule.offload import Offloaded

ActionRow = tuple[Action, ...]
Number = int | float

Awaited = int | Mapping[int, int] | None  # whose token a pass of a ring awaits: of how many passes before it, or of which pass

UNIT: Mapping[Kind, int] = {Kind.F: 1, Kind.B: 2, Kind.I: 1, Kind.W: 1}  # slots of each kind on the unit clock


def dependencies(action: Action, num_stages: int, present: frozenset[Action], num_groups: Awaited = None) -> Iterator[Action]:
    """What must be done before an action may start: what the mathematics needs, no more.

    F(s, i) needs F(s - 1, i); B(s, i) and I(s, i) need F(s, i) and the cotangent of B(s + 1, i) or I(s + 1, i); W(s, i) needs
    I(s, i). In a ring with g groups and S stages, F(0, i) also needs the token that F(S - 1, i - g) makes. ``present`` are all
    actions of the schedule; they tell whether a stage runs B or I.

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
    elif isinstance(num_groups, int):
        if num_groups <= microbatch:
            yield Action(num_stages - 1, Kind.F, microbatch - num_groups)
    elif num_groups and microbatch in num_groups:
        yield Action(num_stages - 1, Kind.F, num_groups[microbatch])


class Timing(NamedTuple):
    """How long things take, in one unit of time; ``overlap`` and ``capacity`` are as for ``simulate``."""

    durations: Mapping[Action, Number]  # an action that is not in it takes no time
    hops: Sequence[Number] = ()  # between stages s and s + 1, either way; the last of a ring is that of a token back to stage 0
    dispatched: Mapping[Action, Number] | None = None  # when the host has handed over each action
    overlap: bool = True
    offloaded: Sequence[Offloaded] = ()
    copies: Sequence[Number] = ()  # of the residuals of a stage and one microbatch to the host, and as long back
    capacity: Number | None = None
    visits: Mapping[Action, "Visit"] = MappingProxyType({})  # what comes from host memory, by the first action that needs it
    queued: Mapping[Action, int] = MappingProxyType({})  # behind how many actions of its rank the transfer to an action waits


class Visit(NamedTuple):
    """Copies from host memory for one turn of a stage on its rank, while the turn before runs."""

    params: Number  # until the first action of the turn
    state: Number  # behind that, until the next turn: of the optimizer, for the update


class Copies(NamedTuple):
    """When residuals that wait in host memory go there, and when they come back: start and end of each copy."""

    offloaded: Offloaded
    out: tuple[Number, Number]
    back: tuple[Number, Number]


class Times(NamedTuple):
    """``starts[rank][k]`` and ``ends[rank][k]`` of the rank's k-th action; shorter than the row where the rank is stuck."""

    starts: tuple[tuple[Number, ...], ...]
    ends: tuple[tuple[Number, ...], ...]
    copies: tuple[Copies, ...] = ()
    complete: Mapping[int, Number] = MappingProxyType({})  # by rank, when what its last turn needs for the update has arrived


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


class _HostLinks:
    """The copies of offloaded residuals and of visits: a clock tells it of every action of a rank, in the order of the row."""

    def __init__(self, timing: Timing, stage_to_rank: Sequence[int]):
        self._copies, self._rank, self._overlap = timing.copies, stage_to_rank, timing.overlap
        self._out = {each.forward: each for each in timing.offloaded}
        self._back = {each.ahead: each for each in timing.offloaded}
        self._read = {each.backward: each for each in timing.offloaded}
        self._free: dict[tuple[int, bool], Number] = {}
        self._visits = timing.visits
        self._began: dict[int, Number] = {}  # when the turn of each rank began,
        self.complete: dict[int, Number] = {}  # and when all of it has arrived
        self._sent: dict[Offloaded, tuple[Number, Number]] = {}
        self.done: dict[Offloaded, Copies] = {}

    def start(self, action: Action, ready: Number) -> Number:
        """When an action starts that is ready but for what comes from the host; residuals of the next one come back beside it."""
        if (visit := self._visits.get(action)) is not None:
            rank = self._rank[action.stage]
            begun = self._began.get(rank, 0) if self._overlap else ready
            arrived = max(begun, self._free.get((rank, False), 0)) + visit.params
            self._began[rank] = ready = max(ready, self.complete.get(rank, 0), arrived)
            self._free[rank, False] = self.complete[rank] = arrived + visit.state
        if (read := self._read.get(action)) is not None:
            ready = max(ready, self.done[read].back[1])
        if (each := self._back.get(action)) is not None:
            out = self._sent.pop(each)
            back = self._copy(action.stage, False, each, max(ready, out[1]))
            self.done[each] = Copies(each, out, back)
            ready = ready if self._overlap else back[1]
        return ready

    def end(self, action: Action, free: Number) -> Number:
        """When the rank is free for its next action; what the action kept goes out."""
        if (each := self._out.get(action)) is None:
            return free
        out = self._sent[each] = self._copy(action.stage, True, each, free)
        return free if self._overlap else out[1]

    def _copy(self, stage: int, out: bool, each: Offloaded, ready: Number) -> tuple[Number, Number]:
        link = self._rank[stage], out
        start = max(ready, self._free.get(link, ready))
        self._free[link] = end = start + self._copies[each.forward.stage]
        return start, end


def handed_over(
    order: Iterable[Action],
    dispatch: Mapping[Action, Number],
    stage_to_process: Sequence[int],
    offloaded: Sequence[Offloaded] = (),
    copies: Sequence[Number] = (),
) -> dict[Action, Number]:
    """When each action has been handed over: each process hands over the actions of its own ranks, one after another.

    ``dispatch`` includes the sends of an action's results; ``copies[s]`` is to hand over a copy of offloaded residuals of stage s.
    """
    paid = offloaded if copies else ()
    before = {each.ahead: copies[each.forward.stage] for each in paid}
    after = {each.forward: copies[each.forward.stage] for each in paid}
    clocks: dict[int, Number] = dict.fromkeys(stage_to_process, 0)
    found: dict[Action, Number] = {}
    for action in order:
        process = stage_to_process[action.stage]
        found[action] = clocks[process] + before.get(action, 0) + dispatch[action]
        clocks[process] = found[action] + after.get(action, 0)
    return found


def queues(
    order: Sequence[Action], rows: Sequence[ActionRow], stage_to_rank: Sequence[int], num_groups: Awaited = None
) -> dict[Action, int]:
    """Behind how many actions of its own rank each action's transfer waits, if all are handed over in this order.

    On a GPU, what a transfer brings is given memory where the receiver's queue of programs ends at that time. So a transfer that
    was handed over behind a program of the receiver begins when that program is done, even if it needs nothing of it.

    Example:
        >>> row_0, row_1 = (tuple(Action(stage, Kind.F, i) for i in range(2)) for stage in range(2))
        >>> early, late = (row_0[0], row_0[1], *row_1), (row_0[0], row_1[0], row_0[1], row_1[1])
        >>> [{str(action): count for action, count in queues(order, (row_0, row_1), (0, 1)).items()} for order in (early, late)]
        [{}, {'1F1': 1}]
    """
    present, place = frozenset(order), {action: number for number, action in enumerate(order)}
    found: dict[Action, int] = {}
    for rank, row in enumerate(rows):
        places = [place[action] for action in row]
        for action in row:
            needs = dependencies(action, len(stage_to_rank), present, num_groups)
            for need in (need for need in needs if stage_to_rank[need.stage] != rank):
                if count := bisect.bisect(places, place[need]):
                    found[action] = count
    return found


def replay(
    rows: Sequence[ActionRow],
    stage_to_rank: Sequence[int],
    timing: Timing,
    num_groups: Awaited = None,
    larger: Callable[[Number, Number], Number] | None = None,
) -> Times:
    """Run the rows on a clock; what comes back ends where a rank is stuck, for rows that wait for one another for ever.

    Arrays of durations and hops, with NumPy's maximum as ``larger``, are the times under many costs at once.
    """
    num_stages = len(stage_to_rank)
    wiring = _wiring(rows, num_stages, num_groups)
    # Nothing is sent before the first stage (index -1), or, but for the tokens of a ring, beyond the last one.
    timing = timing._replace(hops=(*timing.hops, *(0,) * (num_stages + 1 - len(timing.hops))))
    if timing.capacity is not None and timing.capacity < len(rows):
        return _replay_shared(rows, timing, wiring, _HostLinks(timing, stage_to_rank), timing.capacity)
    durations, hops, dispatched, overlap, queued = *timing[:4], timing.queued
    links = _HostLinks(timing, stage_to_rank) if timing.offloaded or timing.visits else None
    done: dict[int, Number] = {-1: -math.inf}
    starts, ends = ([list[Number]() for _ in rows] for _ in range(2))
    clocks: list[Number] = [0] * len(rows)
    waiting, ready = dict[int, int](), list(range(len(rows)))
    while ready:
        rank = ready.pop()
        row, begun, ended, clock = rows[rank], starts[rank], ends[rank], clocks[rank]
        for action in row[len(begun) :]:
            own, beside, result, arrives, sent = wiring(action)
            if own not in done or beside not in done:
                waiting[beside] = rank  # in vain if its own forward or I comes later in the row: the rank is stuck
                break
            made = done[beside]
            if queued and action in queued:
                before = ended[queued[action] - 1]
                made = max(made, before) if larger is None else larger(made, before)
            arrived = made + hops[arrives]
            free = clock if dispatched is None else max(clock, dispatched[action])
            start = (arrived if arrived > free else free) if larger is None else larger(arrived, free)
            if links is not None:
                start = links.start(action, start)
            clock = done[result] = start + durations.get(action, 0)
            begun.append(start)
            ended.append(clock)
            if result in waiting:
                ready.append(waiting.pop(result))
            if not overlap:
                clock = clock + hops[sent]
            if links is not None:
                clock = links.end(action, clock)
        clocks[rank] = clock
    copies, complete = (tuple(links.done.values()), links.complete) if links else ((), {})
    return Times(tuple(map(tuple, starts)), tuple(map(tuple, ends)), copies, complete)


def turns(rows: Sequence[ActionRow], params: Sequence[Number], state: Sequence[Number]) -> dict[Action, Visit]:
    """The copies from host memory for each turn of a stage on its rank: its parameters; in its last turn, the optimizer's state.

    Example:
        >>> row = [Action(0, Kind.F, 0), Action(2, Kind.F, 0), Action(2, Kind.B, 0), Action(0, Kind.B, 0)]
        >>> {str(action): tuple(visit) for action, visit in turns([row], params=[1, 1, 1], state=[2, 2, 2]).items()}
        {'0F0': (1, 0), '2F0': (1, 2), '0B0': (1, 2)}
    """
    found: dict[Action, Visit] = {}
    for row in rows:
        first = [*row[:1], *(action for before, action in itertools.pairwise(row) if before.stage != action.stage)]
        last = {action.stage: action for action in first}
        found |= {each: Visit(params[each.stage], state[each.stage] * (last[each.stage] == each)) for each in first}
    return found


_Wiring = Callable[[Action], tuple[int, int, int, int, int]]


def _wiring(rows: Sequence[ActionRow], num_stages: int, num_groups: Awaited) -> _Wiring:
    """What an action needs of its own stage and of another, what it makes, and the hops by which the other arrives and it is sent.

    Integers are faster than actions: a microbatch has three numbers in a stage, its forward, cotangent and gradient; -1 is nothing.
    """
    if isinstance(num_groups, int):
        num_groups = {i: i - num_groups for row in rows for _, _, i in row if i >= num_groups}
    tokens = {i: 3 * (maker * num_stages + num_stages - 1) for i, maker in (num_groups or {}).items()}
    makers, last, forward, weight = frozenset((num_groups or {}).values()), num_stages - 1, Kind.F, Kind.W

    def wire(action: Action) -> tuple[int, int, int, int, int]:
        stage, kind, microbatch = action
        at = 3 * (microbatch * num_stages + stage)
        if kind is forward:
            beside = at - 3 if stage else tokens.get(microbatch, -1)  # the first turn awaits no token
            return -1, beside, at, (stage or num_stages) - 1, stage if stage < last or microbatch in makers else -1
        if kind is weight:
            return at + 1, -1, at + 2, -1, -1
        return at, at + 4 if stage < last else -1, at + 1, stage, stage - 1

    return wire


def _replay_shared(rows: Sequence[ActionRow], timing: Timing, wiring: _Wiring, links: _HostLinks, capacity: Number) -> Times:
    """The clock for ranks that share cores, from event to event: an action starts or ends.

    All ranks that compute have the same speed, so an action ends when *served*, the work that each has done since the start, has
    grown by its duration; one heap of such marks says which action ends next. That takes three times as long as ``replay``, where
    the end of an action is known when it starts.
    """
    starts, ends = ([list[Number]() for _ in rows] for _ in range(2))
    free: list[Number] = [0] * len(rows)
    done, waiting = dict[int, Number]({-1: -math.inf}), dict[int, int]()
    # When a rank starts its next action, and how much is served when a rank ends its action.
    starting, running = list[tuple[Number, int]](), list[tuple[Number, int]]()

    def prepare(rank: int) -> None:
        if len(starts[rank]) == len(rows[rank]):
            return
        action = rows[rank][len(starts[rank])]
        own, beside, _, arrives, _ = wiring(action)
        if own not in done or beside not in done:
            waiting[beside] = rank
            return
        ahead = ends[rank][: timing.queued.get(action, 0)][-1:]
        ready = max(free[rank], max([done[beside], *ahead]) + timing.hops[arrives])
        if timing.dispatched is not None:
            ready = max(ready, timing.dispatched[action])
        heapq.heappush(starting, (links.start(action, ready), rank))

    now: Number = 0
    served: Number = 0
    for rank in range(len(rows)):
        prepare(rank)
    while starting or running:
        shared, left = len(running) > capacity, running[0][0] - served if running else math.inf
        finish = max(now, now + (left * len(running) / capacity if shared else left))
        if starting and starting[0][0] < finish:
            time, rank = heapq.heappop(starting)
            served += (time - now) * capacity / len(running) if shared else time - now
            now = time
            action = rows[rank][len(starts[rank])]
            starts[rank].append(now)
            heapq.heappush(running, (served + timing.durations.get(action, 0), rank))
        else:
            served, rank = heapq.heappop(running)
            now = finish
            action = rows[rank][len(ends[rank])]
            _, _, result, _, sent = wiring(action)
            ends[rank].append(now)
            done[result] = now
            free[rank] = links.end(action, now if timing.overlap else now + timing.hops[sent])
            prepare(rank)
            if result in waiting:
                prepare(waiting.pop(result))
    return Times(tuple(map(tuple, starts)), tuple(map(tuple, ends)), tuple(links.done.values()), links.complete)


class Idle(NamedTuple):
    """Where a rank's idle time comes from; the parts sum to it."""

    fill_drain: Number  # what the schedule costs even if all stages take the same time and transfers none
    imbalance: Number  # what stages that differ add
    transfer: Number  # what transfers, and copies from and to the host, add that nothing hides
    dispatch: Number  # what waiting for the host adds, or for a core that other ranks use, too


class RingIdle(NamedTuple):
    """As ``Idle``, transfers of tokens included."""

    fill_drain: Number
    token: Number  # what waiting for tokens adds to ``fill_drain``: too few groups
    imbalance: Number
    transfer: Number
    dispatch: Number


Idles = tuple[Idle, ...] | tuple[RingIdle, ...]


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
) -> Idles:
    """Where the idle time of each rank comes from; ``equal`` is what each action would take if all stages were equal.

    The clock runs to ``length``, each time with one more cause: equal stages (a ring first without tokens), the durations as they
    are, transfers and copies, the host and shared cores. If a rank idles less than with equal stages, all of it is fill and drain.
    """

    def length_of(run: Timing) -> Number:
        return makespan(replay(rows, stage_to_rank, run, num_groups))

    on_time = timing._replace(dispatched=None, capacity=None)
    alone = on_time._replace(hops=(), offloaded=(), visits={})
    level = alone._replace(durations=equal)
    even = length_of(level)
    free = even if num_groups is None else makespan(replay(rows, stage_to_rank, level))  # where no pass waits for a token
    uneven, sent, dispatched = (min(length_of(run), length) for run in (alone, on_time, timing))
    idles: list[RingIdle] = []
    for row, time in zip(rows, busy, strict=True):
        idle, work = max(0, uneven - time), sum(equal.get(action, 0) for action in row)
        fill_drain, whole = (min(max(0, end - work), idle) for end in (free, even))
        idles.append(RingIdle(fill_drain, whole - fill_drain, idle - whole, sent - uneven, dispatched - sent))
    if num_groups is None:
        return tuple(Idle(idle.fill_drain, *idle[2:]) for idle in idles)
    return tuple(idles)
