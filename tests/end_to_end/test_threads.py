"""A thread for each rank hands over the same step: the same bits, whatever takes long, and nothing half done when it is stopped."""

import dataclasses
import functools
import gc
import os
import signal
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.dynamic_scale import DynamicScale

import jaxpp
from jaxpp.engine import engine as engines
from jaxpp.errors import ArgumentError, StateError
from jaxpp.errors.user_mesh import DisableJitWarning
from jaxpp.lowering import lanes as plan_lanes
from jaxpp.lowering.plan import Execution
from jaxpp.runtime.threads import Threads
from jaxpp.schedule.registry import SCHEDULES
from tests.models import gpt_case

RNG = np.random.default_rng(0)
X = RNG.normal(size=(16, 8)).astype(np.float32)
PARAMS = [{"w": RNG.normal(size=(8, 8)).astype(np.float32) / 2, "b": np.zeros(8, np.float32)} for _ in range(8)]
CLIPPED = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))


def tied(params, x):
    for layer in params:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return jnp.mean(x**2) + jnp.mean((x @ params[0]["w"].T) ** 2)


def counting(params, mean, x):
    hidden = x + mean
    for layer in params:
        hidden = jnp.tanh(hidden @ layer["w"])
    return jnp.mean(hidden**2), (0.9 * mean + 0.1 * x.mean(0), {"size": jnp.abs(hidden).mean()})


def pipeline(loss=tied, threads="ranks", optimizer=CLIPPED, **options):
    options = {"num_stages": 4, "num_microbatches": 4} | options
    return jaxpp.Pipeline(loss, optimizer, threads=threads, **options)


def bits(*trees):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(trees)]


def trained(pipe, given=(PARAMS,), steps=3, batch=X):
    """The bits of all that some steps return."""
    state, told = pipe.init(*given, batch), []
    for _ in range(steps):
        state, metrics = pipe.step(state, batch)
        told.append((metrics.loss, metrics.aux, metrics.grad_norm))
    return bits(state, told, pipe.evaluate(state, batch).loss)


def plan_of(pipe, batch=X):
    return pipe.engine.plan("update", batch, None)[0]


def same_bits(loss=tied, given=(PARAMS,), **options):
    made = {threads: pipeline(loss, threads, **options) for threads in ("one", "ranks")}
    found = {threads: trained(pipe, given) for threads, pipe in made.items()}
    assert found["one"] == found["ranks"]
    plans = {threads: plan_of(pipe) for threads, pipe in made.items()}
    assert plans["ranks"].turns and not plans["one"].turns
    return plans["ranks"]


KINDS = {
    "the default": {},
    "a norm over all stages and a scaled loss": {"loss_scale": DynamicScale()},
    "delay": {"delay": 1},
    "delay without a norm": {"delay": 1, "optimizer": optax.adam(1e-2)},
    "replicas": {"data_parallel": 2},
    "replicas that divide parameters": {"data_parallel": 2, "shard": "parameters"},
    "unequal ranks": {"devices": [*jax.devices()[:3], jax.devices()[3:5]], "shardings": {"*/w": "column"}},
    "the optimizer on the host": {"host": "optimizer"},
    "all of the state on the host, and a parameter of two stages": {"host": "params"},
    "residuals on the host": {"remat": "offload", "num_microbatches": 8},
    "two ranks share a device": {"devices": jax.devices()[:3]},
    "microbatches of two sizes": {"num_microbatches": 3},
    "model state": {"loss": counting, "given": ((PARAMS, np.zeros(8, np.float32)),), "has_state": True},
}


@pytest.mark.parametrize("kind", KINDS)
def test_threads_train_with_the_same_bits(kind):
    plan = same_bits(**KINDS[kind])
    writers = {}
    for instruction, turn in zip(plan.instructions, plan.turns, strict=True):
        for slot in instruction.outputs:
            writers.setdefault(slot, set()).add(turn.lane)
    assert all(len(lanes) == 1 for lanes in writers.values())


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::jaxpp.UnevenStagesWarning", "ignore::jaxpp.runtime.place.DevicesWarning")
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_has_the_same_bits_in_threads(schedule):
    same_bits(schedule=schedule, num_stages=8, num_microbatches=1 if schedule == "naive" else 16)


