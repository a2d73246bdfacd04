"""Plans that run one after another, as one: the batches of a stream, the passes of a generation.

Every value of the joined plan has a slot of its own, so that it can be told which instruction reads what another plan has made. The
joined plan is looked at, and not run. Microbatches are numbered on from plan to plan.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast

from jaxpp.observe.memory.liveness import Life, Liveness
from jaxpp.plan.builder import Name
from jaxpp.plan.plan import Instruction, Plan
from jaxpp.schedule.action import Action, Kind
from jaxpp.schedule.base import Schedule

__all__ = ["RingPass", "join_liveness", "join_plans", "schedule_of"]


class RingPass(NamedTuple):
    """One pass of a generation through the stages.

    Attributes:
        group: the group that it is of.
        turn: which pass of its group it is.
        num_tokens: how many tokens it takes of each sequence.
        num_made: how many tokens it makes that somebody wants.
        is_prompt: whether it is a chunk of a prompt, run for one sequence alone.
        awaits: the number of the pass whose token it takes; -1 if it takes none.
    """

    group: int
    turn: int
    num_tokens: int
    num_made: int
    is_prompt: bool
    awaits: int


def join_plans(plans: Sequence[Plan], firsts: Sequence[int], awaits: Mapping[int, int] | None = None) -> Plan:
    """Plans one after another as one, which cannot be run.

    Args:
        plans: in order.
        firsts: the number that the first microbatch of each has.
        awaits: for a plan whose last argument is the first result of an earlier plan, the number of that plan.
    """
    lines: list[Instruction] = []
    made, size = dict[int, int](), 0
    for number, (plan, first) in enumerate(zip(plans, firsts, strict=True)):
        maker = (awaits or {}).get(number)
        slots: dict[int, int] = {}
        if maker is not None:
            slots[plan.inputs[-1]] = made[maker]
        token = slots.get(plan.inputs[-1]) if plan.inputs else None
        for line in plan.instructions:
            for slot in line.inputs:
                size += slot not in slots
                slots.setdefault(slot, size)
            reads = tuple(slots[slot] for slot in line.inputs)
            for slot in line.outputs:
                size += 1
                slots[slot] = size
            action = cast("Action | None", line.about.action)
            known = None if action is None else action._replace(microbatch=first + action.microbatch)
            label = line.label if action is None else line.label.replace(str(action), str(known))
            if line.about.sends and action is None and token is not None and token in reads and maker is not None:
                stage = max(about.stage for _, _, _, _, _, about in plans[maker].instructions)
                known, label = Action(stage, Kind.F, firsts[maker]), f"token of {Action(stage, Kind.F, firsts[maker])}"
            about = line.about._replace(action=known)
            lines.append(Instruction(label, line.call, reads, tuple(slots[slot] for slot in line.outputs), (), about))
        if plan.outputs:
            made[number] = slots.get(plan.outputs[0], 0)
    return Plan(tuple(lines), size + 1, (), (), (), len(lines))


def schedule_of(plan: Plan, stage_to_rank: Sequence[int], name: str) -> Schedule:
    """The order in which the actions of a plan are handed over, as a schedule."""
    rows: list[list[Action]] = [[] for _ in range(max(stage_to_rank) + 1)]
    for line in plan.instructions:
        if line.about.action is not None and not line.about.sends:
            rows[stage_to_rank[line.about.stage]].append(cast("Action", line.about.action))
    return Schedule(name, tuple(map(tuple, rows)), tuple(stage_to_rank))


def join_liveness(parts: Sequence[Liveness]) -> Liveness:
    """What is alive while plans run one after another; arguments are there all the time, and results stay until the end."""
    end, first = sum(len(part.lines) for part in parts) + 1, 0
    stay: dict[Name, Life] = {}
    lives: list[Life] = []
    for part in parts:
        last = len(part.lines) + 1
        for life in part.lives:
            if life.begins == 0 and life.ends == last:
                stay[life.name] = life._replace(ends=end)
            else:
                begins = max(life.begins, 1) + first if life.begins or first else 0
                lives.append(life._replace(begins=begins, ends=end if life.ends == last else first + life.ends))
        first += len(part.lines)
    lines = tuple(line for part in parts for line in part.lines)
    extra = tuple(each for part in parts for each in part.temporaries)
    return Liveness(parts[0].devices, lines, (*stay.values(), *lives), extra)
