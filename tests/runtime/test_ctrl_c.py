"""Ctrl-C: what runs, where it hits, and what must hold afterwards.

The promises: the newest state is in ``pipe.state``, whole, and every step that changed it is counted once; what is computed later,
by jaxpp or by anybody else, is right; nothing hangs, and nothing of an interrupted step is kept alive. ``CASES`` is the table.
"""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import gc
import inspect
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.dynamic_scale import DynamicScale

import jaxpp
from jaxpp.engine import state as states
from jaxpp.errors import ArgumentError, StateError
from jaxpp.errors.tracebacks import entry
from jaxpp.observe.profile import record
from jaxpp.runtime import compile as compiling
from jaxpp.runtime import interrupts
from jaxpp.runtime.interrupts import Hold
from jaxpp.verify import oracle
from tests.docs.test_notebook import Notebook
from tests.models import PARAMS, X, loss_fn, pipeline

ROOT = pathlib.Path(__file__).parents[2]
EAGER = jax.extend.core.find_top_trace(())
"""JAX's trace where nothing is traced."""

# Python cannot raise what comes while it runs a finalizer; it prints that and goes on.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
CLIPPED = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2))


class AtBytecode:
    """Sends a real SIGINT before the n-th bytecode that runs inside the ``with`` block; without a number it only counts.

    Args:
        number: from 1.
        where: whether the bytecodes of some code count; those of all by default.
    """

    def __init__(self, number: int = -1, where: Callable[[Any], bool] | None = None):
        self.number, self.where, self.seen, self._old = number, where, 0, None

    def __enter__(self):
        self._old = sys.gettrace()
        inspect.currentframe().f_trace_opcodes = True  # Python 3.12 looks here whether there will be events for bytecodes
        sys.settrace(self)
        return self

    def __exit__(self, *_):
        sys.settrace(self._old)

    def __call__(self, frame, event, _):
        if self.where is not None and not self.where(frame.f_code):
            return self
        frame.f_trace_opcodes = True
        if event == "opcode" and frame.f_code is not AtBytecode.__exit__.__code__:
            self.seen += 1
            if self.seen == self.number:
                signal.raise_signal(signal.SIGINT)
        return self


def in_contexts_of_jax(code):
    """Where JAX enters or leaves another trace."""
    return (
        code.co_name in ("__enter__", "__exit__")
        and "CurrentTrace" in code.co_qualname
        and code.co_filename.startswith(os.path.dirname(jax.__file__))
    )


def in_pools(code):
    """Python's pools and locks."""
    return code.co_filename in (concurrent.futures.thread.__file__, concurrent.futures._base.__file__, threading.__file__)


def host(tree):
    return jax.tree.map(np.array, tree)


def count_of(state):
    """The number of steps, which the state and the optimizer count each by themselves."""
    assert state.step == optax.tree.get(state.opt_state, "count")
    return state.step


class Steps:
    """Steps of a pipeline: the state is the old one or the new one, whole; then the next step is as it would have been."""

    last = 3

    def __init__(self):
        self.found, self.states = set(), []
        self.begin()
        for _ in range(self.last):
            self.states.append(self.seen())
            self.work()
        self.states.append(self.seen())
        self.begin()

    def begin(self):
        self.pipe = pipeline(optimizer=CLIPPED)
        self.pipe.init(PARAMS, X)

    def seen(self):
        """What steps change."""
        return host(self.pipe.state)

    def prepare(self):
        if count_of(self.pipe.state) > 1:
            self.again()
        self.before = count_of(self.pipe.state)

    def again(self):
        self.pipe.init(PARAMS, X)

    def work(self):
        self.pipe.step(self.pipe.state, X)

    def holds(self):
        after = count_of(self.pipe.state)
        self.found.add(after - self.before)
        chex.assert_trees_all_equal(self.seen(), self.states[after])

    def end(self):
        assert self.found == {0, 1}


class StepsOfABank(Steps):
    """With a bank, theta and the set of the task change together, and no other set."""

    def begin(self):
        self.bank = jaxpp.Bank({name: {"c": PARAMS["c"]} for name in ("cat", "dog")}, optax.adam(1e-2))
        self.pipe = pipeline(lambda params, own, x: loss_fn({**params, **own}, x), CLIPPED, bank=self.bank)
        self.pipe.init({name: PARAMS[name] for name in "ab"}, X)

    def again(self):
        self.begin()

    def seen(self):
        return host(self.pipe.state), self.bank.params("cat")

    def work(self):
        self.pipe.step(self.pipe.state, X, task="cat")

    def end(self):
        super().end()
        np.testing.assert_array_equal(self.bank.params("dog")["c"], PARAMS["c"])


