"""forward: predictions. Every microbatch goes through all stages once, and nothing comes back.

::

    rank 0   F0 F1 F2 F3
    rank 1      F0 F1 F2 F3
    rank 2         F0 F1 F2 F3

With equal stages of time T, m microbatches take (m + p - 1) T on p ranks, a bubble of (p - 1) / (m + p - 1). Nothing is kept for a
backward. Batches that follow one another without a barrier, as in a stream, are one such schedule with the microbatches of all of
them, so they fill and drain the pipeline once in all. The order is that of the forwards of gpipe.

Reference: Huang et al., GPipe, arXiv:1811.06965, section 2.3.
"""

from jaxpp.errors.tracebacks import entry
from jaxpp.schedule.action import Action, Kind
from jaxpp.schedule.base import Schedule
from jaxpp.schedule.validate import check_counts

__all__ = ["forward"]


@entry
def forward(num_ranks: int, num_microbatches: int) -> Schedule:
    """The order of predictions: F of every microbatch, one stage on each rank; nothing trains.

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
