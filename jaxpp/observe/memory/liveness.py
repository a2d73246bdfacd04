"""What is alive on each device while a step runs, from its lines and the shapes of its values; nothing runs.

Every value of a step has a size, a line that makes it and a line after which it is freed. So the bytes that a device holds at any
moment are known before the first step. Moment 0 is the beginning of the step; at moment k + 1 line k has been handed over and
nothing has been freed after it; the last moment is the end. Devices run their programs in the order in which they are handed over,
so these are also the moments of the device. For what a compiled program needs besides (``temporaries``), see ``liveness_of_all``.
"""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, cast

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jaxtyping import Int

from jaxpp.engine.engine import Engine
from jaxpp.engine.outcome import LoweredStep, Purpose
from jaxpp.engine.sharding_rules import over_model
from jaxpp.lowering.builder import CALLER, MemoryCopy, Name
from jaxpp.runtime.bind import Bound, BoundLine, Shapes, compile_lines
from jaxpp.runtime.compile import Programs
from jaxpp.runtime.place import Place, Placement
from jaxpp.runtime.processes.channel import told_by_all
from jaxpp.runtime.send import by_replica
from jaxpp.schedule.action import Action, Kind
from jaxpp.shardings import sharded_axes
from jaxpp.stages.axes import DATA, axis_names
from jaxpp.stages.estimate import temporary_bytes
from jaxpp.stages.graph import trace
from jaxpp.stages.program import Program, Ref, Role
from jaxpp.types import Aval, Batch, Device, Tree

Needs = dict[Hashable, int]  # bytes that programs need while they run, besides their arguments and results
Estimates = dict[Hashable, tuple[int, tuple[PartitionSpec, ...]]]  # the same, likely, and how their results are sharded

# What bytes on a device are for. Statics: what a step computes from parameters alone (casts), and arrays the loss closed over.
# Messages: activations and cotangents that were sent and are not used yet. Carries: the caches of the sequences of a generation.
# Outputs: what a function returns; the aux of a loss.
MEMORY_KINDS = (
    *("parameters", "statics", "optimizer", "gradients", "residuals", "messages", "batch", "model state", "carries", "outputs"),
    "rest",
)

_ROLES = {
    "parameters": (Role.PARAM, Role.PREVIOUS),
    "statics": (Role.STATIC, Role.CONSTANT),
    "optimizer": (Role.OPT, Role.LOSS_SCALE),
    "gradients": (Role.GRAD, Role.ADDEND),
    "residuals": (Role.RESIDUAL, Role.FETCHED),
    "messages": (Role.ACTIVATION, Role.COTANGENT),
    "batch": (Role.BATCH, Role.KEY, Role.SCALE),
    "model state": (Role.STATE,),
    "outputs": (Role.ROWS, Role.AUX),
}
_JOINED = 30 << 20  # bytes up to which XLA sums several arrays as one (xla_gpu_all_reduce_combine_threshold_bytes)
_KIND_OF = {role: kind for kind, roles in _ROLES.items() for role in roles}


class Life(NamedTuple):
    """A value of a step on a device, from the first moment at which it is alive to the last."""

    name: Name
    device: Device
    num_bytes: int
    kind: str  # one of ``MEMORY_KINDS``
    begins: int
    ends: int
    donated: bool = False  # whether a result of the next line takes over its buffer


class Gathered(NamedTuple):
    """What the devices of a rank hold for a moment where they make a value whole, to send it to a rank of another width."""

    stage: int
    device: Device
    num_bytes: int  # on each device


class Visiting(NamedTuple):
    """The bytes of a state in host memory that a step copies to a device and back."""

    brought: int
    taken: int


