"""``delay=1``: gradients of the parameters before the last step, as a plain loop has them; and steps that flow into one another."""

import contextlib
import copy
import functools
import gc
import itertools
import json
import pickle
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import serialization
from flax.training.dynamic_scale import DynamicScale

import jaxpp
from jaxpp.engine.state import tail_of
from jaxpp.errors import ArgumentError, BatchError, StateError
from jaxpp.lowering.builder import Builder, Name
from jaxpp.lowering.passes.flow import in_flow
from jaxpp.lowering.plan import Execution
from jaxpp.observe.memory.ledger import live_bytes
from jaxpp.observe.memory.liveness import liveness_in_flow, step_liveness
from jaxpp.observe.profile.record import flowing_plan
from jaxpp.runtime import execute
from jaxpp.schedule import SCHEDULES, Action, Kind, make
from jaxpp.stages.program import Program, Ref, Role
from jaxpp.verify import compare
from tests.models import LAYERS, PARAMS, X, looped, loss_fn, pipeline, schedule_for
from tests.random_models import random_model

pytestmark = pytest.mark.filterwarnings(
    "ignore:delay=1. where (no rank has room|the host is waited|parameters visit):jaxpp.OptionWarning"
)
WIDTH = 8
KEYS = [jax.random.key(k) for k in range(4)]


def deep_init(key=KEYS[0]):
    return {f"w{k}": jax.random.normal(jax.random.fold_in(key, k), (WIDTH, WIDTH)) / 2 for k in range(8)}


def deep(params, x, key):
    """Eight layers with dropout, the first of which is the last too."""
    for k in range(8):
        x = jnp.tanh(x @ params[f"w{k}"])
        x = x * jax.random.bernoulli(jax.random.fold_in(key, k), 0.9, x.shape)
    return jnp.mean((x @ params["w0"].T) ** 2)


OPTIMIZERS = {
    "sgd": optax.sgd(0.1, momentum=0.9),
    "clipped adamw": optax.chain(optax.clip_by_global_norm(0.05), optax.adamw(1e-2)),
}


def equal(left, right):
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@contextlib.contextmanager
def before_each(monkeypatch, call):
    """Call with every instruction of a step, and of the rest of the step before it, before it runs."""
    plain = execute.hand_over

    def seen(run, numbers):
        for number in numbers:
            call(run.plan.instructions[number])
            yield number

    def hand_over(parts, observer, threads):
        plain(((run, seen(run, numbers)) for run, numbers in parts), observer, threads)

    with monkeypatch.context() as patch:
        for room in ("engine", "tail"):
            patch.setattr(f"jaxpp.engine.{room}.hand_over", hand_over)
        yield


def failing(monkeypatch, when):
    """An instruction of which this is so fails."""

    def fail(instruction):
        if when(instruction):
            raise RuntimeError("RESOURCE_EXHAUSTED")

    return before_each(monkeypatch, fail)


def begun(delay=1, **options):
    """A pipeline of three stages, and its first state."""
    pipe = pipeline(stages=3, microbatches=4, delay=delay, **options)
    return pipe, pipe.init(PARAMS, X)


def loss_of_list(params, x):
    for w in params:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def flowing(pipe, init, steps, *, ends=lambda number: False):
    """Train; ``ends`` says after which steps the flow is ended."""
    state, found = pipe.init(init, steps[0][0]), []
    for number, (batch, key) in enumerate(steps):
        state, metrics = pipe.step(state, batch, key)
        found.append(metrics)
        if ends(number):
            pipe.flush(state)
    return state, found


def training_steps():
    """Four batches and their keys, in the floating type that is the default."""
    return [(jnp.asarray(np.random.default_rng(k).normal(size=(12, WIDTH))), key) for k, key in enumerate(KEYS)]


NAMES = [name for name in SCHEDULES if name != "naive"]


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name == "1f1b" else pytest.mark.long) for name in NAMES])
def test_steps_that_flow_have_the_bits_of_steps_that_end(name):
    order = schedule_for(name, 4, 4)
    results = []
    for ends in (lambda number: False, lambda number: number % 2 == 1, lambda number: True):
        pipe = jaxpp.Pipeline(deep, OPTIMIZERS["clipped adamw"], num_stages=4, num_microbatches=4, schedule=order, delay=1)
        state, metrics = flowing(pipe, deep_init(), training_steps(), ends=ends)
        results.append((state, [dict(each) for each in metrics]))
    equal(results[0], results[1])
    equal(results[0], results[2])


def test_a_step_returns_before_its_last_backwards_and_whoever_looks_at_the_state_ends_it():
    pipe, state = begun()
    for look in (
        lambda state, _: state.params,
        lambda state, _: jax.block_until_ready(state),
        lambda state, _: pipe.evaluate(state, X),
        lambda state, _: pipe.apply(state, X, lambda params, x: x @ params["a"]),
        lambda state, _: print(state),
        lambda state, _: state.replace(step=3),
        lambda state, _: pipe.flush(state),
        lambda state, _: pipe.state,
        lambda state, _: serialization.to_state_dict(state),
        lambda _, metrics: metrics.grad_norm,
        lambda _, metrics: dict(metrics),
        lambda _, metrics: metrics.by_stage,
    ):
        state, metrics = pipe.step(state, X)
        rest = tail_of(state, pipe.engine)
        assert rest is not None
        assert float(metrics.loss) > 0
        assert isinstance(state.step, int)
        assert tail_of(state, pipe.engine) is rest, "neither of them ends it"
        look(state, metrics)
        jax.block_until_ready(state.params)
        assert tail_of(state, pipe.engine) is None
        assert float(metrics.grad_norm) > 0


