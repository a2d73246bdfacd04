"""What a parameter set looks like: its trees, and the shapes of its leaves."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpp.errors import BankError
from jaxpp.stages.jaxpr import describe
from jaxpp.types import Params

__all__ = ["Layout", "check_params"]


class Layout(NamedTuple):
    """The trees of a set, and its leaves' shapes: those of the parameters, then those of the optimizer state.

    Attributes:
        params: structure of the parameters.
        opt_state: structure of the optimizer state.
        shapes: shape and dtype of each leaf.
    """

    params: Any
    opt_state: Any
    shapes: tuple[jax.ShapeDtypeStruct, ...]

    def fill(self, leaves: Sequence[Any]) -> tuple[Any, Any]:
        """Leaves as the two trees."""
        cut = self.params.num_leaves
        return self.params.unflatten(leaves[:cut]), self.opt_state.unflatten(leaves[cut:])

    def differences(self, params: Any, opt_state: Any) -> list[str]:
        """What is not as it should be in two trees, a line each."""
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
    """Refuse what cannot be the parameters of a set.

    Raises:
        BankError: there are no leaves, or some that are no floating arrays or NumPy scalars; all of them are named.
    """
    leaves = jax.tree_util.tree_leaves_with_path(params)
    if not leaves:
        raise BankError(where, "a set has at least one array", "a tree without leaves", "pass the task's parameters")
    wrong = [
        f"params{jax.tree_util.keystr(path)} is {_describe(leaf)}"
        for path, leaf in leaves
        if not isinstance(leaf, np.ndarray | np.generic | jax.Array) or not jnp.issubdtype(leaf.dtype, jnp.inexact)
    ]
    if wrong:
        raise BankError(
            where,
            "the parameters of a set are arrays of floating numbers",
            wrong,
            "make a Python number an array with np.float32(number); keep all else out of the set",
        )


def _describe(leaf: Any) -> str:
    return describe(leaf) if hasattr(leaf, "shape") and hasattr(leaf, "dtype") else f"a {type(leaf).__name__}"
