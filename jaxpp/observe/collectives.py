"""What the compiled programs of a step communicate between devices, read from their optimized HLO (``compiled.as_text()``).

The compiler makes collectives from annotations of shardings, joins several into one, or moves one out of a loop, so the text of
what will run is read. Bytes are those of a collective's operands on one device, whatever the algorithm sends over the wires; XLA
for CPUs has no bf16 collectives and reduces f32 instead. A collective in a loop runs once a trip (``jaxpp/runtime/hlo.py``)::

    %body (arg: (s32[], f32[4,8])) -> (s32[], f32[4,8]) {
      %psum = f32[4,8]{1,0} all-reduce(%x), replica_groups={{0,1},{2,3}}, to_apply=%add
    }
    ENTRY %main (param: f32[4,8]) -> f32[4,8] {
      %loop = (s32[], f32[4,8]{1,0}) while(%t), body=%body, condition=%cond, backend_config={"known_trip_count":{"n":"5"}}
    }
"""

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import jax
import numpy as np

from jaxpp.engine.engine import Engine
from jaxpp.errors import ArgumentError
from jaxpp.observe.programs import step_programs
from jaxpp.runtime.hlo import COLLECTIVES, Computations, HloInstruction, num_devices_of, parse_groups, parse_hlo
from jaxpp.stages.axes import DATA
from jaxpp.stages.cost import count_bytes
from jaxpp.stages.own_params import Joint
from jaxpp.tables import bytes_in_words, fold_lines, html_remarks, html_table, table_lines
from jaxpp.types import Batch, Key

_UNKNOWN = "?: in a loop whose number of trips is not in the program, or in a branch; counted once"
_SUMS = {"all-reduce": "all-reduced", "reduce-scatter": "reduce-scattered"}
_HOST = "(host): in host memory"


@dataclass(frozen=True)
class Collective:
    """A collective of a compiled program."""

    kind: str  # as XLA calls it: ``all-reduce``
    num_bytes: int  # of its operands on one device
    groups: tuple[tuple[int, ...], ...]  # positions in the mesh, row by row, of devices that communicate; or (source, target) pairs
    axes: tuple[str, ...]  # of the mesh, over which it runs: those along which devices of one group differ
    shapes: tuple[str, ...]  # of its operands on one device, as ``f32[16,16]``; several if the compiler joined several collectives
    on_host: bool  # whether an operand or result is in host memory
    times: int  # how often it runs in one run of the program
    in_loop: bool
    exact: bool  # whether ``times`` is known; in a loop without a trip count, or in a branch, it is not, and counts as once


