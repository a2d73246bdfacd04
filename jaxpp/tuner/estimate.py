"""What a family that was not measured may cost, by one that was; it decides which family is measured next, and nothing else.

A stage takes time in proportion to its part of the model and to the size of a microbatch, as does what it sends. To hand over an
action takes as long for any size. To recompute costs one more forward.
"""

import math
import statistics
from collections.abc import Mapping, Sequence

from jaxpp.schedule.action import Kind
from jaxpp.tuner.candidate import Family
from jaxpp.tuner.costs import FamilyCosts

__all__ = ["estimate", "nearest"]


def nearest(family: Family, known: Sequence[Family]) -> Family:
    """The measured family that is most like another one; the first if several are."""

    def distance(other: Family) -> tuple[float, float]:
        choices = sum(a != b for a, b in zip(family[2:], other[2:], strict=True))
        sizes = zip(family[:2], other[:2], strict=True)
        return choices, sum(abs(math.log(a / b)) for a, b in sizes)

    return min(known, key=distance)


def estimate(family: Family, other: Family, costs: FamilyCosts, num_ranks: int) -> FamilyCosts:
    """The costs of a family, of those of another one."""
    part = other.num_stages / family.num_stages
    size = other.num_microbatches / family.num_microbatches
    count = family.num_stages

    def every(values: Sequence[float], scale: float, number: int = count) -> tuple[float, ...]:
        return (scale * (statistics.fmean(values) if values else 0.0),) * number

    means = {kind: part * size * statistics.fmean(values) for kind, values in costs.actions.items()}
    handed = statistics.fmean(time for values in costs.dispatch.values() for time in values)
    works = _works(family, other, means)
    return FamilyCosts(
        actions={kind: (time,) * count for kind, time in works.items()},
        dispatch=dict.fromkeys(works, (handed,) * count),
        transfer=every(costs.transfer, size, count - 1),
        offload=every(costs.offload, part * size),
        offload_dispatch=every(costs.offload_dispatch, 1.0),
        before=costs.before,
        after=every(costs.after, part),
        after_dispatch=costs.after_dispatch / part,
        capacity=min(costs.capacity, num_ranks),
        overlap=costs.overlap,
    )


def _works(family: Family, other: Family, means: Mapping[Kind, float]) -> dict[Kind, float]:
    """Seconds of an action of each kind that a family runs, of the means of another that may split its backwards, or may not."""
    full = means[Kind.B] if Kind.B in means else means.get(Kind.I, 0.0) + means.get(Kind.W, 0.0)
    again = ((family.remat == "recompute") - (other.remat == "recompute")) * means[Kind.F]
    inputs = means.get(Kind.I, full / 2) + again
    weights = means.get(Kind.W, full / 2)
    works = {Kind.F: means[Kind.F], Kind.B: max(0.0, full + again)}
    return {**works, Kind.I: max(0.0, inputs), Kind.W: weights} if family.splits else works
