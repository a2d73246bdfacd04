"""Ctrl-C at hundreds of random moments: training goes on from ``pipe.state``, and every step that changed it is counted once.

Batches and keys depend on the number of the step, and Adam counts the steps, so a step that is lost or taken twice shows.
"""

import contextlib
import dataclasses
import os
import signal
import threading
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.dynamic_scale import DynamicScale

import jaxpp
from jaxpp.errors import StateError
from jaxpp.verify import oracle

# Python cannot raise what comes while it runs a finalizer; it prints that and goes on.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
PARAMS = {"a": jnp.full((4, 6), 0.1), "b": jnp.eye(6), "c": jnp.eye(6), "d": jnp.full((6, 2), 0.3)}
LAYERS = {"w": jnp.stack([jnp.eye(4) * (0.5 + 0.1 * k) for k in range(5)])}
NUM_STEPS = 20
BATCHES = [np.random.default_rng(k).normal(size=(8, 4)).astype("f") for k in range(NUM_STEPS)]
KEYS = [jax.random.key(k) for k in range(NUM_STEPS)]


def optimizer():
    return optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2))


def loss_fn(params, x, key):
    h = jnp.tanh(x @ params["a"])
    h = jnp.tanh(h * jax.random.bernoulli(key, 0.8, h.shape) @ params["b"])
    return jnp.mean((jnp.tanh(h @ params["c"]) @ params["d"]) ** 2)


def of_layers(params, x, key):
    x = x * jax.random.bernoulli(key, 0.8, x.shape)
    return jnp.mean(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["w"])[0] ** 2)


def of_set(params, own, x, key):
    return loss_fn({**params, **own}, x, key)


def with_mean(params, state, x, key):
    h = jnp.tanh(x @ params["a"])
    mean = 0.9 * state["mean"] + 0.1 * h.mean(0)
    return loss_fn({**params, "b": params["b"] - mean}, x, key), ({"mean": mean}, {})


@dataclasses.dataclass(frozen=True)
class Run:
    """A kind of run; ``tasks`` are used in turn."""

    loss_fn: Any = loss_fn
    params: Any = dataclasses.field(default_factory=lambda: PARAMS)
    tasks: tuple[Any, ...] = (None,)
    donate: bool = True
    options: Any = dataclasses.field(default_factory=dict)

    def pipeline(self):
        """A pipeline, not yet initialised, and its bank."""
        sets = {name: {"d": PARAMS["d"]} for name in ("cat", "dog", "cow")}
        bank = None if self.tasks == (None,) else jaxpp.Bank(sets, optax.adam(1e-2))
        options = {"num_stages": 2, "num_microbatches": 2, **self.options}
        return jaxpp.Pipeline(self.loss_fn, optimizer(), bank=bank, **options), bank

    def step(self, pipe, state, number, batches=BATCHES):
        """The step of this number."""
        task = self.tasks[number % len(self.tasks)]
        return pipe.step(state, batches[number], KEYS[number], task=task, donate=self.donate)[0]


SHARED = {name: PARAMS[name] for name in "abc"}
RUNS = {
    "1f1b": Run(),
    "unequal slices of a loop": Run(of_layers, LAYERS),
    "a bank": Run(of_set, SHARED, ("cat", "dog")),
    "a bank, replicas, donate=False": Run(
        of_set, SHARED, (["cat", "dog"], ["dog", "cat"], ["dog", "dog"]), donate=False, options={"data_parallel": 2}
    ),
    "zb-v, model state, loss scale": Run(
        with_mean,
        (PARAMS, {"mean": jnp.zeros(6)}),
        options={"num_stages": 4, "schedule": "zb-v", "has_state": True, "loss_scale": DynamicScale()},
    ),
    "interleaved, replicas, donate=False": Run(
        donate=False, options={"num_stages": 4, "schedule": "interleaved", "data_parallel": 2}
    ),
}


@pytest.fixture
def ctrl_c():
    """A function that has SIGINT sent after some milliseconds of work, in the held part of a step too; None: no more."""
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("signals are for the main thread")

    def after(milliseconds):
        signal.setitimer(signal.ITIMER_PROF, 0 if milliseconds is None else milliseconds / 1000)

    old = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = signal.signal(signal.SIGPROF, lambda *_: os.kill(os.getpid(), signal.SIGINT))
    yield after
    after(None)
    signal.signal(signal.SIGPROF, timer)
    signal.signal(signal.SIGINT, old)


def everything(pipe, bank):
    """What the steps have made, on the host."""
    sets = {} if bank is None else {task: (bank.params(task), bank.opt_state(task)) for task in bank.tasks}
    return jax.tree.map(np.array, (tuple(pipe.state), sets))


