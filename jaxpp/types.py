"""Names for the trees that move through a pipeline.

All of them are pytrees of arrays; the names say what role a tree plays, which is what a reader needs to know.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import jax
from jax.sharding import Sharding


@runtime_checkable
class Aval(Protocol):
    """A shape and a dtype: ``jax.ShapeDtypeStruct``, or what a traced variable says of itself."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The size of each axis."""
        ...

    @property
    def dtype(self) -> Any:
        """The type of the elements."""
        ...


Array = jax.Array
Device = Any  # a jax.Device (which static checkers do not take for a type)
Home = Device | Sharding  # where an array goes: a device, or a sharding over the devices of a sub-mesh
DType = Any  # a NumPy dtype, or one of JAX's own (key<fry>)
Leaf = Any  # a leaf of a tree that holds values: a jax.Array, a NumPy array or scalar, a Python number
Tree = Any  # any pytree: of arrays, of shapes, or of what else is said
Params = Any  # the user's parameter tree
Grads = Any  # a tree like Params: the gradient of the loss by each leaf
Batch = Any  # a tree of arrays that share their leading axis, the examples
TaskNames = Any  # the name of a parameter set of a bank, or a list with one name for each replica; None without a bank
Key = jax.Array  # a PRNG key: typed (jax.random.key) or raw (jax.random.PRNGKey)
Activation = Any  # what crosses a stage boundary forward
Cotangent = Any  # what crosses a stage boundary backward
Arguments = dict[str, Any]  # keyword arguments of a public function, by name
LossFn = Callable[..., Any]  # loss_fn(params, batch[, key]) -> loss or (loss, aux); the key may be keyword-only: *, key, or *, rngs
ForwardFn = Callable[..., Tree]  # fn(params, batch[, key]) -> outputs, or fn(params, carry, tokens) -> (carry, logits)
Policy = Callable[..., bool]  # whether an operation's result is kept for the backward (jax.checkpoint_policies)
ReduceAux = str | Callable[[Any, Any], Any] | Mapping[str, Any] | None  # how aux values of microbatches become those of a step
