"""What is alive on each device while a step runs, from its lines and the shapes of its values; nothing runs.

Every value of a step has a name, a size, a line that makes it and a line after which it is freed. So the bytes that a device holds
at any moment are a sum over values, which is known before the first step (``forecast``), and can be compared with what is really
alive (``ledger``).

Moment 0 is the beginning of the step. At moment k + 1 line k has been handed over and nothing has been freed after it. The last
moment is the end of the step. Residuals that wait in host memory are not on the device; what they take there is told apart
(``hosted``). Devices run their programs in the order in which they are handed over, so these are also the moments
of the device.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Int

from jaxpp.engine.engine import Engine
from jaxpp.engine.outcome import LoweredStep
from jaxpp.plan.builder import CALLER, Name
from jaxpp.runtime.bind import Bound, BoundLine
from jaxpp.runtime.compile import PlacedProgram, Programs
from jaxpp.runtime.place import Place
from jaxpp.runtime.processes.here import as_sharding
from jaxpp.runtime.processes.local_lines import Crossing
from jaxpp.schedule.action import Kind
from jaxpp.stages.cost import count_bytes
from jaxpp.stages.program import Role
from jaxpp.types import Device

__all__ = ["MEMORY_KINDS", "Life", "Liveness", "line_liveness", "memory_kind", "step_liveness", "temporaries"]

MEMORY_KINDS = (
    *("parameters", "statics", "optimizer", "gradients", "residuals", "in flight", "batch", "model state", "carries", "outputs"),
    "rest",
)
"""What bytes on a device are for. Statics: what a step computes from parameters alone (casts), and arrays the loss closed over.
Carries: the caches of the sequences of a generation. Outputs: what a function returns; the aux of a loss.
"""

_KIND_OF = {
    Role.PARAM: "parameters",
    Role.STATIC: "statics",
    Role.CONSTANT: "statics",
    Role.OPT: "optimizer",
    Role.LOSS_SCALE: "optimizer",
    Role.GRAD: "gradients",
    Role.RESIDUAL: "residuals",
    Role.FETCHED: "residuals",
    Role.ACTIVATION: "in flight",
    Role.COTANGENT: "in flight",
    Role.BATCH: "batch",
    Role.KEY: "batch",
    Role.SCALE: "batch",
    Role.STATE: "model state",
    Role.ROWS: "outputs",
    Role.AUX: "outputs",
}


class Life(NamedTuple):
    """A value of a step on a device.

    Attributes:
        name: of the value.
        device: where it is.
        num_bytes: its size.
        kind: one of ``MEMORY_KINDS``.
        begins: the first moment at which it is alive.
        ends: the last moment at which it is alive.
        donated: whether a result of the next line takes over its buffer.
    """

    name: Name
    device: Device
    num_bytes: int
    kind: str
    begins: int
    ends: int
    donated: bool = False


@dataclass(frozen=True)
class Liveness:
    """When each value of a step is alive, and where.

    Attributes:
        devices: in the order of the ranks: of all, or of those of this process.
        lines: of the step.
        lives: of its values.
        temporaries: bytes that the compiled program of each line needs while it runs, besides its arguments and results; empty if
            the programs are not compiled.
        unknown: devices of other processes whose temporaries are not known, and count as 0.
        hosted: residuals that wait in the host memory beside their device.
    """

    devices: tuple[Device, ...]
    lines: tuple[BoundLine, ...]
    lives: tuple[Life, ...]
    temporaries: tuple[int, ...] = ()
    unknown: tuple[Device, ...] = ()
    hosted: tuple[Life, ...] = ()

    @cached_property
    def levels(self) -> Mapping[Device, Int[np.ndarray, "moments kinds"]]:
        """Bytes on each device: a row for each moment, a column for each kind."""
        changes = {device: np.zeros((len(self.lines) + 3, len(MEMORY_KINDS)), np.int64) for device in self.devices}
        for _, device, num_bytes, kind, begins, ends, _ in self.lives:
            changes[device][begins, MEMORY_KINDS.index(kind)] += num_bytes
            changes[device][ends + 1, MEMORY_KINDS.index(kind)] -= num_bytes
        return {device: np.cumsum(change, axis=0)[:-1] for device, change in changes.items()}

    @cached_property
    def freed(self) -> Mapping[Device, Int[np.ndarray, "moments kinds"]]:
        """Bytes that each device frees after each moment, without those that are donated; rows and columns as in ``levels``."""
        found = {device: np.zeros((len(self.lines) + 2, len(MEMORY_KINDS)), np.int64) for device in self.devices}
        for _, device, num_bytes, kind, _, ends, donated in self.lives:
            found[device][ends, MEMORY_KINDS.index(kind)] += num_bytes * (not donated)
        return found

    def temporary(self, device: Device, moment: int) -> int:
        """Bytes of the temporaries of the program that runs on a device at a moment."""
        if not self.temporaries or not 0 < moment <= len(self.lines):
            return 0
        return self.temporaries[moment - 1] * (self.lines[moment - 1].device == device)

    def peak(self, device: Device) -> int:
        """The moment at which a device holds most, temporaries included."""
        return int(self._held(device).argmax())

    def most(self, device: Device) -> int:
        """The bytes that a device holds at its peak."""
        return int(self._held(device).max())

    def _held(self, device: Device) -> Int[np.ndarray, " moments"]:
        held = self.levels[device].sum(axis=1)
        return held + [self.temporary(device, moment) for moment in range(len(held))]

    def most_hosted(self, device: Device) -> int:
        """The most bytes of residuals that wait at once in host memory beside a device."""
        changes = np.zeros(len(self.lines) + 3, np.int64)
        for life in self.hosted:
            changes[life.begins] += life.num_bytes * (life.device == device)
            changes[life.ends + 1] -= life.num_bytes * (life.device == device)
        return int(np.cumsum(changes).max())

    def alive(self, device: Device, moment: int) -> list[Life]:
        """What a device holds at a moment."""
        return [life for life in self.lives if life.device == device and life.begins <= moment <= life.ends]


def step_liveness(
    engine: Engine, lowered: LoweredStep, homes: Mapping[Name, Device] | None = None, *, compiled: bool = False
) -> Liveness:
    """What is alive during a step that takes over the buffers of its state; arrays of the caller are left out, except the state.

    If the lines are those of one process of several, the result tells of the devices of that process alone. ``homes`` are the
    devices on which the caller's batch leaves and key are, which are not copied to these devices. Temporaries are counted if the
    programs are ``compiled``.
    """
    sizes = _given(engine, lowered)
    return line_liveness(lowered.bound, sizes, lowered.outputs, homes, engine.programs if compiled else None)


def line_liveness(
    bound: Bound,
    given: Mapping[Name, int],
    outputs: Sequence[Name],
    homes: Mapping[Name, Device] | None = None,
    programs: Programs | None = None,
) -> Liveness:
    """What is alive while lines run.

    Args:
        bound: the lines.
        given: bytes of each argument.
        outputs: the results, which are alive at the end.
        homes: as for ``step_liveness``.
        programs: the compiled programs, if their temporaries are to be counted.
    """
    first, last = _forwards(bound), bound.last_uses
    end, sizes = len(bound.lines) + 1, dict(given)
    places = bound.placement.places
    begins: dict[Name, int] = {name: 0 for name in sizes if name.stage != CALLER and _is_told(bound, places[name.stage])}
    ends: dict[Name, int] = dict.fromkeys([*begins, *map(bound.resolve, outputs)], end)
    taken: set[Name] = set()
    for number, line in enumerate(bound.lines):
        gone = line.taken - set(line.outputs)
        taken |= gone
        ends.update((name, number) for name in gone)
        if line.placed is not None:
            results = _made(bound, line, line.placed)
        elif line.crossing is not None:
            results = [_arriving(line.crossing)] * len(line.outputs)
        elif line.is_send:
            (source,) = line.inputs
            there = (homes or {}).get(source) if source.stage == CALLER else places[source.stage].shown
            results = [0 if there == line.device else sizes[source]]
        else:  # copies to host memory and back, and means over groups of replicas: each as large as its input
            results = [sizes[name] for name in line.inputs[: len(line.outputs)]]
        for name, size in zip(line.outputs, results, strict=True):
            sizes[name] = size
            begins.setdefault(name, number + 1)
    lives: list[Life] = []
    hosted: list[Life] = []
    for name, begin in begins.items():
        until, device = ends.get(name, last.get(name, -1) + 1), places[name.stage].shown
        life = Life(name, device, sizes[name], memory_kind(name), begin, until, name in taken)
        if name.ref.role == Role.OFFLOADED:
            hosted.append(life)
            continue
        lives += _split(life, first.get((name.stage, name.microbatch), end), bound.lines[min(last.get(name, 0), end - 2)])
    devices = tuple(dict.fromkeys(place.shown for place in bound.placement.by_rank if _is_told(bound, place)))
    extra = () if programs is None else temporaries(bound, programs)
    return Liveness(devices, bound.lines, (*_constants(bound), *lives), extra, hosted=tuple(hosted))


def _is_told(bound: Bound, place: Place) -> bool:
    """Whether the lines tell what happens at a place: those of one process do so of its own places."""
    return bound.numbers is None or place.is_here


def _arriving(crossing: Crossing) -> int:
    """Bytes on each device of what comes from another process."""
    shape = as_sharding(crossing.target).shard_shape(crossing.aval.shape)
    return count_bytes(jax.ShapeDtypeStruct(shape, crossing.aval.dtype))


def _made(bound: Bound, line: BoundLine, job: PlacedProgram) -> list[int]:
    """Bytes of what a program makes, on each device."""
    program, place, _ = job
    results = program.results
    if program.spans:  # as one replica has them
        results = [
            jax.ShapeDtypeStruct(aval.shape[len(place.leading(ref)) :], aval.dtype)
            for ref, aval in zip(program.outputs, results, strict=True)
        ]
    triples = zip(program.outputs, results, line.outputs, strict=True)
    return [place.num_bytes(ref, aval, bound.chosen.get(name)) for ref, aval, name in triples]


def memory_kind(name: Name) -> str:
    """What a value is for. An activation is in flight until the stage that holds it has run; from then on it is a residual."""
    return _KIND_OF.get(name.ref.role, "rest")


def temporaries(bound: Bound, programs: Programs) -> tuple[int, ...]:
    """Bytes that each line's compiled program needs while it runs, besides its arguments and results; 0 for sends."""
    found: dict[int, int] = {}

    def needs(line: BoundLine) -> int:
        if line.placed is None:
            return 0
        if id(line.program) not in found:
            stats = programs[line.placed].memory_analysis()
            found[id(line.program)] = 0 if stats is None else int(stats.temp_size_in_bytes)
        return found[id(line.program)]

    return tuple(map(needs, bound.lines))


