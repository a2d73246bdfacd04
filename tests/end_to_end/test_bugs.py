"""One test a past bug, its story in a comment."""

import contextlib
import functools

import jax
import jax.experimental.checkify
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

import jaxpp
from jaxpp.engine.layout import OffloadWarning
from jaxpp.errors import ArgumentError, BankError, LossError, StateError
from jaxpp.errors.user_mesh import DisableJitWarning
from jaxpp.verify import compare, oracle
from tests.models import PARAMS, X, gpt_case, loss_fn, pipeline


def test_init_from_parameters_works_for_a_loss_that_takes_a_key():
    # The key's shape, not a key, was asked for its implementation.
    case = gpt_case(batch_size=4, depth=1, width=8)
    pipe = pipeline(case.loss_fn, has_aux=True)
    state = pipe.init(case.params, case.batch)
    _, metrics = pipe.step(state, case.batch, case.key)
    assert jnp.isfinite(metrics.loss)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::jaxpp.MicrobatchWarning")  # it takes means over the microbatch
def test_aux_is_right_where_microbatch_sizes_are_cut_differently():
    # At size one a mean over the batch traces otherwise, so the cuts differ; aux was read from the first size's stages alone.
    def with_aux(params, x):
        h = jnp.tanh(x @ params["a"])
        h = h - h.mean(0, keepdims=True) + h[:1]
        g = jnp.tanh(h @ params["b"])
        g = g - 0.5 * g.mean(0, keepdims=True)
        return jnp.mean((g @ params["c"]) ** 2), {"m": jnp.mean(h**2), "g": g.mean(), "rows": g}

    for size in (4, 5):
        pipe = pipeline(with_aux, stages=3, microbatches=3, has_aux=True)
        state = pipe.init(PARAMS, X[:size])
        pipe.verify(state, X[:size])


def test_a_state_with_an_edited_leaf_is_checked_and_placed():
    # Only the first leaf was looked at, so an edited one reached the devices unchecked.
    pipe = pipeline()
    for new in (np.zeros((6, 2), np.float32), jax.device_put(jnp.ones((6, 2)), jax.devices()[3])):
        state = pipe.init(PARAMS, X)
        state, _ = pipe.step(state._replace(params={**state.params, "c": new}), X)
        assert jnp.isfinite(jax.device_get(state.params["c"])).all()
    state = pipe.init(PARAMS, X)
    with pytest.raises(StateError, match=r"f32\[6,3\] instead of f32\[6,2\]"):
        pipe.step(state._replace(params={**state.params, "c": jnp.ones((6, 3))}), X)
    with pytest.raises(StateError, match=r"state.opt_state\[0\]: a EmptyState of 0 instead of a ScaleByAdamState of 3"):
        pipe.step(state._replace(opt_state=optax.sgd(0.1).init(PARAMS)), X)


def test_one_array_in_two_places_of_a_state_is_given_two_buffers():
    # Both places donated it: the second stage's update found it deleted, with the first stage's already done.
    twins = {"a": jnp.ones((4, 6)), "b": jnp.eye(6), "c": jnp.eye(6)}

    def loss(params, x):
        return jnp.mean((jnp.tanh(x @ params["a"] @ params["b"]) @ params["c"]) ** 2)

    pipe = pipeline(loss, devices=jax.devices()[:1])
    state = pipe.init(twins, X)
    zeros = jnp.zeros((6, 6))
    state, _ = pipe.step(state._replace(params={**state.params, "b": zeros, "c": zeros}), X)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state.held))


@pytest.mark.parametrize("microbatches", [2, 3])
def test_an_evaluation_loss_has_an_aux_of_its_own(microbatches):
    # Which aux leaves hold rows was taken from the training loss.
    def train(params, x):
        return loss_fn(params, x), {"n": jnp.sum(x)}

    def other(params, x):
        return loss_fn(params, x), {"y": x @ params["a"]}

    pipe = pipeline(train, microbatches=microbatches, has_aux=True)
    state = pipe.init(PARAMS, X)
    np.testing.assert_allclose(pipe.evaluate(state, X, loss_fn=other).aux["y"], X @ PARAMS["a"], rtol=1e-5)


