"""What really moves, what stays, and what is alive: watched while steps run."""

import gc
import re
import weakref

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpp
from jaxpp.engine.engine import open_engine
from jaxpp.lowering.lower import lower
from jaxpp.options import Options
from jaxpp.runtime import send
from jaxpp.schedule import SCHEDULES, Kind, make, simulate
from jaxpp.schedule.registry import make_for_stages
from jaxpp.stages.program import Role
from jaxpp.verify import GRAD_FLOOR, compare, oracle
from tests.models import PARAMS, X, gpt_case, loss_fn, mlp_case

SHORT = {"1f1b"}
"""The schedules of the short tier, where the others prove the same."""
OPTIONS = {"has_aux": True, "weight": None, "cuts": None, "devices": None}


def live_bytes() -> int:
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


def residual_peaks(case, name, p, m):
    """The most (stage, microbatch) residuals a rank holds at once, read off the names of the plan's values."""
    v = SCHEDULES[name].stages_per_rank
    engine = open_engine(
        Options.of(case.loss_fn, num_stages=p * v, num_microbatches=m, schedule=name, balance="flops", **OPTIONS),
        None,
        (case.params,),
        case.batch,
        case.key,
    )
    owner = engine.options.schedule.stage_to_rank
    draft = lower(engine.preparer.step(case.batch, case.key), engine.options.schedule.order)
    last = {}
    for number, line in enumerate(draft.lines):
        last.update((value, number) for value in line.inputs)
    alive, peaks = [set() for _ in range(p)], [0] * p
    for number, line in enumerate(draft.lines):
        for value in line.outputs:
            if value.ref.role == Role.RESIDUAL:
                alive[owner[value.stage]].add(value)
        for rank in range(p):
            peaks[rank] = max(peaks[rank], len({(value.stage, value.microbatch) for value in alive[rank]}))
            alive[rank] = {value for value in alive[rank] if last.get(value, -1) > number}
    assert not any(alive)
    return peaks


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name not in (*SHORT, "gpipe"))) for name in SCHEDULES]
)
def test_a_run_holds_the_residuals_that_the_simulation_counts(name):
    case = mlp_case(batch_size=16)
    schedule = make(name, num_ranks=3, num_microbatches=8)
    assert residual_peaks(case, name, 3, 8) == list(simulate(schedule).peak_residuals)


@pytest.mark.parametrize("m", [2, 8, pytest.param(100, marks=pytest.mark.long)])
def test_1f1b_holds_p_minus_r_microbatches_and_gpipe_all_of_them(m):
    case = mlp_case(batch_size=100)
    assert residual_peaks(case, "1f1b", 4, m) == [min(m, 4 - r) for r in range(4)]
    assert residual_peaks(case, "gpipe", 4, m) == [m] * 4
    assert residual_peaks(case, "naive", 4, m) == [1] * 4


class Watch:
    """Sees every instruction of a run: keeps weak references to what it made, and the devices of it."""

    def __init__(self):
        self.made = []
        self.sends = []

    def __call__(self, instruction, slots):
        values = [slots[i] for i in instruction.outputs]
        if instruction.label.startswith("send"):
            self.sends.append((instruction.label, values[0].nbytes))
        elif instruction.label[0].isdigit():
            self.made += [(instruction.label, weakref.ref(value), value.devices()) for value in values]


SLOW = {"gpipe", "looped-bfs", "zb-h2", "v-half", "v-min"}


@pytest.mark.parametrize(
    "schedule",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW) or [pytest.mark.long] * (name not in SHORT))
        for name in SCHEDULES
    ],
)
def test_after_a_step_no_residual_activation_or_cotangent_is_alive(schedule):
    case = mlp_case()
    pipe = jaxpp.Pipeline(case.loss_fn, optax.adam(1e-3), num_stages=4, num_microbatches=4, schedule=schedule, has_aux=True)
    state = pipe.init(case.init, jax.random.key(0), case.batch)
    watch = Watch()
    outcome = pipe.engine.run("update", pipe.engine.leaves(state.held), case.batch, None, observer=watch)
    kept = {id(leaf) for leaf in jax.tree.leaves(outcome)}
    jax.block_until_ready(outcome.grads)
    gc.collect()
    assert watch.made
    assert not [label for label, ref, _ in watch.made if ref() is not None and id(ref()) not in kept]