def _given(engine: Engine, lowered: LoweredStep) -> dict[Name, int]:
    """Bytes of the arguments of a step."""
    job, placed = lowered.step, engine.placed
    key = [] if job.key is None else [job.key]
    avals = dict(zip(placed.names.flat(), placed.shapes.flat(), strict=True))
    avals |= zip((name for name in lowered.inputs if name.stage == CALLER), [*job.batch, *key], strict=True)
    places = {name: None if name.stage == CALLER else engine.placement[name.stage] for name in lowered.inputs}
    return {
        name: count_bytes(avals[name]) if place is None else place.num_bytes(name.ref, avals[name])
        for name, place in places.items()
    }


def _constants(bound: Bound) -> list[Life]:
    """The arrays that a plan holds from one step to the next; an array that stands for several values counts once."""
    end, found = len(bound.lines) + 1, []
    for constant, name in {constant: name for name, constant in reversed(list(bound.constants.items()))}.items():
        place = bound.placement[name.stage]
        found.append(Life(name, place.shown, place.num_bytes(name.ref, constant.aval), memory_kind(name), 0, end))
    return found


def _forwards(bound: Bound) -> dict[tuple[int, int], int]:
    """The moment of each forward, by stage and microbatch."""
    return {
        (line.action.stage, line.action.microbatch): number + 1
        for number, line in enumerate(bound.lines)
        if line.program is not None and line.action is not None and line.action.kind == Kind.F
    }


def _split(life: Life, forward: int, reader: BoundLine) -> list[Life]:
    """An activation that a stage's backward reads again is a residual from its forward on, be it only until it is copied away."""
    if life.name.ref.role != Role.ACTIVATION or reader.is_send or life.ends <= forward:
        return [life]
    before = [life._replace(ends=forward - 1)] if life.begins < forward else []
    return [*before, life._replace(kind="residuals", begins=max(life.begins, forward))]
