"""What the processes of tests/test_process_checkpoint.py run."""

import contextlib
import os
import pathlib
import signal
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

import jaxpp
from jaxpp.errors import ArgumentError, StateError
from jaxpp.types import Tree


def values(scale: float = 1.0) -> dict[str, np.ndarray]:
    """A tree as a state has it, with whole leaves."""
    count = lambda *shape: scale + np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
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
    half = np.array(devices[len(devices) // 2 :]).reshape(1, -1)
    group = lambda spec: NamedSharding(Mesh(half, ("data", "model")), spec)
    every = lambda spec: NamedSharding(Mesh(np.array(devices), ("stage",)), spec)
    one = SingleDeviceSharding
    return {
        "first": one(devices[0]),
        "last": one(devices[-1]),
        "number": one(devices[-1]),
        "half": one(devices[1]),
        "sharded": group(PartitionSpec(None, "model")),
        "copied": group(PartitionSpec()),
        "layers": every(PartitionSpec("stage")),
        "replicas": every(PartitionSpec()),
    }


def placed(value: np.ndarray, sharding: Sharding) -> jax.Array:
    """What this process has of an array."""
    parts = [jax.device_put(value[index], device) for device, index in sharding.addressable_devices_indices_map(value.shape).items()]
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
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(ocp.StandardCheckpointer()).restore(path / "one", wrong)
        except ValueError as error:
            assert "is not compatible with the stored shape" in str(error)
        else:
            raise AssertionError("another shape was restored")
    key = {"key": jax.random.key(0)}
    try:
        ocp.StandardCheckpointer().save(path / "key", key)
    except StateError as error:
        assert "key: key<fry>[]" in str(error) and "jax.random.key_data" in str(error)
    gathered()
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
    for wrong, said in (({"x": loss} if me else {"y": loss}, "every process passes the same tree"), (loss, "leave device out")):
        try:
            jaxpp.gather(wrong, None if isinstance(wrong, dict) else jax.devices()[2 if me == 0 else 0])
        except ArgumentError as error:
            assert said in str(error), error
        else:
            raise AssertionError(said)


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


def killed_while_saving(folder: str) -> None:
    """Save twice; the last process is killed during the second save."""
    register()
    with open_manager(pathlib.Path(folder)) as manager:
        manager.save(1, args=ocp.args.StandardSave(state_of(1, 1)))
        manager.wait_until_finished()
        print("saved", flush=True)
        if jax.process_index() == jax.process_count() - 1:
            ocp.type_handlers.register_type_handler(jax.Array, DiesInTheMiddle(jaxpp.array_handler()), override=True)
        manager.save(2, args=ocp.args.StandardSave(state_of(2, 2)))
        manager.wait_until_finished()
        print("saved again", flush=True)


def newest(folder: str) -> None:
    """Restore what counts as a checkpoint."""
    register()
    with open_manager(pathlib.Path(folder)) as manager:
        check(manager.restore(manager.latest_step(), args=ocp.args.StandardRestore(target())), manager.latest_step(), manager.latest_step())
        print("restored", manager.latest_step())