class Traced:
    """What is traced anew each time: JAX's trace is given back. (It went on with a program of ours, for the whole process.)"""

    def __init__(self, work):
        self.work, self.prepare = work, jax.clear_caches
        for _ in range(2):  # some of it is done once a process
            self.prepare()
            self.work()

    def holds(self):
        left = jax.extend.core.find_top_trace(())
        if left is not EAGER:
            jax.extend.core.set_current_trace(EAGER).__enter__()  # for the tests after this one
        assert left is EAGER

    def end(self):
        np.testing.assert_array_equal(np.asarray(jnp.ones(3) + 1), 2 * np.ones(3))


class StepsFromHost(Steps):
    """Where parameters wait in host memory, a step lets go of the old ones stage by stage, and Ctrl-C waits meanwhile."""

    def begin(self):
        order = jaxpp.schedule.make("looped-bfs", num_ranks=1, num_microbatches=2, stages_per_rank=2)
        self.pipe = pipeline(schedule=order, host="params", devices=jax.devices()[:1])
        self.pipe.init(PARAMS, X)


def init_and_step():
    pipe = pipeline()
    return Traced(lambda: pipe.step(pipe.init(PARAMS, X), X))


def stream():
    pipe = pipeline()
    state = pipe.init(PARAMS, X)
    return Traced(lambda: list(pipe.stream(state, [X, X[:5]], lambda params, x: jnp.tanh(x @ params["a"]) @ params["b"])))


def generation():
    pipe = pipeline()
    state = pipe.init(PARAMS, X)

    def next_token(params, carry, tokens):
        carry = carry + jnp.cumsum(tokens, 1)[:, -1:] * 0
        return carry, jax.nn.one_hot((tokens * 3 + 1) % 6, 6) @ params["b"]

    return Traced(lambda: pipe.generate(state, next_token, jnp.zeros((1, 1), jnp.int32), [[1, 2], [3]], 3).collect())


class Compiling:
    """The threads that compile end. (Between taking a lock and entering the block that gives it back, they waited for ever.)"""

    def __init__(self):
        pipe = pipeline()
        pipe.init(PARAMS, X)
        self.jobs = [line.placed for line in pipe.engine.lower("update", X, None).bound.lines if line.placed is not None][:3]
        self.prepare = jax.clear_caches
        self.before = set(threading.enumerate())

    def work(self):
        compiling.Programs().compile(self.jobs)

    def holds(self):
        threads = [t for t in set(threading.enumerate()) - self.before if t.name.startswith("ThreadPoolExecutor")]
        for thread in threads:
            thread.join(timeout=20)
        assert not any(thread.is_alive() for thread in threads)

    def end(self):
        self.work()


class Profiles:
    """A trace of JAX's profiler is ended, whatever broke it off: the next profile has one of its own. (It was refused.)"""

    def __init__(self):
        self.folder = tempfile.mkdtemp()

    def prepare(self):
        with contextlib.suppress(RuntimeError):
            jax.profiler.stop_trace()
            pytest.fail("a trace that nobody ends")

    def work(self):
        with record._session(self.folder):
            pass

    holds = end = prepare


def around_the_profiler(code):
    """Where a trace begins and ends."""
    return code.co_filename == record.__file__ or (code.co_filename == inspect.getfile(jax.profiler.start_trace))


@dataclasses.dataclass(frozen=True)
class Case:
    """What runs, where Ctrl-C hits, at how many places, and how many of these must have interrupted it."""

    runs: Callable[[], Any]
    where: Callable[[Any], bool] | None
    places: int
    least: int


