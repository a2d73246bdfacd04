"""The single-device oracle, and the comparison with it, leaf by leaf.

The oracle is the definition of a step: the loop over microbatches with ``jax.value_and_grad`` on one device, microbatch i with
``jax.random.fold_in(key, i)``, loss and gradient averaged with the microbatches' weights.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpp.errors import VerifyError
from jaxpp.runtime.engine import Engine, Outcome
from jaxpp.runtime.transfer import gather
from jaxpp.stages.cost import coarsest_dtype
from jaxpp.stages.microbatch import scale_dtype, sizes, slice_batch
from jaxpp.stages.reduce import Reducer
from jaxpp.stages.stack import assembled
from jaxpp.state import State
from jaxpp.types import Batch, Key, LossFn, Params

__all__ = ["COARSE_FLOOR", "GRAD_FLOOR", "compare", "oracle", "tolerance", "verify_grads", "verify_update"]

GRAD_FLOOR = 0.01
"""A gradient smaller than this part of the largest one is compared as if it had that size."""
_NOISE = 8
"""How many times what a change of the parameters' last digits does to a gradient is still rounding."""
COARSE_FLOOR = 0.1
"""The same for losses that compute with fewer digits than float32's: their noise is larger beside what is allowed."""


def oracle(  # noqa: PLR0913  (what the user has decided)
    loss_fn: LossFn,
    params: Params,
    batch: Batch,
    key: Key | None,
    num_microbatches: int,
    *,
    has_aux: bool = False,
    weight: Callable[[Batch], Any] | None = None,
    reducers: Mapping[int, Reducer] | None = None,
    model_state: Any = None,
    loss_scale: Any = 1.0,
) -> tuple[Any, ...]:
    """The loss, aux and gradients of a step, computed plainly on the devices where ``params`` live.

    Args:
        loss_fn: ``loss_fn(params[, model_state], batch[, key])``.
        params: on one device.
        batch: the whole batch.
        key: or None.
        num_microbatches: parts the batch is split into.
        has_aux: whether the loss returns ``(loss, aux)``.
        weight: weight of a microbatch; its size unless given.
        reducers: of the aux leaves that are not averaged.
        model_state: for a loss with model state.
        loss_scale: what the backward starts from; the gradients are so many times as large.

    Returns:
        ``(loss, aux, grads)``, and with model state ``(loss, aux, grads, new_model_state)``.
    """
    leaves, tree = jax.tree.flatten(batch)
    parts = sizes(leaves[0].shape[0], num_microbatches)
    pieces = [tree.unflatten(piece) for piece in slice_batch(leaves, parts)]
    weights = jnp.asarray(parts if weight is None else [weight(piece) for piece in pieces], scale_dtype())
    scales = weights / weights.sum()
    has_state = model_state is not None

    @jax.jit
    def step(params: Params, *rest: Any) -> tuple[Any, Any, Any]:
        def pair(params: Params) -> tuple[Any, Any]:
            result = loss_fn(params, *rest)
            return result if has_aux or has_state else (result, ())

        loss, pullback, aux = jax.vjp(pair, params, has_aux=True)
        return loss, aux, pullback(jnp.asarray(loss_scale, loss.dtype))[0]

    loss: Any = None
    grads: Any = None
    auxes: list[Any] = []
    for i, piece in enumerate(pieces):
        states = (model_state,) if has_state else ()
        value, aux, grad = step(params, *states, piece, *([] if key is None else [jax.random.fold_in(key, i)]))
        model_state, aux = aux if has_state else (None, aux)
        auxes.append(aux)
        scale = scales[i]
        scaled = jax.tree.map(lambda leaf, scale=scale: scale.astype(leaf.dtype) * leaf, (value, grad))
        loss, grads = scaled if loss is None else jax.tree.map(jnp.add, (loss, grads), scaled)
    aux = _merge_aux(auxes, scales, reducers or {})
    return (loss, aux, grads, model_state) if has_state else (loss, aux, grads)


