"""Prompts: which one is continued in which place of which group, and the tokens that come of it; on the host, without devices.

The host begins passes before it has read the tokens of earlier ones, and only these say whether a sequence has ended. So a
``Continuation`` counts the tokens that were begun, and those that were read. One that has begun all its tokens makes room for
another prompt at once; one that ends at a stop token or sequence makes room when it is read, and what was begun since is discarded.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxpp.errors import ArgumentError, BatchError, OutputError, is_count, shown
from jaxpp.stages.jaxpr import describe
from jaxpp.stages.loss.traced_loss import unfit
from jaxpp.types import Tree

_LARGEST = 2**31 - 1  # tokens are int32 on the devices
_UNKNOWN = ", for which there are logits"
_NUM_TOKENS = "num_tokens is a whole number of at least 1, or a sequence with such a number for each prompt"

Prompts = Iterable[Tree] | np.ndarray | jax.Array  # sequences of token numbers, of any lengths


class Token(NamedTuple):
    """A generated token.

    Attributes:
        prompt: the number of the prompt that it continues, in the order of the prompts, from 0.
        index: how many tokens were generated for this prompt before it.
        token: its number in the vocabulary.
        logprob: the logarithm of its probability in the model's own distribution.
        last: whether no token follows it: it ends a stop sequence, or is the last of ``num_tokens``.
    """

    prompt: int
    index: int  # pyright: ignore[reportIncompatibleMethodOverride]
    token: int
    logprob: float
    last: bool


@dataclass
class Continuation:
    """A prompt, int32 ``[length]``, in which chunks it is prefilled, and how many of its tokens were begun and read."""

    prompt: int
    tokens: np.ndarray
    chunks: tuple[int, ...]
    num_tokens: int
    num_begun: int = 1  # the pass of the last chunk makes the first
    num_read: int = 0
    ended: bool = False
    again: bool = False  # the prompt before was the same, and all but its last token is there already
    repeated: bool = False  # so is the prompt behind it
    latest: tuple[int, ...] = ()  # the last of its tokens, as many as the longest stop sequence has

    @property
    def goes_on(self) -> bool:
        """Whether it needs a further pass, and so its place."""
        return self.num_begun < self.num_tokens and not self.ended


Rows = tuple[tuple[int, Continuation], ...]  # whose tokens a pass makes, and in which rows of what it returns


class Places:
    """The places of a generation, and the prompts that wait for one.

    A prompt is taken from an iterable when there is a place for it. Lists and arrays are checked at once, other iterables prompt by
    prompt. A chunk has one of the lengths ``sizes``, which descend to 1; there are logits for ``vocab`` tokens, if that is known.
    """

    def __init__(
        self,
        prompts: Prompts,
        num_tokens: int | Sequence[int],
        *,
        num_groups: int,
        group_size: int = 1,
        sizes: Sequence[int] = (1,),
        stop: int | Iterable[int | Sequence[int]] | None = (),
        max_length: int | None = None,
        vocab: int | None = None,
        where: str = "pipe.generate",
    ):
        self._where, self._sizes, self._max_length = where, sizes, max_length
        self._vocab = _LARGEST + 1 if vocab is None else vocab
        self._stops = _stops_of(stop, where)
        if unknown := sorted({token for tokens in self._stops for token in tokens if token >= self._vocab}):
            rule, got = "a token that ends a sequence is one that the model makes", f"{unknown}, of {self._vocab} tokens"
            raise ArgumentError(f"{where}(..., stop={shown(stop)})", rule, got, "pass numbers of the model's own vocabulary")
        self._num_tokens = _numbers_of_tokens(num_tokens, where)
        source = _iterable_of(prompts, where)
        self.num_made = self.num_ended = self._num_spared = 0  # tokens read, prompts whose last token was, tokens not made
        self.num_prompts: int | None = len(source) if isinstance(source, Sized) else None
        known = self._checked(source) if isinstance(source, tuple) else []
        self._repeated = [len(a) > 1 and np.array_equal(a, b) for a, b in itertools.pairwise(known)]
        self._waiting = iter(known or source)
        self._next, self._source_ended = 0, False
        self._groups: list[list[Continuation | None]] = [[None] * group_size for _ in range(num_groups)]

    @property
    def repeats(self) -> bool:
        """Whether a prompt follows on the same prompt, so that what is there of the first is kept for the second."""
        return any(self._repeated)

    @property
    def most_tokens(self) -> int | None:
        """The most tokens that can come in all, now that some sequences have ended early; None if that is not known."""
        if not isinstance(self._num_tokens, int):
            return sum(self._num_tokens) - self._num_spared
        return None if self.num_prompts is None else self.num_prompts * self._num_tokens - self._num_spared

    def admit(self, group: int) -> tuple[int, Continuation] | None:
        """The next prompt (after a refused one, the one behind it) in a free place of the group; None without prompt or place."""
        places = self._groups[group]
        row = next((row for row, held in enumerate(places) if held is None or not held.goes_on), None)
        if row is None or self._source_ended:
            return None
        number = self._next
        self._next += 1
        try:
            prompt = next(self._waiting)
        except StopIteration:
            self._source_ended = True
            if number == 0:
                raise self._no_prompts() from None
            return None
        except Exception as error:
            error.add_note(f"jaxpp: {self._where}: the iterator of prompts raised this when it was asked for prompt {number}")
            raise
        tokens, wrong = self._tokens_of(number, prompt)
        if wrong:
            raise self._refused([f"prompt {number}: {wrong}"])
        again, repeated = number > 0 and any(self._repeated[number - 1 : number]), any(self._repeated[number : number + 1])
        chunks = chunk_lengths(len(tokens), self._sizes)
        if again or repeated:  # the key of a sequence is needed for its first token, which comes of the last of the prompt
            chunks = *(() if again else chunk_lengths(len(tokens) - 1, self._sizes)), 1
        held = Continuation(number, tokens, chunks, self._num_tokens_of(number), again=again, repeated=repeated)
        places[row] = held
        return row, held

    def decode(self, group: int) -> Rows:
        """The sequences of a group whose next tokens are now begun; none if the group has nothing to do."""
        rows = tuple((row, held) for row, held in enumerate(self._groups[group]) if held is not None and held.goes_on)
        for _, held in rows:
            held.num_begun += 1
        return rows

    def read(self, rows: Rows, tokens: Any, logprobs: Any) -> tuple[Token | OutputError, ...]:
        """The tokens that have come of a pass, one for each row that had not ended; passes are read in the order of their begin.

        A token that has no logit, or was chosen among logits that are NaN, ends its sequence with an error in its place.
        """
        tokens, logprobs = np.ravel(tokens).tolist(), np.ravel(logprobs).tolist()
        made: list[Token | OutputError] = []
        for row, held in rows:
            if not held.ended:
                index, token = held.num_read, tokens[row]
                held.num_read += 1
                wrong = math.isnan(logprobs[row])
                held.latest = (*held.latest, token)[-max(map(len, self._stops), default=1) :]
                stopped = any(held.latest[-len(stop) :] == stop for stop in self._stops)
                held.ended = wrong or stopped or held.num_read == held.num_tokens
                self.num_ended += held.ended
                self._num_spared += (held.num_tokens - held.num_read) * held.ended
                one = Token(held.prompt, index, token, logprobs[row], held.ended)
                made.append(self._no_token(one) if wrong else one)
        self.num_made += len(made)
        return tuple(made)

    def _no_token(self, token: Token) -> OutputError:
        place = f"token {token.index} of prompt {token.prompt}, counted from 0"
        if 0 <= token.token < self._vocab:
            rule = "the next token is chosen among logits that are numbers, and the likeliest of them is no infinity"
            fix = "look at the parameters and at the carry; jax.config.update('jax_debug_nans', True) finds where NaN begins"
            return OutputError("fn(params, carry, tokens)", rule, f"NaN for {place}; this sequence ends here", fix)
        rule = "a sampling function returns the number of a token that has a logit"
        known = f" where there are logits for {self._vocab} tokens" if self._vocab <= _LARGEST else ""
        got, fix = f"{token.token}{known}, for {place}; this sequence ends here", "return a number from 0 to len(logits) - 1"
        if token.token == -1:
            fix += "; a jaxpp.Sampling gives -1 where all tokens that are not in never have the logit -inf"
        return OutputError("sample(logits, key)", rule, got, fix)

    def _checked(self, prompts: Sequence[Tree]) -> list[np.ndarray]:
        if not prompts:
            raise self._no_prompts()
        if not isinstance(self._num_tokens, int) and len(self._num_tokens) != len(prompts):
            raise self._wrong_counts(f"{len(self._num_tokens)} numbers and {len(prompts)} prompts")
        checked = [self._tokens_of(number, prompt) for number, prompt in enumerate(prompts)]
        if wrong := [f"prompt {number}: {reason}" for number, (_, reason) in enumerate(checked) if reason]:
            raise self._refused(wrong)
        return [tokens for tokens, _ in checked]

    def _tokens_of(self, number: int, prompt: Tree) -> tuple[np.ndarray, str]:
        """The tokens of a prompt as int32, and what is wrong with it, if anything."""
        num_tokens, (tokens, wrong) = self._num_tokens_of(number), _as_tokens(prompt, self._vocab)
        length = len(tokens) + num_tokens
        if not wrong and self._max_length is not None and length > self._max_length:
            wrong = f"{len(tokens)} tokens and {num_tokens} to generate are {length}, more than {self._max_length}"
        return tokens, wrong

    def _num_tokens_of(self, number: int) -> int:
        if isinstance(self._num_tokens, int):
            return self._num_tokens
        if number >= len(self._num_tokens):
            raise self._wrong_counts(f"{len(self._num_tokens)} numbers, and a prompt {number}, counted from 0")
        return self._num_tokens[number]

    def _no_prompts(self) -> BatchError:
        fix = "pass a list or a fresh iterator of prompts (an iterator that was run through before is empty)"
        return BatchError(f"{self._where}(..., prompts, ...)", "there is at least one prompt", "none", fix)

    def _wrong_counts(self, got: str) -> ArgumentError:
        return ArgumentError(f"{self._where}(..., num_tokens)", _NUM_TOKENS, got, "pass one number, or one for each prompt")

    def _refused(self, wrong: list[str]) -> BatchError:
        rule = "a prompt is token numbers that the model knows, at least one, with room in the carry for what is generated"
        fix = "pass lists or arrays of integers, as the tokenizer of this model makes them"
        if any(_UNKNOWN in reason for reason in wrong):
            fix += "; if the model reads more tokens than it makes, pad its logits with -inf"
        if self._max_length is not None:
            fix += "; if they are too long, shorten them, generate fewer tokens, or make a carry with more room"
        return BatchError(f"{self._where}(..., prompts, ...)", rule, wrong, fix)


def chunk_sizes(longest: int) -> tuple[int, ...]:
    """The lengths of chunks, each an eighth of the one before, down to 1 so that no prompt needs padding: 100, 12, 1."""
    return (longest,) if longest == 1 else (longest, *chunk_sizes(max(longest // 8, 1)))


def chunk_lengths(length: int, sizes: Iterable[int]) -> tuple[int, ...]:
    """A prompt of this length in chunks of these sizes, which descend to 1: as many of the largest as fit, and so on."""
    chunks: list[int] = []
    for size in sizes:
        chunks += [size] * (length // size)
        length %= size
    return tuple(chunks)


def _iterable_of(prompts: Any, where: str) -> Iterable[Tree]:
    where = f"{where}(..., prompts, ...)"
    rule = "prompts is an iterable of prompts, each a sequence of token numbers; or an array with one prompt in each row"
    fix = "pass [prompt] for a single prompt"
    if hasattr(prompts, "dtype") and hasattr(prompts, "shape"):
        if len(prompts.shape) != 2:
            raise BatchError(where, rule, f"an array {describe(prompts)}", fix)
        if isinstance(prompts, (jax.Array, np.ma.MaskedArray)) and (why := unfit(prompts)) is not None:
            raise BatchError(where, rule, why.what, why.fix)
        return tuple(np.asarray(prompts))
    if isinstance(prompts, (str, bytes)):
        raise BatchError(where, rule, f"text: {shown(prompts)}", "pass [tokenizer.encode(text)]")
    if isinstance(prompts, Mapping) or not isinstance(prompts, Iterable):
        raise BatchError(where, rule, f"{shown(prompts)}, a {type(prompts).__name__}", fix)
    if isinstance(prompts, (list, tuple)) and prompts and all(is_count(token) for token in prompts):
        raise BatchError(where, rule, f"one list of numbers: {shown(prompts)}", fix)
    return tuple(prompts) if isinstance(prompts, (list, tuple)) else prompts


def _as_tokens(prompt: Any, vocab: int) -> tuple[np.ndarray, str]:
    nothing = np.zeros(0, np.int32)
    if isinstance(prompt, (str, bytes)):
        return nothing, f"text, {shown(prompt)}; encode it first"
    if any(isinstance(each, np.ma.MaskedArray) for each in (prompt, *(prompt if isinstance(prompt, (list, tuple)) else ()))):
        return nothing, "masked; leave out what is masked, array.compressed()"
    try:
        tokens = np.asarray(prompt)
    except (TypeError, ValueError, RuntimeError) as error:  # the last of an array that has been deleted
        return nothing, f"no array can be made of it: {shown(str(error))}"
    if tokens.ndim != 1:
        return nothing, f"{describe(tokens)} where [length] was expected"
    if not tokens.size:
        return nothing, "no token"
    if not np.issubdtype(tokens.dtype, np.integer):
        return nothing, f"{describe(tokens)} where integers were expected"
    if not 0 <= tokens.min() <= tokens.max() < vocab:
        unknown = _UNKNOWN if vocab <= _LARGEST else ""
        return nothing, f"numbers from {tokens.min()} to {tokens.max()} where 0 to {vocab - 1} were expected{unknown}"
    return tokens.astype(np.int32), ""


def _stops_of(stop: Any, where: str) -> frozenset[tuple[int, ...]]:
    """The sequences of tokens that end a sequence; a token alone is a sequence of one."""
    stops = [_numbers_in(item) for item in _numbers_in(() if stop is None else stop)[0]]
    whole = [bool(tokens) and all(map(is_count, tokens)) for tokens, _ in stops]
    if not all(whole):
        wrong = [shown(tokens if several else tokens[0]) for (tokens, several), ok in zip(stops, whole, strict=True) if not ok]
        rule = "stop is a token number that ends a sequence, or several; a list among them is tokens that end it one after another"
        fix = "pass for example stop=tokenizer.eos_token_id, or stop=[2, [13, 13]]"
        raise ArgumentError(f"{where}(..., stop={shown(stop)})", rule, wrong, fix)
    return frozenset(tuple(map(int, tokens)) for tokens, _ in stops)


def _numbers_of_tokens(num_tokens: Any, where: str) -> int | tuple[int, ...]:
    numbers, several = _numbers_in(num_tokens)
    if wrong := [shown(number) for number in numbers if not is_count(number, least=1)]:
        raise ArgumentError(f"{where}(..., num_tokens)", _NUM_TOKENS, wrong, "pass for example num_tokens=100")
    return tuple(map(int, numbers)) if several else int(numbers[0])


def _numbers_in(value: Any) -> tuple[list[Any], bool]:
    """What should be numbers, of an array, an iterable or a single one; and whether there may be several."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        value = np.asarray(value).tolist()
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        return [value], False
    return [item.item() if hasattr(item, "item") and np.size(item) == 1 else item for item in value], True