@pytest.mark.parametrize("schedule", ["zb-h1", pytest.param("1f1b", marks=pytest.mark.long)])
def test_a_residual_is_let_go_at_its_backward_not_at_the_end_of_the_step(schedule):
    case = mlp_case(batch_size=16)
    pipe = jaxpp.Pipeline(case.loss_fn, optax.sgd(0.1), num_stages=3, num_microbatches=4, schedule=schedule, has_aux=True)
    state = pipe.init(case.init, jax.random.key(0), case.batch)
    last = "B" if schedule == "1f1b" else "W"
    made, over, checked = {}, [], set()

    def observer(instruction, slots):
        for label in over[:-2]:  # the loop's own variables may hold on to what the line before it made
            assert not [ref for ref in made[label] if ref() is not None], f"{label} is held on to at {instruction.label}"
            checked.add(label)
        if instruction.label[0] in "01" and instruction.label[1] == "F":  # the last stage's rows are kept, to be joined
            made[instruction.label] = [weakref.ref(slots[i]) for i in instruction.outputs]
        over.append(instruction.label.replace(last, "F") if instruction.label[:2] in {f"0{last}", f"1{last}"} else "none")

    made["none"] = []
    pipe.engine.run("update", pipe.engine.leaves(state.held), case.batch, None, observer=observer)
    assert checked >= {f"{stage}F{i}" for stage in (0, 1) for i in range(4)}


@pytest.mark.long
def test_two_hundred_steps_leave_live_bytes_unchanged():
    case = mlp_case(batch_size=8)
    pipe = jaxpp.Pipeline(case.loss_fn, optax.adam(1e-3), num_stages=3, num_microbatches=4, has_aux=True)
    state = pipe.init(case.init, jax.random.key(0), case.batch)
    for _ in range(32):  # the detector looks at each of the first eight, then at each 16th, and holds the losses between
        state, metrics = pipe.step(state, case.batch)
        jax.block_until_ready((state, metrics))  # and a scalar of the last step, as after the others
    before = live_bytes()
    for _ in range(12 * 16):
        state, metrics = pipe.step(state, case.batch)
        jax.block_until_ready(
            (state, metrics)
        )  # what the detector waits for is then there at its next look, however slow the machine
    assert jnp.isfinite(metrics.loss)
    assert live_bytes() == before


@pytest.mark.long
def test_residuals_stay_on_the_device_of_their_stage():
    case = gpt_case()
    pipe = jaxpp.Pipeline(case.loss_fn, optax.sgd(0.1), num_stages=3, num_microbatches=2, has_aux=True)
    state = pipe.init(case.init, jax.random.key(0), case.batch)
    watch = Watch()
    pipe.engine.run("update", pipe.engine.leaves(state.held), case.batch, case.key, observer=watch)
    for label, _, devices in watch.made:
        assert devices == {pipe.stages[int(label[0])].device}


def test_the_sends_of_a_step_are_the_boundary_moves_and_nothing_more(monkeypatch):
    width, batch_size, p, m = 16, 24, 4, 6
    case = mlp_case(batch_size=batch_size, width=width)
    put, moved = jax.device_put, []

    def counted(value, *args, **kwargs):
        moved.append(sum(leaf.nbytes for leaf in jax.tree.leaves(value)))
        return put(value, *args, **kwargs)

    monkeypatch.setattr(jax, "device_put", counted)  # before init, which makes the plan
    monkeypatch.setattr(send, "direct_copy", lambda home: (None, frozenset()))  # every send is a device_put
    pipe = jaxpp.Pipeline(case.loss_fn, optax.sgd(0.1), num_stages=p, num_microbatches=m, has_aux=True)
    state = pipe.init(case.init, jax.random.key(0), case.batch)
    moved.clear()
    watch = Watch()
    pipe.engine.run("update", pipe.engine.leaves(state.held), case.batch, None, observer=watch)
    boundary = [size for label, size in watch.sends if re.match(r"send \d+[FB]\d+ ", label)]
    assert len(boundary) == 2 * (p - 1) * m
    assert sum(boundary) == 2 * (p - 1) * batch_size * width * 4
    others = [label for label, _ in watch.sends if not re.match(r"send \d+[FB]\d+ ", label)]
    feeds = [label for label in others if label.startswith("send batch")]
    assert len(feeds) == 2, "x to the first stage, y to the last"
    assert len(others) - len(feeds) == p - 1, "a vector of squared norms from each other stage"
    assert sorted(moved) == sorted(size for _, size in watch.sends)


