"""Which candidates there are: every schedule at every size, with every choice of what stages keep and how the loss is cut.

To simulate a candidate costs milliseconds, so there may be many of them. To measure a family costs seconds, so by default there are
few numbers of microbatches: powers of two times the ranks, from half as many as there are ranks. Where a number near a power of two
divides the batch evenly, it stands for the power, since microbatches of one size need one set of programs.
"""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

from jaxpp.errors import ScheduleError
from jaxpp.schedule.action import Kind
from jaxpp.schedule.base import Schedule
from jaxpp.schedule.offload import offloads
from jaxpp.schedule.registry import SCHEDULES, make
from jaxpp.tuner.candidate import Candidate

__all__ = ["Space", "candidates", "usual_microbatches"]

_POWERS = range(-1, 4)
"""Of two: the numbers of microbatches in parts of the number of ranks."""


@dataclass(frozen=True)
class Space:
    """What is looked at. Every combination of these is a candidate, if there is such a schedule.

    Attributes:
        num_examples: of the batch: each microbatch has at least one of them.
        num_ranks: numbers of ranks.
        schedules: names of schedules.
        stages_per_rank: numbers of stages on each rank; one for some schedules, two for others, and for those that interleave
            stages two or more.
        num_microbatches: numbers of microbatches; the usual ones if none are given, and 1 for ``naive``.
        remat: what stages keep: ``"least"``, ``"keep"``, ``"recompute"`` or ``"offload"``.
        balance: what stages have equal amounts of.
        in_order: whether each stage must run its forwards in order, because the loss has a model state.
    """

    num_examples: int
    num_ranks: tuple[int, ...]
    schedules: tuple[str, ...] = tuple(SCHEDULES)
    stages_per_rank: tuple[int, ...] = (1, 2)
    num_microbatches: tuple[int, ...] = ()
    remat: tuple[str, ...] = ("least",)
    balance: tuple[str, ...] = ("flops",)
    in_order: bool = False


def usual_microbatches(num_examples: int, num_ranks: int) -> tuple[int, ...]:
    """The numbers of microbatches that are looked at unless others are asked for.

    Example:
        >>> usual_microbatches(num_examples=96, num_ranks=4)
        (2, 4, 8, 16, 32)
        >>> usual_microbatches(num_examples=10, num_ranks=4)
        (2, 5, 10)
    """
    divisors = [n for n in range(1, num_examples + 1) if num_examples % n == 0]
    found = set[int]()
    for power in _POWERS:
        wanted = max(1, math.ceil(num_ranks * 2.0**power))
        near = min(divisors, key=lambda n, wanted=wanted: abs(math.log2(n / wanted)))
        if abs(math.log2(near / wanted)) < 0.5:
            found.add(near)
        elif wanted <= num_examples:
            found.add(wanted)
    return tuple(sorted(found))


def candidates(space: Space) -> tuple[Candidate, ...]:
    """All candidates, each once: of candidates that run the same actions in the same order, the first.

    Residuals that would never leave their device make no candidate of their own.
    """
    found: dict[Candidate, None] = {}
    for schedule in _schedules(space):
        for balance in space.balance:
            for remat in space.remat:
                candidate = Candidate(schedule, remat, balance=balance)
                if remat != "offload" or offloads(schedule.rows, candidate.offload):
                    found.setdefault(candidate)
    return tuple(found)


def _schedules(space: Space) -> Iterator[Schedule]:
    for ranks in space.num_ranks:
        usual = usual_microbatches(space.num_examples, ranks)
        for name in space.schedules:
            recipe = SCHEDULES[name]
            for v in (v for v in space.stages_per_rank if v == recipe.stages_per_rank or (recipe.varies and v > 1)):
                for count in space.num_microbatches or ((1,) if name == "naive" else usual):
                    with contextlib.suppress(ScheduleError):  # there is none of these sizes
                        schedule = make(name, ranks, count, v)
                        if count <= space.num_examples and not (space.in_order and _is_mixed(schedule)):
                            yield schedule


def _is_mixed(schedule: Schedule) -> bool:
    """Whether some stage runs its forwards in another order than that of the microbatches."""
    latest = dict.fromkeys(range(schedule.num_stages), -1)
    for stage, kind, microbatch in schedule.order:
        if kind == Kind.F:
            if microbatch < latest[stage]:
                return True
            latest[stage] = microbatch
    return False
