"""Groups of sequences on the stages: their carries, where each leaf lives, and how a sequence enters a place of a group."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxpp.forward.passes import Passes
from jaxpp.forward.sequences import SequenceCarry
from jaxpp.runtime.transfer import put
from jaxpp.stages.stacked import Slices, is_slices, split_like
from jaxpp.types import Array, ForwardFn, Home, Tree

__all__ = ["Carries", "Group", "batch_axes"]


@dataclass
class Group:
    """Sequences that go through the stages together.

    Attributes:
        carry: its leaves, each on its stage; None before the first sequence has entered.
        tokens: what the next pass takes, on the last stage.
    """

    carry: list[Array] | None = None
    tokens: Array | None = None


class Carries:
    """Makes the carries of sequences, each leaf on its stage, and puts them into groups.

    Args:
        alone: the passes of one sequence.
        empty: the carry of a sequence that has had no token: a ``SequenceCarry``.
        size: sequences in a group.
        tokens_home: where tokens are made.
    """

    def __init__(self, alone: Passes, empty: SequenceCarry, size: int, tokens_home: Home):
        homes, self.size = alone.carry_homes, size
        known, copies = alone.engine.layout.variables[1][0], alone.engine.layout.copies
        held = split_like(jax.tree.leaves(empty), known)
        self._key = len(held) - 2  # a SequenceCarry ends with its key and its length, and before them are the model's leaves
        axes = [axis for axis, parts in batch_axes(known) for _ in range(parts)]
        axes += [axes[leaf] for leaf, _ in copies]
        held += [held[leaf] for leaf, _ in copies]
        stages = alone.carry_stages
        mine = [[k for k, stage in enumerate(stages) if stage == each] for each in sorted(set(stages))]
        self._by_stage = [(leaves, tuple(axes[k] for k in leaves)) for leaves in mine]
        self._empty = [put(leaf, home) for leaf, home in zip(held, homes, strict=True)]
        self._key_home, self._tokens_home = homes[self._key], tokens_home

    def new(self, key: Array) -> list[Array]:
        """The carry of a sequence that has had no token, and has this raw key."""
        made = self._run(_copies, self._empty)
        made[self._key] = put(key, self._key_home)
        return made

    def enter(self, group: Group, place: int, carry: list[Array], token: Array) -> None:
        """Put a sequence that was prefilled alone into a place of a group, with the token that was drawn for it."""
        if self.size == 1:
            group.carry, group.tokens = carry, token
            return
        if group.carry is None or group.tokens is None:
            group.carry = self._run(partial(_stacked, self.size), self._empty)
            group.tokens = put(np.zeros((self.size, 1, 1), np.int32), self._tokens_home)
        group.carry = self._run(partial(_inserted, np.int32(place)), group.carry, carry)
        group.tokens = _replaced(np.int32(place), group.tokens, token)  # the host has yet to read the old ones

    def _run(self, function: ForwardFn, *lists: Sequence[Array]) -> list[Array]:
        """Run a function on the leaves of each stage, where they live."""
        made: list[Array] = list(lists[0])
        for mine, axes in self._by_stage:
            for k, leaf in zip(mine, function(axes, *([leaves[k] for k in mine] for leaves in lists)), strict=True):
                made[k] = leaf
        return made


def batch_axes(carry: Tree) -> list[tuple[int, int]]:
    """For each leaf of a carry the axis along which a group stacks it, and in how many slices it is held.

    A leaf that is stacked over layers keeps these as its first axis, because a loop runs over them.
    """
    nodes = jax.tree.leaves(carry, is_leaf=is_slices)
    return [(1, len(node.sizes)) if isinstance(node, Slices) else (0, 1) for node in nodes]


@partial(jax.jit, static_argnums=0)
def _copies(axes: Sequence[int], leaves: Sequence[Array]) -> list[Array]:
    del axes
    return [jnp.array(leaf, copy=True) for leaf in leaves]


@partial(jax.jit, static_argnums=(0, 1))
def _stacked(size: int, axes: Sequence[int], leaves: Sequence[Array]) -> list[Array]:
    return [jnp.stack([leaf] * size, axis) for axis, leaf in zip(axes, leaves, strict=True)]


@partial(jax.jit, static_argnums=1, donate_argnums=2)
def _inserted(place: Array, axes: Sequence[int], group: Sequence[Array], one: Sequence[Array]) -> list[Array]:
    triples = zip(axes, group, one, strict=True)
    return [jax.lax.dynamic_update_index_in_dim(leaf, new, place, axis) for axis, leaf, new in triples]


@jax.jit
def _replaced(place: Array, tokens: Array, token: Array) -> Array:
    return jax.lax.dynamic_update_index_in_dim(tokens, token, place, 0)
