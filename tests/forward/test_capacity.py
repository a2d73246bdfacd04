"""How many tokens a carry has room for: found where a model writes at a counter of tokens, and never guessed."""

import dataclasses
import warnings
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxpp.forward.capacity import capacity
from jaxpp.stages.graph import trace

SIZE, WIDTH, VOCAB = 12, 4, 7


def room(fn, params, carry, num_tokens=1, values=False):
    """The capacity of a carry at a number of tokens a call; with its values, or with shapes alone."""
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf)), carry)
    graph, _ = trace(fn, params, shapes, jax.ShapeDtypeStruct((1, num_tokens), jnp.int32))
    leaves = jax.tree.leaves(carry if values else shapes)
    return capacity(graph, leaves, first=len(jax.tree.leaves(params)), num_tokens=num_tokens)


def overflows(fn, params, carry, num_tokens=1, most=40):
    """After how many tokens a model first differs from itself with a carry of many more places: the truth, by running it."""
    step = jax.jit(fn)
    small, large = carry
    for count in range(0, most, num_tokens):
        tokens = jnp.asarray(np.random.default_rng(count).integers(0, VOCAB, (1, num_tokens)))
        small, a = step(params, small, tokens)
        large, b = step(params, large, tokens)
        if not np.allclose(a, b, atol=1e-5):
            return count
    return None


# Plain models: a cache written in all the ways that JAX has.

PARAMS = {"embed": jax.random.normal(jax.random.key(0), (VOCAB, WIDTH))}


def carry_of(size=SIZE, axis=1, dtype=jnp.float32, **others):
    shape = [1, WIDTH]
    shape.insert(axis, size)
    return {"cache": jnp.zeros(shape, dtype), "pos": jnp.zeros((), jnp.int32), **others}


def attended(cache, pos, num_tokens):
    """An output that depends on every written row, and on where it stands."""
    weights = jnp.cos(jnp.arange(cache.shape[1]) * 0.7) * (jnp.arange(cache.shape[1]) < pos + num_tokens)
    return jnp.einsum("bsw,s->bw", cache.astype(jnp.float32), weights)


def model(write, count=lambda pos, num_tokens: pos + num_tokens):
    """A model that writes its embeddings into the cache, by ``write(cache, x, pos)``."""

    def fn(params, carry, tokens):
        x = params["embed"][tokens].astype(carry["cache"].dtype)
        cache = write(carry["cache"], x, carry["pos"])
        return {**carry, "cache": cache, "pos": count(carry["pos"], tokens.shape[1])}, attended(
            cache, carry["pos"], tokens.shape[1]
        )

    return fn


def one_hot(cache, x, pos):
    return jnp.where((jnp.arange(cache.shape[1]) == pos)[None, :, None], x, cache)


WRITES = {
    "dynamic_update_slice": lambda cache, x, pos: jax.lax.dynamic_update_slice(cache, x, (0, pos, 0)),
    "in_dim": lambda cache, x, pos: jax.lax.dynamic_update_slice_in_dim(cache, x, pos, axis=1),
    "scatter of rows": lambda cache, x, pos: cache.at[:, pos + jnp.arange(x.shape[1])].set(x),
    "scatter, two indices": lambda cache, x, pos: cache.at[jnp.arange(1)[:, None], (pos + jnp.arange(x.shape[1]))[None]].set(x),
    "scatter, dropping": lambda cache, x, pos: cache.at[0, pos + jnp.arange(x.shape[1])].set(x[0], mode="drop"),
    "scatter, adding": lambda cache, x, pos: cache.at[:, pos + jnp.arange(x.shape[1])].add(x),
    "numpy's arange": lambda cache, x, pos: cache.at[:, pos + np.arange(x.shape[1])].set(x),
    "transposed": lambda cache, x, pos: jax.lax.dynamic_update_slice(
        cache.transpose(1, 0, 2), x.transpose(1, 0, 2), (pos, 0, 0)
    ).transpose(1, 0, 2),
    "reshaped": lambda cache, x, pos: cache.reshape(-1, WIDTH).at[pos + jnp.arange(x.shape[1])].set(x[0]).reshape(cache.shape),
    "in a function": lambda cache, x, pos: jax.checkpoint(lambda c: jax.lax.dynamic_update_slice(c, x, (0, pos, 0)))(cache),
}
OF_ONE_TOKEN = {
    "at[:, pos]": lambda cache, x, pos: cache.at[:, pos].set(x[:, 0]),
    "index_in_dim": lambda cache, x, pos: jax.lax.dynamic_update_index_in_dim(cache, x[:, 0], pos, axis=1),
    "one hot": one_hot,
}


