"""What the processes of ``test_process_faults.py`` run: pipelines that differ between processes, and steps that are cut short."""

import json
import os
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxpp
from jaxpp.errors import ProcessError
from jaxpp.runtime.processes import channel

PARAMS = {f"w{k}": np.full((8, 8), 0.1 * (k + 1), np.float32) for k in range(3)}
BATCH = {"x": np.ones((16, 8), np.float32), "y": np.zeros((16, 8), np.float32)}


def loss_with(activation):
    def loss_fn(params, batch):
        x = jnp.tanh(jnp.tanh(batch["x"] @ params["w0"]) @ params["w1"])
        return jnp.mean((activation(x @ params["w2"]) - batch["y"]) ** 2)

    return loss_fn


def devices() -> list:
    """The first device of each process."""
    return [next(d for d in jax.devices() if d.process_index == k) for k in range(jax.process_count())]


def make(activation=jnp.tanh, optimizer=None, **options) -> jaxpp.Pipeline:
    given = {"devices": devices(), "num_stages": jax.process_count(), "num_microbatches": 4} | options
    return jaxpp.Pipeline(loss_with(activation), optimizer or optax.adam(1e-2), **given)


def first(size: int) -> dict:
    return {name: value[:size] for name, value in BATCH.items()}


def with_setting(change: Callable, *args) -> None:
    with change(*args):
        make().init(PARAMS, BATCH)


def with_xla_flags(flags: str) -> None:
    before = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{before} {flags}"
    try:
        make().init(PARAMS, BATCH)
    finally:
        os.environ["XLA_FLAGS"] = before


def random_params(key):
    return {name: jax.random.normal(key, value.shape) for name, value in PARAMS.items()}


def other_params(key):
    return {name: jax.random.uniform(key, value.shape) for name, value in PARAMS.items()}


def raising(params, batch):
    if jax.process_index() == 1:
        raise RuntimeError("in the user's loss")
    return loss_with(jnp.tanh)(params, batch)


def differences(pipe: jaxpp.Pipeline, state: jaxpp.State, me: int) -> dict[str, Callable[[], object]]:
    """Calls that are not the same in processes 0 and 1."""
    key = jax.random.key(0)
    return {
        "code": lambda: make((jnp.tanh, jnp.sin)[me]).init(PARAMS, BATCH),
        "batch": lambda: make().init(PARAMS, first((16, 8)[me])),
        "optimizer": lambda: make(optimizer=(optax.adam(1e-2), optax.sgd(1e-2))[me]).init(PARAMS, BATCH),
        "rate": lambda: make(optimizer=optax.adam((1e-2, 1e-3)[me])).init(PARAMS, BATCH),
        "schedule": lambda: make(schedule=("1f1b", "gpipe")[me]).init(PARAMS, BATCH),
        "devices": lambda: make(devices=devices()[:: (1, -1)[me]]).init(PARAMS, BATCH),
        "option": lambda: make(remat=(None, "recompute")[me]).init(PARAMS, BATCH),
        "x64": lambda: with_setting(jax.enable_x64, bool(me)),
        "precision": lambda: with_setting(jax.default_matmul_precision, ("default", "highest")[me]),
        "xla_flags": lambda: with_xla_flags(("", "--xla_cpu_enable_fast_math=true")[me]),
        "key": lambda: make().init(random_params, jax.random.key(me), BATCH),
        "init": lambda: make().init((random_params, other_params)[me], key, BATCH),
        "later batch": lambda: pipe.step(state, first((12, 8)[me])),
        "call": lambda: (pipe.step if me else pipe.evaluate)(state, first(8)),
        "loss that raises": lambda: pipe.evaluate(state, BATCH, loss_fn=raising),
        "drop-in": lambda: jaxpp.value_and_grad(loss_with((jnp.tanh, jnp.sin)[me]), num_stages=2, devices=devices())(PARAMS, BATCH),
    }


