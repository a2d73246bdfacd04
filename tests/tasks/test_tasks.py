"""theta[t] inside a pipeline: memory, exactness, compilations, communication, replicas, failures (rows D1 to D12)."""

import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

import jaxpp
from jaxpp.engine.engine import open_engine
from jaxpp.engine.state import State
from jaxpp.observe.memory.ledger import live_bytes
from jaxpp.runtime.edges import HOST_MEMORY
from jaxpp.stages.own_params import Joint, join_losses, join_optimizers
from jaxpp.tasks import host_store
from jaxpp.verify import compare
from tests import messages

WIDTH, CLASSES, BATCH = 16, 3, 24


def numbers(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype("float32") / 4


def theta():
    return {f"w{i}": numbers(i, WIDTH, WIDTH) for i in range(4)}


def a_set(seed, classes=CLASSES):
    return {"adapter": numbers(100 + seed, WIDTH, WIDTH), "head": numbers(200 + seed, WIDTH, classes)}


def sets(count):
    return {f"t{i}": a_set(i) for i in range(count)}


def loss_fn(params, task, batch, key):
    """The trunk's blocks, the task's adapter on the first stage and its head on the last, dropout between."""
    x, labels = batch
    x = jnp.tanh(jnp.tanh(x @ params["w0"]) @ params["w1"])
    x = x + jnp.tanh(x @ task["adapter"])
    x = x * jax.random.bernoulli(key, 0.8, x.shape)
    logits = jnp.tanh(jnp.tanh(x @ params["w2"]) @ params["w3"]) @ task["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), {"right": (logits.argmax(-1) == labels).mean()}


DATA = numbers(7, BATCH, WIDTH), np.random.default_rng(8).integers(0, CLASSES, BATCH)
SHARED, OWN = optax.adamw(1e-2), optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(3e-3))


def pipeline(bank, loss=loss_fn, **options):
    return jaxpp.Pipeline(loss, SHARED, **({"num_stages": 2, "num_microbatches": 2, "has_aux": True, "bank": bank} | options))


def opened(bank, **options):
    pipe = pipeline(bank, **options)
    return pipe, pipe.init(theta(), DATA)


def keys(count):
    return [jax.random.key(step) for step in range(count)]


@pytest.mark.parametrize("slots", [pytest.param(1, marks=pytest.mark.long), 2])
def test_device_bytes_do_not_depend_on_the_number_of_tasks(slots):
    found = []
    for count in (2, 2, 16, 64):  # the first finds what JAX keeps from one pipeline to the next
        gc.collect()  # what other tests have left behind
        before = [live_bytes(device) for device in jax.devices()[:2]]
        bank = jaxpp.Bank(sets(count), OWN, slots=slots)
        pipe, state = opened(bank)
        for step, key in enumerate(keys(4)):
            state, metrics = pipe.step(state, DATA, key, task=f"t{step % 2}")
            if slots == 2:
                pipe.prefetch(f"t{(step + 1) % 2}")
            jax.block_until_ready((state, metrics))  # the next step drops what was kept to look for dead stages
        bank.wait()
        found.append([live_bytes(device) - b for device, b in zip(jax.devices()[:2], before, strict=True)])
        del bank, pipe, state, metrics
    assert found[1] == found[2] == found[3]
    one = sum(leaf.nbytes for leaf in jax.tree.leaves(a_set(0))) * 3
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(theta())) * 3
    assert whole + slots * one <= sum(found[1]) < whole + slots * one + 512  # step counts, scalars and metrics besides


@pytest.mark.long
def test_a_larger_batch_fits_with_a_bank_than_with_all_tasks_resident_and_runs():
    many = sets(16)

    def resident(params, batch, key):
        return loss_fn(params["shared"], params["tasks"]["t3"], batch, key)

    def forecasts(size):
        batch = numbers(1, size, WIDTH), np.zeros(size, np.int64)
        all_resident = jaxpp.Pipeline(resident, SHARED, num_stages=2, num_microbatches=2, has_aux=True)
        key = jax.random.key(0)
        return (
            pipeline(jaxpp.Bank(many, OWN)).forecast(theta(), batch, key),
            all_resident.forecast({"shared": theta(), "tasks": many}, batch, key),
        )

    small, large = forecasts(48), forecasts(96)
    room = max(large[0].peaks.values())
    assert max(small[1].peaks.values()) > room  # not even half that batch, with all tasks there
    bank = jaxpp.Bank(many, OWN)
    pipe, state = opened(bank)
    batch = numbers(1, 96, WIDTH), np.zeros(96, np.int64)
    assert pipe.forecast(theta(), batch, jax.random.key(0), hbm=room).fits
    _, metrics = pipe.step(state, batch, jax.random.key(0), task="t3")
    assert np.isfinite(metrics.loss)
    with_one_slot = pipeline(jaxpp.Bank(many, OWN, slots=1)).forecast(theta(), batch, jax.random.key(0))
    size = 3 * sum(leaf.nbytes for leaf in jax.tree.leaves(a_set(0))) + 4  # parameters, moments, and adam's count
    assert sum(large[0].peaks.values()) - sum(with_one_slot.peaks.values()) == size


