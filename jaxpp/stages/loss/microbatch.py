"""Splitting a batch into microbatches, weighing them, and merging what they return.

The batch is split along axis 0 into ``num_microbatches`` parts whose sizes differ by at most one, larger ones first. Every
microbatch gets all of numbers and *shared* leaves. An evaluation takes any number of examples: fewer than microbatches make fewer
microbatches, and a remainder that the replicas cannot share makes a last one of one example each; idle replicas repeat one.
``Microbatches`` are a batch that its user has split.
"""

import dataclasses
import difflib
import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.tree_util import GetAttrKey, SequenceKey
from jax.typing import ArrayLike
from jaxtyping import Int, UInt32

from jaxpp.errors import BatchError
from jaxpp.stages.jaxpr import describe
from jaxpp.stages.loss.traced_loss import fits_pattern, path_name, unfit, wrong_leaves
from jaxpp.types import Aval, Batch, DType, Leaf, Tree

_SHOWN = 8
_NUMBER = (bool, int, float, complex)


def sizes(batch_size: int, num_microbatches: int) -> tuple[int, ...]:
    """Sizes of the microbatches: ``sizes(10, 4)`` is ``(3, 3, 2, 2)``."""
    size, rest = divmod(batch_size, num_microbatches)
    return tuple(size + (i < rest) for i in range(num_microbatches))