def test_an_evaluation_loss_may_be_smaller_than_the_pipeline():
    # It was refused for having fewer equations than stages.
    pipe = pipeline(stages=3)
    state = pipe.init(PARAMS, X)

    def small(params, x):
        return (x @ params["a"]).mean()

    want = jnp.mean(jnp.stack([small(PARAMS, X[:4]), small(PARAMS, X[4:])]))
    np.testing.assert_allclose(pipe.evaluate(state, X, loss_fn=small).loss, want, rtol=1e-5)


def test_a_third_argument_with_a_default_of_its_own_is_no_key():
    # A flag as third argument was given a key.
    def flagged(params, x, train=True):
        return loss_fn(params, x) if train else 0.0

    pipe = pipeline(flagged)
    pipe.step(pipe.init(PARAMS, X), X)


def test_the_loss_of_value_and_grad_is_where_its_gradients_are():
    # It stayed on the last stage's device.
    loss, grads = jaxpp.value_and_grad(loss_fn, num_stages=np.int64(2))(PARAMS, X)
    assert jnp.isfinite(grads["a"] * loss).all()


def test_verify_takes_a_key_that_lives_anywhere():
    # Everything but the key was gathered.
    def keyed(params, x, key):
        return loss_fn(params, x * jax.random.bernoulli(key, 0.5, x.shape))

    pipe = pipeline(keyed)
    pipe.verify(pipe.init(PARAMS, X), X, jax.device_put(jax.random.key(1), jax.devices()[1]))


def test_the_loss_may_be_made_elsewhere_at_another_microbatch_size():
    # The stage of the loss was where it is made, so a step whose microbatches differ in size could not add it up.
    def loss_fn(params, batch):
        h = jnp.tanh(jnp.tanh(batch @ params["a"]) @ params["b"])
        end = jnp.tanh(jnp.tanh(h @ params["c"]) @ params["d"])
        return ((h**2).mean(), {"m": end.mean()}) if batch.shape[0] > 2 else ((end**2).mean(), {"m": h.mean()})

    params, batch = {name: jnp.eye(4) / 2 for name in "abcd"}, jnp.arange(28.0).reshape(7, 4) / 28
    grad_fn = jaxpp.value_and_grad(loss_fn, num_stages=3, num_microbatches=3, has_aux=True)
    (loss, aux), grads = grad_fn(params, batch)
    wanted = oracle(loss_fn, params, batch, None, 3, has_aux=True)
    compare("loss, aux, grads", ((loss, aux), grads), (wanted[:2], wanted[2]))


def of_rank_mates(updates, params=None):
    """To each small gradient that of the other stage of its rank is added."""
    return jax.tree.map(jnp.add, updates, {name: part[2:] + part[:2] for name, part in updates.items()})


@pytest.mark.parametrize(
    "optimizer",
    [optax.MultiSteps(optax.adam(1e-2), 2), optax.chain(optax.stateless(of_rank_mates), optax.sgd(0.1))],
    ids=["MultiSteps", "rank mates"],
)
@pytest.mark.long
def test_an_update_that_combines_leaves_runs_on_a_model_axis_with_two_stages_a_rank(optimizer):
    # Between stages of one rank a send is another name for the value. The update's program, compiled for a whole leaf, was given
    # the sharded one: "compiled for input shardings that disagree: passed P(None, 'model'), required P()".
    def loss(params, x):
        for fc, proj in zip(params["fc"], params["proj"], strict=True):
            x = x + jnp.tanh(x @ fc) @ proj
        return jnp.mean(x**2)

    rng = np.random.default_rng(0)
    params = {"fc": rng.normal(size=(4, 4, 8)) / 2, "proj": rng.normal(size=(4, 8, 4)) / 2}
    params = jax.tree.map(lambda leaf: [jnp.asarray(part, jnp.float32) for part in leaf], params)
    mesh = jax.make_mesh((2, 1, 2), ("pipe", "data", "model"), devices=jax.devices()[:4])
    pipe = pipeline(loss, optimizer, 4, 2, schedule="looped-bfs", mesh=mesh, shardings={"fc/*": "column", "proj/*": "row"})
    state = pipe.init(params, X)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state.held)
    for _ in range(2):
        state, _ = pipe.step(state, X)
    assert jax.tree.map(lambda leaf: leaf.sharding, state.held) == shardings
    pipe.verify(state, X)


