"""A step whose host callback raises, in the loss or in the optimizer, at any microbatch, changes nothing and is counted never."""

import dataclasses
import pathlib
import subprocess
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import io_callback

import jaxpp
from jaxpp.errors import StateError
from tests.models import PARAMS, X, loss_fn, pipeline

pytestmark = pytest.mark.filterwarnings("ignore::jaxpp.MicrobatchWarning")  # nobody knows what a callback does with the examples

ROOT = pathlib.Path(__file__).parents[2]
ADAM = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2))


@pytest.fixture(autouse=True)
def the_last_effect_of_each_device_succeeds():
    """JAX remembers it, and a barrier in a later test would raise the error of one that failed here."""
    yield
    for device in jax.devices():
        harmless(jax.device_put(0, device))
    jax.effects_barrier()


@jax.jit
def harmless(x):
    jax.debug.callback(lambda: None)
    return x


class Broken:
    """A host function that raises at its n-th call from now; None: never."""

    def __init__(self, error=RuntimeError):
        self.error, self.left = error, None

    def __call__(self, value):
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise self.error("no")
        return np.asarray(value)


def shown(check, x):
    jax.debug.callback(check, x.sum())
    return x


def pure(check, x):
    return x + 0 * jax.pure_callback(check, jax.ShapeDtypeStruct((), x.dtype), jax.lax.stop_gradient(x.sum()))


def impure(check, x):
    return x + 0 * io_callback(check, jax.ShapeDtypeStruct((), x.dtype), jax.lax.stop_gradient(x.sum()))


def in_a_branch(check, x):
    return jax.lax.cond(x.sum() > -1e9, lambda x: shown(check, x), lambda x: x, x)


def in_a_loop(check, x):
    return jax.lax.scan(lambda x, _: (shown(check, x), None), x, None, length=2)[0]


def in_a_checkpoint(check, x):
    return jax.checkpoint(lambda x: jnp.sin(shown(check, x)))(x)


def backward_only(check, x, call=None):
    """A callback in the derivative rule, which tracing the loss alone does not see."""

    @jax.custom_vjp
    def same(x):
        return x

    same.defvjp(lambda x: (x, None), lambda _, ct: ((call or pure)(check, ct),))
    return same(x)


def shown_cotangent(check, x):
    """A callback without results that reads a cotangent: `KeyError: Var`, for it was taken for a part of the forward."""
    return backward_only(check, x, shown)


CALLS = [shown, pure, impure, in_a_branch, in_a_loop, in_a_checkpoint, backward_only, shown_cotangent]


def host(tree):
    return jax.tree.map(np.array, tree)


@pytest.mark.parametrize("call", CALLS)
def test_a_callback_of_the_loss_that_raises_at_any_microbatch_changes_nothing(call):
    check, rng = Broken(), np.random.default_rng(0)

    def loss(params, x):
        return loss_fn(params, call(check, x @ params["a"] @ jnp.linalg.pinv(params["a"])))

    pipe = pipeline(loss, ADAM, stages=3, microbatches=4)
    pipe.init(PARAMS, X)
    for _ in range(12):
        pipe.step(pipe.state, X)
    wanted = host(pipe.state)
    pipe.init(PARAMS, X)
    raised = 0
    while (number := pipe.state.step) < 12:
        state = pipe.state
        check.left = None if raised > 20 else int(rng.integers(0, 6))
        try:
            pipe.step(state, X, donate=bool(rng.integers(2)))
        except jax.errors.JaxRuntimeError:
            raised += 1
            assert pipe.state is state and state.step == optax.tree.get(state.opt_state, "count") == number
    check.left = None
    assert raised > 3
    chex.assert_trees_all_equal(host(pipe.state), wanted)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, RuntimeError])
@pytest.mark.long
def test_whatever_a_callback_raises_the_next_step_is_as_if_nothing_had_been(error):
    check = Broken(error)

    def watched(updates, state, params=None):
        return jax.tree.map(lambda leaf: shown(check, leaf), updates), state

    of_loss = pipeline(lambda params, x: loss_fn(params, shown(check, x)), ADAM)
    of_optimizer = pipeline(optimizer=optax.chain(ADAM, optax.GradientTransformation(lambda params: (), watched)))
    for pipe in (of_loss, of_optimizer):
        first = pipe.init(PARAMS, X)
        wanted = host(pipe.step(first, X, donate=False)[0])
        check.left = 1
        with pytest.raises(jax.errors.JaxRuntimeError):
            pipe.step(first, X)
        check.left = None
        assert pipe.state is first
        chex.assert_trees_all_equal(host(pipe.step(pipe.state, X)[0]), wanted)


def test_an_error_of_the_loss_at_a_new_batch_shape_or_of_an_evaluation_changes_nothing():
    def loss(params, x):
        if x.shape[0] == 3:
            raise LookupError("not for three")
        return loss_fn(params, x)

    pipe = pipeline(loss, ADAM)
    state = pipe.init(PARAMS, X)
    state, _ = pipe.step(state, X)
    before = host(state)
    with pytest.raises(LookupError, match="not for three"):
        pipe.step(state, X[:6])
    with pytest.raises(LookupError, match="not for three"):
        pipe.evaluate(state, X[:6])
    assert pipe.state is state
    chex.assert_trees_all_equal(host(pipe.state), before)
    pipe.step(state, X)


