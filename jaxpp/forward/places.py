"""Which prompt is generated in which place, and which token a pass through the stages makes; on the host, without any device.

Problem: the host dispatches passes before it has read the tokens of earlier ones, and only these say whether a sequence has ended.
Idea: whoever dispatches a pass is given a record of what it makes, and brings the record back with the tokens. Mechanism: a place
knows the sequence that the *next* pass will be for, and each sequence knows which token is to be *read* next. A sequence that has
all its passes makes room at once, before they are read. A sequence that ends at a stop token makes room when that token is read;
what was dispatched for it since then is discarded when it is brought back::

    admit(group)            a prompt for a free place of the group, its chunks, and the record of its first token
    decode(group)           the record of the next token of each sequence of the group
    read(record, tokens)    what came out of it: a ``Token`` for each sequence that had not ended
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence, Sized
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxpp.errors import ArgumentError, BatchError, shown
from jaxpp.schedule.validate import is_count
from jaxpp.stages.jaxpr import describe
from jaxpp.types import Tree

__all__ = ["Admitted", "Made", "Pass", "Places", "Prompts", "Token", "chunk_lengths", "chunk_sizes"]

_LARGEST = 2**31 - 1
"""Tokens are int32 on the devices."""
_UNKNOWN = ", for which there are logits"

Prompts = Iterable[Tree] | np.ndarray | jax.Array
"""Sequences of token numbers, of any lengths."""


class Token(NamedTuple):
    """A generated token.

    Attributes:
        prompt: the number of the prompt that it continues, in the order of the prompts, from 0.
        index: how many tokens were generated for this prompt before it.
        token: its number in the vocabulary.
        logprob: the logarithm of its probability in the model's own distribution.
        last: whether no token follows it: it is a stop token, or the last of ``num_tokens``.
    """

    prompt: int
    index: int  # pyright: ignore[reportIncompatibleMethodOverride]
    token: int
    logprob: float
    last: bool


class Made(NamedTuple):
    """A token that a pass makes.

    Attributes:
        row: its place in what the pass returns.
        prompt: the number of the prompt.
        index: its index among the tokens generated for the prompt.
        position: its index in the sequence, the prompt included.
    """

    row: int
    prompt: int
    index: int  # pyright: ignore[reportIncompatibleMethodOverride]
    position: int


Pass = tuple[Made, ...]
"""What one pass through the stages makes; rows that are not named are of free places."""


class Admitted(NamedTuple):
    """A prompt that takes a free place.

    Attributes:
        row: the place, in its group.
        prompt: the number of the prompt.
        tokens: int32, ``[length]``.
        chunks: the lengths of the chunks in which it is prefilled, in order.
        first: what the pass of the last chunk makes, in a row of its own.
        num_tokens: how many tokens are generated for it at most; if it is 1, its carry is not needed any more.
    """

    row: int
    prompt: int
    tokens: np.ndarray
    chunks: tuple[int, ...]
    first: Pass
    num_tokens: int


class _Sequence(NamedTuple):
    """A sequence, and how many of its tokens are done: dispatched, for the sequence in a place; else read."""

    prompt: int
    length: int
    num_tokens: int
    done: int


class Places:
    """The places of a generation, and the prompts that wait for one.

    Args:
        prompts: any iterable of token numbers; a prompt is taken from it when there is a place for it. Lists and arrays are checked
            at once, other iterables prompt by prompt.
        num_tokens: how many tokens to generate for each prompt, or a sequence with one number for each prompt.
        num_groups: groups of sequences that go through the stages together.
        group_size: places in a group.
        sizes: the lengths that a chunk may have, descending, 1 among them.
        stop: token numbers that end a sequence.
        max_length: how many tokens a sequence may have, its prompt included; None: any number.
        vocab: for how many tokens there are logits; None if that is not known.
        where: what messages call the generation.

    Attributes:
        num_made: tokens that were read so far.
        num_ended: prompts whose last token was read.
        num_prompts: prompts in all; None if ``prompts`` has no length.

    Raises:
        ArgumentError: ``num_tokens`` or ``stop`` are none.
        BatchError: there is no prompt, or a prompt is none or too long; the message has its number.
    """

    def __init__(
        self,
        prompts: Prompts,
        num_tokens: int | Sequence[int],
        *,
        num_groups: int,
        group_size: int = 1,
        sizes: Sequence[int] = (1,),
        stop: int | Iterable[int] = (),
        max_length: int | None = None,
        vocab: int | None = None,
        where: str = "pipe.generate",
    ):
        self._where, self._sizes, self._max_length = where, tuple(sizes), max_length
        self._vocab = _LARGEST + 1 if vocab is None else vocab
        self._stop = _stops(stop, where)
        self._num_tokens = _lengths(num_tokens, where)
        given = _listed(prompts, where)
        self.num_made = self.num_ended = 0
        self.num_prompts: int | None = len(given) if isinstance(given, Sized) else None
        self._spared = 0
        if isinstance(given, tuple):
            given = self._checked(given)
        self._numbers, self._waiting = itertools.count(), iter(given)
        self._ended_source = False
        self._groups: list[list[_Sequence | None]] = [[None] * group_size for _ in range(num_groups)]
        self._unread: dict[int, _Sequence] = {}

    @property
    def done(self) -> bool:
        """Whether there is no further prompt, and all tokens were read."""
        return self._ended_source and not self._unread

    @property
    def most_tokens(self) -> int | None:
        """The most tokens that can come in all, now that some sequences have ended early; None if that is not known."""
        if not isinstance(self._num_tokens, int):
            return sum(self._num_tokens) - self._spared
        return None if self.num_prompts is None else self.num_prompts * self._num_tokens - self._spared

    def admit(self, group: int) -> Admitted | None:
        """The next prompt, which now has a free place of the group; None if there is no free place, or no further prompt.

        Raises:
            BatchError: the prompt is none, or too long, or there is no prompt at all. The next call goes on with the next prompt.
            Exception: what the iterable of prompts raises, with a note.
        """
        places = self._groups[group]
        row = next((row for row, sequence in enumerate(places) if sequence is None), None)
        if row is None or self._ended_source:
            return None
        try:
            given = next(self._waiting)
        except StopIteration:
            self._ended_source = True
            if next(self._numbers) == 0:
                raise _no_prompts(self._where) from None
            return None
        except Exception as error:
            number = next(self._numbers)
            error.add_note(f"jaxpp: {self._where}: the iterator of prompts raised this when it was asked for prompt {number}")
            raise
        number = next(self._numbers)
        tokens, wrong = _tokens_of(given, self._vocab)
        wrong = wrong or self._too_long(number, len(tokens))
        if wrong:
            raise self._refused([f"prompt {number}: {wrong}"])
        num_tokens = self._num_tokens_of(number)
        self._unread[number] = _Sequence(number, len(tokens), num_tokens, 0)
        places[row] = _Sequence(number, len(tokens), num_tokens, 1) if num_tokens > 1 else None
        first = (Made(0, number, 0, len(tokens)),)
        return Admitted(row, number, tokens, chunk_lengths(len(tokens), self._sizes), first, num_tokens)

    def decode(self, group: int) -> Pass | None:
        """The next token of each sequence of a group, which a pass is now dispatched for; None if the group has no sequence."""
        places, made = self._groups[group], []
        for row, sequence in enumerate(places):
            if sequence is not None:
                prompt, length, num_tokens, index = sequence
                made.append(Made(row, prompt, index, length + index))
                places[row] = sequence._replace(done=index + 1) if index + 1 < num_tokens else None
        return tuple(made) or None

    def read(self, made: Pass, tokens: Any, logprobs: Any) -> tuple[Token, ...]:
        """The tokens that have come of a pass; those of sequences that had ended before are left out.

        Args:
            made: the record of the pass. Passes are read in the order in which they were dispatched.
            tokens: what the pass returned, one integer for each row.
            logprobs: one number for each row.
        """
        tokens, logprobs = np.ravel(tokens).tolist(), np.ravel(logprobs).tolist()
        return tuple(self._token(each, tokens[each.row], logprobs[each.row]) for each in made if each.prompt in self._unread)

    def _token(self, made: Made, token: int, logprob: float) -> Token:
        sequence = self._unread[made.prompt]
        assert made.index == sequence.done, "passes of a sequence are read in order"
        last = token in self._stop or made.index + 1 == sequence.num_tokens
        if last:
            self._end(sequence)
        else:
            self._unread[made.prompt] = sequence._replace(done=made.index + 1)
        self.num_made += 1
        return Token(made.prompt, made.index, token, logprob, last)

    def _end(self, sequence: _Sequence) -> None:
        del self._unread[sequence.prompt]
        self.num_ended += 1
        self._spared += sequence.num_tokens - sequence.done - 1
        for places in self._groups:
            for row, other in enumerate(places):
                if other is not None and other.prompt == sequence.prompt:
                    places[row] = None

    def _checked(self, prompts: Sequence[Tree]) -> list[np.ndarray]:
        """The prompts, checked before anything runs.

        Raises:
            BatchError: there are none, or some cannot be continued; all of these are named.
        """
        if not prompts:
            raise _no_prompts(self._where)
        if not isinstance(self._num_tokens, int) and len(self._num_tokens) != len(prompts):
            got = f"{len(self._num_tokens)} numbers and {len(prompts)} prompts"
            raise ArgumentError(f"{self._where}(..., num_tokens)", _NUM_TOKENS, got, "pass one number, or one for each prompt")
        found = [_tokens_of(prompt, self._vocab) for prompt in prompts]
        reasons = [wrong or self._too_long(number, len(tokens)) for number, (tokens, wrong) in enumerate(found)]
        if any(reasons):
            raise self._refused([f"prompt {number}: {wrong}" for number, wrong in enumerate(reasons) if wrong])
        return [tokens for tokens, _ in found]

    def _num_tokens_of(self, number: int) -> int:
        if isinstance(self._num_tokens, int):
            return self._num_tokens
        if number >= len(self._num_tokens):
            got = f"{len(self._num_tokens)} numbers, and a prompt {number}, counted from 0"
            raise ArgumentError(f"{self._where}(..., num_tokens)", _NUM_TOKENS, got, "pass one number, or one for each prompt")
        return self._num_tokens[number]

    def _too_long(self, number: int, length: int) -> str:
        """Why a prompt with all that is generated for it does not fit; empty if it does."""
        num_tokens = self._num_tokens_of(number)
        if self._max_length is None or length + num_tokens <= self._max_length:
            return ""
        return f"{length} tokens and {num_tokens} to generate are {length + num_tokens}, more than {self._max_length}"

    def _refused(self, wrong: list[str]) -> BatchError:
        rule = "a prompt is token numbers that the model knows, at least one, with room in the carry for what is generated"
        fix = "pass lists or arrays of integers, as the tokenizer of this model makes them"
        if any(_UNKNOWN in reason for reason in wrong):
            fix += "; if the model reads more tokens than it makes, pad its logits with -inf"
        if self._max_length is not None:
            fix += "; if they are too long, shorten them, generate fewer tokens, or make a carry with more room"
        return BatchError(f"{self._where}(..., prompts, ...)", rule, wrong, fix)


_NUM_TOKENS = "num_tokens is a whole number of at least 1, or a sequence with such a number for each prompt"


def chunk_sizes(longest: int) -> tuple[int, ...]:
    """The lengths of chunks in which prompts are prefilled: each an eighth of the one before, down to 1.

    With few lengths few programs are compiled; with 1 among them no prompt needs padding.

    Example:
        >>> chunk_sizes(64), chunk_sizes(100), chunk_sizes(1)
        ((64, 8, 1), (100, 12, 1), (1,))
    """
    return (longest,) if longest == 1 else (longest, *chunk_sizes(max(longest // 8, 1)))


def chunk_lengths(length: int, sizes: Iterable[int]) -> tuple[int, ...]:
    """A prompt of this length in chunks of these sizes, which descend to 1: as many of the largest as there is room for, and so on.

    Example:
        >>> chunk_lengths(75, (64, 8, 1))
        (64, 8, 1, 1, 1)
    """
    found: list[int] = []
    for size in sizes:
        number, length = divmod(length, size)
        found += [size] * number
    assert length == 0, "the least size is 1"
    return tuple(found)


def _listed(prompts: Any, where: str) -> Iterable[Tree]:
    """The prompts: a tuple if they are all there, else whatever can be iterated.

    Raises:
        BatchError: they cannot be iterated, or are a single prompt.
    """
    rule = "prompts is an iterable of prompts, each a sequence of token numbers; or an array with one prompt in each row"
    fix = "pass [prompt] for a single prompt"
    if hasattr(prompts, "dtype") and hasattr(prompts, "shape"):
        if len(prompts.shape) != 2:
            raise BatchError(f"{where}(..., prompts, ...)", rule, f"an array {describe(prompts)}", fix)
        return tuple(np.asarray(prompts))
    if isinstance(prompts, (str, bytes)):
        raise BatchError(f"{where}(..., prompts, ...)", rule, f"text: {shown(prompts)}", "pass [tokenizer.encode(text)]")
    if isinstance(prompts, Mapping) or not isinstance(prompts, Iterable):
        raise BatchError(f"{where}(..., prompts, ...)", rule, f"{shown(prompts)}, a {type(prompts).__name__}", fix)
    if isinstance(prompts, (list, tuple)) and prompts and all(is_count(token) for token in prompts):
        raise BatchError(f"{where}(..., prompts, ...)", rule, f"one list of numbers: {shown(prompts)}", fix)
    return tuple(prompts) if isinstance(prompts, (list, tuple)) else prompts


def _tokens_of(prompt: Any, vocab: int) -> tuple[np.ndarray, str]:
    """The tokens of a prompt as int32, and what is wrong with them; empty if nothing is."""
    nothing = np.zeros(0, np.int32)
    if isinstance(prompt, (str, bytes)):
        return nothing, f"text, {shown(prompt)}; encode it first"
    try:
        tokens = np.asarray(prompt)
    except (TypeError, ValueError) as error:
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


def _no_prompts(where: str) -> BatchError:
    fix = "pass a list or a fresh iterator of prompts (an iterator that was run through before is empty)"
    return BatchError(f"{where}(..., prompts, ...)", "there is at least one prompt", "none", fix)


def _stops(stop: Any, where: str) -> frozenset[int]:
    stops = _numbers_in(() if stop is None else stop)[0]
    if wrong := [shown(token) for token in stops if not is_count(token)]:
        rule, fix = "stop is a token number that ends a sequence, or several", "pass for example stop=tokenizer.eos_token_id"
        raise ArgumentError(f"{where}(..., stop={shown(stop)})", rule, wrong, fix)
    return frozenset(map(int, stops))


def _lengths(num_tokens: Any, where: str) -> int | tuple[int, ...]:
    numbers, several = _numbers_in(num_tokens)
    if wrong := [shown(number) for number in numbers if not is_count(number, least=1)]:
        raise ArgumentError(f"{where}(..., num_tokens)", _NUM_TOKENS, wrong, "pass for example num_tokens=100")
    return tuple(map(int, numbers)) if several else int(numbers[0])


def _numbers_in(given: Any) -> tuple[list[Any], bool]:
    """What should be numbers, of an array, an iterable or a single one; and whether there may be several."""
    if hasattr(given, "dtype") and hasattr(given, "shape"):
        given = np.asarray(given).tolist()
    if isinstance(given, (str, bytes, Mapping)) or not isinstance(given, Iterable):
        return [given], False
    return [each.item() if np.size(each) == 1 and hasattr(each, "item") else each for each in given], True
