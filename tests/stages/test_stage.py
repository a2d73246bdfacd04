"""The programs of a stage: what they read, make and keep; B is I then W: the same work, divided, and the same result."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpp
from jaxpp.engine.engine import open_engine
from jaxpp.lowering.lower import lower
from jaxpp.options import Options
from jaxpp.runtime.hlo import read_kernels
from jaxpp.schedule import Schedule
from jaxpp.stages import stage
from jaxpp.stages.cost import count_bytes, count_flops
from jaxpp.stages.cuts.balance import balance, owners, resolve
from jaxpp.stages.cuts.cut_loss import cut
from jaxpp.stages.graph import descendants, trace
from jaxpp.stages.loss.traced_loss import trace_loss
from jaxpp.stages.program import SMALL, Ref, Role, packs_of
from jaxpp.targets import target
from jaxpp.verify import GRAD_FLOOR, compare, oracle
from models.gpt import GPT
from models.mlp import MLP
from tests.grids import covering
from tests.models import gpt_case, mlp_case


def shapes(tree, size=None):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((size or x.shape[0], *x.shape[1:]), x.dtype), tree)


def cut_case(case, stages, size=3):
    loss = trace_loss(case.loss_fn, case.params, shapes(case.batch, size), case.key, has_aux=True)
    cuts = balance(loss, stages)
    return cut(loss, cuts, owners(loss, cuts))


@pytest.fixture(scope="module")
def big_gpt():
    """The GPT of the model file's defaults: 8 blocks, traced at its real size (nothing runs)."""
    model = GPT()
    tokens = jax.ShapeDtypeStruct((2, model.max_length + 1), jnp.int32)
    params = jax.eval_shape(lambda key: model.init(key, jnp.zeros((1, model.max_length), int), True)["params"], jax.random.key(0))

    def loss_fn(params, batch, key):
        logits = model.apply({"params": params}, batch[:, :-1], rngs={"dropout": key})
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()

    return model, trace_loss(loss_fn, params, tokens, jax.random.key(0), has_aux=False)


def test_the_gpt_is_cut_between_blocks_with_one_hidden_activation_on_each_boundary(big_gpt):
    model, loss = big_gpt
    cuts = balance(loss, 4)
    found = cut(loss, cuts, owners(loss, cuts))
    assert [aval.shape for aval in found.activations] == [(2, model.max_length, model.width)] * 3
    assert found.producer == (0, 1, 2)
    assert found.consumers == ((1,), (2,), (3,))
    starts = [loss.graph.names[loss.spine[k]].split("/")[1] for k in cuts]
    assert starts == ["h_2", "h_4", "h_6"]


def test_the_gpt_stages_are_balanced_within_ten_percent(big_gpt):
    _, loss = big_gpt
    cuts = balance(loss, 4)
    flops = [code.flops for code in cut(loss, cuts, owners(loss, cuts)).stages]
    assert max(abs(f / (sum(flops) / 4) - 1) for f in flops) < 0.1


def test_the_cost_of_a_graph_counts_multiplies_and_adds():
    graph, _ = trace(lambda a, b: jnp.tanh(a @ b), jnp.ones((3, 5)), jnp.ones((5, 7)))
    assert sum(map(count_flops, graph.eqns)) == 2 * 3 * 5 * 7 + 3 * 7


def test_a_scan_costs_its_body_times_its_length():
    graph, _ = trace(lambda x: jax.lax.scan(lambda c, _: (c @ c, None), x, length=6)[0], jnp.ones((4, 4)))
    assert sum(map(count_flops, graph.eqns)) == 6 * 2 * 4 * 4 * 4


@pytest.mark.parametrize(("stages", "compute"), covering([1, 2, 4], [None, "bfloat16"]))
def test_residuals_hold_nothing_that_depends_on_parameters_alone(make_case, compute, stages):
    case = make_case("float32", compute=compute)
    weights = {leaf.shape for leaf in jax.tree.leaves(case.params) if leaf.ndim > 1}
    weights |= {shape[::-1] for shape in weights}
    for code in cut_case(case, stages, size=3).stages:
        assert code.residuals, "a stage that is differentiated keeps something"
        for aval in code.residuals:
            assert aval.shape not in weights
            of_key = aval.shape == (1, 1, 8, 8)  # Flax drops the same attention weights for the whole batch
            assert 3 in aval.shape or of_key, f"{aval} has no batch axis"


