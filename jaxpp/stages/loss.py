"""The loss, traced at one microbatch's shapes, with the role of every value known.

Three kinds of equations come out:

* *spine*: depends on the data, and is worth sending; the only equations a cut divides. What depends on data but on no parameter
  (a dropout mask, a count of tokens) sinks to its first reader, so that it is made where it is used.
* *static*: depends on parameters (or on nothing) alone; each stage that needs it computes it itself, once per step.
* *cheap*: made of the batch or the key by elementwise and layout operations (a mask, positions, shifted labels); each stage that
  needs it makes it again, and only the batch leaf travels.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal, Var

from jaxpp.errors import LossError, ParamsError
from jaxpp.stages.cost import count_bytes, count_flops
from jaxpp.stages.graph import Graph, aval_of, descendants, inline_remat, trace, variables
from jaxpp.types import LossFn

__all__ = [
    "CHEAP",
    "LAYOUT",
    "TracedLoss",
    "cheap_values",
    "check_floating",
    "describe",
    "key_implementation",
    "path_name",
    "trace_loss",
]

LAYOUT = frozenset("broadcast_in_dim reshape squeeze expand_dims iota copy stop_gradient".split())
"""Operations that only say how a value is laid out; the compiler folds them away."""
CHEAP = LAYOUT | frozenset(
    "convert_element_type slice select_n transpose rev pad concatenate eq ne lt le gt ge and or not xor add sub mul div rem neg "
    "max min abs sign exp log sqrt rsqrt pow integer_pow clamp floor ceil round is_finite shift_left shift_right_logical "
    "shift_right_arithmetic bitcast_convert_type random_wrap random_unwrap random_fold_in random_split random_seed "
    "random_clone square".split()
)
"""Operations that cost less to do again than their result costs to send."""


def describe(aval: Any) -> str:
    """A shape as people write it: ``f32[8,64]``."""
    short = {"float": "f", "int": "i", "uint": "u", "bfloat": "bf", "complex": "c"}
    name = str(aval.dtype)
    letters = name.rstrip("0123456789")
    return f"{short.get(letters, letters)}{name[len(letters) :]}[{','.join(map(str, aval.shape))}]"


@dataclass(frozen=True)
class TracedLoss:
    """The flat graph of a loss and the roles of its inputs and outputs.

    Attributes:
        graph: inputs are the parameter leaves, the batch leaves, then the raw key if there is one; outputs the loss, then aux.
        param_paths: the tree path of each parameter leaf, as ``h_2/attn/kernel``.
        num_batch_leaves: how many batch leaves there are.
        aux_tree: the structure of aux.
        remat: checkpoints a stage the way the user checkpointed the whole loss, or None.
        frozen: the parameter leaves whose gradient nobody wants.
    """

    graph: Graph
    param_paths: tuple[str, ...]
    num_batch_leaves: int
    aux_tree: Any
    remat: Callable[[Callable[..., Any]], Callable[..., Any]] | None
    frozen: frozenset[int] = frozenset()

    @cached_property
    def params(self) -> tuple[Var, ...]:
        """One variable a parameter leaf."""
        return self.graph.inputs[: len(self.param_paths)]

    @cached_property
    def batch(self) -> tuple[Var, ...]:
        """One variable a batch leaf."""
        return self.graph.inputs[len(self.params) :][: self.num_batch_leaves]

    @cached_property
    def key(self) -> Var | None:
        """The raw key, if the loss takes one."""
        rest = self.graph.inputs[len(self.params) + self.num_batch_leaves :]
        return rest[0] if rest else None

    @cached_property
    def of_params(self) -> set[Var]:
        """Everything that depends on a parameter."""
        return descendants(self.graph, self.params)

    @cached_property
    def carries(self) -> set[Var]:
        """Everything on a way from a parameter that wants a gradient to the loss: what has a cotangent."""
        graph, wanted = self.graph, {var for k, var in enumerate(self.params) if k not in self.frozen}
        for eqn in graph.eqns:
            if _passes(eqn) and not wanted.isdisjoint(variables(eqn.invars)):
                wanted.update(filter(_is_inexact, eqn.outvars))
        reaching = set(variables(graph.outputs[:1]))
        for eqn in reversed(graph.eqns):
            if _passes(eqn) and not reaching.isdisjoint(eqn.outvars):
                reaching.update(filter(_is_inexact, variables(eqn.invars)))
        return wanted & reaching

    @cached_property
    def of_data(self) -> set[Var]:
        """Everything that depends on the batch or the key."""
        return descendants(self.graph, self.graph.inputs[len(self.params) :])

    @cached_property
    def spine(self) -> tuple[int, ...]:
        """The equations that a cut divides, in the order they run."""
        graph = self.graph
        cheap = cheap_values(graph, self.batch, () if self.key is None else (self.key,), self.of_params)
        results = set(variables(graph.outputs[1:]))
        users = graph.users()
        due = [math.inf] * len(graph.eqns)
        chosen = []
        for i in reversed(range(len(graph.eqns))):
            eqn = graph.eqns[i]
            outs = set(eqn.outvars)
            if not self.of_params.isdisjoint(outs) and not self.of_data.isdisjoint(outs):
                due[i] = i
            else:
                due[i] = min((due[j] for var in outs for j in users.get(var, ())), default=math.inf)
            floating = self.of_data.isdisjoint(outs) or outs <= cheap or not results.isdisjoint(outs)
            if eqn.effects or not floating:
                chosen.append(i)
        return tuple(sorted(chosen, key=lambda i: (due[i], i)))

    @cached_property
    def costs(self) -> tuple[float, ...]:
        """FLOPs of the forward of each spine equation."""
        return tuple(count_flops(self.graph.eqns[i]) for i in self.spine)

    @cached_property
    def last_uses(self) -> dict[Var, int]:
        """The last spine position at which each value is needed, directly or through what is made again from it."""
        position = {eqn: k for k, eqn in enumerate(self.spine)}
        last: dict[Var, int] = {}
        for i in reversed(range(len(self.graph.eqns))):
            eqn = self.graph.eqns[i]
            at = position.get(i, max((last[var] for var in eqn.outvars if var in last), default=-1))
            for var in variables(eqn.invars):
                last[var] = max(last.get(var, -1), at)
        return last

    @cached_property
    def boundary_bytes(self) -> tuple[int, ...]:
        """``boundary_bytes[k]``: bytes that cross a cut between spine positions k - 1 and k."""
        crossing = [0] * (len(self.spine) + 1)
        for k, i in enumerate(self.spine):
            for var in self.graph.eqns[i].outvars:
                end = self.last_uses.get(var, -1)
                if end > k:
                    crossing[k + 1] += count_bytes(var.aval)
                    crossing[end + 1] -= count_bytes(var.aval)
        for k in range(1, len(crossing)):
            crossing[k] += crossing[k - 1]
        return tuple(crossing)

    @cached_property
    def param_uses(self) -> tuple[frozenset[int], ...]:
        """The parameter leaves that each spine equation needs, directly or through static values."""
        spine = set(self.spine)
        needs: dict[Var, frozenset[int]] = {var: frozenset([k]) for k, var in enumerate(self.params)}
        found: dict[int, frozenset[int]] = {}
        for i, eqn in enumerate(self.graph.eqns):
            uses = frozenset().union(*(needs.get(var, frozenset()) for var in variables(eqn.invars)))
            if i in spine:
                found[i] = uses
            else:
                needs.update((var, uses) for var in eqn.outvars)
        return tuple(found[i] for i in self.spine)


def _passes(eqn: Any) -> bool:
    """Whether gradients go through an equation."""
    return eqn.primitive.name != "stop_gradient"


def _is_inexact(var: Var) -> bool:
    return jnp.issubdtype(aval_of(var).dtype, jnp.inexact)


def cheap_values(graph: Graph, leaves: Sequence[Var], free: Sequence[Var], barred: set[Var]) -> set[Var]:
    """The values made from ``leaves`` and ``free`` by cheap operations alone, and not smaller than the leaves they need.

    Args:
        graph: where they are made.
        leaves: inputs that would have to travel along; those together may take at most twice the bytes of the value.
        free: inputs that are everywhere anyway (the key).
        barred: values that are never made again (what depends on parameters).
    """
    sources: dict[Var, frozenset[Var]] = {var: frozenset([var]) for var in leaves} | {var: frozenset() for var in free}
    made = set()
    for eqn in graph.eqns:
        needs = variables(eqn.invars)
        moving = [var for var in needs if var in sources]
        foreign = any(var in barred or (var in made and var not in sources) for var in needs)
        made.update(eqn.outvars)
        if eqn.primitive.name in CHEAP and not foreign and not eqn.effects:
            union = frozenset().union(*(sources[var] for var in moving))
            sources.update((var, union) for var in eqn.outvars)
    inputs = {*leaves, *free}
    return {
        var
        for var, needs in sources.items()
        if var not in inputs and sum(count_bytes(leaf.aval) for leaf in needs) <= 2 * count_bytes(var.aval)
    }


def path_name(path: tuple[Any, ...]) -> str:
    """A tree path as ``h_2/attn/kernel``."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def trace_loss(
    loss_fn: LossFn,
    params: Any,
    batch: Any,
    key: Any,
    *,
    has_aux: bool,
    differentiable: bool = True,
    frozen: frozenset[int] = frozenset(),
) -> TracedLoss:
    """Trace ``loss_fn(params, batch[, key])`` at the shapes given, and check that it is a loss.

    Args:
        loss_fn: the user's loss.
        params: tree of arrays or shapes.
        batch: tree of shapes of one microbatch.
        key: a key, its shape, or None when the loss takes none.
        has_aux: whether the loss returns ``(loss, aux)``.
        differentiable: whether gradients will be asked for, which needs a loss that depends on its parameters.
        frozen: the parameter leaves whose gradient nobody wants.

    Raises:
        LossError: the result is not a float scalar (or a pair, with ``has_aux``), or depends on no parameter.
    """
    param_leaves, param_tree = jax.tree_util.tree_flatten_with_path(params)
    batch_leaves, batch_tree = jax.tree.flatten(batch)
    keys, wrap = _raw_key(key)
    aux_trees: list[Any] = []

    def flat(leaves: list[Any], batch_leaves: list[Any], keys: list[Any]) -> tuple[Any, list[Any]]:
        args = (param_tree.unflatten(leaves), batch_tree.unflatten(batch_leaves), *map(wrap, keys))
        loss, aux = _check_result(loss_fn(*args), has_aux)
        aux_leaves, aux_tree = jax.tree.flatten(aux)
        aux_trees.append(aux_tree)
        return loss, [jnp.array(leaf, copy=True) for leaf in aux_leaves]

    try:
        graph, _ = trace(flat, [leaf for _, leaf in param_leaves], batch_leaves, keys)
    except Exception as error:
        if not isinstance(error, LossError):
            shapes = ", ".join(describe(leaf) for leaf in batch_leaves)
            error.add_note(f"jaxpp: raised while tracing the loss for one microbatch, batch leaves {shapes}")
        raise
    graph, remat = inline_remat(graph)
    paths = tuple(path_name(path) for path, _ in param_leaves)
    traced = TracedLoss(graph, paths, len(batch_leaves), aux_trees[-1], remat, frozen)
    loss = graph.outputs[0]
    if differentiable and (isinstance(loss, Literal) or loss not in traced.of_params):
        raise LossError(
            "loss_fn",
            "the loss must depend on its parameters, or there is nothing to train",
            f"a loss that reads none of the {len(paths)} parameter leaves",
            "compute the loss from the params argument, not from arrays the function closed over",
        )
    return traced


