"""Draws the measured step of the front page, for wide screens and for narrow ones: ``python docs/_site/step_figure.py``."""

import pathlib

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import jaxpp

jax.config.update("jax_num_cpu_devices", 4)
layers = [layer for _ in range(8) for layer in (nn.Dense(512), nn.relu)]
model = nn.Sequential([*layers, nn.Dense(2)])
batch = {"x": jnp.ones((2048, 512)), "y": jnp.zeros(2048, int)}


def loss_fn(params: dict, batch: dict) -> jax.Array:
    """The loss of a classifier."""
    return optax.softmax_cross_entropy_with_integer_labels(model.apply(params, batch["x"]), batch["y"]).mean()


pipe = jaxpp.Pipeline(loss_fn, optax.adamw(1e-3), num_stages=4, num_microbatches=8, schedule="1f1b")
state = pipe.init(lambda key: model.init(key, batch["x"]), jax.random.key(0), batch)
profile = pipe.profile(state, batch)
assets = pathlib.Path(__file__).parents[1] / "assets"
profile.figure().savefig(assets / "step.png", dpi=150)
profile.figure(width=4).savefig(assets / "step-narrow.png", dpi=150)
