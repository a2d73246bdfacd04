"""Stages get their devices: from the lines of a step to a plan that ``runtime.execute`` runs.

``bind_lines`` gives lines their places, without needless sends; memory is forecast from the result.
``compile_plan`` compiles the programs, numbers the names, and frees each value after its last reader.
"""

import dataclasses
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, Sharding

from jaxpp.lowering.builder import CALLER, Builder, Constant, GroupMean, Line, LineList, MemoryCopy, Name
from jaxpp.lowering.lanes import in_lanes
from jaxpp.lowering.plan import About, Instruction, Plan, SlotNumbers
from jaxpp.runtime.compile import Executable, PlacedProgram, Programs
from jaxpp.runtime.place import Place, Placement, Submesh
from jaxpp.runtime.processes.here import devices_in, elsewhere, is_here, processes_of
from jaxpp.runtime.replica_groups import Mean, ReplicaGroups
from jaxpp.runtime.send import Send, memory_copies
from jaxpp.stages.cost import count_bytes
from jaxpp.stages.program import LEAVES, Ref, Role
from jaxpp.types import Aval, Device, Home

_SMALL = 1 << 16  # bytes of a result that may be held on to while a step is watched

Runnable = Callable[..., Sequence[jax.Array]]  # one array for each input and output of a line
Check = Callable[["BoundLine", PlacedProgram, Runnable], Runnable]  # what runs instead of a program, and looks at its results


@dataclass(frozen=True)
class BoundLine(Line):
    """A line with the place where it runs, or where it sends to."""

    place: Place = field(kw_only=True)
    crossing: Send | None = None  # to another process: an input or output that is not here is left out

    @property
    def device(self) -> Device | Submesh:
        """What users see of the place."""
        return self.place.shown

    @property
    def placed(self) -> PlacedProgram | None:
        """The program that runs, and where it is compiled; None for a send or a call."""
        return None if self.program is None else PlacedProgram(self.program, self.place.compiled_at, self.donated)


@dataclass(frozen=True, eq=False)
class Bound(LineList):
    """The lines of a step with their places."""

    lines: tuple[BoundLine, ...]
    placement: Placement = field(kw_only=True)
    chosen: Mapping[Name, Sharding] = field(default_factory=dict)  # by the compiler, where it may shard as it likes
    placed: Mapping[Name, jax.Array] = field(default_factory=dict)  # the constants; there when the plan is compiled
    numbers: tuple[int, ...] | None = None  # of these lines among those of all processes; None if they are the lines of all

    def here(self, leaves: Mapping[tuple[Role, int], Aval]) -> tuple["Bound", dict[Name, jax.Array]]:
        """What this process runs, sends and receives, and what stands for outputs of others; ``leaves`` are shapes of a replica."""
        if jax.process_count() == 1:
            return self, {}
        shapes = Shapes(self.lines, self.placement, leaves)
        local = [_local_line(line, self.placement, shapes) for line in self.lines]
        lines = tuple(filter(None, local))
        numbers = tuple(number for number, line in enumerate(local) if line is not None)
        away = [name for name in self.outputs if not self.placement[name.stage].is_here]
        here = dataclasses.replace(self, lines=lines, constants=_read(lines, self.constants), numbers=numbers)
        return here, {name: elsewhere(shapes[name], self.placement[name.stage].home(name.ref)) for name in away}