@pytest.mark.long
def test_a_gpt_with_keys_and_aux_has_the_same_bits_in_threads():
    case = gpt_case()
    found = []
    for threads in ("one", "ranks"):
        pipe = pipeline(case.loss_fn, threads, has_aux=True)
        state = pipe.init(case.params, case.batch)
        for number in range(2):
            state, metrics = pipe.step(state, case.batch, jax.random.fold_in(case.key, number))
        found.append(bits(state, metrics.loss, metrics.aux))
    assert found[0] == found[1]


def paused(monkeypatch, most=2e-3, seed=0):
    """Every instruction takes a while to be called, each another one."""
    made, draw = engines.compile_plan, np.random.default_rng(seed)

    def slow(call):
        def called(*args):
            time.sleep(draw.uniform(0, most) * draw.integers(2))
            return call(*args)

        return called

    def compiled(*args, **kwargs):
        plan, bound = made(*args, **kwargs)
        return dataclasses.replace(
            plan, instructions=tuple(each._replace(call=slow(each.call)) for each in plan.instructions)
        ), bound

    monkeypatch.setattr(engines, "compile_plan", compiled)


def random_case(seed):
    """A chain of layers with skips and ties, and options."""
    rng = np.random.default_rng(seed)
    width, layers = int(rng.choice([4, 8])), int(rng.integers(4, 9))
    params = [{"w": rng.normal(size=(width, width)).astype(np.float32) / 2} for _ in range(layers)]
    reads = [int(rng.integers(k + 1)) if rng.random() < 0.3 else k for k in range(layers)]  # the layer whose weights each reads
    skips = [int(rng.integers(k + 1)) if rng.random() < 0.3 else None for k in range(layers)]

    def loss(params, x):
        hidden = [x]
        for k in range(layers):
            hidden.append(jnp.tanh(hidden[-1] @ params[reads[k]]["w"]) + (0 if skips[k] is None else hidden[skips[k]]))
        return jnp.mean(hidden[-1] ** 2)

    stages = int(rng.integers(2, 5))
    options = {"num_stages": stages, "num_microbatches": int(rng.integers(stages, 9))}
    options["schedule"] = str(rng.choice(["1f1b", "gpipe", "zb-h1"]))
    more = ({}, {}, {"data_parallel": 2}, {"delay": 1}, {"remat": "recompute"}, {"remat": "offload"})
    optimizers = (optax.adam(1e-2), CLIPPED, optax.sgd(0.1, momentum=0.9))
    options |= more[rng.integers(len(more))] | {"optimizer": optimizers[rng.integers(len(optimizers))]}
    return loss, params, rng.normal(size=(16, width)).astype(np.float32), options


def check_random(seed, monkeypatch):
    loss, params, batch, options = random_case(seed)
    found = [trained(pipeline(loss, "one", **options), (params,), 2, batch)]
    paused(monkeypatch, seed=seed)
    found.append(trained(pipeline(loss, "ranks", **options), (params,), 2, batch))
    assert found[0] == found[1], f"seed {seed}"


@pytest.mark.filterwarnings("ignore:delay=1:jaxpp.OptionWarning")  # some schedules leave no room for another step
@pytest.mark.parametrize("seed", range(3))
def test_random_models_have_the_same_bits_whatever_takes_long(seed, monkeypatch):
    check_random(seed, monkeypatch)


@pytest.mark.filterwarnings("ignore:delay=1:jaxpp.OptionWarning")  # some schedules leave no room for another step
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3, 203))
def test_many_random_models_have_the_same_bits_whatever_takes_long(seed, monkeypatch):
    check_random(seed, monkeypatch)


def without_waits(turns):
    return tuple(turn._replace(after=()) for turn in turns)


def failing(plan, label):
    def fail(*_):
        raise RuntimeError("this one fails")

    return dataclasses.replace(
        plan, instructions=tuple(each._replace(call=fail) if each.label == label else each for each in plan.instructions)
    )


def changed_plans(monkeypatch, change):
    made = engines.Engine._make_plan

    def make(self, *args, **kwargs):
        plan, lowered = made(self, *args, **kwargs)
        return change(plan), lowered

    monkeypatch.setattr(engines.Engine, "_make_plan", make)


def test_a_lane_that_does_not_wait_for_what_is_sent_to_it_finds_nothing_there(monkeypatch):
    paused(monkeypatch)
    changed_plans(monkeypatch, lambda plan: dataclasses.replace(plan, turns=without_waits(plan.turns)))
    pipe = pipeline()
    state = pipe.init(PARAMS, X)
    with pytest.raises(TypeError, match="None"):
        pipe.step(state, X)


