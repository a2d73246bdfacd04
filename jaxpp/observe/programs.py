"""The compiled programs of a step: what each of them runs, what it takes at least, and where work is wasted.

How good a step can be is decided when its programs are compiled: who wrote its matrix products and in which type, how many kernels
are left of the operations, how many bytes they move, whose buffers results take over. All of it stands in the text and the
statistics of the compiled programs (``jaxpp/runtime/hlo.py``), and needs no GPU. With the numbers of a GPU (``jaxpp/targets.py``)
kernels have a roofline (``jaxpp/runtime/roofline.py``): a time that they cannot beat, whatever they reach of it.

Waste is what is certain from the text alone: products in a wider type than those around them, weights that are copied for every
microbatch, kernels shorter than their launch, residuals as large as all that a program needs besides, and double precision.
"""

import itertools
import json
import math
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import NamedTuple, TypeVar, overload

import jax
from jax.stages import Compiled

from jaxpp.engine.engine import Engine
from jaxpp.engine.outcome import LoweredStep, Purpose
from jaxpp.errors import ArgumentError, shown
from jaxpp.errors.tracebacks import entries
from jaxpp.lowering.plan import Instruction
from jaxpp.observe.memory.liveness import step_shapes
from jaxpp.runtime.bind import BoundLine, Shapes
from jaxpp.runtime.compile import PlacedProgram
from jaxpp.runtime.hlo import HloInstruction, Kernel, aliased, float64_in, parse_hlo, read_kernels
from jaxpp.runtime.replica_groups import Mean
from jaxpp.runtime.roofline import Roofline, kernel_roofline, peak_of, program_roofline
from jaxpp.schedule.action import Kind
from jaxpp.schedule.draw import canvas
from jaxpp.stages.jaxpr import describe
from jaxpp.stages.program import Role
from jaxpp.tables import bytes_in_words, flops_in_words, fold_lines, html_remarks, html_table, in_bytes, in_units, table_lines
from jaxpp.targets import GPU, compiles_only, device_name, target_of
from jaxpp.types import Batch, Key

__all__ = ["Kept", "ProgramRow", "ProgramTable", "StepProgram", "WeightCopy", "programs_of", "step_programs"]

_WIDE = ("tensorfloat32", "float32", "float64")
_NARROW = ("bfloat16", "float16", "float8", "int8")

_WIDE_PART = 0.01
"""Of a program's products, those in a wide type from which they are told of. A float32 router or norm has fewer, and is meant."""
_COPY_BYTES = 2 << 20
"""Of a weight, from which copying it is told of: to read and write so many takes an H100 longer than the launch of a kernel."""
_LAUNCH_PART = 0.25
"""Of a program's bound that are launches, from which they are told of; more than that part of its kernels is then too short."""
_KEPT_PART, _KEPT_TIMES = 0.9, 4
"""Of a program's temporaries, and of the activations that it reads and sends: how large a residual is that is told of. So large are
the scores of attention on long sequences. The inner activations of a block, four times its width, are twice what comes and goes."""
_FLASH = 8, 0
"""The compute capability from which cuDNN has attention that keeps no scores."""
_SEEN = 0.01
"""Of the bound of all programs of a step, what a waste must cost to be told of; less is not seen in a measured step."""
_NAMED = 3  # further programs with the same waste that are named


class WeightCopy(NamedTuple):
    """A kernel that copies, transposes or converts a whole weight."""

    kernel: str
    weight: str  # its path and shape, or the shape alone of what is computed from parameters once a step
    num_bytes: int  # of the weight, on one device
    converts: bool  # whether the result has another type
    runs: int  # in one run of the program


class Kept(NamedTuple):
    """A residual that a program returns."""

    shape: str  # as ``bf16[8,64]``; of small ones in one vector, that of the vector
    num_bytes: int  # on one device


class _Summed:
    """Sums over what runs several times: the kernels of a program, or the programs of a step."""

    def _each(self) -> Iterable[tuple[int, "Kernel | ProgramRow"]]:
        """How often each runs."""
        raise NotImplementedError

    @cached_property
    def products(self) -> dict[str, int]:
        """FLOPs of matrix products and convolutions by the type that they are computed in, the most first."""
        return _sorted((kind, runs * flops) for runs, each in self._each() for kind, flops in each.products.items())

    @property
    def flops(self) -> int:
        """FLOPs other than those of matrix products."""
        return sum(runs * each.flops for runs, each in self._each())

    @property
    def bytes_read(self) -> int:
        """Bytes that kernels read of the memory of their device."""
        return sum(runs * each.bytes_read for runs, each in self._each())

    @property
    def bytes_written(self) -> int:
        """Bytes that kernels write there."""
        return sum(runs * each.bytes_written for runs, each in self._each())

    @property
    def num_bytes(self) -> int:
        """Bytes read and written."""
        return self.bytes_read + self.bytes_written


