"""A cache stacked over the layers of a ``lax.scan``: each stage holds the rows of its own layers, and none is sent."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpp
from jaxpp.errors import CutError
from jaxpp.forward.functions import Functions

WIDTH, DEPTH, VOCAB, ROOM = 8, 4, 11, 16
RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(0, VOCAB, length) for length in (3, 1, 6, 2)]
PARAMS = {
    "embed": RNG.normal(size=(VOCAB, WIDTH)).astype("f"),
    "qkv": RNG.normal(size=(DEPTH, WIDTH, 3 * WIDTH)).astype("f") / 3,
    "out": RNG.normal(size=(DEPTH, WIDTH, WIDTH)).astype("f") / 3,
}


def cache():
    return {"at": jnp.int32(0), "k": jnp.zeros((DEPTH, 1, ROOM, WIDTH)), "v": jnp.zeros((DEPTH, 1, ROOM, WIDTH))}


def attend(x, qkv, out, keys, values, at):
    q, k, v = jnp.split(x @ qkv, 3, -1)
    keys, values = (jax.lax.dynamic_update_slice(old, new, (0, at, 0)) for old, new in ((keys, k), (values, v)))
    seen = jnp.arange(ROOM) <= (at + jnp.arange(x.shape[1]))[:, None]
    scores = jnp.where(seen, q @ keys.transpose(0, 2, 1), -1e9)
    return x + jax.nn.softmax(scores) @ values @ out, (keys, values)


def scanned(params, carry, tokens):
    rows = (params["qkv"], params["out"], carry["k"], carry["v"])
    x, (k, v) = jax.lax.scan(lambda x, row: attend(x, *row, carry["at"]), params["embed"][tokens], rows)
    return {"at": carry["at"] + tokens.shape[1], "k": k, "v": v}, x @ params["embed"].T


def in_place(params, carry, tokens):
    """The same in a Python loop that writes into the stacked cache: every layer changes all of it."""
    x, k, v = params["embed"][tokens], carry["k"], carry["v"]
    for i in range(DEPTH):
        x, (new_k, new_v) = attend(x, params["qkv"][i], params["out"][i], k[i], v[i], carry["at"])
        k, v = k.at[i].set(new_k), v.at[i].set(new_v)
    return {"at": carry["at"] + tokens.shape[1], "k": k, "v": v}, x @ params["embed"].T


def plain(num_tokens):
    step, found = jax.jit(scanned), []
    for prompt in PROMPTS:
        carry, logits = step(PARAMS, cache(), prompt[None])
        tokens = [int(logits[0, -1].argmax())]
        while len(tokens) < num_tokens:
            carry, logits = step(PARAMS, carry, np.array([tokens[-1:]]))
            tokens.append(int(logits[0, -1].argmax()))
        found.append(tokens)
    return found


@pytest.mark.parametrize("group_size", [1, 2])
@pytest.mark.long
def test_a_stage_holds_the_rows_of_its_layers(group_size):
    forward = jaxpp.Forward(lambda params, tokens: scanned(params, cache(), tokens)[1], num_stages=2)
    params = forward.init(PARAMS, PROMPTS[0][None])
    generation = forward.generate(params, scanned, cache(), PROMPTS, 5, chunk=4, group_size=group_size)
    assert [tokens.tolist() for tokens in generation.collect()] == plain(5)


def test_the_rows_of_a_stage_are_a_leaf_of_its_carry():
    forward = jaxpp.Forward(lambda params, tokens: scanned(params, cache(), tokens)[1], num_stages=2)
    forward.init(PARAMS, PROMPTS[0][None])
    shapes = jax.eval_shape(cache)
    layout = Functions().engine(forward.engine, scanned, PROMPTS[0][None], None, carry=shapes, reduce_aux="last").layout
    leaves = zip(jax.tree.leaves(layout.variables[1]), layout.state_owner, strict=True)
    assert [(leaf.shape, stage) for leaf, stage in leaves if leaf.shape] == [((2, 1, ROOM, WIDTH), stage) for stage in (0, 1)] * 2


def test_a_stacked_cache_that_each_layer_changes_whole_is_refused_in_words():
    forward = jaxpp.Forward(lambda params, tokens: in_place(params, cache(), tokens)[1], num_stages=2)
    params = forward.init(PARAMS, PROMPTS[0][None])
    with pytest.raises(CutError, match=r"Got: [kv], which layers of several stages read and change") as error:
        forward.generate(params, in_place, cache(), PROMPTS, 5)
    assert "run the layers with jax.lax.scan" in str(error.value)
