"""A draft: a plan being written, over names instead of slots.

Problem: a loop that looks values up by name, flattens trees or checks shapes costs more than a small stage. Idea: do all of that
once. Mechanism: a ``Draft`` collects lines over *names*; ``finish`` compiles the programs, numbers the names, finds the last reader
of each, and frees it there.

A send between stages on one device is no line: both names are one value. (Where they are sharded differently, it is.)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jaxpp.plan.plan import About, Instruction, Plan, Slots
from jaxpp.runtime.compile import Job, Programs, free_inputs
from jaxpp.runtime.place import Place
from jaxpp.runtime.transfer import sender
from jaxpp.schedule.action import Action
from jaxpp.stages.cost import count_bytes
from jaxpp.stages.program import Program, Ref, Role

__all__ = ["HOST", "Draft", "Line", "Name"]

HOST = -1
"""The stage number of values that come from the caller."""


class Name(NamedTuple):
    """A value of a step: the stage that holds it, what it is there, and of which microbatch (-1: of the whole step)."""

    stage: int
    ref: Ref
    microbatch: int = -1


_SMALL = 1 << 16
"""Bytes of a result that may be held on to while a step is watched."""


class Line(NamedTuple):
    """One line of a draft: a program that runs, or a send.

    Attributes:
        label: what it is, for people.
        job: the program that runs; None for a send, and where ``call`` runs.
        place: where it runs, or where it sends to.
        inputs: names of what it reads.
        outputs: names of what it writes.
        action: the action of the schedule that it runs, or whose result it sends; None for the rest of a step.
        call: what runs, if it is neither a compiled program nor a send.
    """

    label: str
    job: Job | None
    place: Place
    inputs: tuple[Name, ...]
    outputs: tuple[Name, ...]
    action: Action | None
    call: Callable[..., Any] | None = None

    @property
    def stage(self) -> int:
        """The stage that it runs for, or sends to."""
        if self.job is not None and self.action is not None:
            return self.action.stage
        named = self.outputs or self.inputs
        return named[0].stage if named else 0

    @property
    def device(self) -> Any:
        """What users see of the place."""
        return self.place.shown

    @property
    def is_send(self) -> bool:
        """Whether it is a send."""
        return self.job is None and self.call is None

    @property
    def taken(self) -> set[Name]:
        """The inputs whose buffers its results take over."""
        return {self.inputs[k] for k in self.job[2]} if self.job else set()


@dataclass
class Draft:
    """A plan being written, over names.

    ``homes`` says on which device each name's value is; a name written twice keeps its slot (an accumulator).
    ``chosen`` says how the compiler has sharded what it may shard as it likes.
    """

    homes: dict[Name, Place] = field(default_factory=dict)
    lines: list[Line] = field(default_factory=list)
    constants: dict[Name, Any] = field(default_factory=dict)
    chosen: dict[Name, Any] = field(default_factory=dict)
    _alias: dict[Name, Name] = field(default_factory=dict)

    def resolve(self, name: Name) -> Name:
        """The name under which a value was first known."""
        return self._alias.get(name, name)

    def compute(
        self,
        label: str,
        program: Program,
        device: Place,
        inputs: Sequence[Name],
        outputs: Sequence[Name],
        donated: tuple[int, ...] | None = None,
        action: Action | None = None,
    ) -> None:
        """Run ``program`` on ``device``; its own accumulators are donated unless ``donated`` says otherwise."""
        job = (program, device, program.donated if donated is None else donated)
        names = tuple(map(self.resolve, inputs)), tuple(map(self.resolve, outputs))
        self.lines.append(Line(label, job, device, *names, action))
        self.homes.update((name, device) for name in outputs)

    def call(self, label: str, call: Callable[..., Any], place: Place, inputs: Sequence[Name], outputs: Sequence[Name]) -> None:
        """Run what is no compiled program: a function that dispatches some itself."""
        names = tuple(map(self.resolve, inputs)), tuple(map(self.resolve, outputs))
        self.lines.append(Line(label, None, place, *names, None, call))
        self.homes.update((name, place) for name in outputs)

    def send(self, label: str, source: Name, target: Name, device: Place, action: Action | None = None) -> None:
        """Make the value called ``source`` available on ``device`` as ``target``, sharded as such a value is there."""
        source = self.resolve(source)
        if self.homes.get(source) == device and device.home(source.ref) == device.home(target.ref):
            self._alias[target] = source
            return
        self.lines.append(Line(label, None, device, (source,), (target,), action))
        self.homes[target] = device

    def _watched(self, programs: Programs) -> list[Name | None]:
        """For each line an output that can be asked for: a small one that nobody donates. A program without one gets a token.

        (To hold on to a large one, if only until it is there, would keep its memory from being used again.)
        """
        found: list[Name | None] = []
        donated: set[Name] = set()
        for number in reversed(range(len(self.lines))):
            line = self.lines[number]
            small = line.outputs if line.job is None else _small(line.job[0], line.outputs)
            safe = next((name for name in small if name not in donated), None)
            if safe is None and line.job is not None:
                program, device, given = line.job
                safe = Name(HOST, Ref(Role.VALUE, shared=True), number)
                job = programs.with_token(program), device, given
                line = self.lines[number] = line._replace(job=job, outputs=(*line.outputs, safe))
            found.append(safe)
            donated -= set(line.outputs)
            donated |= line.taken
        return found[::-1]

    def _compile(self, programs: Programs, what: str) -> tuple[list[Any], list[str]]:
        """The compiled program of each line, None for sends; and what it is called.

        Those that read what the compiler sharded as it liked wait for the ones that make it; all others are compiled at once.
        """
        chosen = self.chosen
        given: dict[int, tuple[Any, ...]] = {}
        waiting: list[int] = []

        def flush() -> None:
            jobs = [job for number in waiting if (job := self.lines[number].job) is not None]
            programs.compile(jobs, [given[number] for number in waiting], what)
            for number, job in zip(waiting, jobs, strict=True):
                made = zip(job[0].outputs, self.lines[number].outputs, strict=True)
                free = [job[1].is_free(ref) for ref, _ in made]
                if any(free):
                    shardings = programs.get(job, given[number]).output_shardings
                    triples = zip(self.lines[number].outputs, shardings, free, strict=True)
                    chosen.update((name, sharding) for name, sharding, one in triples if one)
            waiting.clear()

        for number, line in enumerate(self.lines):
            if line.job is None:
                continue
            names = [line.inputs[k] for k in free_inputs(line.job)]
            if any(name not in chosen for name in names):
                flush()
            given[number] = tuple(chosen[name] for name in names)
            waiting.append(number)
        flush()
        jobs = list(enumerate(line.job for line in self.lines))
        calls = [None if job is None else programs.get(job, given[number]) for number, job in jobs]
        return calls, ["" if job is None else programs.name(job, given[number]) for number, job in jobs]

    def last_uses(self) -> dict[Name, int]:
        """The number of the last line that reads or writes each name."""
        last: dict[Name, int] = {}
        for number, line in enumerate(self.lines):
            last.update((name, number) for name in (*line.outputs, *line.inputs))
        return last

    def copy(self) -> "Draft":
        """A draft with the same lines, to which others can be added."""
        return Draft(dict(self.homes), list(self.lines), dict(self.constants), dict(self.chosen), dict(self._alias))

    def finish(
        self,
        programs: Programs,
        inputs: Sequence[Name],
        outputs: Sequence[Name],
        *,
        watched: bool = False,
        what: str = "",
        checked: Callable[[Line, Callable[..., Any]], Callable[..., Any]] | None = None,
    ) -> Plan:
        """Compile the programs and turn names into slots.

        Args:
            programs: holds the compiled programs.
            inputs: names of the arguments.
            outputs: names of the results.
            watched: whether it must be possible to ask every instruction whether it is done.
            what: what the programs are compiled for, for the progress bar.
            checked: makes of each line's program what runs instead, to look at its results; then none takes over a buffer.
        """
        if checked is not None:
            self.lines = [line if line.job is None else line._replace(job=(*line.job[:2], ())) for line in self.lines]
        watch = self._watched(programs) if watched else [None] * len(self.lines)
        calls, names = self._compile(programs, what)
        last = self.last_uses()
        results = tuple(map(self.resolve, outputs))
        kept = set(results)
        slots = Slots()
        arguments = tuple(slots[name] for name in map(self.resolve, inputs))
        constants = tuple((slots[name], value) for name, value in self.constants.items() if name in last or name in kept)
        senders: dict[Any, Callable[..., Any]] = {}
        instructions = []
        for number, line in enumerate(self.lines):
            read = tuple(slots[name] for name in line.inputs)
            written = tuple(slots[name] for name in line.outputs)
            done = [name for name in dict.fromkeys((*line.inputs, *line.outputs)) if last[name] == number and name not in kept]
            call = calls[number]
            if line.call is not None:
                call = line.call
            elif line.job is None:
                home = line.place.home(line.outputs[0].ref)
                call = senders.setdefault(home, sender(home))
            elif checked is not None:
                call = checked(line, call)
            seen = -1 if watch[number] is None else slots[watch[number]]
            about = About(line.device, line.stage, line.action, line.is_send, names[number], seen)
            instructions.append(Instruction(line.label, call, read, written, tuple(slots.release(done)), about))
        given = set(map(self.resolve, inputs))
        consumes = next((k for k, line in enumerate(self.lines) if not given.isdisjoint(line.taken)), len(self.lines))
        return Plan(tuple(instructions), slots.size, constants, arguments, tuple(slots[name] for name in results), consumes)


def _small(program: Program, names: Sequence[Name]) -> list[Name]:
    return [name for name, aval in zip(names, program.results, strict=True) if count_bytes(aval) <= _SMALL]
