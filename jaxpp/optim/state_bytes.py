"""How many bytes of optimizer state each parameter leaf has, from shapes alone."""

import jax
import optax

from jaxpp.stages.cost import count_bytes
from jaxpp.types import Params

__all__ = ["state_bytes"]


def state_bytes(optimizer: optax.GradientTransformation | None, params: Params) -> tuple[int, ...]:
    """The bytes of the optimizer state that belong to each parameter leaf.

    A leaf of the state belongs to the parameter whose path ends its own, as ``mu`` of adam does; the others, such as a step count,
    belong to none.
    """
    paths = {path: leaf for leaf, (path, _) in enumerate(jax.tree_util.tree_leaves_with_path(params))}
    found = [0] * len(paths)
    if optimizer is None:
        return tuple(found)
    for path, aval in jax.tree_util.tree_leaves_with_path(jax.eval_shape(optimizer.init, params)):
        leaf = next((paths[path[k:]] for k in range(len(path) + 1) if path[k:] in paths), None)
        if leaf is not None:
            found[leaf] += count_bytes(aval)
    return tuple(found)
