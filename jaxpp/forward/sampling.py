"""How the next token is made: the user's function with the choice of the token behind it, so that only a token leaves a stage.

The carry of ``NextTokenFn`` holds, beside the user's, the key of the sequence and how many tokens it has had; and these tokens, if
the rule that chooses the next one asks for them. So each token has a
key made of the number of its sequence and of its place in it, and what is drawn does not depend on how many sequences are generated
side by side, in which order, or on how many devices.
"""

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int, UInt32

from jaxpp.errors import ArgumentError, OutputError, is_count, shown
from jaxpp.errors.checks import is_real
from jaxpp.errors.tracebacks import entries
from jaxpp.forward.functions import Wrapped
from jaxpp.stages.jaxpr import describe
from jaxpp.stages.loss.traced_loss import differences
from jaxpp.types import Array, Aval, Key, Tree

Sampler = Callable[..., Int[Array, ""]]  # (logits [vocab], key[, history]): the token drawn for one position; traced

_LEAST, _MOST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)  # what is 0 or infinite in float32 makes NaNs
_SMALL, _SMALLEST = 1e-6, 1e-30  # below the first temperature the maximum is subtracted first; below the second it is used instead

_FN = "fn(params, carry, tokens)"  # what messages call the user's function
_ONE_SEQUENCE = "return (new_carry, logits) for a batch of one sequence, with a carry made for one"


class History(NamedTuple):
    """What a sequence has had when its next token is chosen: the third argument of a rule of sampling that takes three.

    Attributes:
        tokens: int32 ``[max_length]``, the prompt and what was generated; -1 behind them.
        num_prompt: int32, how many of them are the prompt.
        length: int32, how many there are; ``length - num_prompt`` were generated.
    """

    tokens: Int[Array, " max_length"]
    num_prompt: Int[Array, ""]
    length: Int[Array, ""]


