"""Batches, banks and ``value_and_grad`` of two processes, and of one. What they run stands first."""

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.dynamic_scale import DynamicScale
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxpp
from jaxpp.errors import BankError, BatchError, FitError, ProcessError
from tests.processes.processes import launch

pytestmark = pytest.mark.long

SEVERAL = jax.process_count() > 1


def numbers(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype("f") / 2


PARAMS = {name: numbers(k, 8, 8) for k, name in enumerate(("first", "second", "last"))}
LOOPED = {"in": numbers(3, 8, 8), "layers": numbers(4, 5, 8, 8), "out": numbers(5, 8, 8)}


def batch(step: int, size: int = 16) -> dict[str, Any]:
    """Inputs and labels, a number, and a leaf that no loss reads."""
    x, y = numbers(100 + step, size, 8), numbers(200 + step, size, 8)
    return {"x": x, "y": y, "beta": 0.5, "unread": np.zeros((size, 2), "f")}


def loss_fn(params, batch):
    x = jnp.tanh(jnp.tanh(batch["x"] @ params["first"]) @ params["second"])
    return batch["beta"] * jnp.mean((x @ params["last"] - batch["y"]) ** 2)


def looped(params, batch):
    x, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), jnp.tanh(batch["x"] @ params["in"]), params["layers"])
    return jnp.mean((x @ params["out"] - batch["y"]) ** 2), {"mean": x.mean()}


def loss_of_task(params, task_params, batch):
    x = jnp.tanh(jnp.tanh(batch["x"] @ params["first"]) @ task_params["head"])
    x = jnp.tanh(x @ params["second"]) @ task_params["tail"]["w"] + task_params["tail"]["b"]
    return jnp.mean((x @ params["last"] - batch["y"]) ** 2)


def other_loss_of_task(params, task_params, batch):
    return jnp.mean((jnp.tanh(batch["x"] @ params["second"]) @ task_params["head"] @ params["last"] - batch["y"]) ** 2)


def theta(seed: int) -> dict[str, Any]:
    return {"head": numbers(seed, 8, 8), "tail": {"w": numbers(seed + 1, 8, 8), "b": numbers(seed + 2, 8)}}


def new_bank(*names: str) -> jaxpp.Bank:
    return jaxpp.Bank({name: theta(10 * len(name) + ord(name[0])) for name in names}, optax.adamw(1e-2))


class Found(dict[str, np.ndarray]):
    """Arrays by name; trees are gathered first."""

    def add(self, name: str, tree: Any) -> None:
        for path, leaf in jax.tree_util.tree_leaves_with_path(jaxpp.gather(tree) if SEVERAL else tree):
            self[name + jax.tree_util.keystr(path)] = np.asarray(leaf)


def gradients(found: Found, devices: Sequence[jax.Device]) -> None:
    """Of whole leaves, and of one that is held as slices of unequal size."""
    grad_fn = jaxpp.value_and_grad(looped, num_stages=2, num_microbatches=2, has_aux=True, devices=devices[::3])
    (loss, aux), grads = grad_fn(LOOPED, batch(0))
    found |= {"loss": np.asarray(loss), "mean": np.asarray(aux["mean"])}
    assert jax.tree.map(np.shape, grads) == jax.tree.map(np.shape, LOOPED)
    found.add("grads", grads)
    grad_fn = jaxpp.value_and_grad(loss_fn, num_stages=2, num_microbatches=2, devices=jax.local_devices()[:2])
    loss, grads = grad_fn(PARAMS, batch(0))  # of the devices of one process, where the parameters are
    found |= {"own loss": np.asarray(loss), "own gradient": np.asarray(grads["last"])}


def measured(devices: Sequence[jax.Device]) -> None:
    """Stages of equal time: all processes agree on the cuts, or a step raises."""
    pipe = jaxpp.Pipeline(loss_fn, optax.sgd(0.1), num_stages=2, num_microbatches=2, devices=devices[::3], balance="time")
    state = pipe.init(PARAMS, batch(0))
    assert np.isfinite(pipe.step(state, batch(0))[1].loss)


def fitted(devices: Sequence[jax.Device]) -> None:
    """Stages that keep less so that a step fits: all processes choose alike, or a step raises."""
    options = {"num_stages": 2, "num_microbatches": 6, "schedule": "gpipe", "devices": devices[::3]}
    plain = jaxpp.Pipeline(loss_fn, optax.sgd(0.1), **options)
    shapes = jax.eval_shape(lambda: PARAMS)
    room = max(plain.forecast(shapes, batch(0, 48)).peaks.values()) - 1
    pipe = jaxpp.Pipeline(loss_fn, optax.sgd(0.1), **options, hbm=room)
    state = pipe.init(PARAMS, batch(0, 48))
    assert pipe.stages.remarks and pipe.forecast(shapes, batch(0, 48)).fits
    assert np.isfinite(pipe.step(state, batch(0, 48))[1].loss)
    with pytest.raises(FitError):
        jaxpp.Pipeline(loss_fn, optax.sgd(0.1), **options, hbm="100B").init(PARAMS, batch(0, 48))