@dataclass(frozen=True)
class ProgramRow(_Summed):
    """A compiled program of a step. Numbers are those of one run of it, on one device.

    Attributes:
        name: what a trace of JAX's profiler calls it: ``stage_2_forward``.
        stage: the stage that it belongs to; stages that are compiled to the same program have a row each.
        rank: of the stage.
        device: where it runs: a device, or several.
        kinds: of the actions that it runs: ``("F",)``; ``("F", "B")`` where forward and backward are one program; empty for the
            rest of a step.
        runs: how often a step runs it.
        kernels: what it gives to its device, in order.
        arguments: bytes of all arguments.
        outputs: bytes of all results, those that take over the buffer of an argument included.
        temporaries: bytes that it needs besides while it runs.
        aliased: bytes of results that take over the buffer of an argument.
        num_arguments: how many arrays it takes.
        num_donated: how many of them give their buffer to a result.
        activations: bytes of the activations that it reads and returns.
        residuals: what it keeps for a backward.
        copied: whole weights that it copies, transposes or converts.
        has_float64: whether a value in it is of double precision.
        roofline: what it takes at least on its device, in seconds, by what limits its kernels; None if jaxpp does not have the
            numbers of the device.
        short: how many of its kernels are bound by their launch; 0 without a roofline.
        compiled: the program itself, a ``jax.stages.Compiled``: ``print(row.compiled.as_text())``.
    """

    name: str
    stage: int
    rank: int
    device: object
    kinds: tuple[Kind, ...]
    runs: int
    kernels: tuple[Kernel, ...] = field(repr=False)
    arguments: int = 0
    outputs: int = 0
    temporaries: int = 0
    aliased: int = 0
    num_arguments: int = 0
    num_donated: int = 0
    activations: int = 0
    residuals: tuple[Kept, ...] = ()
    copied: tuple[WeightCopy, ...] = ()
    has_float64: bool = False
    roofline: Roofline | None = None
    short: int = 0
    compiled: Compiled | None = field(default=None, repr=False, compare=False)

    def _each(self) -> Iterable[tuple[int, Kernel]]:
        return ((kernel.runs, kernel) for kernel in self.kernels)

    @property
    def num_kernels(self) -> int:
        """How many kernels run."""
        return sum(kernel.runs for kernel in self.kernels)

    @property
    def exact(self) -> bool:
        """Whether it is known how often each kernel runs: a loop without a trip count counts as one trip."""
        return all(kernel.exact for kernel in self.kernels)

    @cached_property
    def written_by(self) -> dict[str, int]:
        """FLOPs of matrix products by who wrote them (``"Triton"``, ``"cuBLAS"``, ``"cuDNN"``, ``"XLA"``), the most first."""
        return _sorted((kernel.by, kernel.runs * sum(kernel.products.values())) for kernel in self.kernels if kernel.products)

    @property
    def least_seconds(self) -> float | None:
        """Seconds in which it cannot be done; None if jaxpp does not have the numbers of the device."""
        return None if self.roofline is None else self.roofline.seconds

    @property
    def limit(self) -> str:
        """What limits most of that time: ``"compute"``, ``"memory"`` or ``"launch"``; empty if there is none."""
        return "" if not self.roofline or not self.roofline.seconds else max(zip(self.roofline, Roofline._fields, strict=True))[1]

    @cached_property
    def place(self) -> tuple[float, float]:
        """FLOPs of all its arithmetic for each byte, and the FLOP/s that the bound allows."""
        flops = sum(self.products.values()) + self.flops
        return flops / self.num_bytes if self.num_bytes else 0.0, flops / (self.least_seconds or 1.0)

    @property
    def what(self) -> str:
        """What it does, whatever its stage: ``forward``; the first backward of a step, which begins sums, is a backward."""
        name = self.name.replace(f"stage_{self.stage}", "").strip("_").replace("__", "_").removesuffix("_first")
        return name.replace("forward_backward", "forward + backward").replace("_", " ") or self.name

    def to_dict(self) -> dict[str, object]:
        """All numbers, for JSON."""
        derived = ("num_kernels", "exact", "products", "written_by", "flops", "bytes_read", "bytes_written", "least_seconds")
        told = asdict(replace(self, device=None, compiled=None)) | {name: getattr(self, name) for name in derived}
        told["device"] = device_name(self.device)
        told["roofline"] = None if self.roofline is None else self.roofline._asdict()
        told |= {"residuals": [each._asdict() for each in self.residuals], "copied": [each._asdict() for each in self.copied]}
        return {name: value for name, value in told.items() if name != "compiled"}


