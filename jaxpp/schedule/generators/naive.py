"""naive: one microbatch at a time, through all stages and back. The textbook picture of an idle pipeline.

::

    rank 0   F0             B0  F1             B1
    rank 1       F0     B0          F1     B1
    rank 2          F0B0               F1B1    (B takes two slots; not to scale)

Bubble (p - 1) / p, whatever the number of microbatches; residuals of one microbatch on every rank.
"""

from jaxpp.schedule.action import Action, Kind
from jaxpp.schedule.base import Schedule

__all__ = ["naive"]


def naive(num_ranks: int, num_microbatches: int) -> Schedule:
    """Each rank alternates F and B, a microbatch starting only when the one before it is done everywhere."""
    rows = tuple(
        tuple(Action(rank, kind, i) for i in range(num_microbatches) for kind in (Kind.F, Kind.B)) for rank in range(num_ranks)
    )
    return Schedule("naive", rows)
