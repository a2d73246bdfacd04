"""What a step is made of, read off the instructions of steps that were looked at.

In some steps the host waited for each instruction before it handed over the next: there each program and each send took what it
takes alone. Other steps ran at full speed: there the host took for each instruction what it takes it to hand one over. A very small
program runs in the thread that hands it over; it counts as what the host takes, and as next to nothing on its device.
"""

import statistics
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence

from jaxpp.observe.profile.merge import SeenStep
from jaxpp.observe.profile.spans import durations_of
from jaxpp.plan.plan import Instruction, Plan
from jaxpp.schedule.action import Action, Kind
from jaxpp.tuner.costs import FamilyCosts

__all__ = ["step_costs"]


def step_costs(plan: Plan, num_stages: int, free: Sequence[SeenStep], apart: Sequence[SeenStep]) -> FamilyCosts:
    """The costs of a family; of copies to host memory nothing is known here, nor of what ranks share.

    Args:
        plan: of the steps.
        num_stages: of the pipeline.
        free: steps at full speed.
        apart: steps in which each instruction ran alone.
    """
    lines = plan.instructions
    alone = durations_of(plan, [step.seconds for step in apart])
    handing = durations_of(plan, [[stamp.handed - stamp.begun for stamp in step.stamps] for step in free])
    acting = [number for number, line in enumerate(lines) if line.about.action is not None]
    first, last = acting[0], acting[-1]
    actions, dispatch = _actions(lines, first, last, alone, handing)
    kinds = sorted({kind for kind, _ in actions}, key=list(Kind).index)

    def table(found: Mapping[tuple[Kind, int], Sequence[float]]) -> Mapping[Kind, tuple[float, ...]]:
        return {kind: tuple(statistics.median(found.get((kind, stage), (0.0,))) for stage in range(num_stages)) for kind in kinds}

    after = [0.0] * num_stages
    for number in range(last + 1, len(lines)):
        after[lines[number].about.stage] += alone[number]
    return FamilyCosts(
        actions=table(actions),
        dispatch=table(dispatch),
        transfer=_transfers(lines, alone, num_stages),
        offload=(0.0,) * num_stages,
        offload_dispatch=(0.0,) * num_stages,
        before=_before(lines, first, free, alone),
        after=tuple(after),
        after_dispatch=sum(handing[last + 1 :]),
        capacity=1.0,
    )


_Pools = Mapping[tuple[Kind, int], Sequence[float]]


def _actions(
    lines: Sequence[Instruction], first: int, last: int, alone: Sequence[float], handing: Sequence[float]
) -> tuple[_Pools, _Pools]:
    """What actions take on their devices and on the host, by kind and stage; lines of no action count to the one before them."""
    taken: defaultdict[tuple[Kind, int], list[float]] = defaultdict(list)
    handed: defaultdict[Action, float] = defaultdict(float)
    now: Hashable = None
    for number in range(first, last + 1):
        about = lines[number].about
        now = about.action or now
        assert isinstance(now, Action), "the first of these lines is an action"
        handed[now] += handing[number]
        if about.program and about.action is not None:
            taken[now.kind, now.stage].append(alone[number])
    pools: defaultdict[tuple[Kind, int], list[float]] = defaultdict(list)
    for action, seconds in handed.items():
        pools[action.kind, action.stage].append(seconds)
    return taken, pools


def _transfers(lines: Sequence[Instruction], alone: Sequence[float], num_stages: int) -> tuple[float, ...]:
    """What crosses each boundary for one action; a boundary between stages of one device is like the others."""
    sums: defaultdict[tuple[int, Action], float] = defaultdict(float)
    for number, line in enumerate(lines):
        action, target = line.about.action, line.about.stage
        if line.about.sends and isinstance(action, Action) and target != action.stage:
            sums[target - 1 if target > action.stage else target, action] += alone[number]
    pools: defaultdict[int, list[float]] = defaultdict(list)
    for (boundary, _), seconds in sums.items():
        pools[boundary].append(seconds)
    usual = statistics.median(sums.values()) if sums else 0.0
    return tuple(statistics.median(pools[s]) if pools[s] else usual for s in range(num_stages - 1))


def _before(lines: Sequence[Instruction], first: int, free: Sequence[SeenStep], alone: Sequence[float]) -> float:
    """From the beginning of a step until its first action can begin: it is handed over, and its stage has been set up."""
    stage, found = lines[first].about.stage, []
    for step in free:
        ready = 0.0
        for number in range(first):
            if lines[number].about.stage == stage:
                ready = max(ready, step.stamps[number].handed - step.begun) + alone[number]
        found.append(max(ready, step.stamps[first].begun - step.begun))
    return statistics.median(found)