def test_the_check_on_residuals_can_fail():
    case = mlp_case()
    model = MLP(width=16, depth=7)

    def kept(params, x):
        return jax.vjp(lambda params, x: model.apply({"params": params}, x), params, x)[1]

    plain = jax.tree.leaves(jax.eval_shape(kept, case.params, jnp.ones((3, 16))))
    assert any(leaf.shape == (16, 16) for leaf in plain)


@pytest.mark.parametrize("make_case", [mlp_case, gpt_case], ids=["mlp", "gpt"])
def test_a_cast_of_the_weights_happens_once_per_step_and_stage(make_case):
    for code in cut_case(make_case("float32", compute="bfloat16"), 2).stages:
        cast = [aval for aval in code.statics.results if aval.dtype == jnp.bfloat16]
        assert cast, "the casts are statics"
        for program in (code.forward, *(backward.then for backward in code.backward.values())):
            args = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in program.avals]
            graph, _ = trace(program.function, *args)
            of_params = descendants(
                graph, [v for v, ref in zip(graph.inputs, program.inputs, strict=True) if ref.role == Role.PARAM]
            )
            of_rest = descendants(graph, [v for v, ref in zip(graph.inputs, program.inputs, strict=True) if ref.role != Role.PARAM])
            again = [
                eqn
                for eqn in graph.eqns
                if eqn.primitive.name == "convert_element_type"
                and eqn.outvars[0] in of_params - of_rest
                and eqn.outvars[0].aval.size > 64
            ]
            assert not again


def test_statics_are_made_from_parameters_alone(make_case):
    for code in cut_case(make_case("float32", compute="bfloat16"), 3).stages:
        assert {ref.role for ref in code.statics.inputs} <= {Role.PARAM, Role.CONSTANT}


def test_small_statics_are_one_vector_that_the_programs_of_the_stage_slice():
    """Each array of its own would be a kernel of the program that makes it, and an argument of every program that reads it."""
    case = gpt_case("float32", compute="bfloat16", width=64)
    for code in cut_case(case, 2).stages:
        names, results = code.statics.outputs, code.statics.results
        large = [aval for ref, aval in zip(names, results, strict=True) if ref.index >= 0]
        vectors = {ref: aval for ref, aval in zip(names, results, strict=True) if ref.index < 0}
        assert all(count_bytes(aval) > SMALL for aval in large)
        (aval,) = vectors.values()
        assert aval.dtype == jnp.bfloat16
        assert len(aval.shape) == 1
        programs = [code.forward, *(each for backward in code.backward.values() for each in (backward.first, backward.then))]
        assert vectors.keys() <= set(code.forward.inputs)
        for program in programs:
            assert {ref for ref in program.inputs if ref.role == Role.STATIC} <= set(names)


def test_small_truth_values_lie_in_the_vector_of_the_narrowest_small_numbers():
    """Batch normalisation keeps a mask a channel, beside two numbers: a vector of masks would be a kernel more in each forward."""
    many = jnp.arange(SMALL) % 3 == 0  # small, but not where each value takes two bytes
    halves = jnp.full(2, 0.5, "bfloat16"), jnp.arange(4, dtype="bfloat16")
    arrays = [jnp.ones(3), halves[0], jnp.array([[True], [False]]), halves[1], -jnp.ones(1), many]
    refs = [Ref(Role.RESIDUAL, k) for k in range(len(arrays))]
    packs = packs_of(refs, arrays, Ref(Role.RESIDUAL))
    assert [[ref.index for ref in pack.members] for pack in packs] == [[0, 4], [1, 3, 2]]
    assert [pack.ref.index for pack in packs] == [-1, -2]
    assert [(pack.aval.dtype, pack.aval.size) for pack in packs] == [(jnp.float32, 4), (jnp.bfloat16, 8)]
    given = dict(zip(refs, arrays, strict=True))
    for pack in packs:
        for ref, part in pack.split(pack.join(given)).items():
            assert part.dtype == given[ref].dtype
            np.testing.assert_array_equal(part, given[ref])
    alone = [jnp.ones(2, bool), jnp.zeros(3, bool), jnp.ones(3)]
    matrices = [jnp.ones((2, 2), bool), jnp.zeros((2, 2), bool), jnp.ones(3), jnp.ones(3)]
    for given, dtypes in ((alone, [bool]), (matrices, [jnp.float32, bool])):  # no other vector; masks that products may read
        assert [pack.aval.dtype for pack in packs_of(refs[: len(given)], given, Ref(Role.RESIDUAL))] == dtypes