class Shapes:
    """Shape, dtype and sharding of every value of some lines.

    ``leaves`` are the shapes of the leaves of a state, ``given`` those of other arguments, all as one replica has them; ``chosen``
    are the shardings that the compiler has chosen.
    """

    def __init__(
        self,
        lines: Sequence[BoundLine],
        placement: Placement,
        leaves: Mapping[tuple[Role, int], Aval],
        given: Mapping[Name, Aval] = MappingProxyType({}),
        chosen: Mapping[Name, Sharding] = MappingProxyType({}),
    ):
        self._placement, self._leaves, self._chosen = placement, leaves, chosen
        self._taken = {name for line in lines for name in line.taken}
        self._makers = {name: (line, at) for line in reversed(lines) for at, name in enumerate(line.outputs)}
        self._known = dict(given)
        self._sizes = dict[Hashable, int]()  # of values that differ in their microbatch or visit alone

    def __getitem__(self, name: Name) -> jax.ShapeDtypeStruct:
        return self._placement[name.stage].aval(name.ref, self._of_replica(name), self._chosen.get(name))

    def num_bytes(self, name: Name) -> int:
        """Bytes of a value on each device of its stage."""
        aval, sharding = self._of_replica(name), self._chosen.get(name)
        alike = name.stage, name.ref, aval.shape, aval.dtype, sharding
        if alike not in self._sizes:
            caller = name.stage == CALLER
            self._sizes[alike] = count_bytes(aval) if caller else self._placement[name.stage].num_bytes(name.ref, aval, sharding)
        return self._sizes[alike]

    def _of_replica(self, name: Name) -> Aval:
        if name not in self._known:
            self._known[name] = self._found(name)
        return self._known[name]

    def _found(self, name: Name) -> Aval:
        if (name.ref.role, name.ref.index) in self._leaves:
            return self._leaves[name.ref.role, name.ref.index]
        line, at = self._makers[name]
        if isinstance(line.call, GroupMean):
            return line.call.avals[at]
        if line.program is not None and not line.program.spans:
            return line.program.results[at]
        of_all = line.program.results[at] if line.program is not None else line.crossing and line.crossing.aval
        if of_all is None:  # a send or a copy
            return self._of_replica(line.inputs[at])
        return jax.ShapeDtypeStruct(of_all.shape[len(line.place.leading(name.ref)) :], of_all.dtype)

    def may_be_taken(self, name: Name) -> bool:
        """Whether a program may take over a value's buffer: in these lines, or, of a leaf of a state, in those of another step."""
        return name in self._taken or name.ref.role in LEAVES


def _local_line(line: BoundLine, placement: Placement, shapes: Shapes) -> BoundLine | None:
    there = line.place.is_here
    if not line.is_send:
        if line.program is None and not line.copies and not isinstance(line.call, GroupMean):  # a wait, for values of any stage
            mine = tuple(name for name in line.inputs if name.stage == CALLER or placement[name.stage].is_here)
            return dataclasses.replace(line, inputs=mine, outputs=mine[:1]) if mine else None
        return line if there else None
    (source,), (target,) = line.inputs, line.outputs
    if source.stage == CALLER:
        return line if there else None
    home, goal = placement[source.stage].home(source.ref), line.place.home(target.ref)
    here = is_here(home)
    if len(processes_of((*devices_in(home), *devices_in(goal)))) == 1:
        return line if here else None
    inputs, outputs = ((name,) if present else () for name, present in ((source, here), (target, there)))
    regrouped = placement[source.stage].num_shards != line.place.num_shards
    crossing = Send(goal, home, shapes[source], shapes.may_be_taken(source), regrouped)
    return dataclasses.replace(line, inputs=inputs, outputs=outputs, crossing=crossing)


def report(draft: LineList, placement: Placement, told: Collection[Name]) -> LineList:
    """Lines that send what every process is told to one stage of each process that lacks it, and results that are here."""
    readers: dict[int, int] = {}
    for stage, place in enumerate(placement.places):
        for process in processes_of(place.devices):
            readers.setdefault(process, stage)
    builder, local = Builder(list(draft.lines)), dict[Name, Name]()
    for name in dict.fromkeys(name for name in draft.outputs if name in told):
        home = placement[name.stage]
        for process, reader in readers.items():
            if process in processes_of(home.devices):
                continue
            target = name._replace(stage=reader)
            builder.send(f"send {name.ref.role} {name.ref.index} to process {process}", name, target)
            if placement[reader].is_here and not home.is_here:
                local[name] = target
    return dataclasses.replace(draft, lines=builder.lines, outputs=tuple(local.get(name, name) for name in draft.outputs))