@dataclass(frozen=True)
class Liveness:
    """When each value of a step is alive, and where."""

    devices: tuple[Device, ...]  # in the order of the ranks: of all, or of those of this process
    lines: tuple[BoundLine, ...]
    lives: tuple[Life, ...]
    temporaries: tuple[int, ...] = ()  # bytes that each line's program needs besides its arguments and results, if compiled
    unknown: tuple[Device, ...] = ()  # devices of other processes whose temporaries are not known, and count as 0
    hosted: tuple[Life, ...] = ()  # what waits in the host memory beside its device
    gathered: Mapping[int, Gathered] = field(default_factory=dict)  # for the numbers of lines that are such sends
    passes: tuple[int, ...] = ()  # how many lines each has of several that run one after another

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
        freed = {device: np.zeros((len(self.lines) + 2, len(MEMORY_KINDS)), np.int64) for device in self.devices}
        for _, device, num_bytes, kind, _, ends, donated in self.lives:
            freed[device][ends, MEMORY_KINDS.index(kind)] += num_bytes * (not donated)
        return freed

    def temporary(self, device: Device, moment: int) -> int:
        """Bytes of the temporaries of the program that runs on a device at a moment, or of what it gathers to send it."""
        whole = self.gathered.get(moment - 1)
        if whole is not None:
            return whole.num_bytes * (whole.device == device)
        if not self.temporaries or not 0 < moment <= len(self.lines):
            return 0
        return self.temporaries[moment - 1] * (self.lines[moment - 1].device == device)

    def stage_at(self, moment: int) -> int:
        """The stage of the temporaries at a moment."""
        whole = self.gathered.get(moment - 1)
        return self.lines[moment - 1].stage if whole is None else whole.stage

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
        """The most bytes that wait at once in host memory beside a device."""
        return dataclasses.replace(self, lives=self.hosted, temporaries=(), gathered={}).most(device)

    @cached_property
    def visiting(self) -> dict[Device, Visiting]:
        """The bytes of the state that a step, or one pass, copies from host memory to each device, and back, at most."""
        sizes = {life.name._replace(run=0): life.num_bytes for life in (*self.lives, *self.hosted)}  # equal in all runs of a flow
        supply, most = iter(self.lines), dict.fromkeys(self.devices, Visiting(0, 0))
        for count in self.passes or (len(self.lines),):
            sums = Counter[tuple[Device, MemoryCopy]]()
            for line in itertools.islice(supply, count):
                if line.copies is not None and line.action is None:  # those of an action are residuals
                    sums[line.place.shown, line.copies] += sum(sizes[name._replace(run=0)] for name in line.outputs)
            for device, before in most.items():
                own = Visiting(sums[device, MemoryCopy.TO_DEVICE], sums[device, MemoryCopy.TO_HOST])
                most[device] = max(before, own, key=sum)
        return most

    def alive(self, device: Device, moment: int) -> list[Life]:
        """What a device holds at a moment."""
        return [life for life in self.lives if life.device == device and life.begins <= moment <= life.ends]


def step_liveness(
    engine: Engine, lowered: LoweredStep, homes: Mapping[Name, Device] | None = None, *, compiled: bool = False
) -> Liveness:
    """What is alive during a step that takes over its state's buffers; what the caller has in its ``homes`` is not copied there."""
    shapes = step_shapes(engine, lowered)
    return line_liveness(lowered.bound, shapes, homes, engine.programs if compiled else None)


