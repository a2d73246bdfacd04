"""Any optax optimizer, exactly as on one device: every leaf of parameters and state, over several steps."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpp
from jaxpp.errors import OptimizerError
from jaxpp.optim.owners import open_conditions, plan_update
from jaxpp.stages.graph import trace
from jaxpp.stages.jaxpr import kind_of
from jaxpp.verify import compare
from tests.models import gpt_case, mlp_case


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


def levels(optimizer, owner=(0, 0, 1, 1, 2, 2)):
    params = {f"w{k}": jnp.ones((40, 40)) for k in range(len(owner))}
    update = plan_update(optimizer, params, owner, 2, jax.ShapeDtypeStruct((), jnp.float32))
    big = {part for part, eqn in zip(update.parts, update.graph.eqns, strict=True) if part and eqn.outvars[0].aval.size > 1}
    return {stage: {part.level for part in big if part.stage == stage} for stage in range(3)}


@pytest.mark.parametrize("name", ["sgd", "adamw", "lion", "adafactor", "lamb"])
def test_an_optimizer_without_a_global_norm_updates_all_stages_at_once(name):
    make = {"adamw": lambda: optax.adamw(optax.cosine_decay_schedule(1e-2, 20))}.get(name, OPTIMIZERS[name])
    assert levels(make()) == {0: {0}, 1: {0}, 2: {0}}


def test_a_global_norm_needs_the_scalars_first():
    assert levels(OPTIMIZERS["clip"]()) == {0: {0, 1}, 1: {0, 2}, 2: {0, 2}}


def test_an_optimizer_that_calls_the_loss_is_refused():
    case = mlp_case()
    pipe = jaxpp.Pipeline(case.loss_fn, optax.lbfgs(), num_stages=2, has_aux=True)
    with pytest.raises(OptimizerError, match="cannot call the loss again"):
        pipe.init(case.init, jax.random.key(0), case.batch)


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
    opened = open_conditions(graph)
    assert "cond" in map(kind_of, graph.eqns) and "cond" not in map(kind_of, opened.eqns)
    run = opened.function(range(len(opened.eqns)), opened.inputs, opened.outputs)
    for which in range(3):
        chex.assert_trees_all_equal(tuple(run(jnp.int32(which), x)), update(which, x))
