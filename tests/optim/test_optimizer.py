"""Any optax optimizer, exactly as on one device: every leaf of parameters and state, over several steps."""

import inspect

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpp
from jaxpp.errors import OptimizerError
from jaxpp.lowering.step import Leaves, StateLeaf
from jaxpp.optim.owners import TracedOptimizer
from jaxpp.optim.update import plan_update
from jaxpp.stages.graph import CONDITIONS, opened, trace
from jaxpp.stages.jaxpr import kind_of
from jaxpp.stages.program import Role
from jaxpp.stages.stacked import Slicing
from jaxpp.verify import compare
from tests.models import PARAMS, X, gpt_case, loss_fn, mlp_case, pipeline


def matrices(params):
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


def halves(params):
    return {name: jax.tree.map(lambda _, name=name: "even" if name[-1] in "02468d" else "odd", sub) for name, sub in params.items()}


OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adamw": lambda: optax.adamw(optax.cosine_decay_schedule(1e-2, 20), weight_decay=0.1, mask=matrices),
    "lion": lambda: optax.lion(1e-3),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=8),
    "lamb": lambda: optax.lamb(1e-2),
    "muon": lambda: optax.contrib.muon(1e-2),
    "multi_transform": lambda: optax.multi_transform({"even": optax.adam(1e-2), "odd": optax.set_to_zero()}, halves),
    "clip": lambda: optax.chain(optax.clip_by_global_norm(0.01), optax.adamw(1e-2)),
    "injected": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=optax.linear_schedule(1e-2, 0.0, 9)),
    "plateau": lambda: optax.chain(optax.adam(1e-2), optax.contrib.reduce_on_plateau(patience=1, cooldown=0)),
    "ema": lambda: optax.chain(optax.sgd(0.1), optax.ema(0.9)),
    "schedule_free": lambda: optax.contrib.schedule_free_adamw(1e-2),
    "multi_steps": lambda: optax.MultiSteps(optax.chain(optax.clip_by_global_norm(0.01), optax.adamw(1e-2)), 2),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(1e-2), 2),
}


SHORT = {"clip", "apply_if_finite"}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.long] * (name not in SHORT)) for name in OPTIMIZERS])
@pytest.mark.parametrize("stages", [3])
def test_the_update_equals_plain_optax_fed_with_the_same_gradients(name, stages):
    case = mlp_case(batch_size=12)
    optimizer = OPTIMIZERS[name]()
    pipe = jaxpp.Pipeline(case.loss_fn, optimizer, num_stages=stages, num_microbatches=2, has_aux=True)
    state = pipe.init(case.init, jax.random.key(0), case.batch)
    params = jaxpp.gather(state.params)
    opt_state = jax.jit(optimizer.init)(params)
    compare("opt_state", state.opt_state, opt_state)
    plain = jax.jit(optax.with_extra_args_support(optimizer).update)
    for _ in range(3):
        outcome = pipe.engine.run("grads", pipe.engine.bring(state.params), case.batch, None)
        grads = jaxpp.gather(jax.tree.structure(params).unflatten(outcome.grads))
        updates, opt_state = plain(grads, opt_state, params, value=jaxpp.gather(outcome.loss))
        params = optax.apply_updates(params, updates)
        state, metrics = pipe.step(state, case.batch)
        compare("params", state.params, params)
        compare("opt_state", state.opt_state, opt_state)
        np.testing.assert_allclose(metrics.grad_norm, optax.tree.norm(grads), rtol=1e-5)
        if name == "clip":
            assert metrics.grad_norm > 0.01, "the clip bites"
        params, opt_state = jaxpp.gather((state.params, state.opt_state))


@pytest.mark.parametrize("options", [{}, {"data_parallel": 2, "shard": "gradients"}])
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.long] * (name not in SHORT)) for name in OPTIMIZERS])
def test_the_results_of_an_update_that_are_known_without_a_trace_are_those_of_a_trace(name, options):
    case = mlp_case(batch_size=12)
    pipe = jaxpp.Pipeline(case.loss_fn, OPTIMIZERS[name](), num_stages=3, num_microbatches=2, has_aux=True, **options)
    pipe.abstract_state(jax.eval_shape(lambda: case.params), case.batch)
    programs = [line.program for line in pipe.engine.lower("update", case.batch, None).bound.lines if line.program is not None]
    known = [program for program in programs if program.makes is not None]
    assert len(known) >= 3
    for program in known:
        traced = jax.make_jaxpr(program.function, axis_env=program.env, return_shape=True)(*program.avals)[1]
        assert [(aval.shape, aval.dtype) for aval in program.makes] == [(aval.shape, aval.dtype) for aval in traced]


