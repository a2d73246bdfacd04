"""Small language models that generate, each written the way its library's users write it, and the loop on one device.

Every ``Decoder`` has ``fn(params, carry, tokens) -> (carry, logits)``, its parameters, and the empty carry of one sequence.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxpp
from models.gpt import GPT

VOCAB, WIDTH, ROOM = 23, 16, 32
"""Tokens there are, features, and how many tokens a cache has room for."""


class Decoder(NamedTuple):
    """A language model, ready to generate."""

    name: str
    fn: Callable[..., Any]
    params: Any
    carry: Any
    one_token: bool = False

    def forward(self, num_stages: int, **options: Any) -> tuple[jaxpp.Forward, Any]:
        """The model over several stages, and its parameters there."""

        def logits(params, tokens):
            carry = jax.tree.map(jnp.asarray, self.carry)
            return jax.vmap(lambda row: self.fn(params, jax.tree.map(lambda leaf: leaf, carry), row[None])[1][0])(tokens)

        found = jaxpp.Forward(logits, num_stages=num_stages, **options)
        return found, found.init(self.params, jnp.ones((1, 1), int))


class Made(NamedTuple):
    """What the loop on one device makes for a prompt."""

    tokens: list[int]
    logprobs: list[float]


def loop(decoder: Decoder, prompts, num_tokens: int, sample=None, key=None) -> list[Made]:
    """The tokens of each prompt, on one device, with one token a call."""
    step, choose = _compiled(decoder.fn, sample)
    found, key = [], jax.random.key(0) if key is None else key
    for number, prompt in enumerate(prompts):
        carry, logits, made = decoder.carry, None, Made([], [])
        for token in prompt:
            carry, logits = step(decoder.params, carry, np.array([[token]], np.int32))
        while True:
            token, logprob = choose(logits, key, number, len(prompt) + len(made.tokens))
            made.tokens.append(int(token))
            made.logprobs.append(float(logprob))
            if len(made.tokens) == num_tokens:
                break
            carry, logits = step(decoder.params, carry, np.array([[token]], np.int32))
        found.append(made)
    return found


@functools.cache
def _compiled(fn, sample):
    """The function of one token, and the choice of the next."""

    def choose(logits, key, number, index):
        last = logits.reshape(-1, logits.shape[-1])[-1].astype(jnp.float32)
        key = jax.random.fold_in(jax.random.fold_in(key, number), index)
        token = jnp.argmax(last) if sample is None else sample(last, key)
        return token, jax.nn.log_softmax(last)[token]

    return jax.jit(fn), jax.jit(choose)


def prompts_of(*lengths: int, seed: int = 0) -> list[np.ndarray]:
    """Random prompts of these lengths."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, length).astype(np.int32) for length in lengths]


def _attended(q, k, v, start):
    """Attention to the tokens up to each one's own position."""
    mask = jnp.arange(k.shape[1]) <= start + jnp.arange(q.shape[1])[:, None]
    scores = jnp.einsum("bqd,bkd->bqk", q, k) / np.sqrt(q.shape[-1])
    return jax.nn.softmax(jnp.where(mask, scores, -1e9).astype(jnp.float32)).astype(v.dtype) @ v


def plain(param_dtype="float32", dtype="float32", num_layers=4) -> Decoder:
    """A transformer in plain JAX, whose head is the embedding, with a position that all layers read."""

    def init(key):
        keys = iter(jax.random.split(key, 3 * num_layers + 3))

        def normal(*shape):
            return (jax.random.normal(next(keys), shape) / np.sqrt(shape[0])).astype(param_dtype)

        layers = [
            {"qkv": normal(WIDTH, 3 * WIDTH), "out": 2 * normal(WIDTH, WIDTH), "mlp": normal(WIDTH, WIDTH)}
            for _ in range(num_layers)
        ]
        ends = {"embed": 4 * normal(VOCAB, WIDTH), "positions": 4 * normal(ROOM, WIDTH), "last": 3 * normal(WIDTH, WIDTH)}
        return {**ends, "layers": layers}

    def fn(params, carry, tokens):
        params = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
        start, layers = carry["position"], []
        x = params["embed"][tokens] + params["positions"][start + jnp.arange(tokens.shape[1])]
        for weights, cache in zip(params["layers"], carry["layers"], strict=True):
            q, k, v = jnp.split(x @ weights["qkv"], 3, -1)
            k = jax.lax.dynamic_update_slice(cache["k"], k, (0, start, 0))
            v = jax.lax.dynamic_update_slice(cache["v"], v, (0, start, 0))
            x = x + _attended(q, k, v, start) @ weights["out"]
            x = x + jnp.tanh(x @ weights["mlp"])
            x = x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-3)
            layers.append({"k": k, "v": v})
        return {"position": start + tokens.shape[1], "layers": layers}, jnp.tanh(x @ params["last"]) @ params["embed"].T

    room = jnp.zeros((1, ROOM, WIDTH), dtype)
    carry = {"position": jnp.int32(0), "layers": [{"k": room, "v": room}] * num_layers}
    return Decoder("plain", fn, init(jax.random.key(0)), carry)