def test_with_a_bank_a_callback_that_raises_leaves_theta_and_the_set_as_they_were():
    check = Broken()

    def loss(params, own, x):
        return loss_fn({**params, **own}, shown(check, x))

    bank = jaxpp.Bank({name: {"c": PARAMS["c"]} for name in ("cat", "dog")}, optax.adam(1e-2))
    pipe = pipeline(loss, ADAM, bank=bank)
    pipe.init({name: PARAMS[name] for name in "ab"}, X)
    for task in ("cat", "dog", "cat"):
        state, _ = pipe.step(pipe.state, X, task=task)
        before = host((state, bank.params("cat"), bank.params("dog")))
        check.left = 1
        for donate in (True, False):
            with pytest.raises(jax.errors.JaxRuntimeError):
                pipe.step(state, X, task=task, donate=donate)
        check.left = None
        assert pipe.state is state
        chex.assert_trees_all_equal(host((state, bank.params("cat"), bank.params("dog"))), before)


@pytest.mark.long
def test_a_host_callback_that_raises_leaves_the_old_state_and_no_error_for_later():
    # The program of the callback may be dispatched before it fails: then the step returned, the update had consumed the state, and
    # the next step raised the old error, for the sums of squares that look for dead stages were read.
    broken = [False]

    def check(_):
        if broken[0]:
            raise RuntimeError("no")

    def loss(params, x):
        for _ in range(6):
            x = jnp.tanh(x @ params["a"])
        jax.debug.callback(check, x.sum())
        return jnp.mean((jnp.tanh(x @ params["b"]) @ params["c"]) ** 2)

    params, batch = {"a": jnp.eye(256), "b": jnp.eye(256), "c": jnp.ones((256, 2))}, jnp.ones((2048, 256))
    pipe = pipeline(loss)
    state = pipe.init(params, batch)
    wanted = host(pipe.step(state, batch, donate=False)[0])
    for donate in [True, False] * 5:
        broken[0] = True
        with pytest.raises(jax.errors.JaxRuntimeError):
            pipe.step(state, batch, donate=donate)
        broken[0] = False
        assert pipe.state is state
        new, _ = pipe.step(state, batch, donate=False)
        chex.assert_trees_all_equal(host(new), wanted)


def test_an_update_that_fails_in_part_says_so_and_what_to_do(monkeypatch):
    pipe = pipeline()
    state = pipe.init(PARAMS, X)
    saved = host(state)
    plan, lowered = pipe.engine.plan("update", X, None)  # no way is known to fill a device just then
    last = max(k for k, line in enumerate(plan.instructions) if line.label.startswith("update stage"))

    def full(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no room")

    lines = [line._replace(call=full) if k == last else line for k, line in enumerate(plan.instructions)]
    failing = dataclasses.replace(plan, instructions=tuple(lines)), lowered
    monkeypatch.setattr(pipe.engine, "plan", lambda *_, **__: failing)
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        pipe.step(state, X)
    assert "part of the state is consumed" in "".join(caught.value.__notes__)
    with pytest.raises(StateError, match="by an update that failed in part"):
        _ = pipe.state
    restored = jaxpp.State(saved.params, saved.opt_state, step=saved.step)
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        pipe.step(restored, X)
    assert "consumed" not in "".join(caught.value.__notes__), "of a state that is elsewhere only copies are"
    assert pipe.state is restored
    monkeypatch.undo()
    pipe.step(restored, X)


CALLING = """
import jax
jax.config.update("jax_num_cpu_devices", 2)
import jax.numpy as jnp, jaxpp, optax, time

def loss_fn(params, x):
    for _ in range(6):
        x = jnp.tanh(x @ params["a"])
    jax.debug.callback(lambda _: time.sleep(0.01), x.sum())
    return jnp.mean((jnp.tanh(x @ params["b"]) @ params["c"]) ** 2)

params, batch = {"a": jnp.eye(256), "b": jnp.eye(256), "c": jnp.ones((256, 2))}, jnp.ones((2048, 256))
pipe = jaxpp.Pipeline(loss_fn, optax.sgd(0.1), num_stages=2, num_microbatches=2)
state = pipe.init(params, batch)
pipe.profile(state, batch, num_steps=1)

@jax.jit
def shown(x):
    jax.debug.callback(lambda _: time.sleep(0.01), (x @ batch.T).sum())
    return x + 1

c = state.params["c"]
state, _ = pipe.step(state._replace(params={**state.params, "c": shown(c.T).T}), batch)
print("done")
"""


@pytest.mark.long
def test_a_profile_of_a_loss_with_host_callbacks_and_a_state_made_by_one_do_not_hang():
    # The address of an array was asked for before it was there, with Python's lock held, which its callback waited for.
    run = subprocess.run([sys.executable, "-c", CALLING], cwd=ROOT, capture_output=True, text=True, check=False, timeout=240)
    assert run.stdout.strip() == "done", run.stderr
