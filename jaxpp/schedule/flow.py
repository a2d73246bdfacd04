"""Steps that follow one another without draining the pipeline: while the last backwards of one run, the next one's forwards do.

That needs parameters of an earlier step (``Pipeline(delay=1)``): the forwards of a step do not wait for the update before them.
"""

import itertools
from collections import deque

from jaxpp.errors import ScheduleError
from jaxpp.errors.tracebacks import entry
from jaxpp.schedule.action import Action, Kind
from jaxpp.schedule.base import Schedule
from jaxpp.schedule.clock import UNIT, bars, dependencies
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
    rows = _rows(schedule, num_steps)
    name = schedule.name if num_steps == 1 else f"{schedule.name}, {num_steps} steps in flow"
    return Schedule(name, tuple(map(tuple, rows)), schedule.stage_to_rank)


def overlaps(schedule: Schedule) -> bool:
    """Whether any rank runs an action of the next step before the actions of a step have ended on all of them."""
    order = flow(schedule, 2).order
    return any(action.microbatch >= schedule.num_microbatches for action in order[: len(order) // 2])


def _rows(schedule: Schedule, num_steps: int) -> list[list[Action]]:
    """On the unit clock, each rank works on its earliest step that has not ended, or on the one after it.

    This clock makes an order, where ``replay`` times one that is there: it has to know what each rank could begin at any time.
    """
    later = [step * schedule.num_microbatches for step in range(num_steps)]
    left = [deque(deque(a._replace(microbatch=a.microbatch + by) for a in row) for by in later) for row in schedule.rows]
    behind = [[action.kind for action in row][::-1].index(Kind.F) for row in schedule.rows]  # actions behind the last forward
    every = [action for steps in left for step in steps for action in step]
    present, frees = frozenset(every), {action[::2]: action for action in every}  # what frees the residuals of a microbatch
    room, held = peaks(lifetimes(bars(schedule.rows, schedule.times)), schedule.stage_to_rank), [0] * schedule.num_ranks
    done, rows = set[Action](), [list[Action]() for _ in left]

    def following(rank: int) -> deque[Action] | None:
        """The step of which the rank runs the next action; None if it has to wait."""
        for number, step in enumerate(itertools.islice(left[rank], 2)):
            if number and len(left[rank][0]) > behind[rank]:
                return None
            full = number and step and step[0].kind == Kind.F and held[rank] >= room[rank]
            if step and not full and done.issuperset(dependencies(step[0], schedule.num_stages, present)):
                return step
        return None

    running, now = dict[int, tuple[int, Action]](), 0  # by rank, with the slot in which it ends
    while any(left) or running:
        for rank, (_, action) in [(rank, each) for rank, each in running.items() if each[0] == now]:
            done.add(action)
            held[rank] -= action == frees[action[::2]]
            del running[rank]
        for rank in range(len(rows)):
            if rank not in running and (step := following(rank)) is not None:
                action = step.popleft()
                rows[rank].append(action)
                held[rank] += action.kind == Kind.F
                running[rank] = now + UNIT[action.kind], action
                while left[rank] and not left[rank][0]:
                    left[rank].popleft()
        now += 1
    return rows
