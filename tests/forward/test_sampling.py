"""The next token: which may be drawn, how often, what its log-probability is, and which samplers are refused."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxpp
from jaxpp.errors import ArgumentError
from jaxpp.forward.sampling import Sampling, draw, sampler_of

VOCAB = 12
NUM_DRAWS = 20_000
RULES = [
    Sampling(),
    Sampling(temperature=0.5),
    Sampling(temperature=3.0),
    Sampling(top_k=1),
    Sampling(top_k=4),
    Sampling(top_k=VOCAB),
    Sampling(top_p=0.3),
    Sampling(top_p=0.9),
    Sampling(top_p=1.0),
    Sampling(temperature=0.7, top_k=5, top_p=0.8),
    Sampling(temperature=2, top_k=3, top_p=0.5),
]


def reference(logits, rule):
    """The probability of each token, in NumPy and float64."""
    x = np.asarray(logits, np.float64) / rule.temperature
    order = sorted(range(len(x)), key=lambda token: (-x[token], token))[: rule.top_k]
    p = np.exp(x - x.max())
    p /= p[order].sum()
    kept, mass = [], 0.0
    for token in order:
        kept.append(token)
        mass += p[token]
        if rule.top_p is not None and mass >= rule.top_p:
            break
    probabilities = np.zeros(len(x))
    probabilities[kept] = p[kept] / p[kept].sum()
    return probabilities


@functools.partial(jax.jit, static_argnums=(0, 2))
def draws(rule, logits, number=NUM_DRAWS):
    return jax.vmap(rule, (None, 0))(logits, jax.random.split(jax.random.key(3), number))


def frequencies(rule, logits):
    return np.bincount(np.asarray(draws(rule, logits)), minlength=len(logits)) / NUM_DRAWS


LOWER = [pytest.param(dtype, marks=pytest.mark.long) for dtype in ("bfloat16", "float16")]


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("dtype", ["float32", *LOWER])
def test_tokens_are_drawn_with_the_probabilities_of_the_reference(rule, dtype):
    logits = jnp.asarray(np.random.default_rng(5).normal(size=VOCAB) * 1.5, dtype)
    wanted, found = reference(np.asarray(logits, np.float64), rule), frequencies(rule, logits)
    assert not found[wanted == 0].any()
    np.testing.assert_allclose(found, wanted, atol=5 * math.sqrt(0.25 / NUM_DRAWS))  # five standard deviations


@pytest.mark.long
def test_in_float64_they_are_too(x64):
    logits = jnp.asarray(np.random.default_rng(6).normal(size=VOCAB))
    assert logits.dtype == jnp.float64
    rule = Sampling(0.7, 5, 0.8)
    wanted, found = reference(logits, rule), frequencies(rule, logits)
    np.testing.assert_allclose(found, wanted, atol=5 * math.sqrt(0.25 / NUM_DRAWS))
    assert draw(rule, logits, jax.random.key(0))[1].dtype == jnp.float64


@pytest.mark.long
@settings(deadline=None, max_examples=30)
@given(
    logits=st.lists(st.sampled_from([-math.inf, -8.0, -1.0, -0.5, 0.0, 0.25, 1.0, 6.0]), min_size=8, max_size=8),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_k=st.sampled_from([None, 1, 2, 5, 8]),
    top_p=st.sampled_from([None, 0.001, 0.2, 0.6183, 0.9501, 1.0]),
)
def test_just_the_allowed_tokens_are_drawn_with_ties_and_impossible_tokens(logits, temperature, top_k, top_p):
    if max(logits) == -math.inf:
        return
    rule = Sampling(temperature, top_k, top_p)
    wanted = reference(logits, rule)
    edge = np.cumsum(np.sort(reference(logits, Sampling(temperature, top_k)))[::-1])
    if top_p is not None and top_p < 1 and np.abs(edge - top_p).min() < 1e-5:
        return  # a rounding decides
    np.testing.assert_allclose(jax.nn.softmax(rule.adjusted(jnp.asarray(logits))), wanted, atol=1e-6)
    assert set(np.asarray(draws(rule, jnp.asarray(logits), 200)).tolist()) <= set(np.flatnonzero(wanted).tolist())


@pytest.mark.parametrize("rule", [Sampling(0), Sampling(0.0, 3, 0.5), Sampling(top_k=1), Sampling(1e-3), Sampling(top_p=1e-9)])
def test_the_most_likely_token_is_always_taken(rule):
    logits = jnp.array([0.0, 2.0, -1.0, 1.0])
    assert set(np.asarray(draws(rule, logits, 500)).tolist()) == {1}


@pytest.mark.parametrize("temperature", [1e-7, 1e-20, 1e-38, 1e-45, 1e-300])
def test_temperatures_near_zero_are_nearly_greedy_and_make_no_infinities(temperature):
    logits = jnp.array([-jnp.inf, 500.0, -3e4, 500.0, 499.0])
    found = np.bincount(np.asarray(draws(Sampling(temperature), logits, 2000)), minlength=5)
    assert found[[0, 2, 4]].sum() == 0 and found[1] == pytest.approx(1000, abs=120) and found[3] == 2000 - found[1]


def test_of_equal_tokens_those_with_the_smaller_numbers_are_kept():
    logits = jnp.zeros(6)
    assert set(np.asarray(draws(Sampling(top_k=2), logits, 500)).tolist()) == {0, 1}
    assert set(np.asarray(draws(Sampling(top_p=0.4), logits, 500)).tolist()) == {0, 1, 2}
    assert set(np.asarray(draws(Sampling(0), logits, 500)).tolist()) == {0}
    assert Sampling(0).adjusted(logits).tolist() == [0.0, *[-math.inf] * 5]


@pytest.mark.long
def test_at_a_temperature_alone_the_token_is_that_of_jax_random_categorical():
    logits = jax.random.normal(jax.random.key(1), (300, 50)) * 3
    keys = jax.random.split(jax.random.key(2), 300)
    for temperature in (1.0, 0.7):
        wanted = jnp.stack([jax.random.categorical(key, row / temperature) for key, row in zip(keys, logits, strict=True)])
        np.testing.assert_array_equal(jax.vmap(Sampling(temperature))(logits, keys), wanted)


# draw: the token and its log-probability.


@pytest.mark.parametrize("rule", [None, RULES[0], RULES[4], RULES[9]], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_log_probability_is_that_of_the_model_whatever_the_rule(rule, dtype):
    logits = jnp.asarray(np.random.default_rng(7).normal(size=(40, VOCAB)) * 2, dtype)
    keys = jax.random.split(jax.random.key(4), 40)
    tokens, logprobs = jax.jit(jax.vmap(functools.partial(draw, sampler_of(rule))))(logits, keys)
    assert tokens.dtype == jnp.int32 and logprobs.dtype == jnp.float32
    x = np.asarray(logits, np.float64)
    wanted = x - np.log(np.exp(x).sum(-1, keepdims=True))
    np.testing.assert_allclose(logprobs, wanted[np.arange(40), tokens], rtol=1e-5, atol=1e-5)


def test_the_sampler_gets_wide_logits_of_one_position():
    seen = []

    def sample(logits, key):
        seen.append((logits.shape, logits.dtype, jax.random.key_data(key).shape))
        return jnp.argmax(logits)

    keys = jax.random.split(jax.random.key(0), 3)
    jax.jit(jax.vmap(functools.partial(draw, sampler_of(sample))))(jnp.ones((3, 7), jnp.bfloat16), keys)
    assert seen == [((7,), jnp.float32, (2,))]


@pytest.mark.parametrize("sample", [lambda logits, key: 3, lambda logits, key: np.int64(3), lambda logits, key: jnp.uint8(3)])
def test_a_sampler_may_return_any_integer_scalar(sample):
    token, logprob = draw(sampler_of(sample), jnp.zeros(8), jax.random.key(0))
    assert token == 3 and token.dtype == jnp.int32 and logprob == pytest.approx(-math.log(8))


# What is refused.


@pytest.mark.parametrize(
    ("options", "got"),
    [
        ({"temperature": -0.1}, "temperature=-0.1 is no finite number of at least 0"),
        ({"temperature": math.inf}, "temperature=inf is no finite"),
        ({"temperature": math.nan}, "temperature=nan is no finite"),
        ({"temperature": "hot"}, "temperature='hot' is no finite"),
        ({"temperature": True}, "temperature=True is no finite"),
        ({"top_k": 0}, "top_k=0 is no whole number of at least 1"),
        ({"top_k": 2.5}, "top_k=2.5 is no whole"),
        ({"top_p": 0}, "top_p=0 is no number above 0 and up to 1"),
        ({"top_p": 1.01}, "top_p=1.01 is no number"),
        ({"top_p": math.nan}, "top_p=nan is no number"),
    ],
)
def test_options_out_of_range_are_refused(options, got):
    with pytest.raises(ArgumentError) as caught:
        Sampling(**options)
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("jaxpp.Sampling(...): tokens are drawn at a temperature")
    assert lines[1].startswith(f"  Got: {got}") and lines[2].startswith("  Fix: pass for example jaxpp.Sampling(temperature=0.8")


def test_numbers_of_numpy_are_numbers():
    assert Sampling(np.float32(0.5), np.int64(3), np.float64(0.5))(jnp.zeros(5), jax.random.key(0)) < 3


@pytest.mark.parametrize(
    ("sample", "got", "fix"),
    [
        ("nucleus", "'nucleus'", "pass for example sample=jaxpp.Sampling(temperature=0.8, top_k=50)"),
        (0.7, "0.7", "pass sample=jaxpp.Sampling(temperature=0.7)"),
        (Sampling, "<class", "call it: sample=jaxpp.Sampling()"),
        ({"top_k": 3}, "{'top_k': 3}", "pass for example"),
    ],
)
def test_what_is_no_sampler_is_refused(sample, got, fix):
    with pytest.raises(ArgumentError) as caught:
        sampler_of(sample)
    lines = str(caught.value).splitlines()
    assert (
        lines[0] == 'sample: sample is None or "greedy", a jaxpp.Sampling, or a function (logits [vocab], key[, history]) -> token.'
    )
    assert lines[1].startswith(f"  Got: {got}") and lines[2].startswith(f"  Fix: {fix}")


@pytest.mark.parametrize(
    ("sample", "got"),
    [
        (lambda logits, key: logits, "f32[8]"),
        (lambda logits, key: logits.max(), "f32[]"),
        (lambda logits, key: logits.argmax()[None], "i32[1]"),
        (lambda logits, key: (logits.argmax(), key), "('i32[]', 'key<fry>[]')"),
        (lambda logits, key: logits.argmax() > 1, "bool[]"),
        (lambda logits, key: True, "True"),
        (lambda logits, key: None, "None"),
        (lambda logits, key: "token", "'token'"),
    ],
)
def test_a_sampler_that_returns_no_integer_scalar_is_refused_when_traced(sample, got):
    with pytest.raises(ArgumentError) as caught:
        jax.eval_shape(functools.partial(draw, sampler_of(sample)), jnp.zeros(8), jax.random.key(0))
    lines = str(caught.value).splitlines()
    assert lines[0] == "sample(logits, key): a sampling function returns the number of one token, an integer scalar."
    assert lines[1] == f"  Got: {got}." and lines[2].startswith("  Fix: return for example jax.random.categorical(key, logits)")


def test_what_a_sampler_raises_comes_out_with_a_note():
    with pytest.raises(TypeError, match="takes 1 positional") as caught:
        draw(sampler_of(lambda logits: 0), jnp.zeros(8), jax.random.key(0))
    assert caught.value.__notes__ == ["jaxpp: raised by sample, which was called with logits f32[8] and a key"]


def test_a_penalty_makes_what_there_was_less_likely_and_never_takes_tokens_out():
    logits = jnp.array([2.0, -1.0, 1.5, 3.0, 0.5])
    history = jaxpp.History(jnp.array([0, 1, 1, -1, -1]), jnp.int32(2), jnp.int32(3))
    rule = jaxpp.Sampling(repetition_penalty=2.0, never=[3])
    np.testing.assert_array_equal(rule.adjusted(logits, history), [1.0, -2.0, 1.5, -jnp.inf, 0.5])
    greedy = jaxpp.Sampling(temperature=0, repetition_penalty=2.0, never=np.array([3]))
    assert int(greedy(logits, jax.random.key(0), history)) == 2
    assert hash(rule) == hash(jaxpp.Sampling(repetition_penalty=2.0, never=(3,)))
    with pytest.raises(ArgumentError, match="a penalty needs the tokens that there were"):
        rule(logits, jax.random.key(0))
    with pytest.raises(ArgumentError, match="tokens that are never drawn are in the vocabulary"):
        jaxpp.Sampling(never=[5]).adjusted(logits)


@pytest.mark.parametrize(
    "wrong", [{"never": 3}, {"never": "ab"}, {"never": [-1]}, {"repetition_penalty": 0}, {"repetition_penalty": "2"}]
)
def test_penalties_and_tokens_that_are_none_are_refused(wrong):
    with pytest.raises(ArgumentError, match=f"Got: {next(iter(wrong))}="):
        jaxpp.Sampling(**wrong)


def test_a_forbidden_token_is_never_drawn_whatever_else_is_impossible():
    logits, key = jnp.array([-jnp.inf, 2.0, 1.0]), jax.random.key(0)
    for rule in (Sampling, lambda **options: Sampling(temperature=0, **options), lambda **options: Sampling(top_k=2, **options)):
        with pytest.raises(ArgumentError, match=r"one token at least may be drawn(.|\n)*Got: never has all 3 tokens"):
            rule(never=[0, 1, 2])(logits, key)
        assert int(rule(never=[1, 2])(logits, key)) == -1  # not the token 0, whose logit is -inf
        assert int(rule(never=[0, 1])(logits, key)) == 2
        assert math.isnan(draw(rule(never=[1, 2]), logits, key)[1])  # by which a generation refuses it
    for never in ((token for token in (1, 2)), {1, 2}, np.array([1, 2])):
        assert sorted(Sampling(never=never).never) == [1, 2]


@pytest.mark.parametrize(
    "wrong", [{"temperature": 1e39}, {"repetition_penalty": 1e39}, {"repetition_penalty": 1e-46}, {"never": jnp.array(3)}]
)
def test_numbers_that_are_infinite_or_zero_in_float32_are_refused(wrong):
    with pytest.raises(ArgumentError, match=f"Got: {next(iter(wrong))}="):
        Sampling(**wrong)
