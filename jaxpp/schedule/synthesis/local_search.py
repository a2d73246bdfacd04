"""NumberedRows improved step by step: a tabu search over the longest path.

What makes a step long is one path of actions, each of which starts when the one before it ends or has arrived. Only a change on
that path can make the step shorter, and only one that moves an action within a run of the path on one rank (a block), as in job
shops. Of all such moves the search takes the best, also if that is worse than what it has, and does not move an action back for a
while. What a move would give is estimated from the times before and behind each action, without running the clock.

References: Nowicki and Smutnicki, A Fast Taboo Search Algorithm for the Job Shop Problem, Management Science 42(6), 1996; Balas and
Vazacopoulos, Guided Local Search with Shifting Bottleneck for Job Shop Scheduling, Management Science 44(2), 1998.
"""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

from jaxpp.schedule.synthesis.work import NumberedRows, Starts, StepWork

_TENURE = 8  # steps for which an action is not moved back


class _Move(NamedTuple):
    """The part of a row from ``first`` on in another order."""

    estimate: float
    rank: int
    first: int
    part: list[int]
    action: int  # which action moved
    earlier: bool


class Search:
    """NumberedRows, when their actions start, and how long it takes from each start to the end of the step."""

    def __init__(self, work: StepWork, rows: NumberedRows, times: Starts):
        self.work, self.rows, self.times = work, [list(row) for row in rows], times
        self.kept: dict[tuple[int, bool], int] = {}  # until when an action is not moved, by direction

    def look_ahead(self) -> None:
        """From each start to the end of the step: ``left``; and where each action stands: ``place``."""
        work, left = self.work, [0.0] * len(self.work.duration)
        self.place, following = [0] * len(left), [-1] * len(left)
        for row in self.rows:
            for k, action in enumerate(row):
                self.place[action] = k
            for action, after in itertools.pairwise(row):
                following[action] = after
        for action in reversed(self.times.order):
            after, fed = following[action], work.feeds[action]
            rest = left[after] if after >= 0 else 0.0
            if fed >= 0:
                other = left[fed] + work.lag[fed]
                rest = other if other > rest else rest
            left[action] = rest + work.duration[action]
        self.left = left

    def blocks(self) -> Iterator[tuple[int, int, int]]:
        """The runs of at least two actions of the longest path on one rank: rank, first and last place."""
        work, starts = self.work, self.times.starts
        ranks, size = work.owner, work.num_microbatches
        action = max((row[-1] for row in self.rows if row), key=lambda last: starts[last] + work.duration[last])
        rank = ranks[action // size % work.num_stages]
        first = last = self.place[action]
        while starts[action] > work.noise:
            before = self.rows[rank][self.place[action] - 1] if self.place[action] else -1
            if before >= 0 and starts[before] + work.duration[before] >= starts[action] - work.noise:
                action, first = before, first - 1
                continue
            action = work.needs[action]
            if action < 0:
                break
            if first < last:
                yield rank, first, last
            rank = ranks[action // size % work.num_stages]
            first = last = self.place[action]
        if first < last:
            yield rank, first, last

    def moves(self, rank: int, first: int, last: int) -> Iterator[_Move]:
        """Each action of a block moved to its beginning, to its end, or by one place, as far as memory and stages allow."""
        row = self.rows[rank]
        alive = sum(map(self.work.change.__getitem__, row[:first]))
        levels = list(itertools.accumulate((self.work.change[action] for action in row[first : last + 1]), initial=alive))
        seen: set[tuple[int, int]] = set()
        for k in range(first, last + 1):
            for goal in {first, last, min(k + 1, last)} - {k}:
                to = self._reach(row, k, goal, levels, first, rank)
                if to == k or (k, to) in seen:
                    continue
                seen.add((k, to))
                if to < k:
                    part, begin = [row[k], *row[to:k]], to
                else:
                    part, begin = [*row[k + 1 : to + 1], row[k]], k
                yield _Move(self.estimate(rank, begin, part), rank, begin, part, row[k], to < k)

    def _reach(self, row: list[int], k: int, goal: int, levels: list[float], first: int, rank: int) -> int:
        """How far towards a place the action at ``k`` can go."""
        work, size, action = self.work, self.work.num_microbatches, row[k]
        token, change, room = action // size, work.change[action], work.room[rank] + work.slack
        step = 1 if goal > k else -1
        added = -change if step > 0 else change  # bytes on what it passes
        while k != goal:
            other = row[k + step]
            before, after = (action, other) if step > 0 else (other, action)
            if other // size == token or work.behind[after] == before or work.needs[after] == before:
                break
            level = levels[k - first + 2] if step > 0 else levels[k - first - 1]  # behind what it passes, or before that
            if added > 0 and level + added > room:
                break
            k += step
        return k

    def estimate(self, rank: int, begin: int, part: list[int]) -> float:
        """How long the longest path through the part would be, as if what comes before it and behind it stayed as it is."""
        work, starts, row = self.work, self.times.starts, self.rows[rank]
        duration, needs, lag, feeds = work.duration, work.needs, work.lag, work.feeds
        time = starts[row[begin - 1]] + duration[row[begin - 1]] if begin else 0.0
        begins = list[float]()
        for action in part:
            if (needed := needs[action]) >= 0:
                arrived = starts[needed] + duration[needed] + lag[action]
                time = arrived if arrived > time else time
            begins.append(time)
            time += duration[action]
        end = begin + len(part)
        rest = self.left[row[end]] if end < len(row) else 0.0
        longest = 0.0
        for action, start in zip(reversed(part), reversed(begins), strict=True):
            if (fed := feeds[action]) >= 0:
                other = self.left[fed] + lag[fed]
                rest = other if other > rest else rest
            rest += duration[action]
            longest = start + rest if start + rest > longest else longest
        return longest

    def step(self, number: int, best: float) -> None:
        """Make the best move that is allowed."""
        self.look_ahead()
        chosen: _Move | None = None
        for block in self.blocks():
            for move in self.moves(*block):
                kept = self.kept.get((move.action, move.earlier), -1) >= number
                if kept and move.estimate >= best - self.work.noise:
                    continue
                if chosen is None or move.estimate < chosen.estimate - self.work.noise:
                    chosen = move
        if chosen is None:
            self.kept.clear()
            return
        row, place = self.rows[chosen.rank], slice(chosen.first, chosen.first + len(chosen.part))
        old, row[place] = row[place], chosen.part
        times = self.work.clock(self.rows)
        if times is None:  # the rows wait for one another in a circle
            row[place] = old
            self.kept[chosen.action, chosen.earlier] = number + 4 * _TENURE
        else:
            self.times = times
            self.kept[chosen.action, not chosen.earlier] = number + _TENURE + 7 * number % 5


def improve(work: StepWork, rows: NumberedRows, num_steps: int) -> NumberedRows:
    """The best rows in so many steps from some rows; it ends where no order is shorter."""
    if (times := work.clock(rows)) is None:
        return rows
    search, shortest = Search(work, rows, times), times.span
    for number in range(num_steps):
        if shortest <= work.least_span + work.noise:
            break
        search.step(number, shortest)
        if search.times.span < shortest - work.noise:
            shortest, rows = search.times.span, list(map(tuple, search.rows))
    return rows
