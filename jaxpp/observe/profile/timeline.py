"""A plan in time: as it was traced, and as it would be if each rank had a device of its own.

The second is the virtual clock at the level of instructions: each device runs its programs in the order of the plan, each takes
as long as when it ran alone, and begins when its operands are there. The host and the links are not waited for.
"""

import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from jaxpp.observe.profile.span import Span
from jaxpp.observe.profile.trace import Run
from jaxpp.observe.profile.watch import Stamp
from jaxpp.plan.plan import Instruction, Plan
from jaxpp.schedule.base import Schedule

__all__ = ["durations_of", "laid_out", "traced"]


def durations_of(plan: Plan, steps: Sequence[Sequence[float]]) -> list[float]:
    """The seconds that each instruction takes alone: the median over steps, and over all that run the same program.

    Args:
        plan: the instructions.
        steps: for each step the seconds of each instruction.
    """
    pools: defaultdict[Any, list[float]] = defaultdict(list)
    keys = [id(line.call) if line.about.program else (line.label, k) for k, line in enumerate(plan.instructions)]
    for step in steps:
        for key, taken in zip(keys, step, strict=True):
            pools[key].append(taken)
    medians = {key: statistics.median(taken) for key, taken in pools.items()}
    return [medians[key] for key in keys]


def laid_out(plan: Plan, durations: Sequence[float], schedule: Schedule) -> tuple[Span, ...]:
    """The instructions of a step on devices of their own.

    Args:
        plan: the instructions.
        durations: seconds of each, alone.
        schedule: tells the rank of a stage.
    """
    there: defaultdict[int, float] = defaultdict(float)
    free: defaultdict[int, float] = defaultdict(float)
    spans = []
    for line, taken in zip(plan.instructions, durations, strict=True):
        start = max((there[slot] for slot in line.inputs), default=0.0)
        if not line.about.sends:
            rank = schedule.stage_to_rank[line.about.stage]
            start = max(start, free[rank])
            free[rank] = start + taken
        there.update((slot, start + taken) for slot in line.outputs)
        spans.append(_span(line, schedule, start, start + taken, 0.0, 0.0))
    return tuple(spans)


def traced(
    plan: Plan, runs: Sequence[Run | None], stamps: Sequence[Stamp], durations: Sequence[float], schedule: Schedule
) -> tuple[Span, ...]:
    """The instructions of a step as a trace has them.

    A send is no program: it begins when it was handed over and its source is there, and takes as long as alone, but no longer than
    until a program begins that reads what it sends.

    Args:
        plan: the instructions.
        runs: of each instruction, from the beginning of the step.
        stamps: when the host handed each over.
        durations: seconds of each, alone.
        schedule: tells the rank of a stage.
    """
    readers = _readers(plan)
    there: defaultdict[int, float] = defaultdict(float)
    spans, zero = [], stamps[0].begun
    for number, (line, run, stamp) in enumerate(zip(plan.instructions, runs, stamps, strict=True)):
        begun, handed = stamp.begun - zero, stamp.handed - zero
        if run is None:
            start = max([begun, *(there[slot] for slot in line.inputs)])
            reads = [found.start for k in readers[number] if (found := runs[k]) is not None]
            end = max(start, min([start + durations[number], *reads]))
        else:
            start, end = run
        there.update((slot, end) for slot in line.outputs)
        spans.append(_span(line, schedule, start, end, begun, handed))
    return tuple(spans)


def _readers(plan: Plan) -> list[list[int]]:
    """The instructions that read what each writes."""
    writer: dict[int, int] = {}
    found: list[list[int]] = [[] for _ in plan.instructions]
    for number, line in enumerate(plan.instructions):
        for slot in line.inputs:
            if slot in writer:
                found[writer[slot]].append(number)
        writer.update((slot, number) for slot in line.outputs)
    return found


def _span(line: Instruction, schedule: Schedule, start: float, end: float, begun: float, handed: float) -> Span:
    action: Any = line.about.action
    return Span(line.label, action, schedule.stage_to_rank[line.about.stage], line.about.sends, start, end, begun, handed)
