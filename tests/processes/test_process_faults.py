"""Processes that differ, fail, are killed or are interrupted: all end, and say why. What they run stands first."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpp
from jaxpp.errors import ProcessError
from jaxpp.runtime.processes import channel
from tests.processes.processes import start

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
    """Try all differences in turn, then go on, part ways at a batch of another shape, and go on until somebody is interrupted."""
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
            print(json.dumps({"loss": float(metrics.loss)}), flush=True)
        except ProcessError as error:
            print(json.dumps({"name": "another batch", "error": str(error)}), flush=True)
    while True:
        state, metrics = pipe.step(state, BATCH)
        print(json.dumps({"loss": float(metrics.loss)}), flush=True)


def steps(raises: bool = False, leaves: int | None = None, reads: bool = True, pause: float = 0.0) -> None:
    """Step until something happens: process 1 raises, or one leaves."""
    pipe = make()
    state = pipe.init(PARAMS, BATCH)
    for number in range(100_000):
        state, metrics = pipe.step(state, BATCH)
        print("step", number, *([float(metrics.loss)] if reads else []), flush=True)
        time.sleep(pause)
        if raises and number == 5 and jax.process_index() == 1:
            raise RuntimeError("in the user's loop")
        if number == 5 and jax.process_index() == leaves:
            sys.exit(0)


def orderly(count: int, pause: float, after: float) -> None:
    """As many steps in all processes, but process 0 takes its time, and has something to do at the end."""
    pipe, me = make(), jax.process_index()
    state = pipe.init(PARAMS, BATCH)
    for _ in range(count):
        time.sleep(pause * (me == 0))
        state, _ = pipe.step(state, BATCH)
    if me == 0:
        jax.block_until_ready(state.params["w0"])
        time.sleep(after)
    print("end", time.time(), flush=True)


def interrupted() -> None:
    """Process 1 is interrupted in a step, and takes that as a reason to end well."""
    pipe = make()
    state = pipe.init(PARAMS, BATCH)
    try:
        for number in range(100_000):
            if number == 5 and jax.process_index() == 1:
                with channel.transfers("pipe.step"):
                    raise KeyboardInterrupt
            state, metrics = pipe.step(state, BATCH)
            print("step", number, float(metrics.loss), flush=True)
    except KeyboardInterrupt:
        print("good night", flush=True)


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


def other_order(store: bool = True) -> None:
    """Calls that all have made before, in another order: of the same plan, and of plans that send otherwise."""
    if not store:
        channel.shared_store = lambda: None
    options = {"num_stages": 2, "devices": devices()}
    losses = loss_with(jnp.tanh), loss_with(jnp.sin), loss_with(jnp.tanh)
    calls = [jaxpp.value_and_grad(loss, num_microbatches=count, **options) for loss, count in zip(losses, (4, 4, 2), strict=True)]
    wanted = [float(call(PARAMS, BATCH)[0]) for call in calls]
    for one, other in ((0, 1), (0, 2)):
        try:
            calls[(one, other)[jax.process_index()]](PARAMS, BATCH)
            print("no error", flush=True)
        except ProcessError as error:
            print("ProcessError:", error, flush=True)
        print("the same", wanted == [float(call(PARAMS, BATCH)[0]) for call in calls], flush=True)


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


CASES = "tests.processes.test_process_faults"
HEARTBEAT = {"heartbeat_timeout_seconds": 10}


def wait_for(process, text: str, seconds: float = 60) -> None:
    """Wait until a process has printed something."""
    limit = time.monotonic() + seconds
    while text not in process.out:
        assert process.code is None, process.errors
        assert time.monotonic() < limit, process.errors
        time.sleep(0.02)


def lines(ended) -> list[dict]:
    return [json.loads(line) for line in ended.out.splitlines() if line.startswith("{")]


EXPECTED = {
    "code": ["pipe.init: all processes run the same pipeline", "loss, line", ": process 0: ", " = tanh", ": process 1: ", " = sin"],
    "batch": [
        "batch, line 1: process 0: x f32[16,8]",
        "batch, line 1: process 1: x f32[8,8]",
        "Fix: pass batches of the same shapes",
    ],
    "optimizer": ["optimizer, line", "Fix: start the same script"],
    "rate": ["optimizer, line", "0.01", "0.001"],
    "schedule": ["schedule, line 1: process 0: 1f1b", "schedule, line 1: process 1: gpipe"],
    "devices": ["devices, line 1: process 0: rank 0: cpu:0", "jax.devices(), which lists those of all processes"],
    "option": ["options, line", "process 0: remat = None", "process 1: remat = "],
    "x64": ["flags, line 1: process 0: jax_enable_x64 = False", "flags, line 1: process 1: jax_enable_x64 = True"],
    "precision": ["flags, line", "jax_default_matmul_precision = 'highest'", "Fix: set the same options of JAX"],
    "xla_flags": ["flags, line", "process 1: XLA_FLAGS --xla_cpu_enable_fast_math=true"],
    "key": ["key: process 0: key<fry>[] [0, 0]", "key: process 1: key<fry>[] [0, 1]", "the same seed"],
    "init": ["init, line"],
    "later batch": ["pipe.step: ", "batch, line 1: process 0: x f32[12,8]", "process 1: x f32[8,8]"],
    "call": ["call: process 0: pipe.evaluate", "call: process 1: pipe.step"],
    "drop-in": ["grad_fn: ", "loss, line"],
}


@pytest.mark.long
def test_a_difference_is_an_error_on_every_process_and_leaves_all_at_work_and_ctrl_c_on_one_ends_all():
    with start(f"{CASES}:mismatches", 2, together=False) as processes:
        wait_for(processes[1], "another batch")
        processes[1].send(signal.SIGINT)
        begun = time.monotonic()
        ended = processes.wait(40)
        assert time.monotonic() - begun < 20
    said = [{line["name"]: line for line in lines(each) if "name" in line} for each in ended]
    for name, fragments in EXPECTED.items():
        errors = [each[name]["error"] for each in said]
        assert all(fragment in errors[0] for fragment in ["ProcessError: ", *fragments]), errors[0]
        assert errors[0].partition("Got")[2] == errors[1].partition("Got")[2]
        assert max(each[name]["seconds"] for each in said) < 10
    # what one raises itself, it raises unchanged; the other hears of it
    assert said[1]["loss that raises"]["error"] == "RuntimeError: in the user's loss"
    assert "process 1 raised RuntimeError: in the user's loss" in said[0]["loss that raises"]["error"]
    # after all these errors the processes are still together
    losses = [[line["loss"] for line in lines(each) if "loss" in line] for each in ended]
    assert len(losses[0]) >= 2
    assert losses[0][:2] == losses[1][:2]
    # then process 1 came to another batch, while process 0 went on with one that both know
    for each in said:
        error = each["another batch"]["error"]
        assert "process 0 is in pipe.step with a batch of x f32[16,8], y f32[16,8] as agreed in exchange" in error
        assert "process 1 is in pipe.step with a batch of x f32[8,8], y f32[8,8] for the first time" in error
    # at last Ctrl-C on process 1
    assert "KeyboardInterrupt" in ended[1].errors
    assert "jaxpp: process 1 failed; it ends within 5 seconds" in ended[1].errors
    assert "jaxpp: process 1 raised KeyboardInterrupt; process 0 cannot go on without it" in ended[0].errors
    assert all(each.code != 0 for each in ended)


@pytest.mark.long
def test_a_process_that_is_killed_ends_the_others_within_the_heartbeat_time():
    with start(f"{CASES}:steps", 2, together=False, initialize=HEARTBEAT) as processes:
        for process in processes:
            wait_for(process, "step 3")
        processes[1].kill()
        begun = time.monotonic()
        other, _ = processes.wait(40)
        assert time.monotonic() - begun < 20
    assert other.code != 0
    by_jax = "Task 1 heartbeat timeout", "unhealthy (stopped sending heartbeats):\n1\n"  # whichever of its threads is first
    assert any(said in other.errors for said in ("jaxpp: process 1 does not answer: killed", *by_jax))


@pytest.mark.long
@pytest.mark.parametrize("number", [0, 1])
def test_ctrl_c_while_steps_run_ends_all(number):
    with start(f"{CASES}:steps", 3, {"pause": 0.02}, together=False) as processes:
        for process in processes:
            wait_for(process, "step 3")
        processes[number].send(signal.SIGINT)
        ended = processes.wait(40)
    assert "KeyboardInterrupt" in ended[number].errors
    assert all(each.code != 0 for each in ended)


@pytest.mark.long
def test_a_process_0_that_is_killed_ends_the_others_at_once():
    with start(f"{CASES}:steps", 2, together=False) as processes:
        for process in processes:
            wait_for(process, "step 3")
        processes[0].kill()
        begun = time.monotonic()
        _, other = processes.wait(40)
        assert time.monotonic() - begun < 10
    assert other.code != 0
    assert "JaxRuntimeError" in other.errors or "JAX distributed service" in other.errors


@pytest.mark.long
def test_an_exception_in_the_loop_of_one_process_ends_all():
    with start(f"{CASES}:steps", 2, {"raises": True}, together=False) as processes:
        other, failed = processes.wait(60)
    assert failed.code == other.code == 1
    assert "RuntimeError: in the user's loop" in failed.errors
    assert "jaxpp: process 1 raised RuntimeError: in the user's loop; process 0 cannot go on without it" in other.errors


@pytest.mark.long
@pytest.mark.parametrize("number", [0, 1])
def test_a_process_that_ends_by_itself_before_the_others_ends_all_of_them_soon(number):
    with start(f"{CASES}:steps", 2, {"leaves": number}, together=False) as processes:
        wait_for(processes[number], "step 5")
        begun = time.monotonic()
        ended = processes.wait(40)
        assert time.monotonic() - begun < 25
    other = ended[1 - number]
    assert other.code == 1
    assert f"ProcessError: pipe.step: all processes do the same calls.\n  Got: process {number} has come to the end" in other.errors


@pytest.mark.long
@pytest.mark.parametrize("how", [{"raises": True}, {"leaves": 1}])
def test_a_loop_that_reads_no_value_stops_at_the_next_call_once_it_has_heard(how):
    with start(f"{CASES}:steps", 2, {"reads": False, "pause": 0.02, **how}, together=False) as processes:
        wait_for(processes[1], "step 5")
        begun = time.monotonic()
        other, _ = processes.wait(40)
        assert time.monotonic() - begun < 25
    assert other.code == 1
    said = "raised RuntimeError: in the user's loop" if "raises" in how else "has come to the end of its script"
    assert "ProcessError: pipe.step: all processes do the same calls" in other.errors
    assert f"Got: process 1 {said}." in other.errors
    assert other.out.count("step") < 300  # of a pause of 0.02 s each; the heartbeat would come after 100 s


@pytest.mark.long
def test_processes_that_end_at_different_times_after_the_same_calls_end_without_a_word():
    with start(f"{CASES}:orderly", 2, {"count": 8, "pause": 0.5, "after": 3}, together=False) as processes:
        ended = processes.wait(60)
        over = time.time()
    slow, ahead = (float(each.out.split("end")[1]) for each in ended)
    assert [each.code for each in ended] == [0, 0]
    assert not any("jaxpp" in each.errors for each in ended)
    assert slow - ahead > 3
    assert over - slow < 5


@pytest.mark.long
def test_a_process_that_ends_after_an_interrupt_that_its_script_has_caught_is_a_failed_one():
    with start(f"{CASES}:interrupted", 2, together=False) as processes:
        wait_for(processes[1], "good night")
        begun = time.monotonic()
        other, _ = processes.wait(40)
        assert time.monotonic() - begun < 25
    assert other.code == 1
    assert "process 1 has come to the end of its script after pipe.step was broken off by KeyboardInterrupt" in other.errors


@pytest.mark.slow
def test_a_process_that_has_broken_off_a_step_makes_no_other():
    with start(f"{CASES}:broken_off", 2, together=False) as processes:
        other, failed = processes.wait(60)
    assert "caught" in failed.out
    assert failed.code == other.code == 1
    assert "ProcessError: pipe.step: a process that was interrupted" in failed.errors
    assert "Got: pipe.step was broken off by " in failed.errors
    assert "ProcessError: pipe.step: " in other.errors


@pytest.mark.long
def test_a_process_whose_script_has_ended_is_not_waited_for():
    with start(f"{CASES}:uneven", 2, together=False) as processes:
        waiting, gone = processes.wait(60)
    assert gone.code == 0
    assert waiting.code == 1
    assert "process 1 has come to the end of its script" in waiting.errors
    assert "Fix: give every process the same batches, as many" in waiting.errors


@pytest.mark.long
def test_a_process_that_comes_late_is_waited_for_and_people_are_told():
    with start(f"{CASES}:late", 2, together=False) as processes:
        first, second = processes.wait(60)
    assert first.code == second.code == 0
    assert "met" in first.out
    assert "jaxpp: process 0 has waited in pipe.init with a batch of x f32[16,8], y f32[16,8] for 5 seconds" in first.errors
    assert "because process 1 did not come to it yet" in first.errors
    assert "waited" not in second.errors


@pytest.mark.long
@pytest.mark.parametrize("store", [True, False])
def test_calls_in_another_order_are_refused_before_anything_is_sent_and_the_processes_go_on_together(store):
    with start(f"{CASES}:other_order", 2, {"store": store}, together=False) as processes:
        ended = processes.wait(60)
    for each in ended:
        assert each.code == 0, each.errors
        assert each.out.count("the same True") == each.out.count("ProcessError: grad_fn: all processes do the same calls") == 2
        assert "Got: process 0 is in grad_fn with a batch of x f32[16,8], y f32[16,8] as agreed in exchange 1" in each.out
        assert "process 1 is in grad_fn with a batch of x f32[16,8], y f32[16,8] as agreed in exchange 3." in each.out
        assert "process 1 is in grad_fn with a batch of x f32[16,8], y f32[16,8] as agreed in exchange 5." in each.out


@pytest.mark.long
def test_without_the_shared_store_differences_are_found_by_a_collective():
    with start(f"{CASES}:without_store", 2, together=False) as processes:
        ended = processes.wait(60)
    said = [{line["name"]: line["error"] for line in lines(each) if "name" in line} for each in ended]
    for name in ("code", "batch", "x64"):
        assert all(fragment in said[0][name] for fragment in EXPECTED[name]), said[0][name]
        assert said[0][name] == said[1][name]
    losses = [[line["loss"] for line in lines(each) if "loss" in line] for each in ended]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 1
