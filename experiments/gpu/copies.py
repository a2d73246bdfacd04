"""The plan of a step in which every call has a copy of its program, and the addresses at which a step finds its arrays.

XLA records the launches of a program once, as a CUDA graph, with the addresses of its buffers. A call that finds its buffers
elsewhere must update the graph first, kernel by kernel. In a pipeline one program serves all microbatches, whose buffers differ, so
every call finds others than the call before. A copy of the program for each call is recorded with the buffers of that call alone,
and is not updated as long as these come back at the same addresses in every step.
"""

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.experimental import serialize_executable
from jax.stages import Compiled

from jaxpp.lowering.plan import Instruction, Plan

__all__ = ["Addresses", "count_programs", "with_copies", "with_eyes"]

Call = Callable[..., Sequence[jax.Array]]


def with_copies(plan: Plan) -> tuple[Plan, int]:
    """The plan with a program of its own for every call, and how many were loaded: a program that is called once stays as it is.

    Each is compiled once, serialised, and loaded once for each of its calls (``jax.experimental.serialize_executable``).
    To lower and compile again would do too, but takes as long as the first time. ``execution_devices`` must be given: what is
    loaded without them is a program for all devices (seen with JAX 0.10.2 and 0.12.0).
    """
    runs, packed, given = count_programs(plan), dict[int, tuple[Any, ...]](), Counter[int]()
    lines, copies = list[Instruction](), 0
    for line in plan.instructions:
        call = line.call
        if isinstance(call, Compiled) and runs[id(call)] > 1:
            given[id(call)] += 1
            if given[id(call)] > 1:  # the first call keeps the program that is there
                if id(call) not in packed:
                    packed[id(call)] = serialize_executable.serialize(call)
                line = line._replace(call=_loaded(packed[id(call)], call))  # noqa: PLW2901
                copies += 1
        lines.append(line)
    return dataclasses.replace(plan, instructions=tuple(lines)), copies


def _loaded(packed: tuple[Any, ...], like: Compiled) -> Call:
    shardings = jax.tree.leaves((like.input_shardings, like.output_shardings))
    devices = list(dict.fromkeys(device for sharding in shardings for device in sharding.device_set))
    return serialize_executable.deserialize_and_load(*packed, backend=devices[0].client, execution_devices=devices)


def count_programs(plan: Plan) -> Counter[int]:
    """How often a step calls each of its programs, by their ids."""
    return Counter(id(line.call) for line in plan.instructions if isinstance(line.call, Compiled))


@dataclass
class Addresses:
    """Where the arrays of some steps were.

    Attributes:
        values: of each result of each instruction, the addresses at which a step has found it.
        calls: of each instruction that calls a program, the addresses of its arguments and results, step by step.
        programs: of each such instruction, which program it calls.
    """

    values: defaultdict[tuple[int, int], set[int]] = field(default_factory=lambda: defaultdict(set))
    calls: defaultdict[int, list[tuple[int, ...]]] = field(default_factory=lambda: defaultdict(list))
    programs: dict[int, int] = field(default_factory=dict)

    def spread(self) -> tuple[int, int, int, int]:
        """How many values there are, how many were always at one address, the median number of addresses, and the most."""
        counts = sorted(map(len, self.values.values())) or [0]
        return len(self.values), counts.count(1), counts[len(counts) // 2], counts[-1]

    def moves(self, *, copies: bool) -> float:
        """The share of calls after the first step that find an array elsewhere than the call before it of the same program did.

        Args:
            copies: whether every instruction has a program of its own, so that the call before it was in the step before. This can
                be known without loading any copy.
        """
        steps = min(map(len, self.calls.values()), default=0)
        last, moved, count = dict[int, tuple[int, ...]](), 0, 0
        for step in range(steps):
            for number in sorted(self.calls):
                program, found = (number if copies else self.programs[number]), self.calls[number][step]
                moved += step > 0 and last.get(program) != found
                count += step > 0
                last[program] = found
        return moved / count if count else 0.0


def with_eyes(plan: Plan, seen: Addresses) -> Plan:
    """The plan with calls that note the addresses of what they take and return; temporaries of a program cannot be seen.

    Arrays on several devices, and those in host memory, have no single address and are left out.
    """
    lines = list[Instruction]()
    for number, line in enumerate(plan.instructions):
        program = id(line.call) if isinstance(line.call, Compiled) else None
        if program is not None:
            seen.programs[number] = program
        lines.append(line._replace(call=_noting(line.call, number, program, seen)))
    return dataclasses.replace(plan, instructions=tuple(lines))


def _noting(call: Call, number: int, program: int | None, seen: Addresses) -> Call:
    def noted(*arguments: jax.Array) -> Sequence[jax.Array]:
        taken = _addresses(arguments)  # before the call: it may take buffers over
        results = call(*arguments)
        made = _addresses(results)
        for at, address in enumerate(made):
            seen.values[number, at].add(address)
        if program is not None:
            seen.calls[number].append((*taken, *made))
        return results

    return noted


def _addresses(values: Sequence[jax.Array]) -> tuple[int, ...]:
    return tuple(value.unsafe_buffer_pointer() for value in values if _is_single(value))


def _is_single(value: Any) -> bool:
    return isinstance(value, jax.Array) and len(value.devices()) == 1 and value.sharding.memory_kind != "pinned_host"
