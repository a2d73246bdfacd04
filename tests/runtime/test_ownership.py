"""What belongs to whom: arrays of the caller, which may be overwritten at any time, and states, of which a pipeline keeps one."""

import gc
import weakref

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpp
from jaxpp.engine.engine import Engine
from jaxpp.errors import StateError
from tests.models import LAYERS, PARAMS, X, looped, loss_fn, pipeline

LONG = pytest.mark.long


def aligned(value):
    """A NumPy array whose memory begins where XLA wants it to, as that of ordinary arrays does now and then."""
    value = np.asarray(value)
    room = np.empty(value.nbytes + 64, np.uint8)
    begin = -room.ctypes.data % 64
    found = room[begin : begin + value.nbytes].view(value.dtype).reshape(value.shape)
    found[...] = value
    return found


def overwrite(tree):
    for leaf in jax.tree.leaves(tree):
        leaf.fill(7)


def test_parameters_that_are_numpy_arrays_are_copied_by_init():
    # `jax.device_put(numpy, may_alias=False)` shares the memory of an aligned array on CPU, so the state changed with it.
    params = jax.tree.map(aligned, PARAMS)
    pipe = pipeline()
    state = pipe.init(params, X)
    before = pipe.evaluate(state, X).loss
    overwrite(params)
    assert pipe.evaluate(state, X).loss == before
    assert all((leaf != 7).all() for leaf in jax.tree.leaves(jaxpp.gather(state.params)))


def test_what_the_caller_overwrites_while_a_step_runs_is_not_seen():
    # Later stages and the update read the caller's memory as it was by then: of parameters, or of a state restored as NumPy arrays.
    written = [{}]

    def loss(params, x):
        jax.debug.callback(lambda _: overwrite(written[-1]), x.sum())
        return loss_fn(params, x)

    params = jax.tree.map(aligned, PARAMS)
    grad_fn = jaxpp.value_and_grad(loss, num_stages=2)
    wanted = grad_fn(params, X)
    written.append(params)
    chex.assert_trees_all_equal(grad_fn(params, X), wanted)

    written.append({})
    pipe = pipeline(loss)
    saved = [jax.tree.map(aligned, jax.device_get(pipe.init(PARAMS, X))) for _ in range(2)]
    wanted = jax.device_get(pipe.step(saved[0], X)[0].params)
    written.append(saved[1])
    chex.assert_trees_all_equal(jax.device_get(pipe.step(saved[1], X)[0].params), wanted)


def test_other_arrays_of_the_caller_are_copied_too():
    # What the loss closes over, what a pullback by hand reads, and what a bank and gather take in.
    mask, params = aligned(np.ones((8, 4), "f")), jax.tree.map(aligned, PARAMS)
    pipe = pipeline(lambda p, x: loss_fn(p, x * mask[: x.shape[0]]))
    state = pipe.init(params, X)
    before = pipe.evaluate(state, X).loss
    activation, pullback = pipe.stages[0].forward(params, {}, X[:4])
    _, again = pipe.stages[0].forward(params, {}, X[:4])
    ones = jax.tree.map(jnp.ones_like, activation)
    wanted = pullback(ones)
    moments, theta = {"m": aligned(np.ones(4, "f"))}, {"w": aligned(np.ones(4, "f"))}
    bank = jaxpp.Bank({"a": theta}, optax.sgd(0.1))
    bank.add("b", theta, bank.opt_state("a"))
    gathered = jaxpp.gather(theta)
    overwrite((mask, params, theta, moments))
    assert pipe.evaluate(state, X).loss == before
    chex.assert_trees_all_equal(again(ones), wanted)
    for tree in (bank.params("a"), bank.params("b"), gathered):
        np.testing.assert_array_equal(tree["w"], np.ones(4))


def host(tree):
    return jax.tree.map(np.array, tree)