@pytest.mark.parametrize("make_case", [mlp_case, pytest.param(gpt_case, marks=pytest.mark.long)], ids=["mlp", "gpt"])
def test_every_leaf_is_on_its_owner_after_every_step(make_case):
    case = make_case()
    pipe = jaxpp.Pipeline(case.loss_fn, OPTIMIZERS["clip"](), num_stages=3, num_microbatches=2, has_aux=True)
    state = pipe.init(case.init, jax.random.key(0), case.batch)
    for _ in range(2):
        homes = {path: stage.device for stage in pipe.stages for path in stage.params}
        assert len(homes) == len(jax.tree.leaves(state.params))
        for tree in (state.params, state.opt_state[1][0].mu, state.opt_state[1][0].nu):
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
                assert leaf.devices() == {homes[jax.tree_util.keystr(path, simple=True, separator="/")]}
        state, _ = pipe.step(state, case.batch, case.key)


def planned(optimizer, params, owner):
    leaves = [StateLeaf(Role.PARAM, k, *each) for k, each in enumerate(zip(jax.tree.leaves(params), owner, strict=True))]
    held, loss = TracedOptimizer(optimizer, params).held(Slicing()), jax.ShapeDtypeStruct((), jnp.float32)
    return plan_update(held, Leaves(leaves), list(params), loss, 2, None)


def levels(optimizer, owner=(0, 0, 1, 1, 2, 2)):
    params = {f"w{k}": jnp.ones((40, 40)) for k in range(len(owner))}
    update = planned(optimizer, params, owner)
    big = {part for part, eqn in zip(update.parts, update.graph.eqns, strict=True) if part and eqn.outvars[0].aval.size > 1}
    return {stage: {part.level for part in big if part.stage == stage} for stage in range(3)}


@pytest.mark.parametrize("name", ["sgd", "adamw", "lion", "adafactor", "lamb"])
def test_an_optimizer_without_a_global_norm_updates_all_stages_at_once(name):
    make = {"adamw": lambda: optax.adamw(optax.cosine_decay_schedule(1e-2, 20))}.get(name, OPTIMIZERS[name])
    assert levels(make()) == {0: {0}, 1: {0}, 2: {0}}


def test_a_global_norm_needs_the_scalars_first():
    assert levels(OPTIMIZERS["clip"]()) == {0: {0, 1}, 1: {0, 2}, 2: {0, 2}}


ARGUMENTS = {
    "adv_optimizer": optax.chain(optax.contrib.normalize(), optax.sgd(0.05)),
    "base_optimizer": optax.adam(1e-2),
    "clipping": 0.1,
    "decay": 0.9,
    "eta": 0.1,
    "f": lambda updates, params: updates,
    "freeze_mask": matrices,
    "gamma": 0.5,
    "inner": optax.adam(1e-2),
    "inner_factory": optax.adam,
    "l2_norm_clip": 1.0,
    "learning_rate": 1e-2,
    "mask": matrices,
    "max_backtracking_steps": 3,
    "max_consecutive_errors": 2,
    "max_delta": 0.1,
    "max_linesearch_steps": 3,
    "max_norm": 0.1,
    "measure": lambda *args, **kwargs: jnp.zeros(()),
    "measure_name": "m",
    "noise_multiplier": 0.1,
    "optimizer": optax.adam(1e-2),
    "param_labels": lambda params: jax.tree.map(lambda leaf: "a" if leaf.ndim > 1 else "b", params),
    "seed": 0,
    "should_transform_fn": lambda step, **_: step > 1,
    "step_size": 0.1,
    "step_size_fn": lambda count: 0.1 / (count + 1),
    "threshold": 0.1,
    "transforms": {"a": optax.adam(1e-2), "b": optax.sgd(1e-2)},
    "tx": optax.adam(1e-2),
}
CALLING_THE_LOSS = {"lbfgs", "scale_by_backtracking_linesearch", "scale_by_zoom_linesearch", "sophia"}
PER_EXAMPLE = {"differentially_private_aggregate", "dpsgd"}
UNTRACED = {
    "inject_stateful_hyperparams": "deprecated",
    "lookahead": "its parameters are pairs",
    "measure_with_ema": "its measure depends on what it measures",
    "chain": "of nothing it fails in optax",
    "named_chain": "of nothing it fails in optax",
    "scale_by_muon": "without the numbers of the dimensions it fails in optax",
    "stateless_with_tree_map": "its function takes leaves",
}


def all_of_optax():
    for module in (optax, optax.contrib):
        for name, make in sorted(vars(module).items()):
            if name[0] != "_" and name not in UNTRACED and inspect.isroutine(make):
                signature = inspect.signature(make)
                needed = [key for key, each in signature.parameters.items() if each.default is each.empty and key in ARGUMENTS]
                if "GradientTransformation" in str(signature.return_annotation):
                    yield name, make, {key: ARGUMENTS[key] for key in needed}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Specifying a key will be required")
