"""zb-v, v-half, v-min, dualpipe-v: two stages a rank, in a V (rank r owns stages r and 2 p - 1 - r), backwards split in I and W.

::

    zb-v, rank 0   0F0 0F1 0F2     3F0 3I0 3W0 0F3 0I0 0W0 3F1 3I1 3W1 ...
          rank 1       1F0 2F0 1F1 2F1 2I0 2W0 1F2 2I1 2W1 1I0 1W0 ...

A microbatch turns around on the last rank and ends on the first, so first and last rank hold its residuals equally long: memory is
the same on every rank, and can be chosen.

==========  ========================================  ===================================
name        bubble in slots, F = I = W = 1 a stage    residuals, in microbatches of a rank
==========  ========================================  ===================================
``zb-v``    p - 1 (*)                                 min(m, p)
``v-half``  (7 p - 8 - p % 2) / 2                     (p + 2) // 2
``v-min``   4 p - 5 + (p % 3 == 0)                    (p + 4) // 3
==========  ========================================  ===================================

The step without a bubble takes 6 m slots; formulae for p >= 2, m >= 2 p.
(*) and no rank idles between its first and its last action.

zb-v's order is PyTorch's ``ScheduleZBVZeroBubble``. v-half and v-min repeat one *building block*, the path of a single
microbatch, every six slots: the time a microbatch spends between F and W, over six, is what a rank holds. In v-min it moves on
at once, one slot a stage; in v-half going down the V takes two. The slots at the turns make the blocks of all microbatches mesh
on every rank. The last bits of gradients are the same as in zb-h1 (see ``zero_bubble``).

References: Qi et al., Zero Bubble Pipeline Parallelism, arXiv:2401.10241, section 6; Qi et al., Pipeline Parallelism with
Controllable Memory, arXiv:2405.15362.
"""

from collections import Counter, deque
from typing import NamedTuple

from jaxpp.schedule.action import Action, Kind
from jaxpp.schedule.base import Schedule
from jaxpp.schedule.clock import ActionRow

_PERIOD = 6


def zb_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """As many forwards first as it takes to never wait for a cotangent."""
    full = max(num_microbatches, 2 * num_ranks - 1)
    rows = (_zb_v_row(rank, num_ranks, full) for rank in range(num_ranks))
    return _v("zb-v", num_ranks, tuple(tuple(a for a in row if a.microbatch < num_microbatches) for row in rows))


def _v(name: str, num_ranks: int, rows: tuple[ActionRow, ...]) -> Schedule:
    return Schedule(name, rows, (*range(num_ranks), *reversed(range(num_ranks))))


def _zb_v_row(rank: int, num_ranks: int, num_microbatches: int) -> list[Action]:
    after, m = num_ranks - rank, num_microbatches
    down = {kind: iter([Action(rank, kind, i) for i in range(m)]) for kind in Kind}
    up = {kind: iter([Action(2 * num_ranks - 1 - rank, kind, i) for i in range(m)]) for kind in Kind}
    plan = [
        (2 * after - 1, [down[Kind.F]]),
        (rank, [up[Kind.F], down[Kind.F]]),
        (after, [up[Kind.F], up[Kind.I], up[Kind.W]]),
        (m - 2 * num_ranks + rank + 1, [down[Kind.F], down[Kind.I], down[Kind.W], up[Kind.F], up[Kind.I], up[Kind.W]]),
        (after - 1, [down[Kind.I], down[Kind.W], up[Kind.F], up[Kind.I], up[Kind.W]]),
        (rank, [down[Kind.I], up[Kind.I]]),
        (after, [down[Kind.I], down[Kind.W]]),
        (m, [up[Kind.W]]),
        (m, [down[Kind.W]]),
    ]
    return [action for times, kinds in plan for _ in range(times) for kind in kinds if (action := next(kind, None))]


