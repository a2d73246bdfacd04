"""What a stage keeps: everything, its inputs, what a policy says, or the least; the gradients are the same.

Of the least: never more than everything, nothing costly computed again, and as exact as before. Nearly all is read off the
equations of the programs; nothing is compiled for that.
"""

import collections
import contextlib
import os
import pathlib
import subprocess
import sys

import chex
import jax
import jax.numpy as jnp
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name

import jaxpp
from jaxpp.engine.engine import open_engine
from jaxpp.errors import ArgumentError
from jaxpp.options import Options
from jaxpp.schedule.registry import make_for_stages
from jaxpp.stages.cost import count_bytes
from jaxpp.stages.cuts.balance import balance, owners
from jaxpp.stages.cuts.cut_loss import cut
from jaxpp.stages.graph import trace
from jaxpp.stages.jaxpr import kind_of
from jaxpp.stages.loss.traced_loss import trace_loss
from jaxpp.stages.program import Role
from jaxpp.stages.remat import Least, RematPolicy, policies_of
from jaxpp.stages.repeatable import settled
from jaxpp.stages.stacked import assembled
from jaxpp.stages.stage import ProgramOptions
from jaxpp.verify import GRAD_FLOOR, compare, oracle
from models.gpt import GPT
from tests.models import ZOO as CASES
from tests.models import gpt_case, mlp_case
from tests.random_models import LAYERS, from_host, half, random_model
from tests.stages.test_stage import matmul_flops

POLICIES = jax.checkpoint_policies


def cut_case(case, stages, policy):
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct((4, *x.shape[1:]), x.dtype), case.batch)
    loss = trace_loss(case.loss_fn, case.params, batch, case.key, has_aux=True)
    cuts = balance(loss, stages)
    return cut(loss, cuts, owners(loss, cuts), ProgramOptions(remat=policies_of(policy, stages, "cpu")))


@pytest.mark.parametrize(
    ("schedule", "remat"),
    [
        pytest.param("1f1b", "recompute", marks=pytest.mark.long),
        pytest.param("zb-h1", POLICIES.dots_saveable, marks=pytest.mark.long),
        ("zb-h1", ["recompute", "keep", "recompute"]),
    ],
    ids=["recompute", "policy", "stages"],
)
@pytest.mark.parametrize("make_case", [mlp_case, pytest.param(gpt_case, marks=pytest.mark.long)], ids=["mlp", "gpt"])
def test_gradients_do_not_depend_on_what_is_kept(make_case, schedule, remat):
    case = make_case()
    options = {"num_stages": 3, "num_microbatches": 3, "schedule": schedule, "has_aux": True, "remat": remat}
    args = (case.params, case.batch, *([] if case.key is None else [case.key]))
    (loss, _), grads = jaxpp.value_and_grad(case.loss_fn, **options)(*args)
    expected, _, expected_grads = oracle(case.loss_fn, case.params, case.batch, case.key, 3, has_aux=True, reducers=case.reducers)
    compare("loss", loss, expected)
    compare("grads", grads, expected_grads, floor=GRAD_FLOOR)


@pytest.mark.parametrize(
    ("make_case", "stages"), [(mlp_case, 3), pytest.param(gpt_case, 2, marks=pytest.mark.long)], ids=["mlp", "gpt"]
)
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
    stages = cut(loss, (), (0, 0), ProgramOptions(remat=policies_of(POLICIES.save_only_these_names("mine"), 1, "cpu"))).stages
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


@pytest.mark.parametrize("wrong", ["all", ["keep", "none"], ["keep"], 3, [None, 1], jaxpp.Offload])
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


@pytest.mark.long
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


ROOT = pathlib.Path(__file__).parents[2]
KEPT_FOR_A_MICROBATCH = (Role.RESIDUAL, Role.ACTIVATION, Role.STATE, Role.BATCH)
NEVER_AGAIN = frozenset(
    "dot_general conv_general_dilated threefry2x32 random_bits sort top_k argmax argmin gather scatter scatter-add cumsum cummax "
    "cumprod cumlogsumexp reduce_window_max select_and_scatter_add fft scan while cond pure_callback debug_callback".split()
)


def shapes(tree, size=None):
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((size or leaf.shape[0], *leaf.shape[1:]), leaf.dtype), tree)


