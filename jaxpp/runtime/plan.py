"""A plan: a step as a flat list of instructions over numbered slots, ready to run.

Problem: a loop that looks values up by name, flattens trees or checks shapes costs more than a small stage. Idea: do all of that
once. Mechanism: a ``Draft`` collects instructions over *names*; ``finish`` compiles the programs (side by side, in threads),
numbers the names, finds the last reader of each, and frees it there. A slot is used again once it is free, so the number of slots
is the number of values alive at once.

A send between stages on one device is no instruction: both names are one value.
"""

import os
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from jaxpp.runtime.transfer import sender
from jaxpp.stages.cost import count_bytes
from jaxpp.stages.program import Program, Ref, Role
from jaxpp.types import Device

__all__ = ["About", "Draft", "Instruction", "Plan", "Programs"]

Name = Hashable
"""What a draft calls a value."""

_SMALL = 1 << 16
"""Bytes of a result that may be held on to while a step is watched."""


class Instruction(NamedTuple):
    """One line of a plan.

    Attributes:
        label: what it is, for people: ``2F0``, ``send ...``.
        call: a compiled program, or a send; takes one array an input and returns one an output.
        inputs: slots it reads.
        outputs: slots it writes.
        free: slots whose value nobody reads after it.
        about: what it is, for those who watch.
    """

    label: str
    call: Callable[..., Sequence[Any]]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    free: tuple[int, ...]
    about: "About"


class About(NamedTuple):
    """What an instruction is about.

    Attributes:
        device: where it runs, or where it sends to.
        action: the action of the schedule that it runs, or whose result it sends; None for the rest of a step.
        sends: whether it is a send.
        watch: in a watched plan, a slot that it writes and whose value nobody donates, so that it can be asked for; else -1.
    """

    device: Device
    action: Hashable | None
    sends: bool
    watch: int


@dataclass(frozen=True)
class Plan:
    """A step, lowered.

    Attributes:
        instructions: in the order the host dispatches them.
        num_slots: how many values are alive at once, at most.
        constants: values that are there before the step starts, by slot.
        inputs: the slot of each argument of the step.
        outputs: the slot of each result.
    """

    instructions: tuple[Instruction, ...]
    num_slots: int
    constants: tuple[tuple[int, Any], ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    def __str__(self) -> str:
        width = max((len(line.label) for line in self.instructions), default=0)
        rows = [f"plan: {len(self.instructions)} instructions, {self.num_slots} slots"]
        for line in self.instructions:
            free = f"  free {' '.join(map(str, line.free))}" if line.free else ""
            rows.append(f"{line.label.ljust(width)}  {_numbers(line.inputs)} -> {_numbers(line.outputs)}{free}")
        return "\n".join(rows)


def _numbers(slots: Sequence[int]) -> str:
    return " ".join(map(str, slots)) or "-"


class Programs:
    """Compiled programs, each compiled once for each device it runs on.

    Holds one pipeline's programs; a program that is compiled for a second batch shape adds to it.
    """

    def __init__(self):
        self._compiled: dict[tuple[int, Device, tuple[int, ...]], Any] = {}
        self._tokened: dict[int, Program] = {}
        self._small: dict[int, tuple[int, ...]] = {}
        self._alive: list[Program] = []

    def with_token(self, program: Program) -> Program:
        """The same program with one more result, a byte that is there when the program is done."""
        if id(program) not in self._tokened:
            self._tokened[id(program)] = replace(
                program,
                function=lambda *args: [*program.function(*args), jnp.zeros((), jnp.int8)],
                outputs=(*program.outputs, Ref(Role.VALUE)),
            )
            self._alive.append(program)
        return self._tokened[id(program)]

    def small_results(self, program: Program, names: Sequence[Name]) -> list[Name]:
        """The names of the results that have few bytes."""
        if id(program) not in self._small:
            self._small[id(program)] = tuple(k for k, aval in enumerate(program.results) if count_bytes(aval) <= _SMALL)
            self._alive.append(program)
        return [names[k] for k in self._small[id(program)]]

    def compile(self, jobs: Iterable[tuple[Program, Device, tuple[int, ...]]]) -> None:
        """Compile what is not compiled yet, on as many threads as there are cores."""
        fresh = {(id(program), device, donated): program for program, device, donated in jobs}
        fresh = {job: program for job, program in fresh.items() if job not in self._compiled}
        self._alive += fresh.values()
        lowered = [(job, _lower(program, job[1], job[2])) for job, program in fresh.items()]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            compiled = pool.map(lambda pair: pair[1].compile(), lowered)
            self._compiled.update((job, call) for (job, _), call in zip(lowered, compiled, strict=True))

    def __getitem__(self, job: tuple[Program, Device, tuple[int, ...]]) -> Any:
        program, device, donated = job
        return self._compiled[id(program), device, donated]

    def __len__(self) -> int:
        return len(self._compiled)


def _lower(program: Program, device: Device, donated: tuple[int, ...]) -> Any:
    here = SingleDeviceSharding(device)
    avals = [jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=here) for aval in program.avals]
    return jax.jit(program.function, donate_argnums=donated, out_shardings=here).lower(*avals)