@entries
@dataclass(frozen=True)
class ProgramTable(_Summed, Sequence[ProgramRow]):
    r"""The different compiled programs of a step, in the order in which they first run. ``print`` it for a table.

    It is a sequence of ``ProgramRow``. Sums (``num_kernels``, ``num_bytes``, ``products``, ...) are those of a whole step, in which
    each program counts as often as it runs; ``of`` picks programs, so ``programs.of("B").num_kernels`` are those of all backwards.

    Attributes:
        rows: the programs.
        target: the numbers of the device; None if jaxpp does not have them, and then nothing has a least time.
        remarked: what else is to be said of them.

    Example:
        >>> product = Kernel("dot", "product", "Triton", 1, True, {"bfloat16": 2**31}, 0, 2**21, 2**21, 0)
        >>> rows = [ProgramRow("stage_0_forward", 0, 0, "cpu:0", (Kind.F,), 4, (product,), temporaries=2**20, num_arguments=2)]
        >>> programs = ProgramTable(tuple(rows))
        >>> print("\n".join(str(programs).splitlines()[:2]))
                program  stage  runs  kernels              products      by  bytes  temporaries  donated
        stage_0_forward      0     4        1  2.147 GFLOP bfloat16  Triton  4 MiB        1 MiB   0 of 2
        >>> programs.of("F").num_kernels, programs.of("B").num_kernels
        (4, 0)
    """

    rows: tuple[ProgramRow, ...]
    target: GPU | None = None
    remarked: tuple[str, ...] = ()

    @overload
    def __getitem__(self, index: int) -> ProgramRow: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[ProgramRow, ...]: ...
    def __getitem__(self, index: int | slice) -> ProgramRow | tuple[ProgramRow, ...]:
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    def of(self, kind: str | None = None, *, stage: int | None = None, rank: int | None = None) -> "ProgramTable":
        """The programs of one kind of action, of one stage, or of one rank, whose sums are then theirs alone.

        A kind is ``"F"``, ``"B"``, ``"I"`` or ``"W"``, or a ``Kind``. B is I then W, so ``"B"`` has these too. A program that is
        forward and backward at once is of both kinds, with all that it runs.

        Raises:
            ArgumentError: there is no such kind.
        """
        if kind is not None and kind not in list(Kind):
            rule, fix = "a kind of action is F, B, I or W", 'pass for example "F"; leave it out for the whole step'
            raise ArgumentError(f"programs.of({shown(kind)})", rule, shown(kind), fix)
        wanted = set(Kind) if kind is None else {Kind.B, Kind.I, Kind.W} if kind == Kind.B else {Kind(kind)}
        rows = [row for row in self if (kind is None or wanted.intersection(row.kinds)) and stage in (None, row.stage)]
        return replace(self, rows=tuple(row for row in rows if rank in (None, row.rank)), remarked=())

    def _each(self) -> Iterable[tuple[int, ProgramRow]]:
        return ((row.runs, row) for row in self)

    @property
    def num_kernels(self) -> int:
        """Kernels of a step."""
        return sum(row.runs * row.num_kernels for row in self)

    @property
    def written_by(self) -> dict[str, int]:
        """FLOPs of matrix products in a step, by who wrote them, the most first."""
        return _sorted((writer, row.runs * flops) for row in self for writer, flops in row.written_by.items())

    @property
    def least_seconds(self) -> float | None:
        """Seconds that all runs of all programs take at least, one after another; None if that is not known."""
        known = [row.runs * row.least_seconds for row in self if row.least_seconds is not None]
        return sum(known) if len(known) == len(self) else None

    @property
    def bound(self) -> float | None:
        """Seconds in which a step cannot be done: those of the device whose programs take longest. Sends and waits add to them."""
        found = list(self._by_device().values())
        return None if None in found else max((each for each in found if each is not None), default=0.0)

    @property
    def _devices(self) -> list[str]:
        return list(dict.fromkeys(device_name(row.device) for row in sorted(self, key=lambda row: row.rank)))

    def _by_device(self) -> dict[str, float | None]:
        return {
            name: replace(self, rows=tuple(row for row in self if device_name(row.device) == name)).least_seconds
            for name in self._devices
        }

    def to_json(self) -> str:
        """All numbers as JSON text, in bytes, FLOPs and seconds: each program with its kernels, and the sums of a step."""
        names = ("num_kernels", "products", "written_by", "flops", "bytes_read", "bytes_written", "least_seconds", "bound")
        target = None if self.target is None else self.target.name
        sums = {name: getattr(self, name) for name in names}
        return json.dumps({"target": target, "rows": [row.to_dict() for row in self], "sums": sums, "remarks": self.remarks()})

    def remarks(self) -> list[str]:
        """What the table's numbers mean, the sums of a step, and each kind of waste, with the programs in which it is."""
        return [*self._about(), *self._sums(), *self.waste()]

    def waste(self) -> list[str]:
        """What is wasteful, and where: a sentence for each kind of waste, the program with most of it first."""
        found = (_wide_products(self), _weight_copies(self), _short_kernels(self), _large_residuals(self), _doubles(self))
        return [sentence for sentence in found if sentence]

    def _about(self) -> list[str]:
        lines = [
            "numbers are those of one run; bytes: that its kernels read and write; donated: arguments that give their buffer away"
        ]
        if not all(row.exact for row in self):
            lines.append("?: in a loop whose number of trips is not in the program; one is counted")
        if self.target is None:
            lines.append(f"nothing is said of least times: jaxpp does not have the numbers of {', '.join(self._devices)}")
        else:
            lines.append(f"at least: a bound from the peaks of {self.target.kind}, which real kernels reach in part")
        return [*lines, *self.remarked]

    def _sums(self) -> list[str]:
        lines = [f"a step: {_summed(self)}"]
        kinds = [kind for kind in Kind if any(kind in row.kinds for row in self)]
        parts = [f"{kind}: {self.of(kind).num_kernels:,} kernels, {bytes_in_words(self.of(kind).num_bytes)}" for kind in kinds]
        if parts:
            both = sum(row.runs * (len(row.kinds) > 1) for row in self)
            lines.append("; ".join(parts) + f" ({both} runs are of both)" * bool(both))
        found = {name: seconds for name, seconds in self._by_device().items() if seconds is not None}
        if found and self.bound is not None:
            longest = max(found, key=found.__getitem__)
            others = ", ".join(f"{name} {_time(seconds)}" for name, seconds in found.items() if name != longest)
            lines.append(
                f"a step takes at least {_time(self.bound)}: the bound of {longest}" + f" (of others: {others})" * bool(others)
            )
        return lines

    def _cells(self) -> list[list[str]]:
        timed = any(row.roofline is not None for row in self)
        rows = [["program", "stage", "runs", "kernels", "products", "by", "bytes", "temporaries", "donated"]]
        rows[0] += ["at least", "limited by"] * timed
        for row in self:
            products = " + ".join(f"{flops_in_words(flops)} {kind}" for kind, flops in row.products.items())
            cells = [row.name, str(row.stage), f"{row.runs:,}", f"{row.num_kernels:,}{'?' * (not row.exact)}", products]
            donated = f"{row.num_donated} of {row.num_arguments}"
            cells += [", ".join(row.written_by), bytes_in_words(row.num_bytes), in_bytes(row.temporaries), donated]
            rows.append([*cells, *([_time(row.least_seconds), row.limit] if timed else [])])
        return rows

    def __str__(self) -> str:
        if not self.rows:
            return "no programs"
        return "\n".join([*table_lines(self._cells(), keep=2), "", *fold_lines(self.remarks())])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return html_table(self._cells()) + html_remarks(self.remarks()) if self.rows else "<p>no programs</p>"

    def figure(self, width: float | None = None) -> canvas.Figure:
        """The roofline as a matplotlib ``Figure``: FLOPs for each byte against the FLOP/s that the bound allows, both logarithmic.

        The line that rises is the bandwidth of the memory, the level ones are the peaks of the types. Each program is a dot whose
        area is its part of the step's bound; a dot far below the roof is a program whose kernels differ, or are short. ``width`` is
        in inches, of which a page shows 96 pixels each; 7.5 unless given. Needs matplotlib.

        Raises:
            ArgumentError: jaxpp does not have the numbers of the device, so there is no roof.
        """
        if self.target is None:
            devices = ", ".join(self._devices) or "no programs"
            rule = "a roof is made of the peaks and the bandwidth of a GPU, and jaxpp has them of the GPUs in its table alone"
            raise ArgumentError("programs.figure()", rule, devices, 'plan for a GPU, with devices=jaxpp.target("h100", 4)')
        return roofline_figure(self, list(self.products), self.target, width)


