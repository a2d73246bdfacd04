"""When each residual is alive, and how many are alive at once: what the pebble graph shows, as numbers."""

import heapq
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jaxpp.schedule.action import Kind
from jaxpp.schedule.clock import Bar, Copies, Number


class Residual(NamedTuple):
    """What a forward keeps for its backward, and when."""

    stage: int
    microbatch: int
    start: Number
    end: Number


def lifetimes(bars: Iterable[Bar], copies: Iterable[Copies] = ()) -> tuple[Residual, ...]:
    """When each residual is alive, sorted by stage, then start: from the start of F to the end of B, or of the later of I and W.

    Residuals that wait in host memory are there twice: until the copy out has ended, and from when the copy back begins.
    """
    begun, ended = dict[tuple[int, int], Number](), dict[tuple[int, int], Number]()
    for _, (stage, kind, microbatch), start, end in bars:
        if kind == Kind.F:
            begun[stage, microbatch] = start
        else:
            ended[stage, microbatch] = max(end, ended.get((stage, microbatch), end))
    found = [Residual(*at, begun[at], end) for at, end in ended.items()]
    away = {(moved.forward.stage, moved.forward.microbatch): (out[1], back[0]) for moved, out, back in copies}
    for each in [each for each in found if each[:2] in away]:
        left, returned = away[each[:2]]
        found.remove(each)
        found += [each._replace(end=left), each._replace(start=returned)]
    return tuple(sorted(found, key=lambda r: (r.stage, r.start)))


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


def counts_at_peaks(residuals: Iterable[Residual], stage_to_device: Sequence[int]) -> tuple[int, ...]:
    """How many residuals of each stage are alive when most are alive on its device; at the first such time."""
    changes: dict[int, list[tuple[Number, int, int]]] = defaultdict(list)
    for stage, _, start, end in residuals:
        changes[stage_to_device[stage]] += [(start, 1, stage), (end, -1, stage)]
    found = [0] * len(stage_to_device)
    for each in changes.values():
        alive, most = Counter[int](), Counter[int]()
        for _, change, stage in sorted(each):  # what ends at a time has ended when others begin
            alive[stage] += change
            most = max(most, alive.copy(), key=Counter.total)
        for stage, count in most.items():
            found[stage] = count
    return tuple(found)


def counts(residuals: Iterable[Residual]) -> tuple[tuple[Number, Number, int], ...]:
    """How many are alive when: (start, end, count) of each span of time in which that stays the same and is not 0."""
    changes: dict[Number, int] = defaultdict(int)
    for _, _, start, end in residuals:
        changes[start] += 1
        changes[end] -= 1
    times = sorted(time for time, change in changes.items() if change)
    levels = itertools.accumulate(changes[time] for time in times)
    return tuple((start, end, count) for (start, end), count in zip(itertools.pairwise(times), levels, strict=False) if count)
