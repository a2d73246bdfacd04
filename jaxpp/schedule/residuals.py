"""The life of every residual: what the pebble graph shows, as numbers."""

import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import NamedTuple

from jaxpp.schedule.action import Kind
from jaxpp.schedule.clock import Bar, Number

__all__ = ["Lane", "Residual", "column_width", "counts", "lanes", "live", "peak", "places"]


class Residual(NamedTuple):
    """What a forward keeps for its backward, and when."""

    stage: int
    microbatch: int
    start: Number
    end: Number


class Lane(NamedTuple):
    """A row of the pebble graph: the kinds it holds, of one stage."""

    kinds: tuple[Kind, ...]
    stage: int


def live(bars: Iterable[Bar]) -> tuple[Residual, ...]:
    """The life of every residual: from the start of F to the end of B, or of the later of I and W; sorted by stage, then start."""
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


def counts(residuals: Iterable[Residual]) -> tuple[tuple[Number, Number, int], ...]:
    """How many are alive when: (start, end, count) of each span of time in which that stays the same and is not 0."""
    changes: dict[Number, int] = defaultdict(int)
    for _, _, start, end in residuals:
        changes[start] += 1
        changes[end] -= 1
    times = sorted(time for time, change in changes.items() if change)
    levels = itertools.accumulate(changes[time] for time in times)
    return tuple((start, end, count) for (start, end), count in zip(itertools.pairwise(times), levels, strict=False) if count)


def lanes(bars: Iterable[Bar]) -> tuple[Lane, ...]:
    """The rows of the pebble graph in the order that data flows: F upwards, then B and I downwards, then W likewise."""
    present = {(action.stage, action.kind) for _, action, _, _ in bars}
    stages = sorted({stage for stage, _ in present})
    found = []
    for block, order in ((Kind.F,), stages), ((Kind.B, Kind.I), stages[::-1]), ((Kind.W,), stages[::-1]):
        for stage in order:
            kinds = tuple(kind for kind in block if (stage, kind) in present)
            found += [Lane(kinds, stage)] * bool(kinds)
    return tuple(found)


def column_width(bars: Sequence[Bar]) -> float:
    """The longest time that all starts and ends are multiples of; where that would be very short, a part of the makespan."""
    times = {time for bar in bars for time in (bar.start, bar.end)}
    makespan = max(times)
    if not makespan:
        return 1.0
    fractions = [Fraction(time).limit_denominator(64) for time in times]
    scale = math.lcm(*(f.denominator for f in fractions))
    step = math.gcd(*(int(f * scale) for f in fractions)) / scale
    exact = all(abs(f - time) < 1e-6 * makespan for f, time in zip(fractions, times, strict=True))
    return step if exact and step and makespan / step <= 2000 else makespan / 400