def _merge_aux(auxes: list[Any], scales: jax.Array, reducers: Mapping[int, Reducer]) -> Any:
    tree = jax.tree.structure(auxes[0])
    columns = zip(*(jax.tree.leaves(aux) for aux in auxes), strict=True)
    return tree.unflatten(
        reducers[k](column, scales)
        if k in reducers
        else sum(scale.astype(_mean_dtype(leaf)) * leaf for scale, leaf in zip(scales, column, strict=True))
        for k, column in enumerate(columns)
    )


def _mean_dtype(leaf: Any) -> Any:
    dtype = jnp.asarray(leaf).dtype
    return dtype if jnp.issubdtype(dtype, jnp.inexact) else scale_dtype()


def tolerance(dtype: Any) -> float:
    """The relative error allowed: 1e-12 in float64, 1e-5 in float32, 8 units of rounding in smaller types."""
    name = np.dtype(dtype).name
    return {"float64": 1e-12, "float32": 1e-5}.get(name) or 8 * float(jnp.finfo(dtype).eps)


def compare(what: str, got: Any, want: Any, *, floor: float = 0.0, coarsest: Any = None, noise: Any = None) -> None:
    """Raise unless every leaf of ``got`` equals its fellow in ``want``.

    Equal means ``max|a - b| <= tolerance * max(max|leaf|, floor * largest leaf)``. For gradients the floor is ``GRAD_FLOOR``: one
    that is pure rounding noise (an attention key's bias) has no size of its own to be relative to.

    Args:
        what: what the trees are, for the message.
        got: the pipeline's.
        want: the oracle's.
        floor: the part of the largest leaf below which a leaf counts as noise.
        coarsest: the floating type with the fewest digits that the leaves were computed with: their own unless given. A float32
            gradient of a bfloat16 model has bfloat16's digits, for XLA rounds where it does not fuse.
        noise: for each leaf how far rounding moves it, if that is known; several times as much is allowed.

    Raises:
        VerifyError: naming the first leaf that differs, with both values where they differ most.
    """
    pairs = zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True)
    wide = [(path, _wide(a), _wide(b), getattr(b, "dtype", None)) for (path, a), b in pairs]
    largest = max((_size(b) for _, _, b, dtype in wide if _inexact(dtype)), default=0.0)
    moved = [0.0] * len(wide) if noise is None else jax.tree.leaves(noise)
    for (path, a, b, dtype), moves in zip(wide, moved, strict=True):
        allowed = max(tolerance(kind) for kind in (dtype, coarsest) if kind is not None) if _inexact(dtype) else 0.0
        bound = max(allowed * max(_size(b), floor * largest), _NOISE * moves)
        with np.errstate(invalid="ignore"):
            error = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b))
        error = np.where(np.isnan(error), np.inf, error)
        if error.max(initial=0.0) > bound:
            at = np.unravel_index(int(error.argmax()), a.shape)
            place = f"{what}{jax.tree_util.keystr(path)}"
            raise VerifyError(
                "verify",
                f"the pipelined step must equal the single-device step, and {place} does not",
                [
                    f"pipelined {a[at].item()!r}, single device {b[at].item()!r}, at index {tuple(map(int, at))}",
                    f"difference {error.max():.3g}, allowed {bound:.3g}",
                ],
                "look at the stage that owns this leaf (print(pipe.stages)); if nothing was changed there, please report it",
            )


