"""A program: a function compiled as one unit, with the name of every value it reads and writes.

A name (``Ref``) says what a value is for its stage. Roles in ``PER_MICROBATCH`` exist once a microbatch, others once a step. A
program that reads and writes the same ``GRAD``, ``LOSS`` or ``AUX`` adds to it in place. Many small results are returned as one
vector (``Pack``), because each array that a program is given or gives costs more than a small array's work.
"""

import enum
import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpp.stages.axes import AxisEnv
from jaxpp.stages.cost import count_bytes
from jaxpp.stages.fingerprint import ComparableFunction
from jaxpp.stages.stacked import rows
from jaxpp.types import Aval, DType

# What a value is to the stage that holds it. ``FETCHED``: a residual that waits in host memory, or is back from there.
# ``ADDEND``: a gradient of one microbatch that another program adds to the sum. ``PREVIOUS``: a parameter as it was before the last
# step. ``TOKEN``: a byte that is there when a program is done.
Role = enum.StrEnum(
    "Role",
    "PARAM PREVIOUS CONSTANT STATIC BATCH KEY SCALE ACTIVATION RESIDUAL FETCHED COTANGENT ADDEND GRAD LOSS AUX ROWS OPT STATE "
    "LOSS_SCALE REPLICA VALUE TOKEN",
)
PER_MICROBATCH = frozenset(map(Role, "batch key scale activation residual fetched cotangent addend rows state".split()))
ACCUMULATED = frozenset({Role.GRAD, Role.LOSS, Role.AUX})
LEAVES = frozenset({Role.PARAM, Role.PREVIOUS, Role.OPT, Role.STATE, Role.LOSS_SCALE})  # the leaves of a state
SHARED = LEAVES - {Role.STATE} | {Role.CONSTANT}  # the same on all replicas of a stage
HELD_LIKE = {Role.PREVIOUS: Role.PARAM, Role.ADDEND: Role.PARAM, Role.GRAD: Role.PARAM}  # what devices hold as they hold the other


class Ref(NamedTuple):
    """The name of a value inside one stage: its role, and its number among those of the role.

    ``shared``: what the replicas of a stage have together, though each has its own of the role (a summed gradient; a batch leaf
    that all microbatches read whole), or a whole one: a parameter as they hold it between steps, each a part.
    """

    role: Role
    index: int = 0  # pyright: ignore[reportIncompatibleMethodOverride]  (a tuple's own, which nobody asks)
    source: int = -1  # the stage from which a cotangent comes, or the gradient of a tied parameter
    variant: int = -1  # of a constant or a static: for which of the sizes of microbatches it is made
    new: bool = False  # a parameter or a leaf of the optimizer as it is after the update
    shared: bool = False
    waits: bool = False  # it is in the host memory beside the devices of its stage

    @property
    def per_replica(self) -> bool:
        """Whether each replica of a stage has its own (unless the place says otherwise)."""
        return not self.shared and self.role not in SHARED


@dataclass(frozen=True, eq=False)
class Program:
    """A flat function and the names of its arguments and results; the same as itself alone."""

    function: Callable[..., list[jax.Array]]  # takes one array for each input and returns one for each output
    inputs: tuple[Ref, ...]
    outputs: tuple[Ref, ...]
    avals: tuple[jax.ShapeDtypeStruct, ...]  # of each input, as one replica has it
    spans: bool = False  # it sees all replicas at once: what each has of its own comes with one more axis, the first
    sums: bool = False  # what it returns for all replicas is the sum of what it makes on each, a gradient onto the one it is given
    name: str = "program"  # what it is called where it is compiled, and so in a trace of JAX's profiler: ``stage_2_forward``
    env: AxisEnv = ()  # the axes over which it may communicate
    lean: bool = False  # whether it is compiled to hold little at once, rather than to run independent operations side by side
    makes: tuple[jax.ShapeDtypeStruct, ...] | None = None  # its results, where they are known without a trace

    @cached_property
    def results(self) -> list[jax.ShapeDtypeStruct]:
        """Shape and dtype of each result."""
        if self.makes is not None:
            return list(self.makes)
        return jax.make_jaxpr(self.function, axis_env=self.env, return_shape=True)(*self.avals)[1]

    @property
    def does(self) -> Hashable:
        """Equal for programs that do the same, whatever they are called; None if that takes a trace to see."""
        does = self.function.does if isinstance(self.function, ComparableFunction) else None
        return None if does is None else (does, self.inputs, self.outputs, self.avals, self.spans, self.sums, self.lean)

    @property
    def donated(self) -> tuple[int, ...]:
        """The arguments whose buffers the results take over: the accumulators."""
        return tuple(k for k, ref in enumerate(self.inputs) if ref.role in ACCUMULATED)


@dataclass(frozen=True)
class Backward:
    """A program of the backward, twice."""

    first: Program  # for the first microbatch that comes back: it makes the gradients
    then: Program  # for all others: it adds to them

    @property
    def made(self) -> frozenset[Ref]:
        """The sums it makes or adds to."""
        return frozenset(ref for ref in self.then.outputs if ref.role in ACCUMULATED)


@dataclass(frozen=True)
class Fused(Backward):
    """The forward and the backward of a stage as one program, twice."""

    share: float  # of the FLOPs that are the forward's


