"""The user's loss traced at one microbatch's shapes, and checked: that it is a loss, and that its parameters have gradients."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal
from jax.tree_util import KeyPath

from jaxpp.errors import JaxppError, LossError, OutputError, ParamsError
from jaxpp.stages.graph import Graph, inline_remat, trace
from jaxpp.stages.jaxpr import describe, is_ordered
from jaxpp.stages.loops.rows import place_rows
from jaxpp.stages.loops.split_scan import split_scans
from jaxpp.stages.loops.stacked import assembled_shapes, concatenated, first_rows, is_slices, joined, split_like
from jaxpp.stages.loss.traced_loss import TracedLoss, path_name
from jaxpp.types import Aval, Batch, Leaf, LossFn, Params, Tree

__all__ = ["check_arrays", "check_floating", "key_implementation", "trace_loss"]


def trace_loss(  # noqa: PLR0913  (what the user has decided)
    loss_fn: LossFn,
    params: Params,
    batch: Batch,
    key: Aval | None,
    *,
    has_aux: bool | None,
    model_state: Tree = None,
    differentiable: bool = True,
    frozen: frozenset[int] = frozenset(),
    per_layer: bool = False,
    shared: frozenset[int] = frozenset(),
    is_loss: bool = True,
) -> TracedLoss:
    """Trace ``loss_fn(params[, model_state], batch[, key])`` at the shapes given, and check that it is a loss.

    Args:
        loss_fn: the user's loss.
        params: tree of arrays or shapes.
        batch: tree of shapes of one microbatch.
        key: a key, its shape, or None when the loss takes none.
        has_aux: whether the loss returns ``(loss, aux)``; None: that is seen by what it returns.
        model_state: tree of shapes of the model state, or None when the loss has none; with one it returns
            ``(loss, (new_model_state, aux))``.
        differentiable: whether gradients will be asked for, which needs a loss that depends on its parameters.
        frozen: the parameter leaves whose gradient nobody wants.
        per_layer: whether every layer of a loop over layers becomes an equation of its own.
        shared: the batch leaves that every microbatch gets as they are.
        is_loss: False for a function that returns outputs, which become aux: ``fn(params, batch[, key]) -> outputs``, or with a
            model state ``-> (new_model_state, outputs)``.

    Raises:
        LossError: the result is not a float scalar (or a pair, with ``has_aux``), or depends on no parameter; or the new model
            state has other leaves than the old.
    """
    param_leaves, param_tree = jax.tree_util.tree_flatten_with_path(params)
    state_leaves, state_tree = jax.tree_util.tree_flatten_with_path(() if model_state is None else model_state)
    batch_leaves, batch_tree = jax.tree.flatten(batch)
    keys, wrap = _raw_key(key)
    words = _LOSS if is_loss else _FN
    aux_trees: list[Tree] = []

    def flat(leaves: list[Leaf], state: list[Leaf], batch_leaves: list[Leaf], keys: list[Leaf]) -> tuple[Leaf, list[Leaf]]:
        states = () if model_state is None else (joined(state_tree.unflatten(state), concatenated),)
        args = (joined(param_tree.unflatten(leaves), concatenated), *states, batch_tree.unflatten(batch_leaves), *map(wrap, keys))
        result = loss_fn(*args)
        pair = isinstance(result, tuple) if has_aux is None else has_aux or model_state is not None
        loss, aux = _check_result(result, pair) if is_loss else (0.0, result)
        new = state
        if model_state is not None and (pair or not is_loss):
            new, aux = _check_state(aux, assembled_shapes(model_state), words)
            new = split_like(new, model_state)
        _check_aux(aux, words)
        aux_leaves, aux_tree = jax.tree.flatten(aux)
        aux_trees.append(aux_tree)
        return loss, [jnp.array(leaf, copy=True) for leaf in (*aux_leaves, *new)]

    try:
        graph, _ = trace(flat, [leaf for _, leaf in param_leaves], [leaf for _, leaf in state_leaves], batch_leaves, keys)
    except Exception as error:
        if not isinstance(error, JaxppError):
            shapes = ", ".join(describe(leaf) for leaf in batch_leaves)
            error.add_note(f"jaxpp: raised while tracing {words.noun} {words.given.format(shapes)}")
        raise
    graph, remat = inline_remat(graph)
    graph = place_rows(graph, graph.inputs[: len(param_leaves)])
    stacked = graph.inputs[: len(param_leaves)], graph.inputs[len(param_leaves) :][: 0 if is_loss else len(state_leaves)]
    graph, layers = split_scans(graph, *stacked, per_layer=per_layer)
    _check_order(graph, words)
    paths = _paths(param_leaves), _paths(state_leaves)
    whole = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_slices)[0]
    stacks = tuple((path, row) for path, (_, leaf) in zip(_paths(whole), whole, strict=True) for row in first_rows(leaf))
    traced = TracedLoss(
        graph, *paths, len(batch_leaves), aux_trees[-1], remat, frozen, layers, shared=shared, stacks=stacks, is_loss=is_loss
    )
    if differentiable:
        _check_depends(traced)
    return traced


def _check_depends(traced: TracedLoss) -> None:
    """Refuse a loss that has nothing to train."""
    loss = traced.graph.outputs[0]
    if isinstance(loss, Literal) or loss not in traced.of_params:
        raise LossError(
            "loss_fn",
            "the loss must depend on its parameters, or there is nothing to train",
            f"a loss that reads none of the {len(traced.param_paths)} parameter leaves",
            "compute the loss from the params argument, not from arrays the function closed over",
        )


def _paths(leaves: Sequence[tuple[KeyPath, Leaf]]) -> tuple[str, ...]:
    """The path of each leaf; NNX's ``value`` at the end of all of them is left out."""
    paths = [path_name(path) for path, _ in leaves]
    if paths and all(path.endswith("/value") for path in paths):
        paths = [path.removesuffix("/value") for path in paths]
    return tuple(paths)


