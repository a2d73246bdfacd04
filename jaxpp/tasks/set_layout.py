"""What a parameter set looks like: the structure of its trees, and the shapes of its leaves."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpp.errors import BankError
from jaxpp.stages.jaxpr import describe
from jaxpp.types import Leaf, Params, Tree

__all__ = ["SetLayout", "check_params"]


class SetLayout(NamedTuple):
    """The structure of a set's trees, and the shapes of its leaves: the parameters, then the optimizer state.

    Attributes:
        params: structure of the parameters.
        opt_state: structure of the optimizer state.
        shapes: shape and dtype of each leaf.
    """

    params: Tree
    opt_state: Tree
    shapes: tuple[jax.ShapeDtypeStruct, ...]

    def fill(self, leaves: Sequence[Leaf]) -> tuple[Params, Tree]:
        """Leaves as the two trees."""
        cut = self.params.num_leaves
        return self.params.unflatten(leaves[:cut]), self.opt_state.unflatten(leaves[cut:])

    def differences(self, params: Params, opt_state: Tree) -> list[str]:
        """How two trees differ from this layout: a line for each difference."""
        wrong = []
        for name, tree, expected in zip(("params", "opt_state"), (params, opt_state), self.fill(self.shapes), strict=True):
            if jax.tree.structure(tree) != jax.tree.structure(expected):
                wrong.append(f"{name} has the structure {jax.tree.structure(tree)} instead of {jax.tree.structure(expected)}")
                continue
            pairs = zip(jax.tree_util.tree_leaves_with_path(tree), jax.tree.leaves(expected), strict=True)
            wrong += [
                f"{name}{jax.tree_util.keystr(path)} is {_describe(leaf)} instead of {describe(aval)}"
                for (path, leaf), aval in pairs
                if (getattr(leaf, "shape", None), getattr(leaf, "dtype", None)) != (aval.shape, aval.dtype)
            ]
        return wrong


def check_params(where: str, params: Params) -> None:
    """Refuse what cannot be the parameters of a set: a tree without leaves, or with others than floating arrays and scalars."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    if not leaves:
        raise BankError(where, "a set has at least one array", "a tree without leaves", "pass the task's parameters")
    wrong = [
        f"params{jax.tree_util.keystr(path)} is {_describe(leaf)}"
        for path, leaf in leaves
        if not isinstance(leaf, np.ndarray | np.generic | jax.Array) or not jnp.issubdtype(leaf.dtype, jnp.inexact)
    ]
    if wrong:
        fix = "make a Python number an array with np.float32(number); keep all else out of the set"
        raise BankError(where, "the parameters of a set are arrays of floating numbers", wrong, fix)


def _describe(leaf: Leaf) -> str:
    return describe(leaf) if hasattr(leaf, "shape") and hasattr(leaf, "dtype") else f"a {type(leaf).__name__}"
