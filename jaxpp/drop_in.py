"""``jaxpp.value_and_grad``: the drop-in for ``jax.value_and_grad`` that runs on several devices."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from jaxpp.engine.engine import Engine, open_engine
from jaxpp.engine.init_arguments import InitArguments, are_swapped, swapped
from jaxpp.engine.tracing import same_shapes
from jaxpp.errors import warn
from jaxpp.errors.checks import refuse_tracers
from jaxpp.errors.tracebacks import entry
from jaxpp.options import Asked, Loss, Memory, Order, Where
from jaxpp.runtime.edges import check_alive, concatenated_at, join_slices, to_homes
from jaxpp.runtime.processes.trees import stand_in_for
from jaxpp.schedule.base import Schedule
from jaxpp.stages.floating import filled, float0, has_gradient
from jaxpp.stages.remat import Remat
from jaxpp.stages.stacked import Slices, is_slices, joined, whole_shape
from jaxpp.targets import refuse_compile_only
from jaxpp.types import Batch, Device, Key, Leaf, LossFn, Params, ReduceAux, Tree


@entry
def value_and_grad(  # noqa: PLR0913  (the options of the front door)
    loss_fn: LossFn,
    *,
    num_stages: int,
    num_microbatches: int | None = None,
    schedule: str | Schedule = "1f1b",
    has_aux: bool = False,
    allow_int: bool = False,
    weight: Callable[[Batch], Any] | str | None = None,
    reduction: str = "mean",
    cuts: Sequence[str] | None = None,
    devices: Sequence[Device] | None = None,
    mesh: Mesh | None = None,
    data_parallel: int = 1,
    shardings: Tree = None,
    axes: Mapping[str, str | Sequence[str]] | None = None,
    remat: Remat | Sequence[Remat] = "least",
    reduce_aux: ReduceAux = None,
    broadcast: str | Sequence[str] = (),
    max_shapes: int = 8,
    fuse: bool | None = None,
    threads: str = "auto",
) -> Callable[..., Any]:
    """A function that returns the loss and its gradient, computed as a pipeline.

    It differs from ``jax.value_and_grad`` in two ways: the batch is split into microbatches, and the result is their weighted mean
    (gradient accumulation); and it cannot be called under ``jax.jit``, because it runs programs on several devices itself.

    The arguments are those of ``Pipeline`` with the same names, and ``allow_int``, as ``jax.value_and_grad`` has it: parameters may
    have leaves of integers, booleans and PRNG keys, such as quantised weights; their gradients are zeros of ``float0``. The loss,
    ``loss_fn(params, batch[, key]) -> loss``, or ``(loss, aux)`` with ``has_aux``, is traced and never run whole. Inputs and labels
    are one batch, ``(x, y)``; a third argument is the key.

    Returns:
        ``grad_fn(params, batch[, key])``, which returns ``loss, grads`` (``(loss, aux), grads`` with ``has_aux``). The gradients
        are where the caller's parameters are. Microbatch i uses ``jax.random.fold_in(key, i)``.

        If the devices belong to several processes, all of them call ``grad_fn`` with the same arguments and can read the loss and
        aux. A gradient stays on the device of its stage; ``jaxpp.gather(grads)`` brings all of them to every process.

    Raises:
        JaxppError: a ``ValueError``, for every option or input that cannot be run.

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
    asked = Asked(
        Order(num_stages, num_microbatches=num_microbatches, schedule=schedule, cuts=cuts, threads=threads),
        Loss(has_aux, allow_int=allow_int, reduce_aux=reduce_aux, weight=weight, reduction=reduction, broadcast=broadcast),
        where=Where(devices, mesh, data_parallel=data_parallel, axes=axes, shardings=shardings),
        memory=Memory(remat, fuse=fuse, max_shapes=max_shapes),
    )
    options = asked.settled(loss_fn)
    engine: Engine | None = None

    @entry
    @functools.wraps(loss_fn, assigned=("__name__", "__qualname__", "__module__"), updated=())
    def grad_fn(params: Params, batch: Batch, key: Key | None = None) -> Tree:
        nonlocal engine
        leaves, tree = jax.tree.flatten(params)
        refuse_compile_only("grad_fn(params, batch, key)", options.devices)
        refuse_tracers("grad_fn(params, batch, key)", params, batch, key)
        check_alive("grad_fn(params, batch, key)", params=params, batch=batch)
        if engine is None or not same_shapes(engine.layout.given, (params,)):
            try:
                engine = open_engine(options, None, (params,), batch, key, known=engine)
            except Exception as error:
                given = InitArguments(params, batch, where="grad_fn")
                if are_swapped(options, given, lambda variables: variables):
                    raise swapped(given) from error
                raise
            for warning in engine.layout.warnings:
                warn(warning)
        if engine.alone:
            engine.plan("grads", batch, key)
        held = engine.sliced(params)
        outcome = engine.run("grads", engine.bring(held), batch, key)
        shapes, whole = jax.tree.flatten(held)
        made = whole.unflatten(filled(outcome.grads, shapes, float0))
        if not engine.alone:
            return ((outcome.loss, outcome.aux) if has_aux else outcome.loss), joined(made, _across)
        homes = [leaf.sharding if isinstance(leaf, jax.Array) else jax.local_devices()[0] for leaf in leaves]
        nodes = jax.tree.leaves(made, is_leaf=is_slices)
        wanted = [(node, home) for node, home, leaf in zip(nodes, homes, leaves, strict=True) if has_gradient(leaf)]
        found = to_homes([concatenated_at(node, home) for node, home in wanted], [home for _, home in wanted])
        grads = tree.unflatten(filled(found, leaves, float0))
        loss, aux = jax.tree.map(lambda leaf: to_homes([leaf], homes[:1])[0], (outcome.loss, outcome.aux))
        return ((loss, aux) if has_aux else loss), grads

    return grad_fn


def _across(node: Slices) -> Leaf:
    """A gradient of several stages as one array: sharded over their devices, or, of slices of unequal size, a stand-in."""
    if not has_gradient(node.parts[0]):
        return float0(whole_shape(node))
    found = join_slices(node)
    return stand_in_for(found) if isinstance(found, Slices) else found
