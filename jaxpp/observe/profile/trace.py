"""What JAX's own profiler recorded: when each compiled program ran on its device.

``jax.profiler.ProfileData`` reads planes, lines and events. On CPU each operation is an event of the thread that ran it, with the
number of its run, its program and its device. On TPU a device's plane has a line "XLA Modules" with one event for each run. On GPU
a device's plane has a line for each stream, with one event for each kernel, which names its program and the call of the driver
that launched it; that call lies, on a thread of the host, within the event of a run. A plan hands the programs of a device over in
a fixed order, and a compiled program numbers its runs. So the k-th run of a program on a device belongs to the k-th instruction
that runs the program there, step after step (``matched``).
"""

import itertools
import re
import warnings
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jax.profiler import ProfileData

from jaxpp.lowering.plan import Plan
from jaxpp.runtime.place import devices_of
from jaxpp.runtime.processes.here import is_here

STEP = "jaxpp step"  # the annotation of a step in a trace

_DEVICE_PLANE = re.compile(r"^/device:[A-Za-z]+:(\d+)")
_MODULES = "XLA Modules"


class TraceError(Exception):
    """A trace that does not have the runs of a plan. Users never see it: ``Profile.missing`` says the same."""


class DamagedTraceError(TraceError):
    """A trace whose file cannot be read."""


class Run(NamedTuple):
    """One run of a compiled program on one device, from its first operation to its last, in seconds on the clock of the trace."""

    start: float
    end: float


ProgramKey = tuple[int, str, Hashable]  # ordinal of a device, name of a program, what tells programs of that name apart
_RunKey = tuple[int, int]  # the ordinal of a device, and the number of a run


class Runs(NamedTuple):
    """All runs of a trace, of a program in the order in which they were handed over, and when each annotated step began."""

    of_program: dict[ProgramKey, list[Run]]
    steps: list[float]