def bind_lines(draft: LineList, placement: Placement) -> Bound:
    """Give the lines the places of their stages, and leave out sends of what is there already."""
    first_names: dict[Name, Name] = {}
    sent: dict[Name, dict[tuple[Place, Home], Name]] = {}
    lines: list[BoundLine] = []
    for line in draft.lines:
        place = placement[line.stage]
        inputs, outputs = (tuple(first_names.get(name, name) for name in names) for names in (line.inputs, line.outputs))
        if line.is_send:
            (source,), (target,) = inputs, line.outputs
            home = place.home(target.ref)
            if source.stage != CALLER and placement[source.stage] == place and place.home(source.ref) == home:
                first_names[target] = source
                continue
            arrived = sent.setdefault(source, {})
            if (place, home) in arrived:
                first_names[target] = arrived[place, home]
                continue
            arrived[place, home] = target
        for name in outputs:  # a value that changes is sent again
            sent.pop(name, None)
        lines.append(BoundLine(**{**vars(line), "inputs": inputs, "outputs": outputs}, place=place))
    results = tuple(first_names.get(name, name) for name in draft.outputs)
    return Bound(tuple(lines), _read(lines, draft.constants), draft.inputs, results, placement=placement)


def _read(lines: Sequence[Line], constants: Mapping[Name, Constant]) -> dict[Name, Constant]:
    """The constants that the lines read."""
    read = {name for line in lines for name in line.inputs}
    return {name: constant for name, constant in constants.items() if name in read}


def compile_plan(
    bound: Bound,
    programs: Programs,
    groups: ReplicaGroups,
    *,
    leaves: Mapping[tuple[Role, int], Aval] = MappingProxyType({}),
    given: Mapping[Name, Sharding] = MappingProxyType({}),
    watched: bool = False,
    what: str = "",
    check: Check | None = None,
    in_threads: bool = False,
) -> tuple[Plan, Bound]:
    """Compile the programs, put the constants on their devices, and turn names into slots; the plan, and the lines run here.

    ``leaves`` is needed in several processes, ``given`` where another plan made the compiler choose a sharding. The instructions of
    a ``watched`` plan can be asked whether they are done; ``in_threads`` gives them turns.
    """
    bound, away = bound.here(leaves)
    lines = list(bound.lines)
    watch = _watch(lines, programs) if watched else [None] * len(lines)
    compiled, chosen = compile_lines(lines, programs, what, given)
    placed = {name: programs.constant(value, bound.placement[name.stage], name.ref) for name, value in bound.constants.items()}
    compiled_bound = dataclasses.replace(bound, chosen=chosen, placed=placed)
    of_caller = set(bound.inputs)
    consumes = next((k for k, line in enumerate(lines) if not of_caller.isdisjoint(line.taken)), len(lines))
    lanes = in_lanes(lines, [place.devices if in_threads else None for place in bound.placement.places], consumes)
    last, kept, slots = dataclasses.replace(bound, lines=tuple(lines)).last_uses, set(bound.outputs), SlotNumbers(lanes)
    arguments = tuple(slots[name] for name in bound.inputs)
    constants = tuple((slots[name], value) for name, value in (placed | away).items())
    instructions, made_at = [], dict[Name, Home]()
    for number, (line, watched_name) in enumerate(zip(lines, watch, strict=True)):
        read = tuple(slots[name] for name in line.inputs)
        written = tuple(slots[name] for name in line.outputs)
        done = [name for name in dict.fromkeys((*line.inputs, *line.outputs)) if last[name] == number and name not in kept]
        executable, job = compiled.get(number), line.placed
        if executable is None or job is None:
            call = _call_of(line, bound.placement, groups, made_at, chosen)
        else:
            call = executable.call if check is None else check(line, job, executable.call)
            for name, info in zip(line.outputs, jax.tree.leaves(executable.call.out_info), strict=True):
                if not jnp.issubdtype(info.dtype, jax.dtypes.extended):
                    made_at[name] = line.place.home(name.ref)
        at = -1 if watched_name is None else slots[watched_name]
        program = executable.name if executable else ""
        about = About(line.device, line.stage, line.action, line.is_send, program, at, line.copies, line.fused)
        instructions.append(Instruction(line.label, call, read, written, tuple(slots.release(done)), about))
    results, turns = tuple(slots[name] for name in bound.outputs), lanes.turns if lanes.count > 1 else ()
    body = 0 if bound.flow is None else bound.flow.body
    of_body = tuple(slots[name] for name in lanes.several if name in of_caller - kept and last[name] < body)
    plan = Plan(tuple(instructions), slots.size, constants, arguments, results, consumes, turns, of_body)
    return plan, compiled_bound