def test_theta_of_a_task_equals_an_all_resident_pipeline_bit_for_bit():
    order = ["t0", "t1", "t0", "t2", "t2", "t1", "t0"]
    bank = jaxpp.Bank(sets(3), OWN)
    pipe, state = opened(bank)
    resident = jaxpp.Pipeline(join_losses(loss_fn), join_optimizers(SHARED, OWN), num_stages=2, num_microbatches=2, has_aux=True)
    tasks = {}
    for name, params in sets(3).items():
        first = resident.init(Joint(theta(), params), DATA)
        tasks[name] = first.params.task, first.opt_state[1]
    shared = first.params.shared, first.opt_state[0]
    for step, (name, key) in enumerate(zip(order, keys(7), strict=True)):
        state, metrics = pipe.step(state, DATA, key, task=name)
        if step % 2:
            pipe.prefetch(order[step + 1])
        params, moments = tasks[name]
        whole, wanted = resident.step(State(Joint(shared[0], params), (shared[1], moments)), DATA, key)
        shared, tasks[name] = (whole.params.shared, whole.opt_state[0]), (whole.params.task, whole.opt_state[1])
        assert metrics.loss == wanted.loss and metrics.aux["right"] == wanted.aux["right"]
    same_bits((state.params, state.opt_state), shared)
    for name, wanted in tasks.items():
        same_bits((bank.params(name), bank.opt_state(name)), wanted)
    assert bank.host_store.traffic.prefetch_hits > 0
    assert str(bank).splitlines()[1].endswith("  t0, t1")  # where the pipeline runs: the two sets used last
    slots = "2 slots on each of {}, {}".format(*jax.devices()[:2])  # of both stages, which share a set
    assert slots in str(bank) and slots in repr(bank)


