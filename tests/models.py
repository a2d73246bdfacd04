"""The models that tests of several rooms train: a chain of matrices, a loop over layers, and every model of models/.

``conftest`` imports this module, with the shapes in the annotations of the models checked at every call.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxpp
from jaxpp.schedule import SCHEDULES, Schedule, make
from jaxpp.stages.loss.aux import REDUCERS, Join
from models.adapters import AdaptedMLP
from models.gpt import GPT
from models.mlp import MLP
from models.nnx_gpt import NNXGPT
from models.resnet import ResNet
from models.seq2seq import Seq2Seq
from models.unet import UNet

PARAMS = {"a": jnp.full((4, 6), 0.1), "b": jnp.eye(6), "c": jnp.full((6, 2), 0.3)}
X = jnp.asarray(np.random.default_rng(0).normal(size=(8, 4)), jnp.float32)


def loss_fn(params, x):
    return jnp.mean((jnp.tanh(jnp.tanh(x @ params["a"]) @ params["b"]) @ params["c"]) ** 2)


def pipeline(loss=loss_fn, optimizer=None, stages=2, microbatches=2, **options):
    optimizer = optimizer or optax.adam(1e-2)
    return jaxpp.Pipeline(loss, optimizer, num_stages=stages, num_microbatches=microbatches, **options)


LAYERS = {"w": jnp.asarray(np.random.default_rng(3).normal(size=(8, 4, 4)) * 0.6, jnp.float32), "out": jnp.ones((4, 2))}


def looped(params, x):
    x, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params["w"])
    return jnp.mean((x @ params["out"]) ** 2)


def schedule_for(name: str, stages: int, microbatches: int) -> Schedule | None:
    """The schedule for these sizes, if there is one."""
    recipe = SCHEDULES[name]
    ranks = stages // recipe.stages_per_rank
    if ranks * recipe.stages_per_rank == stages and recipe.allows(ranks, microbatches):
        return make(name, num_ranks=ranks, num_microbatches=microbatches)
    return None


@dataclasses.dataclass(frozen=True)
class Case:
    """A model with its loss, its parameters, a batch and a key, all of one floating type."""

    name: str
    loss_fn: Callable[..., Any]
    init: Callable[..., Any]
    params: Any
    batch: Any
    key: Any
    model: Any

    @property
    def reducers(self) -> dict[int, Any]:
        """What makes the aux of a batch of those of its microbatches, beside the mean."""
        return {1: Join(), 2: REDUCERS["sum"]} if self.name == "mlp" else {0: REDUCERS["max"]}


def mlp_case(dtype: str = "float32", *, batch_size: int = 19, width: int = 16, depth: int = 7, compute: Any = None) -> Case:
    """A multilayer perceptron with a two-class head; aux holds the accuracy, a count and the logits."""
    model = MLP(width=width, depth=depth, dtype=compute, param_dtype=dtype)
    rng = np.random.default_rng(1)
    batch = {"x": jnp.asarray(rng.normal(size=(batch_size, width)), dtype), "y": jnp.asarray(rng.integers(0, 2, batch_size))}

    def loss_fn(params, batch):
        logits = model.apply({"params": params}, batch["x"]).astype(dtype)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
        aux = {"accuracy": (logits.argmax(-1) == batch["y"]).mean(dtype=dtype), "ones": batch["y"].sum(), "logits": logits}
        return losses.mean(), aux

    def init(key):
        return model.init(key, jnp.zeros((1, width), dtype))["params"]

    return Case("mlp", loss_fn, init, jax.jit(init)(jax.random.key(0)), batch, None, model)


def gpt_case(
    dtype: str = "float32", *, batch_size: int = 11, depth: int = 2, compute: Any = None, width: int = 16, heads: int = 2
) -> Case:
    """A small GPT with dropout and a tied head, on random tokens; aux holds the largest logit."""
    model = GPT(
        vocab_size=32, max_length=8, width=width, depth=depth, num_heads=heads, dropout=0.2, dtype=compute, param_dtype=dtype
    )
    tokens = jnp.asarray(np.random.default_rng(2).integers(0, 32, (batch_size, 9)))

    def loss_fn(params, batch, key):
        logits = model.apply({"params": params}, batch[:, :-1], rngs={"dropout": key}).astype(dtype)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean(), {"top": logits.max()}

    def init(key):
        return model.init({"params": key, "dropout": key}, tokens[:1, :-1])["params"]

    return Case("gpt", loss_fn, init, jax.jit(init)(jax.random.key(0)), tokens, jax.random.key(7), model)


ZOO_SIZE = 8  # examples


@dataclasses.dataclass(frozen=True)
class ZooCase:
    """A model of models/: a loss, where it starts, and a batch; ``model_state`` is None without any."""

    loss_fn: Callable[..., Any]
    params: Any
    batch: Any
    key: Any = None
    model_state: Any = None
    weight: Callable[[Any], Any] | None = None


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def filled(init, *args):
    """What ``init`` makes, filled with random numbers: quicker than to compile it."""
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape) / 3, leaf.dtype), jax.eval_shape(init, *args))


def plain_case(make_case, dtype):
    case = make_case(dtype, batch_size=ZOO_SIZE)
    return ZooCase(lambda *args: case.loss_fn(*args)[0], case.params, case.batch, case.key)


def resnet_case(dtype):
    model = ResNet(num_classes=3, width=4, groups=(1, 1), param_dtype=dtype)
    rng = np.random.default_rng(3)
    batch = {"x": jnp.asarray(rng.normal(size=(ZOO_SIZE, 8, 8, 1)), dtype), "y": jnp.asarray(rng.integers(0, 3, ZOO_SIZE))}
    variables = filled(model.init, jax.random.key(0), batch["x"])

    def loss_fn(params, model_state, batch):
        logits, new = model.apply({"params": params, **model_state}, batch["x"], mutable=["batch_stats"])
        return cross_entropy(logits, batch["y"]).mean(), (new, {"accuracy": (logits.argmax(-1) == batch["y"]).mean(dtype=dtype)})

    averages = jax.tree.map(lambda leaf: leaf.astype(dtype), variables["batch_stats"])  # Flax starts them in float32
    return ZooCase(loss_fn, variables["params"], batch, model_state={"batch_stats": averages})


def unet_case(dtype):
    model = UNet(width=4, levels=2, num_groups=2, param_dtype=dtype)
    clean = jnp.asarray(np.random.default_rng(4).normal(size=(ZOO_SIZE, 8, 4, 2)), dtype)

    def loss_fn(params, batch, key):
        noisy = batch + 0.3 * jax.random.normal(key, batch.shape, dtype)
        return ((model.apply({"params": params}, noisy) - batch) ** 2).mean()

    return ZooCase(loss_fn, filled(model.init, jax.random.key(0), clean)["params"], clean, jax.random.key(1))


def seq2seq_case(dtype, depth=1):
    model = Seq2Seq(vocab_size=16, max_length=6, width=8, depth=depth, num_heads=2, dropout=0.0, param_dtype=dtype)
    batch = {"source": padded(5, 5), "target": padded(6, 6)}

    def loss_fn(params, batch):
        logits = model.apply({"params": params}, batch["source"], batch["target"][:, :-1])
        losses = cross_entropy(logits, batch["target"][:, 1:])
        return losses.mean(where=batch["target"][:, 1:] != model.pad)

    def weight(batch):
        return (batch["target"][:, 1:] != model.pad).sum()

    return ZooCase(loss_fn, filled(model.init, jax.random.key(0), *batch.values())["params"], batch, weight=weight)


def padded(length, seed):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(1, 16, (ZOO_SIZE, length))
    return jnp.asarray(np.where(np.arange(length) < rng.integers(3, length + 1, (ZOO_SIZE, 1)), tokens, 0))


def nnx_gpt_case(dtype):
    model = NNXGPT(16, 6, 8, depth=2, num_heads=2, dropout=0.1, param_dtype=dtype, rngs=nnx.Rngs(0))
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def loss_fn(params, rest, batch):
        model = nnx.merge(graphdef, params, rest, copy=True)
        loss = cross_entropy(model(batch[:, :-1]), batch[:, 1:]).mean()
        return loss, (nnx.state(model, nnx.Not(nnx.Param)), {})

    return ZooCase(loss_fn, params, jnp.asarray(np.random.default_rng(7).integers(0, 16, (ZOO_SIZE, 7))), model_state=rest)


def adapters_case(dtype):
    model = AdaptedMLP(width=8, depth=2, rank=2, num_classes=3, param_dtype=dtype)
    rng = np.random.default_rng(8)
    batch = {"x": jnp.asarray(rng.normal(size=(ZOO_SIZE, 6)), dtype), "y": jnp.asarray(rng.integers(0, 3, ZOO_SIZE))}

    def loss_fn(params, batch):
        return cross_entropy(model.apply({"params": params}, batch["x"]), batch["y"]).mean()

    return ZooCase(loss_fn, filled(model.init, jax.random.key(0), batch["x"])["params"], batch)


ZOO = {
    "mlp": lambda dtype: plain_case(mlp_case, dtype),
    "gpt": lambda dtype: plain_case(gpt_case, dtype),
    "resnet": resnet_case,
    "unet": unet_case,
    "seq2seq": seq2seq_case,
    "nnx_gpt": nnx_gpt_case,
    "adapters": adapters_case,
}
