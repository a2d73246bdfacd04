"""A state is a dataclass of the user's trees, metrics are a mapping, and both are ordinary to pickle, Orbax and tree functions."""

import collections.abc
import copy
import dataclasses
import json
import pathlib
import pickle
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpp
from jaxpp.errors import StateError, VerifyError
from tests.models import PARAMS, X, loss_fn, pipeline

LAYERS = {"w": jnp.stack([jnp.eye(4) * 0.9] * 5), "out": jnp.ones((4, 2))}


def looped(params, x):
    """Five layers on two stages: the slices of ``w`` differ in size."""
    x, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params["w"])
    return jnp.mean((x @ params["out"]) ** 2)


@pytest.fixture(scope="module")
def sliced():
    """A pipeline whose state holds slices, and a state of it."""
    pipe = pipeline(looped)
    state, _ = pipe.step(pipe.init(LAYERS, X), X)
    return pipe, state


def shapes(tree):
    return jax.tree.map(jnp.shape, tree)


def test_every_way_into_a_state_gives_the_users_trees(sliced):
    _, state = sliced
    wanted, mapped = shapes(LAYERS), jax.tree.map(lambda leaf: leaf, state)
    for found in (state.params, mapped.params, getattr(state, dataclasses.fields(state)[0].name), mapped.held[0]):
        assert shapes(found) == wanted
        np.testing.assert_array_equal(found["w"], state.params["w"])
    for found in (state, mapped):
        assert shapes(found.opt_state[0].mu) == shapes(found.opt_state[0].nu) == wanted
    assert (state.model_state, state.loss_scale, state.step) == ((), (), 1)
    names = [field.name for field in dataclasses.fields(state)]
    assert names == ["params", "opt_state", "model_state", "loss_scale", "step", "previous_scale", "previous"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        state.params = {}
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    assert paths[:3] == [".params['out']", ".params['w']", ".opt_state[0].count"] and paths[-1] == ".step"


def test_a_state_that_is_used_as_the_tuple_it_was_says_what_to_write(sliced):
    _, state = sliced
    for use in (lambda: state[0], lambda: state[:2], lambda: list(state), lambda: max(*state)):
        with pytest.raises(StateError, match=r"Fix: write state.params, state.opt_state, state.step"):
            use()


def test_a_state_with_one_part_replaced_holds_the_others_as_they_are(sliced):
    pipe, state = sliced
    edited = state._replace(params=jax.tree.map(lambda leaf: leaf * 2, state.params))
    held = [leaf for leaf in jax.tree.leaves(edited.held) if leaf.shape[:1] == (3,)]
    assert len(held) == 2 and all(any(leaf is mine for mine in jax.tree.leaves(state.held)) for leaf in held)
    new, _ = pipe.step(edited, X, donate=False)
    for other in (
        dataclasses.replace(state, params=edited.params),
        state.replace(params=edited.params),
        jaxpp.State(edited.params, state.opt_state, step=1),
    ):
        again, _ = pipe.step(other, X, donate=False)
        chex.assert_trees_all_equal(new, again)
    parts = "params, opt_state, model_state, loss_scale, step, previous_scale, previous"
    with pytest.raises(TypeError, match=f"a State has the parts {parts}, not param"):
        state._replace(param=1)


def test_a_state_with_slices_is_pickled_and_copied(sliced):
    pipe, state = sliced
    wanted, _ = pipe.step(state, X, donate=False)
    pickled = pickle.loads(pickle.dumps(jax.device_get(state)))  # noqa: S301  (our own)
    as_held = pickle.loads(pickle.dumps(state))  # noqa: S301  (our own)
    for other in (pickled, as_held, copy.copy(state), copy.deepcopy(state), jax.tree.map(jnp.copy, state)):
        new, _ = pipe.step(other, X, donate=False)
        chex.assert_trees_all_equal(new, wanted)


def test_metrics_are_numbers_for_json():
    aux = {"top": jnp.asarray([1.5, 2], jnp.bfloat16), "key": jax.random.key(3), "pair": (jnp.int8(1), np.float32(0.5), True)}
    metrics = jaxpp.Metrics(jnp.float32(0.25), aux, None, jnp.asarray(True), 4)
    wanted = {"loss": 0.25, "aux": {"top": [1.5, 2.0], "key": [0, 3], "pair": [1, 0.5, True]}, "finite": True, "step": 4}
    assert json.loads(json.dumps(metrics.to_dict())) == wanted


def test_metrics_are_a_mapping_of_what_the_step_has():
    pipe = pipeline()
    state = pipe.init(PARAMS, X)
    evaluated = pipe.evaluate(state, X)
    state, metrics = pipe.step(state, X)
    assert isinstance(metrics, collections.abc.Mapping)
    assert dict(metrics) == {"loss": metrics.loss, "grad_norm": metrics.grad_norm, "step": 1}
    assert list(metrics) == list(metrics.keys()) == ["loss", "grad_norm", "step"] and len(metrics) == 3
    assert "loss" in metrics and "finite" not in metrics and "keys" not in metrics and 0 not in metrics
    assert metrics["loss"] is metrics.loss and metrics.get("finite", 1) == 1 and metrics.finite is None
    assert {**evaluated} == {"loss": evaluated.loss, "step": 0} and "grad_norm" not in evaluated
    with pytest.raises(KeyError, match="'aux'; these metrics are loss, grad_norm, step"):
        metrics["aux"]
    with_aux = pipeline(lambda p, x: (loss_fn(p, x), {"m": x.mean()}), has_aux=True)
    _, metrics = with_aux.step(with_aux.init(PARAMS, X), X)
    assert list(metrics) == ["loss", "aux", "grad_norm", "step"] and metrics["aux"]["m"] == metrics.aux["m"]
    with pytest.raises(AttributeError, match=r"metrics have no m; write metrics\.aux\['m'\]"):
        metrics.m  # noqa: B018
    with pytest.raises(AttributeError, match="no accuracy; the names are loss, aux, grad_norm, finite, step, by_stage"):
        metrics.accuracy  # noqa: B018
    assert not hasattr(metrics, "shape")
    on_the_host = jax.device_get(metrics)
    assert isinstance(on_the_host, jaxpp.Metrics) and float(on_the_host["loss"]) == float(metrics.loss)


def test_an_average_of_parameters_is_kept_from_step_to_step():
    # The README's line; without a copy it is `Array has been deleted`.
    for loss, params in ((loss_fn, PARAMS), (looped, LAYERS)):
        pipe = pipeline(loss, optimizer=optax.sgd(0.1))
        state = pipe.init(params, X)
        ema = jax.tree.map(jnp.copy, state.params)
        state, _ = pipe.step(state, X)
        ema = jax.tree.map(lambda e, p: 0.9 * e + 0.1 * p, ema, state.params)
        wanted = jax.tree.map(lambda e, p: 0.9 * np.asarray(e) + 0.1 * np.asarray(p), params, state.params)
        chex.assert_trees_all_close(ema, wanted, rtol=1e-6)
        assert jnp.isfinite(pipe.evaluate(state._replace(params=ema), X).loss)


def test_arrays_that_a_step_consumed_are_refused_in_our_words():
    pipe = pipeline()
    state = pipe.init(PARAMS, X)
    ema = state.params
    state, _ = pipe.step(state, X)
    calls = {
        "jaxpp.gather": lambda: jaxpp.gather(ema),
        "pipe.init": lambda: pipe.init(ema, X),
        r"grad_fn\(params, batch, key\)": lambda: jaxpp.value_and_grad(loss_fn, num_stages=2)(ema, X),
        r"bank.add\('a', ...\)": lambda: jaxpp.Bank({"a": ema}, optax.sgd(0.1)),
        "state": lambda: pipe.evaluate(state._replace(params=ema), X),
    }
    for where, call in calls.items():
        with pytest.raises(StateError, match=rf"^{where}: step reuses the buffers of the state") as caught:
            call()
        assert "ema = jax.tree.map(jnp.copy, state.params)" in str(caught.value)
    assert pipe.state is state


def test_a_state_that_the_user_s_own_function_consumed_is_refused_in_our_words():
    # The step was an array by then, and gone like all others: reading it for the message raised JAX's own error.
    pipe = pipeline(stages=1)
    state = pipe.init(PARAMS, X)
    copy_of = jax.tree.map(jnp.copy, state)
    jax.jit(lambda state: jax.tree.map(lambda leaf: leaf + 0, state), donate_argnums=0)(copy_of)
    with pytest.raises(StateError, match=r"a state consumed by an earlier step \(10 of 10 leaves are gone\)\."):
        pipe.step(copy_of, X)
    assert pipe.state is state


def test_verify_says_that_nan_on_both_sides_proves_nothing():
    pipe = pipeline()
    state = pipe.init(PARAMS, X)
    with pytest.raises(VerifyError, match="NaN compared with NaN proves nothing") as caught:
        pipe.verify(state, X.at[0, 0].set(jnp.nan))
    assert "Got: loss is NaN\n       grads['a'] is NaN, 24 of 24 elements" in str(caught.value)
    params = {**PARAMS, "d": jnp.zeros(3)}
    pipe = pipeline(lambda p, x: loss_fn(p, x) + jnp.where(p["d"] > 0, jnp.sqrt(p["d"]), 0).sum())  # the gradient alone is NaN
    with pytest.raises(VerifyError, match=r"Got: grads\['d'\] is NaN, 3 of 3 elements"):
        pipe.verify(pipe.init(params, X), X)


def test_a_pipeline_and_a_bank_say_what_they_are():
    pipe = pipeline(schedule="zb-h1", microbatches=3)
    assert repr(pipe) == (
        "Pipeline of loss_fn\n  schedule: zb-h1, 2 stages, 3 microbatches\n  devices: cpu:0, cpu:1\n  init: not done yet"
    )
    pipe.init(PARAMS, X)
    lines = repr(pipe).splitlines()[-2:]
    assert lines == ["  stages: 72 parameters in 288 B; print(pipe.stages)", "  state: after 0 steps; print(pipe.state)"]
    del pipe.state
    assert repr(pipe).splitlines()[-1].startswith("  state: none yet; pipe.init makes one")
    bank = jaxpp.Bank({"a": {"c": PARAMS["c"]}, "b": {"c": jnp.ones(3)}}, optax.adam(1e-2))
    assert repr(bank) == "Bank(2 sets of 40 B to 148 B each, 188 B on the host, 2 slots on cpu:0)"
    assert repr(jaxpp.Bank({}, optax.sgd(0.1))) == "Bank(0 sets, 0 B on the host, 2 slots on cpu:0)"
    with_bank = pipeline(lambda p, q, x: loss_fn({**p, **q}, x), bank=bank, data_parallel=2)
    assert f"\n  devices: cpu:0, cpu:1, cpu:2, cpu:3 (2 replicas a rank)\n  bank: {bank!r}\n" in repr(with_bank)


def test_metrics_have_the_norm_of_each_stages_gradients_on_its_device():
    pipe = pipeline(stages=3)
    state = pipe.init(PARAMS, X)
    _, metrics = pipe.step(state, X, donate=False)
    _, grads = jax.value_and_grad(loss_fn)(PARAMS, X)
    assert list(metrics.by_stage) == [0, 1, 2] and "squares" not in dict(metrics)
    for (stage, norm), name in zip(metrics.by_stage.items(), "abc", strict=True):
        np.testing.assert_allclose(norm, optax.tree.norm(grads[name]), rtol=1e-5)
        assert norm.devices() == {pipe.engine.placement[stage].devices[0]}
    assert pipe.evaluate(state, X).by_stage == {}


def test_the_noise_scale_of_the_guide_is_that_of_one_device():
    page = (pathlib.Path(__file__).parents[2] / "docs" / "guide" / "train.md").read_text()
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "def noise_scale" in block)
    exec(code, names := {})  # noqa: S102  (what a reader would paste)
    pipe, rng = pipeline(stages=3), np.random.default_rng(0)
    batch = X + rng.normal(size=X.shape).astype(X.dtype)
    parts = jnp.split(batch, 4)
    found = names["noise_scale"](pipe, pipe.init(PARAMS, batch), batch, parts)
    whole, *small = (jax.grad(loss_fn)(PARAMS, each) for each in (batch, *parts))
    for stage, name in enumerate("abc"):
        big, mean = optax.tree.norm(whole[name]) ** 2, np.mean([optax.tree.norm(each[name]) ** 2 for each in small])
        signal = (len(batch) * big - len(parts[0]) * mean) / (len(batch) - len(parts[0]))  # appendix A.1 of the paper
        noise = (mean - big) / (1 / len(parts[0]) - 1 / len(batch))
        np.testing.assert_allclose(found[stage], noise / signal, rtol=1e-3)