def cut_with(loss, stages, *ways):
    """The loss cut at the same places, one cut a way to keep."""
    cuts = balance(loss, stages)
    return [cut(loss, cuts, owners(loss, cuts), ProgramOptions(remat=(way,) * stages, pack=False)).stages for way in ways]


def traced(case):
    """The loss of a case of the zoo."""
    options = {} if case.model_state is None else {"model_state": case.model_state}
    return trace_loss(case.loss_fn, case.params, shapes(case.batch), case.key, has_aux=False, **options)


def kept(code, kind="B"):
    """Bytes that a program of the backward reads and that are there for it alone; for W what I holds for it, cotangents too."""
    if kind not in code.backward or (kind == "W" and "I" not in code.backward):
        return 0
    roles = (*KEPT_FOR_A_MICROBATCH, Role.COTANGENT) if kind == "W" else KEPT_FOR_A_MICROBATCH
    program = code.backward[kind].then
    return sum(
        count_bytes(aval) for ref, aval in zip(program.inputs, program.avals, strict=True) if ref.role in roles and not ref.shared
    )


def work(code, kinds):
    """How often each primitive stands in the forward and these programs of the backward, loops and calls looked into."""
    found = collections.Counter()

    def add(jaxpr):
        for eqn in jaxpr.eqns:
            found[eqn.primitive.name] += 1
            for value in eqn.params.values():
                for item in value if isinstance(value, (tuple, list)) else (value,):
                    inner = getattr(item, "jaxpr", item)
                    if hasattr(inner, "eqns"):
                        add(inner)

    for program in (code.forward, *(code.backward[kind].then for kind in kinds if kind in code.backward)):
        add(jax.make_jaxpr(program.function)(*program.avals).jaxpr)
    return found


def check_random(seed, transcendental=0.0, *, policy=None, count=True):
    model = random_model(seed)
    loss = trace_loss(model.loss_fn, model.params, shapes(model.batch), model.key, has_aux=False, frozen=model.frozen)
    for before, after in zip(*cut_with(loss, model.stages, RematPolicy(), policy or Least(transcendental)), strict=True):
        where = f"random_model({seed}), stage {after.index}: {model}"
        for kind in "BW":
            assert kept(after, kind) <= kept(before, kind), f"{kind} of {where}"
        for kinds in ("B", "IW") if count else ():
            then, now = work(before, kinds), work(after, kinds)
            assert {name: now[name] for name in NEVER_AGAIN} == {name: then[name] for name in NEVER_AGAIN}, f"{kinds} of {where}"


