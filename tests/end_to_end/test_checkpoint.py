"""Training goes on from a checkpoint with the bits of the uninterrupted run, whatever the state holds, and opens anywhere."""

import pathlib
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from flax.training.dynamic_scale import DynamicScale
from jax.sharding import Mesh, PartitionSpec

import jaxpp
from tests.models import LAYERS, PARAMS, X, looped, loss_fn
from tests.optim import test_loss_scale
from tests.stages import test_rows


class Run(NamedTuple):
    """What is trained: a pipeline that can be made again, and what its ``init`` and ``step`` take."""

    make: Callable[..., jaxpp.Pipeline]
    made: tuple[Any, ...]
    batch: Any
    key: Any = None


def run_of(loss=loss_fn, params=PARAMS, optimizer=None, batch=X, key=None, **options):
    optimizer = optimizer or optax.adamw(1e-2)
    options = {"num_stages": 2, "num_microbatches": 4} | options
    return Run(lambda **others: jaxpp.Pipeline(loss, optimizer, **options | others), (params, batch), batch, key)


def loop(**options):
    return run_of(looped, LAYERS, **{"num_stages": 4, "balance": "flops"} | options)  # cuts that no schedule changes


class Dropped(nn.Module):
    """Two layers with dropout between them."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(2)(nn.Dropout(0.5, deterministic=False)(nn.tanh(nn.Dense(6)(x))))


def linen():
    def loss(params, x, key):
        return (Dropped().apply({"params": params}, x, rngs={"dropout": key}) ** 2).mean()

    run = run_of(loss, key=jax.random.key(7))
    return run._replace(made=(lambda key: Dropped().init({"params": key, "dropout": key}, X)["params"], jax.random.key(0), X))


def meshed():
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("pipe", "data", "model"))
    run = loop(num_stages=2, num_microbatches=2, mesh=mesh, shardings={"w": PartitionSpec(None, None, "model")})
    return run._replace(made=(run.made[0] | {"w": LAYERS["w"][:5]}, X))


class Norms(nn.Module):
    """Dense layers with batch normalisation between them, in Flax's usual float32."""

    @nn.compact
    def __call__(self, x):
        for width in (8, 3):
            x = nn.tanh(nn.BatchNorm(use_running_average=False, momentum=0.8)(nn.Dense(width)(x)))
        return (x**2).mean()


def model_state():
    def with_state(params, model_state, batch):
        loss, new = Norms().apply({"params": params, "batch_stats": model_state["stats"]}, batch, mutable=["batch_stats"])
        seen = model_state["seen"] + batch.shape[0]  # a whole number, without axes
        return loss * model_state["half"], (
            {"stats": new["batch_stats"], "seen": seen, "half": model_state["half"], "none": {}},
            (),
        )

    def init(key):
        made = Norms().init(key, X[:1])
        return made["params"], {"stats": made["batch_stats"], "seen": jnp.int32(0), "half": jnp.bfloat16(0.5), "none": {}}

    run = run_of(with_state, has_state=True)
    return run._replace(made=(init, jax.random.key(0), X))


def by_hand():
    stages = [lambda p, x: jnp.tanh(x @ p["a"]), lambda p, x: x @ p["b"]]
    params = ({"a": PARAMS["a"]}, {"b": PARAMS["c"]})
    batch = (X, X[:, :2])

    def make(**options):
        loss = lambda y, t: jnp.mean((y - t) ** 2)  # noqa: E731
        return jaxpp.Pipeline.from_stages(stages, loss=loss, optimizer=optax.adam(1e-2), num_microbatches=4, **options)

    return Run(make, (params, batch), batch)


class Net(nnx.Module):
    """Two layers as NNX has them."""

    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(4, 6, rngs=rngs), nnx.Linear(6, 2, rngs=rngs)])

    def __call__(self, x):
        return self.layers[1](jnp.tanh(self.layers[0](x)))


def of_nnx():
    graph, params = nnx.split(Net(nnx.Rngs(0)))
    return run_of(lambda params, x: (nnx.merge(graph, params)(x) ** 2).mean(), params)


@flax.struct.dataclass
class Weights:
    """Parameters as a dataclass, with a field that is no leaf."""

    a: Any
    rest: Any
    power: int = flax.struct.field(pytree_node=False, default=2)


def containers():
    def loss(p, x):
        return jnp.mean((jnp.tanh(jnp.tanh(x @ p.a) @ p.rest["b"][0]) @ p.rest["c"][0][0]) ** p.power)

    rest = flax.core.freeze({"b": [PARAMS["b"]], "c": ((PARAMS["c"],), ()), "empty": {}, "none": None})
    return run_of(loss, Weights(PARAMS["a"], rest))


def mixed():
    labels = {"a": "adam", "b": "sgd", "c": "frozen"}
    parts = {"adam": optax.adam(1e-2), "sgd": optax.sgd(0.1, momentum=0.9), "frozen": optax.set_to_zero()}
    return run_of(optimizer=optax.multi_transform(parts, labels))


def bfloat16():
    def loss(p, x):
        return loss_fn(p, x.astype(jnp.bfloat16)).astype(jnp.float32)

    return run_of(loss, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), PARAMS))


def rows():
    batch = test_rows.BATCH.astype("float32")
    return run_of(test_rows.loss_fn, test_rows.params(dtype="float32"), batch=batch, num_stages=3)


def scaled():
    batch = test_loss_scale.BATCH | {"blow": test_loss_scale.BATCH["blow"].at[0].set(1)}  # every step lowers the scale
    return run_of(test_loss_scale.loss_fn, test_loss_scale.PARAMS, batch=batch, loss_scale=DynamicScale(scale=1024.0))