CASES = {
    "a step, anywhere": Case(Steps, None, 97, 60),
    "a step from host memory, anywhere": Case(StepsFromHost, None, 48, 30),
    "a step of a bank, anywhere": Case(StepsOfABank, None, 24, 12),
    "init and a step, in JAX's contexts": Case(init_and_step, in_contexts_of_jax, 40, 20),
    "a stream, in JAX's contexts": Case(stream, in_contexts_of_jax, 6, 3),
    "a generation, in JAX's contexts": Case(generation, in_contexts_of_jax, 6, 3),
    "compiling, in Python's pools": Case(Compiling, in_pools, 60, 20),
    "a profile, where its trace begins and ends": Case(Profiles, around_the_profiler, 30, 15),
}
LONG = (
    "compiling, in Python's pools",
    "a step from host memory",
    "a step of a bank",
    "init and a step",
    "a stream",
    "a generation",
)


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.long if name.startswith(LONG) else ()) for name in CASES])
def test_after_ctrl_c(name, ctrl_c):
    case = CASES[name]
    run, hits = case.runs(), 0
    run.prepare()
    with AtBytecode(where=case.where) as counter:
        run.work()
    for number in range(1, counter.seen, max(1, counter.seen // case.places)):
        run.prepare()
        try:
            with AtBytecode(number, case.where):
                run.work()
        except KeyboardInterrupt:
            hits += 1
            run.holds()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert hits > case.least
    run.end()


@pytest.mark.long
def test_an_interrupted_step_holds_no_activations(ctrl_c):
    # A notebook keeps the last traceback, and that kept the slots of the step.
    pipe, batch = pipeline(), jnp.ones((10, 4))
    state = pipe.init(PARAMS, batch)
    for _ in range(4):
        state, _ = pipe.step(state, batch)
    with AtBytecode() as counter:
        pipe.step(state, batch)
    kept = []
    for number in range(counter.seen // 10, counter.seen, counter.seen // 10):
        try:
            with AtBytecode(number):
                pipe.step(pipe.state, batch)
        except KeyboardInterrupt as error:
            kept.append(error)
            gc.collect()
            assert sum(array.shape == (5, 6) for array in jax.live_arrays()) <= 2 * len(kept)  # what was just read or made
    assert len(kept) > 5


def test_ctrl_c_while_a_step_brings_a_state_from_elsewhere_leaves_that_state_not_the_first(monkeypatch):
    # pipe.state was what init had made, so whoever went on with it after a restored state had lost the training before.
    pipe = pipeline()
    restored = host(pipe.step(pipe.init(PARAMS, X), X)[0])
    pipe.init(PARAMS, X)

    def pressed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(states, "to_homes", pressed)
        with pytest.raises(KeyboardInterrupt):
            pipe.step(restored, X)
    assert pipe.state is restored
    pipe.step(pipe.state, X)


def test_ctrl_c_during_init_does_not_wait_for_what_is_not_compiled_yet(ctrl_c, monkeypatch):
    # All programs were compiled before the interrupt was seen: minutes for a large model.
    begun, may_end, ended, compile_lowered = threading.Semaphore(0), threading.Event(), [], compiling.compile_lowered

    def slow(*given, **options):
        begun.release()
        ended.append(may_end.wait(20))
        return compile_lowered(*given, **options)

    def press():
        assert begun.acquire(timeout=60)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    monkeypatch.setattr(compiling, "compile_lowered", slow)
    monkeypatch.setattr(compiling.os, "cpu_count", lambda: 1)
    jax.clear_caches()
    pipe, thread = pipeline(stages=3), threading.Thread(target=press)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        pipe.init(PARAMS, X)
    assert not ended and not begun.acquire(blocking=False), "the first program still waits, and no other was begun"
    may_end.set()
    thread.join()
    monkeypatch.undo()
    state = pipe.init(PARAMS, X)
    pipe.step(state, X)


def test_ctrl_c_while_garbage_is_collected_is_not_lost():
    # Python ignores what is raised in a callback of its garbage collector, and JAX has one: one press in ten was lost during init.
    pressed = []

    def press(phase, _):
        if not pressed:
            pressed.append(phase)
            signal.raise_signal(signal.SIGINT)

    def collecting(params, x):
        gc.callbacks.append(press)
        try:
            gc.collect()
        finally:
            gc.callbacks.remove(press)
        time.sleep(1)  # less, as it comes again
        return loss_fn(params, x)

    hook = sys.unraisablehook
    with pytest.raises(KeyboardInterrupt):
        pipeline(collecting).init(PARAMS, X)
    assert pressed == ["start"] and sys.unraisablehook is hook
    state = pipeline().init(PARAMS, X)
    assert state.step == 0


def test_what_else_is_ignored_in_a_finalizer_is_told_as_before(monkeypatch):
    told = []
    monkeypatch.setattr(sys, "unraisablehook", lambda ignored: told.append(ignored.exc_type))

    class Broken:
        def __del__(self):
            raise ZeroDivisionError

    with interrupts.never_lost():
        Broken()
        gc.collect()
    assert told == [ZeroDivisionError]


@pytest.mark.long
def test_an_entry_of_a_cache_of_jax_that_ctrl_c_left_open_is_forgotten():
    # `RecursionError: Recursively calling <weakref to 'Jaxpr'>`, once in about a thousand interrupts while something is compiled.
    open_entries, cleared = [True], jax.jit(lambda x: x + 1)

    def loss(params, x):
        if open_entries:
            open_entries.clear()
            raise RecursionError("Recursively calling <weakref at 0x7f40895a4540; to 'Jaxpr' at 0x7f405a08efe0>")
        return loss_fn(params, x)

    cleared(1.0)
    pipe = pipeline(loss)
    state = pipe.init(PARAMS, X)
    assert not cleared._cache_size()
    open_entries.append(True)
    state, _ = pipe.step(state, X[:6])
    open_entries.append(True)
    pipe.evaluate(state, X[:5])

    def endless(params, x):
        return endless(params, x)

    with pytest.raises(RecursionError, match="maximum recursion depth"):
        pipeline(endless).init(PARAMS, X)


@pytest.mark.parametrize(
    "said", ["Cache keys should be comparable using __eq__. (...)", "Equality of global cache key led to (...)"]
)
def test_what_jax_makes_of_ctrl_c_within_a_cache_is_ctrl_c_again(said):
    # JAX 0.12: `ValueError: Cache keys should be comparable using __eq__`, which a stream took for the failure of a batch.
    pipe, pressed = pipeline(), [True]
    state = pipe.init(PARAMS, X)

    def outputs(params, x):
        if pressed:
            raise ValueError(f"{said}\nTraceback (...)\nKeyboardInterrupt: ")
        return jnp.tanh(x @ params["a"])

    with pytest.raises(KeyboardInterrupt):
        pipe.apply(state, X, outputs)
    batches = pipe.stream(state, [X, X], outputs)
    with pytest.raises(KeyboardInterrupt):
        next(batches)
    pressed.clear()
    assert len(list(batches)) == 2, "no batch is lost"


def test_within_a_trace_of_the_user_s_that_trace_goes_on(ctrl_c):
    # A step within jax.jit is refused; that must not end the trace of the caller.
    pipe = pipeline()
    state = pipe.init(PARAMS, X)

    @jax.jit
    def caller(x):
        with pytest.raises(ArgumentError):
            pipe.step(state, x)
        return x + 1

    np.testing.assert_array_equal(caller(X), X + 1)


# At random moments: batches and keys depend on the number of the step, and Adam counts the steps, so a step that is lost or taken
# twice shows.
WIDE = {"a": jnp.full((4, 6), 0.1), "b": jnp.eye(6), "c": jnp.eye(6), "d": jnp.full((6, 2), 0.3)}
LAYERS = {"w": jnp.stack([jnp.eye(4) * (0.5 + 0.1 * k) for k in range(5)])}
NUM_STEPS = 20
WITH_MEANS = pytest.mark.filterwarnings("ignore::jaxpp.MicrobatchWarning")  # a model state has means over a microbatch
BATCHES = [np.random.default_rng(k).normal(size=(8, 4)).astype("f") for k in range(NUM_STEPS)]
KEYS = [jax.random.key(k) for k in range(NUM_STEPS)]


def clipped():
    return optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2))


def dropped(params, x, key):
    h = jnp.tanh(x @ params["a"])
    h = jnp.tanh(h * jax.random.bernoulli(key, 0.8, h.shape) @ params["b"])
    return jnp.mean((jnp.tanh(h @ params["c"]) @ params["d"]) ** 2)


def of_layers(params, x, key):
    x = x * jax.random.bernoulli(key, 0.8, x.shape)
    return jnp.mean(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["w"])[0] ** 2)


