"""zb-h1, zb-h2: the backward split in two, and the half for which nobody waits put where 1f1b idles.

I makes the input's cotangent, which another rank waits for; W the parameters' gradients.

::

    zb-h1, rank 0   F0 F1 F2       I0 W0 F3 I1 W1    I2 W2    I3 W3
           rank 1      F0 F1    I0 F2 I1 W0 F3 I2 W1    I3 W2 W3
           rank 2         F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

``zb-h1`` keeps to 1f1b's memory: rank r has p - r forwards in flight and lags r weight gradients behind, so residuals of
min(m, p) microbatches on every rank (a residual lives until W). Bubble, with F = I = W = 1, (p - 1) / (3 m + p - 1).

``zb-h2`` fills the warm-up too: rank r has 2 (p - r) - 1 forwards in flight and lags 2 r weight gradients behind, so residuals of
min(m, 2 p - 1) microbatches on every rank. No rank idles between its first and its last action (m >= 2 p - 1), and the ranks end
as staggered as they began: the makespan is that of zb-h1, but where steps follow one another without a barrier nothing is lost.

I and W are compiled apart, so XLA may fuse and round otherwise than in B: the last bits of a gradient may differ from 1f1b's, not
between the schedules that split every backward. (In a bfloat16 model these are bfloat16's last bits.)

The order of zb-h1 is that of PyTorch's ``ScheduleInterleavedZeroBubble`` (ZB1P) at one stage a rank; zb-h2 has no generator there.

Reference: Qi et al., Zero Bubble Pipeline Parallelism, arXiv:2401.10241.
"""

from jaxpp.schedule.action import Action, Kind
from jaxpp.schedule.base import Schedule
from jaxpp.schedule.clock import ActionRow

__all__ = ["zb_h1", "zb_h2"]


def zb_h1(num_ranks: int, num_microbatches: int) -> Schedule:
    """1f1b's order of F and I, each rank's weight gradients as late as its memory allows."""
    return Schedule("zb-h1", tuple(_row(r, num_microbatches, num_ranks - r - 1, lag=r) for r in range(num_ranks)))


def zb_h2(num_ranks: int, num_microbatches: int) -> Schedule:
    """Twice the forwards in flight, so that the first cotangent never finds a rank idle."""
    return Schedule("zb-h2", tuple(_row(r, num_microbatches, 2 * (num_ranks - r - 1), lag=2 * r) for r in range(num_ranks)))


def _row(rank: int, num_microbatches: int, warm_up: int, lag: int) -> ActionRow:
    """``warm_up`` forwards, then one forward, one input gradient, and the weight gradient of ``lag`` microbatches before."""
    row = [Action(rank, Kind.F, i) for i in range(min(warm_up, num_microbatches))]
    for i in range(num_microbatches):
        if i + warm_up < num_microbatches:
            row.append(Action(rank, Kind.F, i + warm_up))
        row.append(Action(rank, Kind.I, i))
        if i >= lag:
            row.append(Action(rank, Kind.W, i - lag))
    return (*row, *(Action(rank, Kind.W, i) for i in range(max(0, num_microbatches - lag), num_microbatches)))
