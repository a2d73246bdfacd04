"""The schedules that place stages round robin: stage s on rank s modulo p. Those in a V are in ``v_shape.py``.

With p ranks, v stages on each and m microbatches, the drawings show which microbatch each rank runs when; B takes two slots, I
and W one each (not to scale). A new schedule is a function here, or in ``v_shape.py``, and a line in ``registry.py``.
"""

from jaxpp.schedule.action import Action, Kind
from jaxpp.schedule.base import Schedule
from jaxpp.schedule.clock import ActionRow


def naive(num_ranks: int, num_microbatches: int) -> Schedule:
    """One microbatch at a time, through all stages and back: the textbook picture of an idle pipeline.

    ::

        rank 0   F0             B0  F1             B1
        rank 1       F0     B0          F1     B1
        rank 2          F0B0               F1B1

    Bubble (p - 1) / p, whatever the number of microbatches; residuals of one microbatch on every rank.
    """
    order = [(kind, i) for i in range(num_microbatches) for kind in (Kind.F, Kind.B)]
    return Schedule("naive", tuple(tuple(Action(rank, *each) for each in order) for rank in range(num_ranks)))


def gpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """All forwards, then all backwards.

    ::

        rank 0   F0 F1 F2 F3          B0 B1 B2 B3
        rank 1      F0 F1 F2 F3    B0 B1 B2 B3

    Bubble (p - 1) / (m + p - 1); residuals of all m microbatches on every rank. The order is PyTorch's ``ScheduleGPipe``.

    Reference: Huang et al., GPipe, arXiv:1811.06965.
    """
    order = [(kind, i) for kind in (Kind.F, Kind.B) for i in range(num_microbatches)]
    return Schedule("gpipe", tuple(tuple(Action(rank, *each) for each in order) for rank in range(num_ranks)))


def one_f_one_b(num_ranks: int, num_microbatches: int) -> Schedule:
    """As soon as a microbatch can go back, it does: the bubble of gpipe, the memory of the pipeline's depth.

    ::

        rank 0   F0 F1 F2       B0    F3 B1    B2    B3
        rank 1      F0 F1    B0    F2 B1    F3 B2    B3
        rank 2         F0 B0    F1 B1    F2 B2    F3 B3

    Rank r warms up with p - r - 1 forwards, then alternates one forward, one backward (steady), then drains (cool_down).
    Bubble (p - 1) / (m + p - 1); residuals of min(m, p - r) microbatches on rank r. The order is the one that PyTorch's
    ``Schedule1F1B`` runs; the table it prints differs on the last rank, where it begins with microbatch 1.

    Reference: Narayanan et al., Efficient Large-Scale Language Model Training, arXiv:2104.04473, section 2.2.1 (PipeDream-Flush).
    """

    def row(rank: int) -> ActionRow:
        forwards, backwards = ([Action(rank, kind, i) for i in range(num_microbatches)] for kind in (Kind.F, Kind.B))
        return _alternate(forwards, backwards, num_ranks - rank - 1)

    return Schedule("1f1b", tuple(map(row, range(num_ranks))))


def _alternate(forwards: list[Action], backwards: list[Action], warm_up: int) -> ActionRow:
    """So many forwards, then one forward and one backward in turn, then the other backwards."""
    warm_up = min(len(forwards), warm_up)
    row = forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        row += [forward, backward]
    return (*row, *backwards[len(forwards) - warm_up :])


def interleaved(num_ranks: int, num_microbatches: int, stages_per_rank: int) -> Schedule:
    """1F1B with v stages on each rank, so that a microbatch passes every rank v times.

    ::

        rank 0   0F0 0F1 2F0 2F1 0F2 0F3     2B0 2F2 2B1 ...
        rank 1       1F0 1F1 3F0 3F1 3B0 1F2 3B1 1F3 1B0 ...

    Filling and draining goes through stages 1/v as long. Rank r warms up with (v - 1) k + 2 (p - r - 1) forwards, k microbatches
    at a time through each of its stages (k = p where p divides m), then alternates one forward, one backward.

    Bubble (p - 1) / (v m + p - 1) of the step; residuals of p + (p - 1) / v microbatches' full share on rank 0; v times the
    transfers. The number of microbatches must split into max(1, m // p) equal rounds. The order is PyTorch's
    ``ScheduleInterleaved1F1B``.

    Reference: Narayanan et al., Efficient Large-Scale Language Model Training, arXiv:2104.04473, section 2.2.2.
    """
    size = num_microbatches // _rounds(num_ranks, num_microbatches)

    def deal(kind: Kind, stages: list[int]) -> list[Action]:
        """Rounds of ``size`` microbatches, each round through every stage before the next begins."""
        rounds = range(0, num_microbatches, size)
        return [Action(stage, kind, first + k) for first in rounds for stage in stages for k in range(size)]

    def row(rank: int) -> ActionRow:
        stages, warm_up = _stages_of(rank, num_ranks, stages_per_rank), (stages_per_rank - 1) * size + 2 * (num_ranks - rank - 1)
        return _alternate(deal(Kind.F, stages), deal(Kind.B, stages[::-1]), warm_up)

    return Schedule("interleaved", tuple(map(row, range(num_ranks))), tuple(range(num_ranks)) * stages_per_rank)


