"""Checkpoints of a state that lives in several processes. What the processes run stands first."""

import os
import pathlib
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

import jaxpp
from jaxpp.errors import ArgumentError, BankError, ProcessError, StateError
from jaxpp.types import Tree
from tests.processes.processes import launch, start


def values(scale: float = 1.0) -> dict[str, np.ndarray]:
    """A tree as a state has it, with whole leaves."""

    def count(*shape: int) -> np.ndarray:
        return scale + np.arange(np.prod(shape), dtype=np.float32).reshape(shape)

    return {
        "first": count(4, 3),
        "last": count(5, 3),
        "number": np.float32(scale),
        "half": count(3).astype(jnp.bfloat16),
        "sharded": count(4, 8) * 2,
        "copied": count(4, 4) * 3,
        "layers": count(8, 2) * 4,
        "replicas": count(6).astype(np.int32),
    }


def shardings(devices: Sequence[Any]) -> dict[str, Sharding]:
    """Where the leaves live: on one device, on a sub-mesh of one process, or on all devices."""
    one, spec = SingleDeviceSharding, PartitionSpec
    half, every = (
        Mesh(np.array(devices[len(devices) // 2 :]).reshape(1, -1), ("data", "model")),
        Mesh(np.array(devices), ("stage",)),
    )
    return {
        "first": one(devices[0]),
        "last": one(devices[-1]),
        "number": one(devices[-1]),
        "half": one(devices[1]),
        "sharded": NamedSharding(half, spec(None, "model")),
        "copied": NamedSharding(half, spec()),
        "layers": NamedSharding(every, spec("stage")),
        "replicas": NamedSharding(every, spec()),
    }


def placed(value: np.ndarray, sharding: Sharding) -> jax.Array:
    """What this process has of an array."""
    indices = sharding.addressable_devices_indices_map(value.shape)
    parts = [jax.device_put(value[index], device) for device, index in indices.items()]
    return jax.make_array_from_single_device_arrays(value.shape, sharding, parts, dtype=value.dtype)


def state_of(scale: float, step: int) -> dict[str, Any]:
    """A state of all processes, as far as it is here."""
    places = shardings(jax.devices())
    return {"params": {name: placed(np.asarray(value), places[name]) for name, value in values(scale).items()}, "step": step}


def target() -> dict[str, Any]:
    """The same, as shapes."""
    places = shardings(jax.devices())
    shapes = {name: jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=places[name]) for name, value in values().items()}
    return {"params": shapes, "step": 0}


def check(state: Tree, scale: float, step: int) -> None:
    """What is here has the right values, and lives where it belongs."""
    places, wanted = shardings(jax.devices()), values(scale)
    assert state["step"] == step
    for name, leaf in state["params"].items():
        assert leaf.sharding == places[name] and leaf.dtype == wanted[name].dtype, name
        assert {shard.device for shard in leaf.addressable_shards} == places[name].addressable_devices
        for shard in leaf.addressable_shards:
            np.testing.assert_array_equal(shard.data, wanted[name][shard.index], err_msg=name)


def register() -> None:
    """What a script for several hosts has."""
    ocp.type_handlers.register_type_handler(jax.Array, jaxpp.array_handler(), override=True)


def open_manager(folder: pathlib.Path) -> ocp.CheckpointManager:
    """As the recipe has it."""
    return ocp.CheckpointManager(folder, options=ocp.CheckpointManagerOptions(max_to_keep=3, cleanup_tmp_directories=True))


def by_hand(folder: str) -> None:
    """Trees that are made by hand: saved by all processes, restored by all, and what was saved by one."""
    register()
    path = pathlib.Path(folder)
    with open_manager(path / "several") as manager:
        for step in (1, 2):
            manager.save(step, args=ocp.args.StandardSave(state_of(step, step)))
        manager.wait_until_finished()
        check(manager.restore(2, args=ocp.args.StandardRestore(target())), 2, 2)
    check(ocp.StandardCheckpointer().restore(path / "one", target()), 5, 5)
    wrong = target()
    wrong["params"] |= {"first": jax.ShapeDtypeStruct((9, 3), np.float32, sharding=SingleDeviceSharding(jax.devices()[0]))}
    with pytest.raises(ValueError, match="is not compatible with the stored shape"):
        ocp.StandardCheckpointer().restore(path / "one", wrong)
    with pytest.raises(StateError, match="several processes save arrays of numbers") as error:
        ocp.StandardCheckpointer().save(path / "key", {"key": jax.random.key(0)})
    assert "Got: key: key<fry>[]" in str(error.value) and "jax.random.key_data" in str(error.value)
    gathered()
    banks()
    if jax.process_index() == 0:
        print("all is as it should be")


def gathered() -> None:
    """Trees brought to every process."""
    tree, me = state_of(3, 3), jax.process_index()
    loss = jax.device_put(np.float32(7), jax.local_devices()[0])  # as the step reports it: each process has its own
    found = jaxpp.gather(tree["params"] | {"loss": loss, "host": np.arange(3)})
    for name, value in (values(3) | {"loss": np.float32(7), "host": np.arange(3)}).items():
        assert found[name].devices() == {jax.local_devices()[0]}, name
        np.testing.assert_array_equal(found[name], value, err_msg=name)
    second = jaxpp.gather(tree["params"]["last"], jax.local_devices()[1])
    assert second.devices() == {jax.local_devices()[1]}
    with pytest.raises(ProcessError, match=r"tree: process 0: \['y'\] f32\[\]\n +tree: process 1: \['x'\] f32\[\]"):
        jaxpp.gather({"x": loss} if me else {"y": loss})
    with pytest.raises(ArgumentError, match="leave device out"):
        jaxpp.gather(loss, jax.devices()[0 if me else 2])


def banks() -> None:
    """A bank belongs to a process."""
    bank = jaxpp.Bank({"cat": {"w": np.ones(2, np.float32)}}, optax.sgd(0.5))
    assert bank.device == jax.local_devices()[0]
    with bank.use("cat") as task:
        task.params = jax.tree.map(lambda leaf: leaf + jax.process_index(), task.params)
    np.testing.assert_array_equal(bank.params("cat")["w"], 1 + jax.process_index())
    with pytest.raises(BankError, match="a bank is used on a device of its own process"):
        jaxpp.Bank({}, optax.sgd(0.5), device=jax.devices()[0 if jax.process_index() else -1])


class DiesInTheMiddle:
    """The handler of the recipe, in a process that is killed when it has begun to write."""

    def __init__(self, handler: Any):
        self._handler = handler

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handler, name)

    async def serialize(self, values: Any, infos: Any, args: Any = None) -> Any:
        """Begin, and die."""
        await self._handler.serialize(values, infos, args)
        os.kill(os.getpid(), signal.SIGKILL)


def looped(params: Tree, batch: Any, key: jax.Array) -> jax.Array:
    """A loop over layers with dropout, and a layer before and after it."""

    def layer(h: jax.Array, pair: Any) -> tuple[jax.Array, None]:
        w, noise = pair
        return jnp.tanh(h @ w) * jax.random.bernoulli(noise, 0.9, h.shape), None

    keys = jax.random.split(key, len(params["w"]))
    x, _ = jax.lax.scan(layer, jnp.tanh(batch @ params["in"]), (params["w"], keys))
    return jnp.mean((x @ params["out"]) ** 2)


def runs() -> dict[str, Tree]:
    """Parameters by name; a pipeline of them has four stages."""
    random = np.random.default_rng(0)

    def params(num_layers: int) -> dict[str, np.ndarray]:
        shapes = {"in": (3, 4), "w": (num_layers, 4, 4), "out": (4, 2)}
        return {name: random.normal(size=shape).astype(np.float32) / 2 for name, shape in shapes.items()}

    return {"equal slices": params(8), "unequal slices": params(7)}


def pipeline() -> jaxpp.Pipeline:
    """Over four devices: two of each process, or four of one."""
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))
    return jaxpp.Pipeline(looped, optimizer, num_stages=4, num_microbatches=4, devices=jax.devices()[:4])