@pytest.mark.parametrize("waits", [True, False])
def test_what_fails_before_the_updates_changes_nothing_because_all_lanes_wait_for_one_another(waits, monkeypatch):
    paused(monkeypatch)
    if not waits:
        found = plan_lanes.in_lanes
        monkeypatch.setattr("jaxpp.runtime.bind.in_lanes", lambda lines, places, _: found(lines, places, len(lines)))
    changed_plans(monkeypatch, lambda plan: failing(plan, "0B3"))
    pipe = pipeline(optimizer=optax.sgd(0.1, momentum=0.9))  # no count of steps, which stage 0 would send to the others
    state = pipe.init(PARAMS, X)
    before = bits(state)
    with pytest.raises(RuntimeError, match="this one fails") as caught:
        pipe.step(state, X)
    assert any("0B3" in note for note in caught.value.__notes__)
    consumed = sum(leaf.is_deleted() for leaf in jax.tree.leaves(state.params))
    assert bool(consumed) is not waits
    if waits:
        assert bits(state) == before


def test_a_slot_that_lanes_share_is_overwritten_before_it_is_read(monkeypatch):
    expected = trained(pipeline(tied, "one", num_microbatches=8))
    paused(monkeypatch)
    found = plan_lanes.in_lanes

    def shared(*args, **kwargs):
        lanes = found(*args, **kwargs)
        return dataclasses.replace(lanes, local=dict.fromkeys([*lanes.local, *(n for line in args[0] for n in line.outputs)], 0))

    monkeypatch.setattr("jaxpp.runtime.bind.in_lanes", shared)
    try:
        wrong = trained(pipeline(num_microbatches=8)) != expected
    except Exception:  # noqa: BLE001  (a value of another shape, or none at all)
        wrong = True
    assert wrong


def ranks_left(most=4):
    """The threads of ranks, which end a moment after their pipeline does."""
    gc.collect()
    for _ in range(100):
        left = [thread for thread in threading.enumerate() if thread.name.startswith("jaxpp-rank")]
        if len(left) <= most:
            break
        time.sleep(0.05)
    return left


def broken(plan, number):
    """The plan whose instruction fails at its next call, and then no more."""
    failed = []

    def once(call):
        def called(*args):
            if not failed:
                failed.append(True)
                raise RuntimeError("this one fails")
            return call(*args)

        return called

    each = plan.instructions[number]
    instructions = (*plan.instructions[:number], each._replace(call=once(each.call)), *plan.instructions[number + 1 :])
    return dataclasses.replace(plan, instructions=instructions)


def check_exceptions(count, **options):
    """Errors at random instructions: the state is the old one, or consumed, and the error says so; the next step is right."""
    pipe, plain, rng = pipeline(**options), pipeline(threads="one", **options), np.random.default_rng(0)
    given, plain_state = pipe.init(PARAMS, X), plain.init(PARAMS, X)
    for _ in range(count):
        plan, lowered = pipe.engine.plan("update", X, None)
        number = int(rng.integers(len(plan.instructions)))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pipe.engine, "plan", functools.partial(returning, (broken(plan, number), lowered)))
            with pytest.raises(RuntimeError, match="this one fails") as caught:
                pipe.step(given, X)
        gone = sum(leaf.is_deleted() for leaf in jax.tree.leaves(given.params))
        assert not gone or number >= plan.consumes
        if gone:
            assert any("part of the state is consumed" in note for note in caught.value.__notes__)
            given, plain_state = pipe.init(PARAMS, X), plain.init(PARAMS, X)
        given, metrics = pipe.step(given, X)
        plain_state, expected = plain.step(plain_state, X)
        assert bits(given, metrics.loss) == bits(plain_state, expected.loss)
    assert len(ranks_left()) <= 4
    del pipe, given, caught, patch, lowered, plan
    assert not ranks_left(0)


def returning(value, *args, **kwargs):
    return value


def test_errors_leave_the_state_whole_and_no_thread_behind():
    check_exceptions(6)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"optimizer": optax.adam(1e-2)}, {"data_parallel": 2}], ids=["norm", "adam", "replicas"])
def test_errors_anywhere_leave_the_state_whole(options):
    check_exceptions(50, **options)


