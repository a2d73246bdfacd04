"""The caches of models/gpt.py and models/nnx_gpt.py: whatever number of tokens a call takes, the logits are those of all tokens."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jaxtyping import install_import_hook

from models.gpt import GPT

with install_import_hook("models", "beartype.beartype"):
    from models.nnx_gpt import NNXGPT

VOCABULARY, LENGTH, ROOM = 32, 75, 80
SIZES: dict[str, Any] = {"vocab_size": VOCABULARY, "max_length": ROOM, "width": 16, "depth": 2, "num_heads": 2}
CHUNKS = ((1,) * LENGTH, (64, 8, 1, 1, 1), (LENGTH,))
TOLERANCE = {"float64": 1e-12, "float32": 1e-5}  # of the largest logit


def tokens_of(count):
    return jnp.asarray(np.random.default_rng(0).integers(0, VOCABULARY, (count, LENGTH)))


def linen_case(dtype, count):
    """All logits at once, an empty cache, and a function that continues from one."""
    model, tokens = GPT(**SIZES, dtype=dtype, param_dtype="float64" if dtype == "float64" else "float32"), tokens_of(count)
    params = jax.jit(lambda key: model.init(key, tokens, deterministic=True)["params"])(jax.random.key(0))
    decoder = model.clone(decode=True)
    shapes = jax.eval_shape(decoder.init, jax.random.key(0), jnp.ones((count, ROOM), int))["cache"]
    cache = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    def decode(cache, tokens):
        logits, updated = decoder.apply({"params": params, "cache": cache}, tokens, mutable=["cache"])
        return updated["cache"], logits

    return jax.jit(lambda params: model.apply({"params": params}, tokens, deterministic=True))(params), cache, jax.jit(decode)


def nnx_case(dtype, count):
    """The same in NNX."""
    param_dtype = "float64" if dtype == "float64" else "float32"
    model = NNXGPT(**SIZES, dtype=dtype, param_dtype=param_dtype, rngs=nnx.Rngs(0))
    logits = model(tokens_of(count), deterministic=True)
    model.init_cache(count, ROOM, dtype)
    graphdef, params, cache, rest = nnx.split(model, nnx.Param, nnx.Cache, ...)

    def decode(cache, tokens):
        model = nnx.merge(graphdef, params, cache, rest, copy=True)
        logits = model(tokens)
        return nnx.state(model, nnx.Cache), logits

    return logits, cache, jax.jit(decode)


CASES = {"linen": linen_case, "nnx": nnx_case}


def assert_close(found, expected, dtype):
    expected = np.asarray(expected, "float64")
    np.testing.assert_allclose(np.asarray(found, "float64"), expected, rtol=0, atol=TOLERANCE[dtype] * abs(expected).max())


def logits_in_parts(decode, cache, sizes):
    found = []
    for end, size in zip(itertools.accumulate(sizes), sizes, strict=True):
        cache, logits = decode(cache, tokens_of(2)[:, end - size : end])
        found.append(logits)
    return jnp.concatenate(found, axis=1)


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("framework", CASES)
def test_logits_are_those_of_all_tokens_whatever_number_of_tokens_a_call_takes(framework, dtype):
    with jax.enable_x64(dtype == "float64"):
        expected, empty, decode = CASES[framework](dtype, 2)
        assert expected.dtype == dtype
        for sizes in CHUNKS:
            assert_close(logits_in_parts(decode, empty, sizes), expected, dtype)


@pytest.mark.long
@pytest.mark.parametrize("framework", CASES)
def test_in_bfloat16_the_logits_are_as_near_to_those_of_float32_as_without_a_cache(framework):
    exact, _, _ = CASES[framework]("float32", 2)
    plain, empty, decode = CASES[framework]("bfloat16", 2)
    assert {leaf.dtype for leaf in jax.tree.leaves(empty) if leaf.ndim} == {plain.dtype} == {jnp.dtype("bfloat16")}

    def error(logits):
        return np.sqrt(np.mean((np.asarray(logits, "float32") - np.asarray(exact)) ** 2))

    for sizes in CHUNKS:
        assert error(logits_in_parts(decode, empty, sizes)) < 1.25 * error(plain)


@pytest.mark.long
@pytest.mark.parametrize("framework", ["nnx", "linen"])
def test_sequences_under_vmap_have_caches_and_positions_of_their_own(framework):
    expected, _, _ = CASES[framework]("float32", 3)
    _, empty, decode = CASES[framework]("float32", 1)
    begins, caches = (0, 7, 40), []
    for begin, tokens in zip(begins, tokens_of(3), strict=True):
        caches.append(decode(empty, tokens[None, :begin])[0] if begin else empty)
    caches = jax.tree.map(lambda *leaves: jnp.stack(leaves), *caches)
    step = jax.jit(jax.vmap(decode))
    for k in range(3):
        next_tokens = jnp.stack(
            [tokens[None, begin + k : begin + k + 1] for begin, tokens in zip(begins, tokens_of(3), strict=True)]
        )
        caches, logits = step(caches, next_tokens)
        assert_close(logits[:, 0, 0], jnp.stack([expected[i, begin + k] for i, begin in enumerate(begins)]), "float32")


@pytest.mark.long
def test_the_parameters_are_those_of_the_model_without_a_cache():
    model, tokens = GPT(**SIZES), tokens_of(1)
    plain = model.init(jax.random.key(0), tokens, deterministic=True)
    decoding = model.clone(decode=True).init(jax.random.key(0), tokens)
    assert set(plain) == {"params"}
    jax.tree.map(np.testing.assert_array_equal, plain["params"], decoding["params"])
    assert set(decoding["params"]["h_0"]["attn"]) == {"query", "key", "value", "out"}
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(decoding["cache"]))


@pytest.mark.long
def test_each_block_keeps_all_that_it_reads_of_the_cache():
    cache = GPT(**SIZES).clone(decode=True).init(jax.random.key(0), tokens_of(1))["cache"]
    assert set(cache) == {"cache_index", "h_0", "h_1"}
    for block in ("h_0", "h_1"):
        assert jax.tree.map(jnp.shape, cache[block]["cached"]) == {
            "cache_index": (),
            "cached_key": (1, LENGTH, 2, 8),
            "cached_value": (1, LENGTH, 2, 8),
        }


@pytest.mark.long
def test_an_nnx_model_without_a_cache_has_none():
    model = NNXGPT(**SIZES, rngs=nnx.Rngs(0))
    assert not nnx.to_pure_dict(nnx.state(model, nnx.Cache))
    model.init_cache(1, 8)
    model(tokens_of(1)[:, :3])
    assert nnx.to_pure_dict(nnx.state(model, nnx.Cache))["index"] == 3
    model.init_cache(1, 8)
    assert nnx.to_pure_dict(nnx.state(model, nnx.Cache))["index"] == 0