def test_other_batch_sizes_and_numbers_of_microbatches_flow_too():
    steps = [X, X[:5], X, jaxpp.Microbatches([X[:3], X[:2], X]), jaxpp.Microbatches([X, X[:1]]), X]
    results = []
    for ends in (False, True):
        pipe, state = begun()
        for batch in steps:
            state, _ = pipe.step(state, batch)
            if ends:
                pipe.flush(state)
        results.append(state)
    equal(*results)


def test_a_state_that_a_later_step_has_consumed_is_refused_and_one_that_is_kept_is_not():
    pipe, first = begun()
    second, _ = pipe.step(first, X)
    with pytest.raises(StateError, match="consumed by an earlier step"):
        pipe.step(first, X)
    third, _ = pipe.step(second, X)
    with pytest.raises(StateError, match="consumed by an earlier step"):
        pipe.step(second, X)  # a cell that is run twice
    expected = jax.device_get(third)
    kept, _ = pipe.step(third, X, donate=False)
    equal(third, expected)
    again, _ = pipe.step(third, X, donate=False)
    equal(kept, again)
    pipe.step(kept, X)
    equal(third, expected)


def test_the_previous_parameters_are_those_of_the_state_before():
    pipe = pipeline(optimizer=optax.sgd(0.1), stages=3, microbatches=4, delay=1)
    state = pipe.init(PARAMS, X)
    equal(state.previous, PARAMS)
    for _ in range(3):
        params = jax.device_get(state.params)
        state, _ = pipe.step(state, X)
        equal(state.previous, params)
    assert "previous" in str(state)
    plain = pipeline()
    assert plain.init(PARAMS, X).previous == ()


def test_loops_that_are_cut_hold_previous_slices():
    pipe = pipeline(looped, stages=3, microbatches=4, delay=1, cuts=None)
    state = pipe.init(LAYERS, X)
    for _ in range(2):
        before = jax.device_get(state.params)
        state, _ = pipe.step(state, X)
    assert jax.tree.structure(state.previous) == jax.tree.structure(LAYERS)
    equal(state.previous, before)
    assert pipe.verify(state, X)


def test_what_no_step_changes_is_held_once():
    optimizer = optax.multi_transform({"a": optax.adam(1e-2), "b": optax.sgd(1e-2)}, {"a": "a", "b": "b", "c": "b"})
    pipe = pipeline(optimizer=optimizer, stages=3, microbatches=4, delay=1, trains=("b", "c"))
    state = pipe.init(PARAMS, X)
    for _ in range(3):
        state, _ = pipe.step(state, X)
    assert state.previous["a"] is state.params["a"]
    assert len(jax.tree.leaves(state)) == len(jax.tree.leaves(state.replace(previous=()))) + 2
    equal(state.params["a"], PARAMS["a"])
    assert pipe.verify(state, X)
    at_home = jax.device_get(state)
    grads = jax.grad(loss_fn)(at_home.previous, X)  # the loop that the guide shows
    updates, _ = jax.jit(optimizer.update)(grads, at_home.opt_state, at_home.params)
    found, _ = pipe.step(state.replace(previous=state.previous), X)
    for name in ("b", "c"):
        compare(name, found.params[name], optax.apply_updates(at_home.params, updates)[name])


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(options, id=name, marks=pytest.mark.long)
        for name, options in {
            "replicas": {"data_parallel": 2},
            "a mesh": {"mesh": ((2, 2, 2), ("pipe", "data", "model")), "shardings": {"w*": "column"}},
            "divided optimizers": {"data_parallel": 2, "shard": "optimizer"},
            "divided parameters": {"data_parallel": 2, "shard": "parameters"},
            "divided gradients": {"data_parallel": 2, "shard": "gradients"},
            "one device": {"devices": jax.devices()[:1]},
            "fewer residuals": {"remat": "recompute"},
            "residuals in host memory": {"remat": "offload"},
            "fused": {"fuse": True},
            "unequal ranks": {"devices": [jax.devices()[0], jax.devices()[1:3]], "shardings": {"w*": "column"}},
        }.items()
    ],
)
@pytest.mark.filterwarnings("ignore:delay=1. with remat:jaxpp.OptionWarning")
def test_pipelines_of_all_kinds_flow_or_end_with_the_same_bits(options):
    options = {"num_stages": 2, **options}
    if "mesh" in options:
        options["mesh"] = jax.make_mesh(*options["mesh"])
    results = []
    for ends in (False, True):
        pipe = jaxpp.Pipeline(deep, OPTIMIZERS["clipped adamw"], num_microbatches=3, delay=1, **options)
        results.append(flowing(pipe, deep_init(), training_steps(), ends=lambda _, ends=ends: ends)[0])
    equal(*results)
    assert pipe.verify(results[1], *training_steps()[1])


def test_a_checkpoint_of_steps_in_flow_goes_on_with_the_same_bits(tmp_path):
    def run(restart):
        pipe, state = begun()
        for number in range(4):
            if restart and number == 2:
                with ocp.StandardCheckpointer() as checkpointer:
                    checkpointer.save(tmp_path / "state", state)
                    checkpointer.wait_until_finished()
                    pipe = pipeline(stages=2, microbatches=4, delay=1)
                    state = checkpointer.restore(tmp_path / "state", pipe.abstract_state(PARAMS, X))
                assert state.step == 2
            state, _ = pipe.step(state, X)
        return state

    compare("state", run(True).replace(step=0), run(False).replace(step=0))


