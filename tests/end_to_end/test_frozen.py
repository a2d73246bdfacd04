"""Frozen parameters: before the first stage that learns, no backward runs and no residual is kept; results equal the oracle's."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpp
from jaxpp.observe.memory.liveness import step_liveness
from jaxpp.schedule import Kind
from jaxpp.verify import GRAD_FLOOR, compare, oracle
from tests.models import gpt_case, mlp_case

FIRST_HALF = {"dense_0", "dense_1", "dense_2", "dense_3"}


def labels(params):
    return {name: "frozen" if name in FIRST_HALF else "trained" for name in params}


def stopped(case):
    """The case's loss, its first half under stop_gradient."""

    def loss_fn(params, batch):
        held = {name: jax.lax.stop_gradient(tree) if name in FIRST_HALF else tree for name, tree in params.items()}
        return case.loss_fn(held, batch)

    return loss_fn


def make(case, how, schedule="1f1b", **more):
    options = {
        "num_stages": 4,
        "num_microbatches": 4,
        "schedule": schedule,
        "has_aux": True,
        "cuts": ["dense_2", "dense_4", "dense_6"],
    }
    adam = optax.adam(1e-2)
    by_optimizer = optax.multi_transform({"trained": adam, "frozen": optax.set_to_zero()}, labels)
    loss_fn, optimizer = (case.loss_fn, by_optimizer) if how == "optimizer" else (stopped(case), adam)
    return jaxpp.Pipeline(loss_fn, optimizer, **(options | more)), loss_fn, optimizer


@pytest.mark.parametrize(
    ("schedule", "how"),
    [
        ("1f1b", "optimizer"),
        pytest.param("1f1b", "stop_gradient", marks=pytest.mark.long),
        pytest.param("zb-h1", "optimizer", marks=pytest.mark.long),
        ("zb-h1", "stop_gradient"),
    ],
)
def test_the_frozen_half_runs_no_backward_and_keeps_no_residual(how, schedule):
    case = mlp_case(batch_size=16)
    pipe, _, _ = make(case, how, schedule)
    pipe.init(case.params, case.batch)
    lowered = pipe.engine.lower("update", case.batch, None)
    ran = {line.action for line in lowered.bound.lines if line.action is not None and line.program is not None}
    backwards = {(action.stage, str(action.kind)) for action in ran if action.kind != Kind.F}
    assert {stage for stage, _ in backwards} == {2, 3}
    assert (2, "I") not in backwards, "nobody wants the cotangent of the first stage that learns"
    liveness = step_liveness(pipe.engine, lowered)
    assert {life.name.stage for life in liveness.lives if life.kind == "residuals"} == {2, 3}
    last = max(number + 1 for number, line in enumerate(liveness.lines) if line.action is not None)
    early = {life.name.stage for life in liveness.lives if life.kind == "gradients" and life.begins <= last}
    late = {life.name.stage for life in liveness.lives if life.kind == "gradients" and life.begins > last}
    assert early == {2, 3}
    assert late - early == (set() if how == "optimizer" else {0, 1}), "an optimizer that reads them gets zeros, at the end"
    sends = [line.label for line in lowered.bound.lines if line.is_send and line.action is not None]
    assert len(sends) == 4 * (3 + 1), "activations over three boundaries, cotangents over the last only"


@pytest.mark.parametrize("how", ["optimizer", pytest.param("stop_gradient", marks=pytest.mark.long)])
def test_a_pipeline_with_a_frozen_half_trains_as_the_oracle_does(how):
    case = mlp_case(batch_size=16)
    pipe, loss_fn, optimizer = make(case, how)
    state, params = pipe.init(case.params, case.batch), case.params
    pipe.verify(state, case.batch)
    opt_state = optimizer.init(params)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", jaxpp.DeadStageWarning)
        for _ in range(5):
            state, metrics = pipe.step(state, case.batch)
            jax.block_until_ready(state)
            loss, _, grads = oracle(loss_fn, params, case.batch, None, 4, has_aux=True, reducers=case.reducers)
            updates, opt_state = optimizer.update(grads, opt_state, params)
            params = optax.apply_updates(params, updates)
            compare("loss", metrics.loss, loss)
            compare("params", state.params, params)
    assert len(caught) == (how == "stop_gradient"), "stop_gradient may be meant or not; an optimizer that freezes means it"
    for name in FIRST_HALF:
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.params[name]), case.params[name])


@pytest.mark.long
def test_the_drop_in_gives_zero_gradients_for_what_is_stopped():
    case = mlp_case(batch_size=16)
    grad_fn = jaxpp.value_and_grad(stopped(case), num_stages=4, num_microbatches=4, has_aux=True)
    _, found = grad_fn(case.params, case.batch)
    _, _, grads = oracle(stopped(case), case.params, case.batch, None, 4, has_aux=True, reducers=case.reducers)
    compare("grads", found, grads, floor=GRAD_FLOOR)
    assert not any(np.any(leaf) for name in FIRST_HALF for leaf in jax.tree.leaves(found[name]))


@pytest.mark.long
def test_a_tied_embedding_that_is_stopped_on_one_side_learns_from_the_other():
    case = gpt_case()

    def loss_fn(params, batch, key):
        held = params | {"h_0": jax.lax.stop_gradient(params["h_0"])}
        return case.loss_fn(held, batch, key)

    options = {"num_stages": 3, "num_microbatches": 2, "has_aux": True}
    (loss, _), found = jaxpp.value_and_grad(loss_fn, **options)(case.params, case.batch, case.key)
    expected, _, grads = oracle(loss_fn, case.params, case.batch, case.key, 2, has_aux=True)
    compare("loss", loss, expected)
    compare("grads", found, grads, floor=GRAD_FLOOR)


def test_a_mask_over_whole_numbers_does_not_carry_a_gradient():
    def loss_fn(params, x):
        chosen = jnp.argmax(x @ params["a"], axis=-1)
        return (jnp.tanh(x * chosen[:, None].astype(x.dtype)) @ params["b"]).mean()

    params = {"a": jnp.eye(4), "b": jnp.ones((4, 2))}
    _, grads = jaxpp.value_and_grad(loss_fn, num_stages=2, num_microbatches=2)(params, jnp.arange(16.0).reshape(4, 4))
    assert not grads["a"].any()
    assert grads["b"].any()


@pytest.mark.parametrize("first", [4, 8])
@pytest.mark.parametrize("width", [4, 40], ids=["packed", "unpacked"])
@pytest.mark.long
def test_a_parameter_that_only_some_batch_sizes_use_gets_its_gradient_at_those(first, width):
    def loss_fn(params, x):
        h = jnp.tanh(x @ params["a"]) @ params["b"]
        return ((h + x @ params["c"] if x.shape[0] > 2 else h) ** 2).mean()

    params = {name: jax.random.normal(jax.random.key(k), (width, width)) / 4 for k, name in enumerate("abc")}
    pipe = jaxpp.Pipeline(loss_fn, optax.adam(1e-2), num_stages=2, num_microbatches=2)
    state = pipe.init(params, jnp.ones((first, width)))
    for size in (4, 8, 7):
        batch = jax.random.normal(jax.random.key(size), (size, width))
        pipe.verify(state, batch)
        state, _ = pipe.step(state, batch)
