"""How the aux values of the microbatches become those of the step.

By default a leaf with one row an example is joined; the rest is averaged with the weights of the loss, in running sums. All else is
held until the end of the step. An output that is the same for all microbatches (a parameter, a constant) stays as it is.
"""

import difflib
import functools
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax.extend.core import Var
from jaxtyping import Float

from jaxpp.errors import ArgumentError
from jaxpp.stages.graph import descendants
from jaxpp.stages.jaxpr import aval_of, describe
from jaxpp.stages.loss.traced_loss import TracedLoss
from jaxpp.types import ReduceAux

Reducer = Callable[[Sequence[jax.Array], Float[jax.Array, " microbatches"]], jax.Array]  # of values and their weights (sum 1)


def join(values: Sequence[jax.Array], weights: Float[jax.Array, " microbatches"]) -> jax.Array:  # noqa: ARG001
    """The values end to end along their first axis."""
    return jnp.concatenate(values)


REDUCERS: Mapping[str, Reducer | None] = {
    "mean": None,
    "join": join,
    "sum": lambda values, weights: jnp.stack(values).sum(0),  # noqa: ARG005
    "max": lambda values, weights: functools.reduce(jnp.maximum, values),  # noqa: ARG005
    "min": lambda values, weights: functools.reduce(jnp.minimum, values),  # noqa: ARG005
    "last": lambda values, weights: values[-1],  # noqa: ARG005
    "stack": lambda values, weights: jnp.stack(values),  # noqa: ARG005
}  # The reducers with names; None for the mean, which is summed as the microbatches run


def check_reducers(reduce_aux: ReduceAux) -> dict[str, str | Callable[..., jax.Array]]:
    """What the user passed as ``reduce_aux``, as reducers by path; under the path ``""`` the one for everything."""
    if reduce_aux is None:
        return {}
    named = reduce_aux if isinstance(reduce_aux, Mapping) else {"": reduce_aux}
    wrong = [
        f"{path!r}: {reducer!r}" if path else repr(reducer)
        for path, reducer in named.items()
        if not (callable(reducer) or (isinstance(reducer, str) and reducer in REDUCERS))
    ]
    if wrong:
        rule = f"an aux leaf is reduced by {', '.join(map(repr, REDUCERS))}, or a function of (values, weights)"
        fix = 'pass one of these for all, or a dictionary by path such as {"num_correct": "sum"}'
        raise ArgumentError("reduce_aux", rule, wrong, fix)
    return {str(path).strip("/"): reducer for path, reducer in named.items()}


def reducers_of(
    loss: TracedLoss, named: Mapping[str, str | Callable[..., jax.Array]], rows: Callable[[], frozenset[int]], *, strict: bool
) -> dict[int, Reducer]:
    """The reducer of each aux leaf that is not averaged."""
    paths = loss.aux_paths
    unknown = [name for name in named if name and not any(f"{path}/".startswith(f"{name}/") for path in paths)]
    if strict and unknown:
        what = "the loss's aux" if loss.is_loss else "the output"
        near = [match for name in unknown for match in difflib.get_close_matches(name, paths, n=1)]
        rule = f"each path is one of {what} leaves, or the beginning of one"
        fix = f"write {near[0]!r}" if near else f"use these: {', '.join(paths) or 'there are none'}"
        raise ArgumentError("reduce_aux", rule, [repr(name) for name in unknown], fix)
    fitting = [[name for name in named if not name or f"{path}/".startswith(f"{name}/")] for path in paths]
    chosen = {k: named[max(names, key=len)] for k, names in enumerate(fitting) if names}
    reducers: dict[int, Reducer | None] = {k: REDUCERS[r] if isinstance(r, str) else _stacked(r) for k, r in chosen.items()}
    same = frozenset() if loss.is_loss else _same_everywhere(loss) - chosen.keys()
    reducers |= dict.fromkeys(same, REDUCERS["last"])
    if len(reducers) < len(paths):
        reducers |= {k: join for k in rows() if k not in reducers}
    _try(loss, paths, reducers)
    name = loss.words.aux
    wrong = [
        f"{name} {paths[k] or 'itself'}: {describe(aval_of(atom))}"
        for k, atom in enumerate(loss.aux)
        if reducers.get(k) is None and not jnp.issubdtype(aval_of(atom).dtype, jnp.number) and aval_of(atom).dtype != bool
    ]
    if wrong:
        rule = f"an {name} leaf without an average needs another reducer"
        raise loss.words.error(loss.words.where, rule, wrong, 'leave it out, or pass for example reduce_aux={"<path>": "last"}')
    return {k: reducer for k, reducer in reducers.items() if reducer is not None}


def _same_everywhere(loss: TracedLoss) -> frozenset[int]:
    """The outputs that are the same for all microbatches, such as a parameter: one of these is the output, to the last bit."""
    batch = [var for k, var in enumerate(loss.batch) if k not in loss.shared]
    state = [var for k, var in enumerate(loss.state) if k not in loss.unchanged]
    differing = descendants(loss.graph, [*batch, *state, *([] if loss.key is None else [loss.key])])
    return frozenset(k for k, atom in enumerate(loss.aux) if not (isinstance(atom, Var) and atom in differing))


def _try(loss: TracedLoss, paths: Sequence[str], reducers: Mapping[int, Reducer | None]) -> None:
    for k, reducer in reducers.items():
        aval = jax.ShapeDtypeStruct(aval_of(loss.aux[k]).shape, aval_of(loss.aux[k]).dtype)
        if reducer is not None:
            try:
                jax.eval_shape(lambda *args, r=reducer: jnp.asarray(r(args[:2], args[2])), aval, aval, jnp.zeros(2))
            except Exception as error:
                where = f"reduce_aux for {paths[k] or 'aux'}"
                got = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''} (for {describe(aval)})"
                fix = "choose another by its path, or pass a function of (values, weights) that jax can trace"
                raise ArgumentError(where, "a reducer makes one array of the values of the microbatches", got, fix) from error


def _stacked(reducer: Callable[[jax.Array, jax.Array], jax.Array]) -> Reducer:
    return lambda values, weights: jnp.asarray(reducer(jnp.stack(values), weights))


def check_aux(losses: Sequence[TracedLoss], reducers: Mapping[int, Reducer]) -> None:
    """Refuse aux leaves whose shape depends on the size of the microbatch, unless they are joined."""
    paths = losses[0].aux_paths
    shapes = [[describe(aval_of(loss.aux[k])) for loss in losses] for k in range(len(paths))]
    where, name, error = losses[0].words.where, losses[0].words.aux, losses[0].words.error
    wrong = [
        f"{name} {path or 'itself'}: {' and '.join(dict.fromkeys(described))}"
        for k, (path, described) in enumerate(zip(paths, shapes, strict=True))
        if len(set(described)) > 1 and reducers.get(k) is not join
    ]
    if wrong:
        rule = f"an {name} leaf has one shape at all microbatches, unless it is joined along its first axis"
        fix = f"reduce it in {where}, move the examples to the first axis and join, or let num_microbatches divide the batch size"
        raise error(where, rule, wrong, fix)
