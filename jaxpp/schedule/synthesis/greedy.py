"""Orders by a rule: whichever rank can start first takes the action that the rule prefers, and the clock goes on.

A greedy rank would fill its memory with forwards whose backwards cannot come, because a later stage of the same rank finds no room
for the residuals without which they cannot start. So a forward is taken only if after it all microbatches in flight could still be
brought to their end one after another, the oldest first: the banker's algorithm. As microbatches keep their order, that depends on
the rank's own stages alone, and some action can always be taken until all are done.
"""

import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

from jaxpp.schedule.synthesis.work import BACK, FORTH, WEIGHT, StepWork


class Rule(NamedTuple):
    """What a rank prefers."""

    rank: Callable[[int, int, int], tuple[int, ...]]  # of kind (F or I), stage and microbatch; the least is taken first
    patience: float = 0.0  # how long a rank waits for an action that it prefers, in parts of the mean of all forwards
    weights_first: bool = False  # whether W, which frees memory, goes first, and not only where the rank would be idle


GREEDY_RULES = (
    Rule(lambda kind, stage, microbatch: (-stage, -kind, microbatch)),
    Rule(lambda kind, stage, microbatch: (microbatch, -kind, -stage)),
    Rule(lambda kind, stage, microbatch: (microbatch, -kind, -stage), patience=0.5),
    Rule(lambda kind, stage, microbatch: (kind, -stage, microbatch), patience=0.5),
    Rule(lambda kind, stage, microbatch: (-kind, -stage, microbatch), weights_first=True),
    Rule(lambda kind, stage, microbatch: (kind, -stage, microbatch), weights_first=True),
)
"""They prefer the last stage, the oldest microbatch, forwards or backwards. Together they begin within a part in a thousand of
where all twelve of their kind do, on random costs."""


class _Offer(NamedTuple):
    start: float
    kind: int
    stage: int
    action: int


class _Run:
    """A clock that runs while the order is made: how far each stage is with each kind, and when what it made was there."""

    def __init__(self, work: StepWork, rule: Rule):
        self.work, self.rule = work, rule
        self.done = [[0] * work.num_stages for _ in range(3)]
        self.ends = {-1: 0.0}  # of each action that was taken; nobody waits for nothing
        self.free = [0.0] * len(work.room)
        self.used = [0.0] * len(work.room)
        self.rows: list[list[int]] = [[] for _ in work.room]
        self.frees = [WEIGHT if split else BACK for split in work.split]
        forwards = work.durations[FORTH]
        self.patience = rule.patience * sum(forwards) / len(forwards)

    def safe(self, stage: int) -> bool:
        """Whether all microbatches in flight can still end, one after another, if the stage now runs a forward."""
        work, (forwards, *_) = self.work, self.done
        rank, sizes = work.owner[stage], work.costs.residuals
        stages = work.stages_of[rank]
        room = work.room[rank] + work.slack - self.used[rank] - sizes[stage]
        if room < 0 or len(stages) == 1:
            return room >= 0
        begun = {s: forwards[s] + (s == stage) for s in stages}
        ended = {s: self.done[self.frees[s]][s] for s in stages}
        for i in range(min(ended.values()), max(begun.values())):
            if sum(sizes[s] for s in stages if begun[s] <= i) > room:
                return False
            room += sum(sizes[s] for s in stages if ended[s] <= i < begun[s])
        return True

    def offers(self, rank: int) -> tuple[list[_Offer], list[_Offer]]:
        """What the rank could do next: forwards and cotangents, and weight gradients."""
        work, ends = self.work, self.ends
        found, due = list[_Offer](), list[_Offer]()
        for s, kind in itertools.product(work.stages_of[rank], (FORTH, BACK, WEIGHT)):
            i = self.done[kind][s]
            if i == work.num_microbatches or (kind == WEIGHT and not work.split[s]):
                continue
            action = (kind * work.num_stages + s) * work.num_microbatches + i
            if work.needs[action] in ends and work.behind[action] in ends and (kind != FORTH or self.safe(s)):
                start = max(self.free[rank], ends[work.needs[action]] + work.lag[action])
                (due if kind == WEIGHT else found).append(_Offer(start, kind, s, action))
        return found, due

    def choice(self, found: list[_Offer], due: list[_Offer]) -> _Offer:
        """What the rank does next: what the rule prefers of what comes soon; W where nothing does."""
        start = min(offer.start for offer in (*found, *due))
        soon = [offer for offer in found if offer.start <= start + self.patience + self.work.noise]
        debts = sorted(due, key=lambda offer: (self.done[WEIGHT][offer.stage], -offer.stage))
        if not soon:
            return debts[0]
        best = min(soon, key=lambda of: (*self.rule.rank(of.kind, of.stage, self.done[of.kind][of.stage]), of.start))
        gap = math.inf if self.rule.weights_first else best.start - start
        return debts[0] if debts and gap >= self.work.durations[WEIGHT][debts[0].stage] / 2 else best

    def take(self, rank: int, offer: _Offer) -> None:
        """Run it."""
        start, kind, stage, action = offer
        self.ends[action] = self.free[rank] = start + self.work.duration[action]
        self.done[kind][stage] += 1
        self.used[rank] += self.work.change[action]
        self.rows[rank].append(action)


def order_by(work: StepWork, rule: Rule) -> list[list[int]]:
    """The rows that a rule makes; they stay within the room of each rank, which must hold the residuals of one microbatch."""
    run = _Run(work, rule)

    def begins(rank: int) -> float:
        return min((offer.start for offer in itertools.chain(*offered[rank])), default=math.inf)

    offered = list(map(run.offers, range(len(work.room))))
    starts = list(map(begins, range(len(work.room))))
    while (start := min(starts)) < math.inf:
        rank = starts.index(start)
        offer = run.choice(*offered[rank])
        run.take(rank, offer)
        fed = work.feeds[offer.action]  # which may be waiting for this one
        for other in {rank, work.owner[fed // work.num_microbatches % work.num_stages] if fed >= 0 else rank}:
            offered[other] = run.offers(other)
            starts[other] = begins(other)
    assert sum(map(len, run.rows)) == len(work.actions), "some action can always be taken"
    return run.rows