def of_set(params, own, x, key):
    return dropped({**params, **own}, x, key)


def with_mean(params, state, x, key):
    h = jnp.tanh(x @ params["a"])
    mean = 0.9 * state["mean"] + 0.1 * h.mean(0)
    return dropped({**params, "b": params["b"] - mean}, x, key), ({"mean": mean}, {})


@dataclasses.dataclass(frozen=True)
class Run:
    """A kind of run; ``tasks`` are used in turn."""

    loss_fn: Any = dropped
    params: Any = dataclasses.field(default_factory=lambda: WIDE)
    tasks: tuple[Any, ...] = (None,)
    donate: bool = True
    options: Any = dataclasses.field(default_factory=dict)

    def pipeline(self):
        """A pipeline, not yet initialised, and its bank."""
        sets = {name: {"d": WIDE["d"]} for name in ("cat", "dog", "cow")}
        bank = None if self.tasks == (None,) else jaxpp.Bank(sets, optax.adam(1e-2))
        options = {"num_stages": 2, "num_microbatches": 2, **self.options}
        return jaxpp.Pipeline(self.loss_fn, clipped(), bank=bank, **options), bank

    def step(self, pipe, state, number, batches=BATCHES):
        """The step of this number."""
        task = self.tasks[number % len(self.tasks)]
        return pipe.step(state, batches[number], KEYS[number], task=task, donate=self.donate)[0]


