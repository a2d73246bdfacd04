"""What a generation runs: the passes of one sequence and of a group, at the shapes of the user's carry, and where they live."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpp.engine.engine import Engine
from jaxpp.engine.tracing import avals_of
from jaxpp.forward.capacity import capacity
from jaxpp.forward.functions import Functions
from jaxpp.forward.groups import Carries, Group, batch_axes
from jaxpp.forward.passes import Lasting, Passes
from jaxpp.forward.places import Admitted, chunk_sizes
from jaxpp.forward.sampling import Sampler
from jaxpp.forward.sequences import NextToken, SequenceCarry, group_of, sequence_of
from jaxpp.plan.step import Leaves
from jaxpp.runtime.execute import Observer
from jaxpp.stages.graph import Graph, trace
from jaxpp.stages.program import Ref, Role
from jaxpp.stages.stacked import concatenated, joined
from jaxpp.types import Array, Aval, ForwardFn, Key, Tree

__all__ = ["AHEAD", "Ring", "Taken", "passes_of", "prompts_of", "ring_of", "sizes_of"]

AHEAD = 2
"""Turns that are handed over before the tokens of the first of them are read."""


class Taken(NamedTuple):
    """What prompts a function takes.

    Attributes:
        sizes: how many tokens a pass of a prompt may take, the largest first.
        room: how many tokens the carry has room for; None if that is not known.
        vocab: for how many tokens there are logits; None if that is not known.
    """

    sizes: tuple[int, ...]
    room: int | None
    vocab: int | None


@dataclass(frozen=True)
class Ring:
    """What a generation runs.

    Attributes:
        alone: the passes of one sequence, in which prompts are prefilled.
        together: the passes of a group; the same if a group is one sequence.
        carries: makes carries and puts them into groups.
        num_groups: groups in flight.
        key_of: the raw key of a sequence, by its number.
    """

    alone: Passes
    together: Passes
    carries: Carries
    num_groups: int
    key_of: Callable[[int], Array]

    def prefill(self, prompt: Admitted, observer: Observer | None) -> tuple[list[Array], NextToken]:
        """Run a prompt through the stages in chunks: its carry, and its first token."""
        carry, drawn, start = self.carries.new(self.key_of(prompt.prompt)), None, 0
        for size in prompt.chunks:
            carry, drawn = self.alone(carry, np.array(prompt.tokens[None, start : start + size], np.int32), observer)
            start += size
        assert drawn is not None
        return carry, drawn

    def turn(self, group: Group, observer: Observer | None) -> NextToken:
        """One token for every sequence of a group."""
        assert group.carry is not None
        group.carry, drawn = self.together(group.carry, group.tokens, observer)
        group.tokens = drawn.token
        return drawn


def ring_of(
    engine: Engine,
    leaves: Leaves[Array],
    functions: Functions,
    fn: ForwardFn,
    carry: Tree,
    *,
    sampler: Sampler,
    key: Key,
    num_groups: int,
    group_size: int,
) -> Ring:
    """Cut the function that makes the next token, compile its passes, and say where the carries live.

    Args:
        engine: whose parameters are used.
        leaves: the parameters, each on its owner.
        functions: keeps the cut functions.
        fn: ``fn(params, carry, tokens) -> (carry, logits)``, as the engine calls it.
        carry: of one sequence that has had no token.
        sampler: how tokens are drawn.
        key: from which the key of each sequence is folded.
        num_groups: groups in flight.
        group_size: sequences in a group.

    Raises:
        OutputError: the function returns no pair of a like carry and logits.
        Exception: what the function raises, unchanged, with a note.
    """
    empty = SequenceCarry(carry, jax.random.key_data(key), jnp.int32(0))
    alone, together = passes_of(engine, Lasting(leaves), functions, fn, carry, sampler=sampler, key=key, group_size=group_size)
    last = engine.placement.places[-1]
    return Ring(
        alone=alone,
        together=together,
        carries=Carries(alone, empty, group_size, last.home(Ref(Role.AUX, shared=True))),
        num_groups=num_groups,
        key_of=lambda number: _folded(key, np.uint32(number)),
    )


@jax.jit
def _folded(key: Key, number: Array) -> Array:
    """The raw key of a sequence."""
    return jax.random.key_data(jax.random.fold_in(key, number))


def passes_of(
    engine: Engine,
    lasting: Lasting,
    functions: Functions,
    fn: ForwardFn,
    carry: Tree,
    *,
    sampler: Sampler,
    key: Key,
    group_size: int,
) -> tuple[Passes, Passes]:
    """The passes of one sequence and those of a group, which are the same if a group is one sequence; each compiled for one token.

    The arguments are those of ``ring_of``; of the carry, shapes will do.
    """
    implementation = str(jax.random.key_impl(key))
    state = SequenceCarry(carry, jax.eval_shape(jax.random.key_data, key), jnp.int32(0))
    sequence, shapes = sequence_of(fn, sampler, implementation), avals_of(_as_arrays(state))
    given = {"reduce_aux": "last", "carry": shapes}
    alone = Passes(functions.engine(engine, sequence, _tokens(1), None, **given), lasting)
    together = alone
    if group_size > 1:
        axes = jax.tree.structure(shapes).unflatten(axis for axis, _ in batch_axes(alone.engine.layout.variables[1][0]))
        given["carry"] = jax.tree.map(lambda aval, axis: _with_axis(aval, axis, group_size), shapes, axes)
        batch = np.zeros((group_size, 1, 1), np.int32)
        found = functions.engine(engine, group_of(sequence, axes), batch, None, like=alone.engine, **given)
        together = Passes(found, lasting)
        together.prepare(batch)
    alone.prepare(_tokens(1))
    return alone, together


def _as_arrays(tree: Tree) -> Tree:
    """Leaves that are numbers as arrays; shapes stay."""
    return jax.tree.map(lambda leaf: leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jnp.asarray(leaf), tree)


def _tokens(length: int) -> np.ndarray:
    return np.zeros((1, length), np.int32)


def _takes(fn: ForwardFn, params: Tree, carry: Tree, length: int) -> bool:
    """Whether a function takes so many tokens at once: more than fit into the carry, or more than one, may be too many."""
    try:
        jax.eval_shape(fn, params, carry, jax.ShapeDtypeStruct((1, length), np.int32))
    except Exception:  # noqa: BLE001  (what is wrong at one token too is said when that is traced)
        return False
    return True


def _with_axis(aval: Aval, axis: int, size: int) -> Aval:
    return jax.ShapeDtypeStruct((*aval.shape[:axis], size, *aval.shape[axis:]), aval.dtype)


def prompts_of(engine: Engine, functions: Functions, fn: ForwardFn, carry: Tree, chunk: int) -> Taken:
    """What prompts the function takes.

    A model that takes one token a call (Flax's attention with ``decode=True``) is known by that it cannot be traced at more. Nor
    can a model whose cache is shorter than a chunk, so it gets smaller chunks.
    """
    sizes, traced = _sizes_and_graph(engine, functions, fn, carry, chunk)
    if traced is None:
        return Taken(sizes, None, None)
    graph, shapes = traced
    first, count = len(jax.tree.leaves(engine.layout.given[0])), sizes[-2:][0]
    return Taken(sizes, capacity(graph, jax.tree.leaves(carry), first=first, num_tokens=count), _vocab_of(shapes))


def _vocab_of(result: Tree) -> int | None:
    """For how many tokens there are logits, by the shapes of what the function returns; None if it returns none."""
    match result:
        case (_, Aval(shape=(_, *_, vocab), dtype=dtype)) if jnp.issubdtype(dtype, jnp.floating):
            return vocab
    return None


def sizes_of(engine: Engine, functions: Functions, fn: ForwardFn, carry: Tree, chunk: int) -> tuple[int, ...]:
    """How many tokens a pass of a prompt may take, the largest first; of the carry, shapes will do."""
    return _sizes_and_graph(engine, functions, fn, carry, chunk)[0]


def _sizes_and_graph(
    engine: Engine, functions: Functions, fn: ForwardFn, carry: Tree, chunk: int
) -> tuple[tuple[int, ...], tuple[Graph, Tree] | None]:
    shapes = avals_of(carry)
    params = jax.eval_shape(lambda tree: joined(tree, concatenated), engine.layout.params)

    def look() -> tuple[tuple[int, ...], tuple[Graph, Tree] | None]:
        sizes = tuple(size for size in chunk_sizes(chunk) if size == 1 or _takes(fn, params, shapes, size))
        try:
            return sizes, trace(fn, params, shapes, jax.ShapeDtypeStruct((1, sizes[-2:][0]), np.int32))
        except Exception:  # noqa: BLE001
            return sizes, None

    leaves, tree = jax.tree.flatten(shapes)
    name = "prompts", id(engine), fn, tree, tuple((leaf.shape, leaf.dtype) for leaf in leaves), chunk
    return functions.remember(name, engine, look)
