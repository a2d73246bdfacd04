"""An update on slices of stacked parameters is the update of the whole leaves: Muon, lamb, adafactor and their kind."""

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax.contrib import MuonDimensionNumbers, muon

import jaxpp
from jaxpp.errors import OptimizerError
from models.gpt import Block

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


RANDOM = 40


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(RANDOM))
def test_any_optimizer_with_any_cuts_stages_and_schedule_equals_one_device(seed):
    rng = np.random.default_rng(seed)
    name, schedule = (str(rng.choice(list(kinds))) for kinds in (OPTIMIZERS, ("gpipe", "1f1b", "zb-h1")))
    num_stages, num_layers = int(rng.integers(2, 5)), int(rng.integers(4, 8))
    layers = sorted(1 + rng.choice(num_layers - 1, num_stages - 1, replace=False))
    cuts = [f"layers[{layer}]" for layer in layers] if rng.integers(2) else None
    options = {"num_stages": num_stages, "num_microbatches": int(rng.choice([1, 2, 4])), "schedule": schedule, "cuts": cuts}
    check(OPTIMIZERS[name](), num_layers=num_layers, **options)


def in_a_loop(function):
    return lambda tree: jax.lax.scan(lambda tree, _: (function(tree), None), tree, length=2)[0]


def by_a_custom_rule(function):
    wrapped = jax.custom_jvp(function)
    wrapped.defjvp(lambda primals, tangents: (function(*primals), function(*tangents)))
    return wrapped


@pytest.mark.parametrize("wrap", [in_a_loop, pytest.param(by_a_custom_rule, marks=pytest.mark.long)])
def test_each_slice_has_its_rows_of_a_table_that_a_nested_function_closes_over(wrap):
    rates = np.linspace(1, 2, LAYERS)  # of each layer

    @jax.jit
    def scaled(updates):
        return updates | {"layers": jax.tree.map(lambda u: u * rates.reshape(-1, *[1] * (u.ndim - 1)), updates["layers"])}

    layered = optax.stateless(lambda updates, _: wrap(scaled)(updates))
    check(optax.chain(layered, optax.sgd(1e-2)), num_steps=1, num_stages=4, num_microbatches=2)


class ScannedBlock(nn.Module):
    """A GPT block as the body of a loop."""

    @nn.compact
    def __call__(self, x, mask):
        return Block(2, 0.0, "float64", "float64", name="block")(x, mask, True), None


class ScannedGPT(nn.Module):
    """models/gpt.py with its blocks in one loop."""

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(8, 8, name="embed", dtype="float64", param_dtype="float64")
        layers = nn.scan(ScannedBlock, variable_axes={"params": 0}, split_rngs={"params": True}, in_axes=nn.broadcast, length=4)
        x, _ = layers(name="layers")(embed(tokens), nn.make_causal_mask(tokens, dtype=bool))
        return embed.attend(nn.LayerNorm(dtype="float64", param_dtype="float64")(x))


def dimensions_of(params):
    """Of kernels as Flax stacks them: what goes in after the layers, then what comes out; heads belong to one or the other."""

    def of(path, leaf):
        names = [entry.key for entry in path]
        if "layers" not in names or names[-1] != "kernel":
            return None
        return MuonDimensionNumbers((1, 2), 3) if "out" in names else MuonDimensionNumbers(1, tuple(range(2, leaf.ndim)))

    return jax.tree_util.tree_map_with_path(of, params)


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer",
    [
        muon(1e-2, muon_weight_dimension_numbers=dimensions_of),
        optax.lamb(1e-2),
        optax.adafactor(1e-2, min_dim_size_to_factor=8),
    ],
    ids=["muon", "lamb", "adafactor"],
)
def test_a_scanned_gpt_over_four_stages_is_updated_as_on_one_device(optimizer):
    model, tokens = ScannedGPT(), np.random.default_rng(0).integers(0, 8, (4, 6))

    def loss_fn(params, batch):
        # attention does not depend on the bias of its keys: a gradient that is rounding alone, which optimizers scale up
        params = jax.tree_util.tree_map_with_path(
            lambda path, leaf: 0 * leaf if path[-2].key == "key" and leaf.ndim < 4 else leaf, params
        )
        logits = model.apply({"params": params}, batch[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()

    params = jax.jit(model.init)(jax.random.key(0), tokens[:1, :-1])["params"]
    pipe = jaxpp.Pipeline(loss_fn, optimizer, num_stages=4, num_microbatches=2)
    state, opt_state = pipe.init(params, tokens), optimizer.init(params)
    assert [stage.modules.count("layers[") for stage in pipe.stages] == [1] * 4
    update = jax.jit(optimizer.update)
    for _ in range(2):
        grads = jax.jit(jax.grad(loss_fn))(params, tokens)
        updates, opt_state = update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        state, _ = pipe.step(state, tokens)
        chex.assert_trees_all_close((state.params, state.opt_state), (params, opt_state), rtol=1e-12, atol=1e-12)


REFUSED = {
    "a stack of vectors as one matrix": (lambda: muon(1e-2), "layers/bias: dot_general combines its layers"),
    "averages over layers that are large": (
        lambda: optax.adafactor(1e-2, min_dim_size_to_factor=2),
        "layers/bias: reduce_sum over all rows, to f32[2000] combines its layers",
    ),
    "singular values of a stack of vectors": (lambda: optax.contrib.galore(1e-2), "layers/bias: svd combines its layers"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_combines_layers_otherwise_is_refused_by_name(name):
    optimizer, line = REFUSED[name]

    def loss_fn(params, batch):
        x, _ = jax.lax.scan(lambda x, bias: (jnp.tanh(x + bias), None), batch, params["layers"]["bias"])
        return jnp.mean(x @ params["embed"])

    shapes = {"layers": {"bias": jax.ShapeDtypeStruct((4, 2000), "float32")}, "embed": jax.ShapeDtypeStruct((2000,), "float32")}
    pipe = jaxpp.Pipeline(loss_fn, optimizer(), num_stages=4, num_microbatches=2)
    with pytest.raises(OptimizerError) as caught:
        pipe.forecast(shapes, jax.ShapeDtypeStruct((4, 2000), "float32"))
    assert line in str(caught.value)
    assert "muon_weight_dimension_numbers" in str(caught.value)
