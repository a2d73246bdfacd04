"""The function that makes the next token: the user's, with the sampling of the token behind it.

``sequence_of`` makes of ``fn(params, carry, tokens) -> (carry, logits)`` a function of one sequence that returns the next token
instead of the logits, so that only the token leaves the last stage. Its carry holds, beside the user's, the key of the sequence
and how many tokens the sequence has had. ``group_of`` is the same for several sequences at once: ``jax.vmap`` over their carries,
so that each has its own length and its own end.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int, UInt32

from jaxpp.errors import OutputError
from jaxpp.forward.sampling import Sampler, draw
from jaxpp.stages.jaxpr import describe
from jaxpp.types import Array, Aval, ForwardFn, Tree

__all__ = ["NextToken", "SequenceCarry", "group_of", "sequence_of"]

_FN = "fn(params, carry, tokens)"
"""What messages call the user's function."""


class SequenceCarry(NamedTuple):
    """What a sequence carries from pass to pass.

    Attributes:
        model: the user's carry: a cache, the state of a recurrent network.
        key: the raw key of the sequence, from which each token's key is folded.
        length: the tokens that the sequence has had.
    """

    model: Tree
    key: UInt32[Array, " words"]
    length: Int[Array, ""]


class NextToken(NamedTuple):
    """What a pass makes.

    Attributes:
        token: the next token, ``[1, 1]``, as the next pass takes it.
        logprob: the logarithm of its probability in the model's own distribution.
    """

    token: Int[Array, "1 1"]
    logprob: Float[Array, ""]


@dataclass(frozen=True)
class _Sequence:
    fn: ForwardFn
    sampler: Sampler
    implementation: str

    def __call__(self, params: Tree, carry: SequenceCarry, tokens: Int[Array, "1 length"]) -> tuple[SequenceCarry, NextToken]:
        result = self.fn(params, carry.model, tokens)
        if not isinstance(result, tuple) or len(result) != 2:
            got = f"a tuple of {len(result)}" if isinstance(result, tuple) else _called(result)
            raise OutputError(_FN, "it returns a pair (new_carry, logits)", got, "return the new carry, and the logits")
        model, logits = result
        _check_model(carry.model, model)
        length = carry.length + tokens.shape[1]
        key = jax.random.fold_in(jax.random.wrap_key_data(carry.key, impl=self.implementation), length)
        token, logprob = draw(self.sampler, _last(logits, tokens.shape[1]), key)
        return SequenceCarry(model, carry.key, length), NextToken(token.reshape(1, 1), logprob)

    @property
    def __name__(self) -> str:
        return getattr(self.fn, "__name__", "fn")


@dataclass(frozen=True)
class _Group:
    sequence: _Sequence
    axes: tuple[int, ...]

    def __call__(self, params: Tree, carry: SequenceCarry, tokens: Int[Array, "sequences 1 1"]) -> tuple[SequenceCarry, NextToken]:
        axes = jax.tree.structure(carry).unflatten(self.axes)
        return jax.vmap(self.sequence, (None, axes, 0), (axes, 0))(params, carry, tokens)

    @property
    def __name__(self) -> str:
        return self.sequence.__name__


def sequence_of(fn: ForwardFn, sampler: Sampler, implementation: str) -> _Sequence:
    """The function of one sequence: ``(params, SequenceCarry, tokens [1, length]) -> (SequenceCarry, NextToken)``.

    Args:
        fn: ``fn(params, carry, tokens) -> (carry, logits)``.
        sampler: how tokens are drawn.
        implementation: of the keys.
    """
    return _Sequence(fn, sampler, implementation)


def group_of(sequence: _Sequence, axes: Tree) -> _Group:
    """The function of several sequences: leaves of the carry have one more axis, numbered in ``axes``, and tokens one in front."""
    return _Group(sequence, tuple(jax.tree.leaves(axes)))


def _check_model(old: Tree, new: Tree) -> None:
    """Refuse a new carry that is not like the old one."""
    before, after = (dict(jax.tree_util.tree_leaves_with_path(tree)) for tree in (old, new))
    name = jax.tree_util.keystr
    wrong = [f"carry{name(path)} is missing in the new carry" for path in before if path not in after]
    wrong += [f"carry{name(path)} is new" for path in after if path not in before]
    shapes = {path: jax.eval_shape(jnp.asarray, leaf) for path, leaf in after.items() if path in before}
    wrong += [
        f"carry{name(path)}: {describe(before[path])} becomes {describe(shape)}"
        for path, shape in shapes.items()
        if (shape.shape, shape.dtype) != (before[path].shape, before[path].dtype)
    ]
    if not wrong and jax.tree.structure(old) != jax.tree.structure(new):
        wrong = [f"{jax.tree.structure(old)} becomes {jax.tree.structure(new)}"]
    if wrong:
        rule = "the new carry has the tree, the shapes and the types of the old one, so that a pass can follow on another"
        fix = "return every leaf, changed or not, write into a cache of fixed size, and cast with .astype(old.dtype)"
        raise OutputError(_FN, rule, wrong, fix)


def _last(logits: Tree, length: int) -> Float[Array, " vocab"]:
    """The logits of the last position.

    Raises:
        OutputError: they are not the logits of one sequence.
    """
    if isinstance(logits, jax.Array | np.ndarray) and logits.shape[:1] == (1,) and jnp.issubdtype(logits.dtype, jnp.floating):
        if logits.ndim == 2:
            return jnp.asarray(logits[0])
        if logits.ndim == 3 and logits.shape[1] in (1, length):
            return jnp.asarray(logits[0, -1])
    rule = f"it returns the logits of the next token: floats [1, {length}, vocab], or [1, vocab] of the last position"
    raise OutputError(_FN, rule, _called(logits), "return (new_carry, logits) for a batch of one sequence")


def _called(result: Tree) -> str:
    """What a function returned, as people call it."""
    if result is None or isinstance(result, Aval):
        return "None" if result is None else f"one array, {describe(result)}"
    return f"a {type(result).__name__}"