def same_bits(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.long
def test_sixty_four_tasks_compile_once_and_other_shapes_once_a_shape(monkeypatch):
    traced = []

    def counted(params, task, batch, key):
        traced.append(task["head"].shape)
        return loss_fn(params, task, batch, key)

    many = sets(64) | {f"wide{i}": a_set(i, classes=5) for i in range(2)}
    bank = jaxpp.Bank(many, OWN)
    pipe = jaxpp.Pipeline(counted, SHARED, num_stages=2, num_microbatches=2, has_aux=True, bank=bank)
    state = pipe.init(theta(), DATA)
    opened = []
    monkeypatch.setattr("jaxpp.tasks.runner.open_engine", lambda *a, **k: opened.append(open_engine(*a, **k)) or opened[-1])
    times, programs = len(traced), len(pipe.engine.programs)
    for name in list(many)[:64:9]:
        state, _ = pipe.step(state, DATA, jax.random.key(0), task=name)
    assert len(traced) == times and len(pipe.engine.programs) == programs
    for name in ("wide0", "wide1", "t0"):
        state, metrics = pipe.step(state, DATA, jax.random.key(0), task=name)
        pipe.verify(state, DATA, jax.random.key(1), task=name)
    assert len(opened) == 1, "one engine more for the wide sets, and the first one again for t0"
    assert np.isfinite(metrics.loss)


def test_other_tasks_do_not_move():
    bank = jaxpp.Bank(sets(4), OWN)
    pipe, state = opened(bank, data_parallel=2)
    before = {name: jax.tree.map(np.copy, (bank.params(name), bank.opt_state(name))) for name in bank}
    for key in keys(2):
        state, _ = pipe.step(state, DATA, key, task=["t1", "t3"])
    for name in ("t0", "t2"):
        same_bits((bank.params(name), bank.opt_state(name)), before[name])
    for name in ("t1", "t3"):
        assert not np.array_equal(bank.params(name)["head"], before[name][0]["head"])
        assert [int(leaf) for leaf in jax.tree.leaves(bank.opt_state(name)) if leaf.dtype == np.int32] == [2]


def test_only_theta_and_the_active_set_are_reduced_however_many_tasks_there_are():
    sizes = [sum(leaf.nbytes for leaf in jax.tree.leaves(tree)) for tree in (theta(), a_set(0))]
    scalars = 8  # the loss and the accuracy, with the gradients of the last stage
    for count in (4, 16):
        bank = jaxpp.Bank(sets(count), OWN)
        pipe, _ = opened(bank, data_parallel=2)
        found = pipe.collectives(DATA, jax.random.key(0), task="t2")
        assert found.num_bytes("all-reduce", ("data",)) == found.num_bytes() == sum(sizes) + scalars
        assert found.count() == 4  # Theta's and theta[t]'s on each of two stages; nothing is discovered
        assert not any(row.collective.on_host for row in found.rows)
        assert found.communicated == sum(sizes) + scalars
        assert found.parameter_bytes == sizes[0] + count * sizes[1]
        assert "communicated" in str(found).splitlines()[-1]


def oracle_steps(order, num_replicas, num_microbatches):
    """A plain loop over steps, replicas and microbatches, all tasks resident, each task's gradient a mean over its replicas."""
    shared, tasks = jax.tree.map(jnp.asarray, (theta(), sets(3)))
    moments, own = SHARED.init(shared), {name: OWN.init(params) for name, params in tasks.items()}
    grad_fn = jax.jit(jax.value_and_grad(loss_fn, argnums=(0, 1), has_aux=True))
    losses = []
    for names, key in zip(order, keys(len(order)), strict=True):
        found = []
        for i in range(num_replicas * num_microbatches):
            part = tuple(np.split(leaf, num_replicas * num_microbatches)[i] for leaf in DATA)
            found.append(grad_fn(shared, tasks[names[i // num_microbatches]], part, jax.random.fold_in(key, i)))
        losses.append(np.mean([value for (value, _), _ in found]))
        updates, moments = SHARED.update(mean([grads[0] for _, grads in found]), moments, shared)
        for name in dict.fromkeys(names):
            mine = [grads[1] for i, (_, grads) in enumerate(found) if names[i // num_microbatches] == name]
            change, own[name] = OWN.update(mean(mine), own[name], tasks[name])
            tasks[name] = optax.apply_updates(tasks[name], change)
        shared = optax.apply_updates(shared, updates)
    return losses, shared, tasks


def mean(trees):
    return jax.tree.map(lambda *leaves: sum(leaves) / len(leaves), *trees)


@pytest.mark.parametrize(
    ("num_replicas", "options"),
    [
        pytest.param(4, {"data_parallel": 4}, marks=pytest.mark.long),
        (2, {"data_parallel": 2, "schedule": "zb-h1"}),
        pytest.param(
            2,
            {"mesh": (2, 2, 2), "shardings": {"w0": "column", "w1": "row", "task/head": "row"}},
            marks=pytest.mark.long,
        ),
    ],
    ids=["p=2 x dp=4", "p=2 x dp=2", "2 x 2 x 2"],
)
def test_replicas_with_different_tasks_equal_the_oracle(num_replicas, options):
    order = [["t0", "t0", "t1", "t2"], ["t1"] * 4, ["t2", "t0", "t2", "t0"], ["t0", "t0", "t1", "t2"]]
    order = [names[-num_replicas:] for names in order]
    if "mesh" in options:
        options |= {"mesh": Mesh(np.array(jax.devices()).reshape(options["mesh"]), ("pipe", "data", "model"))}
    bank = jaxpp.Bank(sets(3), OWN)
    pipe, state = opened(bank, **options)
    losses = []
    for names, key in zip(order, keys(4), strict=True):
        pipe.prefetch(names)
        pipe.verify(state, DATA, key, task=names)
        state, metrics = pipe.step(state, DATA, key, task=names)
        losses.append(float(metrics.loss))
    wanted, shared, tasks = oracle_steps(order, num_replicas, 2)
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    compare("params", state.params, shared, floor=0.1)
    for name, params in tasks.items():
        compare(name, bank.params(name), params, floor=0.1)


@pytest.mark.long
@pytest.mark.parametrize("tasks", [["t0", "t1"], ["t0", "t0"]])
def test_of_a_loss_that_is_a_sum_the_gradient_of_a_task_is_the_sum_over_its_replicas(tasks):
    def loss(params, task, batch, key):
        return len(batch[1]) * loss_fn(params, task, batch, key)[0]

    bank = jaxpp.Bank(sets(2), optax.sgd(1.0))
    pipe, state = opened(bank, data_parallel=2, reduction="sum", has_aux=False, loss=loss)
    key = jax.random.key(0)
    pipe.verify(state, DATA, key, task=tasks)
    pipe.step(state, DATA, key, task=tasks)
    parts = [tuple(np.split(leaf, 4)[i] for leaf in DATA) for i in range(4)]
    grads = [jax.grad(loss, 1)(theta(), sets(2)[tasks[i // 2]], parts[i], jax.random.fold_in(key, i)) for i in range(4)]
    for name in dict.fromkeys(tasks):
        mine = [grad for i, grad in enumerate(grads) if tasks[i // 2] == name]
        wanted = jax.tree.map(lambda start, *each: start - sum(each), sets(2)[name], *mine)
        compare(name, bank.params(name), wanted, floor=0.1)


@pytest.mark.long
def test_a_task_of_one_replica_is_not_communicated():
    bank = jaxpp.Bank(sets(3), OWN)
    pipe, _ = opened(bank, data_parallel=4)
    found = pipe.collectives(DATA, jax.random.key(0), task=["t0", "t0", "t1", "t2"])
    groups = {row.program: row.collective.groups for row in found.rows if "tasks" in row.program}
    assert set(groups) == {f"total of tasks stage {s}, replicas 0 1" for s in range(2)}
    alone = pipe.collectives(DATA, jax.random.key(0), task=["t0", "t1", "t2", "t0"])
    assert {row.program for row in alone.rows if "tasks" in row.program} == {
        f"total of tasks stage {s}, replicas 0 3" for s in range(2)
    }
    shared = sum(leaf.nbytes for leaf in jax.tree.leaves(theta()))
    assert pipe.collectives(DATA, jax.random.key(0), task="t0").num_bytes() > found.num_bytes() - 1 > shared


@pytest.mark.long
def test_a_weight_counts_in_the_mean_over_the_replicas_of_a_task_and_without_any_a_task_learns_nothing():
    bank = jaxpp.Bank(sets(2), optax.sgd(0.1))
    pipe, state = opened(bank, data_parallel=4, weight=lambda batch: 1 + batch[1].sum())
    pipe.verify(state, DATA, jax.random.key(0), task=["t0", "t1", "t1", "t1"])
    bank = jaxpp.Bank(sets(2), optax.sgd(0.1))
    pipe, state = opened(bank, data_parallel=2, weight=lambda batch: batch[1].sum())
    labels = DATA[1].copy()
    labels[: BATCH // 2] = 0
    before = jax.tree.map(np.copy, bank.params("t0"))
    state, metrics = pipe.step(state, (DATA[0], labels), jax.random.key(0), task=["t0", "t1"])
    assert np.isfinite(metrics.loss)
    same_bits(bank.params("t0"), before)
    assert not np.array_equal(bank.params("t1")["head"], sets(2)["t1"]["head"])


@pytest.mark.long
def test_sets_wait_in_pinned_host_memory_between_steps():
    bank = jaxpp.Bank(sets(2), OWN)
    for options in ({}, {"data_parallel": 2}):
        pipe, state = opened(bank, **options)
        for name in ("t0", "t1"):
            state, _ = pipe.step(state, DATA, jax.random.key(0), task=name)
        for name in bank:
            assert {leaf.sharding.memory_kind for leaf in bank.host_store.held(name).arrays} == {HOST_MEMORY}
        assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(state.held)} == {jax.devices()[0].default_memory().kind}


@pytest.mark.parametrize(("options", "loads"), [({}, 1), ({"data_parallel": 2}, 2)])
def test_a_set_travels_as_one_vector_a_stage_and_replica_and_comes_back_as_one_a_stage(options, loads, monkeypatch):
    bank = jaxpp.Bank(sets(3), OWN)
    pipe, state = opened(bank, **options)
    for name in bank:  # at first the sets are packed for the pipeline, on the host
        state, _ = pipe.step(state, DATA, jax.random.key(0), task=name)
    moved = {"to_host": [], "to_device": []}
    for way, found in moved.items():
        move = getattr(host_store, way)
        monkeypatch.setattr(host_store, way, lambda leaves, *homes, m=move, f=found: (f.append(len(leaves)), m(leaves, *homes))[1])
    for name in ("t0", "t1", "t2", "t0"):
        state, _ = pipe.step(state, DATA, jax.random.key(0), task=name)
    assert moved == {"to_host": [2] * 4, "to_device": [2] * 4 * loads}


@pytest.mark.long
def test_evaluate_and_verify_and_profile_leave_a_set_as_it_is():
    bank = jaxpp.Bank(sets(2), OWN)
    pipe, state = opened(bank)
    before = jax.tree.map(np.copy, (bank.params("t0"), bank.opt_state("t0")))
    key = jax.random.key(0)
    found = pipe.evaluate(state, DATA, key, task="t0")
    other = pipe.evaluate(state, DATA, key, lambda p, t, b, k: (loss_fn(p, t, b, k)[0] * 2, {}), task="t0")
    np.testing.assert_allclose(other.loss, 2 * found.loss, rtol=1e-6)
    pipe.verify(state, DATA, key, task="t0")
    assert pipe.profile(state, DATA, key, num_steps=1, task="t0").ledger.samples
    same_bits((bank.params("t0"), bank.opt_state("t0")), before)


def test_a_step_may_leave_the_state_beside_a_bank_as_it_was():
    pipe, state = opened(jaxpp.Bank(sets(1), OWN))
    kept, _ = pipe.step(state, DATA, jax.random.key(0), task="t0", donate=False)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((state.held, kept.held)))


@pytest.mark.long
def test_a_bound_module_serves_all_tasks_and_a_pipeline_makes_theta_itself():
    def whole(params, batch, key):
        return loss_fn({k: v for k, v in params.items() if k != "own"}, params["own"], batch, key)

    bank = jaxpp.Bank(sets(2), OWN)
    pipe = jaxpp.Pipeline(jaxpp.Bank.bind(whole, "own"), SHARED, num_stages=2, has_aux=True, bank=bank)
    state = pipe.init(theta(), DATA)
    pipe.verify(state, DATA, jax.random.key(0), task="t1")
    bank = jaxpp.Bank(sets(2), OWN)
    pipe = pipeline(bank, data_parallel=2)
    state = pipe.init(lambda key: {f"w{i}": jax.random.normal(key, (WIDTH, WIDTH)) / 4 for i in range(4)}, jax.random.key(0), DATA)
    assert set(state.params) == set(theta())
    state, _ = pipe.step(state, DATA, jax.random.key(0), task=["t0", "t1"])
    pipe.verify(state, DATA, jax.random.key(0), task=["t0", "t1"])


def test_an_exception_between_use_and_write_back_leaves_the_set_whole(monkeypatch):
    bank = jaxpp.Bank(sets(3), OWN)
    for options, task in (({}, "t1"), ({"data_parallel": 2}, ["t1", "t2"])):
        pipe, state = opened(bank, **options)
        state, _ = pipe.step(state, DATA, jax.random.key(0), task=task)
        before = {name: jax.tree.map(np.copy, (bank.params(name), bank.opt_state(name))) for name in bank}
        with monkeypatch.context() as patch:
            patch.setattr(pipe.engine, "run", broken)
            with pytest.raises(RuntimeError, match="the device is gone"):
                pipe.step(state, DATA, jax.random.key(1), task=task)
        for name in bank:
            same_bits((bank.params(name), bank.opt_state(name)), before[name])
        state, metrics = pipe.step(state, DATA, jax.random.key(1), task=task)
        assert np.isfinite(metrics.loss)


def broken(*args, **kwargs):
    raise RuntimeError("the device is gone")


WRONG_TASKS = {
    "none": None,
    "an unknown one": "t9",
    "one for two replicas": ["t0"],
    "two programs": ["t0", "wide"],
    "a tuple": ("t0", "t1"),
    "a dict": {"t0": 1},
    "a misspelt one": "t00",
}


@pytest.mark.parametrize("name", WRONG_TASKS)
def test_a_task_that_cannot_be_is_refused_before_anything_moves(name):
    bank = jaxpp.Bank(sets(2) | {"wide": a_set(5, classes=5)}, OWN)
    pipe, state = opened(bank, data_parallel=2)
    moved = bank.host_store.traffic
    step = functools.partial(pipe.step, state, DATA, jax.random.key(0), task=WRONG_TASKS[name])
    messages.check("tasks", WRONG_TASKS, name, step)
    assert bank.host_store.traffic == moved
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state.held))


@pytest.mark.long
def test_forecast_and_profile_count_the_means_of_replicas_with_a_task_each():
    many = {name: params | {"gate": numbers(9, WIDTH)} for name, params in sets(2).items()}

    def gated(params, task, batch, key):
        return loss_fn(params, task | {"adapter": task["adapter"] * task["gate"]}, batch, key)

    bank = jaxpp.Bank(many, OWN)
    pipe = jaxpp.Pipeline(gated, SHARED, num_stages=2, has_aux=True, bank=bank, data_parallel=2)
    state = pipe.init(theta(), DATA)
    forecast = pipe.forecast(theta(), DATA, jax.random.key(0))
    profile = pipe.profile(state, DATA, jax.random.key(0), num_steps=1, task=["t0", "t1"])
    place = pipe.engine.placement[0].shown
    ends = {(sample.when, sample.device): sample.kinds for sample in profile.ledger.samples}
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(theta())) // 2 + many["t0"]["adapter"].nbytes + many["t0"]["gate"].nbytes
    assert ends["begins", place][0] == held
    assert forecast.peaks[place] > 3 * held


@pytest.mark.long
def test_the_gradient_norm_is_that_of_theta_whatever_the_number_of_replicas():
    found = []
    for options in ({"num_microbatches": 4}, {"data_parallel": 2}):
        pipe, state = opened(jaxpp.Bank(sets(1), OWN), **options)
        found.append(pipe.step(state, DATA, jax.random.key(0), task="t0")[1].grad_norm)
    np.testing.assert_allclose(*found, rtol=1e-5)


def test_what_init_was_given_is_not_kept():
    pipe = pipeline(jaxpp.Bank(sets(1), OWN))
    params = jax.tree.map(jnp.asarray, theta())
    state = pipe.init(params, DATA)
    known = weakref.ref(params["w0"])
    del params
    gc.collect()
    assert known() is None and state.params["w0"].shape == (WIDTH, WIDTH)


def test_a_set_that_is_in_use_elsewhere_is_refused_before_the_state_is_consumed():
    bank = jaxpp.Bank(sets(2), OWN)
    pipe, state = opened(bank)
    with bank.use("t0"), pytest.raises(jaxpp.errors.BankError, match="in use"):
        pipe.step(state, DATA, jax.random.key(0), task="t0")
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state.held))
    state, _ = pipe.step(state, DATA, jax.random.key(0), task="t0")
    with bank.use("t0") as task:  # by hand, between steps of the pipeline
        same_bits(task.params, bank.params("t0"))
        task.params = jax.tree.map(jnp.zeros_like, task.params)
    state, _ = pipe.step(state, DATA, jax.random.key(0), task="t0")
    assert np.abs(bank.params("t0")["head"]).max() < 0.1


def test_a_write_back_that_fails_does_not_cost_the_state(monkeypatch):
    bank = jaxpp.Bank(sets(2), OWN)
    pipe, state = opened(bank)
    state, _ = pipe.step(state, DATA, jax.random.key(0), task="t0")
    before = jax.tree.map(np.copy, (bank.params("t0"), bank.opt_state("t0")))
    with monkeypatch.context() as patch:
        patch.setattr("jaxpp.tasks.host_store.to_host", no_room)
        state, metrics = pipe.step(state, DATA, jax.random.key(1), task="t0")
    assert np.isfinite(metrics.loss) and not any(leaf.is_deleted() for leaf in jax.tree.leaves(state.held))
    with pytest.raises(jaxpp.errors.BankError, match="'t0'"):
        pipe.step(state, DATA, jax.random.key(2), task="t1")  # told before anything is consumed
    same_bits((bank.params("t0"), bank.opt_state("t0")), before)
    state, _ = pipe.step(state, DATA, jax.random.key(2), task="t1")


def no_room(*args, **kwargs):
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of host memory")


@pytest.mark.long
def test_sets_move_between_meshes_and_single_devices():
    bank = jaxpp.Bank(sets(2), OWN)
    for shape in ((1, 1, 2), (2, 2, 2), None, (1, 2, 2), None):
        rules = {"shardings": {"w0": "column", "w1": "row"}} if shape else {}
        devices = np.array(jax.devices()[: np.prod(shape)]).reshape(shape) if shape else None
        mesh = {} if shape is None else {"mesh": Mesh(devices, ("pipe", "data", "model"))}
        pipe, state = opened(bank, num_stages=1 if shape and shape[0] == 1 else 2, **mesh, **rules)
        state, metrics = pipe.step(state, DATA, jax.random.key(0), task="t0")
        with bank.use("t0") as task:
            assert task.params["head"].devices() == {jax.devices()[0]}
            task.params = jax.tree.map(lambda leaf: leaf * 1.0, task.params)
        assert np.isfinite(metrics.loss)


@pytest.mark.long
def test_a_pipeline_opened_again_or_dropped_leaves_nothing_on_the_devices():
    bank = jaxpp.Bank(sets(2), OWN)
    pipe, state = opened(bank)
    state, _ = pipe.step(state, DATA, jax.random.key(0), task="t0")
    small = tuple(leaf[:8] for leaf in DATA)
    state = pipe.init(theta(), small)
    state, _ = pipe.step(state, small, jax.random.key(0), task="t0")
    assert len(bank.host_store.rows) == 1
    del pipe, state
    gc.collect()
    assert not bank.host_store.rows
    for _ in range(3):
        pipe, state = opened(bank, devices=jax.devices()[3:5])
        pipe.step(state, DATA, jax.random.key(0), task="t0")
    gc.collect()
    assert len(bank.host_store.rows) <= 2


def test_an_init_that_fails_gives_back_what_it_was_lent(monkeypatch):
    bank = jaxpp.Bank(sets(2), OWN)
    pipe = pipeline(bank)
    with monkeypatch.context() as patch:
        patch.setattr(jaxpp.engine.engine.Engine, "make_opt_state", broken)
        with pytest.raises(RuntimeError, match="the device is gone"):
            pipe.init(theta(), DATA)
    state = pipe.init(theta(), DATA)
    state, _ = pipe.step(state, DATA, jax.random.key(0), task="t0")


@pytest.mark.long
def test_a_bank_may_lose_its_first_set_but_not_its_last():
    bank = jaxpp.Bank(sets(2), OWN)
    pipe, state = opened(bank)
    bank.remove("t0")
    state, _ = pipe.step(state, DATA, jax.random.key(0), task="t1")
    bank.remove("t1")
    with pytest.raises(jaxpp.errors.BankError, match=r"task(.|\n)*the bank has no sets"):
        pipe.step(state, DATA, jax.random.key(0), task="t1")
    with pytest.raises(jaxpp.errors.BankError, match="a bank without sets"):
        pipe.forecast(theta(), DATA)
    bank.add("new", a_set(7, classes=4))
    state, _ = pipe.step(state, DATA, jax.random.key(0), task="new")


def deep_loss(params, task, batch):
    """Two shared layers, and then layers of the task's own: a loop over a stack, or one by one."""
    x = jnp.tanh(jnp.tanh(batch @ params["a00"]["w"]) @ params["a01"]["w"])
    if "layers" in task:
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, task["layers"])
    for name in sorted(task.keys() - {"layers"}):
        for w in task[name]["w"] if task[name]["w"].ndim == 3 else [task[name]["w"]]:
            x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def deep_theta(dtype="float32"):
    return {name: {"w": numbers(k, WIDTH, WIDTH).astype(dtype)} for k, name in enumerate(["a00", "a01"])}


def stack(seed, count=6, dtype="float32"):
    return np.stack([numbers(10 * seed + k, WIDTH, WIDTH) for k in range(count)]).astype(dtype)


@pytest.mark.parametrize(
    ("cuts", "stages"),
    [
        (["b02"], ["a00 .. a01", "b02 .. b05"]),
        (["task/b02"], ["a00 .. a01", "b02 .. b05"]),
        (["a01", "b04"], ["a00", "a01 .. b03", "b04 .. b05"]),
        (["task"], ["a00 .. a01", "b02 .. b05"]),
    ],
)
def test_cuts_inside_a_task_have_the_names_that_a_user_reads(cuts, stages):
    bank = jaxpp.Bank({"t0": {f"b0{k}": {"w": numbers(k, WIDTH, WIDTH)} for k in range(2, 6)}}, SHARED)
    pipe = jaxpp.Pipeline(deep_loss, SHARED, num_stages=len(stages), num_microbatches=2, bank=bank, cuts=cuts)
    pipe.init(deep_theta(), DATA[0])
    assert [stage.modules for stage in pipe.stages] == stages


def test_a_name_that_both_have_is_that_of_the_shared_parameters():
    def loss_fn(params, task, batch):
        return jnp.mean(jnp.tanh(jnp.tanh(batch @ params["head"]["w"]) @ params["tail"]["w"]) @ task["head"]["w"])

    theta = {name: {"w": numbers(k, WIDTH, WIDTH)} for k, name in enumerate(["head", "tail"])}
    for cuts, stages in ((["tail", "task/head"], ["head", "tail", "task.head"]), (["head"], None)):
        bank = jaxpp.Bank({"t0": {"head": {"w": numbers(5, WIDTH, WIDTH)}}}, SHARED)
        pipe = jaxpp.Pipeline(loss_fn, SHARED, num_stages=len(cuts) + 1, num_microbatches=2, bank=bank, cuts=cuts)
        if stages is None:
            with pytest.raises(jaxpp.errors.CutError, match="'head' begins at equation 0"):
                pipe.init(theta, DATA[0])
        else:
            pipe.init(theta, DATA[0])
            assert [stage.modules for stage in pipe.stages] == stages
    with pytest.raises(jaxpp.errors.CutError, match="names: tail, task/head"):
        jaxpp.Pipeline(loss_fn, SHARED, num_stages=2, num_microbatches=2, bank=bank, cuts=["other"]).init(theta, DATA[0])


@pytest.mark.parametrize(
    "name",
    ["layers[2]", *(pytest.param(name, marks=pytest.mark.long) for name in ("task/layers[2]", "params/layers[2]"))],
)
def test_a_cut_names_the_layers_of_a_module_of_the_task_as_a_user_reads_them(name):
    # What all paths of a set begin with was left out, so that nothing of a set with a single module was called as it is there.
    def loss_fn(params, task, batch):
        def layer(x, fc):
            return jnp.tanh(x @ fc["kernel"] + fc["bias"]), None

        x = jnp.tanh(batch @ params["a00"]["w"]) @ params["a01"]["w"]
        return jnp.mean(jax.lax.scan(layer, x, task["params"]["layers"]["fc"])[0] ** 2)

    one = {"params": {"layers": {"fc": {"kernel": stack(1, count=4), "bias": np.zeros((4, WIDTH), "float32")}}}}
    pipe = jaxpp.Pipeline(loss_fn, SHARED, num_stages=2, num_microbatches=2, bank=jaxpp.Bank({"t0": one}, OWN), cuts=[name])
    pipe.init(deep_theta(), DATA[0])
    assert [stage.modules for stage in pipe.stages] == ["a00 .. fc[0:2]", "fc[2:4]"]


@pytest.mark.parametrize(
    ("options", "tasks", "name"),
    [
        ({"cuts": ["layers[2]"]}, "t1", "layers"),
        pytest.param({"cuts": ["layers[3]"], "data_parallel": 2}, ["t0", "t1"], "layers", marks=pytest.mark.long),
        pytest.param({"num_stages": 3, "schedule": "zb-h1"}, "t0", "layers", marks=pytest.mark.long),
        pytest.param({"num_stages": 2, "data_parallel": 2}, ["t1", "t0"], "rows", marks=pytest.mark.long),
    ],
)
def test_a_loop_over_the_layers_of_a_task_is_cut(options, tasks, name):
    with jax.enable_x64(True):
        theta, data = deep_theta("float64"), DATA[0].astype("float64")
        kept = {f"t{k}": {"layers": stack(k, dtype="float64")} for k in range(2)}
        kept = kept if name == "layers" else {task: {"rows": {"w": one["layers"]}} for task, one in kept.items()}
        bank = jaxpp.Bank(kept, OWN)
        options = {"num_stages": 2, "num_microbatches": 2} | options
        pipe = jaxpp.Pipeline(deep_loss, SHARED, bank=bank, **options)
        state = pipe.init(theta, data)
        assert sum("layers" in stage.modules or "rows" in stage.modules for stage in pipe.stages) == options["num_stages"]
        pipe.verify(state, data, task=tasks)
        names = tasks if isinstance(tasks, list) else [tasks]
        moments, own = SHARED.init(theta), {task: OWN.init(one) for task, one in kept.items()}
        for _ in range(2):
            pipe.prefetch(tasks)
            state, _ = pipe.step(state, data, task=tasks)
            pairs = zip(names, np.split(data, len(names)), strict=True)
            grads = {task: jax.grad(deep_loss, (0, 1))(theta, kept[task], part) for task, part in pairs}
            mean = jax.tree.map(lambda *leaves: sum(leaves) / len(leaves), *(shared for shared, _ in grads.values()))
            updates, moments = SHARED.update(mean, moments, theta)
            theta = optax.apply_updates(theta, updates)
            for task, (_, grad) in grads.items():
                updates, own[task] = OWN.update(grad, own[task], kept[task])
                kept[task] = optax.apply_updates(kept[task], updates)
        compare("params", state.params, theta)
        for task, one in kept.items():
            compare("set", bank.params(task), one)
            compare("moments", bank.opt_state(task), own[task])
        with bank.use("t0") as task:  # without a pipeline, a set is whole
            compare("set", task.params, kept["t0"])
        pipe.verify(state, data, task=tasks)


@pytest.mark.long
def test_sets_with_more_and_with_fewer_layers_are_cut_where_the_shared_parameters_stay():
    bank = jaxpp.Bank({"t0": {"layers": stack(0)}, "short": {"layers": stack(1, 4)}, "t2": {"layers": stack(2)}}, SHARED)
    pipe = jaxpp.Pipeline(deep_loss, SHARED, num_stages=3, num_microbatches=2, bank=bank)
    state = pipe.init(deep_theta(), DATA[0])
    for task in ("t0", "short", "t2", "short"):
        pipe.verify(state, DATA[0], task=task)
        state, _ = pipe.step(state, DATA[0], task=task)


def test_a_stage_of_a_replica_that_is_in_several_processes_is_refused(monkeypatch):
    answers = iter([True, False])  # of two leaves of a set, one is not whole here
    monkeypatch.setattr("jaxpp.tasks.runner.is_whole_here", lambda home: next(answers))
    with pytest.raises(jaxpp.errors.BankError, match="each stage of a replica is in one process") as error:
        opened(jaxpp.Bank(sets(1), OWN))
    assert "Fix: put the axis model of the mesh inside the hosts." in str(error.value)


@pytest.mark.long
def test_a_step_that_trains_a_part_of_a_set_leaves_the_rest_and_theta_as_they_are():
    bank, batch = jaxpp.Bank(sets(2), OWN), DATA
    with pytest.raises(jaxpp.errors.OptimizerError, match=r"bank.opt_state\(task\)\[1\]\[0\].count belongs to task/") as error:
        pipeline(bank, trains="task/head").init(theta(), batch)
    words = str(error.value)
    assert "state.opt_state" not in words  # all of Theta is left as it is
    label = eval(words.partition("with label = ")[2].partition("; or,")[0], {"jax": jax})  # noqa: S307  (as the message says)
    bank = jaxpp.Bank(sets(2), optax.multi_transform({"trained": OWN, "frozen": optax.set_to_zero()}, label))
    pipe = pipeline(bank, trains="task/head", data_parallel=2)
    first = state = pipe.init(theta(), batch)
    for tasks in (["t0", "t1"], ["t0", "t0"]):
        assert pipe.verify(state, batch, jax.random.key(0), task=tasks)
        state, _ = pipe.step(state, batch, jax.random.key(1), task=tasks, donate=False)
    assert jax.tree.all(jax.tree.map(np.array_equal, (first.params, first.opt_state), (state.params, state.opt_state)))
    for task, before in sets(2).items():
        assert np.array_equal(bank.params(task)["adapter"], before["adapter"])
        assert not np.array_equal(bank.params(task)["head"], before["head"])