def test_a_state_without_delay_has_the_tree_that_checkpoints_have():
    state, late = (pipeline(delay=delay).init(PARAMS, X) for delay in (0, 1))
    paths = {jax.tree_util.keystr(path[:1]) for path, _ in jax.tree_util.tree_leaves_with_path(state)}
    assert paths == {".params", ".opt_state", ".step"}
    assert "previous" not in serialization.to_state_dict(state)
    assert ".previous" in {jax.tree_util.keystr(path[:1]) for path, _ in jax.tree_util.tree_leaves_with_path(late)}
    equal(serialization.from_state_dict(late, serialization.to_state_dict(late)), late)


def versions_alive(shape, devices):
    buffers = {
        shard.data.unsafe_buffer_pointer()
        for array in jax.live_arrays()
        if array.shape == shape and not array.is_deleted()
        for shard in array.addressable_shards
        if shard.device in devices
    }
    return len(buffers)


def test_there_are_two_versions_of_the_weights_at_the_fullest(monkeypatch):
    """Counted after every instruction of steps in flow; plain sgd has no other arrays of this shape."""
    monkeypatch.setattr("jaxpp.lowering.step.ZEROED", 0)  # as of large stages: the first backward makes the sums
    shape = (37, 37)

    pipe = jaxpp.Pipeline(loss_of_list, optax.sgd(0.1), num_stages=4, num_microbatches=4, delay=1)
    x = jnp.ones((8, 37))
    state = pipe.init(lambda key: [jax.random.normal(key, shape)] * 4, KEYS[0], x)
    for _ in range(2):
        state, _ = pipe.step(state, x)
    devices, found = jax.devices()[:4], []

    def observed(parts, *_, plain=execute.dispatch):
        for run, numbers in parts:
            for number in numbers:
                plain([(run, [number])])
                found.append(versions_alive(shape, devices))

    monkeypatch.setattr("jaxpp.engine.engine.hand_over", observed)
    monkeypatch.setattr("jaxpp.engine.tail.hand_over", observed)
    gc.collect()
    state, _ = pipe.step(state, x)
    assert max(found) <= 3 * 4, "two of each weight, and the sum of its gradients"
    pipe.flush(state)
    assert versions_alive(shape, devices) == 2 * 4