def _call_of(
    line: BoundLine,
    placement: Placement,
    groups: ReplicaGroups,
    made_at: Mapping[Name, Home],
    chosen: Mapping[Name, Sharding],
) -> Runnable:
    """What the host calls for a line without a program; ``made_at`` says where programs before it made plain arrays, not keys."""
    if isinstance(line.call, GroupMean):
        shardings = [line.place.sharding(name.ref) for name in line.inputs]
        return Mean(groups, tuple(one for one in shardings if isinstance(one, NamedSharding)), *line.call, line.donated)
    if isinstance(line.call, MemoryCopy):
        homes = [chosen.get(name) or line.place.sharding(name.ref) for name in line.outputs]
        return memory_copies(homes, to_host=line.call == MemoryCopy.TO_HOST)
    if line.call is not None:
        return line.call
    if line.crossing is not None:
        return line.crossing.bind()
    (source,) = line.inputs
    regrouped = source.stage != CALLER and placement[source.stage].num_shards != line.place.num_shards
    send = Send(line.place.home(line.outputs[0].ref), made_at.get(source), regrouped=regrouped)
    return send.bind_for_caller() if source.stage == CALLER and jax.process_count() > 1 else send.bind()


def _watch(lines: list[BoundLine], programs: Programs) -> list[Name | None]:
    """For each line an output to watch: small, for holding it holds memory, and not donated; else its program is given a token."""
    names: list[Name | None] = []
    donated: set[Name] = set()
    for number in reversed(range(len(lines))):
        line = lines[number]
        sizes = [0] * len(line.outputs) if line.program is None else map(count_bytes, line.program.results)
        pairs = zip(line.outputs, sizes, strict=True)
        safe = next((name for name, size in pairs if size <= _SMALL and name not in donated), None)
        if safe is None and line.program is not None:
            safe = Name(CALLER, Ref(Role.TOKEN, number, shared=True))
            program = programs.with_token(line.program)
            line = lines[number] = dataclasses.replace(line, program=program, outputs=(*line.outputs, safe))
        names.append(safe)
        donated -= set(line.outputs)
        donated |= line.taken
    return names[::-1]


def compile_lines(
    lines: Sequence[BoundLine], programs: Programs, what: str, known: Mapping[Name, Sharding] = MappingProxyType({})
) -> tuple[dict[int, Executable], dict[Name, Sharding]]:
    """The program of each line that has one, all compiled at once but where shardings are the compiler's; and the shardings."""
    chosen: dict[Name, Sharding] = dict(known)
    given: dict[int, tuple[Sharding, ...]] = {}
    waiting: dict[int, PlacedProgram] = {}
    jobs = {number: line.placed for number, line in enumerate(lines) if line.placed is not None}
    sources: dict[Name, Name] = {}  # for what was copied to host memory, and what came back, the value that left: sharded alike
    for line in lines:
        if line.copies:
            sources |= {copy: sources.get(name, name) for name, copy in zip(line.inputs, line.outputs, strict=True)}

    def flush() -> None:
        programs.compile(waiting.values(), [given[number] for number in waiting], what)
        for number, job in waiting.items():
            free = [job.place.is_free(ref) for ref in job.program.outputs]
            if any(free):
                shardings = programs.get(job, given[number]).call.output_shardings
                triples = zip(lines[number].outputs, shardings, free, strict=True)
                chosen.update((name, sharding) for name, sharding, one in triples if one)
        waiting.clear()

    for number, job in jobs.items():
        names = [sources.get(name, name) for name in (lines[number].inputs[k] for k in job.free_inputs)]
        if any(name not in chosen for name in names):
            flush()
        given[number] = tuple(chosen[name] for name in names)
        waiting[number] = job
    flush()
    chosen |= {copy: chosen[name] for copy, name in sources.items() if name in chosen}
    return {number: programs.get(job, given[number]) for number, job in jobs.items()}, chosen