class _Linen(nn.Module):
    """Flax's own attention with ``decode=True``, which takes one token a call."""

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCAB, WIDTH, name="embed")(tokens)
        for i in range(2):
            h = nn.LayerNorm(name=f"norm_{i}")(x)
            x = x + nn.MultiHeadDotProductAttention(2, decode=True, name=f"attention_{i}")(h)
            x = x + nn.Dense(WIDTH, name=f"mlp_{i}")(nn.gelu(x))
        return nn.Dense(VOCAB, name="head")(nn.LayerNorm(name="norm")(x))


def linen() -> Decoder:
    """A Linen model, unedited."""
    model = _Linen()
    variables = jax.jit(model.init)(jax.random.key(0), jnp.ones((1, ROOM), int))

    def fn(params, cache, tokens):
        logits, updated = model.apply({"params": params, "cache": cache}, tokens, mutable=["cache"])
        return updated["cache"], logits

    return Decoder("linen", fn, jax.tree.map(lambda leaf: 2 * leaf, variables["params"]), variables["cache"], one_token=True)


class _NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, WIDTH, decode=True, rngs=rngs)
        self.mlp = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.mlp(nnx.gelu(x))


class _Nnx(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.blocks = nnx.List([_NnxBlock(rngs) for _ in range(2)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(self.norm(x))


def with_nnx() -> Decoder:
    """An NNX model with its decode cache; the embedding is the head."""
    model = _Nnx(nnx.Rngs(0))
    for block in model.blocks:
        block.attention.init_cache((1, ROOM, WIDTH))
    graphdef, params, cache = nnx.split(model, nnx.Param, nnx.Cache)

    def fn(params, cache, tokens):
        model = nnx.merge(graphdef, params, cache)
        logits = model(tokens)
        return nnx.state(model, nnx.Cache), logits

    return Decoder("nnx", fn, jax.tree.map(lambda leaf: 2 * leaf, params), cache, one_token=True)


class _Recurrent(nn.Module):
    """LSTM and GRU cells, one token after another."""

    @nn.compact
    def __call__(self, carries, tokens):
        x, new = nn.Embed(VOCAB, WIDTH, name="embed")(tokens), []
        cells = [nn.OptimizedLSTMCell(WIDTH, name="lstm_0"), nn.GRUCell(WIDTH, name="gru"), nn.LSTMCell(WIDTH, name="lstm_1")]
        for cell, carry in zip(cells, carries, strict=True):
            rows = []
            for t in range(tokens.shape[1]):
                carry, row = cell(carry, x[:, t])  # noqa: PLW2901  (the loop over time)
                rows.append(row)
            new.append(carry)
            x = jnp.stack(rows, 1)
        return new, nn.Dense(VOCAB, name="head")(4 * x)


def recurrent() -> Decoder:
    """A recurrent network: its carry has no length, and no position."""
    model, zeros = _Recurrent(), jnp.zeros((1, WIDTH))
    carry = [(zeros, zeros), zeros, (zeros, zeros)]
    params = model.init(jax.random.key(0), carry, jnp.ones((1, 1), int))["params"]
    return Decoder("recurrent", lambda params, carry, tokens: model.apply({"params": params}, carry, tokens), params, carry)


def gpt() -> Decoder:
    """The GPT of this repository, with its own cache."""
    sizes = {"vocab_size": VOCAB, "max_length": ROOM, "width": WIDTH, "depth": 2, "num_heads": 2}
    model, tokens = GPT(**sizes, decode=True), jnp.ones((1, ROOM), int)
    variables = model.init(jax.random.key(0), tokens)

    def fn(params, cache, tokens):
        logits, updated = model.apply({"params": params, "cache": cache}, tokens, mutable=["cache"])
        return updated["cache"], logits

    return Decoder("gpt", fn, jax.tree.map(lambda leaf: 1.5 * leaf, variables["params"]), variables["cache"])


def hugging_face() -> Decoder:
    """GPT-2 as Hugging Face wrote it in Flax, with random parameters."""
    transformers = pytest.importorskip("transformers", exc_type=ImportError)
    sizes = {"vocab_size": VOCAB, "n_positions": ROOM, "n_embd": WIDTH, "n_layer": 2, "n_head": 2}
    model = transformers.FlaxGPT2LMHeadModel(transformers.GPT2Config(**sizes, initializer_range=0.5), seed=0)

    def fn(params, cache, tokens):
        start = cache["transformer"]["h"]["0"]["attn"]["cache_index"]
        positions = (start + jnp.arange(tokens.shape[1]))[None]
        out = model(tokens, jnp.ones((1, ROOM), "i4"), positions, params=params, past_key_values=cache, return_dict=True)
        return out.past_key_values, out.logits

    return Decoder("hugging-face", fn, model.params, model.init_cache(1, ROOM))


MODELS = {"plain": plain, "linen": linen, "nnx": with_nnx, "recurrent": recurrent, "gpt": gpt, "hugging-face": hugging_face}