@jax.tree_util.register_pytree_with_keys_class
class Microbatches:
    """Microbatches of your own, in place of a batch: ``pipe.step(state, jaxpp.Microbatches([...]), key)``.

    Nothing is split, padded or put together: microbatch i of the step is item i, of whatever shape it has, and the schedule of the
    pipeline is that of so many microbatches, whatever ``num_microbatches`` says. Each stage is compiled once for each shape, so
    sequences of any length are best put into a few lengths ("buckets"). Of several replicas, each gets its part of the rows of
    every microbatch.

    The loss of the step is the mean of the microbatches' losses by their weights, and with ``reduction="sum"`` their sum.

    Args:
        batches: trees of arrays or numbers, all of one structure, the first axis of each array the examples of that microbatch. An
            iterator is read to its end, and may fill the NumPy arrays of an item again for the next: each item is copied. With
            ``weights``, the arrays of a microbatch may have several numbers of rows, as the nodes and edges of padded graphs have,
            since nothing is split.
        weights: how much each microbatch counts, float[microbatches], such as the numbers of their tokens; they take the place of
            the pipeline's ``weight``. Default: what ``weight`` says, or the numbers of their examples.

    Raises:
        BatchError: no microbatches, trees of different structures, or weights that have no mean; of weights in an array on a
            device, for which nothing waits, the first step of their shapes tells.

    Example:
        >>> import jax.numpy as jnp, jaxpp
        >>> lengths = (8, 8, 4)
        >>> jaxpp.Microbatches([{"tokens": jnp.zeros((2, n), int)} for n in lengths], weights=lengths)
        Microbatches(3: 2 of ['tokens'] i32[2,8], 1 of ['tokens'] i32[2,4])
    """

    batches: tuple[Batch, ...]
    weights: ArrayLike | Aval | None

    def __init__(self, batches: Iterable[Batch], weights: ArrayLike | Aval | Sequence[int | float] | None = None):
        where, rule = "Microbatches(batches)", "microbatches are a list of trees of arrays, one tree each"
        if isinstance(batches, (Array, np.ndarray, Mapping, str, Microbatches)) or not isinstance(batches, Iterable):
            got = f"an array of {len(batches)}" if isinstance(batches, (Array, np.ndarray)) else type(batches).__name__
            raise BatchError(where, rule, got, "pass jaxpp.Microbatches([first, second, ...])")
        whole = isinstance(batches, (list, tuple))  # an iterator may fill the arrays of an item again for the next
        copied = None if whole else lambda leaf: leaf.copy() if isinstance(leaf, np.ndarray) else leaf
        self.batches = tuple(batch if copied is None else jax.tree.map(copied, batch) for batch in batches)
        if not self.batches:
            raise BatchError(where, rule, "none", "leave out a step without microbatches")
        first = jax.tree.structure(self.batches[0])
        for k, batch in enumerate(self.batches):
            if (found := jax.tree.structure(batch)) != first:
                got = [f"microbatch 0: {first}", f"microbatch {k}: {found}"]
                raise BatchError(where, "all microbatches are trees of one structure", got, "give each the same items")
        self.weights = None if weights is None else self._checked(weights)

    def _checked(self, weights: ArrayLike | Aval | Sequence[int | float]) -> ArrayLike | Aval:
        where, rule = "Microbatches(weights=...)", "the weights are a number for each microbatch"
        if isinstance(weights, (Array, np.ma.MaskedArray)) and (why := unfit(weights)) is not None:
            raise BatchError(where, rule, why.what, why.fix)
        try:
            given = weights if isinstance(weights, (Array, jax.ShapeDtypeStruct)) else np.asarray(weights, scale_dtype())
        except (TypeError, ValueError):
            raise BatchError(where, rule, repr(weights), "pass a list of as many numbers") from None
        if given.shape != (len(self),) or jnp.issubdtype(given.dtype, jnp.complexfloating):
            raise BatchError(where, rule, f"{describe(given)} for {len(self)} microbatches", "pass a list of as many numbers")
        values = given.tolist() if isinstance(given, np.ndarray) else []
        if values and not (all(map(math.isfinite, values)) and sum(values) != 0):
            rule = "the loss is a mean over microbatches, so their weights are finite numbers that do not add up to 0"
            got = [f"microbatch {k}: {value:g}" for k, value in enumerate(values)]
            raise BatchError(where, rule, got, "pass how much of each counts, such as the number of its tokens")
        return given

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.batches)

    def __getitem__(self, number: int) -> Batch:
        return self.batches[number]

    def __repr__(self) -> str:
        def of(batch: Batch) -> str:
            leaves = jax.tree_util.tree_leaves_with_path(batch)
            shown = (describe(leaf) if hasattr(leaf, "dtype") else repr(leaf) for _, leaf in leaves)
            return ", ".join(f"{jax.tree_util.keystr(path)} {what}".strip() for (path, _), what in zip(leaves, shown, strict=True))

        counts = Counter(map(of, self.batches))
        return f"Microbatches({len(self)}: {', '.join(f'{count} of {what}' for what, count in counts.items())})"

    def tree_flatten_with_keys(self) -> tuple[list[tuple[object, Tree]], None]:
        """For JAX: the microbatches, in their order, and the weights."""
        return [*((SequenceKey(k), batch) for k, batch in enumerate(self.batches)), (GetAttrKey("weights"), self.weights)], None

    @classmethod
    def tree_unflatten(cls, _: None, children: Sequence[Tree]) -> "Microbatches":
        """For JAX: of what it was flattened to, whatever stands in the place of arrays."""
        self = object.__new__(cls)
        *batches, self.weights = children
        self.batches = tuple(batches)
        return self


def first_of(batch: Batch) -> Batch:
    """The first of microbatches; a batch that is still to be split, as it is."""
    return batch[0] if isinstance(batch, Microbatches) else batch


class Split(NamedTuple):
    """How the examples of a batch are divided."""

    sizes: tuple[int, ...]  # examples of each microbatch of a replica, the same for all replicas
    num_idle: int = 0  # replicas, the last ones, whose last microbatch is a copy of another's example, and counts nothing

    def num_examples(self, num_replicas: int) -> int:
        """How many examples count."""
        return num_replicas * sum(self.sizes) - self.num_idle * self.sizes[-1]


def split_any(num_examples: int, num_microbatches: int, num_replicas: int = 1) -> Split:
    """How any number of examples is divided, at least one.

    Example:
        >>> split_any(11, 3, num_replicas=4)
        Split(sizes=(1, 1, 1), num_idle=1)
    """
    whole, rest = divmod(num_examples, num_replicas)
    if not rest:
        return Split(sizes(whole, min(whole, num_microbatches)))
    full = sizes(whole, min(whole, max(num_microbatches - 1, 1))) if whole else ()
    return Split((*full, 1), num_replicas - rest)


