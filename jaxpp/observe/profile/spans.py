"""The instructions of a step in time: as a trace has them, as watching saw them, and as they would be on devices of their own.

The last is the clock of every compiled plan (``line_times``): each device runs its programs in the order of the plan, as soon as
their operands are there. A profile waits on it for neither the host nor the links; the bound of a step does for the host.

A forward and a backward that one program runs are two spans, which share its time as they share its FLOPs.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import NamedTuple, cast

from jaxpp.lowering.builder import MemoryCopy
from jaxpp.lowering.plan import Instruction, Plan
from jaxpp.observe.profile.trace import Run
from jaxpp.schedule.action import Action
from jaxpp.schedule.base import Schedule
from jaxpp.types import Device


class Span(NamedTuple):
    """One instruction of a step in time, in seconds from the start of the step."""

    label: str  # ``2F0``, ``send 2F0 to stage 3``, ``update stage 1 level 0``, ...
    action: Action | None  # that it runs, or whose result it sends or copies; None for the rest of a step
    rank: int  # where it ran, or arrived
    sends: bool  # whether it is a transfer
    start: float
    end: float  # when its result was there
    begun: float  # when the host began to hand it over
    handed: float  # when the host went on
    process: int = 0  # whose host that is
    copies: bool = False  # whether it copies values to host memory, or back


class Stamp(NamedTuple):
    """What was seen of an instruction, on the host's clock; of a step at which nobody looked, nothing."""

    begun: float = 0.0  # when the host began to hand it over
    handed: float = 0.0  # when the host went on
    done: float = 0.0  # when the result was there
    asked: float = -math.inf  # for a send between processes, when the host of the process that receives it had asked for it
    process: int = 0  # whose host it was; the one that sends, of two
    run: Run | None = None  # of its program, in the trace
    seconds: float = 0.0  # how long it took, if each instruction waited for the one before


def covered(spans: Iterable[Span]) -> float:
    """Seconds that at least one of the spans covers."""
    total = until = 0.0
    for span in sorted(spans, key=lambda span: span.start):
        total += max(0.0, span.end - max(until, span.start))
        until = max(until, span.end)
    return total


def durations_of(plan: Plan, *ways: Sequence[Sequence[float]]) -> list[float]:
    """The seconds that each instruction takes alone: the median over steps, and over all instructions that do the same.

    Each of ``ways`` is to time the instructions of some steps, and adds something of its own: a tracer slows loops down, and from
    call to ready the host takes its part. So what an instruction takes is the least of the medians.
    """
    keys, found = _alike(plan), list[list[float]]()
    for steps in ways:
        pools: defaultdict[Hashable, list[float]] = defaultdict(list)
        for step in steps:
            for key, taken in zip(keys, step, strict=True):
                pools[key].append(taken)
        medians = {key: statistics.median(taken) for key, taken in pools.items()}
        found.append([medians[key] for key in keys])
    return [min(times) for times in zip(*found, strict=True)]


def _alike(plan: Plan) -> list[Hashable]:
    """What is equal for instructions that run the same program, or move what the same program made to the same stage."""
    made, keys = dict[int, Hashable](), list[Hashable]()
    for number, line in enumerate(plan.instructions):
        about, moved = line.about, tuple(made.get(slot) for slot in line.inputs)
        if about.program:
            keys.append(id(line.call))
        else:
            keys.append((about.stage, about.copies, moved) if moved and all(moved) else (line.label, number))
        made.update((slot, (keys[-1], k)) for k, slot in enumerate(line.outputs))
    return keys


def typical(steps: Sequence[Sequence[Span]]) -> int:
    """Which of several runs of the same instructions to show: the one whose instructions end nearest to their medians.

    A run of median length may have been held up among its forwards, and been quick afterwards.
    """
    ends = [[span.end for span in spans] for spans in steps]
    usual = [statistics.median(times) for times in zip(*ends, strict=True)]
    away = [sum(abs(end - at) for end, at in zip(mine, usual, strict=True)) for mine in ends]
    return away.index(min(away))


def line_times(
    plan: Plan, durations: Sequence[float], owner: Sequence[int], handed: Sequence[float] = ()
) -> list[tuple[float, float]]:
    """The clock of every compiled plan: when each line begins, and when it ends.

    A line begins when its operands are there, what computes its stage (``owner``) has done the lines before it, and the host has
    handed it over. A send waits for its operand alone; a copy to host memory or back also for the link, one in each direction.
    So whatever becomes a line is on the clock: updates, visits and steps in flow, of which a clock on actions has to be told. What
    computes a stage is its rank, or its device. Unless it is said when the host has ``handed`` over each line, it is so at once.
    """
    free: defaultdict[int, float] = defaultdict(float)
    links: defaultdict[tuple[int, MemoryCopy], float] = defaultdict(float)

    def times_of(number: int, line: Instruction, ready: float) -> tuple[float, float]:
        start = max(ready, handed[number]) if handed else ready
        if line.about.sends:
            return start, start + durations[number]
        rank = owner[line.about.stage]
        start = max(start, free[rank])
        if line.about.copies is None:
            end = free[rank] = start + durations[number]
        else:
            link = rank, line.about.copies
            start = max(start, links[link])
            end = links[link] = start + durations[number]
        return start, end

    return _times(plan, times_of)


