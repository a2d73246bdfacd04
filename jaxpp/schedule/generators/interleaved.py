"""interleaved: 1F1B with v stages on each rank, dealt round robin, so that a microbatch passes every rank v times.

::

    rank 0   0F0 0F1 2F0 2F1 0F2 0F3     2B0 2F2 2B1 ...
    rank 1       1F0 1F1 3F0 3F1 3B0 1F2 3B1 1F3 1B0 ...

Filling and draining goes through stages 1/v as long. Rank r warms up with (v - 1) k + 2 (p - r - 1) forwards, k microbatches at a
time through each of its stages (k = p where p divides m), then alternates one forward, one backward.

Bubble (p - 1) / (v m + p - 1) of the step; residuals of p + (p - 1) / v microbatches' full share on rank 0; v times the transfers.
The number of microbatches must split into max(1, m // p) equal rounds. The order is PyTorch's ``ScheduleInterleaved1F1B``.

Reference: Narayanan et al., Efficient Large-Scale Language Model Training, arXiv:2104.04473, section 2.2.2.
"""

from jaxpp.schedule.action import Action, Kind
from jaxpp.schedule.base import Schedule
from jaxpp.schedule.clock import ActionRow

__all__ = ["can_interleave", "interleaved"]


def can_interleave(num_ranks: int, num_microbatches: int) -> bool:
    """Whether the microbatches split into equal rounds of about ``num_ranks``."""
    return num_microbatches % _rounds(num_ranks, num_microbatches) == 0


def interleaved(num_ranks: int, num_microbatches: int, stages_per_rank: int) -> Schedule:
    """Each rank warms up far enough that its last stage can alternate, then alternates over all its stages."""
    rows = tuple(_row(rank, num_ranks, num_microbatches, stages_per_rank) for rank in range(num_ranks))
    return Schedule("interleaved", rows, tuple(range(num_ranks)) * stages_per_rank)


def _rounds(num_ranks: int, num_microbatches: int) -> int:
    return max(1, num_microbatches // num_ranks)


def _row(rank: int, num_ranks: int, num_microbatches: int, stages_per_rank: int) -> ActionRow:
    size = num_microbatches // _rounds(num_ranks, num_microbatches)
    stages = [rank + num_ranks * k for k in range(stages_per_rank)]
    forwards = _deal(Kind.F, stages, num_microbatches, size)
    backwards = _deal(Kind.B, stages[::-1], num_microbatches, size)
    warm_up = min(len(forwards), (stages_per_rank - 1) * size + 2 * (num_ranks - rank - 1))
    row = forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        row += [forward, backward]
    return (*row, *backwards[len(forwards) - warm_up :])


def _deal(kind: Kind, stages: list[int], num_microbatches: int, size: int) -> list[Action]:
    """Rounds of ``size`` microbatches, each round through every stage before the next begins."""
    rounds = range(0, num_microbatches, size)
    return [Action(stage, kind, first + k) for first in rounds for stage in stages for k in range(size)]
