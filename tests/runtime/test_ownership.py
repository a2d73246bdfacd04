"""What belongs to the caller: arrays that may be overwritten as soon as a call returns, and while it runs."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxpp
from tests.end_to_end.test_bugs import PARAMS, X, loss_fn, pipeline


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
