"""An update on slices of stacked parameters is the update of the whole leaves: Muon, lamb, adafactor and their kind."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax.contrib import MuonDimensionNumbers, muon

import jaxpp

LAYERS, WIDTH = 6, 4
SHAPES = {"up": (WIDTH, 8), "down": (8, WIDTH), "heads": (WIDTH, 2, 2), "bias": (WIDTH,)}
TOKENS = np.random.default_rng(0).integers(0, 8, (4, 3))
EACH = {"up": MuonDimensionNumbers(1, 2), "down": MuonDimensionNumbers(-2, -1), "heads": MuonDimensionNumbers(1, (2, 3))}
DIMENSIONS = {"layers": EACH | {"bias": None}, "embed": None}


def loss_fn(params, tokens):
    def layer(x, w):
        x = x + jnp.tanh(jnp.tanh(x @ w["up"]) @ w["down"] + w["bias"])
        return x + jnp.einsum("btd,dhk->bthk", x, w["heads"]).reshape(x.shape), None

    x, _ = jax.lax.scan(layer, params["embed"][tokens], params["layers"])
    return jnp.mean((x @ params["embed"].T) ** 2) + jnp.mean(jnp.sin(x))


def make_params(num_layers=LAYERS):
    rng = np.random.default_rng(1)
    layers = {name: jnp.asarray(rng.normal(size=(num_layers, *shape)) / 2) for name, shape in SHAPES.items()}
    return {"layers": layers, "embed": jnp.asarray(rng.normal(size=(8, WIDTH)))}


def with_dimensions(**options):
    return muon(1e-2, muon_weight_dimension_numbers=DIMENSIONS, **options)


def by_head(params):
    matrix = MuonDimensionNumbers(1, -1)  # of [layers, width, heads, features]: a matrix of each head of each layer
    return jax.tree.map(lambda leaf: matrix if leaf.ndim > 2 else None, params)


OPTIMIZERS = {
    "muon": with_dimensions,
    "muon of each head": lambda: muon(1e-2, muon_weight_dimension_numbers=by_head),
    "muon with a choice in its loop": lambda: with_dimensions(preconditioning="schatten", consistent_rms=0.2),
    "muon by singular values": lambda: with_dimensions(preconditioning="spectral"),
    "muon in several steps": lambda: optax.MultiSteps(with_dimensions(), 2),
    "lamb": lambda: optax.lamb(1e-2),
    "lars": lambda: optax.lars(1e-2),
    "adafactor, factors of layers": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "adafactor, averages over layers": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=2, weight_decay_rate=0.1),
    "sm3": lambda: optax.sm3(1e-2),
    "novograd": lambda: optax.novograd(1e-2),
    "prodigy": optax.contrib.prodigy,
    "clip by block": lambda: optax.chain(optax.clip_by_block_rms(1e-3), optax.adamw(1e-2)),
    "adaptive clip": lambda: optax.chain(optax.adaptive_grad_clip(0.1), optax.sgd(0.1)),
    "scheduled": lambda: optax.inject_hyperparams(optax.lamb)(learning_rate=optax.linear_schedule(1e-2, 0.0, 9)),
    "adamw": lambda: optax.adamw(1e-2),
}
SHORT = {"muon"}

pytestmark = pytest.mark.usefixtures("x64")


def check(optimizer, num_steps=2, num_layers=LAYERS, **options):
    """Steps of a pipeline and of plain optax: parameters and optimizer state."""
    params = make_params(num_layers)
    pipe = jaxpp.Pipeline(loss_fn, optimizer, **options)
    state, opt_state = pipe.init(params, TOKENS), optimizer.init(params)
    assert sum("layers/up" in path for stage in pipe.stages for path in stage.params) > 1, "the stack is divided"
    update = jax.jit(optax.with_extra_args_support(optimizer).update)
    for _ in range(num_steps):
        loss, grads = jax.jit(jax.value_and_grad(loss_fn))(params, TOKENS)
        updates, opt_state = update(grads, opt_state, params, value=loss)
        params = optax.apply_updates(params, updates)
        state, _ = pipe.step(state, TOKENS)
        chex.assert_trees_all_close((state.params, state.opt_state), (params, opt_state), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.long] * (name not in SHORT)) for name in OPTIMIZERS])
def test_an_update_of_stacked_leaves_that_are_divided_equals_the_update_of_whole_leaves(name):
    check(OPTIMIZERS[name](), num_stages=4, num_microbatches=2)