def advance(pipe: jaxpp.Pipeline, state: jaxpp.State, until: int) -> Iterator[jaxpp.State]:
    """The state after each step."""
    while state.step < until:
        batch = np.random.default_rng(state.step).normal(size=(8, 3)).astype(np.float32)
        state, _ = pipe.step(state, batch, jax.random.fold_in(jax.random.key(1), state.step))
        yield state


def train(params: Tree, folder: pathlib.Path, until: int, dies: int | None = None) -> jaxpp.State:
    """Go on from the newest checkpoint to a step, and save every one, as the recipe does; or the last process dies in a save."""
    pipe, arguments = pipeline(), (params, np.zeros((8, 3), np.float32))
    with open_manager(folder) as manager:
        step = manager.latest_step()
        if step is None:
            state = pipe.init(*arguments)
        else:
            state = manager.restore(step, args=ocp.args.StandardRestore(pipe.abstract_state(*arguments)))
        for newest in advance(pipe, state, until):
            if newest.step == dies and jax.process_index() == jax.process_count() - 1:
                manager.wait_until_finished()
                ocp.type_handlers.register_type_handler(jax.Array, DiesInTheMiddle(jaxpp.array_handler()), override=True)
            manager.save(newest.step, args=ocp.args.StandardSave(newest))
    return pipe.state


