"""A boundary that carries no gradient: the stages before it learn nothing, and a warning names it (ACCEPTANCE.md A8)."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpp
from jaxpp.errors import ArgumentError
from jaxpp.observe.dead_stages import Detector
from tests.models import mlp_case


def train(pipe, state, batch, steps):
    """Train, and say what was warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", jaxpp.DeadStageWarning)
        for _ in range(steps):
            state, metrics = pipe.step(state, batch)
            jax.block_until_ready(metrics.loss)
    return state, [w for w in caught if issubclass(w.category, jaxpp.DeadStageWarning)]


def stage_of(pipe, state):
    """The stage of each parameter leaf."""
    owner = iter(pipe.engine.layout.owner)
    return jax.tree.map(lambda _: next(owner), state.params)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "gpipe"])
def test_a_cut_gradient_leaves_the_earlier_stages_as_they_are_and_the_warning_names_the_boundary(schedule):
    case = mlp_case()
    options = {"num_stages": 4, "num_microbatches": 4, "schedule": schedule, "has_aux": True, "cut_gradient": [1]}
    pipe = jaxpp.Pipeline(case.loss_fn, optax.adam(1e-3), **options)
    state = pipe.init(case.params, case.batch)
    found = pipe.engine.run("grads", pipe.engine.bring(state.params), case.batch, None).grads
    for stage, grad in zip(pipe.engine.layout.owner, found, strict=True):
        assert np.any(np.asarray(grad)) == (stage > 1)
    state, warned = train(pipe, state, case.batch, 12)
    (warning,) = warned
    assert "stages 0, 1 do not learn" in str(warning.message)
    assert "boundary 1 (between stages 1 and 2)" in str(warning.message)
    assert warning.filename == __file__
    same = jax.tree.map(lambda a, b: bool(jnp.array_equal(jax.device_get(a), b)), state.params, case.params)
    assert same == jax.tree.map(lambda stage: stage <= 1, stage_of(pipe, state))


def test_the_gradients_after_a_cut_are_those_of_a_loss_with_stop_gradient_there():
    def loss_fn(params, x, stop=lambda value: value):
        skip = jnp.tanh(x @ params["a"])
        x = stop(jnp.tanh(skip @ params["b"]))
        return ((jnp.tanh(x @ params["c"]) + stop(skip)) @ params["d"]).std(1).mean()

    params = {name: jax.random.normal(jax.random.key(k), (8, 8)) for k, name in enumerate("abcd")}
    batch = jax.random.normal(jax.random.key(9), (8, 8))
    options = {"num_stages": 4, "num_microbatches": 2, "cuts": ["b", "c", "d"], "cut_gradient": [1]}
    pipe = jaxpp.Pipeline(loss_fn, optax.sgd(1.0), **options)
    state = pipe.init(params, batch)
    moved, _ = pipe.step(state, batch, donate=False)
    found = jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), state.params, moved.params)
    halves = [jax.grad(lambda p, x: loss_fn(p, x, jax.lax.stop_gradient))(params, half) for half in (batch[:4], batch[4:])]
    jax.tree.map(lambda a, b, c: np.testing.assert_allclose(a, (b + c) / 2, atol=1e-6), found, *halves)
    assert not found["a"].any()
    assert not found["b"].any()
    assert found["c"].any()


@pytest.mark.long
def test_without_a_cut_nothing_is_warned_of_in_fifty_steps():
    case = mlp_case()
    pipe = jaxpp.Pipeline(case.loss_fn, optax.adam(1e-3), num_stages=4, num_microbatches=4, has_aux=True)
    _, warned = train(pipe, pipe.init(case.params, case.batch), case.batch, 50)
    assert not warned


def test_a_stage_that_dies_later_is_found_and_warned_of_once():
    def loss_fn(params, x):
        return (jax.nn.relu(x @ params["a"] + params["bias"]) @ params["b"] + params["shift"]).mean()

    params = {"a": jnp.eye(4), "b": jnp.eye(4), "bias": jnp.zeros(4), "shift": jnp.zeros(4)}
    pipe = jaxpp.Pipeline(loss_fn, optax.sgd(0.0), num_stages=2, num_microbatches=2, cuts=["b"])
    state = pipe.init(params, jnp.ones((4, 4)))
    state, warned = train(pipe, state, jnp.ones((4, 4)), 20)
    assert not warned
    state, warned = train(pipe, state, -jnp.ones((4, 4)), 80)  # all units are off
    (warning,) = warned
    assert "boundary 0 (between stages 0 and 1)" in str(warning.message)


def test_a_loss_that_gives_no_gradient_at_all_is_said_so():
    pipe = jaxpp.Pipeline(lambda p, x: jnp.sign(x @ p["a"] @ p["b"]).mean(), optax.sgd(0.1), num_stages=2, num_microbatches=2)
    _, warned = train(pipe, pipe.init({"a": jnp.eye(4), "b": jnp.eye(4)}, jnp.ones((4, 4))), jnp.ones((4, 4)), 6)
    assert "no gradient comes from the loss" in str(warned[0].message)


