"""Costs made to agree with a whole step: what ranks that share cores take from one another shows only when they run together.

Problem: each program was measured alone, where it has the machine for itself. On forced CPU devices, ranks share the cores, and a
program that runs on two threads alone has one of them beside another. Idea: the same programs ran side by side, too, in the steps
at full speed. Mechanism: the prediction of the step that was run is compared with what it took. Where devices share cores, the
number of ranks that compute at full speed at once is the one for which both agree; what is left over is how much longer, or less
long, actions take in a step than alone.
"""

import dataclasses
from collections.abc import Callable, Sequence

from jaxpp.tuner.candidate import Candidate
from jaxpp.tuner.costs import FamilyCosts
from jaxpp.tuner.predict import predict

__all__ = ["fitted", "stretched"]

_HALVINGS = 30
_MOST = 4.0
"""How much longer actions may take in a step than alone, or less long."""


def fitted(costs: FamilyCosts, candidate: Candidate, seconds: float, *, shared: bool, processes: Sequence[int] = ()) -> FamilyCosts:
    """The costs with which a step of this candidate is predicted as it was measured, if there are any.

    Args:
        costs: of its family.
        candidate: the one that was run.
        seconds: that its step took.
        shared: whether its ranks share what they compute with.
        processes: the process of each rank, as ``predict`` takes it.
    """
    most = float(candidate.schedule.num_ranks)

    def with_capacity(capacity: float) -> FamilyCosts:
        return dataclasses.replace(costs, capacity=capacity)

    def agrees(made: Callable[[float], FamilyCosts], low: float, high: float) -> FamilyCosts:
        """The costs between two numbers that agree best; the prediction grows with the number."""
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (low, middle) if predict(candidate, made(middle), processes) > seconds else (middle, high)
        return made((low + high) / 2)

    found = with_capacity(most)
    if shared:
        found = agrees(lambda inverse: with_capacity(1 / inverse), 1 / most, 1.0)
    if abs(predict(candidate, found, processes) / seconds - 1) < 0.01:
        return found
    return agrees(lambda times: _longer(found, times), 1 / _MOST, _MOST)


def _longer(costs: FamilyCosts, times: float) -> FamilyCosts:
    """The same with actions, and what follows them, that take so many times as long."""
    actions = {kind: tuple(times * each for each in stages) for kind, stages in costs.actions.items()}
    return dataclasses.replace(costs, actions=actions, after=tuple(times * each for each in costs.after))


def stretched(costs: FamilyCosts, times: float) -> FamilyCosts:
    """The same with everything so many times as long."""
    handed = {kind: tuple(times * each for each in stages) for kind, stages in costs.dispatch.items()}
    hops, before, after = tuple(times * each for each in costs.transfer), times * costs.before, times * costs.after_dispatch
    return dataclasses.replace(_longer(costs, times), dispatch=handed, transfer=hops, before=before, after_dispatch=after)