@entries
@dataclass(frozen=True)
class Sampling:
    """Draws the next token at a temperature, among the ``top_k`` most likely, or among those of probability ``top_p``.

    With the logits ``x``, the token ``t`` is drawn with the probability ``softmax(x / temperature)[t]``. ``top_k`` and ``top_p``
    set the probabilities of unlikely tokens to zero, and the others are scaled up. First tokens of ``never`` are taken out, then
    repetitions are made less likely, then the temperature is applied, then ``top_k``, then ``top_p`` to what ``top_k`` has left. Of
    tokens of equal probability, those with the smaller numbers are kept.

    An instance is a function ``(logits, key) -> token`` that can be traced, so a plain loop can draw the same tokens. With a
    ``repetition_penalty`` it is one of ``(logits, key, history)``.

    Args:
        temperature: below 1 likely tokens become more likely; 0 always takes the most likely token (greedy).
        top_k: how many tokens may be drawn (Fan et al. 2018); None: all.
        top_p: draw among the fewest tokens whose probabilities add up to at least ``top_p`` (nucleus sampling, Holtzman et al.
            2020); at least one token is left. None or 1: all.
        repetition_penalty: above 1, tokens that the sequence has had, its prompt included, become less likely: their logits are
            divided by it, or multiplied where they are negative (Keskar et al. 2019).
        never: numbers of tokens that are never drawn.

    Raises:
        ArgumentError: a temperature below 0, ``top_k`` below 1 or above the size of the vocabulary, ``top_p`` not in (0, 1], a
            penalty that is not above 0, numbers that float32 has as 0 or infinity, and tokens in ``never`` that are none, or all.

    Example:
        >>> logits = jnp.log(jnp.array([0.1, 0.6, 0.3]))
        >>> keys = jax.random.split(jax.random.key(0), 1000)
        >>> tokens = jax.vmap(Sampling(top_p=0.8), (None, 0))(logits, keys)
        >>> sorted(set(tokens.tolist()))
        [1, 2]
        >>> int(Sampling(temperature=0)(logits, keys[0]))
        1

    References:
        Fan, Lewis and Dauphin, Hierarchical Neural Story Generation, 2018, arXiv:1805.04833 (top-k).
        Keskar et al., CTRL: A Conditional Transformer Language Model, 2019, arXiv:1909.05858 (the penalty).
        Holtzman et al., The Curious Case of Neural Text Degeneration, 2020, arXiv:1904.09751 (top-p).
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float = 1.0
    never: Sequence[int] = ()

    def __post_init__(self) -> None:
        wrong: list[str] = []
        several = isinstance(self.never, Iterable) and not isinstance(self.never, (str, bytes)) and getattr(self.never, "ndim", 1)
        never = tuple(self.never) if several else ()  # an iterator gives them once
        if not several or not all(map(is_count, never)):
            wrong.append(f"never={shown(self.never)} is no list of token numbers")
        else:
            object.__setattr__(self, "never", tuple(map(int, never)))  # so that equal rules have equal hashes
        if not (is_real(self.repetition_penalty) and _LEAST <= self.repetition_penalty <= _MOST):
            wrong.append(f"repetition_penalty={shown(self.repetition_penalty)} is no finite number above 0")
        if not (is_real(self.temperature) and 0 <= self.temperature <= _MOST):
            wrong.append(f"temperature={shown(self.temperature)} is no finite number of at least 0")
        if self.top_k is not None and not is_count(self.top_k, least=1):
            wrong.append(f"top_k={shown(self.top_k)} is no whole number of at least 1")
        if self.top_p is not None and not (is_real(self.top_p) and 0 < self.top_p <= 1):
            wrong.append(f"top_p={shown(self.top_p)} is no number above 0 and up to 1")
        if wrong:
            rule = "tokens are drawn at a temperature, among the top_k most likely, or among those that have the probability top_p"
            fix = "pass for example jaxpp.Sampling(temperature=0.8, top_k=50, top_p=0.95); temperature=0 is greedy"
            raise ArgumentError("jaxpp.Sampling(...)", rule, wrong, fix)

    def __call__(self, logits: Float[Array, " vocab"], key: Key, history: History | None = None) -> Int[Array, ""]:
        """The token drawn from the logits of one position; -1 if all that are not in ``never`` have the logit -inf."""
        allowed = self._allowed(logits, history)
        token = jnp.argmax(allowed) if self.temperature == 0 else jax.random.categorical(key, self.adjusted(logits, history))
        # Where none is left, a token of ``never`` would be as likely as any other.
        return jnp.where(allowed.max() != -jnp.inf, token, -1) if self.never else token

    def _allowed(self, logits: Float[Array, " vocab"], history: History | None) -> Float[Array, " vocab"]:
        logits = _wide(logits)
        if unknown := [token for token in self.never if token >= logits.shape[0]]:
            where, fix = f"jaxpp.Sampling(never={list(self.never)})", "pass numbers of the model's own vocabulary"
            raise ArgumentError(where, "tokens that are never drawn are in the vocabulary", f"{unknown}, of {logits.shape[0]}", fix)
        if len(set(self.never)) == logits.shape[0]:
            where, fix = "jaxpp.Sampling(never=...)", "leave a token out of never that may be drawn"
            raise ArgumentError(where, "one token at least may be drawn", f"never has all {logits.shape[0]} tokens", fix)
        if self.repetition_penalty != 1:
            if history is None:
                where, rule = "jaxpp.Sampling(repetition_penalty=...)(logits, key)", "a penalty needs the tokens that there were"
                raise ArgumentError(where, rule, "no history", "pass a jaxpp.History as the third argument")
            there = jnp.where(history.tokens >= 0, history.tokens, logits.shape[0])
            repeated = jnp.zeros(logits.shape, bool).at[there].set(True, mode="drop")
            less = jnp.where(logits > 0, logits / self.repetition_penalty, logits * self.repetition_penalty)
            logits = jnp.where(repeated, less, logits)
        return logits.at[jnp.array(self.never, int)].set(-jnp.inf) if self.never else logits

    def adjusted(self, logits: Float[Array, " vocab"], history: History | None = None) -> Float[Array, " vocab"]:
        """The logits whose softmax is the distribution of the drawn token, in float32 or float64: -inf for tokens never drawn.

        Raises:
            ArgumentError: ``top_k`` is above the size of the vocabulary, the logits are those of several positions, ``never`` names
                tokens that there are not, or a penalty has no history.
        """
        logits = self._allowed(logits, history)
        size = logits.shape[0]
        if self.top_k is not None and self.top_k > size:
            where, rule = f"jaxpp.Sampling(top_k={self.top_k})", "top_k is at most the size of the vocabulary"
            raise ArgumentError(where, rule, f"{size} tokens", f"pass top_k={size} or less, or leave top_k out")
        if self.temperature == 0:
            return jnp.where(jnp.arange(size) == jnp.argmax(logits), jnp.zeros_like(logits), -jnp.inf)
        if self.temperature >= _SMALL:
            logits = logits / float(self.temperature)
        else:  # without an infinity where there was none
            logits = (logits - logits.max()) / max(float(self.temperature), _SMALLEST)
        nucleus = self.top_p is not None and self.top_p < 1
        if self.top_k is None and not nucleus:
            return logits
        values, tokens = jax.lax.top_k(logits, size if self.top_k is None else int(self.top_k))
        keep = jnp.ones(values.shape, bool)
        if nucleus:  # those before which ``top_p`` is not reached yet
            keep = keep.at[1:].set(jnp.cumsum(jax.nn.softmax(values))[:-1] < float(self.top_p or 1))
        return jnp.where(jnp.zeros(size, bool).at[tokens].set(keep), logits, -jnp.inf)


def _wide(logits: Float[Array, " vocab"]) -> Float[Array, " vocab"]:
    logits = jnp.asarray(logits)
    if logits.ndim != 1:
        rule, fix = "a token is drawn from the logits of one position, [vocab]", "use jax.vmap for several positions"
        raise ArgumentError("jaxpp.Sampling(...)(logits, key)", rule, describe(logits), fix)
    return logits.astype(jnp.promote_types(logits.dtype, jnp.float32))


SampleRule = str | Sampling | Sampler | None  # what a user may pass as ``sample``


def sampler_of(sample: SampleRule) -> Sampler:
    """The rule that ``sample`` stands for."""
    if sample is None or (isinstance(sample, str) and sample == "greedy"):
        return Sampling(temperature=0)
    if callable(sample) and sample is not Sampling:
        return sample
    rule = 'sample is None or "greedy", a jaxpp.Sampling, or a function (logits [vocab], key[, history]) -> token'
    fix = "pass for example sample=jaxpp.Sampling(temperature=0.8, top_k=50)"
    if sample is Sampling:
        fix = "call it: sample=jaxpp.Sampling()"
    elif is_real(sample):
        fix = f"pass sample=jaxpp.Sampling(temperature={shown(sample)})"
    raise ArgumentError("sample", rule, shown(sample), fix)


def takes_history(sampler: Sampler) -> bool:
    """Whether a rule of sampling asks for the tokens that the sequence has had."""
    if isinstance(sampler, Sampling):
        return sampler.repetition_penalty != 1
    try:
        parameters = inspect.signature(sampler).parameters.values()
    except (TypeError, ValueError):  # some callables have none
        return False
    by_place = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    return sum(each.default is each.empty for each in by_place) > 2


def draw(
    sampler: Sampler, logits: Float[Array, " vocab"], key: Key, history: History | None = None
) -> tuple[Int[Array, ""], Float[Array, ""]]:
    """A token, and the logarithm of its probability in the model's own distribution: at temperature 1, with every token allowed.

    That is NaN for a token that has no logit, and where logits are NaN.
    """
    logits = _wide(logits)
    try:
        token = sampler(logits, key) if history is None else sampler(logits, key, history)
    except Exception as error:
        error.add_note(f"jaxpp: raised by sample, which was called with logits {describe(logits)} and a key")
        raise
    if not _is_token(token):
        got = jax.tree.map(lambda leaf: describe(leaf) if isinstance(leaf, Aval) else leaf, token)
        rule = "a sampling function returns the number of one token, an integer scalar"
        fix = "return for example jax.random.categorical(key, logits), which is an integer"
        raise ArgumentError("sample(logits, key)", rule, got if isinstance(token, Aval) else shown(got), fix)
    token = jnp.asarray(token, jnp.int32)
    return token, jnp.where((token >= 0) & (token < logits.shape[0]), jax.nn.log_softmax(logits)[token], jnp.nan)


def _is_token(value: object) -> bool:
    if not isinstance(value, (jax.Array, np.ndarray, np.integer, int)) or isinstance(value, bool):
        return False
    return np.shape(value) == () and jnp.issubdtype(jnp.result_type(value), jnp.integer)


class SequenceCarry(NamedTuple):
    """What a sequence carries from pass to pass: the user's carry, its raw key, and how many tokens it has had.

    If the rule of sampling asks for them, also its tokens, the whole prompt from the beginning, and the length of the prompt.
    """

    model: Tree
    tokens: Int[Array, " max_length"] | None
    num_prompt: Int[Array, ""] | None
    key: UInt32[Array, " words"]
    length: Int[Array, ""]


class NextToken(NamedTuple):
    """What a pass makes: the next token, as the next pass takes it, and the logarithm of its probability."""

    token: Int[Array, "1 1"]
    logprob: Float[Array, ""]

    def to_host(self) -> "NextToken":
        """Begin to copy it to the host."""
        self.token.copy_to_host_async()
        self.logprob.copy_to_host_async()
        return self


@dataclass(frozen=True)
class NextTokenFn(Wrapped):
    """The user's function of one sequence, as one that returns the next token; ``implementation`` is that of the keys."""

    sampler: Sampler
    implementation: str

    def __call__(self, params: Tree, carry: SequenceCarry, tokens: Int[Array, "1 length"]) -> tuple[SequenceCarry, NextToken]:
        """One pass of a sequence."""
        result = self.function(params, carry.model, tokens)
        if not isinstance(result, tuple) or len(result) != 2:
            got = f"a tuple of {len(result)}" if isinstance(result, tuple) else _called(result)
            raise OutputError(_FN, "it returns a pair (new_carry, logits)", got, "return the new carry, and the logits")
        model, logits = result
        _check_carry(carry.model, model)
        length = carry.length + tokens.shape[1]
        key = jax.random.fold_in(jax.random.wrap_key_data(carry.key, impl=self.implementation), length)
        last, there, num_prompt = _last(logits, tokens.shape[1]), carry.tokens, carry.num_prompt
        if there is None or num_prompt is None:
            token, logprob = draw(self.sampler, last, key)
        else:
            token, logprob = draw(self.sampler, last, key, History(there, num_prompt, length))
            is_new = there.at[length].get(mode="fill", fill_value=0) < 0  # the prompt goes on behind a chunk of it
            there = there.at[length].set(jnp.where(is_new, token, there[length]), mode="drop")
        return SequenceCarry(model, there, num_prompt, carry.key, length), NextToken(token.reshape(1, 1), logprob)


