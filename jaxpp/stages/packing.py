"""Many small arrays as one: what a program pays for each array it is given or gives costs more than a small array's work.

Biases, norm scales and their gradients, masks and statistics are often a few kilobytes each. Where a program would return many of
them at every microbatch, it returns one vector instead, and the reader takes it apart; the arithmetic is the same. Sets of
parameters that wait on the host travel as such vectors too, whose bits are kept as integers: ``jaxpp.tasks.host_store``.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import jax
import jax.numpy as jnp

from jaxpp.stages.cost import count_bytes
from jaxpp.stages.program import ACCUMULATED, Program, Ref
from jaxpp.types import Aval, DType

__all__ = ["SMALL", "Pack", "packed", "packs_of"]

SMALL = 1 << 12
"""Bytes up to which an array is packed."""


@dataclass(frozen=True)
class Pack:
    """A vector that holds several arrays of one dtype, end to end.

    Attributes:
        ref: the name of the vector.
        members: the names of the arrays in it.
        shapes: their shapes.
        dtype: their dtype.
    """

    ref: Ref
    members: tuple[Ref, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: DType

    @cached_property
    def bounds(self) -> tuple[tuple[int, int], ...]:
        """Where each array begins and ends."""
        ends = list(itertools.accumulate(map(math.prod, self.shapes)))
        return tuple(zip([0, *ends[:-1]], ends, strict=True))

    @property
    def aval(self) -> jax.ShapeDtypeStruct:
        """Shape and dtype of the vector."""
        return jax.ShapeDtypeStruct((self.bounds[-1][1],), self.dtype)

    def join(self, values: Mapping[Ref, jax.Array]) -> jax.Array:
        """The vector of the arrays."""
        return jnp.concatenate([jnp.ravel(values[ref]) for ref in self.members])

    def split(self, vector: jax.Array) -> dict[Ref, jax.Array]:
        """The arrays of the vector."""
        parts = zip(self.members, self.shapes, self.bounds, strict=True)
        return {ref: jax.lax.slice(vector, (start,), (end,)).reshape(shape) for ref, shape, (start, end) in parts}


def packs_of(refs: Sequence[Ref], avals: Iterable[Aval], name: Ref, limit: int = SMALL) -> tuple[Pack, ...]:
    """Group the small arrays by dtype.

    Returns:
        one pack a dtype that has at least two small arrays.
    """
    found: dict[DType, list[tuple[Ref, tuple[int, ...]]]] = {}
    for ref, aval in zip(refs, avals, strict=True):
        if 0 < count_bytes(aval) <= limit and not jnp.issubdtype(aval.dtype, jax.dtypes.extended):
            found.setdefault(aval.dtype, []).append((ref, aval.shape))
    groups = [(dtype, group) for dtype, group in found.items() if len(group) > 1]
    return tuple(
        Pack(replace(name, index=-1 - k), tuple(ref for ref, _ in group), tuple(shape for _, shape in group), dtype)
        for k, (dtype, group) in enumerate(groups)
    )


def packed(program: Program, reads: Sequence[Pack] = (), writes: Sequence[Pack] = ()) -> Program:
    """The same program, reading some of its arguments from packs and writing some of its results to packs.

    A pack keeps the members that the program does not write: as they were if it is also read, else zero.
    """
    taken = {ref for pack in reads for ref in pack.members}
    given = {ref for pack in writes for ref in pack.members}
    used = [pack for pack in reads if not set(pack.members).isdisjoint(program.inputs)]
    plain = [(ref, aval) for ref, aval in zip(program.inputs, program.avals, strict=True) if ref not in taken]
    inputs = (*(ref for ref, _ in plain), *(pack.ref for pack in used))
    outputs = [*(ref for ref in program.outputs if ref not in given), *(pack.ref for pack in writes)]
    outputs.sort(key=lambda ref: ref.role not in ACCUMULATED)  # each sum takes over its own old buffer, not a twin's

    def function(*args: jax.Array) -> list[jax.Array]:
        values = dict(zip(inputs, args, strict=True))
        for pack in used:
            values |= pack.split(values[pack.ref])
        for pack in writes:
            missing = {ref: jnp.zeros(shape, pack.dtype) for ref, shape in zip(pack.members, pack.shapes, strict=True)}
            values = missing | values
        results = program.function(*(values[ref] for ref in program.inputs))
        values |= zip(program.outputs, results, strict=True)
        values |= {pack.ref: pack.join(values) for pack in writes}
        return [values[ref] for ref in outputs]

    avals = (*(aval for _, aval in plain), *(pack.aval for pack in used))
    return replace(program, function=function, inputs=inputs, outputs=tuple(outputs), avals=avals)