@pytest.mark.parametrize("replicas", [1, 2])
def test_every_moment_of_steps_in_flow_is_as_forecast(monkeypatch, replicas):
    given = {"num_stages": 4, "num_microbatches": 6, "data_parallel": replicas}
    pipe = jaxpp.Pipeline(loss_of_list, OPTIMIZERS["clipped adamw"], delay=1, **given)
    x = jnp.ones((48, 40), jnp.float32)
    state = pipe.init([jnp.eye(40, dtype=jnp.float32)] * 4, x)
    for _ in range(2):
        state, _ = pipe.step(state, x)
    lowered = pipe.engine.plan("update", x, None)[1]
    liveness = liveness_in_flow(step_liveness(pipe.engine, lowered), lowered)
    found, device = [], jax.devices()[replicas]  # which holds no batch
    gc.collect()

    def observed(parts, *_):
        for run, numbers in parts:
            for instruction in map(run.plan.instructions.__getitem__, numbers):
                values = instruction.call(*(run.slots[k] for k in instruction.inputs))
                for slot, value in zip(instruction.outputs, values, strict=True):
                    run.slots[slot] = jax.block_until_ready(value)
                del value, values
                found.append(live_bytes(device))
                for slot in instruction.free:
                    run.slots[slot] = None

    monkeypatch.setattr("jaxpp.engine.tail.hand_over", observed)
    gc.collect()
    state, _ = pipe.step(state, x)
    levels = liveness.levels[liveness.devices[1]][1:-1].sum(axis=1)  # of its rank
    differences = np.asarray(found) - levels - (found[0] - levels[0])  # other tests may have left arrays there
    assert len(found) == len(levels)
    wrong = [f"{line.label}: {d}" for line, d in zip(liveness.lines, differences, strict=True) if d // 64]
    assert not wrong, wrong
    assert max(levels) > 4 * 40 * 40 * 4, "two weights and two moments, at least"
    assert max(pipe.forecast([x[:40]] * 4, x).peaks.values()) >= max(levels)


def test_ctrl_c_leaves_a_step_undone_or_done(monkeypatch):
    results = []
    for interrupt in (None, 0, 3, 20, 40):
        pipe, state = begun()
        for _ in range(2):
            state, _ = pipe.step(state, X)
        count = itertools.count()
        if interrupt is not None:

            def press(_, at=interrupt, count=count):
                if next(count) == at:
                    signal.raise_signal(signal.SIGINT)

            with before_each(monkeypatch, press), pytest.raises(KeyboardInterrupt):
                pipe.step(state, X)
            state = pipe.state
        while state.step < 4:
            state, _ = pipe.step(state, X)
        results.append(jax.device_get(state))
    for each in results[1:]:
        equal(each, results[0])


def test_ctrl_c_while_a_look_takes_the_lock_of_a_step_leaves_it_free_for_other_threads():
    # Between the call that takes a lock and the ``try`` that gives it back, Python handles signals.
    class Pressed:
        def __init__(self, lock):
            self.lock, self.release = lock, lock.release

        def acquire(self, blocking=True):
            taken = self.lock.acquire(blocking)
            signal.raise_signal(signal.SIGINT)
            return taken

    pipe, state = begun()
    state, _ = pipe.step(state, X)
    tail = tail_of(state, pipe.engine)
    tail._lock = Pressed(lock := tail._lock)
    with pytest.raises(KeyboardInterrupt):
        state.params  # noqa: B018  (it is looked at)
    found = []
    thread = threading.Thread(target=lambda: found.append(lock.acquire(timeout=0.1)))
    thread.start()
    thread.join()
    assert found == [True]


def test_a_step_that_fails_leaves_the_step_before_it_whole(monkeypatch):
    pipe, state = begun()
    expected = state = pipe.step(state, X)[0]
    fails = failing(monkeypatch, lambda instruction: str(instruction.about.action) == "0F2")
    with fails, pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED"):
        pipe.step(state, X)
    assert pipe.state is expected
    other, start = begun()
    equal(expected, other.step(start, X)[0])
    pipe.step(expected, X)


def test_the_rest_of_a_step_that_fails_leaves_no_state_and_says_so(monkeypatch):
    pipe, state = begun()
    state, metrics = pipe.step(state, X)
    fails = failing(monkeypatch, lambda instruction: instruction.label == "update stage 1")
    with fails, pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED") as error:
        pipe.step(state, X)
    assert any("go on from a checkpoint" in note for note in error.value.__notes__)
    for ask in (lambda: state.params, lambda: pipe.state, lambda: metrics.grad_norm, lambda: pipe.step(state, X)):
        with pytest.raises(StateError, match="a step that failed in part left no state"):
            ask()
    pipe.step(pipe.init(PARAMS, X), X)


def test_a_step_that_fails_holds_nothing_of_it(monkeypatch):
    pipe, state = begun()
    seen, plain = [], execute.dispatch

    def failing(parts, observer, threads):
        ((run, _),) = parts
        plain([(run, range(20))], observer)
        seen.append(run.slots)
        raise RuntimeError("RESOURCE_EXHAUSTED")

    monkeypatch.setattr("jaxpp.engine.engine.hand_over", failing)
    with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED"):
        pipe.step(state, X)
    assert seen == [[]], "a traceback that is kept holds the list, and nothing in it"
    monkeypatch.undo()
    pipe.step(state, X)


def test_a_profile_shows_steps_that_overlap():
    pipe = pipeline(delay=1)
    state = pipe.init(PARAMS, X)
    profile = pipe.profile(state, X, num_batches=3, num_steps=1)
    schedule = pipe.schedule
    assert profile.schedule.rows == jaxpp.schedule.flow(schedule, 3).rows
    ends = {span.action: span for span in profile.isolated if span.action is not None and not span.sends}
    assert len(ends) == 3 * len(schedule.order)
    count = schedule.num_microbatches
    last, first = ends[Action(0, Kind.B, count - 1)], ends[Action(0, Kind.F, count)]
    assert first.end <= last.start, "a forward of the second step runs before the last backward of the first"
    assert profile.heading.startswith("1f1b, 3 steps in flow: 2 ranks") and profile.memory == ()
    assert "temporaries" not in str(profile), "of steps in flow no memory was looked at"
    assert "<svg" in profile._repr_html_() or "<img" in profile._repr_html_()
    updates = [span for span in profile.isolated if span.label.startswith("update")]
    assert len({span.label for span in updates}) * 3 == len(updates) > 0
    pipe.step(state, X)  # the profile trained a copy
    other = pipeline()
    state = other.init(PARAMS, X)
    with pytest.raises(ArgumentError, match="make the pipeline with delay=1"):
        other.profile(state, X, num_batches=2)
    with jax.debug_nans(True), pytest.raises(ArgumentError, match="each of these steps ends before the next begins"):
        pipe.profile(pipe.state, X, num_batches=2)


def test_the_plan_of_steps_that_overlap_makes_what_the_steps_make():
    pipe = pipeline(delay=1)
    state, _ = pipe.step(pipe.init(PARAMS, X), X)  # after a step, the parameters before it are others
    pipe.flush(state)
    plan, lowered = pipe.engine.plan("update", X, None)
    first = Execution(plan, [*pipe.engine.copy(pipe.engine.leaves(state.held)).flat(), X]).slots
    flow = zip(lowered.bound.flow.lines(3), flowing_plan(plan, lowered, 3).instructions, strict=True)
    lines = [(step, plan.instructions[number], line) for (step, number), line in flow]
    values, last = {}, {}
    for _, slot, same in sorted(
        (step, *pair) for step, known, line in lines for pair in zip(known.inputs, line.inputs, strict=True)
    ):
        values.setdefault(same, first[slot])  # of what no line makes: the first state, the batches, constants
    for step, known, line in lines:
        values.update(zip(line.outputs, line.call(*(values[slot] for slot in line.inputs)), strict=True))
        if step == 2:
            last.update(zip((*known.inputs, *known.outputs), (*line.inputs, *line.outputs), strict=True))
    found = lowered.outcome([values[last[slot]] for slot in plan.outputs])
    for _ in range(3):
        state, metrics = pipe.step(state, X)
    equal((found.state, found.loss, found.grad_norm), (pipe.engine.leaves(state.held), metrics.loss, metrics.grad_norm))


@pytest.mark.parametrize(("schedule", "fuse"), [("1f1b", True), ("zb-h2", False)])
def test_a_profile_of_steps_in_flow_has_the_actions_in_the_order_in_which_they_were_handed_over(schedule, fuse):
    pipe = pipeline(delay=1, stages=3, microbatches=4, schedule=schedule, fuse=fuse)
    profile = pipe.profile(pipe.init(PARAMS, X), X, num_batches=2, num_steps=1)
    assert profile.schedule.rows == jaxpp.schedule.flow(pipe.schedule, 2).rows
    known = {action for action in profile.schedule.order if (action.stage, action.kind) != (0, "I")}  # which has nothing to do
    assert set(profile.actions) == known
    for rank, row in enumerate(profile.schedule.rows):
        ran = [span for span in profile.spans if span.rank == rank and span.action is not None and not span.sends]
        assert [span.action for span in sorted(ran, key=lambda span: span.begun)] == [each for each in row if each in known]
    assert all(sum(causes) == pytest.approx(idle) for causes, idle in zip(profile.causes, profile.idle, strict=True))


def test_no_stage_waits_for_the_update_of_another():
    """Without a norm over all stages, the update of a stage needs nothing that another stage does but its backwards."""
    pipe = pipeline(optimizer=optax.adam(1e-2), stages=3, microbatches=4, delay=1)
    pipe.init(PARAMS, X)
    _, lowered = pipe.engine.plan("update", X, None)
    labels = [line.label for line in lowered.bound.lines]
    assert (
        lowered.bound.flow.body < labels.index("update stage 2") < labels.index("update stage 1") < labels.index("update stage 0")
    )
    assert labels.index("update stage 2") < labels.index("0B3")


def test_a_step_whose_forwards_read_what_the_update_makes_does_not_flow():
    program = Program(lambda *values: list(values), (), (), ())
    old, new, activation, grad = (
        Name(0, Ref(role, 0, source=k)) for k, role in enumerate((Role.PARAM, Role.PARAM, Role.RESIDUAL, Role.GRAD))
    )
    builder = Builder()
    builder.compute("0F0", program, 0, [old], [activation], Action(0, Kind.F, 0))
    builder.compute("0B0", program, 0, [activation], [grad], Action(0, Kind.B, 0))
    builder.compute("update", program, 0, [grad], [new])
    one = make("1f1b", num_ranks=1, num_microbatches=1)
    lines = builder.finish([old], [new])
    flowing = in_flow(lines, ["here"], one, {}, [])
    assert (flowing.flow.body, [line.label for line in flowing.lines]) == (1, ["0F0", "0B0", "update"])
    assert in_flow(lines, ["here"], one, {old: new}, []) is lines


TOLD = [
    lambda metrics: metrics.grad_norm,
    lambda metrics: metrics.by_stage,
    str,
    dict,
    jax.block_until_ready,
    lambda metrics: json.dumps(metrics.to_dict()),
    lambda metrics: pickle.loads(pickle.dumps(metrics)).squares,  # noqa: S301  (our own)
    lambda metrics: copy.deepcopy(metrics).grad_norm,
]
LOOKS = [
    lambda state: state.params,
    lambda state: state.opt_state,
    lambda state: state.previous,
    lambda state: state.replace(step=7),
    str,
    jax.tree.leaves,
    jax.block_until_ready,
    copy.copy,
    serialization.to_state_dict,
]


@jax.custom_vjp
def overflowing(loss, limit):
    """The loss, whose backward overflows where it starts from more than the limit."""
    return loss


overflowing.defvjp(lambda loss, limit: (loss, limit), lambda limit, seed: (jnp.where(seed > limit, jnp.inf, seed), None))


class Late(NamedTuple):
    """A pipeline whose steps flow, and in what its plain loop differs."""

    options: dict[str, Any] = {}  # noqa: RUF012  (nobody writes it)
    bad: tuple[int, ...] = ()  # the steps whose batch makes gradients that are not finite
    limit: float = np.inf  # above which a backward overflows
    optimizer: Any = OPTIMIZERS["clipped adamw"]

    def loss_fn(self, params, x):
        return overflowing(loss_fn(params, x), self.limit)

    @property
    def scale(self):
        return self.options.get("loss_scale")


KINDS = {
    "clipped adamw": Late(),
    "overflows": Late({"loss_scale": DynamicScale(scale=2.0**10, growth_interval=3)}, (0, 3, 7, 8, 13, 14, 15)),
    "a constant scale": Late({"loss_scale": DynamicScale(scale=8.0, growth_factor=1.0, backoff_factor=1.0)}, (1, 4, 5)),
    "an optimizer in host memory": Late({"host": "optimizer"}),
    "a state in host memory": Late({"host": "params"}),
    "a scale that grows too large": Late({"loss_scale": DynamicScale(scale=16.0, growth_interval=1)}, (), 100.0),
}


def batch_of(kind, number):
    return np.full(X.shape, np.inf) if number in KINDS[kind].bad else np.asarray(X, np.float64)


@functools.cache
def trajectory(kind="clipped adamw", num_steps=24):
    """The states of training on one device, the gradients late by one step; and the loss and the norm of each step.

    With a loss scale, gradients are made with the scale that was known when their parameters were, and divided by it. Each step in
    which they are not finite leaves parameters and optimizer as they are and makes the newest scale smaller.
    """
    it, params = KINDS[kind], jax.tree.map(lambda leaf: leaf.astype(jnp.float64), PARAMS)
    before, found, moments = params, [], it.optimizer.init(params)
    scale = old = 1.0 if it.scale is None else it.scale.scale
    count = 0
    for number in range(num_steps):
        made = [
            jax.value_and_grad(lambda p, x, by: by * it.loss_fn(p, x))(before, x, old) for x in np.split(batch_of(kind, number), 4)
        ]
        loss, grads = jax.tree.map(lambda *parts, old=old: sum(parts) / 4 / old, *made)
        norm, finite = optax.tree.norm(grads), all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(grads))
        found.append(((params, moments, before), (scale, old), loss, norm, finite))
        before, old = params, scale
        if finite:
            updates, moments = it.optimizer.update(grads, moments, params)
            params = optax.apply_updates(params, updates)
        if it.scale is not None:
            grows = count == it.scale.growth_interval
            scale *= (it.scale.growth_factor if grows else 1.0) if finite else it.scale.backoff_factor
            count = 0 if grows or not finite else count + 1
    return found