SHARED = {name: WIDE[name] for name in "abc"}
RUNS = {
    "1f1b": Run(),
    "unequal slices of a loop": Run(of_layers, LAYERS),
    "parameters in host memory": Run(options={"host": "params"}),
    "a bank": Run(of_set, SHARED, ("cat", "dog")),
    "a bank, replicas, donate=False": Run(
        of_set, SHARED, (["cat", "dog"], ["dog", "cat"], ["dog", "dog"]), donate=False, options={"data_parallel": 2}
    ),
    "zb-v, model state, loss scale": Run(
        with_mean,
        (WIDE, {"mean": jnp.zeros(6)}),
        options={"num_stages": 4, "schedule": "zb-v", "has_state": True, "loss_scale": DynamicScale()},
    ),
    "interleaved, replicas, donate=False": Run(
        donate=False, options={"num_stages": 4, "schedule": "interleaved", "data_parallel": 2, "devices": jax.devices()[:4]}
    ),
}


def everything(pipe, bank):
    """What the steps have made, on the host."""
    sets = {} if bank is None else {task: (bank.params(task), bank.opt_state(task)) for task in bank.tasks}
    return jax.tree.map(np.array, (jax.tree.leaves(pipe.state), sets))


def plain(run, batches):
    """The parameters after all steps, in plain JAX."""
    params, opt_state = run.params, clipped().init(run.params)
    gradients = jax.jit(lambda params, batch, key: oracle(run.loss_fn, params, batch, key, 2)[2])
    for batch, key in zip(batches, KEYS, strict=False):
        updates, opt_state = clipped().update(gradients(params, batch, key), opt_state, params)
        params = optax.apply_updates(params, updates)
    return params


def train(run, pipe, batches=BATCHES):
    """The loop that goes on wherever it was interrupted."""
    state = pipe.state
    assert state.step == optax.tree.get(state.opt_state, "count")
    while state.step < len(batches):
        state = run.step(pipe, state, state.step, batches)


@contextlib.contextmanager
def quiet_failure(ctrl_c_after):
    """What fails is reported in peace: no interrupt comes afterwards."""
    try:
        yield
    except BaseException:
        ctrl_c_after(None)
        raise


def interrupted_at_random(run, ctrl_c_after, num_interrupts, seed=0):
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
                with quiet_failure(ctrl_c_after):
                    ctrl_c_after(rng.uniform(0.1, 12))
                    train(run, pipe)
                    ctrl_c_after(None)
                break
            except KeyboardInterrupt as error:
                hits += 1
                kept.append(error)  # as a notebook does
                del kept[:-3]
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        chex.assert_trees_all_equal(everything(pipe, bank), wanted)
    if bank is not None:
        np.testing.assert_array_equal(bank.params("cow")["d"], WIDE["d"])


@WITH_MEANS
@pytest.mark.parametrize("name", ["1f1b", *(pytest.param(name, marks=pytest.mark.long) for name in RUNS if name != "1f1b")])
def test_after_ctrl_c_at_random_moments_of_steps_every_step_counts_once(name, ctrl_c_after):
    interrupted_at_random(RUNS[name], ctrl_c_after, 48)


@WITH_MEANS
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 11))
@pytest.mark.parametrize("name", RUNS)
def test_after_a_thousand_times_ctrl_c_every_step_counts_once(name, seed, ctrl_c_after):
    interrupted_at_random(RUNS[name], ctrl_c_after, 1000, seed)


def interrupted_while_compiling(run, ctrl_c_after, num_interrupts, seed=0):
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
                with quiet_failure(ctrl_c_after):
                    ctrl_c_after(np.exp(rng.uniform(np.log(2), np.log(700))))
                    if during == "init":
                        pipe.init(run.params, batches[0])
                        during = "step"
                    train(run, pipe, batches)
                    during = "evaluate"
                    again = pipe.evaluate(pipe.state, BATCHES[0][:5], KEYS[0], task=run.tasks[0]).loss
                    ctrl_c_after(None)
            except KeyboardInterrupt:
                hits[during] = hits.get(during, 0) + 1
                try:
                    during = "step" if pipe.state is not None else during
                except StateError:
                    continue  # init has made no state yet
        chex.assert_trees_all_equal(everything(pipe, bank), wanted)
        np.testing.assert_array_equal(again, loss)