def test_many_small_arrays_lie_in_short_vectors_at_few_different_places():
    """XLA compiles a kernel for each place of a vector: for 1,000 leaves the updates took 30 seconds, and plain JAX's step 4."""
    arrays = [jnp.full((2, 3) if k % 2 else (3,), k, "float32") for k in range(240)]
    refs = [Ref(Role.GRAD, k) for k in range(len(arrays))]
    packs = packs_of(refs, arrays, Ref(Role.GRAD))
    given = dict(zip(refs, arrays, strict=True))
    found = {ref: part for pack in packs for ref, part in pack.split(pack.join(given)).items()}
    assert found.keys() == given.keys()
    for ref, part in found.items():
        np.testing.assert_array_equal(part, given[ref])
    pairs = [(pack.aval.shape, *pair) for pack in packs for pair in zip(pack.bounds, pack.avals, strict=True)]
    assert len({(whole, place, aval.shape) for whole, place, aval in pairs}) < 70
    assert len(packs) < len(arrays) / 10, "each vector costs the host as much as a leaf"
    assert len({pack.ref for pack in packs}) == len(packs)
    assert len(packs_of(refs[:64], arrays[:64], Ref(Role.GRAD))) == 1


@pytest.mark.targets
def test_on_a_gpu_small_statics_are_made_by_one_kernel_and_sliced_by_none():
    pytest.importorskip("jax_plugins.xla_cuda12")
    width, biases = 512, [f"b{k}" for k in range(8)]
    params = {"w": jax.ShapeDtypeStruct((width, width), "float32"), "v": jax.ShapeDtypeStruct((width, width), "float32")}
    params |= {name: jax.ShapeDtypeStruct((width,), "float32") for name in biases}

    def loss_fn(params, x):
        h = x.astype("bfloat16") @ params["w"].astype("bfloat16")
        for name in biases:
            h = jnp.tanh(h + params[name].astype("bfloat16"))
        return ((h @ params["v"].astype("bfloat16")).astype("float32") ** 2).mean()

    pipe = jaxpp.Pipeline(loss_fn, optax.sgd(1.0), num_stages=2, num_microbatches=1, cuts=["v"], devices=target("h100", 2))
    batch = jax.ShapeDtypeStruct((64, width), "float32")
    pipe.abstract_state(params, batch)
    plan, low = pipe.engine.plan("update", batch, None)
    pairs = zip(low.bound.lines, plan.instructions, strict=True)
    texts = {line.program.name: step.call.as_text() for line, step in pairs if line.program is not None}
    assert len(read_kernels(texts["begin_stage_0"])) <= 1 + 1 + 2  # the biases, the matrix, zeros of two sums
    for name in ("stage_0_forward", "stage_0_backward"):
        assert not [kernel.name for kernel in read_kernels(texts[name]) if "slice" in kernel.name]


def test_the_first_stage_returns_no_cotangent_and_the_others_one_for_each_value_received():
    found = cut_case(gpt_case(), 3)
    for code in found.stages:
        returned = [ref.index for ref in code.backward["B"].then.outputs if ref.role == Role.COTANGENT]
        received = [k for k, readers in enumerate(found.consumers) if code.index in readers]
        assert sorted(returned) == received
    assert not [ref for ref in found.stages[0].backward["B"].then.outputs if ref.role == Role.COTANGENT]


def test_labels_are_read_by_the_last_stage_only_and_inputs_by_the_first():
    found = cut_case(mlp_case(), 4)
    read = [
        {ref.index for p in (c.forward, c.backward["B"].then) for ref in p.inputs if ref.role == Role.BATCH} for c in found.stages
    ]
    assert read == [{0}, set(), set(), {1}]