@dataclass(frozen=True)
class NextTokensFn(Wrapped):
    """The function of several sequences: leaves of the carry have one more axis, numbered in ``axes``, and tokens one in front."""

    axes: tuple[int, ...]

    def __call__(self, params: Tree, carry: SequenceCarry, tokens: Int[Array, "sequences 1 1"]) -> tuple[SequenceCarry, NextToken]:
        """One pass of a group."""
        axes = jax.tree.structure(carry).unflatten(self.axes)
        return jax.vmap(self.function, (None, axes, 0), (axes, 0))(params, carry, tokens)


def _check_carry(old: Tree, new: Tree) -> None:
    if wrong := differences(jax.tree.map(lambda leaf: jax.eval_shape(jnp.asarray, leaf), new), old, "carry"):
        rule = "the new carry has the tree, the shapes and the types of the old one, so that a pass can follow on another"
        fix = "return every leaf, changed or not, write into a cache of fixed size, and cast with .astype(old.dtype)"
        raise OutputError(_FN, rule, wrong, fix)


def _last(logits: Tree, length: int) -> Float[Array, " vocab"]:
    if isinstance(logits, jax.Array | np.ndarray) and logits.shape[:1] == (1,) and jnp.issubdtype(logits.dtype, jnp.floating):
        if logits.ndim == 2:
            return jnp.asarray(logits[0])
        if logits.ndim == 3 and logits.shape[1] in (1, length):
            return jnp.asarray(logits[0, -1])
    rule = f"it returns the logits of the next token: floats [1, {length}, vocab], or [1, vocab] of the last position"
    raise OutputError(_FN, rule, _called(logits), _ONE_SEQUENCE)


def _called(result: Tree) -> str:
    if result is None or isinstance(result, Aval):
        return "None" if result is None else f"one array, {describe(result)}"
    return f"a {type(result).__name__}"
