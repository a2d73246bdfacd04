"""Generated tokens are those of a loop on one device, token by token, however many stages, groups and places there are."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpp
from tests.decoders import MODELS, VOCAB, Made, loop, plain, prompts_of

NUM_TOKENS, CHUNK = 6, 8
PROMPTS = prompts_of(1, 3, 8, 5, 17, 1, 9, 16)
"""One token, fewer than a chunk, exactly one chunk or two, more than a chunk."""

KEY = jax.random.key(7)


def near_the_top(logits, key):
    """A user's rule of sampling: the second or the third best."""
    return jnp.argsort(logits)[-2 - jax.random.randint(key, (), 0, 2)]


SAMPLES = {
    "greedy": None,
    "temperature": jaxpp.Sampling(temperature=1.3),
    "top-k": jaxpp.Sampling(temperature=2.0, top_k=5),
    "top-p": jaxpp.Sampling(temperature=1.5, top_k=20, top_p=0.9),
    "function": near_the_top,
}


@pytest.fixture(scope="module")
def decoder():
    return plain()


@pytest.fixture(scope="module")
def forwards(decoder):
    """The model over 1, 2 and 4 stages, each cut when it is asked for."""
    known = {}

    def get(num_stages):
        if num_stages not in known:
            known[num_stages] = decoder.forward(num_stages)
        return known[num_stages]

    return get


def stopped(wanted, stop):
    """What is left of sequences that end at a stop token."""
    ends = [next((k + 1 for k, token in enumerate(made.tokens) if token in stop), len(made.tokens)) for made in wanted]
    return [Made(made.tokens[:end], made.logprobs[:end]) for made, end in zip(wanted, ends, strict=True)]


def stops_for(wanted):
    """Two stop tokens that end a sequence at its first token and others later, and leave some as they are."""
    for stop in itertools.combinations(range(VOCAB), 2):
        lengths = {len(made.tokens) for made in stopped(wanted, stop)}
        if {1, NUM_TOKENS} < lengths:
            return stop
    raise AssertionError("no tokens end these sequences at different times")


def check(generation, wanted, tolerance=1e-5):
    """Every token of every prompt, its place, its log-probability, and which one is the last."""
    tokens = list(generation)
    for prompt, made in enumerate(wanted):
        found = [token for token in tokens if token.prompt == prompt]
        assert [token.token for token in found] == made.tokens, f"prompt {prompt}"
        assert [token.index for token in found] == list(range(len(made.tokens)))
        assert [token.last for token in found] == [False] * (len(made.tokens) - 1) + [True]
        np.testing.assert_allclose([token.logprob for token in found], made.logprobs, rtol=tolerance, atol=tolerance)
    assert len(tokens) == sum(len(made.tokens) for made in wanted)


def check_case(decoder, forwards, num_stages, num_groups, group_size, sample):
    forward, params = forwards(num_stages)
    given = {"sample": sample, "key": KEY}
    options = {**given, "num_groups": num_groups, "group_size": group_size, "chunk": CHUNK}
    wanted = loop(decoder, PROMPTS, NUM_TOKENS, **given)
    check(forward.generate(params, decoder.fn, decoder.carry, PROMPTS, NUM_TOKENS, **options), wanted)
    stop = stops_for(wanted)
    generation = forward.generate(params, decoder.fn, decoder.carry, PROMPTS, NUM_TOKENS, **options, stop=stop)
    check(generation, stopped(wanted, stop))


CASES = [(1, 1, 1), (1, 2, 3), (2, 2, 1), (2, 1, 3), (4, 1, 1), (4, 4, 1), (4, 8, 1), (4, 2, 3)]


@pytest.mark.parametrize(("num_stages", "num_groups", "group_size"), CASES)
def test_tokens_are_those_of_one_device(decoder, forwards, num_stages, num_groups, group_size):
    check_case(decoder, forwards, num_stages, num_groups, group_size, None)


@pytest.mark.parametrize("sample", SAMPLES)
def test_sampled_tokens_are_those_of_one_device(decoder, forwards, sample):
    check_case(decoder, forwards, 2, 2, 1, SAMPLES[sample])


def test_a_group_draws_the_tokens_of_its_sequences(decoder, forwards):
    check_case(decoder, forwards, 2, 1, 3, SAMPLES["top-p"])


@pytest.mark.slow
@pytest.mark.parametrize("sample", SAMPLES)
@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_tokens_are_those_of_one_device_in_every_case(decoder, forwards, num_stages, sample):
    for groups, size in itertools.product((1, num_stages, 2 * num_stages), (1, 2, 3)):
        check_case(decoder, forwards, num_stages, groups, size, SAMPLES[sample])


@pytest.mark.parametrize("group_size", [1, 3])
@pytest.mark.parametrize("num_prompts", [1, 2, 8])
def test_one_token_for_each_prompt(decoder, forwards, num_prompts, group_size):
    forward, params = forwards(2)
    wanted = loop(decoder, PROMPTS[:num_prompts], 1)
    check(forward.generate(params, decoder.fn, decoder.carry, PROMPTS[:num_prompts], 1, group_size=group_size), wanted)


