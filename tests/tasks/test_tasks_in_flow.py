"""``delay=1`` with a bank: the gradients of a step are of Theta before the last step, and of the newest set of its task."""

import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.dynamic_scale import DynamicScale

import jaxpp
from jaxpp.errors import ArgumentError, StateError
from jaxpp.runtime import execute
from jaxpp.verify import compare
from tests.end_to_end.test_delay import failing

RNG = np.random.default_rng(0)
THETA = {name: RNG.normal(size=(8, 8)) / 2 for name in "abcd"}
X = RNG.normal(size=(16, 8))
SHARED, OWN = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2, eps=1e-3)), optax.adam(1e-2, eps=1e-3)
TASKS = ["pq", "qp", "rr", "pq", "rp", "pp", "pp", "qr"]
"""The tasks of the replicas in each step; of one replica the first."""


def a_set(scale, width=8):
    return {"early": np.eye(8)[:, :width] / scale, "late": np.eye(8)[:width] / 3}


def loss_fn(params, own, x):
    """The set is read on the first stage and on the last."""
    for name, by in zip("abcd", (None, own["early"] @ own["late"], None, own["late"].T @ own["early"].T), strict=True):
        x = jnp.tanh(x @ (params[name] if by is None else params[name] @ by))
    return jnp.mean(x**2)


def batch(number):
    return X + number / 10


def opened(sets=None, *, slots=2, **options):
    sets = sets or {task: a_set(2 + k) for k, task in enumerate("pqr")}
    bank = jaxpp.Bank(sets, OWN, slots=slots)
    pipe = jaxpp.Pipeline(loss_fn, SHARED, **{"num_stages": 2, "num_microbatches": 4, "delay": 1, "bank": bank} | options)
    return pipe, bank, pipe.init(THETA, X)


def mean(trees):
    return jax.tree.map(lambda *rows: sum(rows) / len(rows), *trees)


def plainly(tasks, sets=None, *, replicas=1):
    """What training makes on one device: each loss, and at the end all that is kept."""
    owns = sets or {task: a_set(2 + k) for k, task in enumerate("pqr")}
    params = before = THETA
    opt_state, own_states, losses = SHARED.init(params), {task: OWN.init(own) for task, own in owns.items()}, []
    for number, names in enumerate(tasks):
        parts = np.split(batch(number), replicas)
        found = [
            (task, *jax.value_and_grad(loss_fn, (0, 1))(before, owns[task], part)) for task, part in zip(names, parts, strict=False)
        ]
        losses.append(mean([loss for _, loss, _ in found]))
        own_grads = {task: mean([grads[1] for other, _, grads in found if other == task]) for task, *_ in found}
        updates, opt_state = SHARED.update(mean([grads[0] for *_, grads in found]), opt_state, params)
        before, params = params, optax.apply_updates(params, updates)
        for task, grads in own_grads.items():
            updates, state = OWN.update(grads, own_states[task], owns[task])
            owns, own_states = owns | {task: optax.apply_updates(owns[task], updates)}, own_states | {task: state}
    return losses, (params, before, opt_state, {task: (owns[task], own_states[task]) for task in owns})


def kept(state, bank):
    sets = {task: (bank.params(task), bank.opt_state(task)) for task in bank.tasks}
    return state.params, state.previous, state.opt_state, sets


def trained(pipe, state, tasks=TASKS, look=lambda number, state: None):
    losses, replicas = [], pipe.engine.placement.num_replicas
    for number, names in enumerate(tasks):
        state, metrics = pipe.step(state, batch(number), task=list(names[:replicas]))
        losses.append(metrics.loss)
        look(number, state)
    return losses, state


KINDS: dict[str, dict[str, Any]] = {
    "one": {},
    "replicas": {"data_parallel": 2},
    "replicas that divide parameters": {"data_parallel": 2, "shard": "parameters"},
    "a slot": {"slots": 1},
    "an optimizer in host memory": {"host": "optimizer"},
    "threads": {"threads": "ranks", "data_parallel": 2},
    "a loss scale": {"loss_scale": DynamicScale(scale=2.0**10), "data_parallel": 2},
    "four stages": {"num_stages": 4, "num_microbatches": 8, "schedule": "interleaved"},
}


@pytest.mark.parametrize(
    "kind", ["replicas", *(pytest.param(kind, marks=pytest.mark.long) for kind in KINDS if kind != "replicas")]
)
def test_tasks_in_flow_train_as_a_plain_loop_does(x64, kind):
    pipe, bank, state = opened(**KINDS[kind])
    losses, state = trained(pipe, state, look=lambda number, state: number % 3 or bank.params("pqr"[number % 2]))
    expected, made = plainly(TASKS, replicas=pipe.engine.placement.num_replicas)
    compare("losses", losses, expected)
    compare("", kept(state, bank), made)
    pipe.verify(state, X, task=list("pq"[: pipe.engine.placement.num_replicas]))