def programs_of(engine: Engine, batch: Batch, key: Key | None, purpose: Purpose) -> ProgramTable:
    """Read the compiled programs of a step, or of forwards, each once; of several processes, those of this one."""
    lowered, programs = step_programs(engine, batch, key, purpose)
    shapes, paths = step_shapes(engine, lowered), lowered.step.cuts[0].loss.param_paths
    ranks = engine.options.schedule.stage_to_rank
    rows = []
    for each in programs:
        line, compiled = each.line, each.compiled
        row = ProgramRow(each.name, line.stage, ranks[line.stage], line.device, each.kinds, each.runs, (), compiled=compiled)
        rows.append(_read(row, compiled, line, paths, shapes))
    remarked = [] if lowered.bound.numbers is None else ["the programs are those of this process, one of several"]
    if any(place.axis_sizes for place in engine.placement.places):
        remarked.append("a program runs on all devices of a mesh, and its numbers are those of one of them")
    return ProgramTable(tuple(rows), target_of(engine.options.devices[0]), tuple(remarked))


class StepProgram(NamedTuple):
    """A compiled program of a step."""

    name: str  # in a trace
    label: str  # for people
    line: BoundLine  # the first that runs it
    compiled: Compiled
    num_replicas: int  # that run it together
    kinds: tuple[Kind, ...] = ()  # of the actions that it runs
    runs: int = 0