@pytest.mark.parametrize("num_tokens", [1, 2, 5])
@pytest.mark.parametrize("name", WRITES)
def test_the_axis_into_which_rows_are_written_at_the_counter_is_the_capacity(name, num_tokens):
    assert room(model(WRITES[name]), PARAMS, carry_of(), num_tokens) == SIZE


@pytest.mark.parametrize("name", OF_ONE_TOKEN)
def test_also_where_a_model_takes_one_token_at_a_time(name):
    assert room(model(OF_ONE_TOKEN[name]), PARAMS, carry_of()) == SIZE


@pytest.mark.parametrize("name", [*WRITES, *OF_ONE_TOKEN])
@pytest.mark.long
def test_it_is_where_the_model_really_overflows(name):
    fn = model({**WRITES, **OF_ONE_TOKEN}[name])
    assert overflows(fn, PARAMS, (carry_of(), carry_of(64))) == room(fn, PARAMS, carry_of()) == SIZE


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int8, jnp.int32, bool])
def test_the_leaf_may_have_any_type(dtype):
    assert room(model(WRITES["dynamic_update_slice"]), PARAMS, carry_of(dtype=dtype), 2) == SIZE


def test_the_least_of_several_leaves_counts():
    def fn(params, carry, tokens):
        rows = tokens.shape[1]
        new = {
            name: jax.lax.dynamic_update_slice(carry[name], params["embed"][tokens], (0, carry["pos"], 0)) for name in ("a", "b")
        }
        seen = carry["seen"].at[:, carry["pos"] + jnp.arange(rows)].set(tokens)
        return {**new, "seen": seen, "pos": carry["pos"] + rows}, attended(new["a"], carry["pos"], rows)

    carry = {
        "a": jnp.zeros((1, 20, WIDTH)),
        "b": jnp.zeros((1, 16, WIDTH)),
        "seen": jnp.zeros((1, 30), jnp.int32),
        "pos": jnp.zeros((), jnp.int32),
    }
    assert room(fn, PARAMS, carry, 3) == 16


def test_tokens_that_stand_in_the_carry_already_take_room():
    fn = model(WRITES["in_dim"])
    assert room(fn, PARAMS, {**carry_of(), "pos": jnp.int32(5)}, 2, values=True) == SIZE - 5
    assert room(fn, PARAMS, {**carry_of(), "pos": jnp.int32(50)}, 2, values=True) == 0


def test_rows_before_the_first_token_take_room():
    fn = model(lambda cache, x, pos: jax.lax.dynamic_update_slice(cache, x, (0, pos + 3, 0)))
    assert room(fn, PARAMS, carry_of(), 2) == SIZE - 3


def test_a_counter_of_each_sequence_counts():
    def fn(params, carry, tokens):
        x = params["embed"][tokens]
        cache = jax.vmap(lambda c, x, p: jax.lax.dynamic_update_slice(c, x, (p, 0)))(carry["cache"], x, carry["pos"])
        return {"cache": cache, "pos": carry["pos"] + tokens.shape[1]}, x

    assert room(fn, PARAMS, {**carry_of(), "pos": jnp.zeros(1, jnp.int32)}, 2) == SIZE


# What sets no limit, or none that can be proven.


def of_window(cache, x, pos):
    return cache.at[:, (pos + jnp.arange(x.shape[1])) % cache.shape[1]].set(x)


