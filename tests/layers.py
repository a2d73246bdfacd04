"""Layers as plain functions: ``layer(params, x, mask, key) -> x`` on x[batch, length, width], those with model state
``layer(params, state, x, mask, key) -> (x, state)``; what frames a layer; what skips to it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

WAVE = np.cos(np.arange(8.0))  # an array that a layer closes over


def normalise(x, p, axes):
    mean, variance = x.mean(axes, keepdims=True), x.var(axes, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + 0.1) * p["scale"] + p["bias"]


@jax.custom_vjp
def clip(x):
    return jnp.clip(x, -1, 1)


clip.defvjp(lambda x: (clip(x), x), lambda x, g: (jnp.where(jnp.abs(x) < 2, 0.5 * g, 0),))  # another gradient than autodiff's


@jax.jit
def dense(p, x, mask, key):
    return jnp.tanh(x @ p["w"] + p["bias"])


def conv(p, x, mask, key):
    return jax.lax.conv_general_dilated(x, p["w"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")) + p["bias"]


def layer_norm(p, x, mask, key):
    return normalise(x, p, -1)


def batch_norm(p, x, mask, key):
    return normalise(x, p, (0, 1))


def attention(p, x, mask, key):
    q, k, v = (x @ w for w in p["w"])
    visible = jnp.tril(jnp.ones((x.shape[1],) * 2, bool)) & mask[:, None, :]
    scores = jnp.where(visible, q @ k.swapaxes(1, 2), -1e9 if x.dtype == jnp.float64 else -1e4)
    return jax.nn.softmax(scores) @ v


def dropout(p, x, mask, key):
    return jnp.where(jax.random.bernoulli(key, 0.75, x.shape), x / 0.75, 0)


def noise(p, x, mask, key):
    return x + p["scale"] * jax.random.normal(key, x.shape, x.dtype)


def positions(p, x, mask, key):
    return x * jnp.asarray(WAVE[: x.shape[1], None], x.dtype) + p["w"][jnp.arange(x.shape[1]) % 3]


def energy(p, x, mask, key):
    return x - 0.1 * jax.grad(lambda x: jnp.logaddexp(0, x @ p["w"]).sum())(x)


def scan(p, x, mask, key):
    x, means = jax.lax.scan(lambda x, row: (x + jnp.tanh(x @ row["w"] + row["bias"]), x.mean(-1, keepdims=True)), x, p)
    return x + means.mean(0)


def backwards(p, x, mask, key):
    def step(x, row):
        return x + jnp.tanh(dropout(None, x, mask, row[1]) @ row[0]), None

    return jax.lax.scan(step, x, (p["w"], jax.random.split(key, len(p["w"]))), reverse=True)[0]


def recurrent(p, x, mask, key):
    step = lambda h, x: (jnp.tanh(h @ p["w"] + x),) * 2  # noqa: E731
    return jax.lax.scan(step, jnp.zeros_like(x[:, 0]), x.swapaxes(0, 1))[1].swapaxes(0, 1)


def cond(p, x, mask, key):
    return jax.lax.cond(x[..., 0].sum() > 0.1, lambda x: jnp.tanh(x @ p["w"]), lambda x: x * p["scale"], x)


def route(p, x, mask, key):
    return jnp.einsum("blw,blwv->blv", x, p["w"][x[..., :2].argmax(-1)])


def activation(p, x, mask, key):
    return clip(p["scale"] * x)


def fourier(p, x, mask, key):
    return jnp.fft.ifft(jnp.fft.fft(x, axis=1) * jax.lax.complex(p["scale"], p["bias"]), axis=1).real


def running_norm(p, s, x, mask, key):
    mean, variance = x.mean((0, 1)), x.var((0, 1))
    return normalise(x, p, (0, 1)), {"mean": 0.9 * s["mean"] + 0.1 * mean, "variance": 0.9 * s["variance"] + 0.1 * variance}


def centre(p, s, x, mask, key):
    mean = 0.5 * s["mean"] + 0.5 * x.mean((0, 1))
    return x - p["scale"] * mean, {"mean": mean}  # enters this loss and the next


def delay(p, s, x, mask, key):
    return x + s["second"], {"first": x.mean((0, 1)), "second": s["first"]}


def averaged(p, s, x, mask, key):
    return x + jnp.tanh(x @ p["w"]) @ s["w"], {"w": 0.9 * s["w"] + 0.1 * p["w"]}


def counter(p, s, x, mask, key):
    return x * p["scale"] / (1 + s["count"]), {"count": s["count"] + 1}


def stream(p, s, x, mask, key):
    return x + p["scale"] * jax.random.normal(s["key"], x.shape, x.dtype), {"key": jax.random.split(s["key"])[0]}


def fixed(p, s, x, mask, key):
    return x * s["factor"] + p["scale"], s


LAYERS: dict[Callable[..., Any], dict[str, str]] = {  # with the shapes of their parameters, w for the width
    dense: {"w": "ww", "bias": "w"},
    conv: {"w": "3ww", "bias": "w"},
    layer_norm: {"scale": "w", "bias": "w"},
    batch_norm: {"scale": "w", "bias": "w"},
    attention: {"w": "3ww"},
    dropout: {},
    noise: {"scale": "w"},
    positions: {"w": "3w"},
    energy: {"w": "ww"},
    scan: {"w": "4ww", "bias": "4w"},
    backwards: {"w": "3ww"},
    recurrent: {"w": "ww"},
    cond: {"w": "ww", "scale": "w"},
    route: {"w": "2ww"},
    activation: {"scale": "w"},
    fourier: {"scale": "w", "bias": "w"},
    running_norm: {"scale": "w", "bias": "w"},
    centre: {"scale": "w"},
    delay: {},
    averaged: {"w": "ww"},
    counter: {"scale": "w"},
    stream: {"scale": "w"},
    fixed: {"scale": "w"},
}
STATES = {
    running_norm: {"mean": "w", "variance": "w"},
    centre: {"mean": "w"},
    delay: {"first": "w", "second": "w"},
    averaged: {"w": "ww"},
    counter: {"count": ""},
    stream: {"key": ""},
    fixed: {"factor": "w"},
}
BY_NAME = {layer.__name__: layer for layer in LAYERS}
RANDOM = (dropout, noise, backwards)
EXACT = (cond, route, activation, fourier)  # not for bfloat16: its rounding decides otherwise, and it has no complex numbers
FRAMES: dict[str, Callable[..., Any]] = {
    "plain": lambda layer: layer,
    "checkpoint": jax.checkpoint,
    "jit": jax.jit,
    "frozen": lambda layer: lambda p, *more: layer(jax.lax.stop_gradient(p), *more),
    "vmap": lambda layer: lambda p, s, x, mask, key: (jax.vmap(lambda x, m: layer(p, s, x[None], m[None], key)[0][0])(x, mask), s),
}


def stateless(layer):
    return lambda p, s, x, mask, key: (layer(p, x, mask, key), s)


def floats_as(tree, types):
    return jax.tree.map(lambda leaf, t: leaf.astype(t) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf, tree, types)


def add(p, x, early, positive):
    return x + early


def stop(p, x, early, positive):
    return x + jax.lax.stop_gradient(early)


def concatenate(p, x, early, positive):
    return jnp.concatenate([x, early], -1) @ p


def gate(p, x, early, positive):
    return jnp.where(positive, x, 0.5 * x)  # a bool crosses


def count(p, x, early, positive):
    return x * positive.sum(-1, keepdims=True) / x.shape[-1]  # an int crosses


SKIPS = {skip.__name__: skip for skip in (add, stop, concatenate, gate, count)}