def step_programs(engine: Engine, batch: Batch, key: Key | None, purpose: Purpose) -> tuple[LoweredStep, list[StepProgram]]:
    """The different programs of each stage, in the order in which they first run, and the lines that run them."""
    with jax.debug_nans(False), jax.debug_infs(False):  # with which programs would be others, that look at their results
        plan, lowered = engine.plan(purpose, batch, key)
    found: dict[tuple[int, int], StepProgram] = {}
    for line, instruction in zip(lowered.bound.lines, plan.instructions, strict=True):
        for each in _compiled(line, instruction):
            at = line.stage, id(each.compiled)
            known = found.get(at, each)
            kinds = dict.fromkeys((*known.kinds, *(action.kind for action in line.actions)))
            found[at] = known._replace(kinds=tuple(kinds), runs=known.runs + 1)
    return lowered, list(found.values())


def _compiled(line: BoundLine, instruction: Instruction) -> list[StepProgram]:
    """The compiled programs that an instruction runs."""
    if isinstance(instruction.call, Mean):
        named = [(f"{line.label}, {replicas}", count, program) for replicas, count, program in instruction.call.programs]
        return [StepProgram(name, name, line, program, count) for name, count, program in named]
    if not isinstance(instruction.call, Compiled):
        return []
    unseen = line.program if compiles_only(line.place.devices[0]) else None  # by a trace: it has the name of its stage
    name = instruction.about.program if unseen is None else unseen.name
    return [StepProgram(name, line.label, line, instruction.call, line.place.num_replicas)]


def _read(row: ProgramRow, compiled: Compiled, line: BoundLine, paths: Sequence[str], shapes: Shapes) -> ProgramRow:
    """The row with what its compiled program says of itself."""
    text, memory = compiled.as_text() or "", compiled.memory_analysis()
    kernels, target = read_kernels(text), target_of(line.place.devices[0])
    if memory is not None:
        sizes = {"arguments": memory.argument_size_in_bytes, "outputs": memory.output_size_in_bytes}
        row = replace(row, **sizes, temporaries=memory.temp_size_in_bytes, aliased=memory.alias_size_in_bytes)
    if target is not None:
        where = target, line.place.devices
        short = sum(kernel.runs for kernel in kernels if kernel_roofline(kernel, *where).launch)
        row = replace(row, roofline=program_roofline(kernels, *where), short=short)
    row = replace(row, num_arguments=len(jax.tree.leaves(compiled.in_avals)), num_donated=len(aliased(text)))
    row = replace(row, kernels=kernels, has_float64=float64_in(text))
    return row if line.placed is None else _read_values(row, text, line, line.placed, paths, shapes)


def _read_values(
    row: ProgramRow, text: str, line: BoundLine, job: PlacedProgram, paths: Sequence[str], shapes: Shapes
) -> ProgramRow:
    """The row with what is known of the values that its program reads and returns."""
    program, place = job.program, job.place
    results = list(zip(program.outputs, program.results, map(shapes.num_bytes, line.outputs), strict=True))
    kept = tuple(Kept(describe(aval), size) for ref, aval, size in results if ref.role == Role.RESIDUAL)
    crossing = sum(size for ref, _, size in results if ref.role in (Role.ACTIVATION, Role.COTANGENT))
    read = zip(program.inputs, program.avals, strict=True)
    crossing += sum(place.num_bytes(ref, aval) for ref, aval in read if ref.role in (Role.ACTIVATION, Role.BATCH, Role.COTANGENT))
    weights = dict[int, str]()
    for number, (ref, aval) in enumerate(zip(program.inputs, program.avals, strict=True)):
        if ref.role in (Role.PARAM, Role.STATIC) and sum(size > 1 for size in aval.shape) > 1:
            named = ref.role == Role.PARAM and 0 <= ref.index < len(paths)
            weights[number] = f"{paths[ref.index]} {describe(aval)}" if named else describe(aval)
    return replace(row, residuals=kept, activations=crossing, copied=tuple(_copies(text, row.kernels, weights)))


def _copies(text: str, kernels: Sequence[Kernel], weights: dict[int, str]) -> Iterator[WeightCopy]:
    """The kernels that copy a whole weight, which are given by the number of their argument; those in loops are not looked at."""
    computations, entry = parse_hlo(text)
    values = {instruction.name: instruction for instruction in computations.get(entry or "", ())}
    for kernel in kernels:
        made = values.get(kernel.name)
        if kernel.kind != "copy" or made is None:
            continue
        for at in (_argument(name, values) for name in made.names):
            number = int(at.names[0]) if at is not None else -1
            if at is None or number not in weights or at.result.num_bytes > kernel.bytes_read:
                continue  # of an embedding, the rows of the tokens are read
            if made.result.size >= at.result.size:
                converts = at.result.arrays[0].type not in {array.type for array in made.result.arrays}
                yield WeightCopy(kernel.name, weights[number], at.result.num_bytes, converts, kernel.runs)


