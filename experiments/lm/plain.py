"""The same training on one device: what ``jaxpp.Pipeline`` replaces, with the same calls."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxpp
from jaxpp.stages.loss.microbatch import check_batch, sizes

__all__ = ["Plain"]


class Plain:
    """Training on one device, with the calls of ``jaxpp.Pipeline``.

    A step is one ``jax.jit`` program: the loop over microbatches with ``jax.value_and_grad``, then the optimizer.

    Args:
        loss_fn: ``loss_fn(params, batch, key) -> loss``.
        optimizer: an optax transformation.
        num_microbatches: parts of the batch; part i is evaluated with ``jax.random.fold_in(key, i)``.
        delay: 1 for the gradients of the parameters before the last step, which ``state.previous`` holds.
    """

    def __init__(self, loss_fn: Any, optimizer: optax.GradientTransformation, *, num_microbatches: int, delay: int = 0):
        self._grad = jax.value_and_grad(loss_fn)
        self._optimizer = optimizer
        self._num_microbatches, self._delay = num_microbatches, delay
        self._step = jax.jit(self._update, donate_argnums=(1, 2) if delay else (0, 2))

    def init(self, init_fn: Any, key: jax.Array, batch: Any) -> jaxpp.State:
        """The first parameters and optimizer state."""
        check_batch(batch, self._num_microbatches)
        params = jax.jit(init_fn)(key)
        previous = jax.tree.map(jnp.copy, params) if self._delay else ()
        return jaxpp.State(params, jax.jit(self._optimizer.init)(params), previous=previous)

    def abstract_state(self, init_fn: Any, key: jax.Array, batch: Any) -> jaxpp.State:
        """The shapes of the state on the one device: what a checkpoint is restored to. No array is made."""
        check_batch(batch, self._num_microbatches)
        params = jax.eval_shape(init_fn, key)
        home = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        trees = params, jax.eval_shape(self._optimizer.init, params), params if self._delay else ()
        placed = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=home), trees)
        return jaxpp.State(*placed[:2], previous=placed[2])

    def step(self, state: jaxpp.State, batch: Any, key: jax.Array) -> tuple[jaxpp.State, jaxpp.Metrics]:
        """One training step; the old state is consumed."""
        params, opt_state, loss = self._step(state.params, state.previous, state.opt_state, batch, key)
        new = jaxpp.State(params, opt_state, step=state.step + 1, previous=state.params if self._delay else ())
        return new, jaxpp.Metrics(loss=loss, step=state.step + 1)

    def evaluate(self, state: jaxpp.State, batch: Any, *, loss_fn: Any) -> jaxpp.Metrics:
        """The loss of a batch."""
        return jaxpp.Metrics(loss=jax.jit(loss_fn)(state.params, batch), step=state.step)

    def _update(self, params: Any, previous: Any, opt_state: Any, batch: jax.Array, key: jax.Array) -> tuple[Any, Any, jax.Array]:
        read = previous if self._delay else params
        total = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
        parts = sizes(len(batch), self._num_microbatches)

        def add(total: Any, part: jax.Array, i: Any) -> Any:
            found = self._grad(read, part, jax.random.fold_in(key, i))
            return jax.tree.map(lambda a, b: a + b * (len(part) / len(batch)), total, found)

        if parts[0] == parts[-1]:
            pieces = batch.reshape(len(parts), parts[0], *batch.shape[1:]), jnp.arange(len(parts))
            total, _ = jax.lax.scan(lambda total, piece: (add(total, *piece), None), total, pieces)
        else:
            for i, part in enumerate(jnp.split(batch, np.cumsum(parts)[:-1])):
                total = add(total, part, i)
        loss, grads = total
        updates, opt_state = self._optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss
