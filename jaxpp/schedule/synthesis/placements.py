"""Where stages may lie: round robin, in a V, in blocks, and so that all ranks have about equal work."""

import itertools
from collections.abc import Sequence


def placements(work: Sequence[float], num_ranks: int) -> tuple[tuple[int, ...], ...]:
    """The rank of each stage, as many stages on each rank; ``work[s]`` is what stage s computes for a microbatch.

    Example:
        >>> placements([1, 1, 1, 1], num_ranks=2)
        ((0, 1, 0, 1), (0, 1, 1, 0), (0, 0, 1, 1))
        >>> placements([4, 3, 1, 2, 2, 2], num_ranks=2)[-1]
        (0, 1, 0, 0, 1, 1)
    """
    num_stages = len(work)
    turns = [divmod(stage, num_ranks) for stage in range(num_stages)]
    robin = tuple(rank for _, rank in turns)
    zigzag = tuple(num_ranks - 1 - rank if turn % 2 else rank for turn, rank in turns)
    blocks = tuple(stage * num_ranks // num_stages for stage in range(num_stages))
    plain = (robin, zigzag, blocks)
    return tuple(dict.fromkeys([*plain, *(_levelled(owner, work, num_ranks) for owner in plain)]))


def _levelled(owner: Sequence[int], work: Sequence[float], num_ranks: int) -> tuple[int, ...]:
    """Pairs of stages change their ranks, the best pair first, as long as that lowers what the busiest ranks have to do."""
    owner, loads = list(owner), [0.0] * num_ranks
    for stage, rank in enumerate(owner):
        loads[rank] += work[stage]
    while True:
        options = [(_after(loads, owner, work, pair), pair) for pair in itertools.combinations(range(len(owner)), 2)]
        busiest, (a, b) = min(options, default=([], (0, 0)))
        if busiest >= sorted(loads, reverse=True):
            return tuple(owner)
        loads[owner[a]] += work[b] - work[a]
        loads[owner[b]] += work[a] - work[b]
        owner[a], owner[b] = owner[b], owner[a]


def _after(loads: Sequence[float], owner: Sequence[int], work: Sequence[float], pair: tuple[int, int]) -> list[float]:
    """What the ranks would have to do, the busiest first."""
    a, b = pair
    changed = list(loads)
    changed[owner[a]] += work[b] - work[a]
    changed[owner[b]] += work[a] - work[b]
    return sorted(changed, reverse=True)