def test_every_optimizer_of_optax_is_placed_or_refused_by_name():
    params = {f"{kind}{k}": jax.ShapeDtypeStruct((4, 4) if kind == "w" else (4,), "float32") for kind in "bw" for k in range(3)}
    refused, placed = set(), set()
    for name, make, arguments in all_of_optax():
        optimizer = make(**arguments)
        optimizer = optimizer(1e-2) if name == "inject_hyperparams" else optimizer
        try:
            planned(optimizer, params, (0, 1, 2) * 2)
            traced = TracedOptimizer(optimizer, params)
            for home, belongs in zip(traced.homes, traced.belonging, strict=True):  # the two answers to whose a leaf is
                assert home is None or len(belongs) != 1 or belongs == {home}, name
            placed.add(name)
        except OptimizerError:
            refused.add(name)
    assert refused == CALLING_THE_LOSS | PER_EXAMPLE
    assert {"sam", "momo", "polyak_sgd", "split_real_and_imaginary", "schedule_free"} <= placed


@pytest.mark.parametrize("optimizer", [optax.lbfgs(), optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.1), opaque_mode=True)])
def test_an_optimizer_that_calls_the_loss_is_refused(optimizer):
    case = mlp_case()
    pipe = jaxpp.Pipeline(case.loss_fn, optimizer, num_stages=2, has_aux=True)
    with pytest.raises(OptimizerError, match="cannot call the loss again"):
        pipe.init(case.init, jax.random.key(0), case.batch)


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.inject_hyperparams(optax.adam)(learning_rate=optax.linear_schedule(1e-2, 0.0, 9)),
        optax.contrib.sam(optax.adam(1e-2), optax.chain(optax.contrib.normalize(), optax.sgd(0.05)), sync_period=2),
    ],
    ids=["moments of bfloat16 that become float32", "no value of the loss"],
)
def test_steps_equal_plain_optax_where_the_state_changes_its_types_and_where_it_takes_no_value(optimizer):
    params = {name: leaf.astype("bfloat16") if name == "b" else leaf for name, leaf in PARAMS.items()}
    state, wanted = (pipe := pipeline(optimizer=optimizer)).init(params, X), (params, optimizer.init(params))
    grad_of = jaxpp.value_and_grad(loss_fn, num_stages=1, num_microbatches=2)  # which has the rounding of bfloat16
    update = jax.jit(optimizer.update)
    for _ in range(3):
        updates, opt_state = update(grad_of(wanted[0], X)[1], wanted[1], wanted[0])
        wanted = optax.apply_updates(wanted[0], updates), opt_state
        state, _ = pipe.step(state, X)
        assert [leaf.dtype for leaf in jax.tree.leaves(state.opt_state)] == [leaf.dtype for leaf in jax.tree.leaves(opt_state)]
    compare("", (state.params, state.opt_state), wanted)


def test_a_state_that_an_update_returns_otherwise_is_refused_before_anything_is_compiled():
    def changing(before, after):
        return optax.GradientTransformation(lambda params: {"m": before}, lambda updates, state, params=None: (updates, after))

    for after, line in (
        ({"m": jnp.zeros(3)}, r"opt_state\['m'\]: f32\[\], then f32\[3\]"),
        ({"m": jnp.zeros((), "bfloat16")}, r"opt_state\['m'\]: f32\[\], then bf16\[\]"),
        ({"m": 0.0, "n": 1.0}, "1 arrays, then 2"),
    ):
        with pytest.raises(OptimizerError, match=line):
            pipeline(optimizer=changing(jnp.zeros(()), after)).init(PARAMS, X)


def test_an_optimizer_that_would_move_large_arrays_is_refused_and_says_which():
    def update(grads, state, params=None):
        total = sum(jnp.ravel(g)[:1500] for g in jax.tree.leaves(grads))
        return jax.tree.map(lambda g: g * total.mean(), grads), state

    mixing = optax.GradientTransformation(lambda params: optax.EmptyState(), update)
    with pytest.raises(OptimizerError, match=r"add: f32\[1500\] of stage \d, f32\[1500\] of stage \d"):
        levels(mixing)


def test_conditions_are_opened_to_a_choice_among_the_results_of_all_branches():
    def update(which, x):
        def chosen(x):
            return jax.lax.cond(which > 1, lambda x: (3 * x, x + 1), lambda x: (x - 1, 2 * x), x)

        return jax.lax.switch(which, [lambda x: (x, x), chosen, chosen], x)

    x = jnp.arange(3.0)
    graph, _ = trace(update, 0, x)
    plain = opened(graph, CONDITIONS)
    assert "cond" in map(kind_of, graph.eqns) and "cond" not in map(kind_of, plain.eqns)
    run = plain.function(range(len(plain.eqns)), plain.inputs, plain.outputs)
    for which in range(3):
        chex.assert_trees_all_equal(tuple(run(jnp.int32(which), x)), update(which, x))