def test_a_value_that_skips_stages_goes_straight_to_its_reader():
    def loss_fn(params, x):
        first = jnp.tanh(x @ params[0])
        h = first
        for w in params[1:4]:
            h = jnp.tanh(h @ w)
        return jnp.mean((h + first) ** 2), ()

    params = [jnp.ones((8, 8))] * 4
    loss = trace_loss(loss_fn, params, jnp.ones((2, 8)), None, has_aux=True)
    cuts = resolve(loss, ["1", "2", "3"])
    found = cut(loss, cuts, owners(loss, cuts))
    assert found.consumers == ((1, 3), (2,), (3,))


def test_a_mask_is_made_where_it_is_used_and_never_sent():
    def loss_fn(params, tokens):
        mask = (tokens[:, :, None] == tokens[:, None, :]).astype(jnp.float32)
        h = params[0][tokens]
        for w in params[1:]:
            h = jnp.tanh(mask @ h @ w)
        return jnp.mean(h**2)

    params = [jnp.ones((5, 8)), *[jnp.ones((8, 8))] * 4]
    loss = trace_loss(loss_fn, params, jnp.zeros((2, 16), int), None, has_aux=False)
    cuts = balance(loss, 3)
    found = cut(loss, cuts, owners(loss, cuts))
    assert [aval.shape for aval in found.activations] == [(2, 16, 8)] * 2
    assert sum(count_bytes(aval) for aval in found.activations) == 2 * 2 * 16 * 8 * 4


def test_a_loss_that_is_one_jit_or_one_checkpoint_is_cut_too():
    def body(params, x):
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    params = [jnp.ones((8, 8))] * 4
    for wrapped in (jax.jit(body), jax.checkpoint(body), jax.jit(jax.checkpoint(jax.jit(body)))):
        loss = trace_loss(wrapped, params, jnp.ones((2, 8)), None, has_aux=False)
        cuts = balance(loss, 4)
        found = cut(loss, cuts, owners(loss, cuts))
        assert owners(loss, cuts) == (0, 1, 2, 3)
        if wrapped is not body and loss.remat is not None:
            assert all(not code.residuals for code in found.stages), "a checkpointed stage keeps only what it was given"


def test_one_parameter_may_serve_two_stages():
    found = cut_case(gpt_case(), 4)
    (embedding,) = [k for k, path in enumerate(found.loss.param_paths) if path == "embed/embedding"]
    assert [embedding in code.params for code in found.stages] == [True, False, False, True]
    assert np.unique(owners(found.loss, found.cuts)).tolist() == [0, 1, 2, 3]


def test_without_names_in_the_equations_parameters_say_where_a_stage_is():
    def loss_fn(params, x):
        for layer in params["blocks"]:
            x = jnp.einsum("bi,ij->bj", jnp.tanh(x), layer["w"]["value"])  # einsum leaves a name of its own
        return (x**2).mean()

    params = {"blocks": [{"w": {"value": jnp.eye(8)}} for _ in range(4)]}
    loss = trace_loss(loss_fn, params, jnp.ones((2, 8)), None, has_aux=False)
    cuts = balance(loss, 2)
    found = cut(loss, cuts, owners(loss, cuts))
    assert [code.modules for code in found.stages] == [("blocks.0", "blocks.1"), ("blocks.2", "blocks.3")]
    assert loss.param_paths == ("blocks/0/w", "blocks/1/w", "blocks/2/w", "blocks/3/w")
    assert resolve(loss, ["blocks/2"]) == cuts


def test_a_mask_of_tokens_is_made_again_where_it_is_read():
    def loss_fn(params, tokens):
        mask = (tokens != 0)[:, :, None]
        x = jnp.zeros((*tokens.shape, 8)) + params["embed"][tokens]
        for k in range(4):
            x = jnp.tanh(x @ params[f"w{k}"]) * mask
        return (x**2).mean()

    params = {f"w{k}": jnp.eye(8) for k in range(4)} | {"embed": jnp.ones((9, 8))}
    loss = trace_loss(loss_fn, params, jnp.ones((2, 6), int), None, has_aux=False)
    cuts = balance(loss, 4)
    found = cut(loss, cuts, owners(loss, cuts))
    assert {aval.shape for aval in found.activations} == {(2, 6, 8)}
    assert len(found.activations) == 3