def slice_batch(leaves: Sequence[Leaf], parts: Sequence[int], shared: Collection[int] = ()) -> list[list[Leaf]]:
    """The batch leaves of each microbatch: ``result[i][k]`` is microbatch i of leaf k, those of ``shared`` whole."""
    ends = zip(parts, itertools.accumulate(parts), strict=True)
    return [[leaf if k in shared else leaf[end - part : end] for k, leaf in enumerate(leaves)] for part, end in ends]


def batch_avals(batch: Batch) -> Batch:
    """The tree of shapes and dtypes of a batch, as a traced loss sees them: a Python number takes the type of what it meets."""
    return jax.tree.map(_aval, batch)


def _aval(leaf: Leaf) -> jax.ShapeDtypeStruct:
    if not hasattr(leaf, "dtype"):
        return jax.ShapeDtypeStruct((), jax.dtypes.result_type(leaf), weak_type=not isinstance(leaf, bool))
    extended = jnp.issubdtype(leaf.dtype, jax.dtypes.extended)
    dtype = leaf.dtype if extended else jax.dtypes.canonicalize_dtype(leaf.dtype)
    return jax.ShapeDtypeStruct(leaf.shape, dtype, weak_type=bool(getattr(leaf, "weak_type", False)))


def resized(avals: Batch, size: int, shared: Collection[int] = ()) -> Batch:
    """The shapes of a batch of so many examples; the leaves numbered ``shared`` keep theirs, and so do all of a ragged batch."""
    leaves, tree = jax.tree.flatten(avals)
    if is_ragged(leaves, shared):
        return avals
    return tree.unflatten(leaf if k in shared else leaf.update(shape=(size, *leaf.shape[1:])) for k, leaf in enumerate(leaves))


def shared_leaves(batch: Batch, names: Sequence[str] = ()) -> frozenset[int]:
    """The numbers of the leaves that every microbatch gets as they are: numbers, and those of a path or pattern of paths."""
    leaves = enumerate(jax.tree_util.tree_leaves_with_path(batch))
    return frozenset(
        k for k, (path, leaf) in leaves if not getattr(leaf, "shape", ()) or any(fits_pattern(path_name(path), n) for n in names)
    )


def num_examples(leaves: Sequence[Leaf], shared: Collection[int]) -> int:
    """The length of the first axis of the leaves that are split."""
    return next(leaf.shape[0] for k, leaf in enumerate(leaves) if k not in shared)


def is_ragged(leaves: Sequence[Leaf], shared: Collection[int]) -> bool:
    """Whether the leaves have different numbers of rows, as those of a batch of graphs have."""
    return len({leaf.shape[0] for k, leaf in enumerate(leaves) if k not in shared}) > 1


def check_shared(batch: Batch, names: Sequence[str]) -> None:
    """Refuse names of shared leaves that the batch does not have."""
    known = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(batch)]
    unknown = [name for name in names if not any(fits_pattern(path, name) for path in known)]
    if unknown:
        near = [f"{name!r}; near it: {', '.join(difflib.get_close_matches(name, known)) or 'none'}" for name in unknown]
        listed = "\n".join(known[:_SHOWN] + ["..."] * (len(known) > _SHOWN))
        where, rule = f"broadcast={tuple(names)!r}", "a name is the path of a batch leaf, or a pattern of paths"
        raise BatchError(where, rule, near, "use paths like these", listed)


