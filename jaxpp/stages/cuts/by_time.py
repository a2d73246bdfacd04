"""Where to cut for the shortest step, where it was measured what sends cost.

The step is predicted as ``(num_turns - 1) * L + T + 2 * (h_1 + h_2 + ...)``, where L is the largest stage, T the sum of all stages,
and h_b the time of a send across boundary b, while the pipeline fills and drains. ``Links.waiting`` is the part of the sends that
the schedule waits for in between: it counts as a stage's own time. Stages within ``SLACK`` of the least possible count as equal, so
with free links the cut is that of ``balance``.
"""

from dataclasses import dataclass, replace

import numpy as np

from jaxpp.stages.cuts.balance import SLACK, Cuts, balance, balance_for_sends, least_largest, prefix_sums
from jaxpp.stages.loss.traced_loss import TracedLoss

_EXACT = 2048  # Up to how many positions times stages every size is tried; above, sizes that are ``SLACK`` apart


@dataclass(frozen=True)
class Links:
    """What sends between neighbouring stages cost, and how the schedule waits for them."""

    per_send: tuple[float, ...]  # seconds of a send without its bytes, for each boundary
    per_byte: tuple[float, ...]  # seconds of a byte, for each boundary
    waiting: float  # which part of a send across its boundaries a stage waits for at every microbatch
    num_turns: int  # how many forwards a rank runs in a step, and as many backwards

    def scaled(self, factor: float) -> "Links":
        """The same in another unit of time."""
        per_send, per_byte = (tuple(factor * seconds for seconds in costs) for costs in (self.per_send, self.per_byte))
        return replace(self, per_send=per_send, per_byte=per_byte)

    def hops(self, loss: TracedLoss) -> np.ndarray:
        """``hops[stage, end]``: what a send after a stage takes that ends at a position; 0 after the last stage."""
        moved = np.asarray(loss.boundary_bytes, float)
        rows = [send + byte * moved for send, byte in zip(self.per_send, self.per_byte, strict=True)]
        return np.asarray([*rows, np.zeros(len(moved))])


def balance_time(loss: TracedLoss, links: Links) -> Cuts:
    """Cut for the shortest predicted step; ``links`` are in the unit of the loss's costs."""
    num_stages = len(links.per_send) + 1
    best = balance(loss, num_stages)
    if num_stages == 1 or not any((*links.per_send, *links.per_byte)):
        return best
    hops, least = links.hops(loss), least_largest(loss, num_stages) or 0.0
    step = 1e-9 if len(loss.spine) * num_stages <= _EXACT else SLACK
    shortest, most = predicted(loss, best, links), np.inf
    while most > least:
        cuts = balance_for_sends(loss, hops, links.waiting, min(most, 2 * float(prefix_sums(loss)[-1]) + 2 * float(hops.max())))
        if cuts is None:
            break
        time = predicted(loss, cuts, links)
        if time < shortest:
            best, shortest = cuts, time
        largest = _largest(loss, cuts, links)
        if largest <= (1 + SLACK) * least:
            break
        most = largest * (1 - step)
    return best


def predicted(loss: TracedLoss, cuts: Cuts, links: Links) -> float:
    """The time of a step, in the unit of the loss's costs (and of the links)."""
    least = least_largest(loss, len(cuts) + 1) or 0.0
    largest = max(_largest(loss, cuts, links), (1 + SLACK) * least)
    sends = sum(float(links.hops(loss)[stage, cut]) for stage, cut in enumerate(cuts))
    return (links.num_turns - 1) * largest + sum(loss.costs) + 2 * sends


def _largest(loss: TracedLoss, cuts: Cuts, links: Links) -> float:
    total, hops = prefix_sums(loss), links.hops(loss)
    ends = [0, *cuts, len(loss.spine)]
    own = np.diff(total[ends])
    crossing = np.asarray([0.0, *(hops[stage, cut] for stage, cut in enumerate(cuts)), 0.0])
    return float((own + links.waiting * (crossing[:-1] + crossing[1:])).max())
