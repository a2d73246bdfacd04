"""Which run in a trace belongs to which instruction of a plan.

A plan hands the programs of a device over in a fixed order, and a compiled program numbers its runs. So the k-th run of a program
on a device belongs to the k-th instruction that runs it there, step after step. If the numbers do not match, that is an error.
"""

from collections import defaultdict

from jaxpp.observe.profile.trace import Run, Runs
from jaxpp.plan.plan import Plan
from jaxpp.runtime.place import devices_of
from jaxpp.types import Device

__all__ = ["TraceError", "matched"]


class TraceError(Exception):
    """A trace that does not have the runs of a plan. Users never see it: ``Profile.missing`` says the same."""


def matched(plan: Plan, runs: Runs, num_steps: int) -> list[list[Run | None]]:
    """The run of each instruction in each step of a trace, from the beginning of the step; None for a send.

    Args:
        plan: what was run; nothing else in the trace may have programs of these names.
        runs: of the trace.
        num_steps: how often the plan was run.

    Raises:
        TraceError: the trace has other runs than the plan.
    """
    if len(runs.steps) != num_steps:
        raise TraceError(f"{len(runs.steps)} steps in the trace, {num_steps} were run")
    first = runs.steps[0]  # what a step before it had left to do may still run in the trace
    later = {key: [run for run in group if run.start >= first] for key, group in runs.of_program.items()}
    of_program = {key: group for key, group in later.items() if group}
    found: list[list[Run | None]] = [[None] * len(plan.instructions) for _ in range(num_steps)]
    for (ordinal, name), mine in _by_program(plan).items():
        there = [group for (device, called, _), group in of_program.items() if (device, called) == (ordinal, name)]
        if not there:  # no operation: XLA made nothing of it, and the trace no name
            sizes = {len(lines) * num_steps for lines in mine}
            there = [group for (device, called, _), group in of_program.items() if device == ordinal and not called]
            there = [group for group in there if len(group) in sizes]
        there.sort(key=lambda group: group[0].start)
        if [len(group) for group in there] != [len(lines) * num_steps for lines in mine]:
            wanted = sum(map(len, mine)) * num_steps
            raise TraceError(f"{sum(map(len, there))} runs of {name} on device {ordinal} in the trace, {wanted} were handed over")
        for lines, group in zip(mine, there, strict=True):
            for number, run in enumerate(group):
                step, line = divmod(number, len(lines))
                begun = runs.steps[step]
                _add(found[step], lines[line], Run(run.start - begun, run.end - begun))
    return found


def _by_program(plan: Plan) -> dict[tuple[int, str], list[list[int]]]:
    """For each device and program name the instructions of each compiled program of that name, in the order handed over."""
    calls: defaultdict[tuple[int, str], dict[int, list[int]]] = defaultdict(dict)
    for number, line in enumerate(plan.instructions):
        if line.about.program:
            for device in devices_of(line.about.device):
                calls[ordinal_of(device), line.about.program].setdefault(id(line.call), []).append(number)
    return {key: list(found.values()) for key, found in calls.items()}


def _add(step: list[Run | None], line: int, run: Run) -> None:
    """Add the run of one device; a program on several devices runs from the first that begins to the last that ends."""
    known = step[line]
    step[line] = run if known is None else Run(min(known.start, run.start), max(known.end, run.end))


def ordinal_of(device: Device) -> int:
    """The number by which a trace knows a device."""
    ordinal = getattr(device, "local_hardware_id", None)
    return device.id if ordinal is None else ordinal