SMALL = 1 << 12  # Bytes up to which an array is packed
_MANY = 64  # arrays from which on a vector is divided, into vectors of ``_FEW``
_FEW = 16


@dataclass(frozen=True)
class Pack:
    """A vector that holds several arrays end to end: arrays of its dtype, and truth values as zeros and ones."""

    ref: Ref  # the name of the vector
    members: tuple[Ref, ...]  # the names of the arrays in it
    avals: tuple[jax.ShapeDtypeStruct, ...]  # their shapes and dtypes; the first has the vector's dtype

    @cached_property
    def bounds(self) -> tuple[tuple[int, int], ...]:
        """Where each array begins and ends."""
        return tuple(rows([math.prod(aval.shape) for aval in self.avals]))

    @property
    def aval(self) -> jax.ShapeDtypeStruct:
        """Shape and dtype of the vector."""
        return jax.ShapeDtypeStruct((self.bounds[-1][1],), self.avals[0].dtype)

    def join(self, values: Mapping[Ref, jax.Array]) -> jax.Array:
        """The vector of the arrays."""
        return jnp.concatenate([jnp.ravel(values[ref]).astype(self.avals[0].dtype) for ref in self.members])

    def split(self, vector: jax.Array) -> dict[Ref, jax.Array]:
        """The arrays of the vector."""
        parts = [jax.lax.slice(vector, (start,), (end,)) for start, end in self.bounds]
        return {
            ref: part.reshape(aval.shape).astype(aval.dtype)
            for ref, aval, part in zip(self.members, self.avals, parts, strict=True)
        }


def packs_of(refs: Sequence[Ref], avals: Iterable[Aval], name: Ref, limit: int = SMALL) -> tuple[Pack, ...]:
    """One pack for each dtype of which at least two arrays are small; the vectors are numbered down from ``name``.

    Truth values along one axis, such as a mask of channels, go into the vector of the narrowest numbers, if they are small there:
    one kernel packs both. Not those of a matrix: a product may read what they select, and XLA for GPUs fails to compile a product
    into which it has fused their comparison with zero.

    XLA compiles a kernel for each place in a vector from which it reads an array of a shape, and only once for the same place of
    another vector. Many arrays are therefore divided among short vectors, those of a shape side by side.
    """
    groups: dict[DType, dict[Ref, Aval]] = {}
    for ref, aval in zip(refs, avals, strict=True):
        if 0 < count_bytes(aval) <= limit and not jnp.issubdtype(aval.dtype, jax.dtypes.extended):
            groups.setdefault(aval.dtype, {})[ref] = aval
    truths = groups.pop(np.dtype(bool), {})
    groups = {dtype: group for dtype, group in groups.items() if len(group) > 1}
    if groups:
        narrowest = min(groups, key=lambda dtype: dtype.itemsize)
        longest = {ref: max(aval.shape, default=1) for ref, aval in truths.items()}
        along_one = {ref: aval for ref, aval in truths.items() if math.prod(aval.shape) == longest[ref]}
        groups[narrowest] |= {ref: aval for ref, aval in along_one.items() if longest[ref] * narrowest.itemsize <= limit}
        truths = {ref: aval for ref, aval in truths.items() if ref not in groups[narrowest]}
    packs = [pack for group in (*groups.values(), truths) for pack in _short(group) if len(pack) > 1]
    shapes = [tuple(jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in pack.values()) for pack in packs]
    numbered = zip(itertools.count(name.index - 1, -1), packs, shapes)
    return tuple(Pack(name._replace(index=number), tuple(pack), avals) for number, pack, avals in numbered)


def _short(group: Mapping[Ref, Aval]) -> list[dict[Ref, Aval]]:
    """The arrays of a vector, as those of several if they are many."""
    if len(group) <= _MANY:
        return [dict(group)]
    alike = sorted(group.items(), key=lambda pair: (pair[1].dtype == bool, pair[1].shape))  # numbers first, as in one vector
    return [dict(alike[k : k + _FEW]) for k in range(0, len(alike), _FEW)]


def packed(program: Program, reads: Sequence[Pack] = (), writes: Sequence[Pack] = ()) -> Program:
    """The program with those of its arguments in ``reads``, and its results in ``writes``, as parts of vectors."""
    read_refs = {ref for pack in reads for ref in pack.members}
    written_refs = {ref for pack in writes for ref in pack.members}
    used = [pack for pack in reads if not set(pack.members).isdisjoint(program.inputs)]
    plain = [(ref, aval) for ref, aval in zip(program.inputs, program.avals, strict=True) if ref not in read_refs]
    inputs = (*(ref for ref, _ in plain), *(pack.ref for pack in used))
    outputs = [*(ref for ref in program.outputs if ref not in written_refs), *(pack.ref for pack in writes)]

    def function(*args: jax.Array) -> list[jax.Array]:
        values = dict(zip(inputs, args, strict=True))
        for pack in used:
            values |= pack.split(values[pack.ref])
        results = program.function(*(values[ref] for ref in program.inputs))
        values |= zip(program.outputs, results, strict=True)
        values |= {pack.ref: pack.join(values) for pack in writes}
        return [values[ref] for ref in outputs]

    avals = (*(aval for _, aval in plain), *(pack.aval for pack in used))
    return replace(program, function=function, inputs=inputs, outputs=tuple(outputs), avals=avals, makes=None)