def batches(found: Found, devices: Sequence[jax.Device]) -> None:
    """Weights of the labels; each process loads what it reads."""
    options = {"num_stages": 2, "num_microbatches": 4, "devices": devices[::3], "weight": lambda part: (part["y"][:, 0] > -1).sum()}
    pipe = jaxpp.Pipeline(loss_fn, optax.adamw(1e-2), **options)
    shapes = jax.eval_shape(lambda: batch(0))
    state = pipe.init(PARAMS, shapes)
    first, last = (jax.process_index() == number for number in (0, jax.process_count() - 1))
    reads = pipe.reads(shapes)
    assert reads == {"x": first, "y": last, "beta": last, "unread": False}
    assert pipe.reads(shapes, loss_fn=lambda params, batch: batch["y"].mean() * params["last"].mean())["x"] is False

    def mine(step: int) -> Any:
        return jax.tree.map(lambda leaf, read, aval: leaf if read else aval, batch(step), reads, shapes)

    for step in range(2):
        state, metrics = pipe.step(state, mine(step))
    found |= {"weighted": np.asarray(metrics.loss), "evaluated": np.asarray(pipe.evaluate(state, mine(2)).loss)}
    for number, weights in enumerate((None, [1.0, 0.5, 2.0])):
        state, metrics = pipe.step(state, jaxpp.Microbatches([batch(step, size) for step, size in enumerate((4, 2, 6))], weights))
        found[f"loss of microbatches {number}"] = np.asarray(metrics.loss)
    found.add("state", state.params)
    if SEVERAL:
        refused(pipe, state, devices)


def refused(pipe: jaxpp.Pipeline, state: jaxpp.State, devices: Sequence[jax.Device]) -> None:
    """What a process reads and does not have: an error in both, before anything runs."""
    me, small = jax.process_index(), batch(3, 8)
    with pytest.raises(ProcessError if me else BatchError) as error:
        pipe.step(state, small | {"x": jax.ShapeDtypeStruct((8, 8), np.float32)})
    words = "process 0 raised BatchError: batch: process 0 passes the values that its own stages read of a batch"
    expected = "batch['x']: f32[8,8] is a shape without values, and stage 0 reads it, on cpu:0."
    assert (words if me else expected) in str(error.value)
    assert me or "pipe.reads(batch)" in str(error.value)

    def of_rows(*spec: str | None) -> jax.Array:
        sharding = NamedSharding(Mesh(np.array(devices), "all"), PartitionSpec(*spec))
        part = small["x"][4 * me : 4 * me + 4] if spec[0] else small["x"][:, 4 * me : 4 * me + 4]
        return jax.make_array_from_process_local_data(sharding, part, (8, 8))

    with pytest.raises(ProcessError if me else BatchError) as error:
        pipe.step(state, small | {"x": of_rows("all")})
    assert me or "batch['x']: f32[8,8] lacks row 4, and stage 0 reads it, on cpu:0." in str(error.value)
    with pytest.raises(BatchError, match=r"batch\['x'\]: a leaf of a batch that lives in several processes is divided along its"):
        pipe.step(state, small | {"x": of_rows(None, "all")})