def test_whoever_looks_at_metrics_goes_on_training():
    with jax.enable_x64(True):
        pipe = pipeline(optimizer=OPTIMIZERS["clipped adamw"], stages=3, microbatches=4, delay=1)
        known, x = trajectory(), X.astype(jnp.float64)
        for look in TOLD:
            state = pipe.init(known[0][0][0], x)
            for number in range(3):
                state, metrics = pipe.step(state, x)
                look(metrics)
                compare("metrics", (metrics.loss, metrics.grad_norm), known[number][2:4])
            compare("state", (state.params, state.opt_state, state.previous), known[3][0])


class Session:
    """What a user may do in any order, with what must come of it: ``trajectory`` at the number of steps taken."""

    def __init__(self, pipe, kind, seed, monkeypatch):
        self.pipe, self.kind, self.rng, self.monkeypatch = pipe, kind, np.random.default_rng(seed), monkeypatch
        self.known, self.x, self.done, self.elsewhere = trajectory(kind), X.astype(jnp.float64), [kind], False
        self.start(0)

    def start(self, step):
        self.state, self.metrics, self.old = self.pipe.init(self.known[0][0][0], self.x), None, None
        while self.state.step < step:
            self.state, self.metrics = self.pipe.step(self.state, self.batch)

    @property
    def batch(self):
        return batch_of(self.kind, self.state.step)

    def run(self, num_operations):
        names = [name for name in dir(Session) if name.startswith("op_")]
        for _ in range(num_operations):
            name = str(self.rng.choice(names)) if self.rng.random() < 0.6 else "op_step"
            self.done.append(name)
            getattr(self, name)()
            if self.state.step > len(self.known) - 3:
                break
        self.is_right()
        assert self.pipe.state.step == self.state.step

    def is_right(self, state=None):
        state = self.state if state is None else state
        expected, scales, *_ = self.known[state.step]
        compare(str(self.done), (state.params, state.opt_state, state.previous), expected)
        if state.loss_scale != ():
            assert (float(state.loss_scale.scale), float(state.previous_scale)) == scales, self.done

    def op_step(self):
        old = self.state
        self.state, self.metrics = self.pipe.step(old, self.batch)
        self.old, self.elsewhere = None if self.elsewhere else old, False

    def op_keep_the_old_state(self):
        kept, (self.state, self.metrics), self.old = self.state, self.pipe.step(self.state, self.batch, donate=False), None
        self.is_right(kept)

    def op_metrics(self):
        if self.metrics is not None:
            TOLD[self.rng.integers(len(TOLD))](self.metrics)
            *_, loss, norm, finite = self.known[self.metrics.step - 1]
            assert self.metrics.finite in (None, finite)
            if finite:
                compare(str(self.done), (self.metrics.loss, self.metrics.grad_norm), (loss, norm))

    def op_state(self):
        LOOKS[self.rng.integers(len(LOOKS))](self.state)

    def op_flush(self):
        assert self.pipe.flush(self.state) is self.state

    def op_evaluate(self):
        compare(str(self.done), self.pipe.evaluate(self.state, self.x).loss, loss_fn(self.known[self.state.step][0][0], self.x))

    def op_pickle(self):
        self.is_right(pickle.loads(pickle.dumps(self.state)))  # noqa: S301  (our own)

    def op_copy(self):
        self.state, self.old = copy.deepcopy(self.state), None
        self.elsewhere = "host" in KINDS[self.kind].options  # what waits is copied to devices, and a step takes copies of that

    def op_thread(self):
        with ThreadPoolExecutor(1) as pool:
            looks = pool.submit(LOOKS[self.rng.integers(len(LOOKS))], self.state)
            self.op_metrics()
            looks.result()

    def op_forget(self):
        del self.state, self.metrics
        self.state, self.metrics = self.pipe.state, None

    def op_let_go(self):
        del self.pipe.state
        self.op_old()
        self.op_step()

    def op_old(self):
        for use in (self.pipe.step, self.pipe.evaluate):
            if self.old is not None:
                with pytest.raises(StateError, match="consumed by an earlier step"):
                    use(self.old, self.x)

    def op_wrong_batch(self):
        with pytest.raises(BatchError):
            self.pipe.step(self.state, self.x[:1])

    def op_fail(self):
        """A program fails: of this step, which then has changed nothing; or of the rest of the step before, whose state is lost."""
        saved = jax.device_get(self.state) if self.rng.random() < 0.5 else None
        count, fails = itertools.count(), self.rng.integers(60)
        step, rest = self.state.step, tail_of(self.state, self.pipe.engine)
        with failing(self.monkeypatch, lambda _: next(count) == fails), contextlib.suppress(RuntimeError):
            self.op_step()
        if rest is not None and rest.failed:
            with pytest.raises(StateError, match="failed in part left no state"):
                self.pipe.step(self.state, self.x)
            if saved is None:
                self.start(step)
            else:
                self.state, self.metrics = self.pipe.step(saved, self.batch)
                self.old = None

    def op_save_and_open(self):
        saved = serialization.to_state_dict(self.state)
        self.state, self.old = serialization.from_state_dict(self.state, saved), None

    def op_interrupt(self):
        """Ctrl-C before any instruction leaves a step undone, or done."""
        count, at, step = itertools.count(), self.rng.integers(60), self.state.step
        press = lambda _: next(count) == at and signal.raise_signal(signal.SIGINT)  # noqa: E731
        with before_each(self.monkeypatch, press), contextlib.suppress(KeyboardInterrupt):
            self.op_step()
        self.state, self.metrics, self.old = self.pipe.state, None, None
        assert self.state.step in (step, step + 1)


