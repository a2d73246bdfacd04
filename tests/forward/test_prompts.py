"""The host's side of a generation: which prompt is where, whose tokens passes make, what is kept of them and what is discarded."""

import collections
import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpp.errors import ArgumentError, BatchError
from jaxpp.forward.prompts import Places, Token, chunk_lengths, chunk_sizes

STOP = 7


def token_of(prompt, position):
    """A model in one line: what stands at a position of a sequence."""
    return (prompt * 31 + position * 17 + prompt * position) % 11


def wanted(lengths, nums, stop):
    """What a loop over one sequence at a time generates."""
    found = []
    for prompt, (length, num_tokens) in enumerate(zip(lengths, nums, strict=True)):
        tokens = []
        for index in range(num_tokens):
            tokens.append(token_of(prompt, length + index))
            ends = [list(tokens_of) if isinstance(tokens_of, tuple) else [tokens_of] for tokens_of in stop]
            if any(tokens[-len(end) :] == end for end in ends):
                break
        found.append(tokens)
    return found


class Driver:
    """Begins passes on devices that answer late: what comes of a pass is read when ``ahead`` later ones were begun."""

    def __init__(self, places, num_groups, ahead):
        self.places, self.num_groups, self.ahead = places, num_groups, ahead
        self.queue, self.tokens, self.admitted, self.passes = collections.deque(), [], [], 0
        self.held = [collections.defaultdict(set) for _ in range(num_groups)]

    def begin(self, rows, indices):
        count = 1 + max(row for row, _ in rows)
        tokens, logprobs = np.full(count, -99), np.zeros(count)
        for (row, sequence), index in zip(rows, indices, strict=True):
            position = len(sequence.tokens) + index
            tokens[row], logprobs[row] = token_of(sequence.prompt, position), -position
        self.queue.append((rows, tokens, logprobs))
        while len(self.queue) > self.ahead:
            self.take()

    def take(self):
        self.tokens += self.places.read(*self.queue.popleft())

    def run(self):
        idle = 0
        for group in itertools.cycle(range(self.num_groups)):
            while (admitted := self.places.admit(group)) is not None:
                row, sequence = admitted
                self.admitted.append(sequence)
                self.held[group][row].add(sequence.prompt)
                self.begin(((0, sequence),), [0])
                idle = 0
            if rows := self.places.decode(group):
                assert len({row for row, _ in rows}) == len(rows)
                assert all(sequence.prompt in self.held[group][row] for row, sequence in rows)
                self.passes, idle = self.passes + 1, 0
                self.begin(rows, [sequence.num_begun - 1 for _, sequence in rows])
            else:
                idle += 1
            if idle > self.num_groups:
                if not self.queue:
                    return self
                while self.queue:
                    self.take()
                idle = 0
        raise AssertionError


def check(driver, lengths, nums, stop):
    by_prompt = collections.defaultdict(list)
    for token in driver.tokens:
        by_prompt[token.prompt].append(token)
    expected = wanted(lengths, nums, stop)
    assert sorted(by_prompt) == list(range(len(lengths)))
    for prompt, tokens in by_prompt.items():
        assert [token.token for token in tokens] == expected[prompt]
        assert [token.index for token in tokens] == list(range(len(tokens)))
        assert [token.logprob for token in tokens] == [-(lengths[prompt] + index) for index in range(len(tokens))]
        assert [token.last for token in tokens] == [False] * (len(tokens) - 1) + [True]
    assert [sequence.prompt for sequence in driver.admitted] == list(range(len(lengths)))
    assert driver.places.num_made == sum(map(len, expected)) and driver.places.num_ended == len(lengths)


def prompts_in(rows):
    """The numbers of the prompts of a pass, by row."""
    return [(row, sequence.prompt) for row, sequence in rows]


@settings(deadline=None, max_examples=100)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 8)), min_size=1, max_size=12),
    num_groups=st.integers(1, 4),
    group_size=st.integers(1, 3),
    ahead=st.integers(0, 7),
    stop=st.sampled_from([(), (7,), (1, 2, 3), range(11), ((6, 1), (2, 8, 3), 9), tuple((k, (k + 6) % 11) for k in range(11))]),
    lazy=st.booleans(),
)
def test_each_prompt_gets_the_tokens_of_a_loop_over_it_alone(sizes, num_groups, group_size, ahead, stop, lazy):
    lengths, nums = zip(*sizes, strict=True)
    prompts = [np.full(length, 3) for length in lengths]
    places = Places(iter(prompts) if lazy else prompts, nums, num_groups=num_groups, group_size=group_size, stop=stop, sizes=(4, 1))
    driver = Driver(places, num_groups, ahead).run()
    check(driver, lengths, nums, stop)
    assert places.most_tokens == places.num_made
    for sequence, length in zip(driver.admitted, lengths, strict=True):
        assert sum(sequence.chunks) == (1 if sequence.again else length) and set(sequence.chunks) <= {4, 1}
        assert length == len(sequence.tokens) and (not sequence.again or not lazy)