def verify_grads(engine: Engine, state: State, batch: Batch, key: Key | None, found: Outcome) -> None:
    """Compare the loss, aux, gradients and model state that a pipeline found with the oracle's.

    Raises:
        VerifyError: naming the first leaf that differs.
    """
    config, layout = engine.settings, engine.preparer.layout
    assert layout is not None
    traced = engine.preparer.job(batch, key).cuts[0].loss
    spread = assembled(jax.tree.structure(layout.params).unflatten(found.leaves))
    model_state = jax.tree.unflatten(jax.tree.structure(state.model_state), found.model_state)
    options = {"has_aux": config.has_aux, "weight": config.weight, "reducers": layout.reducers}
    params, old, batch, key = gather((state.params, state.model_state, batch, key))
    options |= {"model_state": old} if config.has_state else {}
    if config.scaling is not None:
        options |= {"loss_scale": jax.device_get(jax.tree.leaves(state.loss_scale)[config.scaling.scale])}
    loss, aux, grads, *new = oracle(config.loss_fn, params, batch, key, config.schedule.num_microbatches, **options)
    coarsest = coarsest_dtype(eqn for eqn in traced.graph.eqns if not traced.of_params.isdisjoint(eqn.outvars))
    compare("loss", found.loss, loss, coarsest=coarsest)
    compare("aux", found.aux, aux, coarsest=coarsest)
    floor = COARSE_FLOOR if jnp.finfo(coarsest).bits < 32 else GRAD_FLOOR
    frozen = set(traced.frozen)
    computed = [
        jnp.zeros_like(leaf) if frozen.issuperset(layout.slicing.leaves([k])) else leaf
        for k, leaf in enumerate(jax.tree.leaves(grads))
    ]
    wanted = jax.tree.unflatten(jax.tree.structure(grads), computed)
    try:
        compare("grads", spread, wanted, floor=floor, coarsest=coarsest)
    except VerifyError:  # is it rounding? A bias before a batch normalisation has a gradient of nothing else
        _, _, shaken, *_ = oracle(config.loss_fn, _shaken(params), batch, key, config.schedule.num_microbatches, **options)
        noise = jax.tree.map(lambda a, b: _size(_wide(a) - _wide(b)), shaken, grads)
        compare("grads", spread, wanted, floor=floor, coarsest=coarsest, noise=noise)
    compare("model_state", model_state, *(new or [()]), coarsest=coarsest)


def verify_update(engine: Engine, state: State, found: Outcome, stepped: State) -> None:
    """Compare an updated state with what plain optax makes of the pipeline's gradients.

    Raises:
        VerifyError: naming the first leaf that differs.
    """
    layout = engine.preparer.layout
    assert engine.optimizer is not None and layout is not None
    optimizer, scaling = optax.with_extra_args_support(engine.optimizer), engine.settings.scaling

    @jax.jit
    def update(grads: Any, state: State, model_state: Any, loss: Any) -> State:
        scale, tree = jax.tree.flatten(state.loss_scale)
        finite = jnp.asarray(True)
        if scaling is not None:
            leaves, finite = scaling.unscale(jax.tree.leaves(grads), scale)
            grads, scale = jax.tree.structure(grads).unflatten(leaves), scaling.adjust(scale, finite)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params, value=loss)
        new = State(optax.apply_updates(state.params, updates), opt_state, model_state)
        new = jax.tree.map(lambda after, before: jnp.where(finite, after, before), new, state._replace(loss_scale=()))
        return new._replace(loss_scale=tree.unflatten(scale))

    grads = assembled(jax.tree.structure(layout.params).unflatten(found.leaves))
    model_state = jax.tree.unflatten(jax.tree.structure(state.model_state), found.model_state)
    whole = State(state.params, state.opt_state, state.model_state, state.loss_scale)
    wanted = update(*gather((grads, whole, model_state, found.loss)))
    compare("", State(stepped.params, stepped.opt_state, stepped.model_state, stepped.loss_scale), wanted)


def _shaken(params: Params) -> Params:
    """The parameters with their last digits changed, up and down by turns."""

    def shake(leaf: Any) -> Any:
        turns = jnp.where(jnp.arange(leaf.size) % 2, 1, -1).reshape(leaf.shape)
        return (leaf * (1 + turns * jnp.finfo(leaf.dtype).eps)).astype(leaf.dtype)

    return jax.tree.map(shake, params)


def _inexact(dtype: Any) -> bool:
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def _size(array: np.ndarray) -> float:
    """The largest finite magnitude."""
    return float(np.max(np.abs(array), initial=0.0, where=np.isfinite(array)))


def _wide(leaf: Any) -> np.ndarray:
    data = jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
    array = np.asarray(jax.device_get(data))
    return array if jnp.issubdtype(array.dtype, jnp.complexfloating) else array.astype(np.float64)