def _argument(name: str, values: dict[str, HloInstruction]) -> HloInstruction | None:
    """The argument of the program that a value is, behind bitcasts; None if it is none."""
    at = values.get(name)
    while at is not None and at.opcode == "bitcast" and at.names:
        at = values.get(at.names[0])
    return at if at is not None and at.opcode == "parameter" and at.names[0].isdigit() else None


# --- waste ---

_T = TypeVar("_T")
_Found = tuple[float, ProgramRow, _T]
"""The cost of a waste in a step, to tell where there is most of it; a program that has it; and what it is there."""


def _ranked(found: Sequence[_Found[_T]]) -> tuple[ProgramRow, _T, list[str]]:
    """The program with the most of a waste, and what it is there; and the names of the others."""
    (_, worst, what), *others = sorted(found, key=lambda each: each[0], reverse=True)
    return worst, what, list(dict.fromkeys(row.name for _, row, _ in others if row.name != worst.name))


def _so(names: Sequence[str], one: str = "does", many: str = "do") -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"; so {one if len(names) == 1 else many} {', '.join(names[:_NAMED])}{more}" if names else ""


def _wide_products(programs: ProgramTable) -> str:
    """Products in float32 or tensorfloat32 among products that are mostly narrower."""
    summed = programs.products
    narrow = {kind: flops for kind, flops in summed.items() if kind.startswith(_NARROW)}
    if not narrow or sum(narrow.values()) * 2 < sum(summed.values()):
        return ""
    found = []
    for row in programs:
        own = {kind: flops for kind, flops in row.products.items() if kind in _WIDE}
        if own and sum(own.values()) >= _WIDE_PART * sum(row.products.values()):
            found.append((row.runs * sum(own.values()), row, own))
    if not found:
        return ""
    worst, own, others = _ranked(found)
    most = max(narrow, key=narrow.__getitem__)
    said = " and ".join(f"{flops_in_words(flops)} in {kind}" for kind, flops in own.items())
    whole = f"of products of {flops_in_words(sum(worst.products.values()))}"
    slower = _slower(programs.target, max(own, key=own.__getitem__), most)
    return (
        f"{worst.name} multiplies {said}, {whole}, while most of the step's are in {most}{slower}{_so(others)}: "
        "look for inputs or weights that are not cast"
    )


def _slower(target: GPU | None, wide: str, narrow: str) -> str:
    """How much higher the peak of a narrow type is than that of a wide type."""
    if target is None:
        return ""
    peaks = [getattr(target.peaks, kind, None) or target.peaks.vector for kind in (narrow, wide)]
    return f", whose peak is {peaks[0] / peaks[1]:.3g} times as high"


def _weight_copies(programs: ProgramTable) -> str:
    """Whole weights that are copied for every microbatch; what is done once a step is not told of."""
    found = []
    for row in programs:
        large = [each for each in row.copied if each.num_bytes >= _COPY_BYTES]
        if row.kinds and large:
            found.append((row.runs * sum(each.runs * each.num_bytes for each in large), row, large))
    if not found:
        return ""
    worst, large, others = _ranked(found)
    most = max(large, key=lambda each: each.num_bytes)
    does = "converts" if most.converts else "copies or transposes"
    more = f" and {len(large) - 1} more" if len(large) > 1 else ""
    size = bytes_in_words(sum(each.runs * each.num_bytes for each in large))
    return (
        f"{worst.name} {does} whole weights, {size} in each of its runs ({most.weight}{more}; kernel {most.kernel}){_so(others)}: "
        "store them as they are multiplied"
    )


def _short_kernels(programs: ProgramTable) -> str:
    """Kernels that are shorter than their launch, where they are a part of the bound that can be seen."""
    whole, found = programs.least_seconds or 0.0, []
    for row in programs:
        launch, least = (row.roofline.launch, row.roofline.seconds) if row.roofline else (0.0, 0.0)
        if launch > _LAUNCH_PART * least and row.runs * launch > _SEEN * whole:
            found.append((row.runs * launch, row, launch / least))
    if not found:
        return ""
    worst, part, others = _ranked(found)
    return (
        f"{worst.name} has {worst.short} kernels, of {worst.num_kernels}, that are shorter than their launch, which is {part:.0%} "
        f"of its bound{_so(others, 'has', 'have')}: fewer and larger microbatches, or wider layers, give a launch more work"
    )


