"""Schedules of forwards only: predictions, and generations, whose tokens return from the last stage to the first."""

from jaxpp.errors.tracebacks import entry
from jaxpp.schedule.action import Action, Kind
from jaxpp.schedule.base import Schedule
from jaxpp.schedule.validate import check_counts


@entry
def forward(num_ranks: int, num_microbatches: int) -> Schedule:
    """The order of predictions: F of every microbatch, one stage on each rank; nothing trains.

    ::

        rank 0   F0 F1 F2 F3
        rank 1      F0 F1 F2 F3
        rank 2         F0 F1 F2 F3

    With equal stages of time T, m microbatches take (m + p - 1) T on p ranks, a bubble of (p - 1) / (m + p - 1). Nothing is kept
    for a backward. A stream of batches is one such schedule with the microbatches of all of them, so the pipeline fills and drains
    once in all. Reference: Huang et al., GPipe, arXiv:1811.06965, section 2.3.

    Args:
        num_ranks: ranks, at least 1.
        num_microbatches: microbatches, at least 1; of a stream, those of all its batches.

    Raises:
        ScheduleError: a count below 1.

    Example:
        >>> from jaxpp.schedule import forward, simulate
        >>> print(forward(num_ranks=2, num_microbatches=3), end="")
        forward: 2 ranks, 2 stages, 3 microbatches
        rank  0    1    2    3
        0     0F0  0F1  0F2
        1          1F0  1F1  1F2
        >>> simulate(forward(2, 3)).bubble_fraction
        0.25
    """
    where = f"forward({num_ranks!r}, {num_microbatches!r})"
    check_counts(where, {"num_ranks": num_ranks, "num_microbatches": num_microbatches})
    return Schedule("forward", tuple(tuple(Action(rank, Kind.F, i) for i in range(num_microbatches)) for rank in range(num_ranks)))


@entry
def ring(num_ranks: int, num_groups: int, num_turns: int) -> Schedule:
    """The order of a generation: in every turn each group makes one pass and gets one token, one stage on each rank.

    ::

        rank 0   a0 b0 c0 a1 b1 c1 a2 b2 c2
        rank 1      a0 b0 c0 a1 b1 c1 a2 b2 c2          (three groups a, b, c; turns 0, 1, 2)
        rank 2         a0 b0 c0 a1 b1 c1 a2 b2 c2

    A group is the sequences that go through the stages together. A sequence has no next token before it has this one, so a group
    alone keeps one rank of p busy; with g groups, the others compute while the token of one is on its way.

    With equal stages of time T and n turns, the ring takes (n g + p - 1) T if g >= p, where no rank is idle between its first pass
    and its last, and (n p + g - 1) T if g <= p, where each rank is busy g / p of the time. If each transfer takes c, the token's
    way back included, at least p + p c / T groups hide them.

    Passes are numbered as microbatches are: that of group j in turn t is ``t * num_groups + j``, and it waits for pass
    ``(t - 1) * num_groups + j`` on the last stage. Reference: Yu et al., Orca: A Distributed Serving System for Transformer-Based
    Generative Models, OSDI 2022.

    Args:
        num_ranks: ranks, at least 1.
        num_groups: groups in flight, at least 1; as many as ranks, or more, keep all ranks busy.
        num_turns: tokens that each group gets, at least 1.

    Raises:
        ScheduleError: a count below 1.

    Example:
        >>> from jaxpp.schedule import ring, simulate
        >>> print(ring(num_ranks=3, num_groups=2, num_turns=2), end="")
        ring: 3 ranks, 3 stages, 2 groups, 2 turns
        rank  0    1    2    3    4    5    6
        0     0F0  0F1       0F2  0F3
        1          1F0  1F1       1F2  1F3
        2               2F0  2F1       2F2  2F3
        >>> simulate(ring(3, 3, 100)).own_bubble
        (0, 0, 0)
    """
    where = f"ring({num_ranks!r}, {num_groups!r}, {num_turns!r})"
    check_counts(where, {"num_ranks": num_ranks, "num_groups": num_groups, "num_turns": num_turns})
    passes = range(num_groups * num_turns)
    rows = tuple(tuple(Action(rank, Kind.F, i) for i in passes) for rank in range(num_ranks))
    return Schedule("ring", rows, num_groups=num_groups)