def check_interrupts(count, monkeypatch, **options):
    """Ctrl-C at random moments of a step: the state before it or after it, whole."""
    plain, rng = pipeline(threads="one", **options), np.random.default_rng(1)
    plain_state = plain.init(PARAMS, X)
    paused(monkeypatch, most=1e-3)
    pipe = pipeline(**options)
    given = pipe.init(PARAMS, X)
    given, _ = pipe.step(given, X)
    plain_state, _ = plain.step(plain_state, X)
    outcomes = set()
    for _ in range(count):
        timer = threading.Timer(rng.uniform(0, 0.05), os.kill, (os.getpid(), signal.SIGINT))
        before = bits(given)
        try:
            timer.start()
            given, _ = pipe.step(given, X)
            timer.join()
            time.sleep(0.01)
            outcomes.add("late")
        except KeyboardInterrupt:
            given = pipe.state
            timer.join()
            outcomes.add("old" if bits(given) == before else "new")
        if bits(given) != before:
            plain_state, _ = plain.step(plain_state, X)
        assert bits(given) == bits(plain_state)
    assert len(outcomes) > 1
    assert len(ranks_left()) <= 4


def test_ctrl_c_leaves_the_state_before_the_step_or_after_it(monkeypatch):
    check_interrupts(8, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"delay": 1}, {"host": "optimizer"}], ids=["plain", "delay", "host"])
def test_ctrl_c_anywhere_leaves_the_state_whole(options, monkeypatch):
    check_interrupts(50, monkeypatch, **options)


def num_arrays():
    return sum(array.ndim > 0 for array in jax.live_arrays())  # the detector of dead stages keeps the last losses and sums


@pytest.mark.parametrize("steps", [20, pytest.param(1000, marks=pytest.mark.slow)])
def test_steps_leave_no_thread_and_no_array_behind(steps):
    pipe = pipeline()
    state = pipe.init(PARAMS, X)
    for _ in range(2):
        state, metrics = pipe.step(state, X)
    jax.block_until_ready(state)
    arrays, threads = num_arrays(), len(ranks_left())
    for _ in range(steps):
        state, metrics = pipe.step(state, X)
    jax.block_until_ready((state, metrics.loss))
    assert (num_arrays(), len(ranks_left())) == (arrays, threads)
    del pipe, state, metrics
    assert not ranks_left(0)


def test_steps_of_several_threads_take_turns():
    pipe, found = pipeline(), []
    state = pipe.init(PARAMS, X)
    expected = bits(pipe.evaluate(state, X).loss)
    evaluating = [threading.Thread(target=lambda: found.append(bits(pipe.evaluate(state, X).loss))) for _ in range(4)]
    for each in evaluating:
        each.start()
    for each in evaluating:
        each.join()
    assert found == [expected] * 4


def test_a_guard_of_transfers_does_not_reach_the_threads():
    pipe, given = pipeline(), jax.device_put(X)
    state = pipe.init(PARAMS, given)
    jax.config.update("jax_transfer_guard", "disallow")
    try:
        state, _ = pipe.step(state, given)
    finally:
        jax.config.update("jax_transfer_guard", "allow")
    assert all(np.isfinite(np.asarray(leaf)).all() for leaf in jax.tree.leaves(state.params))


def test_one_thread_hands_over_where_the_host_looks_at_values():
    def loss(params, x):
        jax.debug.callback(lambda value: None, x.sum())
        return tied(params, x)

    pipe = pipeline(loss)
    pipe.init(PARAMS, X)
    assert not plan_of(pipe).turns
    pipe = pipeline()
    pipe.init(PARAMS, X)
    assert plan_of(pipe).turns
    with jax.debug_nans(True):
        assert not plan_of(pipe).turns
    pipe = pipeline(threads="auto")  # CPU devices run what they are handed by themselves
    pipe.init(PARAMS, X)
    assert not plan_of(pipe).turns


def test_an_observer_sees_the_instructions_in_the_order_of_one_thread():
    pipe, seen = pipeline(), []
    state = pipe.init(PARAMS, X)
    pipe.engine.run("update", pipe.engine.leaves(state.held), X, None, observer=lambda line, _: seen.append(line.label))
    assert seen == [line.label for line in plan_of(pipe).instructions]


def test_what_is_left_of_a_run_goes_on_where_its_lanes_have_stopped():
    pipe = pipeline()
    state = pipe.init(PARAMS, X)
    plan, lowered = pipe.engine.plan("update", X, None)
    run = Execution(broken(plan, plan.consumes - 1), [*pipe.engine.copy(pipe.engine.leaves(state.held)).flat(), X])
    threads = Threads(4)
    with pytest.raises(RuntimeError, match="this one fails"):
        threads.dispatch([(run, run.left)])
    assert run.failed
    threads.dispatch([(run, run.left)])
    new, metrics = pipe.step(state, X)
    found = lowered.outcome(run.results())
    assert bits(found.loss, found.state.flat()) == bits(metrics.loss, pipe.engine.leaves(new.held).flat())