@pytest.mark.parametrize("ahead", [0, 2, 6])
def test_without_stop_tokens_no_pass_is_dispatched_in_vain(ahead):
    nums = [5, 1, 4, 4, 3]
    driver = Driver(Places([[1]] * 5, nums, num_groups=2), 2, ahead).run()
    assert driver.passes == sum(nums) - len(nums)  # the first token of each comes of its prefill


def test_a_sequence_makes_room_when_its_last_pass_is_begun_not_when_it_is_read():
    places = Places([[1, 2], [3]], 3, num_groups=1)
    _, first = places.admit(0)
    assert places.admit(0) is None
    second, third = places.decode(0), places.decode(0)
    assert prompts_in(third) == [(0, 0)]
    _, other = places.admit(0)
    assert other.prompt == 1 and places.num_ended == 0
    fourth = places.decode(0)
    assert prompts_in(fourth) == [(0, 1)]
    passes = (((0, first),), second, third, ((0, other),), fourth)
    tokens = [token for rows in passes for token in places.read(rows, [5], [-1.0])]
    assert [(token.prompt, token.index) for token in tokens] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
    assert [token.last for token in tokens] == [0, 0, 1, 0, 0]


def test_passes_that_ran_ahead_of_a_stop_token_are_discarded_also_if_the_place_has_a_new_prompt():
    places = Places([[1, 2], [3], [4]], 5, num_groups=1, group_size=2, stop=STOP)
    (row_a, a), (row_b, b) = places.admit(0), places.admit(0)
    assert (row_a, row_b) == (0, 1)
    ahead = [places.decode(0), places.decode(0)]
    assert places.read(((0, a),), 1, -0.5) == (Token(0, 0, 1, -0.5, False),)
    assert places.read(((0, b),), STOP, -0.25) == (Token(1, 0, STOP, -0.25, True),)
    assert places.num_ended == 1 and places.most_tokens == 11
    row, c = places.admit(0)
    assert (row, c.prompt) == (1, 2)
    later = places.decode(0)
    assert prompts_in(later) == [(0, 0), (1, 2)]
    assert places.read(ahead[0], [2, 9], [-1.0, -9.0]) == (Token(0, 1, 2, -1.0, False),)
    assert places.read(ahead[1], [3, 9], [-1.0, -9.0]) == (Token(0, 2, 3, -1.0, False),)
    assert places.read(((0, c),), [6], [-2.0]) == (Token(2, 0, 6, -2.0, False),)
    assert places.read(later, [STOP, 8], [-1.0, -3.0]) == (Token(0, 3, STOP, -1.0, True), Token(2, 1, 8, -3.0, False))
    assert places.num_ended == 2


def test_what_is_read_are_numbers_of_python():
    places = Places([[1]], 1, num_groups=1)
    _, only = places.admit(0)
    assert not only.goes_on and places.decode(0) == ()
    (token,) = places.read(((0, only),), jnp.array([4], jnp.int32), jnp.array([-0.5]))
    assert token == (0, 0, 4, -0.5, True) and [type(value) for value in token] == [int, int, int, float, bool]
    assert places.admit(0) is None


def test_prompts_are_taken_one_by_one_as_there_are_places():
    taken = []

    def prompts():
        for k in range(4):
            taken.append(k)
            yield [k + 1] * (k + 1)

    places = Places(prompts(), 2, num_groups=2)
    assert taken == [] and places.num_prompts is None and places.most_tokens is None
    assert places.admit(0) is not None and taken == [0]
    assert places.admit(0) is None and taken == [0]  # no room
    assert places.decode(1) == ()
    _, second = places.admit(1)
    assert second.tokens.dtype == np.int32 and second.tokens.tolist() == [2, 2]


