"""Parameter leaves whose types have no gradient (integers, booleans, PRNG keys): how optimizers and callers of gradients see them.

A quantised base has such leaves. They are frozen: ``jax.value_and_grad(..., allow_int=True)`` gives a ``float0`` for each, and no
optimizer can do anything with that. So an optimizer is given the floating leaves alone, with ``optax.MaskedNode`` in place of the
others, as ``optax.masked`` would give them: plain ``optax.adamw`` makes no moments for them, and masks and labels fit as they are.
"""

from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpp.types import Aval, Leaf, Params, Tree


def has_gradient(leaf: Aval) -> bool:
    """Whether a leaf of this type has a gradient: whether it is of a floating or complex type."""
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def is_quantised(leaf: Aval) -> bool:
    """Whether what is computed of a leaf of this type alone is larger, as a rule: integers, and floating numbers of a byte."""
    return leaf.dtype.itemsize == 1 or not has_gradient(leaf)


def frozen_by_type(params: Params) -> frozenset[int]:
    """The leaves without a gradient."""
    return frozenset(k for k, leaf in enumerate(jax.tree.leaves(params)) if not has_gradient(leaf))


def floating(params: Params) -> Params:
    """The tree of the leaves that have a gradient, with ``optax.MaskedNode`` in place of the others."""
    return jax.tree.map(lambda leaf: leaf if has_gradient(leaf) else optax.MaskedNode(), params)


def masked_like(tree: Tree, params: Params) -> Tree:
    """Another tree like ``params``, such as gradients, without what stands for those of leaves that have none."""
    return jax.tree.map(lambda leaf, other: other if has_gradient(leaf) else optax.MaskedNode(), params, tree)


def with_others(new: Params, params: Params) -> Params:
    """New values of the leaves that have a gradient, and the other leaves of ``params`` as they are."""
    return jax.tree.map(lambda leaf, other: other if has_gradient(leaf) else leaf, params, new)


def float0(leaf: Aval) -> np.ndarray:
    """What JAX gives as the gradient of a leaf that has none: zeros of ``float0``, which take no bytes."""
    return np.zeros(leaf.shape, jax.dtypes.float0)


def masked(_: Aval) -> optax.MaskedNode:
    """What optax has in place of a leaf that it does not see."""
    return optax.MaskedNode()


def filled(grads: Iterable[Leaf], shapes: Iterable[Aval], instead: Callable[[Aval], Leaf]) -> list[Leaf]:
    """Gradients of the leaves of these shapes that have one, among what stands for the others."""
    supply = iter(grads)
    return [next(supply) if has_gradient(shape) else instead(shape) for shape in shapes]