@pytest.mark.parametrize(
    ("optimizer", "second"),
    [(optax.MultiSteps(optax.adam(1e-2), 2), X + 1), (optax.apply_if_finite(optax.adam(1e-2), 2), X * np.inf)],
    ids=["MultiSteps", "apply_if_finite"],
)
def test_a_condition_over_all_leaves_is_one_choice_a_leaf(optimizer, second):
    # MultiSteps and apply_if_finite are one lax.cond over all leaves: small ones all moved to one stage, optimizer state and all,
    # and larger ones were refused ("not move large arrays between them").
    params = {"a": jnp.full((4, 300), 0.1), "b": jnp.full((300, 4), 0.1)}
    pipe = pipeline(lambda p, x: jnp.mean((jnp.tanh(x @ p["a"]) @ p["b"]) ** 2), optimizer)
    state = pipe.init(params, X)
    homes = {leaf.shape: leaf.devices() for leaf in jax.tree.leaves(state.params)}
    assert all(leaf.devices() == homes[leaf.shape] for leaf in jax.tree.leaves(state.opt_state) if leaf.size > 1)
    assert len(set(map(frozenset, homes.values()))) == 2
    for batch in (X, second, X):
        state, _ = pipe.step(state, batch)
        pipe.verify(state, X)


def test_a_bank_takes_numpy_scalars():
    # np.float64(1) has a shape and a dtype and is no np.ndarray: "arrays of floating numbers. Got: params['scale'] is f64[]".
    bank = jaxpp.Bank({"cat": {"scale": np.float64(2), "w": np.ones(3, "f")}}, optax.sgd(0.5))
    with bank.use("cat") as task:
        task.params = jax.tree.map(lambda leaf: leaf + 1, task.params)
    assert bank.params("cat")["scale"] == 3
    with pytest.raises(BankError, match=r"params\['scale'\] is a float\.\n  Fix: make a Python number an array with np.float32"):
        bank.add("dog", {"scale": 2.0})


@pytest.mark.parametrize("params", [{"w": jnp.ones((4, 4, 4)) / 4}, {"a": jnp.ones((4, 4, 4)) / 4, "z": jnp.ones(4)}])
def test_a_clipped_norm_is_no_norm_of_one_leaf_because_that_is_the_first_or_the_only_one(params):
    # A sum over all leaves begins as 0 + the first leaf's, and is the leaf's own if there is no other: the optimizer was refused.
    def loss(params, x):
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params.get("w", params.get("a")))
        return jnp.mean((x * params.get("z", 1.0)) ** 2)

    pipe = pipeline(loss, optax.chain(optax.clip_by_global_norm(0.01), optax.adam(1e-2)), balance="flops")
    state = pipe.init(params, X)
    assert pipe.stages[1].num_params >= 2 * 16
    pipe.verify(state, X)


def doubled(function):
    """A function of two arguments whose derivative is said to be twice what it is, and which has a rule of its own therefore."""
    twice = jax.custom_vjp(function)
    twice.defvjp(lambda *args: jax.vjp(function, *args), lambda pullback, ct: jax.tree.map(lambda g: 2 * g, pullback(ct)))
    return twice


def written(w, x):
    ref = jax.new_ref(jnp.zeros_like(x @ w))
    ref[...] = jnp.tanh(x @ w)
    ref[0] += jax.nn.relu(x[0] @ w)
    return jax.freeze(ref)


def values(w, x):
    return jnp.tanh(x @ w).at[0].add(jax.nn.relu(x[0] @ w))


def in_a_loop(w, x):
    ref = jax.new_ref(x @ w)

    def body(i, _):
        ref[i] = doubled(lambda w, row: jnp.tanh(row @ w[:4]))(w, ref[i][:4])

    jax.lax.fori_loop(0, 2, body, None)
    return ref[...]


def in_a_loop_of_values(w, x):
    def body(h, i):
        return h.at[i].set(doubled(lambda w, row: jnp.tanh(row @ w[:4]))(w, h[i][:4])), None

    return jax.lax.scan(body, x @ w, jnp.arange(2))[0]


def chosen(w, x):
    ref = jax.new_ref(x @ w)
    jax.lax.cond(x.sum() > -1e9, lambda: ref.__setitem__(..., jnp.sin(x @ w)), lambda: None)
    return ref[...]