@pytest.mark.parametrize(
    "prompts",
    [
        [[1, 2], (3,), np.array([4, 5], np.int64), jnp.array([6], jnp.uint8), [np.int32(1), 2]],
        np.arange(6).reshape(3, 2),
        jnp.arange(6).reshape(3, 2),
        np.ones((1, 5), np.uint16),
    ],
)
def test_prompts_may_be_lists_arrays_or_the_rows_of_an_array(prompts):
    places = Places(prompts, 2, num_groups=len(prompts))
    assert places.num_prompts == len(prompts) and places.most_tokens == 2 * len(prompts)
    for number, prompt in enumerate(prompts):
        _, sequence = places.admit(number)
        assert sequence.tokens.tolist() == np.asarray(prompt).tolist()


@pytest.mark.parametrize("nums", [[3, 1], (3, 1), np.array([3, 1]), jnp.array([3, 1]), [np.int64(3), jnp.int32(1)]])
def test_num_tokens_may_be_one_number_for_each_prompt(nums):
    places = Places([[1], [2]], nums, num_groups=2)
    assert places.most_tokens == 4
    (_, first), (_, second) = places.admit(0), places.admit(1)
    assert (first.num_tokens, second.num_tokens) == (3, 1)


@pytest.mark.parametrize("number", [3, np.int64(3), jnp.int32(3), np.array(3)])
def test_num_tokens_may_be_any_whole_number(number):
    assert Places([[1], [2]], number, num_groups=2).most_tokens == 6


@pytest.mark.parametrize("stop", [STOP, [STOP], {STOP, 3}, np.int64(STOP), jnp.array(STOP), np.array([STOP, 3]), range(7, 8)])
def test_stop_is_a_token_or_several(stop):
    places = Places([[1]], 4, num_groups=1, stop=stop)
    _, sequence = places.admit(0)
    assert [token.last for token in places.read(((0, sequence),), [STOP], [0.0])] == [True]


@pytest.mark.parametrize("stop", [[[4, STOP]], [[9], [4, STOP]], np.array([[4, STOP]]), ((4, np.int64(STOP)), 1)])
def test_stop_sequences_end_where_all_their_tokens_came_one_after_another(stop):
    places = Places([[4]], 9, num_groups=1, stop=stop)
    _, sequence = places.admit(0)
    made = [places.read(((0, sequence),), [token], [0.0])[0].last for token in (STOP, 4, 4, STOP)]
    assert made == [False, False, False, True]


@pytest.mark.parametrize("stop", [(), None, []])
def test_without_stop_tokens_none_ends_a_sequence(stop):
    places = Places([[1]], 4, num_groups=1, stop=stop)
    _, sequence = places.admit(0)
    assert not places.read(((0, sequence),), [0], [0.0])[0].last


@pytest.mark.parametrize("longest", [1, 2, 7, 8, 9, 63, 64, 100, 1000])
def test_chunks_of_few_sizes_make_up_every_length(longest):
    sizes = chunk_sizes(longest)
    assert sizes[0] == longest and sizes[-1] == 1 and len(sizes) <= 5 and list(sizes) == sorted(set(sizes), reverse=True)
    for length in range(1, 300):
        chunks = chunk_lengths(length, sizes)
        assert sum(chunks) == length and list(chunks) == sorted(chunks, reverse=True)


# What is refused.

BAD = [
    ([], "prompt 1: no token"),
    (5, "prompt 1: i64[] where [length] was expected"),
    ([[1, 2]], "prompt 1: i64[1,2] where [length] was expected"),
    ([1.5, 2], "prompt 1: f64[2] where integers were expected"),
    ([True, False], "prompt 1: bool[2] where integers were expected"),
    ([3, -1], "prompt 1: numbers from -1 to 3 where 0 to 2147483647 were expected"),
    ([3, 2**31], "prompt 1: numbers from 3 to 2147483648 where"),
    ("text", "prompt 1: text, 'text'; encode it first"),
    ([[1], [2, 3]], "prompt 1: no array can be made of it"),
    ([1, 2, 3, 4, 5], "prompt 1: 5 tokens and 4 to generate are 9, more than 8"),
    (None, "prompt 1: "),
]


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize(("bad", "got"), BAD)
def test_a_prompt_that_cannot_be_continued_is_refused_with_its_number(bad, got, lazy):
    prompts = [[1, 2, 3, 4], bad, [5]]

    def run():
        places = Places(iter(prompts) if lazy else prompts, 4, num_groups=3, max_length=8)
        assert lazy, "a list is checked before anything runs"
        assert places.admit(0) is not None
        try:
            places.admit(1)
        finally:
            _, third = places.admit(1)
            assert third.prompt == 2  # the rest is usable

    with pytest.raises(BatchError) as caught:
        run()
    where, found, fix = str(caught.value).splitlines()
    assert where.startswith(
        "pipe.generate(..., prompts, ...): a prompt is token numbers that the model knows, at least one, with room"
    )
    assert found.startswith(f"  Got: {got}")
    assert fix.startswith("  Fix: pass lists or arrays of integers") and "make a carry with more room" in fix


