"""When each residual is alive, and how many are alive at once: what the pebble graph shows, as numbers."""

import heapq
import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jaxpp.schedule.action import Kind
from jaxpp.schedule.clock import Bar, Number

__all__ = ["Residual", "counts", "lifetimes", "peak", "peaks", "places"]


class Residual(NamedTuple):
    """What a forward keeps for its backward, and when."""

    stage: int
    microbatch: int
    start: Number
    end: Number


def lifetimes(bars: Iterable[Bar]) -> tuple[Residual, ...]:
    """When each residual is alive: from the start of F to the end of B, or of the later of I and W; sorted by stage, then start."""
    begun, ended = dict[tuple[int, int], Number](), dict[tuple[int, int], Number]()
    for _, (stage, kind, microbatch), start, end in bars:
        if kind == Kind.F:
            begun[stage, microbatch] = start
        ended[stage, microbatch] = max(end, ended.get((stage, microbatch), end))
    return tuple(sorted((Residual(*at, start, ended[at]) for at, start in begun.items()), key=lambda r: (r.stage, r.start)))


def places(residuals: Iterable[Residual]) -> tuple[tuple[Residual, int], ...]:
    """Each residual with the lowest place that is free when it begins; one that ends at that time has left its place."""
    taken: list[tuple[Number, int]] = []
    free: list[int] = []
    found = []
    for residual in sorted(residuals, key=lambda r: r.start):
        while taken and taken[0][0] <= residual.start:
            heapq.heappush(free, heapq.heappop(taken)[1])
        place = heapq.heappop(free) if free else len(taken)
        heapq.heappush(taken, (residual.end, place))
        found.append((residual, place))
    return tuple(found)


def peak(residuals: Iterable[Residual]) -> int:
    """Most residuals alive at once."""
    return max((place + 1 for _, place in places(residuals)), default=0)


def peaks(residuals: Iterable[Residual], stage_to_rank: Sequence[int]) -> tuple[int, ...]:
    """Most residuals alive at once on each rank."""
    by_rank: list[list[Residual]] = [[] for _ in range(max(stage_to_rank) + 1)]
    for residual in residuals:
        by_rank[stage_to_rank[residual.stage]].append(residual)
    return tuple(map(peak, by_rank))


def counts(residuals: Iterable[Residual]) -> tuple[tuple[Number, Number, int], ...]:
    """How many are alive when: (start, end, count) of each span of time in which that stays the same and is not 0."""
    changes: dict[Number, int] = defaultdict(int)
    for _, _, start, end in residuals:
        changes[start] += 1
        changes[end] -= 1
    times = sorted(time for time, change in changes.items() if change)
    levels = itertools.accumulate(changes[time] for time in times)
    return tuple((start, end, count) for (start, end), count in zip(itertools.pairwise(times), levels, strict=False) if count)
