"""What is to be ordered: the actions of a step as integers, what each takes, needs and keeps, and a lean clock for them.

Microbatches are alike, so each stage may run them in their order, whatever it does: an order is known from the stages and kinds of
each row alone. Memory is known from a row alone, too: F of a stage takes the bytes of its residuals, and W (or B) gives them back.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from jaxpp.schedule.action import Action, Kind
from jaxpp.schedule.clock import ActionRow
from jaxpp.schedule.costs import StepCosts

NumberedRows = Sequence[Sequence[int]]
FORTH, BACK, WEIGHT = range(3)  # the kinds of actions; BACK is I of a stage that is split, and B of one that is not


class Starts(NamedTuple):
    """When each action starts, the actions in an order in which each comes behind all that it needs, and the makespan."""

    starts: list[float]
    order: list[int]
    span: float


@dataclass(frozen=True)
class StepWork:
    """All actions of a step; that of a kind, stage and microbatch has the number ``(kind * S + stage) * M + microbatch``."""

    costs: StepCosts  # of actions, transfers and residuals
    owner: tuple[int, ...]  # the rank of each stage
    num_microbatches: int
    room: tuple[float, ...]  # for residuals, on each rank
    split: tuple[bool, ...]  # for each stage whether its backward runs as I and W

    @property
    def num_stages(self) -> int:
        """How many stages there are."""
        return len(self.owner)

    @cached_property
    def stages_of(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each rank."""
        return tuple(tuple(s for s, owner in enumerate(self.owner) if owner == rank) for rank in range(len(self.room)))

    @cached_property
    def hops(self) -> tuple[float, ...]:
        """What it takes from each stage to the next."""
        pairs = zip(self.costs.transfer, itertools.pairwise(self.owner), strict=True)
        return tuple(0.0 if here == there else time for time, (here, there) in pairs)

    @cached_property
    def durations(self) -> tuple[tuple[float, ...], ...]:
        """What the actions of each kind and stage take."""
        forward, inner, weight = (self.costs.actions[kind] for kind in (Kind.F, Kind.I, Kind.W))
        back = (i + w * (not split) for i, w, split in zip(inner, weight, self.split, strict=True))
        return forward, tuple(back), tuple(w * split for w, split in zip(weight, self.split, strict=True))

    @cached_property
    def actions(self) -> tuple[int, ...]:
        """All actions."""
        count, each = self.num_stages, range(self.num_microbatches)
        kept = [kind * count + s for kind in range(3) for s in range(count) if kind != WEIGHT or self.split[s]]
        return tuple(token * self.num_microbatches + i for token in kept for i in each)

    def _of_tokens(self, values: Iterable[float]) -> list[float]:
        return [value for value in values for _ in range(self.num_microbatches)]

    @cached_property
    def duration(self) -> list[float]:
        """What each action takes."""
        return self._of_tokens(itertools.chain(*self.durations))

    @cached_property
    def change(self) -> list[float]:
        """How many bytes of residuals there are more after each action has started, or, where they are less, has ended."""
        sizes = self.costs.residuals
        back = [-size * (not split) for size, split in zip(sizes, self.split, strict=True)]
        weight = [-size * split for size, split in zip(sizes, self.split, strict=True)]
        return self._of_tokens([*sizes, *back, *weight])

    @cached_property
    def needs(self) -> list[int]:
        """What each action needs of another stage; -1 is nothing."""
        count, m = self.num_stages, self.num_microbatches
        forward = [-1] * m + list(range((count - 1) * m))
        back = list(range((count + 1) * m, 2 * count * m)) + [-1] * m
        return forward + back + [-1] * (count * m)

    @cached_property
    def lag(self) -> list[float]:
        """How long what an action needs of another stage is on its way."""
        nothing = [0.0] * self.num_stages
        return self._of_tokens([0.0, *self.hops, *self.hops, 0.0, *nothing])

    @cached_property
    def feeds(self) -> list[int]:
        """Which action of another stage needs each; -1 is none."""
        found = [-1] * len(self.needs)
        for action, needed in enumerate(self.needs):
            if needed >= 0:
                found[needed] = action
        return found

    @cached_property
    def behind(self) -> list[int]:
        """The action of the same stage that each comes behind: F of I or B, and I of W; -1 is none."""
        size = self.num_stages * self.num_microbatches
        return [-1] * size + list(range(2 * size))

    @cached_property
    def noise(self) -> float:
        """Starts that differ by less are equal."""
        return 1e-10 * (sum(self.costs.whole) + sum(self.hops)) or 1e-300

    @cached_property
    def slack(self) -> float:
        """Bytes that differ by less are equal."""
        return 1e-9 * max(*self.costs.residuals, 1e-300)

    def fits(self, rows: NumberedRows) -> bool:
        """Whether each row stays within the room of its rank."""
        return all(peak <= room + self.slack for peak, room in zip(self.peaks(rows), self.room, strict=True))

    def peaks(self, rows: NumberedRows) -> tuple[float, ...]:
        """The most bytes of residuals on each rank."""
        return tuple(max(itertools.accumulate(map(self.change.__getitem__, row)), default=0.0) for row in rows)

    def clock(self, rows: NumberedRows) -> Starts | None:
        """When each action starts, as ``jaxpp.schedule.clock.replay`` says; None if the rows wait for one another for ever.

        A search runs it once for each of thousands of moves, over the numbers of actions and tables that are made once. ``replay``
        derives what each action needs from the action, which makes it about 2.5 times as slow.
        """
        duration, needs, lag, behind = self.duration, self.needs, self.lag, self.behind
        starts = [-1.0] * len(duration)
        order: list[int] = []
        clocks, at = [0.0] * len(rows), [0] * len(rows)
        waiting, ready = dict[int, int](), list(range(len(rows)))
        while ready:
            rank = ready.pop()
            row, time, first = rows[rank], clocks[rank], at[rank]
            for action in row[first:]:
                needed = needs[action]
                if needed >= 0:
                    begun = starts[needed]
                    if begun < 0:
                        waiting[needed] = rank
                        break
                    arrived = begun + duration[needed] + lag[action]
                    time = arrived if arrived > time else time
                own = behind[action]
                if own >= 0 and starts[own] < 0:
                    return None
                starts[action] = time
                order.append(action)
                first += 1
                time += duration[action]
                if action in waiting:
                    ready.append(waiting.pop(action))
            at[rank], clocks[rank] = first, time
        return Starts(starts, order, max(clocks)) if len(order) == len(self.actions) else None

    @cached_property
    def least_span(self) -> float:
        """No order is shorter.

        Not than one microbatch alone, nor than the work of any rank, which begins when the first microbatch can have come and ends
        when the last cotangent can have gone. And a residual is alive for its microbatch's way to the last stage and back: of such
        times a rank has room for so many at once.
        """
        (forward, back, weight), hops, m = self.durations, (*self.hops, 0.0), self.num_microbatches
        comes = list(itertools.accumulate((f + hop for f, hop in zip(forward, hops, strict=True)), initial=0.0))
        goes = list(itertools.accumulate((b + hop for b, hop in zip(back, hops, strict=True)), initial=0.0))
        alive = [comes[-1] - comes[s] + goes[-1] - goes[s] + weight[s] for s in range(self.num_stages)]
        least = alive[0]
        for stages, room in zip(self.stages_of, self.room, strict=True):
            first = min(stages)
            busy = m * sum(forward[s] + back[s] + weight[s] for s in stages)
            # When the rank's last cotangent has left, it may still have all of its weight gradients to run.
            rest = max(0.0, goes[first] + weight[0] * (first > 0) - m * sum(weight[s] for s in stages)) if first else 0.0
            held = m * sum(self.costs.residuals[s] * alive[s] for s in stages) / room if room else 0.0
            least = max(least, comes[first] + max(busy + rest, held))
        return least

    def numbered(self, rows: Iterable[ActionRow]) -> list[list[int]] | None:
        """The rows of a schedule of these stages, microbatches in order; None if it splits backwards that are not to be split."""
        count, m = self.num_stages, self.num_microbatches
        found = []
        for row in rows:
            seen, numbers = Counter[int](), list[int]()
            for stage, kind, _ in row:
                if kind in (Kind.I, Kind.W) and not self.split[stage]:
                    return None
                both = (BACK, WEIGHT) if self.split[stage] else (BACK,)
                for each in {Kind.F: (FORTH,), Kind.B: both, Kind.I: (BACK,), Kind.W: (WEIGHT,)}[kind]:
                    token = each * count + stage
                    numbers.append(token * m + seen[token])
                    seen[token] += 1
            found.append(numbers)
        return found

    def action_rows(self, rows: NumberedRows) -> tuple[ActionRow, ...]:
        """The rows as those of a schedule."""
        return tuple(tuple(map(self._action, row)) for row in rows)

    def _action(self, number: int) -> Action:
        token, microbatch = divmod(number, self.num_microbatches)
        kind, stage = divmod(token, self.num_stages)
        return Action(stage, (Kind.F, Kind.I if self.split[stage] else Kind.B, Kind.W)[kind], microbatch)
