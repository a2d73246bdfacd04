"""Memory before the first step: what each device will hold when it holds most, from shapes alone.

The step, or the forwards of a batch, are lowered and compiled, not run. ``liveness`` says which arrays are alive at each moment,
and the compiler what each program needs besides. The highest sum of both is a device's peak. If that is too much, ``advice`` says
what to change.
"""

import dataclasses
import numbers
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jaxpp.engine.engine import Engine
from jaxpp.engine.outcome import Purpose
from jaxpp.errors import ArgumentError
from jaxpp.observe.memory.advice import Change, changes
from jaxpp.observe.memory.all_ranks import liveness_of_all
from jaxpp.observe.memory.liveness import MEMORY_KINDS, Life, Liveness, memory_kind
from jaxpp.plan.builder import Name
from jaxpp.runtime.placement import Placement
from jaxpp.runtime.processes.here import is_here
from jaxpp.stages.stage_table import bytes_in_words
from jaxpp.tables import fold_lines, html_remarks, html_table, table_lines
from jaxpp.types import Batch, Device, Key

__all__ = ["Forecast", "StageMemory", "forecast", "forecast_of", "optimizer_lives", "parse_bytes", "room_of"]

_MOST = 6  # changes that are shown
_TRIED: Mapping[Purpose, str] = {
    "update": "microbatches, schedules, remat, twice the stages",
    "forward": "smaller batches, microbatches, twice the stages",
}