def test_debug_print_works_in_every_stage(capfd):
    def loss_fn(params, x):
        for k in range(2):
            x = jnp.tanh(x @ params[k])
            jax.debug.print("layer {k} {v}", k=k, v=x.shape[0])
        return (x**2).mean()

    jaxpp.value_and_grad(loss_fn, num_stages=2, num_microbatches=3)([jnp.eye(4)] * 2, jnp.ones((6, 4)))
    jax.effects_barrier()
    assert sorted(capfd.readouterr().out.splitlines()) == ["layer 0 2"] * 3 + ["layer 1 2"] * 3


OPTIONS = {"has_aux": True, "weight": None, "cuts": None, "devices": None}


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


@pytest.mark.parametrize(
    ("make_case", "stages"), [(mlp_case, 3), pytest.param(gpt_case, 4, marks=pytest.mark.long)], ids=["mlp", "gpt"]
)
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
        pytest.param(rows("0F0 0F1 0F2 0B0 0B1 0I2 0W2", "1F0 1B0 1F1 1F2 1I1 1I2 1W2 1W1"), marks=pytest.mark.long),
        rows("0F0 0F1 0I0 0B1 0W0", "1F0 1I0 1W0 1F1 1B1"),
    ],
)
@pytest.mark.long
def test_b_and_i_w_mix_on_one_stage(cells):
    case = mlp_case()
    mine = Schedule("mine", cells)
    m = mine.num_microbatches
    found = jaxpp.value_and_grad(case.loss_fn, num_stages=2, num_microbatches=m, schedule=mine, has_aux=True)(
        case.params, case.batch
    )
    loss, aux, grads = oracle(case.loss_fn, case.params, case.batch, None, m, has_aux=True, reducers=case.reducers)
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
@pytest.mark.filterwarnings("ignore::jaxpp.MicrobatchWarning")  # a row of the parameter for each row of a microbatch
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


@pytest.mark.parametrize("kind", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_the_loss_gets_a_key_of_the_kind_that_was_given(kind):
    seen = []

    def loss_fn(params, batch, key):
        seen.append(str(jax.random.key_impl(key)))
        return (params * batch * jax.random.normal(key, batch.shape)).mean()

    key = jax.eval_shape(lambda: jax.random.key(0, impl=kind))
    trace_loss(loss_fn, jnp.ones(4), jnp.ones((2, 4)), key, has_aux=False)
    assert set(seen) == {kind}


def _tanh_by_vjp(factor):
    """A function with a derivative of its own, in a ``jit``, which traces it once."""
    function = jax.custom_vjp(jnp.tanh)
    function.defvjp(lambda x: (jnp.tanh(x), x), lambda x, g: (factor * g * (1 - jnp.tanh(x) ** 2),))
    return jax.jit(function)


def _tanh_by_jvp(factor):
    function = jax.custom_jvp(jnp.tanh)
    function.defjvp(lambda primals, tangents: (jnp.tanh(primals[0]), factor * tangents[0] * (1 - jnp.tanh(primals[0]) ** 2)))
    return jax.jit(function)


@pytest.mark.parametrize("tanh", [_tanh_by_vjp, _tanh_by_jvp])
@pytest.mark.parametrize(("factors", "traces"), [((1, 1, 1, 1), 3), ((1, 1, 2, 1), 4)])
def test_stages_that_are_alike_are_traced_once_and_those_with_another_derivative_are_not(monkeypatch, factors, traces, tanh):
    of_factor = {factor: tanh(factor) for factor in set(factors)}

    def loss_fn(params, batch):
        for k, factor in enumerate(factors):
            batch = of_factor[factor](batch @ params[f"w{k}"])
        return (batch**2).mean()

    keys = jax.random.split(jax.random.key(0), len(factors))
    params, batch = (
        {f"w{k}": jax.random.normal(key, (8, 8)) / 3 for k, key in enumerate(keys)},
        jnp.linspace(-1, 1, 32).reshape(4, 8),
    )
    traced, tracing = [], stage.trace
    monkeypatch.setattr(stage, "trace", lambda *args, **options: [traced.append(args), tracing(*args, **options)][1])
    pipe = jaxpp.Pipeline(loss_fn, optax.sgd(0.1), num_stages=4, num_microbatches=2, cuts=["w1", "w2", "w3"])
    state = pipe.init(params, batch)
    assert len(traced) == traces
    pipe.verify(state, batch)
