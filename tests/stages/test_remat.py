"""What a stage's forward keeps: everything, its inputs only, or what a policy says; the gradients are the same."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name

import jaxpp
from jaxpp.errors import ArgumentError
from jaxpp.stages.cuts.balance import balance, owners
from jaxpp.stages.cuts.cut_loss import cut
from jaxpp.stages.loss.aux import join
from jaxpp.stages.loss.traced_loss import trace_loss
from jaxpp.stages.program import Role
from jaxpp.stages.remat import policies_of
from jaxpp.verify import GRAD_FLOOR, compare, oracle
from tests.conftest import gpt_case, mlp_case
from tests.stages.test_split_backward import matmul_flops

POLICIES = jax.checkpoint_policies


def cut_case(case, stages, policy):
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct((4, *x.shape[1:]), x.dtype), case.batch)
    loss = trace_loss(case.loss_fn, case.params, batch, case.key, has_aux=True)
    cuts = balance(loss, stages)
    return cut(loss, cuts, owners(loss, cuts), remat=policies_of(policy, stages, "cpu"))


@pytest.mark.parametrize(
    ("schedule", "remat"),
    [("1f1b", "recompute"), ("zb-h1", POLICIES.dots_saveable), ("zb-h1", ["recompute", "keep", "recompute"])],
    ids=["recompute", "policy", "stages"],
)
def test_gradients_do_not_depend_on_what_is_kept(make_case, schedule, remat):
    case = make_case()
    options = {"num_stages": 3, "num_microbatches": 3, "schedule": schedule, "has_aux": True, "remat": remat}
    args = (case.params, case.batch, *([] if case.key is None else [case.key]))
    (loss, _), grads = jaxpp.value_and_grad(case.loss_fn, **options)(*args)
    expected, _, expected_grads = oracle(
        case.loss_fn, case.params, case.batch, case.key, 3, has_aux=True, reducers={1: join} if case.name == "mlp" else {}
    )
    compare("loss", loss, expected)
    compare("grads", grads, expected_grads, floor=GRAD_FLOOR)


@pytest.mark.parametrize(("make_case", "stages"), [(mlp_case, 3), (gpt_case, 2)], ids=["mlp", "gpt"])
def test_with_recompute_only_stage_inputs_are_kept_and_the_forward_is_done_once_more(make_case, stages):
    plain = cut_case(make_case(), stages, "keep").stages
    for code, kept in zip(cut_case(make_case(), stages, POLICIES.nothing_saveable).stages, plain, strict=True):
        assert kept.residuals
        assert not code.residuals
        assert not [ref for ref in code.forward.outputs if ref.role == Role.RESIDUAL]
        reads = {ref.role for ref in code.backward["B"].then.inputs}
        assert reads <= {
            Role.PARAM,
            Role.STATIC,
            Role.CONSTANT,
            Role.BATCH,
            Role.KEY,
            Role.ACTIVATION,
            Role.COTANGENT,
            Role.GRAD,
            Role.SCALE,
        }
        flops = {kind: matmul_flops(backward.then) for kind, backward in code.backward.items()}
        before = {kind: matmul_flops(backward.then) for kind, backward in kept.backward.items()}
        assert before["B"] < flops["B"] <= before["B"] + matmul_flops(kept.forward)
        assert flops["W"] == (before["W"] if code.index else flops["B"])  # I recomputes for both; the first stage has no I
        assert flops["B"] == pytest.approx(flops.get("I", 0) + flops["W"])


def test_a_policy_by_name_keeps_what_is_named():
    def loss_fn(params, x):
        x = checkpoint_name(jnp.tanh(x @ params["a"]), "mine")
        return jnp.sin(jnp.cos(x @ params["b"])).sum()

    params, x = {"a": jnp.ones((4, 8)), "b": jnp.ones((8, 8))}, jnp.ones((2, 4))
    loss = trace_loss(loss_fn, params, x, None, has_aux=False)
    stages = cut(loss, (), (0, 0), remat=policies_of(POLICIES.save_only_these_names("mine"), 1, "cpu")).stages
    assert [aval.shape for aval in stages[0].residuals] == [(2, 8)]


@pytest.mark.slow
def test_a_pipeline_that_recomputes_trains_and_verifies():
    case = gpt_case(compute="bfloat16")
    options = {"num_stages": 2, "num_microbatches": 2, "has_aux": True, "remat": "recompute"}
    pipe = jaxpp.Pipeline(case.loss_fn, optax.adam(1e-3), **options)
    state = pipe.init(case.params, case.batch)
    pipe.verify(state, case.batch, case.key)
    _, metrics = pipe.step(state, case.batch, case.key)
    assert jnp.isfinite(metrics.loss)


@pytest.mark.parametrize("wrong", ["all", ["keep", "none"], ["keep"], 3, [None, 1]])
def test_what_is_no_way_to_keep_is_refused(wrong):
    with pytest.raises(ArgumentError, match='everything \\("keep"\\)') as error:
        jaxpp.Pipeline(lambda p, b: 0.0, optax.sgd(1.0), num_stages=2, remat=wrong)
    assert "Fix: " in str(error.value)


def test_a_policy_that_offloads_is_refused_and_named():
    case = mlp_case()
    policy = POLICIES.offload_dot_with_no_batch_dims("device", "pinned_host")
    pipe = jaxpp.Pipeline(case.loss_fn, optax.sgd(1.0), num_stages=2, has_aux=True, remat=policy)
    with pytest.raises(ArgumentError, match="Offloadable for dot_general"):
        pipe.init(case.params, case.batch)


def test_a_second_batch_shape_keeps_as_little_as_the_first():
    case = mlp_case()
    pipe = jaxpp.Pipeline(case.loss_fn, optax.sgd(1.0), num_stages=2, num_microbatches=2, has_aux=True, remat="recompute")
    pipe.init(case.params, case.batch)
    smaller = jax.tree.map(lambda leaf: leaf[:6], case.batch)
    for batch in (case.batch, smaller):
        for codes in pipe.engine.preparer.step(batch, None).cuts:
            assert not any(code.residuals for code in codes.stages)


def test_a_policy_that_raises_is_named():
    case = mlp_case()
    pipe = jaxpp.Pipeline(case.loss_fn, optax.sgd(1.0), num_stages=2, has_aux=True, remat=jax.checkpoint)
    with pytest.raises(TypeError) as error:
        pipe.init(case.params, case.batch)
    assert any("passed as remat" in note for note in error.value.__notes__)