def check_batch(
    batch: Batch,
    num_microbatches: int,
    num_replicas: int = 1,
    shared: Sequence[str] = (),
    called: str = "batch",
    *,
    ragged: bool = False,
) -> int:
    """The number of examples in a replica's part of a batch, of arrays or shapes; the leaves named ``shared`` are not split.

    A ``ragged`` batch may have leaves of several lengths, as a batch of graphs has; it is one example then.
    """
    if isinstance(batch, Microbatches):
        rule, fix = "pipelines are compared on a batch that each of them can split", "pass a batch of the usual length"
        raise BatchError(called, rule, repr(batch), fix)
    size = _check_leaves(batch, shared, called, ragged=ragged)
    counted, per_replica = f"{size} example{'s' * (size != 1)}", f", {num_replicas} replicas"
    where = f"{called}, num_microbatches={num_microbatches}"
    if size % num_replicas:
        rule, fix = "each replica gets as many examples as the others", max(size - size % num_replicas, num_replicas)
        got = f"{counted} for {num_replicas} replicas"
        raise BatchError(f"{called}{per_replica}", rule, got, f"pass a batch of {fix} examples")
    if num_replicas > 1 and size // num_replicas < num_microbatches:
        rule = "each microbatch of each replica needs at least one example"
        fix = f"pass a batch of {num_replicas * num_microbatches} examples or more"
        raise BatchError(where + per_replica, rule, f"{counted} for {num_replicas} x {num_microbatches}", fix)
    if size < num_microbatches:
        rule, fix = "each microbatch needs at least one example", f"num_microbatches={max(size, 1)} or fewer"
        fix = f"pass a larger batch, or {fix}; where an epoch ends with a smaller batch, leave that out"
        raise BatchError(where, rule, f"{counted} for {num_microbatches} microbatches", fix)
    return size // num_replicas


def _check_leaves(batch: Batch, names: Sequence[str], called: str, *, ragged: bool) -> int:
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    if not leaves:
        raise BatchError(called, "a batch is a tree of arrays", "a tree without leaves", "pass the arrays of one batch")
    if wrong := wrong_leaves(called, leaves, _what_instead([leaf for _, leaf in leaves]), numbers=True):
        rule = "every batch leaf is an array whose first axis counts the examples, or a number for all of them"
        raise BatchError(called, rule, wrong.lines, wrong.fix)
    lists = [
        f"{called}{jax.tree_util.keystr(path)}: a list of {_items(node)}"
        for path, node in jax.tree_util.tree_leaves_with_path(batch, is_leaf=_is_list)
        if _is_list(node)
    ]
    if lists:
        rule = "a batch is a tree of arrays, and to JAX a list is no array but a tree with one leaf an item"
        raise BatchError(called, rule, lists, "make arrays of the lists, nested ones included, with np.asarray")
    shared = shared_leaves(batch, names)
    described = [
        f"{called}{jax.tree_util.keystr(path)}: {describe(leaf) if hasattr(leaf, 'dtype') else f'the number {leaf!r}'}"
        + " (broadcast)" * (k in shared and bool(getattr(leaf, "shape", ())))
        for k, (path, leaf) in enumerate(leaves)
    ]
    if len(shared) == len(leaves):
        rule = "at least one batch leaf is an array whose first axis counts the examples"
        fix = [*listed_examples(batch), "pass arrays, and leave the leaf with the examples out of broadcast=(...)"]
        raise BatchError(called, rule, described, "; or ".join(fix))
    lengths = {leaf.shape[0] for k, (_, leaf) in enumerate(leaves) if k not in shared}
    if len(lengths) > 1 and ragged:
        return 1
    if len(lengths) > 1:
        fix = (
            "give every leaf one row for each example; if examples differ in size (graphs), pad each to one size, stack them "
            "along a new first axis and jax.vmap the function over it; name what is the same for all examples: "
            'broadcast=("beta", "graph/*"); or pass jaxpp.Microbatches(batches, weights=...), of which none is split'
        )
        rule, fixes = "all batch leaves have the same first axis, the number of examples", [*listed_examples(batch), fix]
        raise BatchError(called, rule, described, "; or ".join(fixes))
    if lengths == {0}:
        raise BatchError(called, "a batch has at least one example", "0 examples", "leave the empty batch out")
    return lengths.pop()


def listed_examples(batch: Batch) -> list[str]:
    """What to do with a batch that may be a list of examples, ``[(x, y), (x, y), ...]``, as a data set gives them.

    Example:
        >>> print(*listed_examples([(np.ones(4), 1), (np.ones(4), 0)]))
        if each of the 2 items of the list is an example, stack them: jax.tree.map(lambda *rows: np.stack(rows), *batch)
    """
    items = batch if isinstance(batch, list) else []
    if len(items) < 2 or jax.tree_util.all_leaves(items) or len({jax.tree.structure(item) for item in items}) > 1:
        return []
    stacked = "jax.tree.map(lambda *rows: np.stack(rows), *batch)"
    return [f"if each of the {len(items)} items of the list is an example, stack them: {stacked}"]