def test_all_prompts_of_a_list_that_cannot_be_continued_are_named():
    with pytest.raises(BatchError) as caught:
        Places([[1], [], [2.5], [3]], 2, num_groups=1)
    assert "prompt 1: no token\n       prompt 2: f64[1]" in str(caught.value)
    assert "carry" not in str(caught.value).splitlines()[-1]


@pytest.mark.parametrize(
    ("prompts", "got"),
    [
        (np.arange(3), "an array i64[3]"),
        (jnp.zeros((1, 2, 3), int), "an array i32[1,2,3]"),
        ([1, 2, 3], "one list of numbers: [1, 2, 3]"),
        ("text", "text: 'text'"),
        ({"tokens": [[1]]}, "{'tokens': [[1]]}, a dict"),
        (7, "7, a int"),
        (None, "None, a NoneType"),
    ],
)
def test_what_are_no_prompts_is_refused(prompts, got):
    with pytest.raises(BatchError) as caught:
        Places(prompts, 2, num_groups=1)
    where, found, fix = str(caught.value).splitlines()
    assert where.startswith("pipe.generate(..., prompts, ...): prompts is an iterable of prompts, each a sequence of token numbers")
    assert found == f"  Got: {got}." and fix.startswith("  Fix: pass [")


@pytest.mark.parametrize("prompts", [[], (), np.zeros((0, 4), int), iter([])])
def test_no_prompt_at_all_is_refused(prompts):
    with pytest.raises(BatchError, match="there is at least one prompt"):
        Places(prompts, 2, num_groups=1).admit(0)


def test_what_the_iterator_raises_comes_out_with_the_number_and_the_rest_is_usable():
    places = Places(map(np.atleast_1d, map(int, ["1", "x", "3"])), 2, num_groups=3)
    assert places.admit(0) is not None
    with pytest.raises(ValueError, match="invalid literal") as caught:
        places.admit(1)
    assert caught.value.__notes__ == ["jaxpp: pipe.generate: the iterator of prompts raised this when it was asked for prompt 1"]
    _, third = places.admit(1)
    assert third.prompt == 2


@pytest.mark.parametrize("number", [0, -1, 1.5, "many", None, [3, 0], [2.5, 1], [[1, 2]], True])
def test_numbers_of_tokens_below_one_are_refused(number):
    with pytest.raises(ArgumentError, match="num_tokens is a whole number of at least 1"):
        Places([[1], [2]], number, num_groups=1)


def test_numbers_of_tokens_are_as_many_as_prompts():
    with pytest.raises(ArgumentError, match="3 numbers and 2 prompts"):
        Places([[1], [2]], [1, 2, 3], num_groups=1)
    places = Places(iter([[1], [2]]), [1], num_groups=2)
    assert places.admit(0) is not None
    with pytest.raises(ArgumentError, match="1 numbers, and a prompt 1, counted from 0"):
        places.admit(1)


@pytest.mark.parametrize("stop", ["</s>", -1, 1.5, [3, "x"], {"eos": 2}, np.array([[[1]]]), True, [[]], [[1, [2]]]])
def test_stop_tokens_that_are_none_are_refused(stop):
    with pytest.raises(ArgumentError) as caught:
        Places([[1]], 2, num_groups=1, stop=stop)
    assert "stop is a token number that ends a sequence, or several" in str(caught.value)


@pytest.mark.parametrize("stop", [12, [3, 12], [[3, 4], [5, 40]]])
def test_stop_tokens_that_the_model_does_not_make_are_refused(stop):
    with pytest.raises(ArgumentError, match=r"a token that ends a sequence is one that the model makes(.|\n)*of 12 tokens"):
        Places([[1]], 2, num_groups=1, stop=stop, vocab=12)
    Places([[1]], 2, num_groups=1, stop=[11, [3, 0]], vocab=12)
