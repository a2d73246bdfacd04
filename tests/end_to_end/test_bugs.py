"""One test a past bug, its story in a comment."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpp
from jaxpp.errors import BankError, StateError
from jaxpp.verify import compare, oracle
from tests.models import PARAMS, X, gpt_case, loss_fn, pipeline


def test_init_from_parameters_works_for_a_loss_that_takes_a_key():
    # The key's shape, not a key, was asked for its implementation.
    case = gpt_case(batch_size=4, depth=1, width=8)
    pipe = pipeline(case.loss_fn, has_aux=True)
    state = pipe.init(case.params, case.batch)
    _, metrics = pipe.step(state, case.batch, case.key)
    assert jnp.isfinite(metrics.loss)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::jaxpp.MicrobatchWarning")  # it takes means over the microbatch
def test_aux_is_right_where_microbatch_sizes_are_cut_differently():
    # At size one a mean over the batch traces otherwise, so the cuts differ; aux was read from the first size's stages alone.
    def with_aux(params, x):
        h = jnp.tanh(x @ params["a"])
        h = h - h.mean(0, keepdims=True) + h[:1]
        g = jnp.tanh(h @ params["b"])
        g = g - 0.5 * g.mean(0, keepdims=True)
        return jnp.mean((g @ params["c"]) ** 2), {"m": jnp.mean(h**2), "g": g.mean(), "rows": g}

    for size in (4, 5):
        pipe = pipeline(with_aux, stages=3, microbatches=3, has_aux=True)
        state = pipe.init(PARAMS, X[:size])
        pipe.verify(state, X[:size])


def test_a_state_with_an_edited_leaf_is_checked_and_placed():
    # Only the first leaf was looked at, so an edited one reached the devices unchecked.
    pipe = pipeline()
    for new in (np.zeros((6, 2), np.float32), jax.device_put(jnp.ones((6, 2)), jax.devices()[3])):
        state = pipe.init(PARAMS, X)
        state, _ = pipe.step(state._replace(params={**state.params, "c": new}), X)
        assert jnp.isfinite(jax.device_get(state.params["c"])).all()
    state = pipe.init(PARAMS, X)
    with pytest.raises(StateError, match=r"f32\[6,3\] instead of f32\[6,2\]"):
        pipe.step(state._replace(params={**state.params, "c": jnp.ones((6, 3))}), X)
    with pytest.raises(StateError, match=r"state.opt_state\[0\]: a EmptyState of 0 instead of a ScaleByAdamState of 3"):
        pipe.step(state._replace(opt_state=optax.sgd(0.1).init(PARAMS)), X)


def test_one_array_in_two_places_of_a_state_is_given_two_buffers():
    # Both places donated it: the second stage's update found it deleted, with the first stage's already done.
    twins = {"a": jnp.ones((4, 6)), "b": jnp.eye(6), "c": jnp.eye(6)}

    def loss(params, x):
        return jnp.mean((jnp.tanh(x @ params["a"] @ params["b"]) @ params["c"]) ** 2)

    pipe = pipeline(loss, devices=jax.devices()[:1])
    state = pipe.init(twins, X)
    zeros = jnp.zeros((6, 6))
    state, _ = pipe.step(state._replace(params={**state.params, "b": zeros, "c": zeros}), X)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state.held))


@pytest.mark.parametrize("microbatches", [2, 3])
def test_an_evaluation_loss_has_an_aux_of_its_own(microbatches):
    # Which aux leaves hold rows was taken from the training loss.
    def train(params, x):
        return loss_fn(params, x), {"n": jnp.sum(x)}

    def other(params, x):
        return loss_fn(params, x), {"y": x @ params["a"]}

    pipe = pipeline(train, microbatches=microbatches, has_aux=True)
    state = pipe.init(PARAMS, X)
    np.testing.assert_allclose(pipe.evaluate(state, X, loss_fn=other).aux["y"], X @ PARAMS["a"], rtol=1e-5)


def test_an_evaluation_loss_may_be_smaller_than_the_pipeline():
    # It was refused for having fewer equations than stages.
    pipe = pipeline(stages=3)
    state = pipe.init(PARAMS, X)

    def small(params, x):
        return (x @ params["a"]).mean()

    want = jnp.mean(jnp.stack([small(PARAMS, X[:4]), small(PARAMS, X[4:])]))
    np.testing.assert_allclose(pipe.evaluate(state, X, loss_fn=small).loss, want, rtol=1e-5)


def test_a_third_argument_with_a_default_of_its_own_is_no_key():
    # A flag as third argument was given a key.
    def flagged(params, x, train=True):
        return loss_fn(params, x) if train else 0.0

    pipe = pipeline(flagged)
    pipe.step(pipe.init(PARAMS, X), X)


def test_the_loss_of_value_and_grad_is_where_its_gradients_are():
    # It stayed on the last stage's device.
    loss, grads = jaxpp.value_and_grad(loss_fn, num_stages=np.int64(2))(PARAMS, X)
    assert jnp.isfinite(grads["a"] * loss).all()


def test_verify_takes_a_key_that_lives_anywhere():
    # Everything but the key was gathered.
    def keyed(params, x, key):
        return loss_fn(params, x * jax.random.bernoulli(key, 0.5, x.shape))

    pipe = pipeline(keyed)
    pipe.verify(pipe.init(PARAMS, X), X, jax.device_put(jax.random.key(1), jax.devices()[1]))


def test_the_loss_may_be_made_elsewhere_at_another_microbatch_size():
    # The stage of the loss was where it is made, so a step whose microbatches differ in size could not add it up.
    def loss_fn(params, batch):
        h = jnp.tanh(jnp.tanh(batch @ params["a"]) @ params["b"])
        end = jnp.tanh(jnp.tanh(h @ params["c"]) @ params["d"])
        return ((h**2).mean(), {"m": end.mean()}) if batch.shape[0] > 2 else ((end**2).mean(), {"m": h.mean()})

    params, batch = {name: jnp.eye(4) / 2 for name in "abcd"}, jnp.arange(28.0).reshape(7, 4) / 28
    grad_fn = jaxpp.value_and_grad(loss_fn, num_stages=3, num_microbatches=3, has_aux=True)
    (loss, aux), grads = grad_fn(params, batch)
    wanted = oracle(loss_fn, params, batch, None, 3, has_aux=True)
    compare("loss, aux, grads", ((loss, aux), grads), (wanted[:2], wanted[2]))


def of_rank_mates(updates, params=None):
    """To each small gradient that of the other stage of its rank is added."""
    return jax.tree.map(jnp.add, updates, {name: part[2:] + part[:2] for name, part in updates.items()})


@pytest.mark.parametrize(
    "optimizer",
    [optax.MultiSteps(optax.adam(1e-2), 2), optax.chain(optax.stateless(of_rank_mates), optax.sgd(0.1))],
    ids=["MultiSteps", "rank mates"],
)
@pytest.mark.long
def test_an_update_that_combines_leaves_runs_on_a_model_axis_with_two_stages_a_rank(optimizer):
    # Between stages of one rank a send is another name for the value. The update's program, compiled for a whole leaf, was given
    # the sharded one: "compiled for input shardings that disagree: passed P(None, 'model'), required P()".
    def loss(params, x):
        for fc, proj in zip(params["fc"], params["proj"], strict=True):
            x = x + jnp.tanh(x @ fc) @ proj
        return jnp.mean(x**2)

    rng = np.random.default_rng(0)
    params = {"fc": rng.normal(size=(4, 4, 8)) / 2, "proj": rng.normal(size=(4, 8, 4)) / 2}
    params = jax.tree.map(lambda leaf: [jnp.asarray(part, jnp.float32) for part in leaf], params)
    mesh = jax.make_mesh((2, 1, 2), ("pipe", "data", "model"), devices=jax.devices()[:4])
    pipe = pipeline(loss, optimizer, 4, 2, schedule="looped-bfs", mesh=mesh, shardings={"fc/*": "column", "proj/*": "row"})
    state = pipe.init(params, X)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state.held)
    for _ in range(2):
        state, _ = pipe.step(state, X)
    assert jax.tree.map(lambda leaf: leaf.sharding, state.held) == shardings
    pipe.verify(state, X)


@pytest.mark.parametrize(
    ("optimizer", "second"),
    [(optax.MultiSteps(optax.adam(1e-2), 2), X + 1), (optax.apply_if_finite(optax.adam(1e-2), 2), X * np.inf)],
    ids=["MultiSteps", "apply_if_finite"],
)
def test_a_condition_over_all_leaves_is_one_choice_a_leaf(optimizer, second):
    # MultiSteps and apply_if_finite are one lax.cond over all leaves: small ones all moved to one stage, optimizer state and all,
    # and larger ones were refused ("not move large arrays between them").
    params = {"a": jnp.full((4, 300), 0.1), "b": jnp.full((300, 4), 0.1)}
    pipe = pipeline(lambda p, x: jnp.mean((jnp.tanh(x @ p["a"]) @ p["b"]) ** 2), optimizer)
    state = pipe.init(params, X)
    homes = {leaf.shape: leaf.devices() for leaf in jax.tree.leaves(state.params)}
    assert all(leaf.devices() == homes[leaf.shape] for leaf in jax.tree.leaves(state.opt_state) if leaf.size > 1)
    assert len(set(map(frozenset, homes.values()))) == 2
    for batch in (X, second, X):
        state, _ = pipe.step(state, batch)
        pipe.verify(state, X)


def test_a_bank_takes_numpy_scalars():
    # np.float64(1) has a shape and a dtype and is no np.ndarray: "arrays of floating numbers. Got: params['scale'] is f64[]".
    bank = jaxpp.Bank({"cat": {"scale": np.float64(2), "w": np.ones(3, "f")}}, optax.sgd(0.5))
    with bank.use("cat") as task:
        task.params = jax.tree.map(lambda leaf: leaf + 1, task.params)
    assert bank.params("cat")["scale"] == 3
    with pytest.raises(BankError, match=r"params\['scale'\] is a float\.\n  Fix: make a Python number an array with np.float32"):
        bank.add("dog", {"scale": 2.0})


@pytest.mark.parametrize("params", [{"w": jnp.ones((4, 4, 4)) / 4}, {"a": jnp.ones((4, 4, 4)) / 4, "z": jnp.ones(4)}])
def test_a_clipped_norm_is_no_norm_of_one_leaf_because_that_is_the_first_or_the_only_one(params):
    # A sum over all leaves begins as 0 + the first leaf's, and is the leaf's own if there is no other: the optimizer was refused.
    def loss(params, x):
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params.get("w", params.get("a")))
        return jnp.mean((x * params.get("z", 1.0)) ** 2)

    pipe = pipeline(loss, optax.chain(optax.clip_by_global_norm(0.01), optax.adam(1e-2)), balance="flops")
    state = pipe.init(params, X)
    assert pipe.stages[1].num_params >= 2 * 16
    pipe.verify(state, X)