@pytest.mark.long
def test_after_ctrl_c_while_anything_is_compiled_every_step_counts_once(ctrl_c_after):
    interrupted_while_compiling(RUNS["a bank"], ctrl_c_after, 12)


@WITH_MEANS
@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_after_hundreds_of_times_ctrl_c_while_anything_is_compiled_every_step_counts_once(name, ctrl_c_after):
    interrupted_while_compiling(RUNS[name], ctrl_c_after, 300, seed=1)


# Signals that wait: `Hold` by itself.
HELD = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2)


@pytest.fixture
def calls():
    """What the handlers of the held signals were called with; those of SIGINT raise."""
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("signals are for the main thread")
    seen = []

    def note(number, frame):
        assert frame is not None
        seen.append(number)

    old = {number: signal.signal(number, note) for number in HELD[1:]}
    old[signal.SIGINT] = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield seen
    for number, handler in old.items():
        signal.signal(number, handler)


def handlers():
    return [signal.getsignal(number) for number in HELD]


def held(*numbers, body=lambda: None):
    with Hold() as hold:
        hold.begin()
        for number in numbers:
            signal.raise_signal(number)
        body()


def notes(error):
    return "".join(getattr(error, "__notes__", ()))


def test_signals_wait_and_each_handler_is_called_once(calls):
    before, seen = handlers(), []
    with pytest.raises(KeyboardInterrupt) as caught:
        held(signal.SIGUSR1, signal.SIGINT, signal.SIGINT, signal.SIGUSR1, signal.SIGTERM, body=lambda: seen.extend(calls))
    assert seen == [] and sorted(calls) == [signal.SIGUSR1, signal.SIGTERM]
    assert handlers() == before
    assert "go on with state = pipe.state" in notes(caught.value)


def test_before_begin_nothing_waits_and_begin_may_be_called_twice(calls):
    before = handlers()
    with pytest.raises(KeyboardInterrupt) as caught, Hold():
        signal.raise_signal(signal.SIGINT)
    assert not notes(caught.value)
    with Hold() as hold:
        assert not hold.begun
        hold.begin()
        hold.begin()
        assert hold.begun
    assert handlers() == before