@pytest.mark.parametrize("tens", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_no_random_model_keeps_more_than_everything_or_does_costly_work_again(tens):
    for seed in range(10 * tens, 10 * tens + 10):
        check_random(seed, float(seed % 2))


@pytest.mark.long
def test_no_random_model_keeps_more_than_everything():
    for seed in range(20, 40):
        check_random(seed, float(seed % 2), count=False)


@pytest.mark.slow
@pytest.mark.parametrize("transcendental", [0.0, 1.0])
def test_of_300_random_models_none_keeps_more_or_does_costly_work_again(transcendental):
    for seed in range(300):
        check_random(seed, transcendental)


def gpt_loss(dtype, dropout, *, depth=4, width=256, length=64, heads=4, size=8):
    model = GPT(256, max_length=length, width=width, depth=depth, num_heads=heads, dropout=dropout, dtype=dtype)

    def loss_fn(params, batch, key):
        logits = model.apply({"params": params}, batch[:, :-1], rngs={"dropout": key})
        return optax.softmax_cross_entropy_with_integer_labels(logits.astype("float32"), batch[:, 1:]).mean()

    key = jax.random.key(0)
    params = jax.eval_shape(lambda k: model.init({"params": k, "dropout": k}, jnp.zeros((1, length), int))["params"], key)
    loss = trace_loss(loss_fn, params, jax.ShapeDtypeStruct((size, length + 1), jnp.int32), key, has_aux=False)
    return loss, size * length * width * jnp.dtype(dtype).itemsize


@pytest.mark.parametrize(
    ("dtype", "dropout", "most"),
    [("bfloat16", 0.1, 13), *(pytest.param("float32", *case, marks=pytest.mark.long) for case in [(0.0, 12), (0.1, 13)])],
)
@pytest.mark.parametrize("transcendental", [0.0, pytest.param(1.0, marks=pytest.mark.slow)])
def test_a_gpt_keeps_a_dozen_activations_a_block(dtype, dropout, most, transcendental):
    loss, activation = gpt_loss(dtype, dropout)
    for before, after in zip(*cut_with(loss, 2, RematPolicy(), Least(transcendental)), strict=True):
        assert kept(before) / 2 / activation > 30
        assert kept(after) / 2 / activation <= most + (after.index == 1) / 2  # the last stage also keeps its head's operand
        assert kept(after, "W") <= kept(before, "W")


NORMALISED = {"gpt", "resnet", "unet", "seq2seq", "nnx_gpt"}
"""Where gelu, softmax or normalisation stand."""


SLOW = {"unet", "seq2seq", "nnx_gpt"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW) or [pytest.mark.long] * (name != "gpt")) for name in CASES],
)
@pytest.mark.long
def test_every_model_of_the_zoo_keeps_no_more_and_half_where_there_is_much_that_is_cheap(name):
    loss = traced(CASES[name]("float32"))
    for stages in (1, 2):
        before, after = cut_with(loss, stages, RematPolicy(), Least())
        for then, now in zip(before, after, strict=True):
            assert kept(now) <= kept(then)
            assert kept(now, "W") <= kept(then, "W")
            for kinds in ("B", "IW"):
                found, wanted = work(now, kinds), work(then, kinds)
                assert {name: found[name] for name in NEVER_AGAIN} == {name: wanted[name] for name in NEVER_AGAIN}
        if name in NORMALISED:
            assert sum(map(kept, after)) <= sum(map(kept, before)) / 2


def dropped_out(params, x, key):
    for k, w in enumerate(params):
        x = jax.nn.gelu(x @ w)
        x = jnp.where(jax.random.bernoulli(jax.random.fold_in(key, k), 0.9, x.shape), x / 0.9, 0)
    return (x**2).mean()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_of_a_dropout_a_byte_an_element_is_kept(dtype):
    params = [jax.ShapeDtypeStruct((64, 64), dtype)] * 3
    loss = trace_loss(dropped_out, params, jax.ShapeDtypeStruct((32, 64), dtype), jax.random.key(0), has_aux=False)
    ((code,),) = cut_with(loss, 1, Least())
    masks = [aval for aval in code.residuals if aval.dtype == bool]
    assert [aval.shape for aval in masks] == [(32, 64)] * 3
    floats = [aval for aval in code.residuals if aval.dtype != bool]
    assert all(aval.dtype == dtype for aval in floats), "neither random bits nor floats made of them"
    assert kept(code) <= (4 * jnp.dtype(dtype).itemsize + 3) * 32 * 64


def test_what_is_named_is_kept_and_not_made_again():
    def loss_fn(params, x):
        x = checkpoint_name(jnp.tanh(x @ params[0]), "mine")
        return ((jnp.exp(x) @ params[1]) ** 2).mean()

    params = [jax.ShapeDtypeStruct((8, 8), jnp.float32)] * 2
    loss = trace_loss(loss_fn, params, jax.ShapeDtypeStruct((4, 8), jnp.float32), None, has_aux=False)
    ((code,),) = cut_with(loss, 1, Least())
    assert work(code, "B")["tanh"] == 1
    assert kept(code) == 3 * 4 * 8 * 4  # the input, what is named, the second product


def test_a_part_of_an_input_is_kept_where_the_whole_would_take_more():
    def loss_fn(params, x):
        x = x @ params[0]
        return ((x[:, :2] ** 2).sum(1) + x.sum(1) + (x @ params[1]).sum(1)).mean()

    params = [jax.ShapeDtypeStruct((8, 64), jnp.float32), jax.ShapeDtypeStruct((64, 2), jnp.float32)]
    loss = trace_loss(loss_fn, params, jax.ShapeDtypeStruct((4, 8), jnp.float32), None, has_aux=False, frozen=frozenset({1}))
    (codes,) = cut_with(loss, 2, Least())
    assert kept(codes[1]) == 4 * 2 * 4, "two columns of what came from stage 0"