def mismatches() -> None:
    """Try all differences in turn, then go on, part ways at a batch of another shape, and wait."""
    me = jax.process_index()
    pipe = make(max_shapes=1)
    state = pipe.init(PARAMS, BATCH)
    for name, call in differences(pipe, state, me).items():
        begun = time.monotonic()
        try:
            call()
            error = "none"
        except (ProcessError, RuntimeError) as caught:
            error = f"{type(caught).__name__}: {caught}"
        print(json.dumps({"name": name, "error": error, "seconds": time.monotonic() - begun}), flush=True)
    for size in (16, 16, (16, 8)[me]):
        if me == 0:  # it forgets the plan for 16, which is no affair of process 1
            pipe.forecast(PARAMS, first(12))
        try:
            state, metrics = pipe.step(state, first(size))
        except ProcessError as error:
            print(json.dumps({"name": "another batch", "error": str(error)}), flush=True)
            time.sleep(60)  # until Ctrl-C; process 0 waits for the devices of this one
        print(json.dumps({"loss": float(metrics.loss)}), flush=True)


def steps(raises: bool = False, pause: float = 0.0) -> None:
    """Step until something happens."""
    pipe = make()
    state = pipe.init(PARAMS, BATCH)
    for number in range(100_000):
        state, metrics = pipe.step(state, BATCH)
        print("step", number, float(metrics.loss), flush=True)
        time.sleep(pause)
        if raises and number == 5 and jax.process_index() == 1:
            raise RuntimeError("in the user's loop")


def broken_off() -> None:
    """Process 1 breaks a step off, catches that, and tries the next one."""
    me = jax.process_index()

    def check(x):
        if me == 1 and float(x) > 1:
            raise RuntimeError("in the user's callback")

    def loss_fn(params, batch):
        jax.debug.callback(check, batch["y"].max())
        return loss_with(jnp.tanh)(params, batch)

    pipe = jaxpp.Pipeline(loss_fn, optax.adam(1e-2), devices=devices(), num_stages=2, num_microbatches=4)
    state = pipe.init(PARAMS, BATCH)
    for y in (0, 2, 0):
        try:
            state, metrics = pipe.step(state, BATCH | {"y": BATCH["y"] + y})
            print("loss", float(metrics.loss), flush=True)
        except (jax.errors.JaxRuntimeError, RuntimeError) as error:
            print("caught", type(error).__name__, flush=True)


def uneven() -> None:
    """Process 1 has one batch less than process 0, which then evaluates."""
    pipe = make()
    state = pipe.init(PARAMS, BATCH)
    if jax.process_index() == 0:
        pipe.evaluate(state, BATCH)


def late() -> None:
    """Process 1 comes late, but comes."""
    time.sleep(7 * jax.process_index())
    make().init(PARAMS, BATCH)
    print("met", flush=True)


def other_order() -> None:
    """Two calls on which all have agreed, made in another order."""
    me, devices = jax.process_index(), jax.devices()
    known = []
    for name in ("pipe.step", "pipe.evaluate"):
        with channel.agreement(name, devices) as agree:
            agree(lambda: {"batch": "x f32[8]"})
        known.append(agree.again)
    for again in known[:: (1, -1)[me]]:
        again()
    with channel.agreement("pipe.step", devices) as agree:
        agree(lambda: {"batch": "x f32[4]"})


def without_store() -> None:
    """Some differences, found without the store that the processes share."""
    channel.shared_store = lambda: None
    me = jax.process_index()
    pipe = make()
    state = pipe.init(PARAMS, BATCH)
    calls = differences(pipe, state, me)
    for name in ("code", "batch", "x64"):
        try:
            calls[name]()
            print(json.dumps({"name": name, "error": "none"}), flush=True)
        except ProcessError as error:
            print(json.dumps({"name": name, "error": f"ProcessError: {error}"}), flush=True)
    state, metrics = pipe.step(state, BATCH)
    print(json.dumps({"loss": float(metrics.loss)}), flush=True)
