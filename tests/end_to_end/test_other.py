"""Several losses train one state in turn: each step changes what its pipeline trains, where it lives, and nothing else."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.dynamic_scale import DynamicScale

import jaxpp
from jaxpp.engine.state import tail_of
from jaxpp.errors import ArgumentError, OptimizerError, StateError
from jaxpp.verify import compare

pytestmark = pytest.mark.usefixtures("x64")

RNG = np.random.default_rng(0)
PLAYERS = "generator", "critic"


def layers(sizes, dtype="float64"):
    return [{"w": RNG.normal(size=(a, b)).astype(dtype) / a**0.5, "b": np.zeros(b, dtype)} for a, b in itertools.pairwise(sizes)]


def mlp(params, x):
    for layer in params[:-1]:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return x @ params[-1]["w"] + params[-1]["b"]


PARAMS = {"critic": layers([6, 16, 16, 1]), "generator": layers([4, 16, 16, 6])}
BATCH = {"x": RNG.normal(size=(12, 6)), "z": RNG.normal(size=(12, 4))}


def generator_loss(params, batch):
    return jax.nn.softplus(-mlp(params["critic"], mlp(params["generator"], batch["z"]))).mean()


def critic_loss(params, batch):
    real = mlp(params["critic"], batch["x"])
    fake = mlp(params["critic"], mlp(params["generator"], batch["z"]))
    return (jax.nn.softplus(-real) + jax.nn.softplus(fake)).mean()


LOSSES = {"generator": generator_loss, "critic": critic_loss}


def labels(params):
    return {name: name for name in params}


def players(generator=None, critic=None):
    each = {"generator": generator or optax.adam(1e-2), "critic": critic or optax.adamw(3e-2)}
    return optax.multi_transform(each, labels)


def plain_step(optimizer, name, params, opt_state, batch):
    """One player's step in plain optax: the parameters and the optimizer state of the other player are put back."""
    updates, new = optimizer.update(jax.grad(LOSSES[name])(params, batch), opt_state, params)
    params = params | {name: optax.apply_updates(params, updates)[name]}
    return params, opt_state._replace(inner_states=opt_state.inner_states | {name: new.inner_states[name]})


def pair(optimizer, stages=4, **options):
    options = {"num_stages": stages, "num_microbatches": 3} | options
    generator = jaxpp.Pipeline(generator_loss, optimizer, trains="generator", **options)
    return {"generator": generator, "critic": generator.other(critic_loss, trains="critic")}


def begun(pipes, batch=BATCH):
    state = pipes["generator"].init(PARAMS, batch)
    return pipes["critic"].init(state, batch)


@pytest.mark.parametrize(
    ("stages", "schedule"),
    [
        (2, "1f1b"),
        pytest.param(4, "1f1b", marks=pytest.mark.long),
        pytest.param(2, "gpipe", marks=pytest.mark.long),
        pytest.param(4, "zb-h1", marks=pytest.mark.long),
        pytest.param(4, "interleaved", marks=pytest.mark.long),
        pytest.param(3, "auto", marks=pytest.mark.long),
    ],
)
def test_two_players_of_one_state_train_as_plain_optax_does_and_leave_each_other_alone(stages, schedule):
    optimizer = players()
    pipes = pair(optimizer, stages, schedule=schedule)
    state, (params, opt_state) = begun(pipes), (PARAMS, optimizer.init(PARAMS))
    for pipe in pipes.values():
        pipe.verify(state, BATCH)
    for name in ("critic", "generator", "critic", "critic", "generator"):
        other = PLAYERS[name == "generator"]
        before = jax.tree.leaves((state.params[other], state.opt_state.inner_states[other]))
        state, metrics = pipes[name].step(state, BATCH)
        after = jax.tree.leaves((state.params[other], state.opt_state.inner_states[other]))
        assert all(a is b for a, b in zip(before, after, strict=True)), "arrays that are passed on, not copies of them"
        compare("loss", metrics.loss, LOSSES[name](params, BATCH))
        params, opt_state = plain_step(optimizer, name, params, opt_state, BATCH)
        compare("params", state.params, params)
        compare("opt_state", state.opt_state, opt_state)
        assert all(pipe.state is state for pipe in pipes.values())
    assert state.step == 5


