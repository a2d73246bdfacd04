"""Splitting a batch into microbatches, weighing them, and merging what they return.

The batch is split along axis 0 into ``num_microbatches`` parts whose sizes differ by at most one, the larger ones first. The
loss and the gradient of the step are the means over microbatches, weighted by size or by the user's ``weight(microbatch)``.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxpp.errors import BatchError
from jaxpp.stages.loss import describe
from jaxpp.types import Batch

__all__ = ["check_batch", "fold_key", "scale_dtype", "sizes", "slice_batch"]


def sizes(batch_size: int, num_microbatches: int) -> tuple[int, ...]:
    """Sizes of the microbatches.

    Example:
        >>> sizes(10, 4)
        (3, 3, 2, 2)
    """
    size, rest = divmod(batch_size, num_microbatches)
    return tuple(size + (i < rest) for i in range(num_microbatches))


def slice_batch(leaves: Sequence[Any], parts: Sequence[int]) -> list[list[Any]]:
    """The batch leaves of each microbatch: ``result[i][k]`` is microbatch i of leaf k."""
    ends = list(itertools.accumulate(parts))
    return [[leaf[end - part : end] for leaf in leaves] for part, end in zip(parts, ends, strict=True)]


def check_batch(batch: Batch, num_microbatches: int, num_replicas: int = 1) -> int:
    """The number of examples in a replica's part of a batch.

    Raises:
        BatchError: no leaves, leaves that are not arrays or have no leading axis, leading axes that differ, fewer examples
            than microbatches, or examples that cannot be divided evenly among the replicas.
    """
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    if not leaves:
        raise BatchError("batch", "a batch is a tree of arrays", "a tree without leaves", "pass the arrays of one batch")
    wrong = [
        f"batch{jax.tree_util.keystr(path)}: {describe(leaf) if hasattr(leaf, 'shape') else type(leaf).__name__}"
        for path, leaf in leaves
        if not getattr(leaf, "shape", ())
    ]
    if wrong:
        raise BatchError(
            "batch",
            "every batch leaf is an array whose first axis counts the examples",
            wrong,
            "give each leaf a leading batch axis, and close over constants in loss_fn",
        )
    lengths = {leaf.shape[0] for _, leaf in leaves}
    if len(lengths) > 1:
        raise BatchError(
            "batch",
            "all batch leaves have the same first axis, the number of examples",
            [f"batch{jax.tree_util.keystr(path)}: {describe(leaf)}" for path, leaf in leaves],
            "cut the leaves to one length",
        )
    (size,) = lengths
    if size % num_replicas:
        raise BatchError(
            f"batch, {num_replicas} replicas",
            "each replica gets as many examples as the others",
            f"{size} examples for {num_replicas} replicas",
            f"pass a batch of {max(size - size % num_replicas, num_replicas)} examples",
        )
    if num_replicas > 1 and size // num_replicas < num_microbatches:
        raise BatchError(
            f"batch, num_microbatches={num_microbatches}, {num_replicas} replicas",
            "each microbatch of each replica needs at least one example",
            f"{size} examples for {num_replicas} x {num_microbatches}",
            f"pass a batch of {num_replicas * num_microbatches} examples or more",
        )
    if size < num_microbatches:
        raise BatchError(
            f"batch, num_microbatches={num_microbatches}",
            "each microbatch needs at least one example",
            f"{size} examples for {num_microbatches} microbatches",
            f"pass a larger batch, or num_microbatches={max(size, 1)} or fewer",
        )
    return size // num_replicas


def fold_key(key: Any, implementation: str | None, microbatch: Any) -> Any:
    """The raw key of one microbatch: ``jax.random.fold_in(key, microbatch)``, on a raw key of the given implementation."""
    if implementation is None:
        return jax.random.fold_in(key, microbatch)
    return jax.random.key_data(jax.random.fold_in(jax.random.wrap_key_data(key, impl=implementation), microbatch))


def scale_dtype() -> Any:
    """The dtype of microbatch weights: float32, or float64 where enabled."""
    return jnp.zeros(0, float).dtype
