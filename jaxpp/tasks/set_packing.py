"""How a set of arrays travels: its small arrays as a few vectors, its large arrays as they are.

To begin a transfer costs host time, some 0.03 ms for each array and direction however small the array is: for the adapters of a
task and their moments that is more than the step computes. So the small arrays that share a home lie end to end in one vector. A
program on the device packs them before they go to the host, and another takes them apart when the set is used.

The vectors are those of ``jaxpp.stages.program``, which a program reads or writes in place of many small arrays. What is added
here is what travel needs: vectors per home, the same vectors on the host, and bits that stay what they are, those of a NaN
included. Therefore the vectors hold unsigned integers, one vector for each width: a backend may carry narrow floats through
float32, which changes signalling NaNs. An int32 step count lies beside float32 moments.
"""

from collections.abc import Callable, Sequence
from itertools import islice
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jaxpp.runtime.transfer import to_host
from jaxpp.stages.program import Pack, Ref, Role, packs_of
from jaxpp.types import Array, DType, Leaf

__all__ = ["LARGEST_PACKED", "HostCopy", "SetPacking"]

LARGEST_PACKED = 1 << 16
"""Bytes up to which an array is packed. To pack is to copy once more: 42 arrays of 64 KiB came and went as fast either way on the
machine where this was measured, arrays of 4 KiB three times as fast in a vector."""


class _Bundle(NamedTuple):
    """The small leaves of one home, and the programs that pack them and take them apart."""

    home: Sharding
    packs: tuple[Pack, ...]
    members: tuple[int, ...]
    join: Callable[..., list[Array]]
    split: Callable[..., list[Array]]


class SetPacking:
    """How all sets whose leaves have these shapes and device shardings (homes) are packed.

    The vectors travel first, then the arrays that are not packed.

    Attributes:
        shapes: as given.
        homes: as given.
        groups: the numbers of the leaves in each array that travels; a leaf alone in its group is not packed.
        places: the device sharding of each array that travels.
    """

    def __init__(self, shapes: Sequence[jax.ShapeDtypeStruct], homes: Sequence[Sharding]):
        self.shapes, self.homes = tuple(shapes), tuple(homes)
        self._siblings: dict[tuple[Sharding, ...], SetPacking] = {self.homes: self}
        by_home: dict[Sharding, list[int]] = {}
        for k, (aval, home) in enumerate(zip(self.shapes, self.homes, strict=True)):
            whole = _whole(home)
            if whole is not None and _word(aval.dtype) is not None:
                by_home.setdefault(whole, []).append(k)
        found = [self._bundle(home, members) for home, members in by_home.items()]
        self._bundles = [bundle for bundle in found if bundle.packs]
        self._packs = [pack for bundle in self._bundles for pack in bundle.packs]
        packed = {k for bundle in self._bundles for k in bundle.members}
        self._alone = [k for k in range(len(self.shapes)) if k not in packed]
        self.groups = (*(tuple(ref.index for ref in pack.members) for pack in self._packs), *((k,) for k in self._alone))
        vectors = [bundle.home for bundle in self._bundles for _ in bundle.packs]
        self.places = (*vectors, *(self.homes[k] for k in self._alone))

    def at(self, homes: Sequence[Sharding]) -> "SetPacking":
        """The packing of these shapes at other homes; the same object for the same homes."""
        homes = tuple(homes)
        if homes not in self._siblings:
            self._siblings[homes] = other = SetPacking(self.shapes, homes)
            other._siblings = self._siblings
        return self._siblings[homes]

    def pack(self, leaves: Sequence[Array]) -> tuple[Array, ...]:
        """The arrays that travel, made of device arrays at their homes; waits for nothing. The leaves may be donated at once."""
        vectors = [vector for bundle in self._bundles for vector in bundle.join(*(leaves[k] for k in bundle.members))]
        return (*vectors, *(leaves[k] for k in self._alone))

    def unpack(self, arrays: Sequence[Array]) -> tuple[Array, ...]:
        """The leaves of arrays that have travelled to the device, each at its home with a buffer of its own; waits for nothing."""
        found, rest = {}, iter(arrays)
        for bundle in self._bundles:
            found |= zip(bundle.members, bundle.split(*islice(rest, len(bundle.packs))), strict=True)
        found |= zip(self._alone, rest, strict=True)
        return tuple(found[k] for k in range(len(self.shapes)))

    def on_host(self, leaves: Sequence[Leaf], version: object = None) -> "HostCopy":
        """The host copy of leaves that are on the host; waits until it is there. Without a version, its values are new."""
        vectors = [
            np.concatenate([np.ravel(np.asarray(leaves[ref.index])).view(pack.dtype) for ref in pack.members])
            for pack in self._packs
        ]
        there = jax.block_until_ready(to_host(vectors, self.places[: len(vectors)]))
        return HostCopy(self, (*there, *(leaves[k] for k in self._alone)), object() if version is None else version)

    def views(self, arrays: Sequence[Array]) -> tuple[Leaf, ...]:
        """The leaves of arrays on the host: the small leaves as views of the vectors, which cannot be written to."""
        found: dict[int, Leaf] = dict(zip(self._alone, arrays[len(self._packs) :], strict=True))
        for pack, vector in zip(self._packs, arrays, strict=False):
            words = np.asarray(vector)
            for ref, (start, end) in zip(pack.members, pack.bounds, strict=True):
                aval = self.shapes[ref.index]
                found[ref.index] = words[start:end].view(aval.dtype).reshape(aval.shape)
        return tuple(found[k] for k in range(len(self.shapes)))

    def _bundle(self, home: Sharding, members: Sequence[int]) -> _Bundle:
        avals = [jax.ShapeDtypeStruct(self.shapes[k].shape, _word(self.shapes[k].dtype)) for k in members]
        packs = packs_of([Ref(Role.VALUE, k) for k in members], avals, Ref(Role.VALUE), LARGEST_PACKED)
        mine = tuple(ref.index for pack in packs for ref in pack.members)
        expected = [self.shapes[k] for k in mine]

        def join(*leaves: Array) -> list[Array]:
            assert [(x.shape, x.dtype) for x in leaves] == [(aval.shape, aval.dtype) for aval in expected]
            values = {Ref(Role.VALUE, k): _as_bits(leaf, _word(leaf.dtype)) for k, leaf in zip(mine, leaves, strict=True)}
            return [pack.join(values) for pack in packs]

        def split(*vectors: Array) -> list[Array]:
            parts = [part for pack, vector in zip(packs, vectors, strict=True) for part in pack.split(vector).values()]
            return [_as_bits(part, aval.dtype) for part, aval in zip(parts, expected, strict=True)]

        homes = [self.homes[k] for k in mine]
        return _Bundle(home, packs, mine, jax.jit(join, out_shardings=home), jax.jit(split, out_shardings=homes))