@pytest.mark.parametrize("group_size", [1, 3])
def test_fewer_prompts_than_places(decoder, forwards, group_size):
    forward, params = forwards(4)
    wanted = loop(decoder, PROMPTS[:2], NUM_TOKENS)
    options = {"num_groups": 8, "group_size": group_size, "chunk": CHUNK}
    check(forward.generate(params, decoder.fn, decoder.carry, PROMPTS[:2], NUM_TOKENS, **options), wanted)


def test_each_prompt_may_have_a_number_of_tokens_of_its_own(decoder, forwards):
    forward, params = forwards(2)
    counts = [3, 1, 6, 2, 5, 1, 4, 6]
    wanted = [Made(*(each[:count] for each in made)) for made, count in zip(loop(decoder, PROMPTS, 6), counts, strict=True)]
    check(forward.generate(params, decoder.fn, decoder.carry, PROMPTS, counts, chunk=CHUNK, group_size=3), wanted)
    made = forward.generate(params, decoder.fn, decoder.carry, iter(PROMPTS), counts, chunk=CHUNK).collect()
    assert [row.tolist() for row in made] == [each.tokens for each in wanted]


@pytest.mark.parametrize("group_size", [1, 2])
def test_nothing_of_a_sequence_is_left_for_the_next_in_its_place(decoder, forwards, group_size):
    forward, params = forwards(2)
    prompts = prompts_of(24, 1, 24, 2, 20, 1, 1, seed=3)  # long ones fill the caches of the short ones that follow
    wanted = loop(decoder, prompts, NUM_TOKENS)
    options = {"num_groups": 1, "group_size": group_size, "chunk": CHUNK}
    check(forward.generate(params, decoder.fn, decoder.carry, prompts, NUM_TOKENS, **options), wanted)


def teacher_forced(decoder, prompt, tokens):
    """The logits before each token, on one device, given the tokens before it."""
    step, carry, found = jax.jit(decoder.fn), decoder.carry, []
    for token in [*prompt, *tokens[:-1]]:
        carry, logits = step(decoder.params, carry, np.array([[token]], np.int32))
        found.append(np.asarray(logits.reshape(-1, VOCAB)[-1], np.float32))
    return np.stack(found[len(prompt) - 1 :])


@pytest.mark.parametrize(
    ("param_dtype", "dtype", "group_size"),
    [("bfloat16", "bfloat16", 1), ("bfloat16", "bfloat16", 3), ("bfloat16", "float32", 1), ("float16", "float32", 3)],
)
def test_in_lower_precision_tokens_are_the_best_within_a_few_roundings(param_dtype, dtype, group_size):
    decoder = plain(param_dtype, dtype)
    forward, params = decoder.forward(2)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(params)} == {param_dtype}
    prompts = PROMPTS[:5]
    tokens = list(forward.generate(params, decoder.fn, decoder.carry, prompts, NUM_TOKENS, group_size=group_size, chunk=CHUNK))
    for number, prompt in enumerate(prompts):
        mine = [token for token in tokens if token.prompt == number]
        drawn = [token.token for token in mine]
        logits = teacher_forced(decoder, prompt, drawn)
        rounding = 8 * np.abs(logits).max() * float(jnp.finfo(dtype).eps)
        chosen = logits[np.arange(NUM_TOKENS), drawn]
        assert (chosen >= logits.max(-1) - rounding).all(), (number, logits.max(-1) - chosen)
        logprobs = np.asarray(jax.nn.log_softmax(logits))[np.arange(NUM_TOKENS), drawn]
        np.testing.assert_allclose([token.logprob for token in mine], logprobs, atol=2 * rounding)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "plain"])
def test_models_generate_unedited(name):
    decoder = MODELS[name]()
    forward, params = decoder.forward(2)
    prompts = prompts_of(1, 3, 8, 5, 17, 17, 17)
    wanted = loop(decoder, prompts, NUM_TOKENS)
    assert len({tuple(made.tokens) for made in wanted}) >= 3  # not one token for ever
    for group_size in (1,) if name == "hugging-face" else (1, 2):
        options = {"group_size": group_size, "chunk": 2 if name == "recurrent" else CHUNK}  # its loop is unrolled
        generation = forward.generate(params, decoder.fn, decoder.carry, prompts, NUM_TOKENS, **options)
        check(generation, wanted)
        assert name == "recurrent" or (generation.num_passes > sum(map(len, prompts))) == decoder.one_token


def test_prompts_of_an_iterator_whose_number_is_not_known_may_show_a_bar(decoder, forwards):
    forward, params = forwards(2)
    (wanted,) = loop(decoder, PROMPTS[:1], 2)
    made = forward.generate(params, decoder.fn, decoder.carry, iter(PROMPTS[:1]), 2, chunk=CHUNK, progress=True)
    assert [each.tolist() for each in made.collect()] == [wanted.tokens]