def test_labels_are_sent_to_the_last_stage_only():
    case = mlp_case()
    pipe = jaxpp.Pipeline(case.loss_fn, optax.sgd(0.1), num_stages=4, has_aux=True)
    state = pipe.init(case.init, jax.random.key(0), case.batch)
    watch = Watch()
    pipe.engine.run("update", pipe.engine.leaves(state.held), case.batch, None, observer=watch)
    feeds = [label for label, _ in watch.sends if label.startswith("send batch")]
    assert feeds == ["send batch 0 to stage 0", "send batch 1 to stage 3"]


def biased(params, batch):
    h = jnp.tanh(batch @ params["a"] + params["p"] + params["tied"])
    h = jnp.tanh(h @ params["b"] + params["q"])
    return jnp.mean((h * params["tied"] + params["r"]) ** 2)


BIASED = {"a": jnp.eye(8) * 0.5, "b": jnp.eye(8) * 0.3} | {name: jnp.arange(8.0) / 9 for name in ("p", "q", "r", "tied")}


def test_small_gradients_stay_one_vector_until_the_update_unless_something_else_reads_them():
    x = jnp.linspace(-1, 1, 64).reshape(8, 8)
    apart = {name: value for name, value in BIASED.items() if name != "tied"} | {"s": jnp.ones(8)}

    def untied(params, batch):
        return biased(params | {"tied": 0.5}, batch) + params["s"].sum()

    for loss, params, unpacked in ((untied, apart, []), (biased, BIASED, ["unpack stage 0"])):
        pipe = jaxpp.Pipeline(loss, optax.adam(0.1), num_stages=2, num_microbatches=2)
        state = pipe.init(params, x)
        plan, _ = pipe.engine.plan("update", x, None)
        assert [line.label for line in plan.instructions if line.label.startswith("unpack")] == unpacked
        new, _ = pipe.step(state, x)
        grads = jax.grad(loss)(params, x)
        optimizer = optax.adam(0.1)
        updates, _ = optimizer.update(grads, optimizer.init(params), params)
        chex.assert_trees_all_close(jaxpp.gather(new.params), optax.apply_updates(params, updates), rtol=2e-5, atol=1e-6)
        found = jaxpp.value_and_grad(loss, num_stages=2, num_microbatches=2)(params, x)[1]
        chex.assert_trees_all_close(jaxpp.gather(found), grads, rtol=2e-5, atol=1e-6)


@pytest.mark.long
def test_a_tied_parameter_is_sent_once_and_its_gradient_comes_back_once():
    case = gpt_case()
    pipe = jaxpp.Pipeline(case.loss_fn, optax.sgd(0.1), num_stages=3, num_microbatches=4, has_aux=True)
    state = pipe.init(case.init, jax.random.key(0), case.batch)
    watch = Watch()
    pipe.engine.run("update", pipe.engine.leaves(state.held), case.batch, case.key, observer=watch)
    assert [label for label, _ in watch.sends if "embed/embedding" in label] == [
        "send embed/embedding to stage 2",
        "send grad of embed/embedding to stage 0",
    ]
    assert pipe.stages[2].borrowed == ("embed/embedding",)


@pytest.mark.long
def test_stages_on_one_device_send_nothing_to_one_another():
    case = mlp_case()
    pipe = jaxpp.Pipeline(case.loss_fn, optax.sgd(0.1), num_stages=4, has_aux=True, devices=jax.devices()[:2])
    state = pipe.init(case.init, jax.random.key(0), case.batch)
    assert [stage.device.id for stage in pipe.stages] == [0, 1, 0, 1]
    pipe.verify(state, case.batch)
    alone = jaxpp.Pipeline(case.loss_fn, optax.sgd(0.1), num_stages=4, has_aux=True, devices=jax.devices()[:1])
    state = alone.init(case.init, jax.random.key(0), case.batch)
    watch = Watch()
    alone.engine.run("update", pipe.engine.leaves(state.held), case.batch, None, observer=watch, donate=False)
    assert all(label.startswith("send batch") for label, _ in watch.sends)
    alone.verify(state, case.batch)


