"""How the aux values of the microbatches become those of the step.

By default a leaf becomes what it would be of the whole batch (``example_axis`` says what it is of the examples): rows are joined
along their own axis, sums are added, means averaged with the weights of the loss, in running sums, and what is the same for all
microbatches (a parameter, a constant) stays as it is. A leaf that mixes examples otherwise has no such value: a function with such
a leaf is refused, and a loss averages it with a warning. All but means is held until the end of the step.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Var
from jaxtyping import Float

from jaxpp.errors import ArgumentError, OutputError
from jaxpp.errors.keywords import spelt
from jaxpp.stages.graph import descendants
from jaxpp.stages.jaxpr import aval_of, describe
from jaxpp.stages.loss.example_axis import Count, Examples, Relation, Value
from jaxpp.stages.loss.traced_loss import TracedLoss
from jaxpp.types import Aval, ReduceAux

Reducer = Callable[[Sequence[jax.Array], Float[jax.Array, " microbatches"]], jax.Array]  # of values and their weights (sum 1)


@dataclass(frozen=True)
class Join:
    """The values end to end along an axis."""

    axis: int = 0

    def __call__(self, values: Sequence[jax.Array], weights: Float[jax.Array, " microbatches"]) -> jax.Array:  # noqa: ARG002
        """One value."""
        return jnp.concatenate(values, self.axis)


@dataclass(frozen=True)
class Unexamined:
    """The value of one microbatch; those of several are refused, because nobody knows how to put them together."""

    why: str

    def __call__(self, values: Sequence[jax.Array], weights: Float[jax.Array, " microbatches"]) -> jax.Array:  # noqa: ARG002
        """The only value."""
        return values[0]


class MixedAux(NamedTuple):
    """A leaf that knows of several examples, so that those of microbatches cannot make that of the batch."""

    leaf: str  # as messages call it
    what: str  # it is of the examples
    path: str
    joined: bool  # whether the microbatches' rows are put end to end; else the mean is taken


def reducing(path: str, reducer: str) -> str:
    """``reduce_aux`` for one leaf, as the user writes it."""
    return f'reduce_aux={{"{path}": "{reducer}"}}' if path else f'reduce_aux="{reducer}"'


def average(values: Sequence[jax.Array], weights: Float[jax.Array, " microbatches"]) -> jax.Array:
    """The weighted mean of the values, of which integers become floats."""
    dtype = values[0].dtype if jnp.issubdtype(values[0].dtype, jnp.inexact) else weights.dtype
    return functools.reduce(jnp.add, [weights[k].astype(dtype) * value.astype(dtype) for k, value in enumerate(values)])


def average_of_examples(values: Sequence[jax.Array], weights: Float[jax.Array, " microbatches"]) -> jax.Array:
    """As ``average``, but whoever calls it passes the shares of the examples for ``weights``, whatever the microbatches weigh."""
    return average(values, weights)


REDUCERS: Mapping[str, Reducer | None] = {
    "mean": None,
    "join": Join(),
    "sum": lambda values, weights: jnp.stack(values).sum(0),  # noqa: ARG005
    "max": lambda values, weights: functools.reduce(jnp.maximum, values),  # noqa: ARG005
    "min": lambda values, weights: functools.reduce(jnp.minimum, values),  # noqa: ARG005
    "last": lambda values, weights: values[-1],  # noqa: ARG005
    "stack": lambda values, weights: jnp.stack(values),  # noqa: ARG005
}  # The reducers with names; None for the mean, which is summed as the microbatches run


_WHOLE = "run the function on the whole batch, with num_microbatches=1"


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
    loss: TracedLoss,
    named: Mapping[str, str | Callable[..., jax.Array]],
    examples: Examples,
    *,
    strict: bool,
    summed: bool,
    divisor: Count | None = None,
    why: str = "",
) -> tuple[dict[int, Reducer], list[MixedAux]]:
    """The reducer of each aux leaf that is not averaged, and what of the others is no mean over the examples.

    If the loss is ``summed`` over the microbatches, means are reduced too, because running sums have no weights then. So they are
    where microbatches weigh what they count, the ``divisor`` of the loss, unless a leaf is divided by that too. ``why``: the reason
    why nobody knows what a function does with the examples, if nobody does.
    """
    paths = loss.aux_paths
    unknown = [name for name in named if name and not any(f"{path}/".startswith(f"{name}/") for path in paths)]
    if strict and unknown:
        what = "the loss's aux" if loss.is_loss else "the output"
        rule = f"each path is one of {what} leaves, or the beginning of one"
        fix = spelt(unknown, paths, f"use these: {', '.join(paths) or 'there are none'}")
        raise ArgumentError("reduce_aux", rule, [repr(name) for name in unknown], fix)
    fitting = [[name for name in named if not name or f"{path}/".startswith(f"{name}/")] for path in paths]
    chosen = {k: named[max(names, key=len)] for k, names in enumerate(fitting) if names}
    reducers: dict[int, Reducer | None] = {k: REDUCERS[r] if isinstance(r, str) else _stacked(r) for k, r in chosen.items()}
    same = _same_everywhere(loss) - chosen.keys()
    name, mixing = loss.words.aux, list[MixedAux]()
    if len(reducers) < len(paths):
        for k in range(len(paths)):
            if k not in reducers:
                if why and not loss.is_loss:
                    reducers[k] = Unexamined(why)
                    continue
                counted = divisor is not None and examples.aux[k].count == divisor and not examples.aux[k].placed
                reducer, what = (None, "") if counted else _reducer_of(examples.aux[k], examples.axes[k], same=k in same)
                reducer = average_of_examples if reducer is None and divisor is not None and not counted else reducer
                reducers |= {} if reducer is None else {k: reducer}
                if what:
                    mixing.append(MixedAux(f"{name} {paths[k] or 'itself'}", what, paths[k], joined=isinstance(reducer, Join)))
    if summed:
        reducers |= {k: average for k in range(len(paths)) if reducers.get(k) is None}
    if mixing and not loss.is_loss:
        rule = "outputs of microbatches are put together to those of the batch, so they are rows, sums or means over the examples"
        fix = f"{_WHOLE}; or say what to do, {reducing(mixing[0].path, 'stack')}"
        raise OutputError("fn", rule, [f"{each.leaf}: {each.what}" for each in mixing], fix)
    _try(loss, paths, reducers)
    wrong = {
        paths[k]: f"{name} {paths[k] or 'itself'}: {describe(aval_of(atom))}"
        for k, atom in enumerate(loss.aux)
        if reducers.get(k) is None and not jnp.issubdtype(aval_of(atom).dtype, jnp.number) and aval_of(atom).dtype != bool
    }
    if wrong:
        rule, fix = f"an {name} leaf without an average needs another reducer", reducing(next(iter(wrong)), "last")
        raise loss.words.error(loss.words.where, rule, [*wrong.values()], f"leave it out, or pass for example {fix}")
    return {k: reducer for k, reducer in reducers.items() if reducer is not None}, mixing


def _reducer_of(value: Value, axes: Sequence[int], *, same: bool) -> tuple[Reducer | None, str]:
    """What makes the value of the batch of those of the microbatches, None for the mean; and what it is, if there is nothing."""
    plain = value.count is None and not value.placed
    if value.kind in (Relation.ROWS, Relation.SAME) and len(axes) == 1 and plain and (value.degree, value.blocks) == (0, 1):
        return Join(axes[0]), ""
    if value.kind == Relation.SAME and not axes and plain and value.degree in (0, 1):
        return (REDUCERS["sum"] if value.degree else REDUCERS["last"] if same else None), ""
    if value.kind == Relation.TOTAL and not axes and plain and value.degree in (0, -1):
        return (None if value.degree else REDUCERS["sum"]), ""
    if value.kind in (Relation.LARGEST, Relation.SMALLEST) and not axes:
        return REDUCERS["max" if value.kind == Relation.LARGEST else "min"], ""
    if value.mixing is not None:  # rows that know of one another, as behind a batch normalisation, are rows nonetheless
        return Join(axes[0]) if len(axes) == 1 else None, str(value.mixing)
    if value.count is not None:
        return None, f"{value.kind.value}, divided by a sum over the examples"
    return None, "it depends on the number of examples" if value.kind != Relation.ROWS else "its rows are in another order"


def _same_everywhere(loss: TracedLoss) -> frozenset[int]:
    """The leaves that are the same for all microbatches, such as a parameter: one of these is the value, to the last bit."""
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


def _fixed(aval: Aval, reducer: Reducer | None) -> tuple[object, ...]:
    """What of a value is the same of all microbatches: all but the number of rows that are joined."""
    rows = reducer.axis if isinstance(reducer, Join) else len(aval.shape)
    return *aval.shape[:rows], *aval.shape[rows + 1 :], aval.dtype


def check_aux(losses: Sequence[TracedLoss], reducers: Mapping[int, Reducer], num_microbatches: int) -> None:
    """Refuse aux leaves of several microbatches that cannot be put together, or whose shape depends on the microbatch's size."""
    paths = losses[0].aux_paths
    unknown = {k: reducer.why for k, reducer in reducers.items() if isinstance(reducer, Unexamined) and num_microbatches > 1}
    if unknown:
        rule = "outputs of microbatches are put together as a comparison of the function at batches of two sizes says"
        fix = f"{_WHOLE}; or say what to do, {reducing(paths[min(unknown)], 'join')}"
        got = [*unknown.values()][:1] + [f"{losses[0].words.aux} {paths[k] or 'itself'}" for k in unknown]
        raise losses[0].words.error(losses[0].words.where, rule, got, fix)
    shapes = [[describe(aval_of(loss.aux[k])) for loss in losses] for k in range(len(paths))]
    where, name, error = losses[0].words.where, losses[0].words.aux, losses[0].words.error
    wrong = [
        f"{name} {path or 'itself'}: {' and '.join(dict.fromkeys(described))}"
        for k, (path, described) in enumerate(zip(paths, shapes, strict=True))
        if len({_fixed(aval_of(loss.aux[k]), reducers.get(k)) for loss in losses}) > 1
    ]
    if wrong:
        rule = f"an {name} leaf has one shape at all microbatches, unless it is joined along the axis of the examples"
        fix = f"reduce it in {where}, move the examples to the first axis and join, or let num_microbatches divide the batch size"
        raise error(where, rule, wrong, fix)