def plain_late(optimizer, turns, losses=LOSSES, apart=True):
    """The loop of late gradients whose steps take turns: the parameters, those before the last step, and the optimizer's state."""
    params = before = PARAMS
    opt_state = optimizer.init(PARAMS)
    for name in turns:
        updates, new = optimizer.update(jax.grad(losses[name])(before, BATCH), opt_state, params)
        after = optax.apply_updates(params, updates)
        if apart:
            after = params | {name: after[name]}
            new = opt_state._replace(inner_states=opt_state.inner_states | {name: new.inner_states[name]})
        before, params, opt_state = params, after, new
        yield params, before, opt_state


LATE = {
    "one device each": {},
    "zb-v": {"schedule": "zb-v"},
    "replicas": {"stages": 2, "data_parallel": 2},
    "replicas that divide all": {"stages": 2, "data_parallel": 2, "shard": ("gradients", "parameters")},
    "a state in host memory": {"host": "params"},
    "a loss scale": {"loss_scale": DynamicScale(scale=8.0, growth_interval=2)},
}
TURNS = "critic", "generator", "critic", "critic", "generator", "generator", "critic"
ENDS = "ignore:delay=1. where (another loss|parameters visit|no rank has room):jaxpp.OptionWarning"


@pytest.mark.filterwarnings(ENDS)
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[] if kind == "one device each" else pytest.mark.long) for kind in LATE])
def test_gradients_of_two_players_are_late_by_the_last_step_whoever_made_it(kind):
    optimizer = players()
    pipes = pair(optimizer, delay=1, **LATE[kind])
    state = begun(pipes)
    for name, (params, before, opt_state) in zip(TURNS, plain_late(optimizer, TURNS), strict=True):
        state, _ = pipes[name].step(state, BATCH)
        compare("state", (state.params, state.previous, state.opt_state), (params, before, opt_state))
    for pipe in pipes.values():
        assert pipe.verify(state, BATCH)
        copies = [line for line in pipe.engine.lower("update", BATCH, None).bound.lines if line.label.startswith("copy")]
        held = {bool(line.taken) for line in copies}
        assert held == {kind != "a state in host memory"}, "they take over the buffers of those before the last step"
    kept, _ = pipes["critic"].step(state, BATCH, donate=False)
    again, _ = pipes["critic"].step(state, BATCH)
    compare("kept", (kept.params, kept.previous), (again.params, again.previous))


def test_losses_that_train_the_same_flow_each_and_the_step_of_another_ends_first():
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2))
    generator = jaxpp.Pipeline(generator_loss, optimizer, num_stages=4, num_microbatches=4, delay=1)
    pipes = {"generator": generator, "critic": generator.other(critic_loss)}
    state = begun(pipes)
    *_, expected = plain_late(optimizer, TURNS, apart=False)
    for name in TURNS:
        pipe, tail = pipes[name], tail_of(state, pipes[name].engine)
        assert tail is None or not tail.ended
        old, (state, _) = state, pipe.step(state, BATCH)
        assert tail_of(old, pipe.engine) is None, "its rest has been handed over, beside this step or before it"
        assert tail_of(state, pipe.engine) is not None
    compare("state", (state.params, state.previous, state.opt_state), expected)
    assert pipes["critic"].verify(state, BATCH)


def test_a_late_loss_that_trains_more_is_made_before_the_state():
    def made(between, trains="critic"):
        pipe = jaxpp.Pipeline(generator_loss, players(), trains="generator", delay=1, num_stages=2, num_microbatches=2)
        between(pipe)
        return pipe.other(critic_loss, trains=trains)

    made(lambda pipe: pipe.abstract_state(PARAMS, BATCH), "generator/0")
    said = "with delay=1 a state holds what any of its losses trains as it was before the last step"
    for trains in ("critic", None):
        with pytest.raises(ArgumentError, match=said):
            made(lambda pipe: pipe.abstract_state(PARAMS, BATCH), trains)
    with pytest.warns(jaxpp.OptionWarning, match="where another loss trains what this one leaves alone, a step ends"):
        made(lambda pipe: None)._first.abstract_state(PARAMS, BATCH)


