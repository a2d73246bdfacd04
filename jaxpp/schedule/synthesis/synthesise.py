"""``synthesise``: a schedule made to measure, from what stages and transfers take and what each rank has room for.

The schedules of the registry are made for stages that take the same time, F, I and W alike. For other costs they are only where the
search begins: ``greedy`` makes further orders by rules, ``local_search`` improves the most promising, and the shortest is taken.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from jaxpp.errors import ScheduleError
from jaxpp.errors.tracebacks import entry
from jaxpp.schedule.action import Kind
from jaxpp.schedule.base import Schedule
from jaxpp.schedule.clock import Number
from jaxpp.schedule.costs import StepCosts
from jaxpp.schedule.registry import AUTO, SCHEDULES, make
from jaxpp.schedule.simulate import is_cost, items_of, per_stage
from jaxpp.schedule.synthesis.greedy import GREEDY_RULES, order_by
from jaxpp.schedule.synthesis.local_search import improve
from jaxpp.schedule.synthesis.work import NumberedRows, StepWork
from jaxpp.schedule.validate import check_counts, check_owners

_STARTS = 12  # orders from which the search begins
_USUAL = 1000  # actions, up to which the search makes all steps that it is asked for
_FINALISTS = 3  # of these, that are searched for longer
_WHERE = "synthesise(...)"


class _Start(NamedTuple):
    """An order, and what it takes."""

    span: float
    held: float  # the most bytes of residuals on any rank
    work: StepWork
    rows: NumberedRows


@entry
def synthesise(  # noqa: PLR0913  (the costs of everything)
    num_ranks: int,
    num_microbatches: int,
    *,
    stages_per_rank: int = 1,
    stage_to_rank: Sequence[int] | None = None,
    forward: Number | Sequence[Number] = 1,
    input_grad: Number | Sequence[Number] = 1,
    weight_grad: Number | Sequence[Number] = 1,
    transfer: Number | Sequence[Number] = 0,
    residuals: Number | Sequence[Number] = 1,
    room: Number | Sequence[Number] | None = None,
    split: bool = True,
    effort: int = 2000,
) -> Schedule:
    """The shortest schedule that is found for given costs: ``jaxpp.schedule.make`` for stages that differ.

    On the clock of ``simulate`` it is, but for rounding, never longer than any schedule of the registry that has these stages and
    fits: the search begins with those, and keeps the shortest order. Equal arguments give equal schedules, in every process:
    nothing is random, and nothing is timed. Costs are as for ``simulate``: one number, or one for each stage.

    Args:
        num_ranks: ranks, at least 1.
        num_microbatches: microbatches, at least 1.
        stages_per_rank: stages on each rank.
        stage_to_rank: the rank of each stage, in place of ``stages_per_rank``. Unless given, stages may lie round robin, in a V, in
            blocks, or so that the ranks have about equal work.
        forward: time of F, in any unit of time.
        input_grad: time of I.
        weight_grad: time of W; B takes I and W together.
        transfer: time between stages s and s + 1 in either direction, as for ``simulate``.
        residuals: what the residuals of a stage and one microbatch need, from F until the end of W or B, in any unit of memory.
        room: what each rank has room for, in the same unit: one number, or one for each rank. Default: room for everything.
        split: whether backwards may run as I and W. A stage that gains nothing by that runs B even so. XLA may round I and W
            otherwise than B, so the last bits of gradients may differ from those of 1f1b.
        effort: how many steps the search makes in all. 2,000 take two seconds for 4 ranks, 16 microbatches and 2 stages a rank.

    Returns:
        a schedule called ``"auto"``. All microbatches pass each stage in order.

    Raises:
        ScheduleError: a cost or a count that is none, or a rank without room for the residuals of one microbatch, which is the
            least with which a step can run.

    Example:
        >>> from jaxpp.schedule import make, simulate
        >>> costs = dict(forward=[1, 1, 2, 1], input_grad=[1, 1, 2, 1], weight_grad=[1, 1, 2, 1], transfer=0.25)
        >>> simulate(make("1f1b", num_ranks=4, num_microbatches=8), **costs).makespan
        56.5
        >>> simulate(synthesise(4, 8, room=4, **costs), **costs).makespan
        50.5

    References:
        Qi et al., Zero Bubble Pipeline Parallelism, arXiv:2401.10241, section 3 (a heuristic, and an integer program, for one stage
        on each rank).
    """
    counts = {"num_ranks": num_ranks, "num_microbatches": num_microbatches, "stages_per_rank": stages_per_rank, "effort": effort}
    check_counts(_WHERE, counts)
    ranks, microbatches = int(num_ranks), int(num_microbatches)
    owner = _owner(stage_to_rank, ranks)
    num_stages = len(owner) or ranks * int(stages_per_rank)
    if not isinstance(split, bool):
        raise ScheduleError(_WHERE, "split is either True or False", f"split={split!r}", "pass split=True or split=False")
    given = {"forward": forward, "input_grad": input_grad, "weight_grad": weight_grad, "transfer": transfer, "residuals": residuals}
    costs = _costs(given, num_stages)
    plain = costs.slowed(1.0)  # in floats
    rooms = _rooms(room, ranks, costs, microbatches)
    owners = [owner] if owner else placements(plain.whole, ranks)
    works = _with_room([StepWork(plain, each, microbatches, rooms, (split,) * num_stages) for each in owners])
    best = _search(works, _named(num_stages, ranks, microbatches), int(effort))
    return Schedule(AUTO, best.work.action_rows(best.rows), best.work.owner)


def _owner(stage_to_rank: Sequence[int] | None, num_ranks: int) -> tuple[int, ...]:
    owner = check_owners(AUTO, stage_to_rank, num_ranks)
    if owner and (idle := sorted(set(range(num_ranks)) - set(owner))):
        got = f"stage_to_rank={stage_to_rank!r}, num_ranks={num_ranks}: no stage on rank {', '.join(map(str, idle))}"
        raise ScheduleError(_WHERE, "each rank owns at least one stage", got, f"pass num_ranks={len(set(owner))}")
    return owner


def _costs(given: Mapping[str, object], num_stages: int) -> StepCosts:
    found = {name: per_stage(value, num_stages, name == "transfer") for name, value in given.items()}
    if wrong := [f"{name}={given[name]!r}" for name, costs in found.items() if costs is None]:
        rule = "a cost is a finite number of at least 0, or a sequence of one a stage"
        fix = f"pass one number, or {num_stages} of them (transfer: {num_stages - 1} will do)"
        raise ScheduleError(_WHERE, rule, wrong, fix)
    forward, input_grad, weight_grad, transfer, kept = (costs or () for costs in found.values())
    return StepCosts({Kind.F: forward, Kind.I: input_grad, Kind.W: weight_grad}, transfer=transfer, residuals=kept)


def _rooms(room: object, num_ranks: int, costs: StepCosts, num_microbatches: int) -> tuple[float, ...]:
    """What each rank has room for."""
    if room is None:
        return (float(num_microbatches * sum(costs.residuals)),) * num_ranks
    found = [float(each) for each in items_of(room, num_ranks) if is_cost(each)]
    if len(found) != num_ranks or len(items_of(room, num_ranks)) != num_ranks:
        rule = "room is a finite number of at least 0, or a sequence of one a rank"
        raise ScheduleError(_WHERE, rule, f"room={room!r}", f"pass one number, or {num_ranks} of them; or leave it out")
    return tuple(found)


def _with_room(works: Sequence[StepWork]) -> list[StepWork]:
    """Those in which each rank has room for one microbatch."""

    def lacking(work: StepWork) -> dict[int, float]:
        needs = [sum(work.costs.residuals[s] for s in stages) for stages in work.stages_of]
        return {rank: need for rank, need in enumerate(needs) if need > work.room[rank] + work.slack}

    fitting = [work for work in works if not lacking(work)]
    if fitting:
        return fitting
    work = min(works, key=lambda work: max(lacking(work).values()))
    got = [f"rank {rank} needs {need:.6g}, and has room for {work.room[rank]:.6g}" for rank, need in lacking(work).items()]
    rule = "each rank has room for the residuals of one microbatch, those of all its stages"
    fix = (
        f"pass room={max(lacking(work).values()):.6g} or more; or use smaller microbatches, more ranks, or a remat that keeps less"
    )
    raise ScheduleError(_WHERE, rule, got, fix)


def _named(num_stages: int, num_ranks: int, num_microbatches: int) -> list[Schedule]:
    """The schedules of the registry that have so many stages on each rank."""
    v, left = divmod(num_stages, num_ranks)
    able = [name for name, recipe in SCHEDULES.items() if recipe.stages_per_rank == v or (recipe.varies and v > 1)]
    able = [name for name in able if not left and SCHEDULES[name].allows(num_ranks, num_microbatches)]
    return [make(name, num_ranks=num_ranks, num_microbatches=num_microbatches, stages_per_rank=v) for name in able]


def _search(works: Sequence[StepWork], named: Sequence[Schedule], effort: int) -> _Start:
    """The best order: the most promising starts are improved a little, and the best of these for longer."""
    num_steps = round(effort * min(1, _USUAL / len(works[0].actions)))
    starts = _starts(works, named)[:_STARTS]
    improved = _improved(starts, num_steps // 2 // len(starts))
    return _with_whole_backwards(_improved(improved[:_FINALISTS], num_steps // 2 // _FINALISTS)[0])


def _starts(works: Sequence[StepWork], named: Sequence[Schedule]) -> list[_Start]:
    """Orders from which a search may begin, the best first: the named ones that fit, and those of each rule."""
    found: dict[tuple[int, ...], _Start] = {}
    shortest = math.inf
    for work in sorted(works, key=lambda work: work.least_span):
        if work.least_span >= shortest - work.noise:
            break
        given = [work.numbered(schedule.rows) for schedule in named if schedule.stage_to_rank == work.owner]
        orders = [rows for rows in given if rows is not None and work.fits(rows)]
        orders += [order_by(work, rule) for rule in GREEDY_RULES]
        starts = [_timed(work, rows) for rows in orders]
        found |= {(*work.owner, *itertools.chain(*start.rows)): start for start in starts}
        shortest = min(shortest, *(start.span for start in starts))
    return sorted(found.values(), key=lambda start: start[:2])


def _timed(work: StepWork, rows: NumberedRows) -> _Start:
    times = work.clock(rows)
    return _Start(math.inf if times is None else times.span, max(work.peaks(rows)), work, rows)


def _improved(starts: Iterable[_Start], num_steps: int) -> list[_Start]:
    """Each improved by so many steps, the best first; those that cannot become the best are left as they are."""
    found = list[_Start]()
    best = math.inf
    for start in starts:
        done = start
        if start.work.least_span < best - start.work.noise:
            done = _timed(start.work, improve(start.work, start.rows, num_steps))
        best = min(best, done.span)
        found.append(done)
    return sorted(found, key=lambda start: start[:2])


def _with_whole_backwards(start: _Start) -> _Start:
    """The same with B in place of I and W on each stage where that makes the step no longer."""
    for stage in range(start.work.num_stages):
        work = start.work
        if not work.split[stage]:
            continue
        split = tuple(each and s != stage for s, each in enumerate(work.split))
        changed = StepWork(work.costs, work.owner, work.num_microbatches, work.room, split)
        kept = frozenset(changed.actions)
        other = _timed(changed, [[action for action in row if action in kept] for row in start.rows])
        if other.span <= start.span + work.noise:
            start = other
    return start


def placements(work: Sequence[float], num_ranks: int) -> tuple[tuple[int, ...], ...]:
    """The rank of each stage, as many on each rank: round robin, in a V, in blocks, and so that all have about equal work.

    ``work[s]`` is what stage s computes for a microbatch.

    Example:
        >>> placements([1, 1, 1, 1], num_ranks=2)
        ((0, 1, 0, 1), (0, 1, 1, 0), (0, 0, 1, 1))
        >>> placements([4, 3, 1, 2, 2, 2], num_ranks=2)[-1]
        (0, 1, 0, 0, 1, 1)
    """
    num_stages = len(work)
    turns = [divmod(stage, num_ranks) for stage in range(num_stages)]
    robin = tuple(rank for _, rank in turns)
    zigzag = tuple(num_ranks - 1 - rank if turn % 2 else rank for turn, rank in turns)
    blocks = tuple(stage * num_ranks // num_stages for stage in range(num_stages))
    plain = (robin, zigzag, blocks)
    return tuple(dict.fromkeys([*plain, *(_levelled(owner, work, num_ranks) for owner in plain)]))


def _levelled(owner: Sequence[int], work: Sequence[float], num_ranks: int) -> tuple[int, ...]:
    """Pairs of stages change their ranks, the best pair first, as long as that lowers what the busiest ranks have to do."""
    owner, whole = list(owner), sum(work) or 1.0

    def busiest(pair: tuple[int, int] = (0, 0)) -> list[float]:
        """What the ranks have to do, the busiest first, if two stages change their ranks."""
        loads, (a, b) = [0.0] * num_ranks, pair
        for stage, rank in enumerate(owner):
            loads[rank] += work[b if stage == a else a if stage == b else stage]
        return sorted((round(load / whole, 9) for load in loads), reverse=True)  # rounding noise is no gain

    while True:
        loads, (a, b) = min((busiest(pair), pair) for pair in itertools.combinations_with_replacement(range(len(owner)), 2))
        if loads >= busiest():
            names = {rank: number for number, rank in enumerate(dict.fromkeys(owner))}
            return tuple(names[rank] for rank in owner)  # stage 0 lies on rank 0
        owner[a], owner[b] = owner[b], owner[a]
