"""Steps that follow one another without draining the pipeline: while the last backwards of one run, the next one's forwards do.

That needs parameters of an earlier step (``Pipeline(delay=1)``): the forwards of a step do not wait for the update before them.
"""

import heapq

from jaxpp.errors import ScheduleError
from jaxpp.errors.tracebacks import entry
from jaxpp.schedule.action import Action, Kind
from jaxpp.schedule.base import Schedule
from jaxpp.schedule.clock import UNIT, Number, bars, dependencies
from jaxpp.schedule.residual_counts import lifetimes, peaks
from jaxpp.schedule.validate import check_counts


@entry
def flow(schedule: Schedule, num_steps: int) -> Schedule:
    """Several steps of a schedule, each of which begins while the one before it ends, as a schedule of all their microbatches.

    Every rank runs the actions of a step in the order of its row. As soon as it has run all forwards of a step, it fills the time
    in which it waits for backwards with actions of the next step, as far as it holds no more residuals than in one step alone.
    Microbatch i of step t has number ``t * num_microbatches + i``.

    Args:
        schedule: the schedule of one step.
        num_steps: how many steps.

    Returns:
        a schedule that prints, draws and simulates as any other.

    Raises:
        ScheduleError: a number of steps that is none, or a schedule that does not train.

    Example:
        >>> from jaxpp.schedule import flow, make, simulate
        >>> one = make("1f1b", num_ranks=4, num_microbatches=8)
        >>> costs = {"forward": 1, "input_grad": 1, "weight_grad": 1}
        >>> [round(simulate(flow(one, steps), **costs).bubble_fraction, 3) for steps in (1, 10, 100)]
        [0.273, 0.036, 0.004]
    """
    check_counts("flow(schedule, num_steps)", {"num_steps": num_steps}, ScheduleError)
    if schedule.forward_only:
        rule, fix = "steps that train follow one another", "pass a schedule with backwards, as those of jaxpp.schedule.make are"
        raise ScheduleError(f"flow({schedule.name!r})", rule, schedule.heading, fix)
    rows = _Ranks(schedule, num_steps).run()
    name = schedule.name if num_steps == 1 else f"{schedule.name}, {num_steps} steps in flow"
    return Schedule(name, tuple(map(tuple, rows)), schedule.stage_to_rank)


class _Ranks:
    """The ranks on the unit clock; each works on its earliest step that has not ended, or on the one after it."""

    def __init__(self, schedule: Schedule, num_steps: int):
        self._schedule, self._num_steps = schedule, num_steps
        self._present = frozenset(schedule.starts)
        self._forwards = [max(k for k, action in enumerate(row) if action.kind == Kind.F) + 1 for row in schedule.rows]
        self._room = peaks(lifetimes(bars(schedule.rows, schedule.times)), schedule.stage_to_rank)
        self._at = [[0] * num_steps for _ in schedule.rows]  # how many actions of each step a rank has begun
        self._first = [0] * schedule.num_ranks  # the earliest step of which it has some left
        self._held = [0] * schedule.num_ranks  # residuals
        self._last = {action[::2]: action.kind for row in schedule.rows for action in row}  # what frees those of a microbatch
        self._done: dict[tuple[int, Action], Number] = {}

    def run(self) -> list[list[Action]]:
        rows: list[list[Action]] = [[] for _ in self._schedule.rows]
        ends: list[tuple[Number, int, int, Action]] = []
        idle = set(range(len(rows)))
        now: Number = 0
        while idle or ends:
            for rank in sorted(idle):
                if (found := self._next(rank)) is not None:
                    step, action = found
                    self._begin(rank, step, action)
                    rows[rank].append(action._replace(microbatch=action.microbatch + step * self._schedule.num_microbatches))
                    heapq.heappush(ends, (now + UNIT[action.kind], rank, step, action))
                    idle.discard(rank)
            if not ends:
                return rows
            now = ends[0][0]
            while ends and ends[0][0] == now:
                _, rank, step, action = heapq.heappop(ends)
                self._end(rank, step, action)
                idle.add(rank)
        return rows

    def _next(self, rank: int) -> tuple[int, Action] | None:
        first, row = self._first[rank], self._schedule.rows[rank]
        for step in range(first, min(first + 2, self._num_steps)):
            if step > first and self._at[rank][first] < self._forwards[rank]:
                return None
            action = row[self._at[rank][step]] if self._at[rank][step] < len(row) else None
            if action is None or (step > first and action.kind == Kind.F and self._held[rank] >= self._room[rank]):
                continue
            if all((step, need) in self._done for need in dependencies(action, self._schedule.num_stages, self._present)):
                return step, action
        return None

    def _begin(self, rank: int, step: int, action: Action) -> None:
        self._at[rank][step] += 1
        self._held[rank] += action.kind == Kind.F
        while self._first[rank] < self._num_steps and self._at[rank][self._first[rank]] == len(self._schedule.rows[rank]):
            self._first[rank] += 1

    def _end(self, rank: int, step: int, action: Action) -> None:
        self._done[step, action] = 0
        self._held[rank] -= action.kind == self._last[action[::2]]
