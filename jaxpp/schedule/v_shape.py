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
from collections.abc import Sequence

from jaxpp.schedule.action import Action, Kind
from jaxpp.schedule.base import Schedule
from jaxpp.schedule.clock import ActionRow

_PERIOD = 6


def zb_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """As many forwards first as it takes to never wait for a cotangent."""
    full = max(num_microbatches, 2 * num_ranks - 1)
    rows = []
    for rank in range(num_ranks):
        after = num_ranks - rank
        phases = [
            (2 * after - 1, "dF"),
            (rank, "uF dF"),
            (after, "uF uI uW"),
            (full - 2 * num_ranks + rank + 1, "dF dI dW uF uI uW"),
            (after - 1, "dI dW uF uI uW"),
            (rank, "dI uI"),
            (after, "dI dW"),
            (full, "uW"),
            (full, "dW"),
        ]
        rows.append(tuple(a for a in _written(rank, num_ranks, phases) if a.microbatch < num_microbatches))
    return _v("zb-v", num_ranks, rows)


def _v(name: str, num_ranks: int, rows: Sequence[ActionRow]) -> Schedule:
    return Schedule(name, tuple(rows), (*range(num_ranks), *reversed(range(num_ranks))))


def _written(rank: int, num_ranks: int, phases: Sequence[tuple[int, str]]) -> ActionRow:
    """A row of phases, each so many times some words.

    ``dF`` is the next forward of the rank's stage on the way down the V, ``uI`` the next backward of its stage on the way up;
    ``dW`` is the weight gradient that its stage owes longest, ``W`` that of either stage; nothing if none is owed.
    """
    stages = {"d": rank, "u": 2 * num_ranks - 1 - rank}
    row, owed = list[Action](), list[Action]()
    following = Counter[tuple[int, bool]]()
    for times, words in phases:
        for word in words.split() * times:
            kind, stage = Kind(word[-1]), stages.get(word[0])
            if kind == Kind.W:
                due = next((action for action in owed if stage in (None, action.stage)), None)
                if due is not None:
                    owed.remove(due)
                    row.append(due)
                continue
            assert stage is not None  # only W goes without
            action = Action(stage, kind, following[stage, kind == Kind.F])
            following[stage, kind == Kind.F] += 1
            row.append(action)
            if kind == Kind.I:
                owed.append(action._replace(kind=Kind.W))
    return tuple(row)


def v_half(num_ranks: int, num_microbatches: int) -> Schedule:
    """Half of 1f1b's residuals, for about half of its bubble."""
    return _repeat("v-half", (2, 1, 2, 1), (2, 1, 1) if num_ranks % 2 else (4, 1, 5), num_ranks, num_microbatches)


def v_min(num_ranks: int, num_microbatches: int) -> Schedule:
    """A third of 1f1b's residuals, for about two thirds of its bubble."""
    return _repeat("v-min", (1, 1, 1, 1), (1, 1, 1) if num_ranks % 3 else (3, 1, 3), num_ranks, num_microbatches)


def _repeat(
    name: str, steps: tuple[int, int, int, int], turns: tuple[int, int, int], num_ranks: int, num_microbatches: int
) -> Schedule:
    """The block of every microbatch, a period apart; weight gradients in the first slots left free.

    A block takes so many slots for a step from one rank to the next, for F down the V, F up, I down (back through the upper half)
    and I up; and for the turns from the last F down to the first F up, on to the first I, and on to the first I up.
    """
    (forth, up, back, home), last = steps, num_ranks - 1
    top = forth * last + turns[0]
    middle = top + up * last + turns[1]
    end = middle + back * last + turns[2]
    rows = []
    for rank in range(num_ranks):
        above = 2 * num_ranks - 1 - rank
        path = (
            (forth * rank, rank, Kind.F),
            (top + up * (last - rank), above, Kind.F),
            (middle + back * rank, above, Kind.I),
            (end + home * (last - rank), rank, Kind.I),
        )
        slots = {start + _PERIOD * i: Action(stage, kind, i) for start, stage, kind in path for i in range(num_microbatches)}
        row: list[Action] = []
        owed: deque[Action] = deque()
        for slot in range(min(slots), max(slots) + 1):
            if slot in slots:
                row.append(slots[slot])
                owed += [row[-1]._replace(kind=Kind.W)] * (row[-1].kind == Kind.I)
            elif owed:
                row.append(owed.popleft())
        rows.append((*row, *owed))
    return _v(name, num_ranks, rows)


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
    rows = []
    for rank in range(num_ranks):
        after = num_ranks - rank - 1
        phases = [
            (2 * after, "dF"),
            (rank + 1, "dF uF"),
            (after, "uI W uF"),
            (num_microbatches - 2 * num_ranks + rank + 1, "dF uB uF dB"),
            (after, "uB uF dB"),
            # From the middle on, weight gradients are put off.
            *((1, "ud"[k % 2] + ("B" if k <= rank else "I")) for k in range(2 * (rank + 1))),
            (after, "W dI"),
            (num_microbatches, "W W"),
        ]
        rows.append(_written(rank, num_ranks, phases))
    return _v("dualpipe-v", num_ranks, rows)
