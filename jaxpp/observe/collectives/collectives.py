"""What the compiled programs of a step communicate between devices, read from their optimized HLO.

Within a program the compiler decides what is communicated: from annotations of shardings it makes all-reduces and all-gathers that
stand nowhere in the user's code, joins several collectives into one, or moves a collective out of a loop. So nothing here is
computed from the model. The text of what will run is read, and every collective in it is counted with its bytes, the mesh axes
over which it runs, and how often it runs.

Bytes are the bytes of a collective's operands on one device, whatever the algorithm sends over the wires for them. They are the
bytes of what runs: XLA for CPUs has no bf16 collectives and reduces f32 instead.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import numpy as np

from jaxpp.errors import ArgumentError
from jaxpp.observe.collectives.hlo import HloInstruction, parse_groups, parse_hlo
from jaxpp.stages.stage_table import bytes_in_words
from jaxpp.tables import fold_lines, html_remarks, html_table, table_lines

__all__ = ["COLLECTIVE_KINDS", "Collective", "Collectives", "ProgramCollective", "read_collectives"]

COLLECTIVE_KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "collective-permute",
    "all-to-all",
    "ragged-all-to-all",
    "collective-broadcast",
)
"""The collectives of XLA."""

_DATA = "data"
_STATED = re.compile(r"\b(?:num_partitions|replica_count)=(\d+)")
_UNKNOWN = "?: in a loop whose number of trips is not in the program, or in a branch; counted once"
_HOST = "(host): in host memory"


@dataclass(frozen=True)
class Collective:
    """A collective of a compiled program.

    Attributes:
        kind: one of ``COLLECTIVE_KINDS``.
        num_bytes: bytes of its operands on one device.
        groups: positions in the mesh, row by row, of the devices that communicate with one another; for a collective-permute
            each pair of source and target. A group of one device, which does not communicate, is among them.
        axes: the mesh axes over which it runs: the axes along which devices of one group differ.
        shapes: of its operands on one device, as ``f32[16,16]``; several if the compiler joined several collectives.
        on_host: whether an operand or result is in host memory.
        times: how often it runs in one run of the program.
        in_loop: whether it is in the body of a loop.
        exact: whether ``times`` is known. In a loop without a trip count, or in a branch, it is not, and counts as once.
    """

    kind: str
    num_bytes: int
    groups: tuple[tuple[int, ...], ...]
    axes: tuple[str, ...]
    shapes: tuple[str, ...]
    on_host: bool
    times: int
    in_loop: bool
    exact: bool


class ProgramCollective(NamedTuple):
    """A collective of one of the programs of a step.

    Attributes:
        program: what the step calls the program.
        runs: how often the step runs the program.
        collective: of the program.
    """

    program: str
    runs: int
    collective: Collective


@dataclass(frozen=True)
class Collectives:
    """All collectives of a step. ``print`` it for a table.

    Attributes:
        rows: the collectives of each program.
        parameter_bytes: bytes of all parameters, including inactive tasks; None if not of interest.

    Example:
        >>> grads = Collective("all-reduce", 2048, ((0, 1),), ("data",), ("f32[512]",), False, 1, False, True)
        >>> print(Collectives((ProgramCollective("gradients", 3, grads),), parameter_bytes=12288))
          program        kind  axes  bytes  times  total
        gradients  all-reduce  data  2 KiB      3  6 KiB
        <BLANKLINE>
        axes        kind  times  total
        data  all-reduce      3  6 KiB
        <BLANKLINE>
        communicated 6 KiB of 12 KiB: all-reduced over data in a step, of all parameters
    """

    rows: tuple[ProgramCollective, ...]
    parameter_bytes: int | None = None

    def num_bytes(self, kind: str | None = None, axes: str | Sequence[str] | None = None, program: str | None = None) -> int:
        """Bytes of operands in a step.

        Args:
            kind: count only collectives of this kind.
            axes: count only collectives that run over this axis, whatever others they run over; or, given a sequence of names, over
                exactly these axes.
            program: count only collectives of this program.
        """
        return sum(times * collective.num_bytes for times, collective in self._select(kind, axes, program))

    def count(self, kind: str | None = None, axes: str | Sequence[str] | None = None, program: str | None = None) -> int:
        """How many collectives run in a step; the arguments are those of ``num_bytes``."""
        return sum(times for times, _ in self._select(kind, axes, program))

    def _select(self, kind: str | None, axes: str | Sequence[str] | None, program: str | None) -> Iterator[tuple[int, Collective]]:
        for label, runs, collective in self.rows:
            over = axes in collective.axes if isinstance(axes, str) else axes is None or set(axes) == set(collective.axes)
            if over and kind in (None, collective.kind) and program in (None, label):
                yield runs * collective.times, collective

    @property
    def communicated(self) -> int:
        """Bytes that are all-reduced over the axis ``data`` in a step."""
        return self.num_bytes("all-reduce", _DATA)

    def to_json(self) -> str:
        """All numbers as JSON text, in bytes."""
        rows = [{"program": program, "runs": runs} | asdict(collective) for program, runs, collective in self.rows]
        sums = [
            {"axes": axes, "kind": kind, "count": self.count(kind, axes), "num_bytes": self.num_bytes(kind, axes)}
            for axes, kind in self._sums()
        ]
        return json.dumps({"rows": rows, "sums": sums, "communicated": self.communicated, "parameter_bytes": self.parameter_bytes})

    def _sums(self) -> list[tuple[tuple[str, ...], str]]:
        return sorted({(row.collective.axes, row.collective.kind) for row in self.rows})

    def _tables(self) -> tuple[list[list[str]], list[list[str]]]:
        merged: Counter[tuple[str, str, str, int, bool, bool]] = Counter()
        for program, runs, c in self.rows:
            merged[program, c.kind, ", ".join(c.axes), c.num_bytes, c.on_host, c.exact] += runs * c.times
        rows = [["program", "kind", "axes", "bytes", "times", "total"]]
        for (program, kind, axes, num_bytes, on_host, exact), times in merged.items():
            size, often = bytes_in_words(num_bytes) + " (host)" * on_host, f"{times:,}" + "?" * (not exact)
            rows.append([program, kind, axes, size, often, bytes_in_words(times * num_bytes)])
        sums = [["axes", "kind", "times", "total"]]
        for axes, kind in self._sums():
            sums.append([", ".join(axes), kind, f"{self.count(kind, axes):,}", bytes_in_words(self.num_bytes(kind, axes))])
        return rows, sums

    def remarks(self) -> list[str]:
        """What the table's marks mean, and how much of the parameters was communicated."""
        found = [_HOST] if any(row.collective.on_host for row in self.rows) else []
        found += [] if all(row.collective.exact for row in self.rows) else [_UNKNOWN]
        if self.parameter_bytes is not None:
            sizes = f"{bytes_in_words(self.communicated)} of {bytes_in_words(self.parameter_bytes)}"
            found.append(f"communicated {sizes}: all-reduced over {_DATA} in a step, of all parameters")
        return found

    def __str__(self) -> str:
        tables = [table_lines(table) for table in self._tables()] if self.rows else [["no collectives"]]
        return "\n\n".join("\n".join(lines) for lines in [*tables, fold_lines(self.remarks())] if lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        tables = "".join(map(html_table, self._tables())) if self.rows else "<p>no collectives</p>"
        return tables + html_remarks(self.remarks())


def read_collectives(hlo_text: str, mesh_shape: Mapping[str, int]) -> tuple[Collective, ...]:
    """The collectives that a compiled program runs.

    A collective without communication, where every group is one device, is left out. A collective that is split into a start and
    a done counts once.

    Args:
        hlo_text: ``compiled.as_text()`` of ``compiled = jax.jit(f).lower(...).compile()``.
        mesh_shape: the size of each axis of the mesh on which it runs, in the order of the mesh: ``mesh.shape``.

    Returns:
        the collectives in the order of the program; the collectives of a loop stand where the loop is.

    Raises:
        ArgumentError: the text is not the HLO of a compiled program, or not of one for this mesh.
    """
    where = f"read_collectives(hlo_text, mesh_shape={dict(mesh_shape)})"
    computations, entry = parse_hlo(hlo_text)
    num_devices = math.prod(mesh_shape.values())
    if entry is None:
        rule, fix = "the text must be the optimized HLO of a compiled program", "pass jax.jit(f).lower(...).compile().as_text()"
        raise ArgumentError(where, rule, f"a text without ENTRY that begins with {hlo_text[:60]!r}", fix)
    stated = [int(number) for number in _STATED.findall(hlo_text.split("\n", 1)[0])]
    if stated and math.prod(stated) != num_devices:
        got = f"a program for {math.prod(stated)} devices and a mesh of {num_devices}"
        raise ArgumentError(where, "the program must be compiled for the mesh", got, "pass mesh.shape of the program's mesh")
    found = [
        _collective(instruction, kind, run, mesh_shape, where)
        for instruction, kind, run in _walk(computations, entry, _Run(1, in_loop=False, exact=True))
    ]
    return tuple(collective for collective in found if collective.axes)


class _Run(NamedTuple):
    """How a computation is run: how often, whether in a loop, whether that is known."""

    times: int
    in_loop: bool
    exact: bool


def _walk(computations: Mapping[str, Sequence[HloInstruction]], name: str, run: _Run) -> Iterator[tuple[HloInstruction, str, _Run]]:
    """The collectives of a computation and of all that it runs."""
    for instruction in computations.get(name, ()):
        kind = instruction.opcode.removesuffix("-start")
        if kind in COLLECTIVE_KINDS:
            yield instruction, kind, run
            continue
        for called, times, in_loop in instruction.calls:
            inside = _Run(run.times * (1 if times is None else times), run.in_loop or in_loop, run.exact and times is not None)
            yield from _walk(computations, called, inside)


def _collective(instruction: HloInstruction, kind: str, run: _Run, mesh_shape: Mapping[str, int], where: str) -> Collective:
    num_devices = math.prod(mesh_shape.values())
    groups = parse_groups(instruction.attributes, num_devices)
    if groups is None:
        got = f"{instruction.name}{instruction.attributes[:200]}"
        raise ArgumentError(where, "the groups of devices must be written in a form that is known", got, "report it as a bug")
    operands = instruction.operands
    return Collective(
        kind,
        sum(operand.num_bytes for operand in operands),
        groups,
        _axes(groups, mesh_shape),
        tuple(array for operand in operands for array in operand.arrays),
        any(shape.on_host for shape in (*operands, instruction.result)),
        *run,
    )


def _axes(groups: Sequence[Sequence[int]], mesh_shape: Mapping[str, int]) -> tuple[str, ...]:
    """The axes along which the devices of some group differ."""
    differ = np.zeros(len(mesh_shape), bool)
    for group in filter(None, groups):
        places = np.array(np.unravel_index(np.array(group), tuple(mesh_shape.values())))
        differ |= (places != places[:, :1]).any(axis=1)
    return tuple(axis for axis, moves in zip(mesh_shape, differ, strict=True) if moves)
