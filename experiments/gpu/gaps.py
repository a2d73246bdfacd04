"""When a device was busy in a trace of JAX's profiler, whatever the planes of its backend are called, and the gaps between.

On a GPU or TPU, planes called ``/device:...`` hold lines of events. The lines of a GPU's streams have one event a kernel, whose
statistics name its module; lines derived from those ("XLA Modules", "Steps") say the same again. CPU traces have no such planes;
there the runs of programs are read as ``pipe.profile`` reads them.
"""

import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from jax.profiler import ProfileData

from jaxpp.observe.profile.trace import read_runs

__all__ = ["Gap", "Span", "busy_lanes", "described", "device_lanes", "gaps_between"]

DERIVED = ("XLA Modules", "XLA Ops", "XLA TraceMe", "Steps", "Framework", "TensorFlow", "Source", "Launch Stats", "Async")
"""How the names of lines begin that say again what other lines say."""
_FEW = 3


class Span(NamedTuple):
    """Something that ran, in seconds on the clock of the trace, and the program that it was of."""

    start: float
    end: float
    program: str


class Gap(NamedTuple):
    """Idle time of a device, and the programs that ran before it and after it."""

    seconds: float
    before: str
    after: str


def busy_lanes(folder: Path) -> dict[str, list[Span]]:
    """What ran on each device in the newest trace of a folder, by the names of the devices."""
    with warnings.catch_warnings():  # JAX 0.11's reader warns of itself
        warnings.simplefilter("ignore", DeprecationWarning)
        data = _newest(folder)
        lanes = device_lanes(data.planes)
        if lanes:
            return lanes
    found: dict[str, list[Span]] = {}
    for (ordinal, program, _), runs in read_runs(folder).of_program.items():
        found.setdefault(f"device {ordinal}", []).extend(Span(run.start, run.end, program or "no name") for run in runs)
    return found


def device_lanes(planes: Iterable[Any]) -> dict[str, list[Span]]:
    """The events of each plane of a device: of its compute streams if it names those, or else of all lines that are not derived."""
    found = {}
    for plane in planes:
        if plane.name.startswith("/device:") and "CUSTOM" not in plane.name:
            lines = [line for line in plane.lines if not line.name.startswith(DERIVED)]
            streams = [line for line in lines if re.search(r"stream", line.name, re.IGNORECASE)]
            compute = [line for line in streams if "compute" in line.name.lower()]
            chosen = compute or [line for line in streams if "memcpy" not in line.name.lower()] or lines
            spans = [Span(event.start_ns / 1e9, event.end_ns / 1e9, _program(event)) for line in chosen for event in line.events]
            if spans:
                found[plane.name] = spans
    return found


def _program(event: Any) -> str:
    """The module that an event is of, if its statistics say; otherwise the event's own name."""
    return str(dict(event.stats).get("hlo_module", event.name)).removeprefix("jit_")


def gaps_between(spans: Sequence[Span], steps: int) -> list[Gap]:
    """The idle times in the steady state: half a step after the first event until half a step before the last.

    Args:
        spans: of one device; they may overlap.
        steps: how many were traced.
    """
    ordered = sorted(spans)
    if not ordered:
        return []
    first, last = ordered[0].start, max(span.end for span in ordered)
    margin = (last - first) / (2 * max(1, steps))
    until, before, found = ordered[0].end, ordered[0].program, []
    for span in ordered[1:]:
        if span.start > until and first + margin <= until and span.start <= last - margin:
            found.append(Gap(span.start - until, before, span.program))
        if span.end > until:
            until, before = span.end, span.program
    return found


def described(folder: Path) -> list[str]:
    """Every plane and line of the newest trace, with a few events and the names of their statistics."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        data = _newest(folder)
        return [text for plane in data.planes for text in _plane(plane)]


def _plane(plane: Any) -> Iterator[str]:
    yield f"plane {plane.name!r}"
    for line in plane.lines:
        events = list(line.events)
        yield f"  line {line.name!r}: {len(events)} events"
        for event in islice(events, len(events) // 2, len(events) // 2 + _FEW):  # from the middle: the steady state
            stats = {key: str(value)[:60] for key, value in event.stats}
            yield f"    {event.name[:80]!r} {event.duration_ns:.0f} ns {stats}"


def _newest(folder: Path) -> Any:
    return ProfileData.from_file(str(max(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)))
