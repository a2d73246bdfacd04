"""A loop over parameters whose layers lie along another axis than the first is cut too: stages hold slices along that axis."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, PartitionSpec

import jaxpp
from jaxpp.errors import ArgumentError
from jaxpp.verify import GRAD_FLOOR, compare

LONG = pytest.mark.long
LAYERS = 6
P = PartitionSpec
RNG = np.random.default_rng(0)
PARAMS = {
    "w": RNG.normal(size=(8, LAYERS, 8)) / 3,
    "b": RNG.normal(size=(8, LAYERS)),
    "v": RNG.normal(size=(8, 8, LAYERS)) / 3,
    "head": RNG.normal(size=(8, 2)),
}
BATCH = RNG.normal(size=(16, 8))

pytestmark = pytest.mark.usefixtures("x64")


def loss_of(change=lambda params: params):
    def loss_fn(params, batch):
        params = change(params)

        def layer(x, row):
            w, b, v = row
            return jnp.tanh(x @ w + b) @ v, None

        x, _ = jax.lax.scan(layer, batch, (jnp.moveaxis(params["w"], 1, 0), params["b"].T, jnp.moveaxis(params["v"], 2, 0)))
        return jnp.mean((x @ params["head"]) ** 2)

    return loss_fn


def plainly(loss_fn, optimizer, params, batch, num_steps=2):
    opt_state = optimizer.init(params)
    for _ in range(num_steps):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
    return params, opt_state, loss


ADAMW = optax.adamw(0.01)


def check(loss_fn, optimizer=ADAMW, params=PARAMS, batch=BATCH, plain=None, **options):
    pipe = jaxpp.Pipeline(loss_fn, optimizer, **{"num_stages": 2, "num_microbatches": 2} | options)
    state = pipe.init(params, batch)
    pipe.verify(state, batch)
    for _ in range(2):
        state, metrics = pipe.step(state, batch)
    wanted = plainly(plain or loss_fn, optimizer, params, batch)
    compare("training", (state.params, state.opt_state, metrics.loss), wanted, floor=GRAD_FLOOR)
    return pipe, state


MESH = Mesh(np.array(jax.devices()[:8]).reshape(2, 2, 2), ("pipe", "data", "model"))
RULES = {"w": P("model"), "v": P(None, "model"), "b": P("model")}


def constrained(params):
    return params | {"w": jax.lax.with_sharding_constraint(params["w"], P("model", None))}


def by_layer_constrained(params):
    return params | {"w": jax.lax.with_sharding_constraint(params["w"], P(None, "model"))}


def transposed_momentum():
    """Momentum that an optimizer holds transposed, so that its layers lie along another axis than those of the parameters."""

    def update(grads, momentum, params=None):
        del params
        momentum = jax.tree.map(lambda old, grad: 0.9 * old + grad.T, momentum, grads)
        return jax.tree.map(lambda each: -0.1 * each.T, momentum), momentum

    return optax.GradientTransformation(lambda params: jax.tree.map(lambda leaf: jnp.zeros_like(leaf.T), params), update)


OPTIONS = {
    "adamw": {},
    "three stages": {"num_stages": 3},
    "equal FLOPs": {"balance": "flops"},
    "a global norm": {"optimizer": optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1, momentum=0.9))},
    "adafactor": {"optimizer": optax.adafactor(0.01, min_dim_size_to_factor=4)},
    "lamb": {"optimizer": optax.lamb(0.01)},
    "a momentum that is transposed": {"optimizer": transposed_momentum()},
    "backwards in two": {"schedule": "zb-h1", "num_stages": 3, "num_microbatches": 4},
    "a mesh": {"mesh": MESH, "shardings": RULES},
    "divided among replicas": {"mesh": MESH, "shardings": RULES, "shard": ("gradients", "parameters")},
    "a constraint": {"mesh": MESH, "shardings": RULES, "loss_fn": loss_of(constrained), "plain": loss_of()},
    "a constraint on the layers": {"mesh": MESH, "shardings": RULES, "loss_fn": loss_of(by_layer_constrained), "plain": loss_of()},
}
SHORT = {"adamw", "divided among replicas"}


@pytest.mark.parametrize("case", [pytest.param(name, marks=() if name in SHORT else LONG) for name in OPTIONS])
def test_training_equals_plain_jax(case):
    options = {"loss_fn": loss_of()} | OPTIONS[case]
    pipe, state = check(**options)
    counts = pipe.engine.layout.slicing
    assert counts.axes == (1, 0, 2, 1)  # of b, head, v and w
    assert [sum(sizes) for sizes in counts.sizes] == [LAYERS, 0, LAYERS, LAYERS]
    assert jax.tree.map(jnp.shape, state.params) == jax.tree.map(jnp.shape, PARAMS)  # the user's own tree
    assert sum(stage.num_params for stage in pipe.stages) == sum(leaf.size for leaf in PARAMS.values())


@LONG
def test_casts_before_layers_come_to_the_front():
    loss_fn = loss_of(lambda params: jax.tree.map(lambda leaf: leaf.astype("float64"), params))
    pipe = jaxpp.Pipeline(loss_fn, ADAMW, num_stages=3, num_microbatches=2)
    pipe.verify(pipe.init(jax.tree.map(np.float32, PARAMS), BATCH), BATCH)
    assert pipe.engine.layout.slicing.axes == (1, 0, 2, 1)


class Block(nn.Module):
    """Two layers, as the body of a loop."""

    @nn.compact
    def __call__(self, x, _):
        y = nn.tanh(nn.Dense(16, param_dtype=float, name="up")(x))
        return x + nn.Dense(8, param_dtype=float, name="down")(y), None


class Scanned(nn.Module):
    """Blocks whose parameters flax stacks along an axis."""

    axis: int

    @nn.compact
    def __call__(self, x):
        blocks = nn.scan(Block, variable_axes={"params": self.axis}, split_rngs={"params": True}, length=LAYERS)
        return nn.Dense(1, param_dtype=float)(blocks(name="layers")(x, None)[0])


@pytest.mark.parametrize("axis", [1, pytest.param(-1, marks=LONG)])
def test_flax_may_stack_parameters_along_any_axis(axis):
    model = Scanned(axis)

    def loss_fn(params, batch):
        return jnp.mean(model.apply(params, batch) ** 2)

    pipe, state = check(loss_fn, params=model.init(jax.random.key(0), BATCH), num_stages=3, balance="flops")
    assert [stage.modules for stage in pipe.stages] == ["layers[0:2]", "layers[2:4]", "layers[4:6] .. Dense_0"]
    kernel = state.params["params"]["layers"]["up"]["kernel"]
    assert {shard.data.shape for shard in kernel.addressable_shards} == {(8, 2, 16) if axis == 1 else (8, 16, 2)}


@LONG
def test_a_model_is_initialised_on_its_stages():
    def init(key):
        return {name: jax.random.normal(jax.random.fold_in(key, k), leaf.shape) for k, (name, leaf) in enumerate(PARAMS.items())}

    pipe = jaxpp.Pipeline(loss_of(), ADAMW, num_stages=2, num_microbatches=2)
    state = pipe.init(init, jax.random.key(1), BATCH)
    compare("params", state.params, jax.jit(init)(jax.random.key(1)))
    np.testing.assert_allclose(pipe.evaluate(state, BATCH).loss, loss_of()(init(jax.random.key(1)), BATCH))


def test_a_checkpoint_goes_to_other_stages(tmp_path):
    pipes = [jaxpp.Pipeline(loss_of(), ADAMW, num_stages=count, num_microbatches=2, balance="flops") for count in (3, 2, 1)]
    state = pipes[0].init(PARAMS, BATCH)
    with ocp.StandardCheckpointer() as files:
        files.save(tmp_path / "state", state)
        files.wait_until_finished()
        restored = [files.restore(tmp_path / "state", pipe.abstract_state(PARAMS, BATCH)) for pipe in pipes]
    found = [pipe.step(each, BATCH)[0] for pipe, each in zip(pipes, restored, strict=True)]
    wanted = plainly(loss_of(), ADAMW, PARAMS, BATCH, num_steps=1)
    for each in found:
        compare("training", (each.params, each.opt_state), wanted[:2], floor=GRAD_FLOOR)


@LONG
def test_gradients_alone():
    found = jaxpp.value_and_grad(loss_of(), num_stages=3, num_microbatches=2)(PARAMS, BATCH)
    compare("gradients", found, jax.value_and_grad(loss_of())(PARAMS, BATCH), floor=GRAD_FLOOR)


@LONG
def test_the_sets_of_a_bank():
    def loss_fn(params, task, batch):
        return loss_of()(params | task, batch)

    own = {name: {"w": PARAMS["w"] * factor, "b": PARAMS["b"]} for name, factor in (("a", 1), ("b", 0.5))}
    shared, bank = {name: PARAMS[name] for name in ("v", "head")}, jaxpp.Bank(own, optax.sgd(0.1))
    pipe = jaxpp.Pipeline(loss_fn, optax.sgd(0.1), bank=bank, num_stages=2, num_microbatches=2)
    state = pipe.init(shared, BATCH)
    pipe.verify(state, BATCH, task="b")
    state, _ = pipe.step(state, BATCH, task="a")
    grads = jax.grad(loss_fn, (0, 1))(shared, own["a"], BATCH)
    wanted = jax.tree.map(lambda leaf, grad: leaf - 0.1 * grad, (shared, own["a"]), grads)
    compare("step", (state.params, bank.params("a")), wanted, floor=GRAD_FLOOR)
    compare("the other set", bank.params("b"), own["b"])


def test_layers_that_devices_cannot_share_evenly_are_refused():
    pipe = jaxpp.Pipeline(
        loss_of(), optax.sgd(0.1), num_stages=2, num_microbatches=2, mesh=MESH, shardings={"w": P(None, "model")}, balance="flops"
    )
    with pytest.raises(ArgumentError, match=r"a stage holds the rows of its layers(.|\n)*f64\[8,3,8\]"):
        pipe.init(PARAMS, BATCH)


@LONG
def test_a_leaf_that_loops_read_along_two_axes_is_divided_along_the_first():
    def loss_fn(params, batch):
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch, params["w"])
        x, _ = jax.lax.scan(lambda x, w: (jnp.sin(x @ w), None), x, jnp.moveaxis(params["w"], 1, 0))
        return jnp.mean(x**2)

    params = {"w": RNG.normal(size=(8, 8, 8)) / 3}
    pipe, _ = check(loss_fn, params=params, num_stages=2)
    assert pipe.engine.layout.slicing.axes == (0,)