@pytest.mark.parametrize("first", [0, pytest.param(10, marks=pytest.mark.long), pytest.param(100, marks=pytest.mark.slow)])
def test_whatever_a_user_does_in_whatever_order_training_is_that_of_one_device(first, monkeypatch):
    with jax.enable_x64(True):
        for number, (kind, it) in enumerate(KINDS.items()):
            pipe = pipeline(it.loss_fn, it.optimizer, stages=3, microbatches=4, delay=1, **it.options)
            for seed in range(first + number, first + max(len(KINDS), 5 * first), len(KINDS)):
                Session(pipe, kind, seed, monkeypatch).run(40)


def test_the_backwards_of_a_step_do_not_wait_for_its_scale():
    """The rule is there so that they need not: steps flow as they do without a scale."""
    found = []
    for options in ({}, KINDS["overflows"].options):
        pipe, _ = begun(**options)
        _, lowered = pipe.engine.plan("update", X, None)
        found.append([str(line.action) for line in lowered.bound.lines[: lowered.bound.flow.body] if line.action])
    assert found[0] == found[1]
    assert any("B" in action for action in found[0])


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[] if kind == "overflows" else pytest.mark.long) for kind in KINDS])
def test_each_step_that_is_not_finite_is_skipped_and_lowers_the_scale_once(x64, kind):
    it, known = KINDS[kind], trajectory(kind)
    skipped = [number for number, (*_, finite) in enumerate(known) if not finite]
    assert it.scale is None or any(number + 1 in skipped for number in skipped), "two in a row"
    for stages, microbatches, ends in ((2, 4, True), (3, 4, False)):
        pipe = pipeline(it.loss_fn, it.optimizer, stages=stages, microbatches=microbatches, delay=1, **it.options)
        state = pipe.init(known[0][0][0], batch_of("clipped adamw", 0))
        for number, (expected, scales, loss, norm, finite) in enumerate(known[:-1]):
            compare("state", (state.params, state.opt_state, state.previous) if ends else (), expected if ends else ())
            state, metrics = pipe.step(state, batch_of(kind, number))
            if finite:
                compare("metrics", (metrics.loss, metrics.grad_norm) if ends else metrics.loss, (loss, norm) if ends else loss)
            if it.scale is not None and ends:
                assert (bool(metrics.finite), float(state.previous_scale)) == (finite, scales[0])
        compare("state", (state.params, state.opt_state, state.previous), known[-1][0])
        assert pipe.verify(state, batch_of("clipped adamw", 0))


