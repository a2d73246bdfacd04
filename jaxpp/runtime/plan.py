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
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
from jax.sharding import SingleDeviceSharding

from jaxpp.runtime.transfer import sender
from jaxpp.stages.program import Program
from jaxpp.types import Device

__all__ = ["Draft", "Instruction", "Plan", "Programs"]

Name = Hashable
"""What a draft calls a value."""


class Instruction(NamedTuple):
    """One line of a plan.

    Attributes:
        label: what it is, for people: ``2F0``, ``send ...``.
        call: a compiled program, or a send; takes one array an input and returns one an output.
        inputs: slots it reads.
        outputs: slots it writes.
        free: slots whose value nobody reads after it.
    """

    label: str
    call: Callable[..., Sequence[Any]]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    free: tuple[int, ...]


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
        self._alive: list[Program] = []

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
    device: Device | None
    inputs: tuple[Name, ...]
    outputs: tuple[Name, ...]


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
    ) -> None:
        """Run ``program`` on ``device``; its own accumulators are donated unless ``donated`` says otherwise."""
        job = (program, device, program.donated if donated is None else donated)
        self.lines.append(_Line(label, job, None, tuple(map(self.resolve, inputs)), tuple(map(self.resolve, outputs))))
        self.homes.update((name, device) for name in outputs)

    def send(self, label: str, source: Name, target: Name, device: Device) -> None:
        """Make the value called ``source`` available on ``device`` as ``target``."""
        source = self.resolve(source)
        if self.homes.get(source) == device:
            self._alias[target] = source
            return
        self.lines.append(_Line(label, None, device, (source,), (target,)))
        self.homes[target] = device

    def finish(self, programs: Programs, inputs: Sequence[Name], outputs: Sequence[Name]) -> Plan:
        """Compile the programs and turn names into slots."""
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
            if line.job is not None:
                call = programs[line.job]
            else:
                assert line.device is not None
                call = senders.setdefault(line.device, sender(line.device))
            instructions.append(Instruction(line.label, call, read, written, tuple(slots.release(done))))
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
