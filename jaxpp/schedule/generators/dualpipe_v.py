"""dualpipe-v: two stages a rank, placed in a V, the forward of one run against the backward of the other.

::

    rank 0   0F0 0F1 0F2     3F0 3I0 3W0 3F1 0F3 3B1     3F2 0B0     3B2 ...
    rank 1       1F0 2F0 1F1 2F1 2I0 2W0 2F2 1F2 2B0 ...

DeepSeek's schedule for overlapping all-to-all with compute: in its main part each forward stands beside a backward of the rank's
other stage. Here the two run one after the other; on a GPU their kernels may still overlap with each other's transfers. Filling and
draining is shortened with I and W as in zb-h1.

With F = I = W = 1 a stage, makespan 6 m + p - 1, the bubble of zb-v; residuals of 2 p + 1 stages, half a microbatch more than
1f1b. Needs at least as many microbatches as stages (2 p). The order is PyTorch's ``ScheduleDualPipeV``, its overlapped pairs
written F, then B. The paper's bubble, (p - 1) (F&B + B - 3 W), with F&B = F + B for a pair that does not overlap, is an upper
bound here: at F = I = W = 1 it gives 2 (p - 1) slots, and the clock p - 1. Some backwards are split and some are not, so the last
bits of gradients are neither 1f1b's nor zb-h1's.

Reference: DeepSeek-AI, DeepSeek-V3, arXiv:2412.19437, and the DualPipe notes on the cut-in-half variant.
"""

from collections import Counter, deque

from jaxpp.schedule.action import Action, Kind
from jaxpp.schedule.base import Schedule
from jaxpp.schedule.clock import ActionRow

__all__ = ["dualpipe_v"]


def dualpipe_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """Eight phases a rank: two to fill, two to turn around, one steady, three to drain."""
    rows = tuple(_row(rank, num_ranks, num_microbatches) for rank in range(num_ranks))
    return Schedule("dualpipe-v", rows, (*range(num_ranks), *reversed(range(num_ranks))))


def _row(rank: int, num_ranks: int, num_microbatches: int) -> ActionRow:
    down, up, after = rank, 2 * num_ranks - 1 - rank, num_ranks - rank - 1
    writer = _Writer()
    for _ in range(2 * after):
        writer.write(down, Kind.F)
    for _ in range(rank + 1):
        writer.write(down, Kind.F)
        writer.write(up, Kind.F)
    for _ in range(after):
        writer.write(up, Kind.I)
        writer.write_weight()
        writer.write(up, Kind.F)
    for _ in range(num_microbatches - 2 * num_ranks + rank + 1):
        writer.write(down, Kind.F)
        writer.write(up, Kind.B)
        writer.write(up, Kind.F)
        writer.write(down, Kind.B)
    for _ in range(after):
        writer.write(up, Kind.B)
        writer.write(up, Kind.F)
        writer.write(down, Kind.B)
    for k in range(2 * (rank + 1)):  # from the middle on, weight gradients are put off
        writer.write(down if k % 2 else up, Kind.B if k <= rank else Kind.I)
    for _ in range(after):
        writer.write_weight()
        writer.write(down, Kind.I)
    while writer.owed:
        writer.write_weight()
    return tuple(writer.row)


class _Writer:
    """Writes a row: numbers the microbatches of each stage, and remembers the weight gradients still owed."""

    def __init__(self):
        self.row: list[Action] = []
        self.owed: deque[Action] = deque()
        self._next: Counter[tuple[int, bool]] = Counter()

    def write(self, stage: int, kind: Kind) -> None:
        """The next forward, or the next backward, of a stage."""
        counter = stage, kind == Kind.F
        self.row.append(Action(stage, kind, self._next[counter]))
        if kind == Kind.I:
            self.owed.append(Action(stage, Kind.W, self._next[counter]))
        self._next[counter] += 1

    def write_weight(self) -> None:
        """The weight gradient owed longest, if there is one."""
        if self.owed:
            self.row.append(self.owed.popleft())