def tasks(found: Found, devices: Sequence[jax.Device], folder: Path) -> None:
    """A bank whose sets are divided over the stages: a step changes its own set alone, and files hold all of it."""
    bank = new_bank("cat", "horse")
    options = {"num_stages": 2, "num_microbatches": 2, "devices": devices[::3], "cuts": ["second"]}
    pipe = jaxpp.Pipeline(loss_of_task, optax.adamw(1e-2), bank=bank, **options)
    state, whole = pipe.init(PARAMS, batch(0)), bank.nbytes
    bank.add("gecko", theta(7))
    assert bank.nbytes == 3 * whole // 2
    if SEVERAL:
        held = [leaf for name in bank.tasks for leaf in jax.tree.leaves((bank.params(name), bank.opt_state(name)))]
        assert bank.nbytes == sum(shard.data.nbytes for leaf in held for shard in leaf.addressable_shards)
        assert 0 < bank.nbytes < sum(leaf.nbytes for leaf in held)
        with pytest.raises(BankError, match=r"bank.use\('cat'\)(.|\n)* leaves are here(.|\n)*pipe.step"), bank.use("cat"):
            pass
    manifests = [bank.save(folder / "sets")]
    for step, task in enumerate(("cat", "gecko", "cat")):
        pipe.prefetch(task)
        state, metrics = pipe.step(state, batch(step), task=task)
        found[f"loss of {task} {step}"] = np.asarray(metrics.loss)
    manifests.append(bank.save(folder / "sets"))
    changed = [[old[0] for old, new in zip(*(each["sets"] for each in manifests), strict=True) if old != new]]
    assert changed == [["cat", "gecko"]]
    found["loss of evaluate"] = np.asarray(pipe.evaluate(state, batch(3), task="horse").loss)
    for name in bank.tasks:
        found.add(name, (bank.params(name), bank.opt_state(name)))
    bank.restore(folder / "sets", manifests[0])
    found.add("restored", bank.params("cat"))
    if SEVERAL:  # with a step that all have made before, but not of one task
        with pytest.raises(ProcessError, match=r"process 1 is in pipe.step .* for task 'horse' as agreed in exchange"):
            pipe.step(state, batch(4), task=("cat", "horse")[jax.process_index()])
    _, metrics = pipe.step(state, batch(4), task="cat")
    found["loss after restore"] = np.asarray(metrics.loss)
    assert len(bank.prune(folder / "sets", manifests)) == 0
    if jax.process_index() == 0:
        (folder / "manifest.json").write_text(json.dumps(manifests[1]))


def replicas(found: Found, devices: Sequence[jax.Device]) -> None:
    """Replicas in different processes with tasks of their own: what one has changed is sent to the other."""
    mesh = Mesh(np.array(devices).reshape(2, 2, 1).transpose(1, 0, 2), ("pipe", "data", "model"))
    for kind, more in {"plain": {}, "scaled": {"loss_scale": DynamicScale(scale=1024.0)}, "late": {"delay": 1}}.items():
        bank = new_bank("cat", "horse", "gecko")
        options = {"num_stages": 2, "num_microbatches": 2, "mesh": mesh, "cuts": ["second"]} | more
        pipe = jaxpp.Pipeline(loss_of_task, optax.adamw(1e-2), bank=bank, **options)
        state = pipe.init(PARAMS, batch(0))
        pipes = [pipe]
        if kind == "scaled":
            pipes.append(pipe.other(other_loss_of_task))
            pipes[1].init(state, batch(0))
        for step, task in enumerate((["cat", "horse"], "gecko", ["horse", "cat"])):
            state, metrics = pipes[step % len(pipes)].step(state, batch(step), task=task)
            found[f"loss of {kind} replicas {step}"] = np.asarray(metrics.loss)
        for name in bank.tasks:
            found.add(f"{kind} replicas' {name}", (bank.params(name), bank.opt_state(name)))


def run(devices: Sequence[jax.Device], folder: Path) -> Found:
    """All of it, on four devices."""
    found = Found()
    gradients(found, devices)
    measured(devices)
    fitted(devices)
    batches(found, devices)
    tasks(found, devices, folder)
    replicas(found, devices)
    return found


def main(folder: str) -> None:
    """Run in one of two processes, and write what was found."""
    for kind in (jaxpp.UnevenStagesWarning, jaxpp.OptionWarning):
        warnings.simplefilter("ignore", kind)
    path = Path(folder)
    np.savez(path / f"{jax.process_index()}.npz", **run(jax.devices(), path))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What two processes have found and saved; Orbax waits in collectives, which leave some threads to the sends before them."""
    folder = tmp_path_factory.mktemp("two")
    launch("tests.processes.test_process_front_door:main", 2, {"folder": str(folder)}, seconds=120)
    return folder


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What one process finds with as many devices."""
    return run(jax.devices()[:4], tmp_path_factory.mktemp("one"))


@pytest.mark.filterwarnings("ignore::jaxpp.UnevenStagesWarning")
@pytest.mark.parametrize("process", [0, 1])
def test_two_processes_find_the_bits_of_one(folder, alone, process):
    with np.load(folder / f"{process}.npz") as found:
        assert set(found) == set(alone) and len(alone) > 60
        assert [name for name, array in alone.items() if found[name].tobytes() != array.tobytes()] == []


def test_one_process_restores_the_sets_that_two_have_saved(folder, alone):
    bank = jaxpp.Bank({}, optax.adamw(1e-2))
    bank.restore(folder / "sets", json.loads((folder / "manifest.json").read_text()))
    assert sorted(bank.tasks) == ["cat", "gecko", "horse"]
    for name in bank.tasks:
        read = Found()
        read.add(name, (bank.params(name), bank.opt_state(name)))
        assert read and all(array.tobytes() == alone[key].tobytes() for key, array in read.items())
