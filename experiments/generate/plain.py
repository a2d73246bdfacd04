"""What a pipeline that generates is compared with: the same model on one device, written as a loop.

``one_by_one`` is the oracle of the tokens: one sequence after the other, one token after the other. ``Groups`` is what its time is
compared with: sequences of a group go through the model together, and the host runs ahead of the device.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["DecodeFn", "Drawn", "Groups", "Rule", "chunks", "draw", "one_by_one"]

DecodeFn = Callable[[Any, Any, jax.Array], tuple[Any, jax.Array]]
"""``fn(params, carry, tokens) -> carry, logits``, for one sequence: tokens ``[1, length]``, logits ``[1, length, vocabulary]``."""


class Rule(NamedTuple):
    """How a token is drawn.

    Attributes:
        temperature: what the logits are divided by; 0 takes the most probable token.
        top_k: only so many of the most probable tokens; 0 for all.
    """

    temperature: float
    top_k: int


class Drawn(NamedTuple):
    """A token that was drawn, and its log-probability according to the model."""

    token: int
    logprob: float


def draw(logits: jax.Array, key: jax.Array, rule: Rule) -> jax.Array:
    """The next token.

    Args:
        logits: of every token of the vocabulary.
        key: of this sequence and position.
        rule: how it is drawn.
    """
    logits = logits.astype("float32")
    if rule.temperature == 0:
        return logits.argmax().astype("int32")
    if rule.top_k:
        least = jax.lax.top_k(logits, rule.top_k)[0][-1]
        logits = jnp.where(logits < least, -jnp.inf, logits)
    return jax.random.categorical(key, logits / rule.temperature).astype("int32")


def chunks(length: int, chunk: int) -> list[int]:
    """The parts in which a prompt is read: of ``chunk`` tokens, then of an eighth of that, and so on down to one.

    Example:
        >>> chunks(75, 64)
        [64, 8, 1, 1, 1]
    """
    found, size = [], chunk
    while length:
        found += [size] * (length // size)
        length, size = length % size, max(1, size // 8)
    return found


def read_prompt(fn: DecodeFn, params: Any, carry: Any, prompt: Sequence[int], chunk: int) -> tuple[Any, jax.Array]:
    """The carry after a prompt, and the logits of the token that follows it.

    Args:
        fn: the model.
        params: of the model.
        carry: an empty carry, of one sequence.
        prompt: tokens, at least one.
        chunk: the most that are read at a time.
    """
    done, logits = 0, jnp.zeros((1, 1, 1))
    for size in chunks(len(prompt), chunk):
        carry, logits = fn(params, carry, jnp.asarray(prompt[done : done + size], "int32")[None])
        done += size
    return carry, logits[0, -1]


def one_by_one(
    fn: DecodeFn,
    params: Any,
    carry: Any,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    *,
    rule: Rule,
    key: jax.Array,
    stop: Collection[int] = (),
    chunk: int = 64,
) -> list[list[Drawn]]:
    """What follows each prompt, on one device, one token after the other.

    The token at position q of sequence i, its prompt included, is drawn with ``fold_in(fold_in(key, i), q)``.

    Args:
        fn: the model, jitted or not.
        params: of the model.
        carry: an empty carry, of one sequence.
        prompts: tokens of each sequence.
        num_tokens: the most that are generated for each.
        rule: how they are drawn.
        key: of the whole call.
        stop: tokens that end a sequence.
        chunk: the most tokens of a prompt that are read at a time.
    """

    @jax.jit
    def drawn(logits: jax.Array, i: int, q: int) -> tuple[jax.Array, jax.Array]:
        token = draw(logits, jax.random.fold_in(jax.random.fold_in(key, i), q), rule)
        return token, jax.nn.log_softmax(logits.astype("float32"))[token]

    found: list[list[Drawn]] = []
    for i, prompt in enumerate(prompts):
        now, logits = read_prompt(fn, params, carry, prompt, chunk)
        found.append([])
        for q in range(len(prompt), len(prompt) + num_tokens):
            token, logprob = drawn(logits, i, q)
            found[-1].append(Drawn(int(token), float(logprob)))
            if int(token) in stop:
                break
            now, logits = fn(params, now, jnp.full((1, 1), token, "int32"))
            logits = logits[0, -1]
    return found


class Groups:
    """Sequences of one length, generated on one device in groups that take turns; or, with one group, all of them together.

    Args:
        fn: the model.
        rule: how tokens are drawn.
        chunk: the most tokens of a prompt that are read at a time.
    """

    def __init__(self, fn: DecodeFn, rule: Rule, chunk: int):
        def step(params: Any, carry: Any, token: jax.Array, key: jax.Array, q: jax.Array) -> tuple[Any, jax.Array, jax.Array]:
            carry, logits = fn(params, carry, token[None, None])
            return carry, *drawn(logits[0, -1], key, q)

        def drawn(logits: jax.Array, key: jax.Array, q: jax.Array) -> tuple[jax.Array, jax.Array]:
            token = draw(logits, jax.random.fold_in(key, q), rule)
            return token, jax.nn.log_softmax(logits.astype("float32"))[token]

        self._read, self._drawn, self._chunk = jax.jit(fn), jax.jit(drawn), chunk
        self._step = jax.jit(jax.vmap(step, in_axes=(None, 0, 0, 0, None)), donate_argnums=1)
        self._join = jax.jit(lambda *parts: jax.tree.map(lambda *leaves: jnp.stack(leaves), *parts))

    def __call__(
        self, params: Any, carry: Any, prompts: Sequence[Sequence[int]], num_tokens: int, key: jax.Array, group_size: int
    ) -> Iterator[tuple[int, Drawn]]:
        """The number of a prompt and a token that follows it, as they are made.

        The tokens of a turn are read when the next turn has been asked for.

        Args:
            params: of the model.
            carry: an empty carry, of one sequence.
            prompts: tokens of each sequence, all of one length.
            num_tokens: generated for each.
            key: of the whole call, used as by ``one_by_one``.
            group_size: sequences of a group.
        """
        length = len(prompts[0])
        keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(len(prompts)))
        groups = []
        for begin in range(0, len(prompts), group_size):
            parts = []
            for i in range(begin, begin + group_size):
                now, logits = read_prompt(self._read, params, carry, prompts[i], self._chunk)
                parts.append((now, *self._drawn(logits, keys[i], length)))
            groups.append(self._join(*parts))
        turn = [drawn for _, *drawn in groups]
        for q in range(length + 1, length + num_tokens):
            for k, (now, token, _) in enumerate(groups):
                groups[k] = self._step(params, now, token, keys[k * group_size : (k + 1) * group_size], q)
            yield from _read(turn)
            turn = [drawn for _, *drawn in groups]
        yield from _read(turn)


def _read(turn: Any) -> Iterator[tuple[int, Drawn]]:
    """The tokens of all groups, with their log-probabilities, as a pipeline gives them too."""
    tokens, logprobs = (np.concatenate(parts).tolist() for parts in zip(*jax.device_get(turn), strict=True))
    for i, drawn in enumerate(zip(tokens, logprobs, strict=True)):
        yield i, Drawn(*drawn)