def test_a_decision_of_the_backward_is_not_made_on_a_value_that_is_made_again():
    def function(x, y):
        z = x * y + y  # another program may round it otherwise
        return jnp.exp(z), jnp.where(z > 1, x, y)

    graph, _ = trace(function, jnp.ones(4), jnp.ones(4))
    kinds = [kind_of(eqn) for eqn in graph.eqns]
    decision = kinds.index("gt")
    made = kinds.index("add")
    assert settled(graph, range(len(kinds)))[made]
    assert not settled(graph, [k for k in range(len(kinds)) if k != decision])[made]


def test_a_value_and_its_maximum_are_made_again_together():
    def loss_fn(params, x):
        y = (x @ params) * 50 + 7
        return jnp.log(1e-6 + y.max(-1, keepdims=True) - y).mean()  # steep where they are equal

    params, x = jax.random.normal(jax.random.key(0), (8, 8)), jax.random.normal(jax.random.key(1), (4, 8))
    loss = trace_loss(loss_fn, params, x, None, has_aux=False)
    ((code,),) = cut_with(loss, 1, Least())
    made = work(code, "B")["reduce_max"]
    assert made == 2 or not any(aval.shape[-1:] == (1,) for aval in code.residuals)


def test_what_the_user_checkpoints_stays_checkpointed():
    def loss_fn(params, x):
        for w in params:
            x = jax.checkpoint(lambda x, w: jnp.sin(jnp.tanh(x @ w) @ w))(x, w)
        return (x**2).mean()

    params = [jax.ShapeDtypeStruct((8, 8), jnp.float32)] * 3
    loss = trace_loss(loss_fn, params, jax.ShapeDtypeStruct((4, 8), jnp.float32), None, has_aux=False)
    (before,), (after,) = cut_with(loss, 1, RematPolicy(), Least(1.0))  # a price of ``sin``, or the last one is made again for free
    assert kept(after) <= kept(before)
    assert work(after, "B") == work(before, "B")


def test_effects_happen_once(capfd):
    def loss_fn(params, x):
        h = jnp.tanh(x @ params)
        jax.debug.print("once {v}", v=h.shape[0])
        return jnp.exp(h).mean()

    options = Options.of(loss_fn, num_stages=1, num_microbatches=2)
    engine = open_engine(options, None, (jnp.eye(4),), jnp.ones((4, 4)), None)
    engine.run("grads", engine.bring(jnp.eye(4)), jnp.ones((4, 4)), None)
    jax.effects_barrier()
    assert capfd.readouterr().out.splitlines() == ["once 2"] * 2


def test_beside_boundaries_without_gradient_and_frozen_parameters_no_more_is_kept():
    def loss_fn(params, x):
        for k in range(3):
            x = jax.nn.softmax(jax.nn.gelu(x @ params[k]) * 2)
        return jnp.sin(x).mean()

    params = [jax.ShapeDtypeStruct((8, 8), jnp.float32)] * 3
    batch = jax.ShapeDtypeStruct((4, 8), jnp.float32)
    for frozen, boundaries in (((), (1,)), ((), (0,)), ((0,), ()), ((0, 2), ())):
        loss = trace_loss(loss_fn, params, batch, None, has_aux=False, frozen=frozenset(frozen))
        cuts = balance(loss, 3)
        before, after = (
            cut(loss, cuts, owners(loss, cuts), ProgramOptions(remat=(way,) * 3, cut_gradient=boundaries, pack=False)).stages
            for way in (RematPolicy(), Least())
        )
        for then, now in zip(before, after, strict=True):
            assert kept(now) <= kept(then)
            assert kept(now, "W") <= kept(then, "W")
            assert set(now.backward) == set(then.backward)


def test_a_relu_is_as_cheap_as_what_it_is_made_of():
    def loss_fn(params, x):
        for w in params:
            x = x @ w
            x = jax.nn.relu((x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 0.1))
        return (x @ params[0]).mean()

    params = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 3
    loss = trace_loss(loss_fn, params, jax.ShapeDtypeStruct((32, 64), jnp.float32), None, has_aux=False)
    (before,), (after,) = cut_with(loss, 1, RematPolicy(), Least())
    assert kept(after) <= (1 + 3 + 3 / 4 + 0.5) * 32 * 64 * 4  # the input; of each layer a product and a mask, and rows of one
    assert kept(after) <= kept(before) / 2