def test_a_loss_of_zero_is_said_where_nothing_is_left_to_learn():
    pipe = jaxpp.Pipeline(lambda p, x: ((x @ p["a"] @ p["b"]) ** 2).mean(), optax.sgd(0.1), num_stages=2, num_microbatches=2)
    _, warned = train(pipe, pipe.init({"a": jnp.eye(4), "b": jnp.eye(4)}, jnp.zeros((4, 4))), jnp.zeros((4, 4)), 6)
    (message,) = (str(each.message) for each in warned)
    assert message.startswith("no stage learns any more") and "because the loss is 0." in message
    assert "stop_gradient" not in message


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("bad", [3, 21])
def test_a_loss_that_becomes_nan_is_told_once_with_the_first_step(bad, delay):
    def loss_fn(params, batch):
        return (jnp.tanh(batch["x"] @ params["a"]) @ params["b"]).mean() * batch["factor"]

    params, x = {"a": jnp.eye(4), "b": jnp.eye(4)}, jnp.ones((4, 4))
    pipe = jaxpp.Pipeline(loss_fn, optax.sgd(0.1), num_stages=2, num_microbatches=2, delay=delay)
    state = pipe.init(params, {"x": x, "factor": 1.0})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(1, 60):
            state, metrics = pipe.step(state, {"x": x, "factor": np.nan if step == bad else 1.0})
            jax.block_until_ready(metrics.loss)
            assert step > bad or not caught
    (warning,) = caught
    assert warning.category is jaxpp.NanLossWarning and warning.filename == __file__
    assert f"the loss is NaN since step {bad}," in str(warning.message) and '"jax_debug_nans", True' in str(warning.message)


def test_a_step_with_a_nan_that_the_optimizer_skips_is_not_warned_of():
    optimizer = optax.apply_if_finite(optax.sgd(0.1), 5)
    pipe = jaxpp.Pipeline(lambda p, x: (jnp.tanh(x @ p["a"]) @ p["b"]).mean(), optimizer, num_stages=2, num_microbatches=2)
    state, x = pipe.init({"a": jnp.eye(4), "b": jnp.eye(4)}, jnp.ones((4, 4))), jnp.ones((4, 4))
    for step in range(1, 40):
        state, metrics = pipe.step(state, x * jnp.nan if step in (3, 4, 17) else x)
        jax.block_until_ready(metrics.loss)
    assert jnp.isfinite(metrics.loss)


def test_losses_wait_in_a_number_that_does_not_grow():
    detector = Detector([0])
    for step in range(200):
        detector.add(step, jnp.float32(step), [jnp.float32(1)])
        detector.look()
        assert len(detector._losses) < 16 and not detector._unread


def test_looking_for_a_nan_waits_for_no_step():
    class Unready:
        def is_ready(self):
            return False

        def is_deleted(self):
            return False

        is_fully_addressable = True

        def __float__(self):
            pytest.fail("waited for")

    detector = Detector([0])
    for step in range(40):
        detector.add(step, Unready(), [jnp.float32(1)])
        detector.look()


@pytest.mark.parametrize("wrong", [[3], [-1], [0.5], 7, [True], {"1"}])
def test_boundaries_that_are_not_there_are_refused(wrong):
    with pytest.raises(ArgumentError, match="boundary s lies between stages s and s \\+ 1"):
        jaxpp.Pipeline(lambda p, b: 0.0, optax.sgd(1.0), num_stages=4, cut_gradient=wrong)


@pytest.mark.long
def test_verify_says_that_a_cut_gradient_is_meant_to_differ():
    case = mlp_case()
    pipe = jaxpp.Pipeline(case.loss_fn, optax.sgd(0.1), num_stages=2, num_microbatches=2, has_aux=True, cut_gradient=[0])
    with pytest.raises(ArgumentError, match="without cut_gradient"):
        pipe.verify(pipe.init(case.params, case.batch), case.batch)


def test_a_warning_that_is_an_error_loses_no_state():
    case = mlp_case()
    pipe = jaxpp.Pipeline(case.loss_fn, optax.sgd(0.1), num_stages=2, num_microbatches=2, has_aux=True, cut_gradient=[0])
    state, raised = pipe.init(case.params, case.batch), 0
    for _ in range(8):
        try:
            state, metrics = pipe.step(state, case.batch)
        except jaxpp.DeadStageWarning:
            raised += 1
            state, metrics = pipe.step(state, case.batch)
        jax.block_until_ready(metrics.loss)
    assert raised == 1


def test_zeros_must_follow_one_another():
    detector = Detector([0, 1])
    for step, value in enumerate((0.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0)):
        detector.add(step, jnp.float32(1), [jnp.float32(value), jnp.float32(1)])
        detector.look()
    assert detector._zeros[0] == 2


@pytest.mark.parametrize(
    ("zeros", "words"),
    [
        ({0: 3, 1: 0}, "boundary 0 (between stages 0 and 1)"),
        ({0: 3, 2: 0}, "boundary 0 or 1 (between stages 0 and 2)"),
        ({0: 0, 1: 3, 2: 0}, "no gradient reaches the parameters of stage 1, though one passes it"),
        ({0: 3, 1: 3}, "no gradient comes from the loss"),
    ],
)
def test_the_place_that_is_named_is_between_what_is_dead_and_what_learns(zeros, words):
    detector = Detector(list(zeros))
    for step in range(3):
        detector.add(step, jnp.float32(1), [jnp.float32(count == 0) for count in zeros.values()])
    with pytest.warns(jaxpp.DeadStageWarning) as warned:
        detector.look()
    assert words in str(warned[0].message)


@pytest.mark.long
def test_verify_is_no_step(monkeypatch):
    case = mlp_case()
    pipe = jaxpp.Pipeline(case.loss_fn, optax.sgd(0.1), num_stages=2, num_microbatches=2, has_aux=True)
    state = pipe.init(case.params, case.batch)
    monkeypatch.setattr(Detector, "add", pytest.fail)
    pipe.verify(state, case.batch)