def test_the_update_of_a_player_has_no_program_where_it_trains_nothing():
    pipes = pair(players(), cuts=["generator/2", "critic/0", "critic/2"])
    state = begun(pipes)
    for name in PLAYERS:
        adam = state.opt_state.inner_states[name].inner_state[0]
        homes = jax.tree.map(lambda leaf: leaf.device, state.params[name])
        assert jax.tree.map(lambda leaf: leaf.device, adam.mu[name]) == homes, "also of the player that waits"
    stages = {}
    for name, pipe in pipes.items():
        lines = pipe.engine.lower("update", BATCH, None).bound.lines
        stages[name] = {line.place.devices[0].id for line in lines if line.label.startswith("update stage")}
    assert stages == {"generator": {0, 1}, "critic": {0, 2, 3}}, "the norms meet on stage 0"
    assert "tied" not in str(pipes["critic"].stages), (
        "what is real is judged where what is made is, though the loss judges it first"
    )


def test_a_step_that_keeps_the_old_state_keeps_all_of_it():
    pipes = pair(players(), 2)
    state = begun(pipes)
    first, _ = pipes["critic"].step(state, BATCH, donate=False)
    again, _ = pipes["critic"].step(state, BATCH)
    compare("params", again.params, first.params)
    pipes["generator"].step(first, BATCH)  # consumes what it was given, and nothing of the state before that
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(again.params))
    with pytest.raises(StateError, match="leaves are gone"):
        pipes["generator"].step(state, BATCH)


@pytest.mark.long
def test_a_pair_is_restored_to_the_shapes_of_its_state_and_goes_on():
    pipes = pair(players())
    state = begun(pipes)
    state, _ = pipes["critic"].step(state, BATCH)
    saved = jax.device_get(state)
    want, _ = pipes["generator"].step(state, BATCH)
    fresh = pair(players())
    target = fresh["generator"].abstract_state(PARAMS, BATCH)
    target = fresh["critic"].abstract_state(target, BATCH)
    restored = jax.tree.map(lambda leaf, to: jax.device_put(leaf, to.sharding) if hasattr(to, "sharding") else leaf, saved, target)
    fresh["critic"].verify(restored, BATCH)
    found, _ = fresh["generator"].step(restored, BATCH)
    jax.tree.map(np.testing.assert_array_equal, *jax.device_get((found.params, want.params)))


@pytest.mark.long
def test_batches_of_other_shapes_and_other_counts_of_microbatches_are_a_players_own():
    generator = jaxpp.Pipeline(generator_loss, players(), trains="generator", num_stages=3, num_microbatches=2)
    critic = generator.other(critic_loss, trains="critic", num_microbatches=4, remat="recompute", schedule="gpipe")
    noise = {"z": BATCH["z"]}
    state = generator.init(PARAMS, noise)
    state = critic.init(state, BATCH)
    state, _ = critic.step(state, jax.tree.map(lambda leaf: leaf[:9], BATCH))
    state, _ = generator.step(state, jax.tree.map(lambda leaf: leaf[:5], noise))
    critic.verify(state, BATCH)
    generator.verify(state, noise)


@pytest.mark.long
def test_a_model_state_is_handed_from_one_loss_to_the_other():
    def counted(loss):
        def with_count(params, count, batch):
            return loss(params, batch), (count + 1.0, {})

        return with_count

    generator = jaxpp.Pipeline(
        counted(generator_loss), players(), trains="generator", num_stages=3, num_microbatches=2, has_state=True
    )
    critic = generator.other(counted(critic_loss), trains="critic")
    state = generator.init((PARAMS, jnp.zeros(())), BATCH)
    state = critic.init(state, BATCH)
    for pipe in (critic, generator, critic):
        pipe.verify(state, BATCH)
        state, _ = pipe.step(state, BATCH)
    assert state.model_state == 6


