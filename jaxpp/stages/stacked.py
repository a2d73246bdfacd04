"""Parameters stacked over layers, held as slices.

Where a loop over ``[layers, ...]`` is cut, each stage owns the rows of its layers. Inside jaxpp such a leaf is a ``Slices`` node
with one leaf for each run of rows that a stage owns; the user's tree has the whole array. The layers may lie along another axis,
``[width, layers]``; *rows* are then what lies along that axis.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxpp.errors import StateError
from jaxpp.types import Leaf, Params, Tree


@jax.tree_util.register_pytree_with_keys_class
class Slices:
    """A stacked leaf as slices along one of its axes, in order; a node of the tree."""

    def __init__(self, parts: Sequence[Leaf], sizes: Sequence[int], axis: int = 0):
        self.parts, self.sizes, self.axis = tuple(parts), tuple(sizes), axis

    def tree_flatten_with_keys(self) -> tuple[list[tuple[object, Leaf]], tuple[tuple[int, ...], int]]:
        """The parts, each under the rows that it holds: ``0:3``."""
        keys = [jax.tree_util.DictKey(f"{a}:{b}") for a, b in rows(self.sizes)]
        return list(zip(keys, self.parts, strict=True)), self.division

    @classmethod
    def tree_unflatten(cls, division: tuple[Sequence[int], int], parts: Sequence[Leaf]) -> "Slices":
        """The node of these parts."""
        return cls(parts, *division)

    @property
    def division(self) -> tuple[tuple[int, ...], int]:
        """How the leaf is divided: the size of each slice, and the axis."""
        return self.sizes, self.axis

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole leaf."""
        return with_rows(self.parts[0].shape, self.axis, sum(self.sizes))

    def of(self, whole: Leaf) -> list[Leaf]:
        """A whole leaf, an array or a traced one, divided as this one is."""
        return [whole[self.index(a, b)] for a, b in rows(self.sizes)]

    def index(self, begin: int, end: int) -> tuple[slice, ...]:
        """Where these rows are in the whole leaf."""
        return (*[slice(None)] * self.axis, slice(begin, end))

    def shapes_of(self, whole: Leaf) -> list[jax.ShapeDtypeStruct]:
        """The shape of each slice of a whole leaf of a shape."""
        return [jax.ShapeDtypeStruct(with_rows(whole.shape, self.axis, size), whole.dtype) for size in self.sizes]


def with_rows(shape: Sequence[int], axis: int, count: int) -> tuple[int, ...]:
    """A shape with so many rows along an axis."""
    return (*shape[:axis], count, *shape[axis + 1 :])