def read_runs(folder: Path) -> Runs:
    """The runs in the newest trace of a folder of ``jax.profiler.trace``; an error if there is none, or it is damaged."""
    files = sorted(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    if not files:
        raise FileNotFoundError(f"no trace (*.xplane.pb) in {folder}")
    with warnings.catch_warnings():  # JAX 0.11's reader warns of itself, and ends the process if that warning is an error
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            return runs_in(ProfileData.from_file(str(files[-1])))
        except Exception as error:  # whatever JAX's reader says of such a file, or its parts make of ours
            why = " ".join(str(error).split())[:200]
            raise DamagedTraceError(f"{files[-1]} cannot be read: {type(error).__name__}: {why}") from error


def runs_in(data: Any) -> Runs:
    """The runs of a ``ProfileData``, whose planes and events live as long as it does."""
    events: defaultdict[ProgramKey, dict[float, Run]] = defaultdict(dict)
    unnamed: dict[_RunKey, Run] = {}
    named: dict[_RunKey, tuple[str, Hashable]] = {}
    kernels: dict[int, list[_Kernel]] = {}
    threads: list[Any] = []
    steps: list[float] = []
    for plane in data.planes:
        device = _DEVICE_PLANE.match(plane.name)
        for line in plane.lines:
            if device and line.name == _MODULES:
                for event in line.events:
                    key = int(device[1]), event.name.split("(")[0].removeprefix("jit_"), event.name
                    events[key][event.start_ns] = Run(event.start_ns / 1e9, event.end_ns / 1e9)
            elif device:
                kernels.setdefault(int(device[1]), []).extend(_kernels(line.events))
            else:
                steps += [event.start_ns / 1e9 for event in line.events if event.name == STEP]
                _operations(line.events, unnamed, named)
                threads.append(line)
    for (ordinal, number), run in unnamed.items():
        events[ordinal, *named.get((ordinal, number), ("", None))][number] = run
    began = {number: at for line in threads for number, at in _launches(line.events).items()} if any(kernels.values()) else {}
    for ordinal in kernels.keys() - {ordinal for ordinal, _, _ in events}:
        for kernel, number in zip(kernels[ordinal], _numbers(kernels[ordinal], began), strict=True):
            runs = events[ordinal, kernel.program, kernel.number]
            runs[number] = _joined(runs.get(number), kernel.run)
    return Runs({key: [runs[number] for number in sorted(runs)] for key, runs in _apart(events)}, sorted(steps))


class _Kernel(NamedTuple):
    """A kernel of a GPU, the program that it is of, the number of that, and of the call of the driver that launched it."""

    run: Run
    program: str
    number: Hashable
    launch: str


def _kernels(events: Iterable[Any]) -> Iterator[_Kernel]:
    """What ran on a stream, except copies that are of no program."""
    for event in events:
        found = dict(event.stats)
        if "hlo_module" in found:
            run = Run(event.start_ns / 1e9, event.end_ns / 1e9)
            program = str(found["hlo_module"]).removeprefix("jit_")
            yield _Kernel(run, program, found.get("program_id"), str(found.get("correlation_id")))


def _launches(events: Iterable[Any]) -> dict[str, int]:
    """When the run began to be handed over that each call of the driver on this thread is of, by the number of the call."""
    runs, launches = list[tuple[int, int]](), list[tuple[int, str]]()
    for event in events:
        found = dict(event.stats)
        if "run_id" in found and "device_ordinal" not in found:
            runs.append((event.start_ns, event.end_ns))
        elif "correlation_id" in found:
            launches.append((event.start_ns, str(found["correlation_id"])))
    runs.sort()
    starts, began = [start for start, _ in runs], dict[str, int]()
    for at, number in launches:
        last = bisect_right(starts, at) - 1
        if last >= 0 and at <= runs[last][1]:
            began[number] = starts[last]
    return began


def _numbers(kernels: Sequence[_Kernel], began: Mapping[str, int]) -> list[float]:
    """What tells the run of each kernel from others of its program, in order.

    It is when the run was handed over; or, if the trace does not say that, when the first kernel began of those that are of one
    program and follow each other. Two runs of a program behind each other are one then, and will not match a plan.
    """
    numbers, before, first = [0.0] * len(kernels), None, 0.0
    for k in sorted(range(len(kernels)), key=lambda k: kernels[k].run.start):
        kernel = kernels[k]
        if (kernel.program, kernel.number) != before:
            before, first = (kernel.program, kernel.number), 1e9 * kernel.run.start
        numbers[k] = began.get(kernel.launch, first)
    return numbers


def _operations(events: Iterable[Any], runs: dict[_RunKey, Run], names: dict[_RunKey, tuple[str, Hashable]]) -> None:
    for event in events:
        found = dict(event.stats)
        if "run_id" not in found or "device_ordinal" not in found:
            continue
        key = found["device_ordinal"], found["run_id"]
        runs[key] = _joined(runs.get(key), Run(event.start_ns / 1e9, event.end_ns / 1e9))
        if "hlo_module" in found:
            names[key] = found["hlo_module"].removeprefix("jit_"), found.get("program_id")


def _apart(events: dict[ProgramKey, dict[float, Run]]) -> Iterator[tuple[ProgramKey, dict[float, Run]]]:
    """The runs by program; runs without an operation, and so without a name, by their numbers, which are consecutive."""
    for (device, name, program), runs in events.items():
        if name:
            yield (device, name, program), runs
            continue
        consecutive = itertools.groupby(enumerate(sorted(runs)), key=lambda place: place[1] - place[0])
        for k, (_, group) in enumerate(consecutive):
            yield (device, "", k), {number: runs[number] for _, number in group}


def matched(plan: Plan, runs: Runs, num_steps: int) -> list[list[Run | None]]:
    """The run of each instruction in each step of a trace, from the step's beginning, None for a send; or a TraceError.

    A step begins when it is called, or, if the devices then still work for the step before it, with the first of its own runs.
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
                found[step][lines[line]] = _joined(found[step][lines[line]], run)
    return [_from_its_beginning(step, found[:k], runs.steps[k]) for k, step in enumerate(found)]


def _from_its_beginning(step: list[Run | None], before: Sequence[list[Run | None]], called: float) -> list[Run | None]:
    earlier = max((run.end for each in before[-1:] for run in each if run), default=called)
    first = min((run.start for run in step if run), default=called)
    begun = first if earlier > called else called
    return [run and Run(run.start - begun, run.end - begun) for run in step]


def _by_program(plan: Plan) -> dict[tuple[int, str], list[list[int]]]:
    """For each device and program name the instructions of each compiled program of that name, in the order handed over."""
    calls: defaultdict[tuple[int, str], dict[int, list[int]]] = defaultdict(dict)
    for number, line in enumerate(plan.instructions):
        if line.about.program:
            for device in filter(is_here, devices_of(line.about.device)):
                # A trace numbers the devices of its process, but on CPU those of all.
                local = None if device.platform == "cpu" else getattr(device, "local_hardware_id", None)
                ordinal = device.id if local is None else local
                calls[ordinal, line.about.program].setdefault(id(line.call), []).append(number)
    return {key: list(found.values()) for key, found in calls.items()}


def _joined(known: Run | None, run: Run) -> Run:
    """A run of several operations, or on several devices, is from the first that begins to the last that ends."""
    return run if known is None else Run(min(known.start, run.start), max(known.end, run.end))
