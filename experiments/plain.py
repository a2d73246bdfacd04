"""What a pipeline is compared with: the same step on one device, in one ``jax.jit``; and the clock for both."""

import time
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import optax

from jaxpp.types import Batch, LossFn, Tree

__all__ = ["PLAIN", "PlainKind", "Runner", "plain_step", "plain_steps"]

PlainKind = Literal["scan", "unrolled", "whole"]
PLAIN: tuple[PlainKind, ...] = ("scan", "unrolled", "whole")
"""How a plain step takes its batch: microbatches in a ``lax.scan``, in an unrolled loop, or the whole batch at once."""


def plain_step(
    loss_fn: LossFn, optimizer: optax.GradientTransformation, num_microbatches: int, *, scan: bool = True
) -> Callable[..., tuple[Tree, tuple[jax.Array, jax.Array]]]:
    """Gradient accumulation on one device: ``step((params, opt_state), batch[, key]) -> state, (loss, grad_norm)``.

    Args:
        loss_fn: ``loss_fn(params, batch[, key])``; microbatch i gets ``jax.random.fold_in(key, i)``.
        optimizer: any.
        num_microbatches: parts of the batch, all of one size.
        scan: whether the loop over microbatches is a ``lax.scan``, or unrolled.
    """
    grad = jax.value_and_grad(loss_fn)

    def step(state: Tree, batch: Batch, *key: jax.Array) -> tuple[Tree, tuple[jax.Array, jax.Array]]:
        params, opt_state = state
        pieces = jax.tree.map(lambda leaf: leaf.reshape(num_microbatches, -1, *leaf.shape[1:]), batch)
        loss_like = jax.eval_shape(loss_fn, params, jax.tree.map(lambda leaf: leaf[0], pieces), *key)

        def add(total: Tree, i: int | jax.Array, piece: Batch) -> Tree:
            found = grad(params, piece, *(jax.random.fold_in(each, i) for each in key))
            return jax.tree.map(lambda a, b: a + b / num_microbatches, total, found)

        total = jnp.zeros((), loss_like.dtype), jax.tree.map(jnp.zeros_like, params)
        if scan:
            numbered = jnp.arange(num_microbatches), pieces
            total, _ = jax.lax.scan(lambda total, piece: (add(total, *piece), None), total, numbered)
        else:
            for i in range(num_microbatches):
                total = add(total, i, jax.tree.map(lambda leaf, i=i: leaf[i], pieces))
        loss, grads = total
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), (loss, optax.tree.norm(grads))

    return jax.jit(step, donate_argnums=0)


def plain_steps(
    loss_fn: LossFn, optimizer: optax.GradientTransformation, num_microbatches: int
) -> dict[PlainKind, Callable[..., tuple[Tree, tuple[jax.Array, jax.Array]]]]:
    """The plain step of each kind, so that a pipeline can be compared with the fastest of them.

    The whole batch at once is what a user without a pipeline writes first. It needs the most memory, and a loss that is no mean
    over examples (one with batch normalisation, say) has another value there.

    Args:
        loss_fn: as for ``plain_step``.
        optimizer: any.
        num_microbatches: parts of the batch, for ``scan`` and ``unrolled``.
    """
    counts: dict[PlainKind, int] = {"scan": num_microbatches, "unrolled": num_microbatches, "whole": 1}
    return {kind: plain_step(loss_fn, optimizer, counts[kind], scan=kind == "scan") for kind in PLAIN}


class Runner:
    """A kind of step and its state; ``time`` runs some steps and says how long one took.

    Args:
        step: ``step(state) -> state, reported``.
        state: consumed.

    Attributes:
        compile_seconds: of the first step.
    """

    def __init__(self, step: Callable[[Tree], tuple[Tree, Tree]], state: Tree):
        self._step, self._state = step, state
        self.compile_seconds = self.time(1)[0] / 1e6

    def time(self, steps: int, warm_up: int = 0, *, wait: bool = True) -> tuple[float, float]:
        """Microseconds of a step, and of the host's part of it; ``warm_up`` steps before are not timed.

        Args:
            steps: to time.
            warm_up: steps before those.
            wait: whether each step is waited for before the next, or only the last: training does not wait for its steps.
        """
        if warm_up:
            self.time(warm_up)
        host, start = 0.0, time.perf_counter()
        for k in range(steps):
            begun = time.perf_counter()
            self._state, reported = self._step(self._state)
            host += time.perf_counter() - begun
            if wait or k == steps - 1:
                jax.block_until_ready((self._state, reported))
        return (time.perf_counter() - start) / steps * 1e6, host / steps * 1e6