def plain(run, batches):
    """The parameters after all steps, in plain JAX."""
    params, opt_state = run.params, optimizer().init(run.params)
    gradients = jax.jit(lambda params, batch, key: oracle(run.loss_fn, params, batch, key, 2)[2])
    for batch, key in zip(batches, KEYS, strict=False):
        updates, opt_state = optimizer().update(gradients(params, batch, key), opt_state, params)
        params = optax.apply_updates(params, updates)
    return params


def train(run, pipe, batches=BATCHES):
    """The loop that goes on wherever it was interrupted."""
    state = pipe.state
    assert state.step == optax.tree.get(state.opt_state, "count")
    while state.step < len(batches):
        state = run.step(pipe, state, state.step, batches)


@contextlib.contextmanager
def quiet_failure(ctrl_c):
    """What fails is reported in peace: no interrupt comes afterwards."""
    try:
        yield
    except BaseException:
        ctrl_c(None)
        raise


def interrupted(run, ctrl_c, num_interrupts, seed=0):
    """Run all steps again and again under interrupts; every run must end with the bits of one without."""
    pipe, bank = run.pipeline()
    pipe.init(run.params, BATCHES[0])
    train(run, pipe)
    wanted, rng, kept = everything(pipe, bank), np.random.default_rng(seed), []
    if bank is None and not run.options.get("has_state") and not run.options.get("data_parallel"):
        chex.assert_trees_all_close(pipe.state.params, jax.device_get(plain(run, BATCHES)), rtol=1e-5, atol=1e-6)
    hits = 0
    while hits < num_interrupts:
        if bank is not None:
            pipe, bank = run.pipeline()
        pipe.init(run.params, BATCHES[0])
        while True:
            try:
                with quiet_failure(ctrl_c):
                    ctrl_c(rng.uniform(0.1, 12))
                    train(run, pipe)
                    ctrl_c(None)
                break
            except KeyboardInterrupt as error:
                hits += 1
                kept.append(error)  # as a notebook does
                del kept[:-3]
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        chex.assert_trees_all_equal(everything(pipe, bank), wanted)
    if bank is not None:
        np.testing.assert_array_equal(bank.params("cow")["d"], PARAMS["d"])


@pytest.mark.parametrize("name", RUNS)
def test_after_ctrl_c_at_random_moments_of_steps_every_step_counts_once(name, ctrl_c):
    interrupted(RUNS[name], ctrl_c, 48)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 11))
@pytest.mark.parametrize("name", RUNS)
def test_after_a_thousand_times_ctrl_c_every_step_counts_once(name, seed, ctrl_c):
    interrupted(RUNS[name], ctrl_c, 1000, seed)


def interrupted_while_compiling(run, ctrl_c, num_interrupts, seed=0):
    """The same with shapes that are new, everything compiled anew each time, and interrupts during ``init`` and ``evaluate``."""
    batches, rng, hits = [batch[: 8 - 2 * (k % 2)] for k, batch in enumerate(BATCHES[:4])], np.random.default_rng(seed), {}
    pipe, bank = run.pipeline()
    pipe.init(run.params, batches[0])
    train(run, pipe, batches)
    wanted = everything(pipe, bank)
    loss = pipe.evaluate(pipe.state, BATCHES[0][:5], KEYS[0], task=run.tasks[0]).loss
    while sum(hits.values()) < num_interrupts or not {"init", "step"} <= set(hits):
        jax.clear_caches()
        (pipe, bank), during, again = run.pipeline(), "init", None
        while again is None:
            try:
                with quiet_failure(ctrl_c):
                    ctrl_c(np.exp(rng.uniform(np.log(2), np.log(700))))
                    if during == "init":
                        pipe.init(run.params, batches[0])
                        during = "step"
                    train(run, pipe, batches)
                    during = "evaluate"
                    again = pipe.evaluate(pipe.state, BATCHES[0][:5], KEYS[0], task=run.tasks[0]).loss
                    ctrl_c(None)
            except KeyboardInterrupt:
                hits[during] = hits.get(during, 0) + 1
                try:
                    during = "step" if pipe.state is not None else during
                except StateError:
                    continue  # init has made no state yet
        chex.assert_trees_all_equal(everything(pipe, bank), wanted)
        np.testing.assert_array_equal(again, loss)


def test_after_ctrl_c_while_anything_is_compiled_every_step_counts_once(ctrl_c):
    interrupted_while_compiling(RUNS["a bank"], ctrl_c, 12)


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_after_hundreds_of_times_ctrl_c_while_anything_is_compiled_every_step_counts_once(name, ctrl_c):
    interrupted_while_compiling(RUNS[name], ctrl_c, 300, seed=1)