def inputs_in(batch: Batch) -> str:
    """Where in a batch the inputs of a model may be.

    Example:
        >>> inputs_in({"x": np.ones(4), "y": np.ones(4)}), inputs_in((np.ones(4), np.ones(4))), inputs_in(np.ones(4))
        ('batch["x"]', 'batch[0]', 'batch')
    """
    if isinstance(batch, Mapping) and batch:
        first = next(iter(batch))
        return f'batch["{first}"]' if isinstance(first, str) else f"batch[{first!r}]"
    return "batch[0]" if isinstance(batch, (tuple, list)) else "batch"


def _what_instead(leaves: Sequence[Leaf]) -> str:
    """What to pass in place of leaves that are no arrays."""
    fixes = []
    for leaf in leaves:
        if hasattr(leaf, "__array__") and not isinstance(leaf, (np.ndarray, jax.Array)) and unfit(leaf):  # of PyTorch, of pandas
            fixes.append("make NumPy arrays of them with np.asarray")
        elif isinstance(leaf, Iterable) and not isinstance(leaf, (str, bytes)) and not hasattr(leaf, "shape"):
            fixes.append("pass one batch at a time: for batch in loader: state, metrics = pipe.step(state, batch)")
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            name = type(leaf).__name__
            fixes.append(f"say to JAX that {name} is a tree, jax.tree_util.register_dataclass({name}), or pass vars(batch), a dict")
    return "; ".join(dict.fromkeys(fixes)) or "leave out what is neither, or let the function close over it"


def _is_list(node: object) -> bool:
    """Whether it is a list of numbers, or of lists of numbers, and so on."""
    return isinstance(node, list) and bool(node) and all(isinstance(item, _NUMBER) or _is_list(item) for item in node)


def _items(node: list[Tree]) -> str:
    """What a list has in it: ``8 lists of 4 numbers``; of lists that differ only how many there are."""
    inner = {_items(item) if isinstance(item, list) else "" for item in node}
    plural = "s" * (len(node) != 1)
    if inner == {""}:
        return f"{len(node)} number{plural}"
    if "" in inner:
        return f"{len(node)} numbers and lists"
    return f"{len(node)} list{plural} of {inner.pop() if len(inner) == 1 else 'numbers, of several lengths'}"


_BATCHED = frozenset({"threefry2x32", "rbg"})  # Kinds of keys whose ``fold_in`` gives the same bits under ``jax.vmap``


def fold_keys(
    key: UInt32[Array, " words"], implementation: str | None, first: Int[Array, ""] | int, count: int
) -> list[UInt32[Array, " words"]]:
    """The raw keys of ``count`` microbatches from ``first`` on, each ``jax.random.fold_in(key, microbatch)``, by one operation."""

    def fold(microbatch: Int[Array, ""]) -> UInt32[Array, " words"]:
        if implementation is None:
            return jax.random.fold_in(key, microbatch)
        return jax.random.key_data(jax.random.fold_in(jax.random.wrap_key_data(key, impl=implementation), microbatch))

    same = (implementation or str(jax.random.key_impl(jax.random.key(0)))) in _BATCHED
    numbers = first + jnp.arange(count)
    folded = jax.vmap(fold)(numbers) if same else jax.lax.map(fold, numbers)
    return [folded[i] for i in range(count)]


def raw_key(leaf: Leaf) -> Leaf:
    """A key as the array of integers that programs take; any other leaf as it is."""
    is_key = jnp.issubdtype(getattr(leaf, "dtype", np.bool_), jax.dtypes.prng_key)  # steps ask, so nothing slower is called
    return jax.random.key_data(leaf) if is_key else leaf


def scale_dtype() -> DType:
    """The dtype of microbatch weights: float32, or float64 where enabled."""
    return jnp.zeros(0, float).dtype
