"""A run goes on elsewhere: in a new process, at other stages, in plain JAX; and checkpoints of others open in a pipeline."""

import os
import pickle
import subprocess
import sys

import chex
import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax.training.train_state import TrainState
from jax.sharding import SingleDeviceSharding

import jaxpp
from jaxpp.verify import compare
from tests.docs.test_readme import ROOT
from tests.end_to_end.test_checkpoint import advance, loop
from tests.models import LAYERS, PARAMS, X, looped, loss_fn

BITS = {
    "the same": {},
    "gpipe": {"schedule": "gpipe"},
    "interleaved": {"schedule": "interleaved"},
    "fewer devices": {"devices": jax.devices()[1:3]},
}
"""Other pipelines that add the gradients of the microbatches in the same order, with the same cuts."""

CLOSE = {
    "one stage": {"num_stages": 1},
    "three stages": {"num_stages": 3},
    "eight stages on a V": {"num_stages": 8, "schedule": "zb-v", "devices": jax.devices()[:4]},
    "two replicas": {"num_stages": 2, "num_microbatches": 2, "data_parallel": 2},
}
"""Other cuts, and other orders of summation."""

SLOW = {
    "two stages": {"num_stages": 2},
    "eight stages": {"num_stages": 8},
    "a V": {"schedule": "zb-v"},
    "zb-h1": {"schedule": "zb-h1"},
    "v-min": {"schedule": "v-min"},
    "two replicas of unequal slices": {"num_stages": 3, "num_microbatches": 1, "data_parallel": 2},
}


@pytest.fixture(scope="module")
def half_way(tmp_path_factory):
    """Checkpoints of ten steps, with equal slices and with unequal ones, and where ten further steps lead."""
    folder, found = tmp_path_factory.mktemp("half_way"), {}
    with ocp.StandardCheckpointer() as checkpointer:
        for name, run in (("loop", loop()), ("unequal", loop(num_stages=3))):
            pipe = run.make()
            state = advance(pipe, pipe.init(*run.made), run, 10)
            checkpointer.save(folder / name, state)  # which goes on beside the next steps, and they consume the state
            found[name] = folder / name, jax.device_get(advance(pipe, state, run, 10))
    return found


def resumed(path, run, **options):
    pipe = run.make(**options)
    with ocp.StandardCheckpointer() as checkpointer:
        state = checkpointer.restore(path, pipe.abstract_state(*run.made))
    return advance(pipe, state, run, 10)


@pytest.mark.parametrize("name", [*list(BITS)[:2], *(pytest.param(name, marks=pytest.mark.long) for name in list(BITS)[2:])])
def test_another_pipeline_that_adds_in_the_same_order_goes_on_with_the_same_bits(half_way, name):
    path, wanted = half_way["loop"]
    chex.assert_trees_all_equal(resumed(path, loop(), **BITS[name]), wanted)


@pytest.mark.parametrize(
    "name",
    [
        "one stage",
        "two replicas",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("three stages", "eight stages on a V")),
        *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW),
    ],
)
def test_a_checkpoint_opens_at_any_number_of_stages_with_any_schedule(half_way, name):
    path, wanted = half_way["loop"]
    state = resumed(path, loop(), **(CLOSE | SLOW)[name])
    assert state.step == 20
    compare(name, state.replace(step=None), wanted.replace(step=None))


AGAIN = """
import pathlib, sys
import tests.conftest, jax, numpy as np
from tests.end_to_end.test_checkpoint import loop
from tests.end_to_end.test_resume import resumed
folder = pathlib.Path(sys.argv[1])
for name, run in (("loop", loop()), ("unequal", loop(num_stages=3))):
    np.savez(folder / f"{name}.npz", *jax.tree.leaves(resumed(sys.argv[2] + "/" + name, run)))
"""