class StageMemory(NamedTuple):
    """What one stage takes when its device holds most.

    Attributes:
        stage: the number of the stage.
        device: where it lives.
        kinds: bytes of arrays, one number for each of ``MEMORY_KINDS``.
        num_residuals: how many microbatches have residuals there.
        temporaries: bytes that the program running then needs besides.
    """

    stage: int
    device: Device
    kinds: tuple[int, ...]
    num_residuals: int
    temporaries: int

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays and temporaries."""
        return sum(self.kinds) + self.temporaries

    @property
    def residuals(self) -> int:
        """Bytes of the residuals of one microbatch."""
        return self.kinds[MEMORY_KINDS.index("residuals")] // max(1, self.num_residuals)


@dataclass(frozen=True)
class Forecast:
    """Memory of a step, or of forwards. ``print`` it for a table and, if it does not fit, for what to change.

    Attributes:
        liveness: when each array is alive, and where.
        stages: what each stage takes at the peak of its device.
        moments: the line that runs at the peak of each device.
        hbm: bytes that each device has; None if that is not known.
        changes: what would make it fit, the least slowdown first; empty if it fits, or if nothing that was tried fits.
        tried: what was looked at, in words.
    """

    liveness: Liveness
    stages: tuple[StageMemory, ...]
    moments: Mapping[Device, str]
    hbm: int | None
    changes: tuple[Change, ...] = ()
    tried: str = _TRIED["update"]

    @property
    def peaks(self) -> dict[Device, int]:
        """Bytes of each device at its peak, temporaries included."""
        return {device: sum(row.num_bytes for row in self.stages if row.device == device) for device in self.liveness.devices}

    @property
    def hosted(self) -> dict[Device, int]:
        """Bytes of residuals that wait in host memory beside each device, at most; they are not among its ``peaks``."""
        return {device: self.liveness.most_hosted(device) for device in self.liveness.devices}

    @property
    def fits(self) -> bool:
        """Whether every device has room; True if it is not known how much there is."""
        return self.hbm is None or max(self.peaks.values()) <= self.hbm

    def __str__(self) -> str:
        changes = self._changes()
        lines = [*table_lines(self._cells(), keep=2), "", *fold_lines(self._remarks()), *(table_lines(changes) if changes else [])]
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        changes = self._changes()
        return f"{html_table(self._cells())}{html_remarks(self._remarks())}{html_table(changes) if changes else ''}"

    def _cells(self) -> list[list[str]]:
        shown = [k for k in range(len(MEMORY_KINDS)) if any(row.kinds[k] for row in self.stages)]
        rows = [["stage", "device", *(MEMORY_KINDS[k] for k in shown), "temporaries", "sum", "at"]]
        for row in self.stages:
            sizes = [_size(row.kinds[k]) + f" ({row.num_residuals})" * (MEMORY_KINDS[k] == "residuals") for k in shown]
            rows.append(
                [str(row.stage), str(row.device), *sizes, _size(row.temporaries), _size(row.num_bytes), self.moments[row.device]]
            )
        return rows

    def _remarks(self) -> list[str]:
        """What the table's marks mean, the peaks where devices have several stages, and whether the step fits."""
        brackets = "in brackets: microbatches whose residuals are held; " * any(row.num_residuals for row in self.stages)
        lines = [f"{brackets}at: what runs when the device holds most"]
        if len(self.stages) > len(self.peaks):
            lines.append("peak: " + ", ".join(f"{device} {_size(peak)}" for device, peak in self.peaks.items()))
        if any(self.hosted.values()):
            beside = ", ".join(f"{_size(size)} beside {device}" for device, size in self.hosted.items() if size)
            lines.append(f"in host memory, at most: residuals of {beside}")
        if self.liveness.unknown:
            where = ", ".join(map(str, self.liveness.unknown))
            lines.append(
                f"temporaries of {where} are not known here and not counted: this process has fewer devices than a rank there"
            )
        if self.hbm is None:
            return lines
        worst = max(self.peaks, key=self.peaks.__getitem__)
        need = f"{worst} needs {_size(self.peaks[worst])} of {_size(self.hbm)}"
        if self.fits:
            return [*lines, f"it fits: {need}"]
        kinds = list(map(sum, zip(*((*row.kinds, row.temporaries) for row in self.stages if row.device == worst), strict=True)))
        most = max(range(len(kinds)), key=kinds.__getitem__)
        lines.append(f"it does not fit: {need}, most of that {(*MEMORY_KINDS, 'temporaries')[most]} ({_size(kinds[most])})")
        lines += [
            f"{change.what}: that time is without the copies to the host and back, of {_size(change.moved)} for each microbatch of "
            "a stage; they delay nothing if each is shorter than an action"
            for change in self.changes[:_MOST]
            if change.moved
        ]
        if not self.changes:
            lines.append(f"nothing that was looked at fits ({self.tried}): use more devices")
        return lines

    def _changes(self) -> list[list[str]]:
        """What would make the step fit, as a table; empty if there is nothing to change or nothing helps."""
        head = ["what should fit (estimates), the quickest first", "peak", "time"]
        rows = [[change.what, _size(change.peak), f"x {change.slowdown:.2f}"] for change in self.changes[:_MOST]]
        return [head, *rows] if rows else []


def _size(num_bytes: int) -> str:
    return bytes_in_words(num_bytes) if num_bytes else "0"


def forecast(
    engine: Engine,
    batch: Batch,
    key: Key | None,
    room: int | None = None,
    waiting: Sequence[Name] = (),
    *,
    purpose: Purpose = "update",
    base: Engine | None = None,
    advise: bool = True,
) -> Forecast:
    """The memory of a step that takes over the buffers of its state; leaves on the host are counted where they are sent.

    All ranks are told of, also those of other processes, which are not asked.

    Args:
        engine: runs the step.
        batch: or its shapes.
        key: or its shape, or None.
        room: the bytes that each device has; what the devices of this process say themselves unless given.
        waiting: leaves of which another copy waits for the next step (the prefetched set of a bank), once for each time that they
            are named.
        purpose: what is run.
        base: the engine that trains the parameters, for forwards of another function: its optimizer's state lives there too.
        advise: whether to look for what would make it fit, if it does not.
    """
    room = room_of(engine, room)
    liveness = liveness_of_all(engine, batch, key, purpose)
    end = len(liveness.lines) + 1
    beside = [] if base is None else optimizer_lives(base, end)
    if waiting:
        held = {life.name: life for life in (*liveness.lives, *beside) if life.begins == 0}
        beside += [held[name]._replace(ends=end) for name in waiting]
    found = forecast_of(dataclasses.replace(liveness, lives=(*liveness.lives, *beside)), engine.placement, room)
    if found.fits or room is None or not advise:
        return found
    needs = {
        device: (sum(row.temporaries for row in rows), max(row.residuals for row in rows))
        for device in found.peaks
        if (rows := [row for row in found.stages if row.device == device])
    }
    room -= max(_bytes_on(beside, device) for device in found.peaks) if purpose == "forward" else 0
    return dataclasses.replace(found, changes=changes(engine, batch, key, needs, room, purpose), tried=_TRIED[purpose])