def isolated_spans(plan: Plan, durations: Sequence[float], schedule: Schedule) -> tuple[Span, ...]:
    """The instructions on devices of their own, each as long as it takes alone; a rank has a link to host memory and one back."""
    return _spans(plan, schedule, [Stamp()] * len(durations), line_times(plan, durations, schedule.stage_to_rank))


def traced_spans(plan: Plan, stamps: Sequence[Stamp], durations: Sequence[float], schedule: Schedule) -> tuple[Span, ...]:
    """The instructions of a step as a trace has them; runs are on the clock of the stamps, if these have one.

    A send is no program, nor is a copy to host memory or back: it begins when it was handed over and its source is there, and takes
    as long as alone, but no longer than until a program begins that reads what it brings.
    """
    readers, zero = _readers(plan), beginning(stamps)

    def times_of(number: int, line: Instruction, ready: float) -> tuple[float, float]:
        del line
        stamp = stamps[number]
        if stamp.run is not None:
            return stamp.run.start - zero, stamp.run.end - zero
        start = max(ready, stamp.begun - zero, stamp.asked - zero)
        reads = [run.start - zero for k in readers[number] if (run := stamps[k].run) is not None]
        return start, max(start, min([start + durations[number], *reads]))

    return _spans(plan, schedule, stamps, _times(plan, times_of))


def watched_spans(plan: Plan, stamps: Sequence[Stamp], schedule: Schedule) -> tuple[Span, ...]:
    """When each instruction ran, if only its end is known: from the latest of what it had to wait for, to its stamp.

    If one program overtook another on its device, the latter begins too early here.
    """
    last: defaultdict[Device, float] = defaultdict(float)
    zero = beginning(stamps)

    def times_of(number: int, line: Instruction, ready: float) -> tuple[float, float]:
        begun, _, done, asked = (at - zero for at in stamps[number][:4])
        start = max(begun, asked, ready)
        if not line.about.sends and line.about.copies is None:
            before = last[line.about.device]
            start = max(start, before) if before <= done else start
            last[line.about.device] = max(before, done, start)
        return start, max(start, done)

    return _spans(plan, schedule, stamps, _times(plan, times_of))


def _times(plan: Plan, times_of: Callable[[int, Instruction, float], tuple[float, float]]) -> list[tuple[float, float]]:
    """What is said of each line when its operands are there."""
    there: defaultdict[int, float] = defaultdict(float)
    found = list[tuple[float, float]]()
    for number, line in enumerate(plan.instructions):
        found.append(times_of(number, line, max((there[slot] for slot in line.inputs), default=0.0)))
        there.update((slot, found[-1][1]) for slot in line.outputs)
    return found


def _spans(plan: Plan, schedule: Schedule, stamps: Sequence[Stamp], times: Sequence[tuple[float, float]]) -> tuple[Span, ...]:
    spans, zero = [], beginning(stamps)
    for number, (line, (start, end)) in enumerate(zip(plan.instructions, times, strict=True)):
        begun, handed, process = stamps[number].begun, stamps[number].handed, stamps[number].process
        about, action = line.about, cast("Action | None", line.about.action)
        where = schedule.stage_to_rank[about.stage], about.sends
        if about.fused is None:
            host = begun - zero, handed - zero
            spans.append(Span(line.label, action, *where, start, end, *host, process, about.copies is not None))
            continue
        behind, between = about.fused.action, start + about.fused.share * (end - start)
        spans.append(Span(str(action), action, *where, start, between, begun - zero, handed - zero, process))
        spans.append(Span(str(behind), behind, *where, between, end, handed - zero, handed - zero, process))
    return tuple(spans)


def beginning(stamps: Sequence[Stamp]) -> float:
    """When the first host began, from which the times of a step are counted."""
    return min(stamp.begun for stamp in stamps)


def _readers(plan: Plan) -> list[list[int]]:
    writer: dict[int, int] = {}
    found: list[list[int]] = [[] for _ in plan.instructions]
    for number, line in enumerate(plan.instructions):
        for slot in line.inputs:
            if slot in writer:
                found[writer[slot]].append(number)
        writer.update((slot, number) for slot in line.outputs)
    return found