UNLIMITED = {
    "a window": model(of_window),
    "a window by DUS": model(lambda cache, x, pos: jax.lax.dynamic_update_slice(cache, x, (0, pos % cache.shape[1], 0))),
    "shifted": model(lambda cache, x, pos: jnp.concatenate([cache[:, x.shape[1] :], x], axis=1)),
    "rolled": model(lambda cache, x, pos: jnp.roll(cache, -x.shape[1], axis=1).at[:, -x.shape[1] :].set(x)),
    "clamped by hand": model(lambda cache, x, pos: jax.lax.dynamic_update_slice(cache, x, (0, jnp.minimum(pos, 3), 0))),
    "a state": model(lambda cache, x, pos: 0.9 * cache + x.sum(1, keepdims=True)),
    "the first token only": model(lambda cache, x, pos: jnp.where(pos == 0, x[:, :1], cache)),
    "always in the same place": model(lambda cache, x, pos: jax.lax.dynamic_update_slice(cache, x, (0, 2, 0))),
    "at the place of a token": lambda params, carry, tokens: (
        {**carry, "cache": carry["cache"].at[:, tokens[0]].set(1.0), "pos": carry["pos"] + tokens.shape[1]},
        tokens,
    ),
    "a counter that starts again": model(WRITES["in_dim"], count=lambda pos, n: jnp.where(pos + n >= SIZE, 0, pos + n)),
    "a counter modulo": model(WRITES["in_dim"], count=lambda pos, n: (pos + n) % SIZE),
    "a counter of something else": model(WRITES["in_dim"], count=lambda pos, n: pos + n + 1),
    "a counter of calls": model(WRITES["in_dim"], count=lambda pos, n: pos + 1),
    "a counter that stands still": model(WRITES["in_dim"], count=lambda pos, n: pos),
    "a window and what comes first": model(lambda cache, x, pos: of_window(WRITES["in_dim"](cache, x, pos), x, pos)),
    "a buffer that is thrown away": lambda params, carry, tokens: (
        {**carry, "pos": carry["pos"] + tokens.shape[1]},
        jax.lax.dynamic_update_slice(carry["cache"], params["embed"][tokens], (0, carry["pos"], 0)),
    ),
    "a buffer that is no part of the carry": lambda params, carry, tokens: (
        {**carry, "pos": carry["pos"] + tokens.shape[1]},
        jnp.zeros((1, 3, WIDTH)).at[:, carry["pos"]].set(1.0),
    ),
}


@pytest.mark.parametrize("name", UNLIMITED)
def test_no_limit_is_guessed(name):
    assert room(UNLIMITED[name], PARAMS, carry_of(), 2) is None


def test_a_recurrent_network_has_no_limit():
    cell = nn.OptimizedLSTMCell(WIDTH)
    state = cell.initialize_carry(jax.random.key(0), (1, WIDTH))
    params = {"cell": cell.init(jax.random.key(0), state, jnp.ones((1, WIDTH))), **PARAMS}

    def fn(params, carry, tokens):
        for k in range(tokens.shape[1]):
            carry, out = cell.apply(params["cell"], carry, params["embed"][tokens[:, k]])
        return carry, out

    assert room(fn, params, state, 2) is None


# Loops over layers.


def layered(params, carry, tokens):
    """Caches stacked over layers, written in a scan that takes and returns a layer's cache at each iteration."""
    x = params["embed"][tokens]

    def layer(x, cache_and_pos):
        cache, pos = cache_and_pos
        cache = jax.lax.dynamic_update_slice(cache, x, (0, pos, 0))
        return x + attended(cache, pos, x.shape[1])[:, None], (cache, pos + x.shape[1])

    x, (cache, pos) = jax.lax.scan(layer, x, (carry["cache"], carry["pos"]))
    return {"cache": cache, "pos": pos}, x


def of_one_counter(params, carry, tokens):
    """The same with one counter for all layers, and the written layers put back by index."""
    x, cache = params["embed"][tokens], carry["cache"]
    for k in range(3):
        cache = cache.at[k].set(jax.lax.dynamic_update_slice(cache[k], x, (0, carry["pos"], 0)))
        x = x + attended(cache[k], carry["pos"], x.shape[1])[:, None]
    return {"cache": cache, "pos": carry["pos"] + x.shape[1]}, x


def of_whole_stack(params, carry, tokens):
    """The whole stack is carried through the loop."""
    x = params["embed"][tokens]

    def layer(k, state):
        x, cache = state
        cache = jax.lax.dynamic_update_slice(cache, x[None], (k, 0, carry["pos"], 0))
        return x + attended(cache[k], carry["pos"], x.shape[1])[:, None], cache

    x, cache = jax.lax.fori_loop(0, 3, layer, (x, carry["cache"]))
    return {"cache": cache, "pos": carry["pos"] + x.shape[1]}, x


@pytest.mark.parametrize(("fn", "wanted"), [(layered, SIZE), (of_one_counter, SIZE), (of_whole_stack, None)])
def test_caches_that_are_stacked_over_layers(fn, wanted):
    carry = {"cache": jnp.zeros((3, 1, SIZE, WIDTH)), "pos": jnp.zeros(3 if fn is layered else (), jnp.int32)}
    assert room(fn, PARAMS, carry, 2) == wanted


# Models as Flax users write them.


