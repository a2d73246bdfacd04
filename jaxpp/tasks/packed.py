"""How a set of arrays travels: its small ones as a few vectors, its large ones as they are.

To begin a transfer costs host time, some 0.03 ms an array and direction however small it is: for the adapters of a task and their
moments more than the step computes. So the small arrays that share a home lie end to end in one vector, packed by a program on the
device before the way to the host, and taken apart by another when they are used.

Bits stay what they are, those of a NaN included: vectors are of unsigned integers, one for each width. (A backend may carry narrow
floats through float32, which changes signalling NaNs.) So an int32 step count lies beside float32 moments.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxpp.runtime.transfer import to_host
from jaxpp.stages.packing import Pack, packs_of
from jaxpp.stages.program import Ref, Role
from jaxpp.types import Array

__all__ = ["SMALL", "Crate", "Packed", "boxed", "shapes_of"]

SMALL = 1 << 16
"""Bytes up to which an array is packed. To pack is to copy once more: 42 arrays of 64 KiB came and went as fast either way on the
machine where this was measured, those of 4 KiB three times as fast in a vector."""


class _Bundle(NamedTuple):
    """The small leaves of one place."""

    place: Any
    packs: tuple[Pack, ...]
    members: tuple[int, ...]
    join: Callable[..., list[Array]]
    split: Callable[..., list[Array]]


class Crate:
    """A set of given shapes at given homes, and how it is packed; one for all sets of these.

    What travels is the vectors, then the arrays that are not packed.

    Args:
        shapes: shape and dtype of each leaf.
        homes: the device sharding of each.

    Attributes:
        shapes: as given.
        homes: as given.
        groups: the leaves in each array that travels; one alone is not packed.
        places: the device sharding of each of these.
    """

    def __init__(self, shapes: Sequence[jax.ShapeDtypeStruct], homes: Sequence[Any]):
        self.shapes, self.homes = tuple(shapes), tuple(homes)
        self._kin: dict[tuple[Any, ...], Crate] = {self.homes: self}
        by_place: dict[Any, list[int]] = {}
        for k, (aval, home) in enumerate(zip(self.shapes, self.homes, strict=True)):
            place = _place(home)
            if place is not None and _word(aval.dtype) is not None:
                by_place.setdefault(place, []).append(k)
        found = [self._bundle(place, members) for place, members in by_place.items()]
        self._bundles = [bundle for bundle in found if bundle.packs]
        packed = [tuple(ref.index for ref in pack.members) for pack in self._packs]
        inside = {k for group in packed for k in group}
        self._alone = [k for k in range(len(self.shapes)) if k not in inside]
        self.groups = (*packed, *((k,) for k in self._alone))
        vectors = [bundle.place for bundle in self._bundles for _ in bundle.packs]
        self.places = (*vectors, *(self.homes[k] for k in self._alone))

    @cached_property
    def _packs(self) -> list[Pack]:
        return [pack for bundle in self._bundles for pack in bundle.packs]

    def at(self, homes: Sequence[Any]) -> "Crate":
        """The crate of these shapes at other homes; the same for the same homes."""
        homes = tuple(homes)
        if homes == self.homes:
            return self
        if homes not in self._kin:
            self._kin[homes] = other = Crate(self.shapes, homes)
            other._kin = self._kin
        return self._kin[homes]

    def pack(self, leaves: Sequence[Array]) -> list[Array]:
        """What travels of device arrays that are at their homes; waits for nothing, and they may be given up at once."""
        vectors = [vector for bundle in self._bundles for vector in bundle.join(*(leaves[k] for k in bundle.members))]
        return [*vectors, *(leaves[k] for k in self._alone)]

    def unpack(self, arrays: Sequence[Array]) -> tuple[Array, ...]:
        """The leaves, each at its home with a buffer of its own, of device arrays that have travelled; waits for nothing."""
        leaves: list[Any] = [None] * len(self.shapes)
        at = 0
        for bundle in self._bundles:
            made = bundle.split(*arrays[at : at + len(bundle.packs)])
            at += len(bundle.packs)
            for k, leaf in zip(bundle.members, made, strict=True):
                leaves[k] = leaf
        for k, array in zip(self._alone, arrays[at:], strict=True):
            leaves[k] = array
        return tuple(leaves)

    def vectors(self, leaves: Sequence[Any]) -> list[np.ndarray]:
        """What ``pack`` makes of the small leaves, on the host."""
        return [np.concatenate([_words(leaves[ref.index], pack.dtype) for ref in pack.members]) for pack in self._packs]

    def alone(self, leaves: Sequence[Any]) -> list[Any]:
        """The leaves that are not packed."""
        return [leaves[k] for k in self._alone]

    def views(self, arrays: Sequence[Any]) -> tuple[Any, ...]:
        """The leaves of what lies on the host: views of the vectors as NumPy arrays that cannot be written to, and the others."""
        leaves: list[Any] = [None] * len(self.shapes)
        for pack, vector in zip(self._packs, arrays, strict=False):
            words = np.asarray(vector)
            for ref, (start, end) in zip(pack.members, pack.bounds, strict=True):
                aval = self.shapes[ref.index]
                leaves[ref.index] = words[start:end].view(aval.dtype).reshape(aval.shape)
        for k, array in zip(self._alone, arrays[len(self._packs) :], strict=True):
            leaves[k] = array
        return tuple(leaves)

    def _bundle(self, place: Any, members: Sequence[int]) -> _Bundle:
        """The programs that pack the small ones of these leaves and take them apart."""
        avals = [jax.ShapeDtypeStruct(self.shapes[k].shape, _word(self.shapes[k].dtype)) for k in members]
        packs = packs_of([Ref(Role.VALUE, k) for k in members], avals, Ref(Role.VALUE), SMALL)
        mine = tuple(ref.index for pack in packs for ref in pack.members)
        expected = [self.shapes[k] for k in mine]

        def join(*leaves: Any) -> list[Any]:
            assert [(x.shape, x.dtype) for x in leaves] == [(aval.shape, aval.dtype) for aval in expected]
            values = {Ref(Role.VALUE, k): _to_words(leaf) for k, leaf in zip(mine, leaves, strict=True)}
            return [pack.join(values) for pack in packs]

        def split(*vectors: Any) -> list[Any]:
            parts = [part for pack, vector in zip(packs, vectors, strict=True) for part in pack.split(vector).values()]
            return [_from_words(part, aval.dtype) for part, aval in zip(parts, expected, strict=True)]

        homes = [self.homes[k] for k in mine]
        return _Bundle(place, packs, mine, jax.jit(join, out_shardings=place), jax.jit(split, out_shardings=homes))


class Packed(NamedTuple):
    """A host copy of a set.

    Attributes:
        crate: how it is packed.
        arrays: what travelled.
    """

    crate: Crate
    arrays: tuple[Array, ...]

    @property
    def leaves(self) -> tuple[Any, ...]:
        """An array a leaf: for small leaves views of the vectors, as NumPy arrays that cannot be written to."""
        return self.crate.views(self.arrays)


def boxed(crate: Crate, leaves: Sequence[Any]) -> Packed:
    """The host copy of leaves that are on the host; waits until it is there."""
    vectors = crate.vectors(leaves)
    there = jax.block_until_ready(to_host(vectors, crate.places[: len(vectors)]))
    return Packed(crate, (*there, *crate.alone(leaves)))


def shapes_of(leaves: Sequence[Any]) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Shape and dtype of each array."""
    return tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves)