def _check_order(graph: Graph, words: "_Words") -> None:
    ordered = [
        f"{eqn.primitive.name} in {name or words.noun}"
        for eqn, name in zip(graph.eqns, graph.names, strict=True)
        if is_ordered(eqn)
    ]
    if ordered:
        raise words.error(
            words.where,
            "stages run side by side, so side effects have no order among each other",
            ordered,
            f"leave out ordered=True, or return the values as {words.aux}",
        )


class _Words(NamedTuple):
    """What the parts of a result are called in messages.

    Attributes:
        where: who returns it.
        noun: the function itself.
        error: the class of what is wrong.
        aux: what is returned beside the loss and the state.
        state: the state.
        pair: the whole, with a state.
        fix: how to return both.
        given: what the function was called with, around the shapes.
    """

    where: str
    noun: str
    error: type[JaxppError]
    aux: str
    state: str
    pair: str
    fix: str
    given: str


_LOSS = _Words(
    "loss_fn",
    "the loss",
    LossError,
    "aux",
    "model state",
    "(loss, (new_model_state, aux))",
    "return the new model state and aux as a pair beside the loss; aux may be {}",
    "for one microbatch, batch leaves {}",
)
_FN = _Words(
    "fn",
    "fn",
    OutputError,
    "output",
    "carry",
    "(new_carry, outputs)",
    "return the new carry and the outputs as a pair; outputs may be {}",
    "with {} beside its parameters",
)


def _check_aux(aux: Tree, words: _Words, name: str = "") -> None:
    name = name or words.aux
    wrong = [
        f"{name}{jax.tree_util.keystr(path)}: {type(leaf).__name__}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(aux)
        if not isinstance(leaf, (jax.Array, np.ndarray, np.generic, bool, int, float, complex))
    ]
    if wrong:
        raise words.error(words.where, f"every {name} leaf is an array or a number", wrong, "leave out what is neither")


def _check_state(aux: Tree, old: Tree, words: _Words) -> tuple[list[Leaf], Tree]:
    """The leaves of the new model state, and aux, from the second part of what a loss with state returns."""
    where = f"{words.where} with has_state=True" if words is _LOSS else f"{words.where} with a {words.state}"
    name = words.state.replace(" ", "_")
    if not isinstance(aux, tuple) or len(aux) != 2:
        got = type(aux).__name__ if not isinstance(aux, tuple) else f"a tuple of {len(aux)}"
        raise words.error(where, f"it returns {words.pair}", f"(loss, {got})" if words is _LOSS else got, words.fix)
    new, aux = aux
    before, after = jax.tree_util.tree_leaves_with_path(old), jax.tree.leaves(new)
    if jax.tree.structure(new) != jax.tree.structure(old):
        had, has = ({jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)} for tree in (old, new))
        got = [f"without {name}{path}" for path in sorted(had - has)] + [f"with a new {path}" for path in sorted(has - had)]
        raise words.error(
            where,
            f"the new {words.state} is a tree like the old one",
            got or f"{jax.tree.structure(new)} instead of {jax.tree.structure(old)}",
            f"return every leaf of the {words.state}, changed or not, and no other",
        )
    _check_aux(new, words, name)
    shapes = [jax.eval_shape(jnp.asarray, leaf) for leaf in after]
    wrong = [
        f"{name}{jax.tree_util.keystr(path)}: {describe(a)} becomes {describe(b)}"
        for (path, a), b in zip(before, shapes, strict=True)
        if (a.shape, a.dtype) != (b.shape, b.dtype)
    ]
    if wrong:
        raise words.error(
            where,
            f"the leaves of the {words.state} keep their shapes and types",
            wrong,
            "give new values the old shape, and cast them with .astype(old.dtype)",
        )
    return after, aux