def train_killed(folder: str, name: str, until: int, dies: bool) -> None:
    """Train a pipeline up to a step; or the last process dies while the last step is saved."""
    register()
    state = train(runs()[name], pathlib.Path(folder), until, until if dies else None)
    whole = jaxpp.gather(state)
    if jax.process_index() == 1:
        leaves = jax.tree_util.tree_leaves_with_path(whole)
        np.savez(pathlib.Path(folder).with_suffix(".npz"), **{jax.tree_util.keystr(path): leaf for path, leaf in leaves})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where two processes have saved trees made by hand, and read what this one had saved."""
    folder = tmp_path_factory.mktemp("by_hand")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "one", state_of(5, 5))
    ended = launch("tests.processes.test_process_checkpoint:by_hand", 2, {"folder": str(folder)}, seconds=60)
    assert "all is as it should be" in ended[0].out
    return folder


@pytest.mark.long
def test_one_process_restores_what_two_have_saved(folder):
    with ocp.CheckpointManager(folder / "several") as manager:
        assert manager.latest_step() == 2
        for step in (1, 2):
            check(manager.restore(step, args=ocp.args.StandardRestore(target())), step, step)


def test_what_two_have_saved_opens_without_a_target(folder):
    found = ocp.StandardCheckpointer().restore(folder / "several" / "2" / "default")
    jax.tree.map(np.testing.assert_array_equal, found, {"params": values(2), "step": 2})


def test_in_one_process_the_handler_is_that_of_orbax():
    registered = ocp.type_handlers.get_type_handler(jax.Array)
    assert jaxpp.array_handler() is registered
    assert type(registered) is ocp.type_handlers.ArrayHandler


def start_training(folder, name, until, *, dies=False):
    """Two processes train a pipeline up to a step; or the second is killed while the last step is saved."""
    arguments = {"folder": str(folder), "name": name, "until": until, "dies": dies}
    return start("tests.processes.test_process_checkpoint:train_killed", 2, arguments, together=not dies)


@pytest.fixture(
    scope="module",
    params=[pytest.param("unequal slices", marks=pytest.mark.long), pytest.param("equal slices", marks=pytest.mark.slow)],
)
def killed(request, tmp_path_factory):
    """What two processes leave of which one is killed while it writes the fourth checkpoint."""
    folder = tmp_path_factory.mktemp("killed")
    with start_training(folder, request.param, 4, dies=True) as processes:
        limit = time.monotonic() + 60
        while processes[1].code is None and time.monotonic() < limit:
            time.sleep(0.05)
        assert processes[1].code == -9, processes[1].ended()
        time.sleep(0.5)  # for the first, which has written its part and waits
        assert processes[0].code is None
    return request.param, folder


def test_a_save_that_was_killed_in_the_middle_is_no_checkpoint(killed):
    _, folder = killed
    assert {path.name for path in folder.iterdir() if path.name.isdigit()} == {"1", "2", "3"}
    assert [path for path in folder.iterdir() if path.name.startswith("4.")], "nothing was begun"
    with ocp.CheckpointManager(folder) as manager:
        assert manager.all_steps() == [1, 2, 3]


def test_two_processes_and_one_go_on_with_the_bits_of_an_unbroken_run(killed, tmp_path):
    name, before = killed
    folder = shutil.copytree(before, tmp_path / "resumed")
    with start_training(folder, name, 6) as processes:
        processes.wait(60)
    params, pipe = runs()[name], pipeline()
    wanted = jax.device_get(train(params, tmp_path / "unbroken", 6))
    assert wanted.step == 6
    target = pipe.abstract_state(params, np.zeros((8, 3), np.float32))
    with open_manager(folder) as manager:
        assert manager.all_steps() == [4, 5, 6]
        chex.assert_trees_all_equal(manager.restore(6, args=ocp.args.StandardRestore(target)), wanted)
        state = manager.restore(4, args=ocp.args.StandardRestore(target))
    *_, state = advance(pipe, state, 6)
    chex.assert_trees_all_equal(state, wanted)
    gathered = np.load(folder.with_suffix(".npz"))
    for path, leaf in jax.tree_util.tree_leaves_with_path(wanted):
        np.testing.assert_array_equal(gathered[jax.tree_util.keystr(path)], leaf)