ON_GPU = policies_of("least", 1, "gpu")[0]


def residuals(function, policy):
    """The types of what is kept of a layer with a hidden width of 64, between two products."""
    params = [jax.ShapeDtypeStruct(sizes, jnp.float32) for sizes in ((16, 64), (64,), (64, 16))]

    def loss_fn(params, x):
        return ((function(x @ params[0] + params[1]) @ params[2]) ** 2).mean()

    loss = trace_loss(loss_fn, params, jax.ShapeDtypeStruct((32, 16), jnp.float32), None, has_aux=False)
    ((code,),) = cut_with(loss, 1, policy)
    return sorted(aval.dtype.name for aval in code.residuals if aval.shape == (32, 64))


def normalised_relu(x):
    return jax.nn.relu((x - x.mean(0)) * jax.lax.rsqrt(x.var(0) + 0.1))


def test_on_accelerators_what_a_product_of_the_backward_reads_is_kept():
    assert residuals(jax.nn.gelu, Least(1.0)) == ["float32"]
    assert residuals(jax.nn.gelu, ON_GPU) == ["float32"] * 2


def test_on_accelerators_a_relu_behind_a_normalisation_keeps_a_mask_and_one_behind_a_bias_does_not():
    assert residuals(jax.nn.relu, ON_GPU) == residuals(jax.nn.relu, Least(1.0)) == ["float32"]
    assert residuals(normalised_relu, ON_GPU) == ["bool", "float32", "float32"]
    assert residuals(normalised_relu, Least(1.0)) == ["bool", "float32"]


def test_no_random_model_keeps_more_than_everything_on_accelerators():
    for seed in range(5):
        check_random(seed, policy=ON_GPU, count=False)


def test_a_loop_over_layers_keeps_half_and_multiplies_no_more():
    def loss_fn(params, x, key):
        def block(x, row):
            w, key = row
            y = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 0.1)
            y = jax.nn.gelu(y @ w)
            return x + jnp.where(jax.random.bernoulli(key, 0.9, y.shape), y, 0) @ w.T, None

        x, _ = jax.lax.scan(block, x, (params, jax.random.split(key, 6)))
        return (x**2).mean()

    params = jax.ShapeDtypeStruct((6, 16, 64), jnp.float32)
    loss = trace_loss(loss_fn, params, jax.ShapeDtypeStruct((32, 16), jnp.float32), jax.random.key(0), has_aux=False)
    (before,), (after,) = cut_with(loss, 1, RematPolicy(), Least())
    assert kept(after) <= kept(before) / 2
    then, now = work(before, "B"), work(after, "B")
    assert {name: now[name] for name in NEVER_AGAIN} == {name: then[name] for name in NEVER_AGAIN}


def many_equations(depth):
    def loss_fn(params, x):
        for k in range(depth):
            x = jax.nn.gelu(x * params["scale"] + params["bias"]) if k % 8 else x @ params["w"]
        return (x**2).mean()

    leaf = jax.ShapeDtypeStruct((16,), jnp.float32)
    params = {"scale": leaf, "bias": leaf, "w": jax.ShapeDtypeStruct((16, 16), jnp.float32)}
    return trace_loss(loss_fn, params, jax.ShapeDtypeStruct((4, 16), jnp.float32), None, has_aux=False)


def test_a_loop_whose_products_have_a_derivative_of_their_own_keeps_what_that_keeps():
    """Beside a loop over blocks, which is checkpointed: else both loops would be, and products would be kept for nothing."""

    @jax.custom_vjp
    def squashed(x, w):
        return jnp.tanh(x @ w).sum(-1)

    def backward(kept, cotangent):
        x, w = kept
        inner = cotangent[:, None] * (1 - jnp.tanh(x @ w) ** 2)
        return inner @ w.T, x.T @ inner

    squashed.defvjp(lambda x, w: (squashed(x, w), (x, w)), backward)

    def loss_fn(params, batch):
        def block(x, w):
            return x + jnp.tanh(jnp.exp(-jnp.tanh(x @ w))), None

        x, _ = jax.lax.scan(block, batch, params["blocks"])
        total, _ = jax.lax.scan(lambda total, w: (total + squashed(x, w), None), jnp.zeros(len(x)), params["wide"])
        return total.mean()

    params = {"blocks": jnp.ones((3, 8, 8)), "wide": jnp.ones((3, 8, 400))}
    pipe = jaxpp.Pipeline(loss_fn, optax.sgd(0.1), num_stages=1, num_microbatches=1)
    pipe.forecast(params, jnp.ones((16, 8)))
    assert pipe.stages[0].kept < 4 * 16 * 400