PLAIN = """
import sys
import jax, jax.numpy as jnp, numpy as np, optax, orbax.checkpoint as ocp
optimizer = optax.adamw(1e-2)
params = {"w": jnp.zeros((8, 4, 4)), "out": jnp.zeros((4, 2))}
parts = {"params": params, "opt_state": optimizer.init(params), "model_state": (), "loss_scale": (), "step": 0}
parts = ocp.StandardCheckpointer().restore(sys.argv[2] + "/loop", parts)
params, opt_state, x = parts["params"], parts["opt_state"], np.load(sys.argv[1] + "/x.npy")

def loss_fn(params, x):
    x, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params["w"])
    return jnp.mean((x @ params["out"]) ** 2)

@jax.jit
def step(params, opt_state):
    grads = [jax.grad(loss_fn)(params, x[k : k + 2]) for k in range(0, 8, 2)]
    grads = jax.tree.map(lambda *parts: sum(parts) / 4, *grads)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state

for _ in range(10):
    params, opt_state = step(params, opt_state)
assert len(jax.devices()) == 1 and "jaxpp" not in sys.modules and parts["step"] == 10
np.savez(sys.argv[1] + "/plain.npz", *jax.tree.leaves((params, opt_state)))
"""


@pytest.mark.long
def test_twenty_steps_are_ten_and_ten_in_a_new_process_with_jaxpp_or_without(half_way, tmp_path):
    np.save(tmp_path / "x.npy", X)
    folder = half_way["loop"][0].parent
    running = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path), str(folder)], cwd=ROOT, env={**os.environ, "PYTHONPATH": "."})
        for code in (AGAIN, PLAIN)
    ]
    assert [process.wait(240) for process in running] == [0, 0]
    for name, (_, wanted) in half_way.items():
        found = np.load(tmp_path / f"{name}.npz")
        chex.assert_trees_all_equal([found[key] for key in found], list(map(np.asarray, jax.tree.leaves(wanted))))
    plain = np.load(tmp_path / "plain.npz")
    compare("plain JAX", [plain[key] for key in plain], jax.tree.leaves(half_way["loop"][1])[:-1])


def test_to_ask_for_shapes_again_leaves_the_state_of_a_pipeline_as_it_is():
    pipe, other = (jaxpp.Pipeline(loss_fn, optax.adam(1e-2), num_stages=2, num_microbatches=2) for _ in range(2))
    state, _ = pipe.step(pipe.init(PARAMS, X), X)
    wanted, _ = other.step(other.step(other.init(PARAMS, X), X)[0], X)
    for batch in (X, X[:4]):
        pipe.abstract_state(PARAMS, batch)
    with pytest.raises(TypeError, match="contracting"):
        pipe.abstract_state(PARAMS, X[:, :3])
    assert pipe.state is state
    pipe.abstract_state({**PARAMS, "c": jnp.ones((6, 3))}, X)  # of another model: the pipeline is now for that one
    assert pipe.state is state
    with pytest.raises(jaxpp.errors.StateError, match=r"f32\[6,2\] instead of f32\[6,3\]"):
        pipe.step(state, X)
    pipe.abstract_state(PARAMS, X)
    new, metrics = pipe.step(state, X)
    assert metrics.step == new.step == 2
    chex.assert_trees_all_equal(new, wanted)


@pytest.mark.long
def test_a_manager_keeps_the_last_states_and_saves_while_training_goes_on(tmp_path):
    run = loop(num_stages=3)
    pipe, last = run.make(), []
    state = pipe.init(*run.made)
    options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=True)
    with ocp.CheckpointManager(tmp_path / "run", options=options) as manager:
        for at in range(5):
            last = [*last[-1:], jax.tree.map(np.array, state)]
            args = ocp.args.Composite(state=ocp.args.StandardSave(state), data=ocp.args.JsonSave({"at": at}))
            manager.save(state.step, args=args)
            state = advance(pipe, state, run, 1)  # consumes what is being saved
    fresh = run.make()
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        assert manager.all_steps() == [3, 4]
        for step, wanted in zip((3, 4), last, strict=True):
            restore = ocp.args.StandardRestore(fresh.abstract_state(*run.made))
            found = manager.restore(step, args=ocp.args.Composite(state=restore, data=ocp.args.JsonRestore()))
            chex.assert_trees_all_equal(found.state, wanted)
            assert found.data == {"at": step} and found.state.step == step
    chex.assert_trees_all_equal(advance(fresh, found.state, run, 1), state)