def check_floating(leaves: Sequence[tuple[Any, Any]]) -> None:
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
        raise ParamsError(
            where,
            "every parameter leaf must be an array of floating type, because its gradient is",
            wrong,
            "make scalars arrays; keep integer and boolean leaves out of params (close over them, or pass them in the batch)",
        )


def key_implementation(key: Any) -> str | None:
    """The implementation of a typed key; None for a raw one (or none at all)."""
    if key is None or not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        return None
    found: list[str] = []
    jax.eval_shape(lambda key: found.append(str(jax.random.key_impl(key))), key)  # a shape will do
    return found[0]


def _raw_key(key: Any) -> tuple[list[Any], Callable[[Any], Any]]:
    if key is None:
        return [], lambda data: data
    implementation = key_implementation(key)
    if implementation is None:
        return [key], lambda data: data
    return [jax.eval_shape(jax.random.key_data, key)], lambda data: jax.random.wrap_key_data(data, impl=implementation)


def _check_result(result: Any, has_aux: bool) -> tuple[Any, Any]:
    if has_aux:
        if not isinstance(result, tuple) or len(result) != 2:
            raise LossError(
                "loss_fn",
                "with has_aux=True the function returns a pair (loss, aux)",
                type(result).__name__,
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
    if aval.shape != () or not jnp.issubdtype(aval.dtype, jnp.floating):
        raise LossError("loss_fn", "the loss is one float scalar", describe(aval), "reduce it, for example with .mean()")
    return loss, aux