def can_interleave(num_ranks: int, num_microbatches: int) -> bool:
    """Whether the microbatches split into equal rounds of about ``num_ranks``."""
    return num_microbatches % _rounds(num_ranks, num_microbatches) == 0


def _rounds(num_ranks: int, num_microbatches: int) -> int:
    return max(1, num_microbatches // num_ranks)


def _stages_of(rank: int, num_ranks: int, stages_per_rank: int) -> list[int]:
    return [rank + num_ranks * k for k in range(stages_per_rank)]


def looped_bfs(num_ranks: int, num_microbatches: int, stages_per_rank: int) -> Schedule:
    """The order of gpipe with v stages on each rank: all microbatches through one stage, then the next; backwards reversed.

    ::

        rank 0   0F0 0F1 0F2 2F0 2F1 2F2                 2B2     2B1     2B0     0B2     0B1     0B0
        rank 1       1F0 1F1 1F2 3F0 3F1 3F2 3B2     3B1     3B0     1B2     1B1     1B0

    The bubble of interleaved, the memory of gpipe; but each stage's parameters are wanted in one stretch, which is what fully
    sharded parameters like, and any number of microbatches will do.

    Bubble (p - 1) / (v m + p - 1) of the step; residuals of all m microbatches on every rank. The order is PyTorch's
    ``ScheduleLoopedBFS``: backwards run from the last microbatch to the first, so gradients are summed in reverse, and their last
    bits differ from those of the other schedules.

    Reference: Lamy-Poirier, Breadth-First Pipeline Parallelism, arXiv:2211.05953.
    """
    rows = []
    for rank in range(num_ranks):
        stages = _stages_of(rank, num_ranks, stages_per_rank)
        forwards = [Action(stage, Kind.F, i) for stage in stages for i in range(num_microbatches)]
        rows.append((*forwards, *(action._replace(kind=Kind.B) for action in reversed(forwards))))
    return Schedule("looped-bfs", tuple(rows), tuple(range(num_ranks)) * stages_per_rank)


def zb_h1(num_ranks: int, num_microbatches: int) -> Schedule:
    """The backward split in two, and the half for which nobody waits put where 1f1b idles, within 1f1b's memory.

    I makes the input's cotangent, which another rank waits for; W the parameters' gradients::

        rank 0      F0 F1 F2       I0 W0 F3 I1 W1    I2 W2    I3 W3
        rank 1         F0 F1    I0 F2 I1 W0 F3 I2 W1    I3 W2 W3
        rank 2            F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

    Rank r has p - r forwards in flight and lags r weight gradients behind, so residuals of min(m, p) microbatches on every rank (a
    residual lives until W). Bubble, with F = I = W = 1, (p - 1) / (3 m + p - 1).

    I and W are compiled apart, so XLA may fuse and round otherwise than in B: the last bits of a gradient may differ from 1f1b's,
    not between the schedules that split every backward. (In a bfloat16 model these are bfloat16's last bits.) The order is that of
    PyTorch's ``ScheduleInterleavedZeroBubble`` (ZB1P) at one stage a rank.

    Reference: Qi et al., Zero Bubble Pipeline Parallelism, arXiv:2401.10241.
    """
    return Schedule("zb-h1", tuple(_split_row(r, num_microbatches, num_ranks - r - 1, lag=r) for r in range(num_ranks)))


def zb_h2(num_ranks: int, num_microbatches: int) -> Schedule:
    """zb-h1 with twice the forwards in flight, so that the first cotangent never finds a rank idle.

    Rank r has 2 (p - r) - 1 forwards in flight and lags 2 r weight gradients behind, so residuals of min(m, 2 p - 1) microbatches
    on every rank. No rank idles between its first and its last action (m >= 2 p - 1), and the ranks end as staggered as they began:
    the makespan is that of zb-h1, but where steps follow one another without a barrier nothing is lost. PyTorch has no generator
    of it.
    """
    rows = (_split_row(r, num_microbatches, 2 * (num_ranks - r - 1), lag=2 * r) for r in range(num_ranks))
    return Schedule("zb-h2", tuple(rows))


def _split_row(rank: int, num_microbatches: int, warm_up: int, lag: int) -> ActionRow:
    """``warm_up`` forwards, then one forward, one input gradient, and the weight gradient of ``lag`` microbatches before."""
    row = [Action(rank, Kind.F, i) for i in range(min(warm_up, num_microbatches))]
    for i in range(num_microbatches):
        if i + warm_up < num_microbatches:
            row.append(Action(rank, Kind.F, i + warm_up))
        row.append(Action(rank, Kind.I, i))
        if i >= lag:
            row.append(Action(rank, Kind.W, i - lag))
    return (*row, *(Action(rank, Kind.W, i) for i in range(max(0, num_microbatches - lag), num_microbatches)))
