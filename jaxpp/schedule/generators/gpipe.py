"""gpipe: all forwards, then all backwards.

::

    rank 0   F0 F1 F2 F3          B0 B1 B2 B3
    rank 1      F0 F1 F2 F3    B0 B1 B2 B3    (B takes two slots; not to scale)

Bubble (p - 1) / (m + p - 1); residuals of all m microbatches on every rank. The order is PyTorch's ``ScheduleGPipe``.

Reference: Huang et al., GPipe, arXiv:1811.06965.
"""

from jaxpp.schedule.action import Action, Kind
from jaxpp.schedule.base import Schedule

__all__ = ["gpipe"]


def gpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """Each rank runs F of every microbatch in order, then B of every microbatch in the same order."""
    rows = tuple(
        tuple(Action(rank, kind, i) for kind in (Kind.F, Kind.B) for i in range(num_microbatches)) for rank in range(num_ranks)
    )
    return Schedule("gpipe", rows)