class Attending(nn.Module):
    """A transformer's attention, whose cache takes one token at a time."""

    num_layers: int = 2
    scanned: bool = False

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCAB, 8)(tokens)
        if self.scanned:
            axes = {"params": 0, "cache": 0}
            body = nn.scan(_Layer, axes, split_rngs={"params": True}, length=self.num_layers)
            return nn.Dense(VOCAB)(body()(x, None)[0])
        for _ in range(self.num_layers):
            x = _Layer()(x, None)[0]
        return nn.Dense(VOCAB)(x)


class _Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + nn.MultiHeadDotProductAttention(num_heads=2, decode=True)(nn.LayerNorm()(x)), None


@pytest.mark.parametrize("scanned", [pytest.param(False, marks=pytest.mark.long), True])
@pytest.mark.long
def test_the_cache_of_linens_attention(scanned):
    module = Attending(scanned=scanned)

    def made(size):
        return module.init(jax.random.key(0), jnp.ones((1, size), int))

    def fn(params, cache, tokens):
        logits, new = module.apply({"params": params, "cache": cache}, tokens, mutable=["cache"])
        return new["cache"], logits

    variables = made(SIZE)
    assert room(fn, variables["params"], variables["cache"]) == SIZE
    carries = variables["cache"], made(64)["cache"]
    assert overflows(fn, variables["params"], carries) == SIZE


class Chunked(nn.Module):
    """A cache as a user of Linen writes it by hand, for any number of tokens."""

    size: int = SIZE

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCAB, 8)(tokens)
        keys = self.variable("cache", "keys", jnp.zeros, (x.shape[0], self.size, 8))
        index = self.variable("cache", "index", lambda: jnp.zeros((), jnp.int32))
        k = nn.Dense(8)(x)
        at = index.value + jnp.arange(tokens.shape[1])
        if not self.is_initializing():
            keys.value = keys.value.at[:, at].set(k)
            index.value = index.value + tokens.shape[1]
        mask = jnp.arange(self.size) <= at[:, None]
        weights = jax.nn.softmax(jnp.where(mask, jnp.einsum("btd,bsd->bts", x, keys.value), -1e30))
        return nn.Dense(VOCAB)(jnp.einsum("bts,bsd->btd", weights, keys.value))


@pytest.mark.parametrize("num_tokens", [1, 4])
def test_a_cache_written_by_hand(num_tokens):
    module = Chunked()
    variables = module.init(jax.random.key(0), jnp.ones((1, 1), int))

    def fn(params, cache, tokens):
        logits, new = module.apply({"params": params, "cache": cache}, tokens, mutable=["cache"])
        return new["cache"], logits

    assert room(fn, variables["params"], variables["cache"], num_tokens) == SIZE


def test_the_cache_of_nnxs_attention():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(VOCAB, 8, rngs=rngs)
            self.attention = nnx.MultiHeadAttention(2, 8, rngs=rngs)
            self.out = nnx.Linear(8, VOCAB, rngs=rngs)

        def __call__(self, tokens):
            x = self.embed(tokens)
            return self.out(x + self.attention(x, decode=True))

    module = Model(nnx.Rngs(0))
    module.attention.init_cache((1, SIZE, 8))
    graph, params, cache = nnx.split(module, nnx.Param, nnx.Cache)

    def fn(params, cache, tokens):
        module = nnx.merge(graph, params, cache)
        logits = module(tokens)
        return nnx.state(module, nnx.Cache), logits

    assert room(fn, params, cache) == SIZE


@dataclasses.dataclass
class _HuggingFace:
    model: Any
    size: int

    def fn(self, params, carry, tokens):
        """The model of Hugging Face wants to be told positions and a mask."""
        index = carry["transformer"]["h"]["0"]["attn"]["cache_index"]
        positions = index + jnp.arange(tokens.shape[1])[None]
        mask = jnp.ones((1, self.size), int)
        found = self.model(tokens, attention_mask=mask, position_ids=positions, past_key_values=carry, params=params)
        return found.past_key_values, found.logits


@pytest.mark.long
@pytest.mark.parametrize("num_tokens", [1, 4])
def test_the_cache_of_hugging_faces_gpt2(num_tokens):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers = pytest.importorskip("transformers", exc_type=ImportError)
        if not hasattr(transformers, "FlaxGPT2LMHeadModel"):
            pytest.skip("transformers 5 has no Flax models")
        config = transformers.GPT2Config(vocab_size=VOCAB, n_positions=32, n_embd=8, n_layer=2, n_head=2)
        model = transformers.FlaxGPT2LMHeadModel(config)
        cache = model.init_cache(1, SIZE)
        assert room(_HuggingFace(model, SIZE).fn, model.params, cache, num_tokens) == SIZE