def looped(params, x):
    x, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params["w"])
    return ((x @ params["head"]) ** 2).mean()


def other_head(params, x):
    x, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params["w"])
    return (jnp.abs(x @ params["other"])).mean()


@pytest.mark.long
def test_losses_over_a_loop_that_is_cut_share_its_slices():
    params = {"w": RNG.normal(size=(6, 4, 4)), "head": RNG.normal(size=(4, 2)), "other": RNG.normal(size=(4, 3))}
    optimizer = optax.multi_transform({name: optax.adam(1e-2) for name in params}, labels)
    first = jaxpp.Pipeline(looped, optimizer, trains=("w", "head"), num_stages=3, num_microbatches=2)
    second = first.other(other_head, trains=["w", "other"])
    x = RNG.normal(size=(8, 4))
    state = second.init(first.init(params, x), x)
    for pipe in (second, first, second):
        pipe.verify(state, x)
        before = np.asarray(state.params["head"])
        state, _ = pipe.step(state, x)
        assert (pipe is second) == np.array_equal(before, np.asarray(state.params["head"]))


@pytest.mark.long
def test_replicas_that_divide_the_optimizer_state_train_both_players():
    pipes = pair(players(), 2, data_parallel=2, shard="optimizer")
    state = begun(pipes)
    for name in ("critic", "generator"):
        pipes[name].verify(state, BATCH)
        state, _ = pipes[name].step(state, BATCH)


def test_one_optimizer_state_for_trained_and_untrained_parameters_is_refused():
    message = r"state\.opt_state\[0\]\.count belongs to generator/0/b, which is trained, and to critic/0/b, which is not"
    with pytest.raises(OptimizerError, match=message) as caught:
        pair(optax.adam(1e-2))["generator"].init(PARAMS, BATCH)
    assert "Fix: give the others an optimizer that holds nothing: optax.multi_transform" in str(caught.value)
    label = eval(re.search(r"with label = (.*, params\)); or", str(caught.value))[1], {"jax": jax})  # noqa: S307
    optimizer = optax.multi_transform({"trained": optax.adam(1e-2), "frozen": optax.set_to_zero()}, label)
    pipe = pair(optimizer, stages=2)["generator"]
    state, _ = pipe.step(pipe.init(PARAMS, BATCH), BATCH)
    same = jax.tree.map(lambda old, new: np.array_equal(old, jax.device_get(new)), PARAMS, state.params)
    assert all(jax.tree.leaves(same["critic"])) and not any(jax.tree.leaves(same["generator"]))


@pytest.mark.parametrize(
    "each",
    [
        optax.sgd(0.1),
        optax.lamb(1e-2),
        optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2)),
        optax.inject_hyperparams(optax.adam)(optax.linear_schedule(1e-2, 1e-3, 5)),
        optax.apply_if_finite(optax.adam(1e-2), 3),
        optax.MultiSteps(optax.adam(1e-2), 2),
    ],
    ids=["sgd", "lamb", "clipped", "injected", "if_finite", "multi_steps"],
)
@pytest.mark.long
def test_whatever_optimizers_the_players_have_each_keeps_its_own_state(each):
    pipes = pair(players(each, each), 2)
    state = begun(pipes)
    for name in ("critic", "generator", "critic"):
        pipes[name].verify(state, BATCH)
        other = PLAYERS[name == "generator"]
        before = jax.device_get((state.params[other], state.opt_state.inner_states[other]))
        state, _ = pipes[name].step(state, BATCH)
        after = jax.device_get((state.params[other], state.opt_state.inner_states[other]))
        jax.tree.map(np.testing.assert_array_equal, before, after)