def brought(engine: Engine, lowered: LoweredStep) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The bytes that a turn of each stage copies from host memory: of its parameters; and in its last turn of the rest."""
    shapes = step_shapes(engine, lowered)
    params, rest = ([Counter[int]() for _ in engine.placement.places] for _ in range(2))  # of each stage by the number of the visit
    for line in lowered.bound.lines:
        for name in line.outputs if line.copies == MemoryCopy.TO_DEVICE and line.action is None else ():
            own = params if name.ref.role == Role.PARAM else rest
            own[name.stage][name.visit] += shapes.num_bytes(name)
    most, last = (tuple(max(visits.values(), default=0) for visits in own) for own in (params, rest))
    return most, last


def step_shapes(engine: Engine, lowered: LoweredStep) -> Shapes:
    """The shapes of the values of a step."""
    step, given = lowered.step, [name for name in lowered.bound.inputs if name.stage == CALLER]
    avals = [*step.batch, *([] if step.key is None else [step.key])]
    return shapes_of_lines(engine, lowered.bound, dict(zip(given, avals, strict=True)))


def shapes_of_lines(engine: Engine, bound: Bound, given: Mapping[Name, Aval]) -> Shapes:
    """The shapes of the values of lines, to which something else is ``given`` besides the leaves of a state."""
    return Shapes(bound.lines, bound.placement, engine.placed.shapes_by_role, given, bound.chosen)


def liveness_of_all(engine: Engine, batch: Batch, key: Tree, purpose: Purpose = "update", known: Needs | None = None) -> Liveness:
    """What is alive during a step on the devices of all ranks, with the temporaries of the compiled programs.

    The batch and the key may be shapes. The programs of other processes' ranks are compiled here too, for devices of this process
    that stand in for theirs, and thrown away; a rank for which it has too few is ``Liveness.unknown``. With ``known``, only
    programs that are not in it are compiled, and added to it: not exact where stages share a device.
    """
    own = None
    if known is None:
        lowered = engine.plan(purpose, batch, key)[1]
        own, known = lowered.bound, {}
        if own.numbers is None:
            return liveness_in_flow(step_liveness(engine, lowered, compiled=True), lowered)
    whole = engine.lower(purpose, batch, key)
    if own is not None:
        extra = zip(own.numbers or (), temporaries(own, engine.programs), strict=True)
        known = {_program_key(whole.bound.lines[number]): needs for number, needs in extra}
    away, unknown = list[BoundLine](), dict[Device, None]()
    for line in whole.bound.lines:
        if line.program is not None and _program_key(line) not in known:
            place = line.place if line.place.is_here else line.place.moved(jax.local_devices())
            if place is None:
                unknown[line.device] = None
            else:
                away.append(dataclasses.replace(line, place=place))
    programs = Programs()
    _, chosen = compile_lines(away, programs, "what is not compiled here, for the forecast")
    stand_ins = dataclasses.replace(whole.bound, lines=tuple(away))
    known.update(zip(map(_program_key, away), temporaries(stand_ins, programs), strict=True))
    extra = tuple(0 if line.program is None else known.get(_program_key(line), 0) for line in whole.bound.lines)
    bound = dataclasses.replace(whole.bound, chosen={**chosen, **(whole.bound if own is None else own).chosen})
    liveness = step_liveness(engine, dataclasses.replace(whole, bound=bound))
    return liveness_in_flow(dataclasses.replace(liveness, temporaries=extra, unknown=tuple(unknown)), whole)


def estimated_liveness(engine: Engine, batch: Batch, key: Tree, known: Estimates) -> Liveness:
    """As ``liveness_of_all``, by what programs likely need, which is added to ``known``; nothing is compiled.

    Programs of the same roles and shapes are taken to need the same: those of stages with as many layers. Where devices share a
    stage, what they hold of each value, and need for it, is as its axes are sharded (``jaxpp.shardings``).
    """
    lowered = engine.lower("update", batch, key)
    extra, chosen = list[int](), dict[Name, Sharding]()
    for line in lowered.bound.lines:
        program, place, needs = line.program, line.place, 0
        if program is None:
            chosen |= {copy: chosen[name] for name, copy in zip(line.inputs, line.outputs, strict=False) if name in chosen}
        elif line.action is not None or any(place.is_free(name.ref) for name in line.outputs):
            alike = [str((ref.role, aval.shape, aval.dtype)) for ref, aval in zip(program.inputs, program.avals, strict=True)]
            specs = tuple(_over_shards(place, name, chosen) for name in line.inputs) if place.num_shards > 1 else ()
            does = line.action and line.action.kind, line.fused is None, *alike, *(ref.role for ref in program.outputs)
            does = does, specs, place.num_shards
            if does not in known:
                known[does] = _likely(program, specs, place.num_shards)
            needs, outs = known[does]
            for name, spec in zip(line.outputs, outs, strict=True):
                if place.is_free(name.ref):
                    whole = cast("NamedSharding", place.sharding(name.ref))
                    chosen[name] = NamedSharding(whole.mesh, PartitionSpec(*whole.spec, *spec))
        scatters = program is not None and any(ref.role == Role.ADDEND for ref in program.inputs)  # and does nothing else
        extra.append(_exchanging(line) if line.action is None or scatters else needs)
    lowered = dataclasses.replace(lowered, bound=dataclasses.replace(lowered.bound, chosen=chosen))
    liveness = dataclasses.replace(step_liveness(engine, lowered), temporaries=tuple(extra))
    return liveness_in_flow(liveness, lowered)


def _exchanging(line: BoundLine) -> int:
    """What a line likely needs where replicas exchange: sums that travel together, gradients to scatter, parts of parameters."""
    program, place = line.program, line.place
    if program is None or place.num_replicas == 1:
        return 0
    if program.sums:
        given, made = (zip(*ends, strict=True) for ends in ((program.inputs, program.avals), (program.outputs, program.results)))
        scattered = sum(place.num_bytes(ref, aval) for ref, aval in given if ref.role == Role.ADDEND)
        return scattered + _together(place.num_bytes(ref, aval) for ref, aval in made if not _is_over_replicas(place, ref))
    leaves = [place.leaf(ref) for ref in program.outputs if ref.role == Role.PARAM and ref.new]
    parts = [leaf for leaf in leaves if leaf is not None and not leaf.divided and leaf.part != leaf.spec]
    return sum(place.num_bytes(Ref(Role.PARAM, leaf.index, shared=True), leaf.aval) for leaf in parts)


def _together(sizes: Iterable[int]) -> int:
    """Bytes of the sums that XLA for GPUs joins end to end, in their order, for as long as they are not too large."""
    total = group = count = 0
    for size in (size for size in sizes if size <= _JOINED):
        if group + size > _JOINED:
            total, group, count = total + group * (count > 1), 0, 0
        group, count = group + size, count + 1
    return total + group * (count > 1)


def _is_over_replicas(place: Place, ref: Ref) -> bool:
    return any(DATA in axis_names(entry) for entry in cast("NamedSharding", place.sharding(ref)).spec)


def _over_shards(place: Place, name: Name, chosen: Mapping[Name, Sharding]) -> PartitionSpec:
    """How the devices of a replica share a value."""
    spec = cast("NamedSharding", chosen.get(name) or place.sharding(name.ref)).spec
    return over_model(PartitionSpec(*spec[len(place.leading(name.ref)) :]))


def _likely(program: Program, specs: Sequence[PartitionSpec], width: int) -> tuple[int, tuple[PartitionSpec, ...]]:
    """The temporaries that a program likely needs on each of the devices that share it, and how its results are sharded."""
    graph, _ = trace(program.function, *program.avals, opened=True, env=program.env)
    if width == 1:
        return temporary_bytes(graph.eqns, graph.outputs), (PartitionSpec(),) * len(graph.outputs)
    spec_of = sharded_axes(graph, specs, width)
    needs = temporary_bytes(graph.eqns, graph.outputs, lambda var: width if any(spec_of(var)) else 1)
    return needs, tuple(map(spec_of, graph.outputs))


def liveness_in_flow(liveness: Liveness, lowered: LoweredStep) -> Liveness:
    """What is alive between the last forwards of a step and those of the next, if steps flow; else as it is.

    The lines are the tail of the first beside the body of the second. Of what a step hands from its body to its tail there are two:
    that of the first step until the tail has read it, and that of the second from when the body makes it.
    """
    flow = lowered.bound.flow
    if flow is None:
        return liveness
    order = [line for step, line in flow.lines(2) if step == (line < flow.body)]  # the tail of the first, the body of the second
    moment = {number + 1: at + 1 for at, number in enumerate(order)}
    end, parts = len(order) + 1, {(life.name, life.begins) for life in liveness.lives}

    def lives(life: Life) -> list[Life]:
        begins, ends, body = life.begins, life.ends, flow.body
        goes_on = life.donated or (life.name, ends + 1) in parts  # as a result, or another kind of bytes, from the next line on
        last = end if ends >= end else moment[ends + 1] - 1 if goes_on else moment[ends] if ends else 0
        first = life._replace(name=life.name._replace(run=life.name.run - 1))
        if begins in (0, end):
            return [life._replace(ends=last)]
        if begins > body:
            return [first._replace(begins=moment[begins], ends=last)]
        if ends + life.donated <= body:
            return [life._replace(begins=moment[begins], ends=last)]
        handed = [first._replace(begins=0, ends=last)] if ends < end else []  # the rest has been given to the caller
        return [*handed, life._replace(begins=moment[begins], ends=end, donated=False)]

    found = tuple(one for life in liveness.lives for one in lives(life))
    lines, extra = (tuple(each[k] for k in order) if each else () for each in (liveness.lines, liveness.temporaries))
    whole = {at: liveness.gathered[number] for at, number in enumerate(order) if number in liveness.gathered}
    return dataclasses.replace(liveness, lines=lines, lives=found, temporaries=extra, gathered=whole)


def program_needs(engine: Engine, batch: Batch, key: Tree) -> Needs:
    """What the programs of a training step need, which are compiled; of several processes, each tells the others of its own."""
    own = engine.plan("update", batch, key)[1].bound
    needs = dict(zip(own.numbers or range(len(own.lines)), temporaries(own, engine.programs), strict=True))
    if not engine.alone:
        needs = {int(number): size for table in told_by_all(needs) for number, size in table.items() if size} | needs
    lines = engine.lower("update", batch, key).bound.lines
    return {_program_key(line): needs.get(number, 0) for number, line in enumerate(lines) if line.program is not None}


def _program_key(line: BoundLine) -> Hashable:
    """Equal for lines that run the same program, wherever they run."""
    program = line.program
    return program and (program.name, program.inputs, program.outputs, program.avals, program.spans, line.donated)


def line_liveness(
    bound: Bound,
    shapes: Shapes,
    homes: Mapping[Name, Device] | None = None,
    programs: Programs | None = None,
) -> Liveness:
    """What is alive while lines run, from their arguments to their results; with the temporaries of ``programs``, if compiled."""
    end, sizes = len(bound.lines) + 1, {name: shapes.num_bytes(name) for name in bound.inputs}
    places, last = bound.placement.places, bound.last_uses
    actions = {line.action: number + 1 for number, line in enumerate(bound.lines) if line.program is not None}
    begins: dict[Name, int] = {name: 0 for name in sizes if name.stage != CALLER and _is_told(bound, places[name.stage])}
    ends: dict[Name, int] = dict.fromkeys([*begins, *bound.outputs], end)
    donated: set[Name] = set()
    gathered: dict[int, Gathered] = {}
    for number, line in enumerate(bound.lines):
        gone = line.taken - set(line.outputs)
        donated |= gone
        ends.update((name, number) for name in gone)
        there = (homes or {}).get(line.inputs[0]) if line.is_send and line.inputs else None
        if line.is_send and line.crossing is None and line.inputs[0].stage != CALLER:
            there = places[line.inputs[0].stage].shown
            whole = _gathered(line, places[line.inputs[0].stage], sizes[line.inputs[0]])
            gathered |= {} if whole is None else {number: whole}
        results = [0 if there == line.device else shapes.num_bytes(name) for name in line.outputs]
        for name, size in zip(line.outputs, results, strict=True):
            sizes[name] = size
            begins.setdefault(name, number + 1)
    lives: list[Life] = []
    hosted: list[Life] = []
    for name, begin in begins.items():
        until, device = ends.get(name, last.get(name, -1) + 1), places[name.stage].shown
        life = Life(name, device, sizes[name], memory_kind(name), begin, until, name in donated)
        if name.ref.waits:
            hosted.append(life)
            continue
        forward = actions.get(Action(name.stage, Kind.F, name.microbatch), end)
        lives += _split(life, forward, bound.lines[min(last.get(name, 0), end - 2)])
    devices = tuple(dict.fromkeys(place.shown for place in bound.placement.by_rank if _is_told(bound, place)))
    extra = () if programs is None else temporaries(bound, programs)
    return Liveness(devices, bound.lines, (*_constants(bound), *lives), extra, hosted=tuple(hosted), gathered=gathered)


def _gathered(line: BoundLine, place: Place, size: int) -> Gathered | None:
    """What shards gather first, where a value goes to a rank of another width; ``size`` is of its part on each device."""
    if place.num_shards == line.place.num_shards:
        return None
    spec, _ = by_replica(line.place.home(line.outputs[0].ref))
    parts = place.num_parts(line.inputs[0].ref) // (place.num_replicas if any(spec) else 1)
    return Gathered(line.inputs[0].stage, place.shown, size * parts) if parts > 1 else None


def _is_told(bound: Bound, place: Place) -> bool:
    """Whether the lines tell what happens at a place: those of one process do so of its own places."""
    return bound.numbers is None or place.is_here


def memory_kind(name: Name) -> str:
    """What a value is for. An activation is a message until the stage that holds it has run; from then on it is a residual."""
    return _KIND_OF.get(name.ref.role, "rest")


def temporaries(bound: Bound, programs: Programs) -> tuple[int, ...]:
    """Bytes that each line's compiled program needs while it runs, besides its arguments and results; 0 for sends."""
    sizes: dict[int, int] = {}
    for line in bound.lines:
        if line.placed is not None and id(line.program) not in sizes:
            stats = programs[line.placed].memory_analysis()
            sizes[id(line.program)] = 0 if stats is None else int(stats.temp_size_in_bytes)
    return tuple(0 if line.placed is None else sizes[id(line.program)] for line in bound.lines)


def _constants(bound: Bound) -> list[Life]:
    """The arrays that a plan holds from one step to the next; an array that stands for several values counts once."""
    first_names = {constant: name for name, constant in reversed(list(bound.constants.items()))}
    pairs = ((name, constant.aval) for constant, name in first_names.items())
    return lasting_lives(pairs, bound.placement, len(bound.lines) + 1)


def lasting_lives(values: Iterable[tuple[Name, Aval]], placement: Placement, end: int) -> list[Life]:
    """Values that stay where they are from the beginning to a moment."""
    lives = []
    for name, aval in values:
        place = placement[name.stage]
        lives.append(Life(name, place.shown, place.num_bytes(name.ref, aval), memory_kind(name), 0, end))
    return lives


def _split(life: Life, forward: int, reader: BoundLine) -> list[Life]:
    """An activation that a stage's backward reads again is a residual from its forward on, be it only until it is copied away."""
    if life.name.ref.role != Role.ACTIVATION or reader.is_send or life.ends <= forward:
        return [life]
    before = [life._replace(ends=forward - 1)] if life.begins < forward else []
    return [*before, life._replace(kind="residuals", begins=max(life.begins, forward))]
