"""B is I then W: the same work, divided, and the same result."""

import math
import re

import jax
import jax.numpy as jnp
import pytest

import jaxpp
from jaxpp.engine.engine import open_engine
from jaxpp.options import Options
from jaxpp.plan.lower import lower
from jaxpp.schedule import Schedule
from jaxpp.stages.cuts.balance import balance, owners
from jaxpp.stages.cuts.cut_loss import cut
from jaxpp.stages.loss.aux import join
from jaxpp.stages.loss.traced_loss import trace_loss
from jaxpp.stages.program import Role
from jaxpp.verify import GRAD_FLOOR, compare, oracle
from tests.conftest import gpt_case, mlp_case

OPTIONS = {"has_aux": True, "weight": None, "cuts": None, "devices": None}


def cut_case(case, stages, size=4):
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype), case.batch)
    loss = trace_loss(case.loss_fn, case.params, batch, case.key, has_aux=True)
    cuts = balance(loss, stages)
    return cut(loss, cuts, owners(loss, cuts))


def matmul_flops(program):
    """Of the compiled program: two for each multiply-add of every dot in its HLO."""
    text = jax.jit(program.function).lower(*program.avals).compile().as_text()
    shapes = dict(re.findall(r"%?([\w.-]+) = \w+\[([\d,]*)\]", text))
    total = 0
    pattern = r"= \w+\[([\d,]*)\]\S* dot\((?:\w+\[[\d,]*\]\S* )?%?([\w.-]+),.*?lhs_contracting_dims=\{([\d,]*)\}"
    for out, left, axes in re.findall(pattern, text):
        depth = [int(shapes[left].split(",")[int(axis)]) for axis in axes.split(",")]
        total += 2 * math.prod(int(n) for n in out.split(",") if n) * math.prod(depth)
    assert total or "dot(" not in text, "every dot is counted"
    assert "custom_call_target" not in text or "matmul" not in text, "no matmul hides in a library call"
    return total


@pytest.mark.parametrize(("make_case", "stages"), [(mlp_case, 3), (gpt_case, 4)], ids=["mlp", "gpt"])
def test_i_and_w_together_do_the_matmuls_of_b_and_no_forward_is_done_again(make_case, stages):
    whole = 0
    for code in cut_case(make_case(), stages).stages:
        parts = {kind: matmul_flops(backward.then) for kind, backward in code.backward.items()}
        assert parts["B"] == pytest.approx(parts.get("I", 0) + parts.get("W", 0), rel=0.01)
        assert parts["B"] <= 2 * matmul_flops(code.forward)
        whole += parts["B"]
        if code.index:
            assert 0 < parts["I"] < parts["B"]
    assert whole


def test_the_first_stage_has_no_i_and_what_crosses_to_w_is_activations():
    case = gpt_case("float32", compute="bfloat16")
    weights = {leaf.shape for leaf in jax.tree.leaves(case.params) if leaf.ndim > 1}
    codes = cut_case(case, 3, size=3).stages
    assert "I" not in codes[0].backward
    for code in codes[1:]:
        kept = [
            aval
            for ref, aval in zip(code.backward["I"].then.outputs, code.backward["I"].then.results, strict=True)
            if ref.role == Role.RESIDUAL
        ]
        assert kept
        assert not weights & {aval.shape for aval in kept}
        assert not {ref.role for ref in code.backward["W"].then.outputs} - {Role.GRAD}
        assert not [ref for ref in code.backward["I"].then.outputs if ref.role == Role.GRAD]


def rows(*texts):
    return [text.split() for text in texts]


@pytest.mark.parametrize(
    "cells",
    [
        rows("0F0 0F1 0B0 0B1", "1F0 1I0 1F1 1B1 1W0"),  # a sum begun by B, with a W to come
        rows("0F0 0F1 0F2 0B0 0B1 0I2 0W2", "1F0 1B0 1F1 1F2 1I1 1I2 1W2 1W1"),
        rows("0F0 0F1 0I0 0B1 0W0", "1F0 1I0 1W0 1F1 1B1"),
    ],
)
def test_b_and_i_w_mix_on_one_stage(cells):
    case = mlp_case()
    mine = Schedule("mine", cells)
    m = mine.num_microbatches
    found = jaxpp.value_and_grad(case.loss_fn, num_stages=2, num_microbatches=m, schedule=mine, has_aux=True)(
        case.params, case.batch
    )
    loss, aux, grads = oracle(case.loss_fn, case.params, case.batch, None, m, has_aux=True, reducers={1: join})
    compare("loss", found[0][0], loss)
    compare("aux", found[0][1], aux)
    compare("grads", found[1], grads, floor=GRAD_FLOOR)


def test_a_gradient_that_falls_out_of_i_is_summed_there_and_needs_no_w():
    def loss_fn(params, x):
        x = jnp.tanh(x @ params["in"])
        layers = jax.checkpoint(lambda x, ws: jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0])
        return (layers(x, params["stack"]) ** 2).mean()

    keys = jax.random.split(jax.random.key(0), 2)
    params = {"in": jax.random.normal(keys[0], (8, 8)), "stack": jax.random.normal(keys[1], (3, 8, 8)) / 3}
    batch = jax.random.normal(keys[1], (6, 8))
    engine = open_engine(
        Options.of(loss_fn, num_stages=2, num_microbatches=3, schedule="zb-h1", **(OPTIONS | {"has_aux": False})),
        None,
        (params,),
        batch,
        None,
    )
    job = engine.preparer.step(batch, None)
    backward = job.cuts[0].stages[1].backward
    assert [ref.role for ref in backward["I"].then.outputs] == [Role.GRAD, Role.COTANGENT]
    assert "W" not in backward
    assert "1W0" not in [line.label for line in lower(job, engine.options.schedule.order).lines]
    found = engine.run("grads", engine.bring(params), batch, None)
    loss, _, grads = oracle(loss_fn, params, batch, None, 3)
    compare("loss", found.loss, loss)
    compare("grads", jax.tree.structure(params).unflatten(found.grads), grads, floor=GRAD_FLOOR)


@pytest.mark.parametrize("schedule", ["zb-h1", Schedule("mixed", ["0F0 0F1 0B0 0B1", "1F0 1I0 1F1 1B1 1W0"])])
@pytest.mark.parametrize("width", [4, 64], ids=["packed", "unpacked"])
def test_a_parameter_whose_gradient_is_the_cotangent_itself(schedule, width):
    def loss_fn(params, x):
        x = x @ params["w"]
        x = x + params["shift"]  # the gradient of shift is the cotangent that goes on to w's stage
        return ((jnp.sin(x) @ params["v"]) ** 2).mean()

    params = {"w": jnp.eye(width), "shift": jnp.full((2, width), 0.1), "v": jnp.ones((width, width)) / width}
    batch = jnp.arange(4.0 * width).reshape(4, width) / (4 * width)
    options = {"num_stages": 2, "num_microbatches": 2, "schedule": schedule, "cuts": ["shift"]}
    found_loss, found = jaxpp.value_and_grad(loss_fn, **options)(params, batch)
    loss, _, grads = oracle(loss_fn, params, batch, None, 2)
    compare("loss", found_loss, loss)
    compare("grads", found, grads, floor=GRAD_FLOOR)