@pytest.mark.parametrize(
    ("layer", "plain"),
    [
        (jax.jit(written), values),
        (jax.checkpoint(written), values),
        (doubled(written), doubled(values)),
        (in_a_loop, in_a_loop_of_values),
        (chosen, lambda w, x: jnp.sin(x @ w)),
    ],
    ids=["jit", "checkpoint", "a rule of its own", "a loop", "a condition"],
)
@pytest.mark.filterwarnings("ignore::jaxpp.MicrobatchWarning")
def test_what_a_loss_writes_into_a_reference_has_a_gradient(layer, plain):
    # An equation that writes has no results that anybody reads, so it was dropped: the gradient was 0, and the loss right.
    # JAX drops rules of custom derivatives when it makes references into values: these must stay (of relu too).
    def loss_of(layer):
        return lambda p, x: jnp.mean((jnp.tanh(layer(p["b"], jnp.tanh(layer(p["a"], x)))) @ p["c"]) ** 2)

    found = jaxpp.value_and_grad(loss_of(layer), num_stages=2, num_microbatches=1)(PARAMS, X)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(jax.value_and_grad(loss_of(plain))(PARAMS, X)), strict=True):
        np.testing.assert_allclose(np.asarray(a), b, rtol=1e-5, atol=1e-6)


def test_references_that_outlive_a_function_are_refused_and_so_are_effects_that_nobody_knows():
    kept, batch = jax.new_ref(jnp.zeros(())), jax.new_ref(X)

    def counting(p, x):
        kept[...] += 1.0
        return loss_fn(p, x)

    def checking(p, x):
        jax.experimental.checkify.check(jnp.all(x < 9), "large")
        return loss_fn(p, x)

    def given(p, x):
        @jax.custom_jvp
        def read(ref):
            return ref[...]

        read.defjvp(lambda primals, tangents: (read(*primals), tangents[0][...]))
        return loss_fn(p, read(jax.new_ref(x)))

    for loss, error, said in (
        (counting, LossError, "Got: a jax.Ref from outside of the function"),
        (checking, LossError, r"Got: check in the loss \(.*test_bugs.py:\d+\): ErrorEffect"),
        (given, LossError, "Got: a jax.Ref as an operand of custom_jvp_call"),
    ):
        with pytest.raises(error, match=said):
            jaxpp.value_and_grad(loss, num_stages=2, num_microbatches=2)(PARAMS, X)
    with pytest.raises(ArgumentError, match=r"the programs of stages share no array that can be changed.\n  Got: .*: a jax.Ref"):
        jaxpp.value_and_grad(loss_fn, num_stages=2, num_microbatches=2)(PARAMS, batch)
    assert kept[...] == 0


@pytest.mark.parametrize(
    ("option", "other"),
    [
        ("jax_threefry_partitionable", False),
        pytest.param("jax_default_prng_impl", "rbg", marks=pytest.mark.long),
        pytest.param("jax_enable_x64", True, marks=pytest.mark.long),
    ],
)
def test_options_of_jax_that_change_between_calls_are_followed_at_all_levels(option, other):
    # Steps, cuts, functions and the optimizer were kept by shapes alone: old shapes had the old options, new ones the new.
    def loss(p, x, key):
        return loss_fn(p, x * (1 + jax.random.normal(key, x.shape)) + jax.random.uniform(jax.random.key(7), x.shape))

    def fn(p, x, key):
        return jnp.tanh(x @ p["a"]) * jax.random.normal(key, (6,))

    noisy = optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(3)), optax.sgd(0.1))
    pipe, key = pipeline(loss, noisy, microbatches=1), jax.random.key(5)
    state = pipe.init(PARAMS, X)
    grad_fn = jaxpp.value_and_grad(loss, num_stages=2, num_microbatches=1)

    def plain():
        own, shifts = jax.random.fold_in(key, 0), noisy.init(PARAMS)
        value, grads = jax.value_and_grad(loss)(PARAMS, X, own)
        return value, grads, optax.apply_updates(PARAMS, noisy.update(grads, shifts)[0]), fn(PARAMS, X, own)

    def piped():
        new, metrics = pipe.step(state, X, key, donate=False)
        assert pipe.evaluate(state, X, key).loss == metrics.loss
        return *grad_fn(PARAMS, X, key), new.params, pipe.apply(state, X, fn, key=key)

    def check(found):
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(jax.jit(functools.partial(plain))()), strict=True):
            np.testing.assert_allclose(np.asarray(a), b, rtol=2e-5, atol=1e-6)

    first, before = piped(), getattr(jax.config, option)
    check(first)
    jax.config.update(option, other)
    try:
        found = piped()
        check(found)
    finally:
        jax.config.update(option, before)
    again = piped()
    assert float(found[0]) != float(first[0]) == float(again[0])