@pytest.mark.parametrize("num_steps", [40, pytest.param(1000, marks=pytest.mark.long)])
def test_threads_that_look_while_another_trains_disturb_nothing(num_steps):
    """Loggers read metrics of steps in flow, and one evaluates: what they read, and where training ends, is as without them."""
    results, switches = [], sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for num_threads in (0, 3):
            pipe = pipeline(optimizer=OPTIMIZERS["clipped adamw"], stages=3, microbatches=4, delay=1)
            state, told, ends = pipe.init(PARAMS, X), [], threading.Event()

            def log(number, pipe=pipe, told=told, ends=ends):
                looks = itertools.cycle(TOLD[number:] + TOLD[:number])
                while not ends.is_set():
                    for state, metrics in told[-2:]:
                        next(looks)(metrics)
                        if number == 0:
                            with contextlib.suppress(StateError):  # consumed by a later step
                                pipe.evaluate(state, X)

            with ThreadPoolExecutor(max(1, num_threads)) as pool:
                loggers = [pool.submit(log, number) for number in range(num_threads)]
                try:
                    for _ in range(num_steps):
                        state, metrics = pipe.step(state, X)
                        told.append((state, metrics))
                finally:
                    ends.set()
                for logger in loggers:
                    logger.result()
            results.append((state, [dict(each) for _, each in told]))
    finally:
        sys.setswitchinterval(switches)
    equal(*results)