class _Line(NamedTuple):
    label: str
    job: tuple[Program, Device, tuple[int, ...]] | None
    device: Device
    inputs: tuple[Name, ...]
    outputs: tuple[Name, ...]
    action: Hashable | None


@dataclass
class Draft:
    """A plan being written, over names.

    ``homes`` says on which device each name's value is; a name written twice keeps its slot (an accumulator).
    """

    homes: dict[Name, Device] = field(default_factory=dict)
    lines: list[_Line] = field(default_factory=list)
    constants: dict[Name, Any] = field(default_factory=dict)
    _alias: dict[Name, Name] = field(default_factory=dict)

    def resolve(self, name: Name) -> Name:
        """The name under which a value was first known."""
        return self._alias.get(name, name)

    def compute(
        self,
        label: str,
        program: Program,
        device: Device,
        inputs: Sequence[Name],
        outputs: Sequence[Name],
        donated: tuple[int, ...] | None = None,
        action: Hashable | None = None,
    ) -> None:
        """Run ``program`` on ``device``; its own accumulators are donated unless ``donated`` says otherwise."""
        job = (program, device, program.donated if donated is None else donated)
        names = tuple(map(self.resolve, inputs)), tuple(map(self.resolve, outputs))
        self.lines.append(_Line(label, job, device, *names, action))
        self.homes.update((name, device) for name in outputs)

    def send(self, label: str, source: Name, target: Name, device: Device, action: Hashable | None = None) -> None:
        """Make the value called ``source`` available on ``device`` as ``target``."""
        source = self.resolve(source)
        if self.homes.get(source) == device:
            self._alias[target] = source
            return
        self.lines.append(_Line(label, None, device, (source,), (target,), action))
        self.homes[target] = device

    def _watched(self, programs: "Programs") -> list[Name | None]:
        """For each line an output that can be asked for: a small one that nobody donates. A program without one gets a token.

        (To hold on to a large one, if only until it is there, would keep its memory from being used again.)
        """
        found: list[Name | None] = []
        donated: set[Name] = set()
        for number in reversed(range(len(self.lines))):
            line = self.lines[number]
            small = line.outputs if line.job is None else programs.small_results(line.job[0], line.outputs)
            safe = next((name for name in small if name not in donated), None)
            if safe is None and line.job is not None:
                program, device, given = line.job
                safe = ("token", number)
                job = programs.with_token(program), device, given
                line = self.lines[number] = line._replace(job=job, outputs=(*line.outputs, safe))
            found.append(safe)
            donated -= set(line.outputs)
            donated |= {line.inputs[k] for k in line.job[2]} if line.job else set()
        return found[::-1]

    def finish(self, programs: Programs, inputs: Sequence[Name], outputs: Sequence[Name], *, watched: bool = False) -> Plan:
        """Compile the programs and turn names into slots.

        Args:
            programs: holds the compiled programs.
            inputs: names of the arguments.
            outputs: names of the results.
            watched: whether it must be possible to ask every instruction whether it is done.
        """
        watch = self._watched(programs) if watched else [None] * len(self.lines)
        programs.compile(line.job for line in self.lines if line.job is not None)
        last: dict[Name, int] = {}
        for number, line in enumerate(self.lines):
            last.update((name, number) for name in (*line.outputs, *line.inputs))
        results = tuple(map(self.resolve, outputs))
        kept = set(results)
        slots = _Slots()
        arguments = tuple(slots[name] for name in map(self.resolve, inputs))
        constants = tuple((slots[name], value) for name, value in self.constants.items() if name in last or name in kept)
        senders: dict[Device, Callable[..., Any]] = {}
        instructions = []
        for number, line in enumerate(self.lines):
            read = tuple(slots[name] for name in line.inputs)
            written = tuple(slots[name] for name in line.outputs)
            done = [name for name in dict.fromkeys((*line.inputs, *line.outputs)) if last[name] == number and name not in kept]
            send = senders.setdefault(line.device, sender(line.device))
            call = send if line.job is None else programs[line.job]
            seen = -1 if watch[number] is None else slots[watch[number]]
            about = About(line.device, line.action, line.job is None, seen)
            instructions.append(Instruction(line.label, call, read, written, tuple(slots.release(done)), about))
        return Plan(tuple(instructions), slots.size, constants, arguments, tuple(slots[name] for name in results))


class _Slots:
    """Numbers for names, the smallest free one first."""

    def __init__(self):
        self._taken: dict[Name, int] = {}
        self._free: list[int] = []
        self.size = 0

    def __getitem__(self, name: Name) -> int:
        if name not in self._taken:
            if not self._free:
                self._free.append(self.size)
                self.size += 1
            self._taken[name] = self._free.pop()
        return self._taken[name]

    def release(self, names: Iterable[Name]) -> list[int]:
        freed = [self._taken.pop(name) for name in names]
        self._free += freed
        return freed
