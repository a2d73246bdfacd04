"""What JAX's own profiler recorded: when each compiled program ran on its device.

``jax.profiler.trace`` writes a file of planes, lines and events; ``jax.profiler.ProfileData`` reads it. The events of a run are in
different places on different backends:

* CPU: each operation is an event of the thread that ran it, with the number of its run, its program and its device.
* GPU, TPU: the plane of a device has a line "XLA Modules" with one event for each run.

The name of a module is that of its program (``Program.name``) after ``jit_``.
"""

import re
import warnings
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from jax.profiler import ProfileData

__all__ = ["STEP", "Run", "Runs", "read_runs"]

STEP = "jaxpp step"
"""The annotation of a step in a trace."""

_DEVICE_PLANE = re.compile(r"^/device:[A-Za-z]+:(\d+)")
_MODULES = "XLA Modules"


class Run(NamedTuple):
    """One run of a compiled program on one device, in seconds on the clock of the trace.

    Attributes:
        start: its first operation began.
        end: its last operation was done.
    """

    start: float
    end: float


ProgramKey = tuple[int, str, Hashable]
"""The ordinal of a device, the name of a program, and what tells compiled programs of that name apart."""
_RunKey = tuple[int, int]  # the ordinal of a device, and the number of a run


class Runs(NamedTuple):
    """All runs of a trace.

    Attributes:
        of_program: the runs in the order in which they were handed over, for each device, program name and compiled program
            (several compiled programs may have the same name).
        steps: when each annotated step began.
    """

    of_program: dict[ProgramKey, list[Run]]
    steps: list[float]


def read_runs(folder: Path) -> Runs:
    """The runs in the newest trace of a folder that was given to ``jax.profiler.trace``.

    Raises:
        FileNotFoundError: there is no trace in it.
    """
    with warnings.catch_warnings():  # JAX 0.11's reader warns of itself, and ends the process if that warning is an error
        warnings.simplefilter("ignore", DeprecationWarning)
        return _read(folder)


def _read(folder: Path) -> Runs:
    files = sorted(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    if not files:
        raise FileNotFoundError(f"no trace (*.xplane.pb) in {folder}")
    events: defaultdict[ProgramKey, dict[int, Run]] = defaultdict(dict)
    unnamed: dict[_RunKey, Run] = {}
    named: dict[_RunKey, tuple[str, Hashable]] = {}
    steps: list[float] = []
    data = ProfileData.from_file(str(files[-1]))  # its planes and events live as long as it does
    for plane in data.planes:
        device = _DEVICE_PLANE.match(plane.name)
        for line in plane.lines:
            if device and line.name == _MODULES:
                for event in line.events:
                    key = int(device[1]), _name(event.name.split("(")[0]), event.name
                    events[key][event.start_ns] = Run(event.start_ns / 1e9, event.end_ns / 1e9)
            elif not device:
                steps += [event.start_ns / 1e9 for event in line.events if event.name == STEP]
                _operations(line.events, unnamed, named)
    for (ordinal, number), run in unnamed.items():
        events[ordinal, *named.get((ordinal, number), ("", None))][number] = run
    return Runs({key: [runs[number] for number in sorted(runs)] for key, runs in _apart(events)}, sorted(steps))


def _operations(events: Iterable[Any], runs: dict[_RunKey, Run], names: dict[_RunKey, tuple[str, Hashable]]) -> None:
    """Add the operations of a thread to the runs that they are of."""
    for event in events:
        found = dict(event.stats)
        if "run_id" not in found or "device_ordinal" not in found:
            continue
        key = found["device_ordinal"], found["run_id"]
        start, end = event.start_ns / 1e9, event.end_ns / 1e9
        known = runs.get(key)
        runs[key] = Run(start, end) if known is None else Run(min(start, known.start), max(end, known.end))
        if "hlo_module" in found:
            names[key] = _name(found["hlo_module"]), found.get("program_id")


def _apart(events: dict[ProgramKey, dict[int, Run]]) -> Iterator[tuple[ProgramKey, dict[int, Run]]]:
    """The runs by program; runs without an operation, and so without a name, by their numbers, which are consecutive."""
    for (device, name, program), runs in events.items():
        if name:
            yield (device, name, program), runs
            continue
        groups: list[dict[int, Run]] = []
        last = None
        for number in sorted(runs):
            if last is None or number != last + 1:
                groups.append({})
            groups[-1][number] = runs[number]
            last = number
        yield from (((device, "", k), group) for k, group in enumerate(groups))


def _name(module: str) -> str:
    return module.removeprefix("jit_")