@pytest.mark.long
def test_sets_of_other_shapes_take_turns(x64):
    sets = {"p": a_set(2), "q": a_set(3), "small": a_set(2, 5), "less": a_set(3, 5)}
    tasks = [(name,) for name in ("p", "small", "less", "q", "small", "p", "q", "less")]
    pipe, bank, state = opened(sets)
    losses, state = trained(pipe, state, tasks)
    expected, made = plainly(tasks, sets)
    compare("losses", losses, expected)
    compare("", kept(state, bank), made)


def test_a_step_overlaps_one_of_another_task_and_waits_for_one_of_its_own(monkeypatch):
    pipe, _, state = opened()
    state, _ = pipe.step(state, X, task="p")
    order, plain = [], execute.hand_over

    def hand_over(parts, observer, threads):
        def seen(run, numbers):
            for number in numbers:
                order.append((run, run.plan.instructions[number].label))
                yield number

        plain(((run, seen(run, numbers)) for run, numbers in parts), observer, threads)

    for room in ("engine", "tail"):
        monkeypatch.setattr(f"jaxpp.engine.{room}.hand_over", hand_over)
    overlaps = {}
    for task in "qqp":
        order.clear()
        state, _ = pipe.step(state, X, task=task)
        runs = [run for run, _ in itertools.groupby(order, key=lambda pair: pair[0])]
        overlaps.setdefault(task, []).append(len(runs) > 2)  # the rest of the old step and the new one by turns
    assert overlaps == {"q": [True, False], "p": [True]}


def test_whoever_looks_at_a_set_finds_it_after_its_step(x64):
    pipe, bank, state = opened(data_parallel=2)
    _, (*_, made) = plainly(["pq"], replicas=2)
    state, _ = pipe.step(state, batch(0), task=["p", "q"])
    pipe.collectives(X, task="p")  # asks for the groups of another step
    compare("sets", {task: (bank.params(task), bank.opt_state(task)) for task in "pqr"}, made)
    state, _ = pipe.step(state, X, task=["p", "q"])
    bank.wait()
    assert not bank.host_store.in_use()
    pipe.step(state, X, task=["p", "q"])
    bank.remove("p")
    with bank.use("q") as task:
        assert task.params["late"].shape == (8, 8)


@pytest.mark.parametrize("look", ["set", "step"])
def test_of_a_step_whose_rest_fails_the_sets_are_as_they_were(monkeypatch, look):
    pipe, bank, state = opened()
    before = {task: bank.params(task) for task in "pq"}
    state, _ = pipe.step(state, X, task="p")
    fails = failing(monkeypatch, lambda instruction: instruction.label == "update stage 1")
    with fails, pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED"):
        bank.params("p") if look == "set" else pipe.step(state, X, task="q")
    jax.tree.map(np.testing.assert_array_equal, {task: bank.params(task) for task in "pq"}, before)
    with pytest.raises(StateError, match="a step that failed in part left no state"):
        pipe.step(state, X, task="p")
    state = pipe.init(THETA, X)
    for task in "pqp":
        state, _ = pipe.step(state, X, task=task)


@pytest.mark.parametrize("num_steps", [30, pytest.param(500, marks=pytest.mark.long)])
def test_threads_that_read_metrics_while_tasks_take_turns_disturb_nothing(num_steps):
    tasks = [TASKS[k % len(TASKS)][:1] for k in range(num_steps)]
    results = []
    for count in (0, 2):
        pipe, bank, state = opened()
        with ThreadPoolExecutor(2) as pool:
            looks = []
            for number, (task,) in enumerate(tasks):
                state, metrics = pipe.step(state, batch(number % 8), task=task)
                looks += [pool.submit(lambda metrics=metrics: float(metrics.grad_norm)) for _ in range(count)]
                pipe.prefetch(tasks[(number + 1) % num_steps][0])
            for look in looks:
                look.result()
        results.append(jax.device_get(kept(state, bank)))
    jax.tree.map(np.testing.assert_array_equal, *results)


def test_a_profile_of_steps_of_one_task_is_of_one_step():
    pipe, _, state = opened()
    with pytest.raises(ArgumentError, match="each of these steps ends before the next begins"):
        pipe.profile(state, X, task="p", num_batches=2)
    assert "cpu:0" in str(pipe.forecast(THETA, X))
