"""The last stage's forward and the backward right behind it as one program (``fuse=``): the same results, fewer programs."""

import contextlib

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.dynamic_scale import DynamicScale

import jaxpp
from jaxpp.engine.engine import open_engine
from jaxpp.options import Options
from jaxpp.schedule import SCHEDULES, Schedule, make
from jaxpp.schedule.action import Kind
from jaxpp.verify import GRAD_FLOOR, compare, oracle
from tests.models import PARAMS, ZOO, gpt_case, loss_fn, mlp_case, pipeline, schedule_for

FUSING = ("naive", "1f1b", "eager-1f1b", "interleaved")
"""The schedules in which the last stage's backward is always right behind its forward."""


def labels(engine, purpose, batch, key=None):
    return [line.label for line in engine.lower(purpose, batch, key).bound.lines if line.action is not None and not line.is_send]


def test_a_stage_is_in_pairs_if_its_backward_is_behind_its_forward_for_every_microbatch():
    for name in SCHEDULES:
        for stages, microbatches in ((2, 2), (4, 8), (8, 4)):
            schedule = schedule_for(name, stages, microbatches)
            if schedule is not None:
                paired = {forward.stage for forward in schedule.pairs}
                assert (stages - 1 in paired) == (name in FUSING or microbatches == 1), (name, stages, microbatches)
                assert len(schedule.pairs) == microbatches * len(paired)
    rows = Schedule("some", ["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"]).pairs
    assert {str(f): str(b) for f, b in rows.items()} == {"1F0": "1B0", "1F1": "1B1"}
    assert not Schedule("one of two", ["0F0 0F1 0B1 0B0"]).pairs


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("make_case", [mlp_case, pytest.param(gpt_case, marks=pytest.mark.long)], ids=["mlp", "gpt"])
def test_fused_equals_the_oracle_and_schedules_that_fuse_have_the_same_bits(make_case, dtype):
    with jax.enable_x64(True) if dtype == "float64" else contextlib.nullcontext():
        case = make_case(dtype)
        loss, aux, grads = oracle(case.loss_fn, case.params, case.batch, case.key, 4, has_aux=True, reducers=case.reducers)
        options = {"num_stages": 4, "num_microbatches": 4, "has_aux": True, "fuse": True}
        first = open_engine(Options.of(case.loss_fn, schedule="naive", **options), None, (case.params,), case.batch, case.key)
        found = []
        for name in FUSING:
            engine = first.with_schedule(schedule_for(name, 4, 4))
            assert "3F0 3B0" in labels(engine, "grads", case.batch, case.key)
            outcome = engine.run("grads", engine.bring(case.params), case.batch, case.key)
            compare(f"{name} loss", outcome.loss, loss)
            compare(f"{name} aux", outcome.aux, aux)
            compare(f"{name} grads", jax.tree.structure(case.params).unflatten(outcome.grads), grads, floor=GRAD_FLOOR)
            found.append(outcome)
        chex.assert_trees_all_equal(*found)


@pytest.mark.filterwarnings("ignore::jaxpp.MicrobatchWarning", "ignore::jaxpp.ModelStateWarning")  # a ResNet has statistics
@pytest.mark.parametrize(
    "name", ["nnx_gpt", *(pytest.param(name, marks=pytest.mark.long) for name in ("resnet", "seq2seq", "unet"))]
)
def test_fused_steps_of_the_zoo_are_verified(name):
    case = ZOO[name]("float32")
    options = {"has_state": True} if case.model_state is not None else {}
    options |= {} if case.weight is None else {"weight": case.weight}
    variables = case.params if case.model_state is None else (case.params, case.model_state)
    pipe = pipeline(case.loss_fn, optax.adamw(1e-3), 2, 2, fuse=True, **options)
    state = pipe.init(variables, case.batch)
    assert "1F1 1B1" in labels(pipe.engine, "update", case.batch, case.key)
    pipe.verify(state, case.batch, case.key)


def test_fused_with_a_loss_scale_replicas_a_mesh_and_one_stage():
    x = np.random.default_rng(0).normal(size=(16, 4)).astype("float32")
    for options in ({"loss_scale": DynamicScale()}, {"data_parallel": 2}, {"stages": 1}, {"remat": "recompute"}, {"remat": None}):
        pipe = pipeline(**({"fuse": True, "microbatches": 4} | options))
        state = pipe.init(PARAMS, x)
        assert any("B0" in label and "F0" in label for label in labels(pipe.engine, "update", x))
        pipe.verify(state, x)


def test_a_fused_stage_keeps_no_residual_and_its_actions_are_still_two_in_profile_and_schedule():
    case = gpt_case()

    def loss(params, batch, key):
        return case.loss_fn(params, batch, key)[0]

    pipe = pipeline(loss, optax.adam(1e-3), 2, 4, fuse=True)
    state = pipe.init(case.params, case.batch)
    rows = pipe.forecast(case.params, case.batch).stages
    assert rows[1].residuals == 0 < rows[0].residuals
    profile = pipe.profile(state, case.batch, case.key, num_steps=1)
    assert set(profile.actions) == set(pipe.schedule.order)
    for clock in (profile.spans, profile.isolated):
        spans = {str(span.action): span for span in clock if span.action is not None and not span.sends}
        for i in range(4):
            forward, backward = spans[f"1F{i}"], spans[f"1B{i}"]
            assert forward.end == backward.start
            assert forward.start < forward.end < backward.end
    assert "1F0" in str(profile)
    assert profile.schedule == pipe.schedule


@pytest.mark.filterwarnings("ignore:fuse=True. the last stage:jaxpp.OptionWarning")
def test_what_is_not_fused():
    x = jnp.ones((8, 4))
    for options in ({}, {"fuse": False}, {"fuse": True, "schedule": "gpipe"}, {"fuse": True, "schedule": "zb-h1"}):
        pipe = pipeline(microbatches=4, **options)
        pipe.abstract_state(PARAMS, x)
        found = labels(pipe.engine, "update", x)
        assert "1F0" in found
        assert not [label for label in found if " " in label]
    pipe = pipeline(microbatches=4, fuse=True)
    pipe.abstract_state(PARAMS, x)
    with jax.debug_nans(True):
        assert "1F0" in labels(pipe.engine, "update", x)  # though it was lowered before
        pipe = pipeline(microbatches=4, fuse=True)
        pipe.abstract_state(PARAMS, x)
        assert "1F0" in labels(pipe.engine, "update", x)


def test_value_and_grad_fuses_too():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 4)), jnp.float32)
    loss, grads = jaxpp.value_and_grad(loss_fn, num_stages=2, num_microbatches=4, fuse=True)(PARAMS, x)
    wanted, wanted_grads = jax.value_and_grad(loss_fn)(PARAMS, x)
    np.testing.assert_allclose(loss, wanted, rtol=1e-6)
    chex.assert_trees_all_close(grads, wanted_grads, rtol=1e-5)


def test_the_shares_of_a_fused_program_are_those_of_its_flops():
    schedule = make("1f1b", 2, 2)
    x = jnp.ones((8, 4))
    pipe = pipeline(schedule=schedule, fuse=True)
    pipe.abstract_state(PARAMS, x)
    (line, *_) = [line for line in pipe.engine.lower("update", x, None).bound.lines if line.fused is not None]
    assert line.fused.action.kind == Kind.B
    assert 0.2 < line.fused.share < 0.5  # a forward's products are a third of all