def check_floating(leaves: Sequence[tuple[KeyPath, Leaf]]) -> None:
    """Refuse parameter leaves that have no gradient, all of them at once."""
    where = "params"
    if not leaves:
        raise ParamsError(where, "the parameters are a tree of arrays", "a tree without leaves", "pass the model's parameters")
    wrong = [
        f"{where}{jax.tree_util.keystr(path)}: {describe(leaf) if hasattr(leaf, 'dtype') else type(leaf).__name__}"
        for path, leaf in leaves
        if not hasattr(leaf, "dtype") or not jnp.issubdtype(leaf.dtype, jnp.inexact)
    ]
    if wrong:
        fix = "make scalars arrays; keep integer and boolean leaves out of params (close over them, or pass them in the batch)"
        if any(callable(leaf) for _, leaf in leaves):
            fix = (
                "keep the functions out of params, as with Equinox: params, static = eqx.partition(model, eqx.is_inexact_array), "
                "and in the loss model = eqx.combine(params, static)"
            )
        raise ParamsError(where, "every parameter leaf must be an array of floating type, because its gradient is", wrong, fix)


def check_arrays(model_state: Tree, name: str = "model state") -> None:
    """Refuse leaves of a model state, or of another tree called ``name``, that are no arrays, all of them at once."""
    where = name.replace(" ", "_")
    wrong = [
        f"{where}{jax.tree_util.keystr(path[1:])}: {type(leaf).__name__}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(model_state)
        if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype"))
    ]
    if wrong:
        raise ParamsError(
            where,
            f"every leaf of the {name} is an array",
            wrong,
            "make scalars arrays with jnp.asarray, and close over what never changes",
        )


def key_implementation(key: Aval | None) -> str | None:
    """The implementation of a typed key; None for a raw one (or none at all)."""
    if key is None or not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        return None
    found: list[str] = []
    jax.eval_shape(lambda key: found.append(str(jax.random.key_impl(key))), key)  # a shape will do
    return found[0]


def _raw_key(key: Aval | None) -> tuple[list[Aval], Callable[[jax.Array], jax.Array]]:
    if key is None:
        return [], lambda data: data
    implementation = key_implementation(key)
    if implementation is None:
        return [key], lambda data: data
    return [jax.eval_shape(jax.random.key_data, key)], lambda data: jax.random.wrap_key_data(data, impl=implementation)


def _check_result(result: object, has_aux: bool) -> tuple[Leaf, Tree]:
    if has_aux:
        if not isinstance(result, tuple) or len(result) != 2:
            raise LossError(
                "loss_fn",
                "a loss with aux returns a pair (loss, aux)",
                f"a tuple of {len(result)}" if isinstance(result, tuple) else _called(result),
                "return (loss, aux), or leave has_aux out",
            )
        loss, aux = result
    else:
        loss, aux = result, ()
    if isinstance(loss, tuple):
        raise LossError(
            "loss_fn", "the loss is one float scalar", f"a tuple of {len(loss)}", "pass has_aux=True, or return the loss"
        )
    if not isinstance(loss, (jax.Array, np.ndarray, np.generic, float, int)):
        raise LossError("loss_fn", "the loss is one float scalar", type(loss).__name__, "return the loss itself")
    aval = jax.eval_shape(jnp.asarray, loss)
    if aval.shape != ():
        raise LossError("loss_fn", "the loss is one float scalar", describe(aval), "reduce it, for example with .mean()")
    if not jnp.issubdtype(aval.dtype, jnp.floating):
        fix = "return a loss made of floating numbers; what counts or compares (argmax, ==, a cast to integers) has no gradient"
        if jnp.issubdtype(aval.dtype, jnp.complexfloating):
            fix = "return a real number, for example with jnp.abs or .real"
        raise LossError("loss_fn", "the loss is one float scalar", describe(aval), fix)
    return loss, aux


def _called(result: Leaf) -> str:
    """What a loss returned, as people call it."""
    return f"one array, {describe(result)}" if hasattr(result, "dtype") else type(result).__name__