def test_another_loss_is_begun_with_the_state_of_the_first():
    pipes = pair(players(), 2)
    with pytest.raises(StateError, match=r"pipe\.init: a pipeline is cut by init"):
        pipes["critic"].init(jaxpp.State(PARAMS, ()), BATCH)
    state = pipes["generator"].init(PARAMS, BATCH)
    with pytest.raises(ArgumentError, match=r"call pipe.init\(state, batch\)"):
        pipes["critic"].init(PARAMS, BATCH)
    with pytest.raises(StateError, match="have the same parameters, optimizer and model state"):
        pipes["critic"].init(state.replace(opt_state=()), BATCH)


def a_set(scale, width=8):
    return {"in": np.eye(8)[:, :width] / scale, "out": np.eye(8)[:width] / 3}


def of_task(params, own, batch):
    return jnp.mean(jnp.tanh(jnp.tanh(batch["x"] @ params["a"]) @ (own["in"] @ own["out"]) @ params["b"]) ** 2)


def of_task_backwards(params, own, batch):
    hidden = jnp.tanh(batch["x"] @ params["b"]) @ (own["in"] @ own["out"])
    return jnp.mean((hidden @ params["a"] - batch["x"]) ** 2)


@pytest.mark.parametrize("trains", [pytest.param((None, None), marks=pytest.mark.long), (("a", "task/in"), ("b", "task/out"))])
@pytest.mark.parametrize("options", [{}, pytest.param({"data_parallel": 2, "shard": "parameters"}, marks=pytest.mark.long)])
def test_losses_that_take_turns_train_the_sets_of_a_bank_too(x64, trains, options):
    rng = np.random.default_rng(0)
    params, batch = {name: rng.normal(size=(8, 8)) / 2 for name in "ab"}, {"x": rng.normal(size=(12, 8))}
    own = {"p": a_set(2), "q": a_set(3), "small": a_set(2, 6)}
    each = {"first": optax.adam(1e-2, eps=1e-3), "second": optax.adam(3e-2, eps=1e-3)}
    labels = lambda tree: {name: "first" if name in ("a", "in") else "second" for name in tree}  # noqa: E731
    optimizer = each["first"] if trains[0] is None else optax.multi_transform(each, labels)
    bank = jaxpp.Bank(own, optimizer)
    pipe = jaxpp.Pipeline(of_task, optimizer, num_stages=2, num_microbatches=3, bank=bank, trains=trains[0], **options)
    state = pipe.init(params, batch)
    other = pipe.other(of_task_backwards, trains=trains[1])
    assert other.init(state, batch) is state
    opt_state, own_states = optimizer.init(params), {task: optimizer.init(own[task]) for task in own}

    def stepped(kind, grads, opt_state, params):
        if trains[0] is None:
            updates, new = optimizer.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), new
        names = [name for name, label in labels(params).items() if label == kind]
        grads = {name: grad if name in names else jnp.zeros_like(grad) for name, grad in grads.items()}
        updates, new = optimizer.update(grads, opt_state, params)
        after = params | {name: leaf for name, leaf in optax.apply_updates(params, updates).items() if name in names}
        return after, opt_state._replace(inner_states=opt_state.inner_states | {kind: new.inner_states[kind]})

    for number, task in enumerate(("p", "p", "q", "small", "small", "p")):
        kind, at, loss = (("first", pipe, of_task), ("second", other, of_task_backwards))[number % 2]
        at.prefetch(task)
        state, metrics = at.step(state, batch, task=task)
        expected, (grads, own_grads) = jax.value_and_grad(loss, (0, 1))(params, own[task], batch)
        params, opt_state = stepped(kind, grads, opt_state, params)
        own[task], own_states[task] = stepped(kind, own_grads, own_states[task], own[task])
        compare("loss", metrics.loss, expected)
    found = state.params, state.opt_state, {task: (bank.params(task), bank.opt_state(task)) for task in own}
    compare("", found, (params, opt_state, {task: (own[task], own_states[task]) for task in own}))
    assert bank.host_store.traffic.loads == 4 * pipe.engine.placement.num_replicas, "a set that is there serves both losses"
    assert other.verify(state, batch, task="q")
    assert other.evaluate(state, batch, task="small").loss
