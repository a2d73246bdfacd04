"""Dynamic loss scaling has the semantics of Flax's DynamicScale, and an overflow anywhere skips the step everywhere."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.dynamic_scale import DynamicScale

import jaxpp
from jaxpp.errors import ArgumentError
from jaxpp.verify import compare

DEPTH = 4
PARAMS = {f"w{k}": jax.random.normal(jax.random.key(k), (8, 8)) / 3 for k in range(DEPTH)}
BATCH = {"x": jnp.asarray(np.random.default_rng(0).normal(size=(12, 8)), jnp.float32), "blow": jnp.zeros((12, DEPTH))}


@jax.custom_vjp
def blown(x, amount):
    """``x``; its cotangent becomes infinite where the amount is not zero."""
    return x


blown.defvjp(
    lambda x, amount: (x, amount), lambda amount, ct: (ct * jnp.where(amount.sum() > 0, jnp.inf, 1.0).astype(ct.dtype), None)
)


def loss_fn(params, batch):
    x = batch["x"].astype(jnp.float16)
    for k in range(DEPTH):
        x = jnp.tanh(x @ blown(params[f"w{k}"].astype(jnp.float16), batch["blow"][:, k]))
    return (x.astype(jnp.float32) ** 2).mean() * 1e-3


def with_state(params, model_state, batch):
    return loss_fn(params, batch), ({"seen": model_state["seen"] + batch["x"].shape[0]}, {})


def pipeline(loss=loss_fn, *, num_stages=4, schedule="1f1b", optimizer=None, **options):
    scale = DynamicScale(scale=1024.0, growth_interval=2)
    optimizer = optimizer or optax.chain(optax.clip_by_global_norm(1e-4), optax.adam(1e-2))
    options = {"num_stages": num_stages, "num_microbatches": 4, "schedule": schedule, "loss_scale": scale} | options
    return jaxpp.Pipeline(loss, optimizer, **options)


def blow(stage: int, microbatch: int):
    return BATCH | {"blow": BATCH["blow"].at[3 * microbatch, stage].set(1)}


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("zb-h1", marks=pytest.mark.long)])
def test_steps_equal_those_with_flaxs_dynamic_scale(schedule):
    optimizer = optax.chain(optax.clip_by_global_norm(1e-4), optax.adam(1e-2))
    pipe = pipeline(schedule=schedule)
    state = pipe.init(PARAMS, BATCH)
    pipe.verify(state, BATCH)
    scale, params, opt_state = DynamicScale(scale=jnp.float32(1024.0), growth_interval=2), PARAMS, optimizer.init(PARAMS)

    def mean_loss(params, batch):  # the four microbatches are of one size
        pieces = [jax.tree.map(lambda leaf, i=i: leaf[3 * i : 3 * i + 3], batch) for i in range(4)]
        return sum(loss_fn(params, piece) for piece in pieces) / 4

    for batch in (BATCH, BATCH, blow(1, 2), BATCH, BATCH, BATCH, blow(3, 0)):
        scale, finite, loss, grads = scale.value_and_grad(mean_loss)(params, batch)
        updates, new_opt = optimizer.update(grads, opt_state, params)
        new = optax.apply_updates(params, updates), new_opt
        params, opt_state = jax.tree.map(lambda a, b, ok=finite: jnp.where(ok, a, b), new, (params, opt_state))
        state, metrics = pipe.step(state, batch)
        assert bool(metrics.finite) == bool(finite)
        assert float(state.loss_scale.scale) == float(scale.scale)
        assert int(state.loss_scale.fin_steps) == int(scale.fin_steps)
        compare("params", state.params, params, coarsest=jnp.float16)
        np.testing.assert_allclose(metrics.loss, loss, rtol=1e-3)
    assert isinstance(state.loss_scale, DynamicScale)


@pytest.mark.parametrize("stage", [0, *(pytest.param(k, marks=pytest.mark.long) for k in (1, 2, 3))])
def test_an_overflow_in_one_microbatch_of_one_stage_changes_nothing_anywhere_but_halves_the_scale(stage):
    pipe = pipeline(with_state, has_state=True)
    state = pipe.init((PARAMS, {"seen": jnp.asarray(0)}), BATCH)
    state, metrics = pipe.step(state, BATCH)
    assert bool(metrics.finite)
    before = jax.device_get(state)
    state, metrics = pipe.step(state, blow(stage, 2))
    assert not bool(metrics.finite)
    after = jax.device_get(state)
    chex.assert_trees_all_equal(after._replace(loss_scale=()), before._replace(loss_scale=(), step=2))  # the optimizer's count, too
    assert after.loss_scale.scale == before.loss_scale.scale / 2
    state, metrics = pipe.step(state, BATCH)
    assert bool(metrics.finite)
    assert int(state.model_state["seen"]) == 24


@pytest.mark.long
def test_scaling_saves_gradients_that_would_vanish():
    def tiny(params, batch):
        return loss_fn(params, batch).astype(jnp.float16) * jnp.float16(1e-4)

    plain, scaled = pipeline(tiny, loss_scale=None), pipeline(tiny)
    for pipe, learns in ((plain, False), (scaled, True)):
        state = pipe.init(PARAMS, BATCH)
        _, metrics = pipe.step(state, BATCH)
        assert (float(metrics.grad_norm) > 0) == learns


@pytest.mark.long
def test_a_scaled_state_is_saved_and_restored():
    pipe, other = pipeline(), pipeline(num_stages=2)
    state, _ = pipe.step(pipe.init(PARAMS, BATCH), BATCH)
    saved = jax.device_get(state)
    other.init(PARAMS, BATCH)
    again, _ = other.step(saved, BATCH)
    state, _ = pipe.step(state, BATCH)
    compare("params", again.params, state.params, coarsest=jnp.float16)
    assert float(again.loss_scale.scale) == float(state.loss_scale.scale)


def of_task(params, own, batch):
    """The gradient of the gain alone is infinite where an example has no brightness."""
    x = batch["x"].astype(float)
    for k in range(DEPTH):
        x = jnp.tanh(x @ params[f"w{k}"].astype(float) @ (own["adapter"] if k == 1 else jnp.eye(8)))
    return (x**2).mean() + jnp.sqrt(own["gain"] * batch["bright"]).mean() / 10


def mean(trees):
    return jax.tree.map(lambda *rows: sum(rows) / len(rows), *trees)


SET = {"adapter": np.eye(8) / 2, "gain": np.asarray(1.5)}
OWN = optax.adam(1e-2)
TASKS = (None, "ab"), (2, "ab"), (11, "ab"), (None, "bb"), (2, "bb"), (None, "ba"), (None, "ab")
"""Of each step, the example that overflows and the tasks of the replicas."""


@pytest.mark.parametrize(
    "options",
    [
        {"data_parallel": 2},
        pytest.param({"data_parallel": 2, "num_stages": 1, "shard": "parameters"}, marks=pytest.mark.long),
        pytest.param({"data_parallel": 2, "shard": "optimizer"}, marks=pytest.mark.long),
        pytest.param({"data_parallel": 2, "num_stages": 4, "host": "params"}, marks=pytest.mark.long),
    ],
)
def test_an_overflow_in_the_set_of_one_replica_skips_the_step_of_all(x64, options):
    params, own = jax.tree.map(lambda leaf: np.asarray(leaf, float), PARAMS), {"a": SET, "b": jax.tree.map(np.negative, SET)}
    own["b"]["gain"] = np.asarray(0.5)
    optimizer, bank, scale, fine = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2)), jaxpp.Bank(own, OWN), 1024.0, 0
    pipe = pipeline(of_task, optimizer=optimizer, bank=bank, **{"num_stages": 2, "num_microbatches": 2} | options)
    batch = {"x": np.asarray(BATCH["x"], float), "bright": np.ones(12)}
    state, opt_state, own_states = pipe.init(params, batch), optimizer.init(params), {task: OWN.init(own[task]) for task in "ab"}
    for number, (dark, tasks) in enumerate(TASKS):
        given = batch | {"bright": np.where(np.arange(12) == dark, 0.0, 1.0)}
        halves = [jax.tree.map(lambda leaf, r=r: leaf[6 * r : 6 * r + 6], given) for r in range(2)]
        found = [(task, *jax.grad(of_task, (0, 1))(params, own[task], half)) for task, half in zip(tasks, halves, strict=True)]
        grads = mean([shared for _, shared, _ in found])
        own_grads = {task: mean([grad for other, _, grad in found if other == task]) for task in tasks}
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))  # those of Theta always are
        if dark is None:
            updates, opt_state = optimizer.update(grads, opt_state, params)
            params = optax.apply_updates(params, updates)
            for task, grad in own_grads.items():
                updates, own_states[task] = OWN.update(grad, own_states[task], own[task])
                own[task] = optax.apply_updates(own[task], updates)
            scale, fine = (2 * scale, 0) if fine == 2 else (scale, fine + 1)
        else:
            scale, fine = scale / 2, 0
        state, metrics = pipe.step(state, given, task=list(tasks))
        assert (bool(metrics.finite), float(state.loss_scale.scale)) == (dark is None, scale), f"step {number}"
        found = state.params, state.opt_state, {task: (bank.params(task), bank.opt_state(task)) for task in "ab"}
        compare(f"step {number}", found, (params, opt_state, {task: (own[task], own_states[task]) for task in "ab"}))
    pipe.verify(state, batch, task=["a", "b"])


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        (1024.0, "a loss scale is a dataclass with scale, fin_steps"),
        (DynamicScale, "a loss scale is a dataclass"),
        (dataclasses.replace(DynamicScale(), scale=0.0), "scale=0.0"),
        (DynamicScale(backoff_factor=2.0), "backoff_factor=2.0"),
    ],
)
def test_what_cannot_scale_is_refused(wrong, line):
    with pytest.raises(ArgumentError, match=r"^loss_scale: ") as caught:
        pipeline(loss_scale=wrong)
    assert line in str(caught.value)