class HostCopy(NamedTuple):
    """A host copy of a set: how it is packed, and the arrays that travel, in pinned memory.

    Attributes:
        packing: as said.
        arrays: as said.
        version: an object that stands for the values: copies of one version, packed in whatever way, have the same values.
    """

    packing: SetPacking
    arrays: tuple[Array, ...]
    version: object

    @property
    def nbytes(self) -> int:
        """Bytes of the set."""
        return sum(array.nbytes for array in self.arrays)

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """An array for each leaf; the small leaves are views of the vectors, NumPy arrays that cannot be written to."""
        return self.packing.views(self.arrays)


def _whole(home: Sharding) -> Sharding | None:
    """The sharding of a vector of leaves that live here; None if they are divided over devices, or that is not known."""
    if isinstance(home, SingleDeviceSharding):
        return home
    if isinstance(home, NamedSharding) and home.is_fully_replicated:
        return NamedSharding(home.mesh, PartitionSpec(), memory_kind=home.memory_kind)
    return None


def _word(dtype: DType) -> DType:
    """The unsigned integer as wide as a dtype; None for keys, complex numbers and what is not whole bytes."""
    if dtype == jnp.bool_:
        return np.dtype("uint8")
    if jnp.issubdtype(dtype, jnp.floating):
        bits = jnp.finfo(dtype).bits
    elif jnp.issubdtype(dtype, jnp.integer):
        bits = jnp.iinfo(dtype).bits
    else:
        return None
    return np.dtype(f"uint{bits}") if bits >= 8 else None


def _as_bits(array: Array, dtype: DType) -> Array:
    """The bits of an array as another dtype of the same width; a boolean is a byte."""
    convert = jax.lax.convert_element_type if np.dtype(bool) in (array.dtype, dtype) else jax.lax.bitcast_convert_type
    return convert(array, dtype)
