"""The schedule with which a family is measured."""

from jaxpp.schedule.action import Action, Kind
from jaxpp.schedule.base import Schedule
from jaxpp.schedule.clock import ActionRow
from jaxpp.schedule.registry import SCHEDULES, make
from jaxpp.tuner.candidate import Family

__all__ = ["one_at_a_time", "plain_schedule"]


def plain_schedule(family: Family, num_ranks: int) -> Schedule:
    """A schedule that holds few residuals, on as many ranks as the candidates of the family have."""
    stages, microbatches = family.num_stages, family.num_microbatches
    per_rank, rest = divmod(stages, num_ranks)
    if per_rank == 2 and not rest and family.splits:
        return make("zb-v", num_ranks, microbatches)
    if per_rank > 1 and not rest and not family.splits:
        name = "interleaved" if SCHEDULES["interleaved"].allows(num_ranks, microbatches) else "looped-bfs"
        return make(name, num_ranks, microbatches, per_rank)
    return make("zb-h1" if family.splits else "1f1b", stages, microbatches)


def one_at_a_time(family: Family, like: Schedule) -> Schedule:
    """The same actions on the same ranks, one microbatch after the other: it holds the residuals of one.

    Example:
        >>> family = Family(2, 2, "least", "flops", splits=True)
        >>> [" ".join(map(str, row)) for row in one_at_a_time(family, plain_schedule(family, 2)).rows]
        ['0F0 0I0 0W0 0F1 0I1 0W1', '1F0 1I0 1W0 1F1 1I1 1W1']
    """
    backward = (Kind.I, Kind.W) if family.splits else (Kind.B,)

    def row(rank: int) -> ActionRow:
        stages = [stage for stage, owner in enumerate(like.stage_to_rank) if owner == rank]
        found = list[Action]()
        for i in range(family.num_microbatches):
            found += [Action(stage, Kind.F, i) for stage in stages]
            found += [Action(stage, kind, i) for stage in reversed(stages) for kind in backward]
        return tuple(found)

    return Schedule("one at a time", tuple(map(row, range(like.num_ranks))), like.stage_to_rank)
