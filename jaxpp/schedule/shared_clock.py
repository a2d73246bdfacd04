"""The clock for ranks that share cores: if more of them compute at once than there is room for, all slow down alike.

Forced CPU devices are such ranks: four of them on two cores compute side by side at half speed. An action then takes as long as
what runs beside it makes it take, so the clock goes from event to event, an action that starts or one that ends. Between two events
k ranks compute, each at the speed min(1, capacity / k).

All ranks that compute have the same speed at any time. So the clock counts the work that each of them has done since the start,
*served*; an action ends when served has grown by its duration, and one heap of such marks says which action ends next.
"""

import heapq
from collections import defaultdict
from collections.abc import Sequence

from jaxpp.schedule.action import Action, Kind
from jaxpp.schedule.clock import ActionRow, Awaited, HostLinks, Number, Times, Timing, dependencies, replay

__all__ = ["replay_shared"]


def replay_shared(rows: Sequence[ActionRow], stage_to_rank: Sequence[int], timing: Timing, num_groups: Awaited = None) -> Times:
    """Run the rows on a clock where at most ``timing.capacity`` ranks compute at full speed at once; see ``replay``.

    With no capacity, or with at least as many as ranks, this is ``replay``. Transfers and copies need no core.
    """
    if timing.capacity is None or timing.capacity >= len(rows):
        return replay(rows, stage_to_rank, timing, num_groups)
    return _SharedClock(rows, stage_to_rank, timing, num_groups).run(timing.capacity)


class _SharedClock:
    """The state of the clock: for each rank how far it is, and two heaps of what happens next."""

    def __init__(self, rows: Sequence[ActionRow], stage_to_rank: Sequence[int], timing: Timing, num_groups: Awaited):
        self.rows, self.timing, self.num_stages, self.num_groups = rows, timing, len(stage_to_rank), num_groups
        self.present = frozenset(action for row in rows for action in row)
        first = [action for action in self.present if action.kind == Kind.F and action.stage == 0]
        self.makers = {need for action in first for need in dependencies(action, self.num_stages, self.present, num_groups)}
        self.hops = (*timing.hops, *(0,) * (self.num_stages + 1 - len(timing.hops)))
        self.links = HostLinks(timing, stage_to_rank)
        self.starts: list[list[Number]] = [[] for _ in rows]
        self.ends: list[list[Number]] = [[] for _ in rows]
        self.free: list[Number] = [0] * len(rows)
        self.done: dict[Action, Number] = {}
        self.waiting: dict[Action, list[int]] = defaultdict(list)
        self.starting: list[tuple[Number, int]] = []  # when a rank starts its next action
        self.running: list[tuple[Number, int]] = []  # how much is served when a rank ends its action

    def run(self, capacity: Number) -> Times:
        """Go from event to event until nothing happens any more."""
        now: Number = 0
        served: Number = 0
        for rank in range(len(self.rows)):
            self._prepare(rank)
        while self.starting or self.running:
            num_active = len(self.running)
            shared = num_active > capacity
            if self.running:
                left = self.running[0][0] - served
                finish = max(now, now + (left * num_active / capacity if shared else left))
                if not self.starting or finish <= self.starting[0][0]:
                    served, rank = heapq.heappop(self.running)
                    now = finish
                    self._end(rank, now)
                    continue
            time, rank = heapq.heappop(self.starting)
            served += (time - now) * capacity / num_active if shared else time - now
            now = time
            action = self.rows[rank][len(self.starts[rank])]
            self.starts[rank].append(now)
            heapq.heappush(self.running, (served + self.timing.durations.get(action, 0), rank))
        return Times(tuple(map(tuple, self.starts)), tuple(map(tuple, self.ends)), tuple(self.links.done.values()))

    def _prepare(self, rank: int) -> None:
        """Find out when a rank starts its next action, or what it waits for."""
        row, number = self.rows[rank], len(self.starts[rank])
        if number == len(row):
            return
        action = row[number]
        ready = self.free[rank]
        if self.timing.dispatched is not None:
            ready = max(ready, self.timing.dispatched[action])
        for need in dependencies(action, self.num_stages, self.present, self.num_groups):
            if need not in self.done:
                self.waiting[need].append(rank)
                return
            ready = max(ready, self.done[need] + self._hop(need, action))
        heapq.heappush(self.starting, (self.links.start(action, ready), rank))

    def _hop(self, need: Action, action: Action) -> Number:
        """The time from the end of what an action needs to its arrival."""
        if action.kind == Kind.F:
            return self.hops[need.stage]  # of a ring, the last stage's is that of a token
        return self.hops[action.stage] if need.stage != action.stage else 0

    def _end(self, rank: int, now: Number) -> None:
        """The action of a rank has ended: the rank goes on, and so do those that waited for it."""
        action = self.rows[rank][len(self.ends[rank])]
        self.ends[rank].append(now)
        self.done[action] = now
        self.free[rank] = self.links.end(action, now if self.timing.overlap else now + self._sent(action))
        for other in (rank, *self.waiting.pop(action, ())):
            self._prepare(other)

    def _sent(self, action: Action) -> Number:
        """What the rank sends after an action takes."""
        stage, kind, _ = action
        if kind == Kind.W:
            return 0
        if kind != Kind.F:
            return self.hops[stage - 1]  # the last hop, of no boundary, is 0
        return self.hops[stage] if stage < self.num_stages - 1 or action in self.makers else 0  # those make tokens of a ring
