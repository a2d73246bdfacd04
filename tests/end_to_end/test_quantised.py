"""Parameters of integers: a quantised base is frozen, on its stages, without gradient, moments or a copy that stays."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
import pytest
from flax import nnx

import jaxpp
from jaxpp.errors import ParamsError
from jaxpp.observe.memory.liveness import step_liveness

pytestmark = pytest.mark.usefixtures("x64")

LAYERS, WIDTH, RANK = 4, 32, 2


def adapted_layer(key, kind=jnp.int8):
    """The int8 weights of a layer with the scale of each channel, and an adapter of low rank."""
    keys = jax.random.split(key, 4)
    return {
        "q": jax.random.randint(keys[0], (WIDTH, WIDTH), -100, 100).astype(kind),
        "scale": jax.random.uniform(keys[1], (WIDTH,), jnp.float64) / 300,
        "a": jax.random.normal(keys[2], (WIDTH, RANK), jnp.float64) / 5,
        "b": jax.random.normal(keys[3], (RANK, WIDTH), jnp.float64) / 5,
    }


def run_layer(layer, h):
    weight = layer["q"].astype(h.dtype) * layer["scale"]
    return h + jnp.tanh(h @ weight + (h @ layer["a"]) @ layer["b"])


def loss_fn(params, x):
    for k in range(LAYERS):
        x = run_layer(params[f"l{k}"], x)
    return (x**2).mean()


def adapted():
    params = {f"l{k}": adapted_layer(key) for k, key in enumerate(jax.random.split(jax.random.key(0), LAYERS))}
    return params, jax.random.normal(jax.random.key(1), (8, WIDTH), jnp.float64)


def adapters_only(params):
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key in "ab", params)


def masked(params):
    labels = jax.tree.map(lambda learns: "trained" if learns else "frozen", adapters_only(params))
    return optax.multi_transform({"trained": optax.adam(1e-2), "frozen": optax.set_to_zero()}, labels)


OPTIMIZERS = {
    "adamw": lambda params: optax.adamw(1e-2),
    "clipped": lambda params: optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1, momentum=0.9)),
    "labels": masked,
    "mask": lambda params: optax.chain(
        optax.masked(optax.adam(1e-2), adapters_only(params)),
        optax.masked(optax.set_to_zero(), jax.tree.map(lambda learns: not learns, adapters_only(params))),
    ),
}


def trained_alone(params, x, optimizer, steps):
    """The same steps in plain JAX, where the integers are no part of what is differentiated."""
    frozen = {name: {"q": tree["q"]} for name, tree in params.items()}
    trained = {name: {k: v for k, v in tree.items() if k != "q"} for name, tree in params.items()}

    def stepped(trained, updates):
        return jax.tree.map(lambda leaf, update: leaf + update, trained, updates)

    def loss(trained, x):
        return loss_fn({name: trained[name] | frozen[name] for name in trained}, x)

    opt_state = optimizer.init(trained)
    for _ in range(steps):
        updates, opt_state = optimizer.update(jax.grad(loss)(trained, x), opt_state, trained)
        trained = stepped(trained, updates)
    return {name: trained[name] | frozen[name] for name in trained}


@pytest.mark.parametrize(
    ("schedule", "name"),
    [
        ("1f1b", "adamw"),
        *(pytest.param("1f1b", name, marks=pytest.mark.long) for name in ("clipped", "labels", "mask")),
        pytest.param("zb-h1", "labels", marks=pytest.mark.long),
    ],
)
def test_an_int8_base_stays_as_it_is_and_its_adapters_learn_as_in_plain_jax(schedule, name):
    params, x = adapted()
    stages = 2 if name == "adamw" else 4
    pipe = jaxpp.Pipeline(loss_fn, OPTIMIZERS[name](params), num_stages=stages, num_microbatches=4, schedule=schedule)
    state = pipe.init(params, x)
    if schedule == "zb-h1":
        pipe.verify(state, x)
    assert not any(leaf.dtype == jnp.int8 for leaf in jax.tree.leaves(state.opt_state)), "no moments of integers"
    for _ in range(3):
        state, _ = pipe.step(state, x)
    alone = {name: {k: v for k, v in tree.items() if k != "q"} for name, tree in params.items()}
    expected = trained_alone(params, x, OPTIMIZERS[name](alone), 3)
    for got, want in zip(jax.tree.leaves(state.params), jax.tree.leaves(expected), strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_allclose(got, want, rtol=1e-11, atol=1e-13)


def test_the_drop_in_gives_float0_for_integers_if_they_are_allowed_as_jax_does():
    params, x = adapted()
    grad_fn = jaxpp.value_and_grad(loss_fn, num_stages=2, num_microbatches=2, allow_int=True)
    loss, grads = grad_fn(params, x)
    expected, wanted = jax.value_and_grad(loss_fn, allow_int=True)(params, x)
    np.testing.assert_allclose(loss, expected, rtol=1e-12)
    assert jax.tree.structure(grads) == jax.tree.structure(wanted)
    for got, want in zip(jax.tree.leaves(grads), jax.tree.leaves(wanted), strict=True):
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        if got.dtype != jax.dtypes.float0:
            np.testing.assert_allclose(got, want, rtol=1e-11, atol=1e-13)
    with pytest.raises(ParamsError, match=r"params\['l0'\]\['q'\]: i8\[32,32\]\n(.*\n)*.*allow_int=True"):
        jaxpp.value_and_grad(loss_fn, num_stages=4)(params, x)


WIDE = 128
CODES = np.linspace(-1.0, 1.0, 16, dtype="f4")


def by_channel(layer, dtype):
    return layer["q"].astype(dtype) * layer["scale"].astype(dtype)


def by_codebook(layer, dtype):
    return jnp.asarray(CODES)[layer["q"].astype(jnp.int32)].astype(dtype) * layer["scale"].astype(dtype)


def by_halves(layer, dtype):
    low, high = (layer["q"] & 0xF).astype(jnp.int8), (layer["q"] >> 4).astype(jnp.int8)
    return (jnp.stack([low, high], 1).reshape(WIDE, WIDE) - 8).astype(dtype) * layer["scale"].astype(dtype)


BASES = {
    "int8": (jnp.int8, (WIDE, WIDE), (-100, 100), by_channel),
    "float8": (jnp.float8_e4m3fn, (WIDE, WIDE), (-100, 100), by_channel),
    "codebook": (jnp.uint8, (WIDE, WIDE), (0, 16), by_codebook),
    "halves": (jnp.uint8, (WIDE // 2, WIDE), (0, 256), by_halves),
}


def quantised(base, dtype, *, loops=False, checkpointed=False):
    """A loss of layers with a base of this kind, and its parameters, stacked if the layers are a loop."""
    kind, shape, bounds, weight_of = BASES[base]

    def run(layer, h):
        adapted = (h @ layer["a"].astype(dtype)) @ layer["b"].astype(dtype)
        return h + jnp.tanh(h @ weight_of(layer, dtype) + adapted)

    run = jax.checkpoint(run) if checkpointed else run

    def loss(params, x):
        h = x.astype(dtype)
        if loops:
            h, _ = jax.lax.scan(lambda h, layer: (run(layer, h), None), h, params)
        else:
            for k in range(LAYERS):
                h = run(params[f"l{k}"], h)
        return (h.astype(x.dtype) ** 2).mean()

    params, rng = dict[str, dict[str, jax.Array]](), np.random.default_rng(0)
    for k, key in enumerate(jax.random.split(jax.random.key(2), LAYERS)):
        a, b = (jnp.asarray(rng.normal(size=size) / 9, jnp.float32) for size in ((WIDE, RANK), (RANK, WIDE)))
        scale = jnp.asarray(rng.uniform(size=WIDE) / 300, jnp.float32)
        params[f"l{k}"] = {"q": jax.random.randint(key, shape, *bounds).astype(kind), "scale": scale, "a": a, "b": b}
    return loss, jax.tree.map(lambda *leaves: jnp.stack(leaves), *params.values()) if loops else params


LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("base", "dtype", "schedule", "loops", "checkpointed"),
    [
        ("int8", "bfloat16", "zb-h1", False, False),
        pytest.param("int8", "float32", "1f1b", False, False, marks=LONG),
        ("int8", "bfloat16", "1f1b", True, False),
        pytest.param("int8", "bfloat16", "zb-h1", True, True, marks=LONG),
        pytest.param("float8", "bfloat16", "1f1b", True, False, marks=LONG),
        pytest.param("codebook", "float32", "zb-h1", False, False, marks=LONG),
        pytest.param("codebook", "float32", "1f1b", True, False, marks=LONG),
        pytest.param("halves", "bfloat16", "1f1b", False, False, marks=LONG),
        pytest.param("halves", "float32", "zb-h1", True, False, marks=LONG),
    ],
)
def test_a_quantised_base_takes_its_own_bytes_and_nothing_that_is_made_of_it_stays(base, dtype, schedule, loops, checkpointed):
    loss, params = quantised(base, jnp.dtype(dtype), loops=loops, checkpointed=checkpointed)
    x = jax.random.normal(jax.random.key(1), (4, WIDE), jnp.float32)
    pipe = jaxpp.Pipeline(loss, masked(params), num_stages=2, num_microbatches=4, schedule=schedule)
    state = pipe.init(params, x)
    base_bytes = sum(leaf.nbytes for path, leaf in jax.tree_util.tree_leaves_with_path(params) if "q" in str(path))
    lives = step_liveness(pipe.engine, pipe.engine.lower("update", x, None)).lives
    large = [life for life in lives if life.num_bytes >= WIDE * WIDE // 2]  # the bytes of half a weight, or more
    assert {life.kind for life in large} == {"parameters"}, "no gradient, moment, residual or copy for the step is so large"
    first = min(life.begins for life in large)
    assert sum(life.num_bytes for life in large if life.begins == first) == base_bytes
    new, _ = pipe.step(state, x)
    for (path, got), want in zip(jax.tree_util.tree_leaves_with_path(new.params), jax.tree.leaves(params), strict=True):
        if "q" in str(path):
            assert got.dtype == want.dtype
            np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


class Adapted(nn.Module):
    """Layers of Linen modules with an int8 base: in a Python loop, or in one over stacked parameters (``nn.scan``)."""

    stacked: bool = False

    @nn.compact
    def __call__(self, x):
        if self.stacked:
            over = nn.scan(AdaptedLayer, variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS)
            return over(name="layers")(x, None)[0]
        for k in range(LAYERS):
            x, _ = AdaptedLayer(name=f"l{k}")(x, None)
        return x


class AdaptedLayer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        made = {name: self.param(name, lambda key, name=name: adapted_layer(key)[name]) for name in ("q", "scale", "a", "b")}
        return run_layer(made, x), None


class Int8Linear(nnx.Module):
    def __init__(self, rngs):
        layer = adapted_layer(rngs.params())
        self.q, self.scale = nnx.Param(layer["q"]), nnx.Param(layer["scale"])

    def __call__(self, x):
        return x @ (self.q[...].astype(x.dtype) * self.scale[...])


class WithLora(nnx.Module):
    """Layers with ``nnx.LoRA`` around an int8 base."""

    def __init__(self, rngs):
        made = (Int8Linear(rngs) for _ in range(LAYERS))
        self.layers = nnx.List(
            [nnx.LoRA(WIDTH, RANK, WIDTH, base_module=base, param_dtype=jnp.float64, rngs=rngs) for base in made]
        )

    def __call__(self, x):
        for layer in self.layers:
            x = x + jnp.tanh(layer(x))
        return x


def linen(stacked):
    model = Adapted(stacked)
    params = model.init(jax.random.key(3), adapted()[1])["params"]
    return lambda params, x: (model.apply({"params": params}, x) ** 2).mean(), params


def nnx_lora():
    graphdef, params = nnx.split(WithLora(nnx.Rngs(0)), nnx.Param)
    return lambda params, x: (nnx.merge(graphdef, params)(x) ** 2).mean(), params


def float_leaves(tree):
    return [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)]


@pytest.mark.parametrize("name", [pytest.param(name, marks=LONG) for name in ("linen", "scan", "nnx")])
def test_flax_models_with_an_int8_base_equal_one_device_and_come_back_from_a_checkpoint(name, tmp_path):
    loss, params = {"linen": lambda: linen(False), "scan": lambda: linen(True), "nnx": nnx_lora}[name]()
    x = adapted()[1]
    pipe = jaxpp.Pipeline(loss, optax.adamw(1e-2), num_stages=2, num_microbatches=2)
    state = pipe.init(params, x)
    pipe.verify(state, x)
    state, _ = pipe.step(state, x)
    leaves, tree = jax.tree.flatten(params)
    learns = [jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves]
    assert not all(learns)

    def plain(trained):
        supply = iter(trained)
        return loss(tree.unflatten(next(supply) if each else leaf for leaf, each in zip(leaves, learns, strict=True)), x)

    trained, adam = float_leaves(params), optax.adamw(1e-2)
    updates, _ = adam.update(jax.grad(plain)(trained), adam.init(trained), trained)
    for got, old, update in zip(float_leaves(state.params), trained, updates, strict=True):
        np.testing.assert_allclose(got, old + update, rtol=1e-11, atol=1e-13)
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        other = jaxpp.Pipeline(loss, optax.adamw(1e-2), num_stages=4, num_microbatches=2)
        restored = checkpointer.restore(tmp_path / "state", other.abstract_state(params, x))
    for got, want in zip(jax.tree.leaves(restored.params), jax.tree.leaves(state.params), strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))
    other.step(restored, x)


@pytest.mark.long
def test_an_int8_base_is_sharded_by_replicas_shared_by_tasks_and_run_forward():
    params, x = adapted()
    pipe = jaxpp.Pipeline(loss_fn, optax.adamw(1e-2), num_stages=2, num_microbatches=2, data_parallel=2, shard="parameters")
    state = pipe.init(params, x)
    pipe.verify(state, x)
    assert state.params["l0"]["q"].addressable_shards[0].data.nbytes == WIDTH * WIDTH // 2
    base = {name: {"q": layer["q"]} for name, layer in params.items()}
    own = {name: {key: leaf for key, leaf in layer.items() if key != "q"} for name, layer in params.items()}
    bank = jaxpp.Bank({"cat": own}, optax.adam(1e-2))

    def task_loss(params, own, x):
        return loss_fn({name: params[name] | own[name] for name in params}, x)

    pipe = jaxpp.Pipeline(task_loss, optax.adam(1e-2), num_stages=2, num_microbatches=2, bank=bank)
    state = pipe.init(base, x)
    pipe.verify(state, x, task="cat")
    state, _ = pipe.step(state, x, task="cat")
    np.testing.assert_array_equal(state.params["l0"]["q"], params["l0"]["q"])
    forward = jaxpp.Forward(lambda params, x: run_layer(params["l1"], run_layer(params["l0"], x)), num_stages=2, num_microbatches=2)
    two = {name: params[name] for name in ("l0", "l1")}
    found = forward.apply(forward.init(two, x), x)
    np.testing.assert_allclose(found, run_layer(two["l1"], run_layer(two["l0"], x)), rtol=1e-12)
