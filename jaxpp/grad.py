"""``jaxpp.value_and_grad``: the drop-in for ``jax.value_and_grad`` that runs on several devices."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxpp.options import settings
from jaxpp.runtime.arguments import refuse_tracers
from jaxpp.runtime.engine import Engine
from jaxpp.runtime.prepare import same_shapes
from jaxpp.runtime.transfer import bring, check_alive, together
from jaxpp.schedule.base import Schedule
from jaxpp.stages.cuts.uneven import warn_of
from jaxpp.stages.loops.stacked import is_slices
from jaxpp.tracebacks import entry
from jaxpp.types import Batch, Device, LossFn, ReduceAux, Remat

__all__ = ["value_and_grad"]


@entry
def value_and_grad(  # noqa: PLR0913  (the options of the front door)
    loss_fn: LossFn,
    *,
    num_stages: int,
    num_microbatches: int | None = None,
    schedule: str | Schedule = "1f1b",
    has_aux: bool = False,
    weight: Callable[[Batch], Any] | None = None,
    cuts: Sequence[str] | None = None,
    devices: Sequence[Device] | None = None,
    remat: Remat | Sequence[Remat] = "least",
    reduce_aux: ReduceAux = None,
    shared: str | Sequence[str] = (),
    max_shapes: int = 8,
) -> Callable[..., Any]:
    """A function that returns the loss and its gradient, computed as a pipeline.

    It differs from ``jax.value_and_grad`` in two ways: the batch is split into microbatches and the result is their weighted
    mean, and it cannot be called under ``jax.jit``, because it runs programs on several devices itself.

    Args:
        loss_fn: ``loss_fn(params, batch[, key]) -> loss``, or ``(loss, aux)`` with ``has_aux``. Traced, never run whole. The key
            may be an argument by keyword alone, called ``key``, ``rng``, ``rngs`` or like these; it is one key.
        num_stages: stages to cut it into: ranks x stages a rank.
        num_microbatches: parts the batch is split into along axis 0; ``num_stages`` unless given.
        schedule: a name for ``jaxpp.schedule.make``, or a ``Schedule``. Schedules with two stages a rank (interleaved, looped-bfs
            and those in a V) run on half as many devices as stages.
        has_aux: whether the loss returns ``(loss, aux)``.
        reduce_aux: how the microbatches' aux becomes the step's: ``"mean"``, ``"sum"``, ``"max"``, ``"min"``, ``"last"``,
            ``"join"``, ``"stack"``, a function of ``(values, weights)`` with the microbatches along their first axis, or a
            dictionary of these by path, ``{"errors": "sum"}``. Unless given, leaves with one row an example are joined, others
            averaged like the loss.
        weight: weight of a microbatch in the mean, from its part of the batch; the number of examples unless given.
        cuts: module paths or parameter prefixes at which stages 1, 2, ... begin; found automatically unless given.
        devices: one a rank, cycled if fewer; ``jax.devices()`` unless given.
        remat: what a stage's forward keeps for its backward. ``"least"``: as few bytes as its backward can do with if it computes
            again what is cheap (elementwise arithmetic; never a matrix product, a convolution, a loop or a random number).
            ``"keep"``: everything. ``"recompute"``: the stage's inputs only; the forward is run twice. Or what a policy of
            ``jax.checkpoint_policies`` says. One for all stages, or a list of one a stage. Where a backward is split, I keeps for
            W in the same way. A loop (``scan``) is one operation.
        shared: batch leaves that every microbatch (and replica) gets whole rather than split, by path or pattern of paths:
            ``("graph/*", "positions")``. Numbers (leaves without an axis) always are.
        max_shapes: of how many batch shapes the compiled step is kept: the last that were used. One that comes back later is traced
            and compiled again. A shape that is evaluated with another loss counts once more.

    Returns:
        ``grad_fn(params, batch[, key])``, which returns ``loss, grads`` (``(loss, aux), grads`` with ``has_aux``). The gradients
        are where the caller's parameters are. Microbatch i uses ``jax.random.fold_in(key, i)``.

    Raises:
        JaxppError: a ``ValueError`` for every option or input that cannot be run. Tracebacks end at the caller's own line;
            ``jax.config.update("jax_traceback_filtering", "off")`` shows every frame.

    Example:
        >>> import jax, jax.numpy as jnp, jaxpp
        >>> def loss_fn(params, batch):
        ...     return jnp.mean((jnp.tanh(batch @ params["w1"]) @ params["w2"]) ** 2)
        >>> params = {"w1": jnp.ones((4, 8)), "w2": jnp.ones((8, 2))}
        >>> grad_fn = jaxpp.value_and_grad(loss_fn, num_stages=2, num_microbatches=4)
        >>> loss, grads = grad_fn(params, jnp.ones((8, 4)))
        >>> grads["w1"].shape
        (4, 8)
    """
    engine = Engine(
        settings(
            loss_fn,
            num_stages=num_stages,
            num_microbatches=num_microbatches,
            schedule=schedule,
            has_aux=has_aux,
            weight=weight,
            cuts=cuts,
            devices=devices,
            remat=remat,
            reduce_aux=reduce_aux,
            shared=shared,
            max_shapes=max_shapes,
        )
    )

    @entry
    @functools.wraps(loss_fn, assigned=("__name__", "__qualname__", "__module__"), updated=())
    def grad_fn(params: Any, batch: Any, key: Any = None) -> Any:
        leaves, tree = jax.tree.flatten(params)
        refuse_tracers("grad_fn(params, batch, key)", params, batch, key)
        check_alive("grad_fn(params, batch, key)", (params, batch))
        layout = engine.preparer.layout
        if layout is None or not same_shapes(layout.given, (params,)):
            engine.settle((params,), batch, key)
            warn_of(engine.unevenness)
        engine.plan("grads", batch, key)
        held = engine.sliced(params)
        outcome = engine.run("grads", bring(jax.tree.leaves(held), engine.homes), batch, key)
        homes = [leaf.sharding if isinstance(leaf, jax.Array) else jax.devices()[0] for leaf in leaves]
        made = jax.tree.leaves(jax.tree.structure(held).unflatten(outcome.leaves), is_leaf=is_slices)
        grads = tree.unflatten(bring(list(map(together, made, homes)), homes))
        loss, aux = jax.tree.map(lambda leaf: bring([leaf], homes[:1])[0], (outcome.loss, outcome.aux))
        return ((loss, aux) if has_aux else loss), grads

    return grad_fn