@pytest.mark.parametrize("threads", ["rank", 4, None, True])
def test_other_words_are_refused(threads):
    with pytest.raises(ArgumentError, match=r"pass .auto., .one. or .ranks."):
        pipeline(threads=threads)


@pytest.mark.long
def test_sets_of_a_bank_and_a_mesh_have_the_same_bits_in_threads():
    def of_task(params, own, x):
        return tied([*params[:4], {**params[4], "w": params[4]["w"] @ own["w"]}, *params[5:]], x)

    mesh, found = jax.make_mesh((2, 2, 2), ("pipe", "data", "model")), []
    for threads in ("one", "ranks"):
        bank = jaxpp.Bank({name: {"w": np.eye(8, dtype=np.float32)} for name in ("cat", "dog")}, optax.adam(1e-2))
        pipe = pipeline(of_task, threads, optax.adam(1e-2), bank=bank)
        state = pipe.init(PARAMS, X)
        for task in ("cat", "dog", "cat"):
            state, _ = pipe.step(state, X, task=task)
        meshed = pipeline(tied, threads, mesh=mesh, num_stages=2, shardings={"*/w": "column"})
        found.append((bits(state, bank.params("cat"), bank.params("dog")), trained(meshed)))
        assert bool(plan_of(meshed).turns) is (threads == "ranks")
    assert found[0] == found[1]


def test_a_look_from_a_lane_at_the_state_that_it_hands_over_is_refused_and_waits_for_nothing(monkeypatch):
    # As a __del__ of the user's would that Python calls in a lane; the lock of the state's step is held by who waits for the lane.
    made, states, told = engines.compile_plan, [], []

    def looking(call):
        def called(*args):
            if states and threading.current_thread() is not threading.main_thread():
                try:
                    told.append(states[-1].params)
                except StateError as error:
                    told.append(str(error))
            return call(*args)

        return called

    def compiled(*args, **kwargs):
        plan, bound = made(*args, **kwargs)
        return dataclasses.replace(plan, instructions=tuple(x._replace(call=looking(x.call)) for x in plan.instructions)), bound

    expected = trained(pipeline(delay=1))
    monkeypatch.setattr(engines, "compile_plan", compiled)
    pipe = pipeline(delay=1)
    state, _ = pipe.step(pipe.init(PARAMS, X), X)
    states.append(state)
    state, metrics = pipe.step(state, X)
    assert told and all("it can be looked at when its step has been handed over" in text for text in told)
    assert not any(isinstance(leaf, str) for leaf in jax.tree.leaves(states.pop().params))
    assert np.isfinite(metrics.grad_norm) and trained(pipe) == expected


def test_lanes_do_not_repeat_what_the_caller_is_warned_of():
    pipe = pipeline()
    state, _ = pipe.step(pipe.init(PARAMS, X), X)
    jax.config.update("jax_disable_jit", True)
    try:
        with pytest.warns(DisableJitWarning) as told:
            pipe.step(state, X)
    finally:
        jax.config.update("jax_disable_jit", False)
    assert len(told) == 1


def test_a_fork_of_the_process_has_no_threads_to_wait_for(monkeypatch):
    pipe = pipeline()
    state, _ = pipe.step(pipe.init(PARAMS, X), X)
    threads = pipe.engine.threads
    assert threads.may_begin
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert not threads.may_begin
    monkeypatch.setattr(Threads, "dispatch", None)
    pipe.step(state, X)


def test_threads_have_the_callers_x64():
    batch = np.random.default_rng(1).normal(size=(16, 8))
    with jax.enable_x64(True):
        found = [trained(pipeline(tied, threads), (jax.tree.map(np.float64, PARAMS),), 2, batch) for threads in ("one", "ranks")]
    assert found[0] == found[1]


def test_a_handler_of_signals_may_evaluate_while_threads_hand_over_a_step(monkeypatch):
    paused(monkeypatch, most=5e-3)
    pipe, found = pipeline(), []
    state = pipe.init(PARAMS, X)
    before = signal.signal(signal.SIGUSR1, lambda *_: found.append(bits(pipe.evaluate(state, X).loss)))
    try:
        expected = bits(pipe.evaluate(state, X).loss)
        timer = threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGUSR1))
        timer.start()
        pipe.step(state, X, donate=False)
        timer.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert found == [expected]