@pytest.mark.parametrize("delay", [0, 1])
def test_of_threads_that_step_one_state_one_does_and_the_others_are_told_that_it_is_consumed(delay):
    pipe, state = begun(delay)
    with ThreadPoolExecutor(4) as pool:
        for number in range(1, 11):
            calls = [pool.submit(pipe.step, state, X) for _ in range(4)]
            found = [call.exception() or call.result()[0] for call in calls]
            (state,) = (each for each in found if isinstance(each, jaxpp.State))
            refused = [each for each in found if isinstance(each, StateError)]
            assert len(refused) == 3
            assert all("go on with state = pipe.state" in str(error) for error in refused)
            assert pipe.state.step == state.step == number


def test_nothing_stays_of_a_step_in_flow_once_its_state_and_metrics_are_gone():
    pipe = pipeline(stages=3, microbatches=4, delay=1)
    state, metrics = pipe.step(pipe.init(PARAMS, X), X)
    del state, metrics, pipe.state
    gc.collect()
    before = sum(array.ndim > 0 for array in jax.live_arrays())  # the detector of dead stages waits for its sums
    gc.disable()
    try:
        for looks in (False, True):
            state = pipe.init(PARAMS, X)
            for _ in range(3):
                state, metrics = pipe.step(state, X)
                if looks:
                    assert state.params and metrics.grad_norm
            del state, metrics, pipe.state
            assert sum(array.ndim > 0 for array in jax.live_arrays()) <= before
    finally:
        gc.enable()


def test_states_cross_between_delay_and_none(tmp_path):
    """A state without previous parameters begins with the parameters for them; one that has them is one without, too."""
    late, plain = (pipeline(stages=3, microbatches=4, delay=delay) for delay in (1, 0))
    flows, waits = late.init(PARAMS, X), plain.init(PARAMS, X)
    for _ in range(2):
        flows, waits = late.step(flows, X)[0], plain.step(waits, X)[0]
    with_previous, without = jax.device_get(flows), jax.device_get(waits)
    expected = [late.step(without.replace(previous=without.params), X)[0], plain.step(with_previous.replace(previous=()), X)[0]]
    expected = jax.device_get(expected)
    late_shapes, plain_shapes = late.abstract_state(PARAMS, X), plain.abstract_state(PARAMS, X)

    def orbax(state, target):
        path = tmp_path / str(state.previous == ())
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(path, state)
            checkpointer.wait_until_finished()
            return checkpointer.restore(path, target)

    def flax(state, target):
        return serialization.from_state_dict(target, serialization.to_state_dict(state))

    for opened in (without, orbax(without, late_shapes.replace(previous=())), flax(without, with_previous), waits):
        equal(late.step(opened, X)[0], expected[0])
    shapes = plain_shapes.replace(previous=plain_shapes.params)
    for opened in (with_previous, orbax(with_previous, shapes), flax(with_previous, without), flows):
        equal(plain.step(opened, X)[0], expected[1])
    whole, some = (pipeline(optimizer=optax.sgd(0.1), delay=1, trains=trains) for trains in (None, ("b", "c")))
    state, few = whole.step(whole.init(PARAMS, X), X)[0], some.init(PARAMS, X)
    before = jax.device_get(state.params)
    equal(some.step(state, X)[0].previous, before)
    equal(whole.step(few, X)[0].previous, PARAMS)


@pytest.mark.long
def test_a_state_with_a_scale_crosses_too():
    late, plain = (pipeline(stages=3, microbatches=4, delay=delay, loss_scale=DynamicScale()) for delay in (1, 0))
    saved, without = (jax.device_get(pipe.step(pipe.init(PARAMS, X), X)[0]) for pipe in (late, plain))
    assert late.step(without, X)[0].previous_scale == without.loss_scale.scale
    assert plain.step(saved, X)[0].previous_scale == ()


def test_of_a_late_state_all_can_wait_and_then_a_step_ends_before_the_next_begins():
    pipe, _ = begun()
    assert [options.host for options in pipe.engine.options.hosted()] == ["optimizer", "params"]
    pipe, state = begun(host="params")
    state, _ = pipe.step(state, X)
    assert tail_of(state, pipe.engine) is None
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves((state.params, state.previous))} == {"pinned_host"}


def tier(seed):
    return [] if seed < 2 else pytest.mark.long if seed < 8 else pytest.mark.slow


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=tier(seed)) for seed in range(100)])
@pytest.mark.filterwarnings("ignore::jaxpp.UnevenStagesWarning", "ignore::jaxpp.MicrobatchWarning")
def test_random_models_flow_with_the_bits_of_steps_that_end(seed):
    rng, model = np.random.default_rng(seed), random_model(seed)
    order = schedule_for(str(rng.choice(NAMES)), 4, int(rng.integers(2, 5)))
    options = {"num_stages": 4, "num_microbatches": 2}
    if order is not None:
        options |= {"schedule": order, "num_microbatches": order.num_microbatches}
    optimizer = list(OPTIMIZERS.values())[rng.integers(2)]
    results = []
    for ends in (False, True):
        pipe = jaxpp.Pipeline(model.loss_fn, optimizer, delay=1, **options)
        state = pipe.init(model.params, model.batch)
        for _ in range(3):
            state, metrics = pipe.step(state, model.batch, model.key)
            if ends:
                pipe.flush(state)
        results.append((state, metrics.loss, metrics.grad_norm))
    equal(*results)
