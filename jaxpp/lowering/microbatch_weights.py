"""The weights of the microbatches, where the user says what they are: one program, run once a step.

Weights without a mean make a step of NaN: constant ones are refused when traced, others looked at before a shape's first step.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal
from jax.typing import ArrayLike

from jaxpp.errors import LossError
from jaxpp.lowering.builder import Name
from jaxpp.stages.fingerprint import ComparableFunction, fingerprint
from jaxpp.stages.graph import Graph, descendants, trace
from jaxpp.stages.jaxpr import describe, shapes_of, variables
from jaxpp.stages.loss.microbatch import Microbatches, Split, first_of, scale_dtype, slice_batch
from jaxpp.stages.program import Program, Ref, Role
from jaxpp.types import Array, Aval, Batch, Leaf


@runtime_checkable
class Sharing(Protocol):
    """What says not how much a microbatch weighs, but which share each has, which need not add up to 1."""

    def shares(self, pieces: Sequence[Batch], counted: Sequence[bool]) -> Array:
        """The share of each microbatch; none where it is not ``counted``."""
        ...


@dataclass
class Weights:
    """The weights of the microbatches of batches of one shape."""

    program: Program  # computes each microbatch's share of the total weight, from the batch leaves it needs
    run: Callable[..., list[Array]]  # computes the weights themselves, from the same leaves
    places: tuple[int, ...]  # of these leaves among all that are given
    looked: bool = False

    def look(self, leaves: Sequence[Leaf]) -> None:
        """Refuse the first batch if its weights have no mean; a batch of which parts are in other processes is not looked at."""
        used = [leaves[place] for place in self.places]
        if all(map(_is_whole, used)):
            _check([float(value) for value in jax.jit(self.run)(*map(_on_host, used))])
        self.looked = True


def weigh(
    weight: Callable[[Batch], ArrayLike],
    batch: Batch,
    given: Sequence[Name],
    shared: Collection[int],
    split: Split,
    num_replicas: int,
) -> Weights:
    """What computes every microbatch's share of the total weight, from leaves that are ``given`` by these names.

    The leaves of a batch of several replicas have these in front.
    """
    parts, tree = split.sizes, jax.tree.structure(first_of(batch))
    leaves, count = list(jax.tree.leaves(batch)), tree.num_leaves
    lead = (num_replicas,) if num_replicas > 1 else ()
    for place, name in enumerate(given):
        if not name.ref.shared:
            leaf = leaves[place]
            leaves[place] = jax.ShapeDtypeStruct((*lead, *leaf.shape), leaf.dtype, weak_type=leaf.weak_type)

    def pieces(row: Sequence[Array]) -> Sequence[Sequence[Leaf]]:
        if isinstance(batch, Microbatches):
            return [row[k : k + count] for k in range(0, len(row), count)]
        return slice_batch(row, parts, shared)

    def scales(*values: Array) -> list[Array]:
        rows = [values]
        if lead:
            pairs = list(zip(values, given, strict=True))
            rows = [[leaf if name.ref.shared else leaf[r] for leaf, name in pairs] for r in range(num_replicas)]
        parts_of = [tree.unflatten(piece) for row in rows for piece in pieces(row)]
        counts = np.ones((num_replicas, len(parts)))
        counts[num_replicas - split.num_idle :, -1] = 0
        if isinstance(weight, Sharing):
            shares = weight.shares(parts_of, [bool(count) for count in counts.ravel()])
            return [shares.reshape(*lead, len(parts)), *jnp.where(jnp.isfinite(shares), 1.0, shares)]
        weights = [jnp.asarray(weight(part)) for part in parts_of]
        if odd := [describe(value) for value in weights if value.shape != ()]:
            raise LossError("weight", "a weight is one scalar a microbatch", odd[0], "reduce it, for example with .sum()")
        stacked = jnp.where(counts.ravel() > 0, jnp.stack(weights).astype(scale_dtype()), 0)
        return [(stacked / stacked.sum()).reshape(*lead, len(parts)), *weights]

    graph, _ = trace(scales, *leaves)
    _check_constants(graph)
    read = set(variables(atom for eqn in graph.eqns for atom in eqn.invars))
    used = [k for k, var in enumerate(graph.inputs) if var in read]
    run = graph.function(range(len(graph.eqns)), [*(graph.inputs[k] for k in used), *graph.constants], graph.outputs)
    values = list(graph.constants.values())
    refs = tuple(given[place].ref for place in used)
    shapes = shapes_of(leaves[k] for k in used)
    does = fingerprint(graph.eqns, [graph.inputs[k] for k in used], graph.outputs[:1], graph.constants)
    scale = ComparableFunction(lambda *args: run(*args, *values)[:1], does)
    program = Program(scale, refs, (Ref(Role.SCALE),), shapes, spans=bool(lead), name="weigh")
    return Weights(program, lambda *args: run(*args, *values)[1:], tuple(used))


def given_weights(aval: Aval, name: Name, place: int, num_replicas: int) -> Weights:
    """The shares of weights that are given as the last leaf of the microbatches; what replicas have of one weighs the same."""

    def scales(weights: Array) -> list[Array]:
        weights = weights.astype(scale_dtype())
        shares = weights / weights.sum() / num_replicas
        return [shares if num_replicas == 1 else jnp.broadcast_to(shares, (num_replicas, *shares.shape))]

    function, shapes = ComparableFunction(scales, ("shares", num_replicas)), shapes_of([aval])
    program = Program(function, (name.ref,), (Ref(Role.SCALE),), shapes, spans=num_replicas > 1, name="weigh")
    return Weights(program, list, (place,))


def _check_constants(graph: Graph) -> None:
    of_batch = descendants(graph, graph.inputs)
    fixed = [atom for atom in graph.outputs[1:] if isinstance(atom, Literal) or atom not in of_batch]
    if fixed:
        eqns = [i for i, eqn in enumerate(graph.eqns) if of_batch.isdisjoint(eqn.outvars)]
        run = graph.function(eqns, list(graph.constants), fixed)
        values = [float(value) for value in run(*graph.constants.values())]
        _check(values, whole=len(fixed) == len(graph.outputs) - 1)


def _check(weights: Sequence[float], *, whole: bool = True) -> None:
    if all(map(math.isfinite, weights)) and (sum(weights) != 0 or not whole):
        return
    rule = "the loss is a mean over microbatches, so their weights are finite numbers that do not add up to 0"
    fix = "return how much of a microbatch counts, such as the number of its tokens, and leave out batches in which nothing does"
    raise LossError("weight", rule, [f"microbatch {k}: {value:g}" for k, value in enumerate(weights)], fix)


def _is_whole(leaf: Leaf) -> bool:
    return leaf.is_fully_addressable if isinstance(leaf, jax.Array) else isinstance(leaf, np.ndarray) or np.isscalar(leaf)


def _on_host(leaf: Leaf) -> Leaf:
    return leaf if jnp.issubdtype(jax.dtypes.result_type(leaf), jax.dtypes.extended) or np.isscalar(leaf) else np.asarray(leaf)