@pytest.mark.long
def test_a_stage_of_thousands_of_equations_is_cut():
    before, after = cut_with(many_equations(80), 1, RematPolicy(), Least())
    assert kept(after[0]) < kept(before[0]) / 4


EXACT_LAYERS = tuple(layer for layer in LAYERS if layer not in (half, from_host))  # bfloat16; a host that has no float64
EXACT = [
    (1, "float64"),
    pytest.param(3, "float64", marks=pytest.mark.long),
    pytest.param(8, "float64", marks=pytest.mark.slow),
    pytest.param(17, "float32", marks=pytest.mark.long),
]


@pytest.mark.parametrize(("seed", "dtype"), EXACT)
def test_random_models_equal_the_oracle_and_schedules_that_add_in_the_same_order_give_the_same_bits(seed, dtype):
    with jax.enable_x64(True) if dtype == "float64" else contextlib.nullcontext():
        model = random_model(seed, dtype, EXACT_LAYERS)
        loss, _, grads = oracle(model.loss_fn, model.params, model.batch, model.key, 2)
        options = {"has_aux": False, "weight": None, "cuts": None, "devices": None}
        first = open_engine(
            Options.of(model.loss_fn, num_stages=2, num_microbatches=2, schedule="1f1b", **options),
            None,
            (model.params,),
            model.batch,
            model.key,
        )
        found = {}
        for name in ("1f1b", "gpipe", "zb-h1"):
            made = make_for_stages(name, num_stages=2, num_microbatches=2)
            engine = first.with_schedule(made)
            held = engine.layout.slicing.of(model.params)
            found[name] = engine.run("grads", engine.bring(held), model.batch, model.key)
            compare(f"{name} loss", found[name].loss, loss)
            spread = assembled(jax.tree.structure(held).unflatten(found[name].grads))
            compare(f"{name} grads", spread, grads, floor=GRAD_FLOOR)
        chex.assert_trees_all_equal(found["1f1b"], found["gpipe"])


@pytest.mark.long
def test_matrix_products_and_convolutions_of_compiled_programs_are_those_of_everything_kept():
    def loss_fn(params, batch):
        x = jax.nn.gelu(batch["x"] @ params["a"])
        x = jax.lax.conv_general_dilated(x, params["taps"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))
        x = jax.nn.softmax(x @ params["b"]) * x
        x = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 0.1)
        return jnp.square(jax.nn.silu(x @ params["c"])).mean()

    params = {"a": (6, 8), "b": (8, 8), "c": (8, 6), "taps": (3, 8, 8)}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in params.items()}
    batch = {"x": jax.ShapeDtypeStruct((4, 5, 6), jnp.float32)}
    loss = trace_loss(loss_fn, params, batch, None, has_aux=False)
    for before, after in zip(*cut_with(loss, 2, RematPolicy(), Least()), strict=True):
        assert kept(after) < kept(before)
        for kinds in ("B", "IW"):
            flops = [
                sum(multiplied(code.backward[kind].then) for kind in kinds if kind in code.backward) + multiplied(code.forward)
                for code in (before, after)
            ]
            assert flops[0] == flops[1] > 0


def multiplied(program):
    """FLOPs of matrix products, and a number that grows with every convolution."""
    text = jax.jit(program.function).lower(*program.avals).compile().as_text()
    return matmul_flops(program) + 1e9 * text.count(" convolution(")


@pytest.mark.slow
def test_what_is_decided_at_a_tie_is_decided_once_at_the_default_optimisation():
    flags = [flag for flag in os.environ["XLA_FLAGS"].split() if "optimization_level" not in flag and "fusion_emitters" not in flag]
    command = [sys.executable, "-m", "tests.ties"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "XLA_FLAGS": " ".join(flags)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "equal\n"