def _place(home: Any) -> Any:
    """The sharding of a vector of leaves that live here; none if they are divided over devices, or it is not known."""
    if isinstance(home, SingleDeviceSharding):
        return home
    if isinstance(home, NamedSharding) and home.is_fully_replicated:
        return NamedSharding(home.mesh, PartitionSpec(), memory_kind=home.memory_kind)
    return None


def _word(dtype: Any) -> Any:
    """The unsigned integer as wide as a dtype; none for keys, complex numbers and what is not whole bytes."""
    if dtype == jnp.bool_:
        return np.dtype("uint8")
    if jnp.issubdtype(dtype, jnp.floating):
        bits = jnp.finfo(dtype).bits
    elif jnp.issubdtype(dtype, jnp.integer):
        bits = jnp.iinfo(dtype).bits
    else:
        return None
    return np.dtype(f"uint{bits}") if bits >= 8 else None


def _to_words(leaf: Any) -> Any:
    return leaf.astype(jnp.uint8) if leaf.dtype == jnp.bool_ else jax.lax.bitcast_convert_type(leaf, _word(leaf.dtype))


def _from_words(words: Any, dtype: Any) -> Any:
    return words.astype(dtype) if dtype == jnp.bool_ else jax.lax.bitcast_convert_type(words, dtype)


def _words(leaf: Any, word: Any) -> np.ndarray:
    """A host array as a vector of unsigned integers."""
    return np.ravel(np.asarray(leaf)).view(word)