def forecast_of(liveness: Liveness, placement: Placement, room: int | None) -> Forecast:
    """What each stage holds when its device holds most, of what is alive; ``room`` is the bytes that each device has, if known."""
    peaks = {device: liveness.peak(device) for device in liveness.devices}
    devices = [place.shown for place in placement.places]
    stages = tuple(_stage_memory(liveness, stage, device, peaks[device]) for stage, device in enumerate(devices))
    moments = {device: liveness.lines[moment - 1].label for device, moment in peaks.items()}
    return Forecast(liveness, stages, moments, room)


def room_of(engine: Engine, room: int | None) -> int | None:
    """The bytes that each device has: ``room`` if it is given, else what the devices of this process say themselves, if they do."""
    mine = [device for device in engine.options.devices if is_here(device)]
    limits = [stats["bytes_limit"] for device in mine if "bytes_limit" in (stats := device.memory_stats() or {})]
    return min(limits, default=None) if room is None else room


def optimizer_lives(engine: Engine, end: int) -> list[Life]:
    """The optimizer's state (and the loss scale), which stays where it is while forwards run, up to a moment."""
    placed = engine.placed
    names = [*placed.names.all_opt, *placed.names.loss_scale]
    shapes = [*placed.shapes.all_opt, *placed.shapes.loss_scale]
    places = [engine.placement[name.stage] for name in names]
    return [
        Life(name, place.shown, place.num_bytes(name.ref, aval), memory_kind(name), 0, end)
        for name, aval, place in zip(names, shapes, places, strict=True)
    ]


def _bytes_on(lives: Sequence[Life], device: Device) -> int:
    return sum(life.num_bytes for life in lives if life.device == device)


def _stage_memory(liveness: Liveness, stage: int, device: Device, moment: int) -> StageMemory:
    alive = [life for life in liveness.alive(device, moment) if life.name.stage == stage]
    kinds = tuple(sum(life.num_bytes for life in alive if life.kind == kind) for kind in MEMORY_KINDS)
    held = {life.name.microbatch for life in alive if life.kind == "residuals"}
    runs = liveness.lines[moment - 1].stage == stage
    return StageMemory(stage, device, kinds, len(held), liveness.temporary(device, moment) * runs)


def parse_bytes(size: float | str) -> int:
    """The bytes of a size as people write sizes.

    Example:
        >>> parse_bytes("1.5 KiB"), parse_bytes("80GB"), parse_bytes(4096)
        (1536, 80000000000, 4096)

    Raises:
        ArgumentError: it is not a size, or less than a byte.
    """
    text = format(size, "f") if isinstance(size, numbers.Real) and not isinstance(size, bool) else str(size)
    found = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*(?:([kmgt]?)(i?)b)?\s*", text, re.IGNORECASE)
    base = 1024 if found and found[3] else 1000
    room = int(float(found[1]) * base ** " kmgt".index((found[2] or " ").lower())) if found else 0
    if isinstance(size, bool) or room < 1:
        rule = "a size is a number of bytes, at least 1, or a number with a unit"
        raise ArgumentError(f"hbm={size!r}", rule, repr(size), 'pass for example "80GiB"')
    return room