def test_every_ctrl_c_is_as_good_as_the_first(calls):
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            held(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        held()


def test_what_is_not_handled_by_a_python_function_is_left_alone(calls):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    before = handlers()
    held(signal.SIGTERM, body=lambda: calls.append(handlers()[3]))
    assert handlers() == before and calls == [signal.SIG_DFL]


def test_a_handler_that_replaces_itself_has_its_way(calls):
    # The usual "once: finish; twice: now" of training scripts.
    def first(number, frame):
        calls.append("first")
        signal.signal(number, signal.default_int_handler)

    signal.signal(signal.SIGINT, first)
    held(signal.SIGINT)
    assert calls == ["first"]
    with pytest.raises(KeyboardInterrupt):
        held(signal.SIGINT)


def test_an_error_of_the_block_is_the_context_of_the_interrupt(calls):
    with pytest.raises(KeyboardInterrupt) as caught:
        held(signal.SIGINT, body=lambda: 1 // 0)
    assert isinstance(caught.value.__context__, ZeroDivisionError)
    assert not notes(caught.value), "the step was not completed"


def test_a_hold_in_another_thread_holds_nothing_and_changes_no_handler(calls):
    before, found = handlers(), []

    def work():
        with Hold() as hold:
            hold.begin()
            found.append(handlers())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [before] and handlers() == before


def test_ctrl_c_pressed_again_in_a_hold_within_a_hold_breaks_off_both(calls, monkeypatch):
    # The inner one let it through to the outer, which held it back as if it had come once.
    monkeypatch.setattr(interrupts, "_PATIENCE", 0.0)
    went_on = []

    def inner():
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)
            time.sleep(0.01)
        went_on.append(True)

    with pytest.raises(KeyboardInterrupt) as caught:
        held(body=lambda: held(body=inner))
    assert not went_on and "broke off" in notes(caught.value)


def test_a_hold_in_a_hold_gives_back_to_the_outer(calls):
    def outer():
        with Hold() as hold:
            hold.begin()
            held(signal.SIGINT)
            calls.append("after the inner")

    with pytest.raises(KeyboardInterrupt):
        outer()
    assert calls == ["after the inner"]


def hangs():
    """A part that never ends, as when a device does not answer, while Ctrl-C is pressed each 0.05 s."""
    signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
    time.sleep(60)


@pytest.mark.parametrize("patience", [0.3, 0.02])
def test_ctrl_c_pressed_again_after_a_while_breaks_a_held_part_off(calls, monkeypatch, patience):
    monkeypatch.setattr(interrupts, "_PATIENCE", patience)
    monkeypatch.setattr(interrupts, "_SIGNALS", [signal.SIGINT])
    before = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(KeyboardInterrupt) as caught:
            held(body=hangs)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    assert "so go on from a checkpoint" in notes(caught.value)
    assert "completed" not in notes(caught.value)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_held_part_that_is_broken_off_at_its_very_end_leaves_all_handlers_as_they_were(calls, monkeypatch):
    # The second Ctrl-C came where the block ends, before anything was given back: SIGTERM was held for as long as the process ran.
    def press_at_the_end(frame, *_):
        if frame.f_code is Hold.__exit__.__code__:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(interrupts, "_PATIENCE", 0.0)
    before, tracing = handlers(), sys.gettrace()
    try:
        with pytest.raises(KeyboardInterrupt) as caught:
            held(signal.SIGINT, body=lambda: (time.sleep(0.01), sys.settrace(press_at_the_end)))
    finally:
        sys.settrace(tracing)
    assert "broke off the update" in notes(caught.value)
    assert handlers() == before
    signal.raise_signal(signal.SIGTERM)
    assert calls == [signal.SIGTERM]


def test_a_slip_of_the_finger_and_other_signals_do_not_break_a_held_part_off(calls, monkeypatch):
    with pytest.raises(KeyboardInterrupt) as caught:
        held(signal.SIGINT, signal.SIGINT, body=lambda: signal.raise_signal(signal.SIGINT))
    assert "completed first" in notes(caught.value)
    monkeypatch.setattr(interrupts, "_PATIENCE", 0.0)
    held(signal.SIGTERM, signal.SIGTERM, body=lambda: time.sleep(0.01))
    assert calls == [signal.SIGTERM]


def test_under_asyncio_the_first_ctrl_c_cancels_and_a_second_raises(monkeypatch):
    # There the handler raises at its second call only, so both that came must reach it.
    monkeypatch.setattr(interrupts, "_PATIENCE", 0.02)
    monkeypatch.setattr(interrupts, "_SIGNALS", [signal.SIGINT])
    old, alarm = signal.signal(signal.SIGINT, signal.default_int_handler), signal.getsignal(signal.SIGALRM)
    cancelled = []

    async def main():
        try:
            held(signal.SIGINT)
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    async def hanging():
        held(body=hangs)

    try:
        with pytest.raises(KeyboardInterrupt):
            asyncio.run(main())
        assert cancelled
        with pytest.raises(KeyboardInterrupt) as caught:
            asyncio.run(hanging())
        assert "broke off" in notes(caught.value)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, alarm)
        signal.signal(signal.SIGINT, old)


TWICE = """
import time
from jaxpp.runtime.interrupts import Hold
with Hold() as hold:
    hold.begin()
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.mark.long
def test_a_process_that_hangs_in_a_held_part_ends_at_the_second_ctrl_c():
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    run = subprocess.Popen([sys.executable, "-c", TWICE], cwd=ROOT, text=True, **pipes)
    assert run.stdout.readline() == "held\n"
    run.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        run.wait(timeout=1.2)
    run.send_signal(signal.SIGINT)
    _, errors = run.communicate(timeout=30)
    assert run.returncode == -signal.SIGINT
    assert errors.rstrip().endswith("so go on from a checkpoint"), errors


# A notebook whose cell is interrupted and run again, as people train: nothing is lost, kept alive, or left on the page.
SETUP = """
import jax
jax.config.update("jax_num_cpu_devices", 2)
import gc, jax.numpy as jnp, numpy as np, optax, jaxpp

params = {"a": jnp.full((64, 96), 0.01), "b": jnp.eye(96) / 2, "c": jnp.full((96, 32), 0.1)}
batches = [np.random.default_rng(k).normal(size=(128, 64)).astype("f") for k in range(8)]

def loss_fn(params, x, key):
    h = jnp.tanh(x @ params["a"])
    h = jnp.tanh(h * jax.random.bernoulli(key, 0.8, h.shape) @ params["b"])
    return jnp.mean(jnp.tanh(h @ params["c"]) ** 2)

def large():
    return sorted(leaf.shape for leaf in jax.live_arrays() if leaf.size > 32)

