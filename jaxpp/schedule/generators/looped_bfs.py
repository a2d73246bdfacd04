"""looped-bfs: gpipe with v stages on each rank, dealt round robin; all microbatches through one stage, then the next.

::

    rank 0   0F0 0F1 0F2 2F0 2F1 2F2                 2B2     2B1     2B0     0B2     0B1     0B0
    rank 1       1F0 1F1 1F2 3F0 3F1 3F2 3B2     3B1     3B0     1B2     1B1     1B0

The bubble of interleaved, the memory of gpipe; but each stage's parameters are wanted in one stretch, which is what fully sharded
parameters like, and any number of microbatches will do.

Bubble (p - 1) / (v m + p - 1) of the step; residuals of all m microbatches on every rank. The order is PyTorch's
``ScheduleLoopedBFS``: backwards run from the last microbatch to the first, so gradients are summed in reverse, and their last bits
differ from those of the other schedules.

Reference: Lamy-Poirier, Breadth-First Pipeline Parallelism, arXiv:2211.05953.
"""

from jaxpp.schedule.action import Action, Kind
from jaxpp.schedule.base import Schedule

__all__ = ["looped_bfs"]


def looped_bfs(num_ranks: int, num_microbatches: int, stages_per_rank: int) -> Schedule:
    """All forwards, stage by stage, then all backwards, stage by stage, both in reverse."""
    rows = []
    for rank in range(num_ranks):
        stages = [rank + num_ranks * k for k in range(stages_per_rank)]
        forwards = [Action(stage, Kind.F, i) for stage in stages for i in range(num_microbatches)]
        rows.append((*forwards, *(Action(a.stage, Kind.B, a.microbatch) for a in reversed(forwards))))
    return Schedule("looped-bfs", tuple(rows), tuple(range(num_ranks)) * stages_per_rank)