def _large_residuals(programs: ProgramTable) -> str:
    """A residual as large as all that its program needs besides, and larger than what crosses between stages."""
    found = []
    for row in programs:
        largest = max(row.residuals, key=lambda kept: kept.num_bytes, default=None)
        if largest and largest.num_bytes >= max(_KEPT_PART * row.temporaries, _KEPT_TIMES * row.activations):
            found.append((largest.num_bytes, row, largest))
    if not found:
        return ""
    worst, largest, others = _ranked(found)
    size, besides = bytes_in_words(largest.num_bytes), in_bytes(worst.temporaries)
    flash = (
        'if it has the scores of attention, jax.nn.dot_product_attention(..., implementation="cudnn") keeps none; else '
        if _may_be_scores(largest) and (programs.target is None or programs.target.chip.capability >= _FLASH)
        else ""
    )
    return (
        f"{worst.name} keeps a residual {largest.shape} of {size} for the backward, as large as all its temporaries ({besides})"
        f"{_so(others)}: {flash}compute it in a narrower type, or recompute it (remat=)"
    )


def _may_be_scores(kept: Kept) -> bool:
    """Whether a residual has a number for each pair of positions, in examples or heads."""
    *many, queries, keys = kept.shape.partition("[")[2].rstrip("]").split(",") if "," in kept.shape else ("", "")
    return bool(many) and queries == keys


def _doubles(programs: ProgramTable) -> str:
    """Values of double precision anywhere."""
    found = [(row.runs * row.products.get("float64", 0), row, None) for row in programs if row.has_float64]
    if not found:
        return ""
    worst, _, others = _ranked(found)
    peaks = None if programs.target is None else programs.target.peaks
    slower = f", whose peak is {peaks.tensorfloat32 / peaks.float64:.3g} times lower than that of tensorfloat32" if peaks else ""
    return f"{worst.name} computes in float64{slower}{_so(others)}: look for NumPy scalars and for jax_enable_x64"


# --- words ---