pipe = jaxpp.Pipeline(loss_fn, optax.adam(1e-3), num_stages=2, num_microbatches=4)
first = jax.tree.map(np.asarray, params)
del params
state = pipe.init(first, batches[0])
for number in range(300):
    state, metrics = pipe.step(state, batches[number % 8], jax.random.fold_in(jax.random.key(0), number))
wanted = jax.tree.map(np.asarray, state)
state = pipe.init(first, batches[0])
alone = large()
"""
TRAIN = """
state = pipe.state
while state.step < 300:
    state, metrics = pipe.step(state, batches[state.step % 8], jax.random.fold_in(jax.random.key(0), state.step))
metrics.loss
"""


@pytest.fixture(scope="module")
def notebook():
    made = Notebook()
    try:
        assert not errors(made.run(SETUP))
        made.process = int(printed(made, "import os; print(os.getpid())"))
        yield made
    finally:
        made.close()


def interrupted_cell(notebook, code, seconds):
    """What a cell sends to the page if the kernel is interrupted after some time."""
    timer = threading.Timer(seconds, os.kill, (notebook.process, signal.SIGINT))
    timer.start()
    try:
        return notebook.run(code)
    finally:
        timer.cancel()
        timer.join()


def frames_of_jaxpp(error):
    """The lines of jaxpp in a traceback on the page."""
    return re.findall(r"/jaxpp/((?:\w+/)*\w+\.py:\d+)", re.sub(r"\x1b\[[\d;]*m", "", "\n".join(error["traceback"])))


# Ctrl-C at the first bytecode of a function comes before any line of it can catch it (Python looks for signals there).
FIRST_BYTECODE = f"errors/tracebacks.py:{entry(print).__code__.co_firstlineno}"


def printed(notebook, code):
    """What a cell prints."""
    found = notebook.run(code)
    assert {kind for kind, _ in found} == {"stream"}, found
    return "".join(content["text"] for _, content in found).strip()  # what is printed may come in parts


def errors(messages):
    return [content for kind, content in messages if kind == "error"]


FURTHER = """
number = pipe.state.step
state, metrics = pipe.step(pipe.state, batches[number % 8], jax.random.fold_in(jax.random.key(0), number))
print(state.step == number + 1 == int(optax.tree.get(state.opt_state, "count")), large() == alone or large())
"""
LEFT = "print(pipe.state.step < 300)"
CHECK = """
jax.tree.map(np.testing.assert_array_equal, pipe.state, wanted)
state = pipe.init(first, batches[0])
print("the same bits")
"""


@pytest.mark.long
def test_a_cell_that_is_interrupted_and_run_again_goes_on_where_it_stopped(notebook):
    rng, hits, runs = np.random.default_rng(0), 0, 0
    while hits < 12 or not runs:
        found = errors(interrupted_cell(notebook, TRAIN, rng.uniform(0.01, 0.25)))
        for error in found:
            assert error["ename"] == "KeyboardInterrupt"
            assert frames_of_jaxpp(error) in ([], [FIRST_BYTECODE]), "the user's own line says it all"
            # What IPython keeps of the cell keeps nothing on the devices once a further step is done (of those that are left).
            assert printed(notebook, LEFT) == "False" or printed(notebook, FURTHER) == "True True"
        hits += len(found)
        if not found:
            assert printed(notebook, CHECK) == "the same bits"
            runs += 1


@pytest.mark.long
def test_after_a_step_that_raised_no_array_of_it_is_kept(notebook):
    wrong = "pipe.step(pipe.state, batches[0][:2], jax.random.key(0))"
    assert [error["ename"] for error in errors(notebook.run(wrong))] == ["BatchError"]
    assert printed(notebook, FURTHER) == "True True"


@pytest.mark.long
def test_a_bar_of_what_is_interrupted_is_taken_away_and_the_next_is_whole(notebook):
    work = "from jaxpp.runtime.progress import progress\nimport time\n"
    work += "with progress(range(N), mininterval=0) as bar:\n    for _ in bar: time.sleep(0.001)"
    for seconds in (0.05, 0.1, 0.15):
        found = interrupted_cell(notebook, work.replace("N", "10000"), seconds)
        assert len(errors(found)) == 1
        bars = {}
        for kind, content in found:
            if kind.endswith("display_data"):
                bars[content["transient"]["display_id"]] = content["data"]
        assert list(bars.values()) in ([{}], [])
        again = notebook.run(work.replace("N", "20"))
        assert not errors(again) and [content["data"] for kind, content in again if kind.endswith("display_data")][-1] == {}
