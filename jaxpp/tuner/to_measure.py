"""Schedules made to measure for a search: from what stages were measured to take, and what each rank has room for."""

import itertools
from collections.abc import Sequence

from jaxpp.errors import ScheduleError
from jaxpp.observe.evaluate import StepCosts
from jaxpp.schedule.action import Kind
from jaxpp.schedule.base import Schedule
from jaxpp.schedule.synthesis.synthesise import synthesise

_EFFORT = 500  # steps of the search for one schedule: the last parts in a thousand are less than what a measurement misses


def residual_peaks(schedule: Schedule, kept: Sequence[float]) -> tuple[float, ...]:
    """The most bytes of residuals that each rank holds at once, where each stage keeps so many of a microbatch.

    Example:
        >>> from jaxpp.schedule import make
        >>> residual_peaks(make("1f1b", num_ranks=2, num_microbatches=4), kept=(10, 30))
        (20, 30)
    """
    change = {Kind.F: 1, Kind.B: -1, Kind.I: 0, Kind.W: -1}
    rows = [[change[action.kind] * kept[action.stage] for action in row] for row in schedule.rows]
    return tuple(max(itertools.accumulate(row), default=0) for row in rows)


def made_like(schedule: Schedule, costs: StepCosts, kept: Sequence[float], room: Sequence[float]) -> Schedule | None:
    """The shortest schedule that is found, with as many ranks, stages and microbatches; None if the room is too small for any.

    ``costs`` are of programs with I and W apart. What the host takes to hand actions over is not looked at: the search predicts the
    step with it.
    """
    try:
        return synthesise(
            schedule.num_ranks,
            schedule.num_microbatches,
            stages_per_rank=schedule.num_stages // schedule.num_ranks,
            forward=costs.actions[Kind.F],
            input_grad=costs.actions[Kind.I],
            weight_grad=costs.actions[Kind.W],
            transfer=costs.transfer or 0,
            residuals=kept,
            room=[max(0.0, each) for each in room],
            effort=_EFFORT,
        )
    except ScheduleError:  # not even one microbatch fits
        return None