def rows(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Where each slice begins and ends."""
    ends = list(itertools.accumulate(sizes))
    return list(zip([0, *ends[:-1]], ends, strict=True))


def joined(tree: Tree, join: Callable[[Slices], Leaf]) -> Tree:
    """The tree with every ``Slices`` node replaced by what ``join`` makes of it; one without arrays (masked) by its first part."""

    def joined_leaf(leaf: Leaf) -> Leaf:
        if not isinstance(leaf, Slices):
            return leaf
        return join(leaf) if jax.tree.leaves(leaf.parts) else leaf.parts[0]

    return jax.tree.map(joined_leaf, tree, is_leaf=is_slices)


def assembled(tree: Tree, join: Callable[[Slices], Leaf] | None = None) -> Tree:
    """The user's tree, with whole arrays, by ``join`` or on the host, where slices of other processes stay as they are."""
    if not any(map(is_slices, jax.tree.leaves(tree, is_leaf=is_slices))):
        return tree
    return joined(tree, join or _on_host)


def check_there(node: Slices) -> None:
    """Refuse slices that a step has consumed."""
    if gone := sum(getattr(part, "is_deleted", bool)() for part in node.parts):
        rule = "step reuses the buffers of the state it is given, so that state cannot be used again"
        got = f"a leaf held as slices, {gone} of {len(node.parts)} of which a later step has consumed"
        fix = "go on with pipe.state, the newest, and save that; or call step(..., donate=False) to keep the old state"
        raise StateError("state", rule, got, fix)


def _on_host(node: Slices) -> Leaf:
    check_there(node)
    if not all(part.is_fully_addressable for part in node.parts if isinstance(part, jax.Array)):
        return node
    return put_together(node.shape, zip([node.index(a, b) for a, b in rows(node.sizes)], node.parts, strict=True))


def on_host(leaf: Leaf) -> Leaf:
    """An array on the host; typed PRNG keys, which NumPy does not know, on JAX's default device."""
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return put_together(leaf.shape, [((), leaf)]) if is_key else np.asarray(jax.device_get(leaf))


def put_together(shape: Sequence[int], parts: Iterable[tuple[tuple[slice, ...], Leaf]]) -> Leaf:
    """An array on the host, as ``on_host`` has it, of parts at these indices."""
    parts = list(parts)
    first = parts[0][1]
    if jnp.issubdtype(first.dtype, jax.dtypes.prng_key):
        numbers = [(index, jax.random.key_data(part)) for index, part in parts]
        words = numbers[0][1].shape[first.ndim :]
        return jax.random.wrap_key_data(jnp.asarray(put_together((*shape, *words), numbers)), impl=jax.random.key_impl(first))
    whole = np.empty(shape, first.dtype)
    for index, part in parts:
        whole[index] = jax.device_get(part)
    return whole


def whole_shape(node: Leaf) -> Leaf:
    """The shape of the whole leaf for a leaf held as slices; any other leaf itself."""
    if not isinstance(node, Slices):
        return node
    return jax.ShapeDtypeStruct(node.shape, node.parts[0].dtype)


def is_slices(node: object) -> bool:
    """Whether a node of a tree is a leaf held as slices."""
    return isinstance(node, Slices)


class Slicing(NamedTuple):
    """Which leaves of the parameters are held as slices."""

    sizes: tuple[tuple[int, ...], ...] = ()  # for each leaf of the user's tree the rows of each slice; empty: not sliced
    axes: tuple[int, ...] = ()  # for each leaf the axis along which its rows lie; empty: the first of all

    @property
    def any(self) -> bool:
        """Whether any leaf is."""
        return any(self.sizes)

    def leaves(self, leaves: Iterable[int]) -> list[int]:
        """The numbers of leaves of the user's tree as those of the sliced one."""
        if not self.any:
            return list(leaves)
        counts = [max(1, len(sizes)) for sizes in self.sizes]
        firsts = list(itertools.accumulate(counts, initial=0))
        return [firsts[leaf] + k for leaf in leaves for k in range(counts[leaf])]

    def of(self, params: Params) -> Params:
        """The parameters with these leaves sliced: arrays, traced ones, or shapes; leaves that are slices already stay."""
        if not self.any:
            return params
        leaves, tree = jax.tree.flatten(params, is_leaf=is_slices)
        divisions = zip(leaves, self.sizes, self.axes or [0] * len(self.sizes), strict=True)
        return tree.unflatten(
            _sliced(leaf, sizes, axis) if sizes and not is_slices(leaf) else leaf for leaf, sizes, axis in divisions
        )

    def first(self, count: int) -> "Slicing":
        """That of the first leaves alone."""
        return Slicing(self.sizes[:count], self.axes[:count])


def slicing_of(*divisions: Sequence[tuple[int, ...]], axes: Sequence[int] = ()) -> Slicing:
    """The leaves sliced wherever one of the divisions slices them: the sizes of each leaf's slices, empty for a whole leaf."""
    ends = [sorted({end for sizes in of_leaf for end in itertools.accumulate(sizes)}) for of_leaf in zip(*divisions, strict=True)]
    return Slicing(tuple(tuple(b - a for a, b in itertools.pairwise([0, *of_leaf])) for of_leaf in ends), tuple(axes))


def _sliced(leaf: Leaf, sizes: Sequence[int], axis: int) -> Slices:
    node = Slices((), sizes, axis)
    if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and len(leaf.devices()) > 1:
        leaf = on_host(leaf)  # sharded in some way of the user's
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return Slices(node.shapes_of(leaf), sizes, axis)
    return Slices(node.of(leaf), sizes, axis)


def split_like(leaves: Sequence[Leaf], tree: Tree) -> list[Leaf]:
    """Whole leaves divided as those of a tree, some of which are held as slices."""
    parts: list[Leaf] = []
    for leaf, node in zip(leaves, jax.tree.leaves(tree, is_leaf=is_slices), strict=True):
        divided = isinstance(node, Slices)
        parts += [jax.lax.slice_in_dim(leaf, a, b, axis=node.axis) for a, b in rows(node.sizes)] if divided else [leaf]
    return parts


def first_rows(node: object) -> list[tuple[int, int]]:
    """The first row of each slice of a leaf, and along which axis the rows lie; twice 0 for a leaf that is not held as slices."""
    return [(start, node.axis) for start, _ in rows(node.sizes)] if isinstance(node, Slices) else [(0, 0)]


def concatenated(node: Slices) -> jax.Array:
    """The whole leaf, in a traced function."""
    return jax.lax.concatenate(node.parts, node.axis)
