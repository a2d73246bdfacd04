"""1f1b: as soon as a microbatch can go back, it does. The bubble of gpipe, the memory of the pipeline's depth.

::

    rank 0   F0 F1 F2       B0    F3 B1    B2    B3
    rank 1      F0 F1    B0    F2 B1    F3 B2    B3
    rank 2         F0 B0    F1 B1    F2 B2    F3 B3    (B takes two slots; not to scale)

Rank r warms up with p - r - 1 forwards, then alternates one forward, one backward (steady), then drains (cool_down).
Bubble (p - 1) / (m + p - 1); residuals of min(m, p - r) microbatches on rank r. The order is the one that PyTorch's
``Schedule1F1B`` runs; the table it prints differs on the last rank, where it begins with microbatch 1.

Reference: Narayanan et al., Efficient Large-Scale Language Model Training, arXiv:2104.04473, section 2.2.1 (PipeDream-Flush).
"""

from jaxpp.schedule.action import Action, Kind
from jaxpp.schedule.base import Schedule
from jaxpp.schedule.clock import ActionRow

__all__ = ["one_f_one_b"]


def one_f_one_b(num_ranks: int, num_microbatches: int) -> Schedule:
    """Each rank keeps at most ``num_ranks - rank`` microbatches in flight."""
    return Schedule("1f1b", tuple(_row(rank, num_ranks, num_microbatches) for rank in range(num_ranks)))


def _row(rank: int, num_ranks: int, num_microbatches: int) -> ActionRow:
    warm_up = min(num_ranks - rank - 1, num_microbatches)
    row = [Action(rank, Kind.F, i) for i in range(warm_up)]
    for i in range(num_microbatches - warm_up):
        row += [Action(rank, Kind.F, warm_up + i), Action(rank, Kind.B, i)]
    row += [Action(rank, Kind.B, i) for i in range(num_microbatches - warm_up, num_microbatches)]
    return tuple(row)