def _sorted(pairs: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Sums by name, the largest first."""
    found: Counter[str] = Counter()
    for name, number in pairs:
        found[name] += number
    return dict(found.most_common())


def _summed(programs: ProgramTable) -> str:
    products = ", ".join(f"{flops_in_words(flops)} in {kind}" for kind, flops in programs.products.items()) or "none"
    writers = f" ({', '.join(programs.written_by)})" if programs.written_by else ""
    moved = f"{bytes_in_words(programs.bytes_read)} read, {bytes_in_words(programs.bytes_written)} written"
    other = flops_in_words(programs.flops)
    return f"{programs.num_kernels:,} kernels; products: {products}{writers}; other arithmetic: {other}; {moved}"


def _time(seconds: float | None) -> str:
    """As people say it, with four digits: ``12.35 ms``."""
    return "" if seconds is None else in_units(1e6 * seconds, 1000, ("µs", "ms", "s"))


# --- the roofline as a figure ---

_WIDTH, _LOW, _HEIGHT = 7.5, 2.9, 0.5  # inches: of the figure, of the least height of the roof, of its height for one of width
_BOTH, _REST = "#009E73", "#8C8C8C"  # the colours of a program that is forward and backward at once, and of the rest of a step
_LARGEST, _SMALLEST = 26.0, 5.0  # points: the diameters of a dot that is all of the step, and of the smallest dot
_LEAST, _MOVES = 0.005, 1 / 64
"""Part of the step's bound, and FLOPs a byte, of a program that is drawn: the others are many, and far from the roof's corner."""
_NEAR = 1.3  # how much farther along an axis a dot may lie that shares a number


def roofline_figure(rows: Sequence[ProgramRow], kinds: Sequence[str], target: GPU, width: float | None = None) -> canvas.Figure:
    """The roof of a target for the types of products, and a dot for each program that computes anything.

    Both axes are logarithmic: FLOPs for each byte, and FLOP/s. Dots have numbers, and below the axes stands what they are,
    and the peaks of the roof. Dots of the same program of several stages that lie on one another share a number.
    """
    width = width or _WIDTH
    bounds = sorted(((row.runs * row.least_seconds, row) for row in rows if row.least_seconds), key=lambda pair: -pair[0])
    whole = sum(bound for bound, _ in bounds) or 1.0
    sized = [(math.sqrt(bound / whole), row) for bound, row in bounds if row.place[0] > _MOVES and bound >= _LEAST * whole]
    drawn = [row for _, row in sized]
    peaks, groups = _peaks(kinds, target), _groups(drawn)
    panel = canvas.Panel(1, max(_LOW, _HEIGHT * width), 1)
    heading = f"What the programs of a step reach at most on {target.kind} (area: part of the step's bound)"
    beside = _across(len(bounds) - len(drawn), groups, peaks, width)
    figure, axes = canvas.chart((width, 2 + panel.height), heading, _key(drawn), beside, "FLOP/s at most")
    across, up = _extents(drawn, peaks, target)
    axes.set(xscale="log", yscale="log", xlim=across, ylim=up)
    _draw_roof(axes, peaks, target, across)
    for size, row in sized:
        style = {"edgecolors": "white", "linewidths": 0.8, "alpha": 0.9, "zorder": 3, "label": row.name}
        axes.scatter(*([part] for part in row.place), s=max(_SMALLEST, _LARGEST * size) ** 2, color=_colour(row), **style)
    canvas.fit_page(figure, [axes], [panel])
    canvas.number_points(axes, [group[0].place for group in groups])
    return figure


def _key(drawn: Sequence[ProgramRow]) -> list[canvas.Entry]:
    found = {_word(row): _colour(row) for row in drawn}
    order = [*canvas.WORDS.values(), "F and B in one", "rest of a step"]
    return sorted(found.items(), key=lambda entry: order.index(entry[0]))


def _word(row: ProgramRow) -> str:
    return "rest of a step" if not row.kinds else canvas.WORDS[row.kinds[0]] if len(row.kinds) == 1 else "F and B in one"


def _colour(row: ProgramRow) -> str:
    return _REST if not row.kinds else canvas.colour_of(row.kinds[0], 0, 0) if len(row.kinds) == 1 else _BOTH


def _across(left_out: int, groups: Sequence[Sequence[ProgramRow]], peaks: Sequence[tuple[float, str]], width: float) -> str:
    """The label of the lower axis, and what the numbers and the levels of the roof are."""
    names = [f"{k} {group[0].what} {_ranges(sorted({row.stage for row in group}))}" for k, group in enumerate(groups, 1)]
    said = ["; ".join(names), f"roof, from the top: {'; '.join(words for _, words in peaks)}"]
    if left_out:
        programs = f"{left_out} program{'s' * (left_out > 1)}"
        said.append(f"left out: {programs} with less than {_LEAST:.1%} of the step's bound, or that only move bytes")
    room = max(20, int(13 * (width - 0.9)))
    return "\n".join(["FLOPs for each byte", *(line for each in filter(None, said) for line in textwrap.wrap(each, room))])


def _peaks(kinds: Sequence[str], target: GPU) -> list[tuple[float, str]]:
    """The peaks of the types of products, and of elementwise work, the highest first; types that are equally fast are one."""
    named: dict[float, list[str]] = {}
    for kind in kinds:
        named.setdefault(peak_of(target.peaks, kind), []).append(kind)
    named.setdefault(target.peaks.vector, []).append("elementwise")
    return [(peak, f"{', '.join(names)}  {peak / 1e12:.4g} TFLOP/s") for peak, names in sorted(named.items(), reverse=True)]


def _extents(
    drawn: Sequence[ProgramRow], peaks: Sequence[tuple[float, str]], target: GPU
) -> tuple[tuple[float, float], tuple[float, float]]:
    """What holds all dots and the corners of the roof."""
    ridges = [peak / target.bandwidth for peak, _ in peaks]
    xs = [*(row.place[0] for row in drawn), min(ridges), 40 * max(ridges)]
    ys = [*(row.place[1] for row in drawn), peaks[-1][0] / 4, 2 * peaks[0][0]]
    return _room(xs), _room(ys)


def _room(values: Sequence[float]) -> tuple[float, float]:
    """From somewhat below the least to somewhat above the most."""
    return min(values) / 2, max(values) * 1.25


def _draw_roof(axes: canvas.Axes, peaks: Sequence[tuple[float, str]], target: GPU, across: tuple[float, float]) -> None:
    left, right = across
    highest = peaks[0][0] / target.bandwidth
    axes.plot([left, highest], [left * target.bandwidth, peaks[0][0]], color=canvas.INK, linewidth=1.5, label="memory", zorder=2)
    for number, (peak, words) in enumerate(peaks):
        style = {"color": canvas.INK if number == 0 else canvas.shade(0.9), "linewidth": 1.5 if number == 0 else 0.9, "zorder": 2}
        axes.plot([peak / target.bandwidth, right], [peak, peak], label=words, **style)


def _ranges(numbers: Sequence[int]) -> str:
    """Numbers in ascending order, as ``0-2, 5``."""
    runs = [[number for _, number in run] for _, run in itertools.groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _groups(drawn: Sequence[ProgramRow]) -> list[list[ProgramRow]]:
    """Those whose dots share a number: of the same program, and near one another."""
    groups: list[list[ProgramRow]] = []
    for row in drawn:
        same = (group for group in groups if group[0].what == row.what)
        near = (group for group in same if all(1 / _NEAR < a / b < _NEAR for a, b in zip(group[0].place, row.place, strict=True)))
        if (found := next(near, None)) is None:
            groups.append([row])
        else:
            found.append(row)
    return groups