def test_pipe_state_is_the_newest_state():
    pipe = pipeline()
    with pytest.raises(StateError, match=r"pipe\.state: a pipeline is cut by init"):
        _ = pipe.state
    first = pipe.init(PARAMS, X)
    assert pipe.state is first
    second, _ = pipe.step(first, X, donate=False)
    assert pipe.state is second
    pipe.evaluate(first, X)
    pipe.verify(first, X)
    assert pipe.state is second
    with pytest.raises(ValueError, match="each microbatch needs at least one example"):
        pipe.step(second, X[:1])
    third, _ = pipe.step(pipe.state, X)
    assert pipe.state is third
    consumed = r"the state after 1 step, consumed by an earlier step \(9 of 10 leaves are gone\)\.\n"
    with pytest.raises(StateError, match=consumed + r"  Fix: go on with state = pipe\.state, the newest"):
        pipe.step(second, X)
    assert pipe.state is third
    del pipe.state
    with pytest.raises(StateError, match="or the state was deleted"):
        _ = pipe.state
    pipe.step(third, X)


@pytest.mark.long
def test_a_pipeline_keeps_one_state_alive_and_no_other(monkeypatch):
    pipe = pipeline()
    state = pipe.init(PARAMS, X)
    old = weakref.ref(state.params["a"])
    state, _ = pipe.step(state, X, donate=False)
    gc.collect()
    assert old() is None
    old = weakref.ref(state.params["a"])
    del state, pipe.state
    gc.collect()
    assert old() is None
    old = weakref.ref(pipe.init(PARAMS, X).params["a"])
    gc.collect()
    assert old() is not None
    seen, make = [], Engine.make_opt_state
    monkeypatch.setattr(Engine, "make_opt_state", lambda *given: (seen.append(old() is None), make(*given))[1])
    pipe.init(PARAMS, X)
    assert seen == [True]


@pytest.mark.parametrize("numbers", [pytest.param((1, 0), marks=LONG), pytest.param((2, 1, 0), marks=LONG), (0, 2)], ids=str)
def test_the_state_of_another_pipeline_is_consumed_whole_or_not_at_all(numbers):
    one, other = pipeline(), pipeline(stages=len(numbers), devices=[jax.devices()[k] for k in numbers])
    state = one.init(PARAMS, X)
    other.init(PARAMS, X)
    wanted = host(pipeline().init(PARAMS, X))
    new, _ = other.step(state, X)
    gone = {leaf.is_deleted() for leaf in jax.tree.leaves(state.held)}
    assert gone == {False}
    chex.assert_trees_all_equal(host(state), wanted)
    assert one.state is state and other.state is new
    twin = pipeline()
    twin.init(PARAMS, X)
    twin.step(state, X)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.held) if leaf.shape)  # a step count may be read everywhere
    with pytest.raises(StateError, match="or by the step of another pipeline"):
        _ = one.state


@pytest.mark.parametrize("num_devices", [1, 3])
@pytest.mark.parametrize("stages", [1, 4])
def test_a_state_with_unequal_slices_steps_in_a_pipeline_that_has_them_otherwise_and_stays(stages, num_devices):
    # With one stage: `'Slices' object has no attribute 'addressable_shards'`. On one device all but the slices was consumed.
    made = [pipeline(looped, stages=count, devices=jax.devices()[:num_devices], balance="flops") for count in (3, stages)]
    states = [pipe.init(LAYERS, X) for pipe in made]
    wanted, _ = made[1].step(states[1], X)
    new, _ = made[1].step(states[0], X)
    chex.assert_trees_all_equal(host(new), host(wanted))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(states[0].held))
    chex.assert_trees_all_equal(host(made[0].state.params), host(LAYERS))


def test_one_buffer_under_two_names_is_given_up_once():
    pipe = pipeline(devices=jax.devices()[:1])
    state = pipe.init({**PARAMS, "a": jnp.eye(6)[:4], "b": jnp.eye(6)}, X)
    array = jnp.full((6, 6), 0.1)
    again = jax.device_put(array, jax.devices()[0])
    mu = {**state.opt_state[0].mu, "b": again}
    state = state._replace(params={**state.params, "b": array}, opt_state=(state.opt_state[0]._replace(mu=mu), state.opt_state[1]))
    new, _ = pipe.step(state, X)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(new.held))