def test_a_plan_prints_one_line_an_instruction():
    case = mlp_case()
    engine = open_engine(
        Options.of(case.loss_fn, num_stages=2, num_microbatches=2, schedule="1f1b", **OPTIONS),
        None,
        (case.params,),
        case.batch,
        None,
    )
    plan, _ = engine.plan("grads", case.batch, None)
    lines = str(plan).splitlines()
    assert lines[0] == f"plan: {len(plan.instructions)} instructions, {plan.num_slots} slots"
    assert len(lines) == len(plan.instructions) + 1
    assert any(line.startswith("1B0 ") for line in lines)


def test_the_actions_are_dispatched_in_the_order_of_the_unit_clock():
    case = mlp_case()
    first = open_engine(
        Options.of(case.loss_fn, num_stages=4, num_microbatches=4, schedule="naive", **OPTIONS),
        None,
        (case.params,),
        case.batch,
        None,
    )
    for name in SCHEDULES:
        schedule = make_for_stages(name, num_stages=4, num_microbatches=4)
        engine = first.with_schedule(schedule)
        draft = lower(engine.preparer.step(case.batch, None), schedule.order)
        labels = [line.label for line in draft.lines if line.label[0].isdigit()]
        assert labels == [str(action) for action in schedule.order if (action.stage, action.kind) != (0, Kind.I)]
        for row in schedule.rows:
            run = [str(action) for action in row if (action.stage, action.kind) != (0, Kind.I)]
            assert [label for label in labels if label in run] == run


@pytest.mark.long
def test_the_last_stage_may_finish_microbatches_in_any_order():
    case = mlp_case(batch_size=12)
    rows = (
        [(0, Kind.F, i) for i in range(3)] + [(0, Kind.B, i) for i in (2, 0, 1)],
        [(1, Kind.F, 0), (1, Kind.F, 1), (1, Kind.F, 2), (1, Kind.B, 2), (1, Kind.B, 0), (1, Kind.B, 1)],
    )
    mine = jaxpp.schedule.Schedule("mine", tuple(tuple(jaxpp.schedule.Action(*cell) for cell in row) for row in rows))
    engine = open_engine(
        Options.of(case.loss_fn, num_stages=2, num_microbatches=3, schedule=mine, **OPTIONS), None, (case.params,), case.batch, None
    )
    found = engine.run("grads", engine.bring(case.params), case.batch, None)
    usual = jaxpp.value_and_grad(case.loss_fn, num_stages=2, num_microbatches=3, has_aux=True)(case.params, case.batch)
    np.testing.assert_allclose(found.loss, usual[0][0], rtol=1e-6)
    np.testing.assert_array_equal(found.aux["logits"], usual[0][1]["logits"])


def test_a_batch_the_user_overwrites_while_the_step_runs_is_not_read_again():
    case = mlp_case(batch_size=64, width=64)
    grad_fn = jaxpp.value_and_grad(case.loss_fn, num_stages=2, num_microbatches=8, has_aux=True)
    batch = jax.tree.map(np.array, case.batch)
    want = grad_fn(case.params, case.batch)
    for _ in range(20):
        mine = jax.tree.map(np.copy, batch)
        found = grad_fn(case.params, mine)
        for leaf in jax.tree.leaves(mine):
            leaf[...] = 0
        np.testing.assert_array_equal(found[0][0], want[0][0])


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_large_sums_of_gradients_are_begun_by_the_first_backward_and_added_to_by_the_others(schedule, monkeypatch):
    monkeypatch.setattr("jaxpp.lowering.step.ZEROED", 0)
    grad_fn = jaxpp.value_and_grad(loss_fn, num_stages=2, num_microbatches=4, schedule=schedule)
    for found, wanted in zip(*map(jax.tree.leaves, (grad_fn(PARAMS, X), jax.value_and_grad(loss_fn)(PARAMS, X))), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_each_microbatch_has_its_share_and_its_own_key():
    def loss_fn(params, batch, key):
        x = jnp.tanh(batch @ params["a"])
        x = jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x, 0) @ params["b"]
        return (x**2).mean()

    params, batch, key = {"a": jnp.eye(4) / 2, "b": jnp.eye(4) / 3}, jnp.arange(28.0).reshape(7, 4) / 28, jax.random.key(3)
    found = jaxpp.value_and_grad(loss_fn, num_stages=2, num_microbatches=3)(params, batch, key)
    loss, _, grads = oracle(loss_fn, params, batch, key, 3)
    compare("loss", found[0], loss)
    compare("grads", found[1], grads, floor=GRAD_FLOOR)