class _Block(NamedTuple):
    """The path of one microbatch, in slots.

    Attributes:
        steps: from one rank to the next, for F down the V, F up, I down (back through the upper half), I up.
        turns: from the last F down to the first F up; from the last F to the first I; from the last I down to the first I up.
    """

    steps: tuple[int, int, int, int]
    turns: tuple[int, int, int]

    def starts(self, rank: int, num_ranks: int) -> tuple[int, int, int, int]:
        """When the rank runs F of its lower stage, F and I of its upper, I of its lower."""
        last = num_ranks - 1
        (forth, up, back, home), (first, second, third) = self.steps, self.turns
        top = forth * last + first
        middle = top + up * last + second
        end = middle + back * last + third
        return forth * rank, top + up * (last - rank), middle + back * rank, end + home * (last - rank)


def v_half(num_ranks: int, num_microbatches: int) -> Schedule:
    """Half of 1f1b's residuals, for about half of its bubble."""
    turns = (2, 1, 1) if num_ranks % 2 else (4, 1, 5)
    return _repeat("v-half", _Block((2, 1, 2, 1), turns), num_ranks, num_microbatches)


def v_min(num_ranks: int, num_microbatches: int) -> Schedule:
    """A third of 1f1b's residuals, for about two thirds of its bubble."""
    turns = (1, 1, 1) if num_ranks % 3 else (3, 1, 3)
    return _repeat("v-min", _Block((1, 1, 1, 1), turns), num_ranks, num_microbatches)


def _repeat(name: str, block: _Block, num_ranks: int, num_microbatches: int) -> Schedule:
    """The block of every microbatch, a period apart; weight gradients in the first slots left free."""
    rows = []
    for rank in range(num_ranks):
        down, up = rank, 2 * num_ranks - 1 - rank
        path = zip(block.starts(rank, num_ranks), (down, up, up, down), (Kind.F, Kind.F, Kind.I, Kind.I), strict=True)
        slots = {start + _PERIOD * i: Action(stage, kind, i) for start, stage, kind in path for i in range(num_microbatches)}
        rows.append(_fill(slots))
    return _v(name, num_ranks, tuple(rows))


def _fill(slots: dict[int, Action]) -> ActionRow:
    row: list[Action] = []
    owed: deque[Action] = deque()
    for slot in range(min(slots), max(slots) + 1):
        if slot in slots:
            row.append(slots[slot])
            owed += [row[-1]._replace(kind=Kind.W)] * (row[-1].kind == Kind.I)
        elif owed:
            row.append(owed.popleft())
    return (*row, *owed)


def dualpipe_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """The forward of one run against the backward of the other; two phases to fill, two to turn around, one steady, three to drain.

    ::

        rank 0   0F0 0F1 0F2     3F0 3I0 3W0 3F1 0F3 3B1     3F2 0B0     3B2 ...
        rank 1       1F0 2F0 1F1 2F1 2I0 2W0 2F2 1F2 2B0 ...

    DeepSeek's schedule for overlapping all-to-all with compute: in its main part each forward stands beside a backward of the
    rank's other stage. Here the two run one after the other; on a GPU their kernels may still overlap with each other's transfers.
    Filling and draining is shortened with I and W as in zb-h1.

    With F = I = W = 1 a stage, makespan 6 m + p - 1, the bubble of zb-v; residuals of 2 p + 1 stages, half a microbatch more than
    1f1b. Needs at least as many microbatches as stages (2 p). The order is PyTorch's ``ScheduleDualPipeV``, its overlapped pairs
    written F, then B. The paper's bubble, (p - 1) (F&B + B - 3 W), with F&B = F + B for a pair that does not overlap, is an upper
    bound here: at F = I = W = 1 it gives 2 (p - 1) slots, and the clock p - 1. Some backwards are split and some are not, so the
    last bits of gradients are neither 1f1b's nor zb-h1's.

    Reference: DeepSeek-AI, DeepSeek-V3, arXiv:2412.19437, and the DualPipe notes on the cut-in-half variant.
    """
    return _v("dualpipe-v", num_ranks, tuple(_dualpipe_row(rank, num_ranks, num_microbatches) for rank in range(num_ranks)))


def _dualpipe_row(rank: int, num_ranks: int, num_microbatches: int) -> ActionRow:
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
