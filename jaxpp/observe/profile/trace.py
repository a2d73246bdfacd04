"""What JAX's own profiler recorded: when each compiled program ran on its device.

``jax.profiler.ProfileData`` reads planes, lines and events. On CPU each operation is an event of the thread that ran it, with the
number of its run, its program and its device; on GPU and TPU a device's plane has a line "XLA Modules" with one event for each run.
A plan hands the programs of a device over in a fixed order, and a compiled program numbers its runs. So the k-th run of a program
on a device belongs to the k-th instruction that runs the program there, step after step (``matched``).
"""

import itertools
import re
import warnings
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from jax.profiler import ProfileData

from jaxpp.plan.plan import Plan
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
    """The runs in the newest trace of a folder that was given to ``jax.profiler.trace``.

    Raises:
        FileNotFoundError: there is none.
        DamagedTraceError: its file is not what the profiler has written.
    """
    files = sorted(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    if not files:
        raise FileNotFoundError(f"no trace (*.xplane.pb) in {folder}")
    with warnings.catch_warnings():  # JAX 0.11's reader warns of itself, and ends the process if that warning is an error
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            return _runs_of(ProfileData.from_file(str(files[-1])))
        except Exception as error:  # whatever JAX's reader says of such a file, or its parts make of ours
            why = " ".join(str(error).split())[:200]
            raise DamagedTraceError(f"{files[-1]} cannot be read: {type(error).__name__}: {why}") from error


def _runs_of(data: Any) -> Runs:
    """The runs of a ``ProfileData``, whose planes and events live as long as it does."""
    events: defaultdict[ProgramKey, dict[int, Run]] = defaultdict(dict)
    unnamed: dict[_RunKey, Run] = {}
    named: dict[_RunKey, tuple[str, Hashable]] = {}
    steps: list[float] = []
    for plane in data.planes:
        device = _DEVICE_PLANE.match(plane.name)
        for line in plane.lines:
            if device and line.name == _MODULES:
                for event in line.events:
                    key = int(device[1]), event.name.split("(")[0].removeprefix("jit_"), event.name
                    events[key][event.start_ns] = Run(event.start_ns / 1e9, event.end_ns / 1e9)
            elif not device:
                steps += [event.start_ns / 1e9 for event in line.events if event.name == STEP]
                _operations(line.events, unnamed, named)
    for (ordinal, number), run in unnamed.items():
        events[ordinal, *named.get((ordinal, number), ("", None))][number] = run
    return Runs({key: [runs[number] for number in sorted(runs)] for key, runs in _apart(events)}, sorted(steps))


def _operations(events: Iterable[Any], runs: dict[_RunKey, Run], names: dict[_RunKey, tuple[str, Hashable]]) -> None:
    for event in events:
        found = dict(event.stats)
        if "run_id" not in found or "device_ordinal" not in found:
            continue
        key = found["device_ordinal"], found["run_id"]
        runs[key] = _joined(runs.get(key), Run(event.start_ns / 1e9, event.end_ns / 1e9))
        if "hlo_module" in found:
            names[key] = found["hlo_module"].removeprefix("jit_"), found.get("program_id")


def _apart(events: dict[ProgramKey, dict[int, Run]]) -> Iterator[tuple[ProgramKey, dict[int, Run]]]:
    """The runs by program; runs without an operation, and so without a name, by their numbers, which are consecutive."""
    for (device, name, program), runs in events.items():
        if name:
            yield (device, name, program), runs
            continue
        consecutive = itertools.groupby(enumerate(sorted(runs)), key=lambda place: place[1] - place[0])
        for k, (_, group) in enumerate(consecutive):
            yield (device, "", k), {number: runs[number] for _, number in group}


def matched(plan: Plan, runs: Runs, num_steps: int) -> list[list[Run | None]]:
    """The run of each instruction in each step of a trace, from the step's beginning, None for a send; or a TraceError."""
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
                begun, known = runs.steps[step], found[step][lines[line]]
                found[step][lines[line]] = _joined(known, Run(run.start - begun, run.end - begun))
    return found


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