@pytest.mark.parametrize("looped", [False, True])
def test_what_a_policy_in_the_model_offloads_stays_on_the_device_and_a_warning_says_so(looped):
    # "memory_space of all inputs passed to `concatenate` must be the same": small residuals are packed, some were in host memory.
    names = {"names_which_can_be_saved": ["kept"], "names_which_can_be_offloaded": ["sent"]}
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(**names, offload_src="device", offload_dst="pinned_host")

    def block(h, w):
        h = checkpoint_name(jnp.sin(h @ w), "kept")
        return jnp.tanh(checkpoint_name(jnp.tanh(h), "sent") @ w)

    layer = jax.checkpoint(block, policy=policy)

    def loss(p, x):
        h = x @ p["a"]
        if looped:
            h, _ = jax.lax.scan(lambda h, w: (layer(h, w), None), h, p["w"])
        for w in () if looped else p["w"]:
            h = layer(h, w)
        return jnp.mean((h @ p["c"]) ** 2)

    params = {**PARAMS, "w": jnp.stack([PARAMS["b"]] * 2)}
    with pytest.warns(OffloadWarning, match='stays on the device.*\n  Got: .*\n  Fix: pass remat="offload"'):
        found = jaxpp.value_and_grad(loss, num_stages=2, num_microbatches=1)(params, X)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(jax.value_and_grad(loss)(params, X)), strict=True):
        np.testing.assert_allclose(np.asarray(a), b, rtol=1e-5, atol=1e-6)


def test_a_call_in_a_function_that_jax_traces_is_refused_though_no_argument_is_traced():
    # Programs were given tracers ("lowered and compiled for a particular signature"), and constants that were kept were tracers.
    pipe = pipeline()
    state = pipe.init(PARAMS, X)
    grad_fn = jaxpp.value_and_grad(loss_fn, num_stages=2, num_microbatches=2)
    calls = {
        "pipe.step": lambda: pipe.step(state, X)[1].loss,
        "pipe.evaluate": lambda: pipe.evaluate(state, X).loss,
        "pipe.apply": lambda: pipe.apply(state, X, lambda p, x: x @ p["a"]),
        "pipe.init": lambda: pipe.init(PARAMS, X).params,
        "grad_fn": lambda: grad_fn(PARAMS, X),
    }
    for where, call in calls.items():
        with pytest.raises(ArgumentError, match=rf"^{where}\(.*\n  Got: a call in a function that JAX traces"):
            jax.jit(call)()
        jax.grad(lambda x, call=call: x + jax.tree.leaves(call())[0].sum())(1.0)  # nothing of the call is traced
        state = pipe.state or state
    assert jnp.isfinite(pipe.evaluate(pipe.init(PARAMS, X), X).loss)


def test_a_pipeline_works_under_a_guard_of_transfers_without_jit_and_under_a_mesh_without_devices():
    def constrained(p, x):
        return loss_fn(p, jax.lax.with_sharding_constraint(x * 1, PartitionSpec("model")))

    batch, losses = np.asarray(X), []
    mesh = AbstractMesh((2,), ("model",), (AxisType.Auto,))
    for loss, delay, around in (
        (loss_fn, 0, lambda: jax.transfer_guard("disallow")),
        (loss_fn, 1, lambda: jax.transfer_guard("disallow")),
        (loss_fn, 0, jax.disable_jit),
        (constrained, 0, lambda: jax.sharding.use_abstract_mesh(mesh)),
    ):
        pipe = pipeline(loss, delay=delay)
        told = pytest.warns(DisableJitWarning) if around is jax.disable_jit else contextlib.nullcontext()
        with told, around():
            state = pipe.init(PARAMS, batch)
            for _ in range(2):
                state, _ = pipe.step(state, batch)
            jax.block_until_ready(state)
            losses.append(jax.device_get(pipe.evaluate(state, batch).loss))
    np.testing.assert_allclose(losses[2:], losses[:1] * 2, rtol=1e-5)