class ProgramCollective(NamedTuple):
    """A collective of one of the programs of a step, and how often the step runs the program."""

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
        """Bytes of operands in a step, of collectives of one ``kind`` or ``program`` only, if given.

        Args:
            kind: ``"all-reduce"``, for example.
            axes: count only collectives that run over this axis, whatever others they run over; or exactly over a sequence of axes.
            program: a program by its name in the table.
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
        """Bytes that are summed over the axis ``data`` in a step, all-reduced or reduce-scattered."""
        return sum(self.num_bytes(kind, DATA) for kind in _SUMS)

    def to_json(self) -> str:
        """All numbers as JSON text, in bytes."""
        rows = [{"program": program, "runs": runs} | asdict(collective) for program, runs, collective in self.rows]
        sums = [dict(zip(("axes", "kind", "count", "num_bytes"), row, strict=True)) for row in self._sums()]
        return json.dumps({"rows": rows, "sums": sums, "communicated": self.communicated, "parameter_bytes": self.parameter_bytes})

    def _sums(self) -> list[tuple[tuple[str, ...], str, int, int]]:
        pairs = sorted({(row.collective.axes, row.collective.kind) for row in self.rows})
        return [(axes, kind, self.count(kind, axes), self.num_bytes(kind, axes)) for axes, kind in pairs]

    def _tables(self) -> tuple[list[list[str]], list[list[str]]]:
        merged: Counter[tuple[str, str, str, int, bool, bool]] = Counter()
        for program, runs, c in self.rows:
            merged[program, c.kind, ", ".join(c.axes), c.num_bytes, c.on_host, c.exact] += runs * c.times
        rows = [["program", "kind", "axes", "bytes", "times", "total"]]
        for (program, kind, axes, num_bytes, on_host, exact), times in merged.items():
            size, often = bytes_in_words(num_bytes) + " (host)" * on_host, f"{times:,}" + "?" * (not exact)
            rows.append([program, kind, axes, size, often, bytes_in_words(times * num_bytes)])
        sums = [["axes", "kind", "times", "total"]]
        sums += [[", ".join(axes), kind, f"{count:,}", bytes_in_words(total)] for axes, kind, count, total in self._sums()]
        return rows, sums

    def remarks(self) -> list[str]:
        """What the table's marks mean, and how much of the parameters was communicated."""
        found = [_HOST] if any(row.collective.on_host for row in self.rows) else []
        found += [] if all(row.collective.exact for row in self.rows) else [_UNKNOWN]
        if self.parameter_bytes is not None:
            sizes = f"{bytes_in_words(self.communicated)} of {bytes_in_words(self.parameter_bytes)}"
            done = [word for kind, word in _SUMS.items() if self.count(kind, DATA)] or [*_SUMS.values()][:1]
            found.append(f"communicated {sizes}: {' or '.join(done)} over {DATA} in a step, of all parameters")
        return found

    def __str__(self) -> str:
        tables = [table_lines(table) for table in self._tables()] if self.rows else [["no collectives"]]
        return "\n\n".join("\n".join(lines) for lines in [*tables, fold_lines(self.remarks())] if lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        tables = "".join(map(html_table, self._tables())) if self.rows else "<p>no collectives</p>"
        return tables + html_remarks(self.remarks())


def read_collectives(hlo_text: str, mesh_shape: Mapping[str, int]) -> tuple[Collective, ...]:
    """The collectives that a compiled program runs, in its order; those of a loop stand where the loop is.

    A collective in which every group is one device is left out; one that is split into a start and a done counts once.

    Args:
        hlo_text: ``compiled.as_text()`` of ``compiled = jax.jit(f).lower(...).compile()``.
        mesh_shape: the size of each axis of the mesh on which it runs, in the order of the mesh: ``mesh.shape``.

    Raises:
        ArgumentError: the text is not the HLO of a compiled program, or not of one for this mesh.
    """
    where = f"read_collectives(hlo_text, mesh_shape={dict(mesh_shape)})"
    computations, entry = parse_hlo(hlo_text)
    num_devices = math.prod(mesh_shape.values())
    if entry is None:
        rule, fix = "the text must be the optimized HLO of a compiled program", "pass jax.jit(f).lower(...).compile().as_text()"
        raise ArgumentError(where, rule, f"a text without ENTRY that begins with {hlo_text[:60]!r}", fix)
    stated = num_devices_of(hlo_text)
    if stated not in (None, num_devices):
        got = f"a program for {stated} devices and a mesh of {num_devices}"
        raise ArgumentError(where, "the program must be compiled for the mesh", got, "pass mesh.shape of the program's mesh")
    found = []
    for instruction, run in _walk(computations, entry, (1, False, True)):
        groups, operands = parse_groups(instruction.attributes, num_devices), instruction.operands
        if groups is None:
            rule = "the groups of devices must be written in a form that is known"
            raise ArgumentError(where, rule, f"{instruction.name}{instruction.attributes[:200]}", "report it as a bug")
        kind, num_bytes = instruction.does, sum(operand.num_bytes for operand in operands)
        shapes = tuple(str(array) for operand in operands for array in operand.arrays)
        on_host = any(shape.on_host for shape in (*operands, instruction.result))
        found.append(Collective(kind, num_bytes, groups, _axes(groups, mesh_shape), shapes, on_host, *run))
    return tuple(collective for collective in found if collective.axes)


_Runs = tuple[int, bool, bool]  # how often a computation runs, whether in a loop, and whether that is known


def _walk(computations: Computations, name: str, runs: _Runs) -> Iterator[tuple[HloInstruction, _Runs]]:
    times, in_loop, exact = runs
    for instruction in computations.get(name, ()):
        if instruction.does in COLLECTIVES:
            yield instruction, runs
            continue
        for call in instruction.calls:
            inside = times * (1 if call.times is None else call.times), in_loop or call.in_loop, exact and call.times is not None
            yield from _walk(computations, call.name, inside)


def _axes(groups: Sequence[Sequence[int]], mesh_shape: Mapping[str, int]) -> tuple[str, ...]:
    differ = np.zeros(len(mesh_shape), bool)
    for group in filter(None, groups):
        places = np.array(np.unravel_index(np.array(group), tuple(mesh_shape.values())))
        differ |= (places != places[:, :1]).any(axis=1)
    return tuple(axis for axis, moves in zip(mesh_shape, differ, strict=True) if moves)


def collectives_of(engine: Engine, batch: Batch, key: Key | None, num_other: int = 0) -> Collectives:
    """Read the programs of a step, each once; ``num_other`` are the bytes of other tasks' parameters, before they are sharded."""
    rows = list[ProgramCollective]()
    for each in step_programs(engine, batch, key, "update")[1]:
        if sizes := dict(each.line.place.axis_sizes):  # it runs on several devices
            label = f"{' and '.join(each.kinds)} of stage {each.line.stage}" if each.kinds else each.label
            found = read_collectives(each.compiled.as_text() or "", sizes | {DATA: each.num_replicas})
            rows += [ProgramCollective(label, each.runs, collective) for collective in found]
    params = engine.layout.params
    pairs = zip(engine.placed.names.all_params, jax.tree.leaves(params), strict=True)
    sizes = [engine.placement[name.stage].num_bytes(name.ref._replace(shared=False), aval) for name, aval in pairs]
    own = sizes[len(jax.tree.leaves(params.shared)) :] if isinstance(params, Joint) else []
    share = sum(own) / sum(map(count_bytes, jax.tree.leaves(params.task))) if own else 1.0
    return Collectives(tuple(rows), sum(sizes) + round(share * num_other))