def test_checkpoints_that_jaxpp_did_not_write_open_in_a_pipeline(tmp_path):
    run, optimizer = loop(num_stages=3), optax.adamw(1e-2)
    trained = TrainState.create(apply_fn=looped, params=run.made[0], tx=optimizer)
    for _ in range(3):
        trained = trained.apply_gradients(grads=jax.tree.map(jnp.cos, trained.params))
    pipe = run.make()
    target = pipe.abstract_state(*run.made)
    wanted = jaxpp.State(trained.params, trained.opt_state, step=3)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "flax", trained)
        checkpointer.save(tmp_path / "params", {"params": trained.params, "opt_state": trained.opt_state})
    parts = {"params": target.params, "opt_state": target.opt_state}
    with ocp.StandardCheckpointer() as checkpointer:
        from_flax = jaxpp.State(**checkpointer.restore(tmp_path / "flax", parts | {"step": 0}))
        from_parts = jaxpp.State(**checkpointer.restore(tmp_path / "params", parts), step=3)
    wanted, _ = pipe.step(wanted, X)
    for state in (from_flax, from_parts):
        new, metrics = pipe.step(state, X)
        assert new.step == metrics.step == 4
        chex.assert_trees_all_equal(new, wanted)


def test_a_flax_train_state_opens_a_checkpoint_of_a_pipeline(half_way):
    path, optimizer = half_way["unequal"][0], optax.adamw(1e-2)
    trained = jax.eval_shape(lambda: TrainState.create(apply_fn=looped, params=LAYERS, tx=optimizer))
    here = SingleDeviceSharding(jax.devices()[0])
    trained = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here), trained)
    restore_args = ocp.checkpoint_utils.construct_restore_args(trained)
    with ocp.PyTreeCheckpointer() as checkpointer:
        args = ocp.args.PyTreeRestore(item=trained, restore_args=restore_args, partial_restore=True)
        trained = checkpointer.restore(path, args=args)
        pipe = loop(num_stages=3).make()
        target = pipe.abstract_state(*loop().made)
        restore_args = ocp.checkpoint_utils.construct_restore_args(target)
        state = checkpointer.restore(path, args=ocp.args.PyTreeRestore(item=target, restore_args=restore_args))
    assert int(trained.step) == state.step == 10
    chex.assert_trees_all_equal((trained.params, trained.opt_state), (state.params, state.opt_state))


@pytest.mark.parametrize("way", ["pickle", "flax.serialization", "np.savez"])
def test_a_state_is_saved_by_other_means_too(way, tmp_path):
    run = loop(num_stages=3)
    pipe = run.make()
    state = advance(pipe, pipe.init(*run.made), run, 1)
    target = pipe.abstract_state(*run.made)
    if way == "pickle":
        restored = pickle.loads(pickle.dumps(state))  # noqa: S301  (our own)
    elif way == "np.savez":
        names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(target)]
        np.savez(tmp_path / "state.npz", **dict(zip(names, jax.tree.leaves(state), strict=True)))
        found = np.load(tmp_path / "state.npz")
        restored = jax.tree.structure(target).unflatten([found[name] for name in names])
    else:
        restored = flax.serialization.from_bytes(target, flax.serialization.to_bytes(state))
    chex.assert_trees_all_equal(restored, state)
    chex.assert_trees_all_equal(advance(pipe, restored, run, 1), advance(pipe, state, run, 1))


def test_theta_is_saved_and_restored_beside_a_bank(tmp_path):
    def made():
        task = {"c": PARAMS["c"]}
        bank = jaxpp.Bank({"a": task, "b": jax.tree.map(jnp.sin, task)}, optax.adam(1e-2))
        pipe = jaxpp.Pipeline(lambda p, q, x: loss_fn(p | q, x), optax.adam(1e-2), num_stages=2, num_microbatches=4, bank=bank)
        return pipe, {"a": PARAMS["a"], "b": PARAMS["b"]}

    pipe, theta = made()
    state, _ = pipe.step(pipe.init(theta, X), X, task="a")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "theta", state)
    with ocp.StandardCheckpointer() as checkpointer:
        fresh, _ = made()
        restored = checkpointer.restore(tmp_path / "theta", fresh.abstract_state(theta, X))
    chex.assert_trees_all_equal(restored, state)
    new, _ = pipe.step(state, X, task="b")  # which no step has changed yet
    again, _ = fresh.step(restored, X, task="b")
    chex.assert_trees_all_equal(again, new)
    assert "State after 2 steps" in repr(again) and repr(again) == repr(new)
