"""With jax_debug_nans a step says where the first NaN is made, and leaves the state whole."""

import inspect
import re
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpp
from jaxpp.errors import NonFiniteError
from tests.models import PARAMS, X, loss_fn, pipeline


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return jnp.log(nn.Dense(4, use_bias=False)(x))


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        for k in range(4):
            x = Block(name=f"block_{k}")(x)
        return x


NET = Net()
ONES = jax.tree.map(jnp.ones_like, jax.eval_shape(NET.init, jax.random.key(0), X)["params"])
FINE = np.full((8, 4), np.e**np.e / 4, "f")  # of which each block makes numbers above zero, until the last


def net_loss(params, x):
    return jnp.mean(NET.apply({"params": params}, x))


def line_of(function, text):
    lines, first = inspect.getsourcelines(function)
    return f"{__file__}:{first + next(k for k, line in enumerate(lines) if text in line)}"


def spoiled(tree, *path):
    """A copy on the host with one NaN; eager JAX would refuse to make it."""
    tree = jax.tree.map(np.array, tree)
    leaf = tree
    for key in path:
        leaf = leaf[key]
    leaf.flat[0] = np.nan
    return tree


@pytest.fixture(autouse=True)
def debug_nans():
    with jax.debug_nans(True):
        yield


def test_the_equation_the_stage_the_microbatch_and_the_line_are_named():
    pipe = pipeline(net_loss, stages=4)
    state = pipe.init(ONES, FINE)
    bad = FINE.copy()
    bad[6] = 0.25  # log(1) is 0 in the first block, so the second has log(0) and the third log of a negative number
    with pytest.raises(FloatingPointError, match=r"2F1 .stage 2, microbatch 1.: with jax_debug_nans on") as caught:
        pipe.step(state, bad)
    assert isinstance(caught.value, NonFiniteError)
    got = re.search(r"Got: (.*?)\n  Fix", str(caught.value), re.DOTALL).group(1).split("\n       ")
    assert got[0] == "activation 2, f32[4,4]: 4 of 16 elements"
    assert got[1] == f"the first is made by `log` in Net/block_2 ({line_of(Block, 'jnp.log')})."
    assert pipe.state is state and not any(leaf.is_deleted() for leaf in jax.tree.leaves(state.held))
    with jax.debug_nans(False):
        new, metrics = pipe.step(state, bad)
    assert jnp.isnan(jax.device_get(metrics.loss)) and pipe.state is new


def test_a_gradient_alone_is_traced_to_what_the_forward_kept():
    def loss(params, x):
        h = jnp.tanh(x @ params["a"])
        y = jnp.where(h > 2, jnp.sqrt(h - 2), 0.0)
        return jnp.mean(((h + y) @ params["c"]) ** 2)

    pipe = pipeline(loss)
    state = pipe.init({name: PARAMS[name] for name in "ac"}, X)
    assert np.isfinite(pipe.evaluate(state, X).loss)
    with pytest.raises(FloatingPointError, match=r"\dB0 ") as caught:
        pipe.step(state, X)
    assert f"the first is made by `sqrt` ({line_of(loss, 'jnp.sqrt')})" in str(caught.value)
    with pytest.raises(FloatingPointError, match=r"made by `sqrt`"):
        jaxpp.value_and_grad(loss, num_stages=2)({name: PARAMS[name] for name in "ac"}, X)


def test_what_comes_in_as_nan_is_named():
    pipe = pipeline()
    state = pipe.init(PARAMS, X)
    with pytest.raises(FloatingPointError, match=r"1F0 (?s:.*)it comes in with parameter c"):
        pipe.step(state._replace(params=spoiled(state.params, "c")), X)
    with pytest.raises(FloatingPointError, match=r"0F0 (?s:.*)it comes in with batch\.\n  Fix: look at what makes batch;"):
        pipe.step(state, spoiled(np.asarray(X)))


def test_it_is_found_beside_parameters_that_are_keys():
    # The search read its programs' arguments with NumPy: `TypeError: JAX array with PRNGKey dtype cannot be converted`.
    def loss(params, x):
        noise = jax.random.normal(params["key"], (4,))
        return loss_fn(params, jnp.log(x + noise))

    pipe = pipeline(loss, optax.sgd(0.1))
    state = pipe.init({**PARAMS, "key": jax.random.key(0)}, X)
    with pytest.raises(NonFiniteError, match="the first is made by `log`"):
        pipe.step(state, np.full_like(X, -9))
    assert pipe.state is state