def noise(key):
    """An optimizer that draws from a raw key of its own."""

    def update(grads, state, params=None):
        key, draw = jax.random.split(state)
        return jax.tree.map(lambda grad: grad * jax.random.uniform(draw), grads), key

    return optax.GradientTransformation(lambda params: key, update)


def injected():
    def made(learning_rate, b1):
        return optax.chain(optax.scale_by_adam(b1=b1), optax.scale(-learning_rate))

    return run_of(optimizer=optax.inject_hyperparams(made)(learning_rate=optax.linear_schedule(1e-2, 1e-3, 5), b1=0.8))


RUNS: dict[str, Callable[[], Run]] = {
    "one array for each leaf": run_of,
    "equal slices": loop,
    "unequal slices": lambda: loop(num_stages=3),
    "slices that share a device": lambda: loop(schedule="interleaved"),
    "slices on a V": lambda: loop(schedule="zb-v"),
    "rows": rows,
    "lamb": lambda: run_of(optimizer=optax.lamb(1e-2)),
    "lamb on a whole loop": lambda: loop(optimizer=optax.lamb(1e-2), num_stages=1),
    "multi_transform": mixed,
    "loss scale": scaled,
    "model state": model_state,
    "replicas": lambda: run_of(num_microbatches=2, data_parallel=2),
    "replicas with unequal slices": lambda: loop(num_stages=3, num_microbatches=2, data_parallel=2),
    "mesh, with unequal slices": meshed,
    "linen, with dropout": linen,
    "nnx": of_nnx,
    "containers": containers,
    "stages by hand": by_hand,
    "bfloat16": bfloat16,
    "MultiSteps and unequal slices": lambda: loop(num_stages=3, optimizer=optax.MultiSteps(optax.adamw(1e-2), 2)),
    "apply_if_finite": lambda: run_of(optimizer=optax.apply_if_finite(optax.adam(1e-2), 2)),
    "hyperparameters": injected,
    "a key": lambda: run_of(optimizer=optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(3)), optax.sgd(1e-2))),
    "a raw key": lambda: run_of(optimizer=optax.chain(noise(jax.random.PRNGKey(3)), optax.sgd(1e-2))),
    "a mask": lambda: run_of(optimizer=optax.masked(optax.adam(1e-2), {"a": True, "b": False, "c": True})),
}


def advance(pipe, state, run, num_steps):
    """So many steps, each with the key of its number."""
    for _ in range(num_steps):
        key = None if run.key is None else jax.random.fold_in(run.key, state.step)
        state, _ = pipe.step(state, run.batch, key)
    return state


SHORT = ("unequal slices", "rows", "loss scale", "model state", "linen, with dropout", "stages by hand")


@pytest.mark.filterwarnings("ignore::jaxpp.MicrobatchWarning")  # batch normalisation mixes examples
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.long] * (name not in SHORT)) for name in RUNS])
def test_a_restored_state_goes_on_with_the_same_bits(name, tmp_path):
    run = RUNS[name]()
    pipe = run.make()
    state = advance(pipe, pipe.init(*run.made), run, 2)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
    with ocp.StandardCheckpointer() as checkpointer:
        fresh = run.make()
        target = fresh.abstract_state(*run.made)
        restored = checkpointer.restore(tmp_path / "state", target)
    assert jax.tree.structure(restored) == jax.tree.structure(state) == jax.tree.structure(target)
    assert restored.step == state.step == 2 and target.step == 0
    for leaf, shape in zip(jax.tree.leaves(restored)[:-1], jax.tree.leaves(target)[:-1], strict=True):
        assert (leaf.shape, leaf.dtype, leaf.sharding) == (shape.shape, shape.dtype, shape.sharding)
    chex.assert_trees_all_equal(restored, state)
    state, restored = advance(pipe, state, run, 2), advance(fresh, restored, run, 2)
    assert restored.step == state.step == 4
    chex.assert_trees_all_equal(restored, state)


ELSEWHERE = """
import jax, orbax.checkpoint, pathlib, sys

path, shapes, key = pathlib.Path(sys.argv[1]), eval(sys.argv[2]), jax.random.key(0)
init_fn = lambda key: {name: jax.numpy.zeros(shape) for name, shape in shapes.items()}
assert jax.device_count() == 1
try:
    orbax.checkpoint.StandardCheckpointer().restore(path)
except ValueError as error:
    print("no target:", str(error).split(".")[0])
LINES
print(type(params["a"]).__name__, {name: float(leaf.sum()) for name, leaf in params.items()})
"""


@pytest.mark.long
@pytest.mark.parametrize("page", ["README.md", "docs/guide/save.md"])
def test_the_parameters_alone_open_on_one_device_in_the_lines_of_the_page(page, tmp_path):
    run = run_of(num_stages=4, optimizer=optax.adamw(1e-2))
    pipe = run.make()
    state = advance(pipe, pipe.init(*run.made), run, 1)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
    text = (pathlib.Path(__file__).parents[2] / page).read_text()
    lines = re.search(r'^target = \{"params": jax.eval_shape.*?\["params"\]$', text, re.DOTALL | re.MULTILINE)[0]
    code = ELSEWHERE.replace("LINES", lines.replace("ocp.", "orbax.checkpoint."))
    arguments = [sys.executable, "-c", code, str(tmp_path / "state"), str({name: leaf.shape for name, leaf in PARAMS.items()})]
    opened = subprocess.run(arguments, capture_output=True, text=True, check=False)
    sums = {name: float(np.asarray(leaf).sum()) for name, leaf in jax.device_get(state.params).items()}
    told, found = opened.stdout.splitlines() or [opened.stderr, ""]
    assert told == "no target: Topology mismatch detected"
    assert found == f"ndarray {sums}"
