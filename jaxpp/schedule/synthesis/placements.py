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
    owner, whole = list(owner), sum(work) or 1.0

    def busiest(pair: tuple[int, int] = (0, 0)) -> list[float]:
        """What the ranks have to do, the busiest first, if two stages change their ranks."""
        loads, (a, b) = [0.0] * num_ranks, pair
        for stage, rank in enumerate(owner):
            loads[rank] += work[b if stage == a else a if stage == b else stage]
        return sorted((round(load / whole, 9) for load in loads), reverse=True)  # rounding noise is no gain

    while True:
        loads, (a, b) = min((busiest(pair), pair) for pair in itertools.combinations_with_replacement(range(len(owner)), 2))
        if loads >= busiest():
            names = {rank: number for number, rank in enumerate(dict.fromkeys(owner))}
            return tuple(names[rank] for rank in owner)  # stage 0 lies on rank 0
        owner[a], owner[b] = owner[b], owner[a]