def test_an_optimizer_that_makes_nan_is_named():
    def root(updates, state, params=None):
        return jax.tree.map(lambda leaf: jnp.sqrt(leaf - 9), updates), state

    pipe = pipeline(optimizer=optax.GradientTransformation(lambda params: (), root))
    state = pipe.init(PARAMS, X)
    with pytest.raises(FloatingPointError, match=r"update stage 0 .stage 0.: ") as caught:
        pipe.step(state, X)
    assert f"the first is made by `sqrt` ({line_of(root, 'jnp.sqrt')})" in str(caught.value)
    assert "parameter a, f32[4,6]: 24 of 24 elements" in str(caught.value)


def test_without_nan_a_step_is_the_same_and_nothing_is_consumed():
    pipe = pipeline()
    state = pipe.init(PARAMS, X)
    new, metrics = pipe.step(state, X)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state.held))
    with jax.debug_nans(False):
        wanted, same = pipe.step(state, X)
        assert any(leaf.is_deleted() for leaf in jax.tree.leaves(state.held))
        assert metrics.loss == same.loss
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(new), jax.device_get(wanted))


def test_infinities_are_looked_for_too():
    pipe = pipeline(net_loss, stages=4)
    state = pipe.init(ONES, FINE)
    bad = FINE.copy()
    bad[6] = 0.25
    with jax.debug_nans(False), jax.debug_infs(True), pytest.raises(FloatingPointError, match=r"1F1 .*jax_debug_infs") as caught:
        pipe.step(state, bad)
    assert "the first is made by `log` in Net/block_1" in str(caught.value)


@pytest.mark.long
def test_on_a_mesh_and_with_a_bank_it_is_found_too():
    def joint(params, head, x):
        return loss_fn({**params, **head}, jnp.sqrt(x))

    bank = jaxpp.Bank({name: {"c": PARAMS["c"]} for name in ("cat", "dog")}, optax.adam(1e-2))
    pipe = pipeline(joint, bank=bank, data_parallel=2)
    state = pipe.init({name: PARAMS[name] for name in "ab"}, jnp.abs(X))
    before = bank.params("cat")["c"].copy()
    with pytest.raises(FloatingPointError, match=r"0F\d .stage 0(?s:.*)made by `sqrt`"):
        pipe.step(state, X, task=["cat", "dog"])
    np.testing.assert_array_equal(bank.params("cat")["c"], before)
    pipe.step(pipe.state, jnp.abs(X), task=["cat", "dog"])


def centred(params, batch, count=lambda _: 1.0):
    """With callbacks, and a mean over replicas of a logarithm."""
    aval = jax.ShapeDtypeStruct(batch.shape, batch.dtype)
    hidden = jnp.tanh(batch @ params["a"]) + jax.pure_callback(np.tanh, aval, batch, vmap_method="sequential")[:, :1]
    hidden = count(batch[0, 0]) * (hidden - jax.lax.pmean(jnp.log(hidden[0, 0]), "data"))
    return loss_fn({**params, "a": jnp.eye(hidden.shape[1])}, hidden)


@pytest.mark.long
@pytest.mark.parametrize("shards", [1, 2])
def test_replicas_exchange_what_is_looked_at_and_nobody_calls_side_effects_again(shards):
    calls = []

    def count(x):
        one = jax.ShapeDtypeStruct((), jnp.float32)
        return jax.lax.stop_gradient(jax.experimental.io_callback(lambda _: calls.append(1) or np.ones((), "f"), one, x))

    def counted(params, batch):
        return centred(params, batch, count)

    mesh = jax.make_mesh((2, 2, shards), ("pipe", "data", "model"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of examples that are mixed, and of devices that share nothing
        pipe = pipeline(counted if shards == 1 else centred, mesh=mesh)
        state = pipe.init(PARAMS, X)
        with pytest.raises(FloatingPointError, match=r"0F0(?s:.*)made by `log`"):
            pipe.step(state, -jnp.abs(X))
    assert len(calls) == (2 if shards == 1 else 0)  # once on each replica
