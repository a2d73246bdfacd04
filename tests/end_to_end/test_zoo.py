"""Every model of models/ is cut and run as it is: each schedule equals the oracle, loss, gradients and model state."""

import contextlib
import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jaxtyping import install_import_hook

import models
from jaxpp.engine.engine import Engine, open_engine
from jaxpp.options import Options
from jaxpp.schedule import SCHEDULES
from jaxpp.verify import GRAD_FLOOR, compare, oracle
from tests.conftest import gpt_case, mlp_case
from tests.end_to_end.test_transparency import schedule_for

with install_import_hook("models", "beartype.beartype"):
    from models.adapters import AdaptedMLP
    from models.nnx_gpt import NNXGPT
    from models.resnet import ResNet
    from models.seq2seq import Seq2Seq
    from models.unet import UNet

SIZE = 8  # examples


@dataclasses.dataclass(frozen=True)
class Case:
    """A loss, where it starts, and a batch; ``model_state`` is None without any."""

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
    case = make_case(dtype, batch_size=SIZE)
    return Case(lambda *args: case.loss_fn(*args)[0], case.params, case.batch, case.key)


def resnet_case(dtype):
    model = ResNet(num_classes=3, width=4, groups=(1, 1), param_dtype=dtype)
    rng = np.random.default_rng(3)
    batch = {"x": jnp.asarray(rng.normal(size=(SIZE, 8, 8, 1)), dtype), "y": jnp.asarray(rng.integers(0, 3, SIZE))}
    variables = filled(model.init, jax.random.key(0), batch["x"])

    def loss_fn(params, model_state, batch):
        logits, new = model.apply({"params": params, **model_state}, batch["x"], mutable=["batch_stats"])
        return cross_entropy(logits, batch["y"]).mean(), (new, {"accuracy": (logits.argmax(-1) == batch["y"]).mean(dtype=dtype)})

    averages = jax.tree.map(lambda leaf: leaf.astype(dtype), variables["batch_stats"])  # Flax starts them in float32
    return Case(loss_fn, variables["params"], batch, model_state={"batch_stats": averages})


def unet_case(dtype):
    model = UNet(width=4, levels=2, num_groups=2, param_dtype=dtype)
    clean = jnp.asarray(np.random.default_rng(4).normal(size=(SIZE, 8, 4, 2)), dtype)

    def loss_fn(params, batch, key):
        noisy = batch + 0.3 * jax.random.normal(key, batch.shape, dtype)
        return ((model.apply({"params": params}, noisy) - batch) ** 2).mean()

    return Case(loss_fn, filled(model.init, jax.random.key(0), clean)["params"], clean, jax.random.key(1))


def seq2seq_case(dtype, depth=1):
    model = Seq2Seq(vocab_size=16, max_length=6, width=8, depth=depth, num_heads=2, dropout=0.0, param_dtype=dtype)
    batch = {"source": padded(5, 5), "target": padded(6, 6)}

    def loss_fn(params, batch):
        logits = model.apply({"params": params}, batch["source"], batch["target"][:, :-1])
        losses = cross_entropy(logits, batch["target"][:, 1:])
        return losses.mean(where=batch["target"][:, 1:] != model.pad)

    def weight(batch):
        return (batch["target"][:, 1:] != model.pad).sum()

    return Case(loss_fn, filled(model.init, jax.random.key(0), *batch.values())["params"], batch, weight=weight)


def padded(length, seed):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(1, 16, (SIZE, length))
    return jnp.asarray(np.where(np.arange(length) < rng.integers(3, length + 1, (SIZE, 1)), tokens, 0))


def nnx_gpt_case(dtype):
    model = NNXGPT(16, 6, 8, depth=2, num_heads=2, dropout=0.1, param_dtype=dtype, rngs=nnx.Rngs(0))
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def loss_fn(params, rest, batch):
        model = nnx.merge(graphdef, params, rest, copy=True)
        loss = cross_entropy(model(batch[:, :-1]), batch[:, 1:]).mean()
        return loss, (nnx.state(model, nnx.Not(nnx.Param)), {})

    return Case(loss_fn, params, jnp.asarray(np.random.default_rng(7).integers(0, 16, (SIZE, 7))), model_state=rest)


def adapters_case(dtype):
    model = AdaptedMLP(width=8, depth=2, rank=2, num_classes=3, param_dtype=dtype)
    rng = np.random.default_rng(8)
    batch = {"x": jnp.asarray(rng.normal(size=(SIZE, 6)), dtype), "y": jnp.asarray(rng.integers(0, 3, SIZE))}

    def loss_fn(params, batch):
        return cross_entropy(model.apply({"params": params}, batch["x"]), batch["y"]).mean()

    return Case(loss_fn, filled(model.init, jax.random.key(0), batch["x"])["params"], batch)


CASES = {
    "mlp": lambda dtype: plain_case(mlp_case, dtype),
    "gpt": lambda dtype: plain_case(gpt_case, dtype),
    "resnet": resnet_case,
    "unet": unet_case,
    "seq2seq": seq2seq_case,
    "nnx_gpt": nnx_gpt_case,
    "adapters": adapters_case,
}
DEEPER = {"deep seq2seq": lambda dtype: seq2seq_case(dtype, depth=2)}


def check(model: str, dtype: str, stages: int, microbatches: int) -> None:
    with jax.enable_x64(True) if dtype == "float64" else contextlib.nullcontext():
        case = (CASES | DEEPER)[model](dtype)
        has_state = case.model_state is not None
        start = (case.params, case.model_state) if has_state else (case.params,)
        options = {"weight": case.weight} | ({"model_state": case.model_state} if has_state else {})
        loss, aux, grads, *after = oracle(case.loss_fn, case.params, case.batch, case.key, microbatches, **options)
        for name, engine in engines(case, start, stages, microbatches).items():
            outcome = engine.run("grads", engine.bring(start), case.batch, case.key)
            compare(f"{name} loss, aux", (outcome.loss, outcome.aux), (loss, jax.tree.leaves(aux)))
            compare(f"{name} grads", outcome.grads, jax.tree.leaves(grads), floor=GRAD_FLOOR)
            if has_state:
                compare(f"{name} model_state", data(outcome.model_state), data(after))


def engines(case: Case, start: Any, stages: int, microbatches: int) -> dict[str, Engine]:
    """One engine a schedule, all with the same cuts and compiled programs."""
    options = {"has_aux": False, "weight": case.weight, "cuts": None, "devices": None, "has_state": case.model_state is not None}
    first = open_engine(
        Options.of(case.loss_fn, num_stages=stages, num_microbatches=microbatches, schedule="naive", **options),
        None,
        start,
        case.batch,
        case.key,
    )
    made = {name: schedule_for(name, stages, microbatches) for name in SCHEDULES}
    return {name: first.with_schedule(schedule) for name, schedule in made.items() if schedule}


def data(tree):
    """The leaves, keys as the numbers they are."""
    return [
        jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf for leaf in jax.tree.leaves(tree)
    ]


def test_every_model_is_here():
    assert set(CASES) == {path.stem for path in pathlib.Path(models.__file__).parent.glob("*.py")} - {"__init__"}


@pytest.mark.parametrize(
    ("model", "dtype", "stages"),
    [
        ("mlp", "float32", 4),  # gpt: in test_transparency.py
        ("resnet", "float64", 4),
        ("unet", "float64", 2),
        ("seq2seq", "float32", 2),
        pytest.param("resnet", "float32", 1, marks=pytest.mark.slow),
        pytest.param("nnx_gpt", "float32", 2, marks=pytest.mark.slow),  # the zoo's test trains and verifies it
        ("adapters", "float32", 2),
    ],
)
def test_every_schedule_equals_the_oracle(model, dtype, stages):
    check(model, dtype, stages, 4)


@pytest.mark.slow
@pytest.mark.parametrize("microbatches", [1, 3, 4])
@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("model", [*CASES, *DEEPER])
def test_the_full_grid_equals_the_oracle(model, dtype, stages, microbatches):
    check(model, dtype, stages, microbatches)


def test_padding_changes_no_prediction():
    model = Seq2Seq(vocab_size=16, max_length=8, width=8, depth=1, num_heads=2, dropout=0.0)
    source, target = jnp.asarray([[3, 4, 5]]), jnp.asarray([[1, 6, 7]])
    variables = model.init(jax.random.key(0), source, target)
    wide = [jnp.pad(tokens, ((0, 0), (0, 4))) for tokens in (source, target)]
    np.testing.assert_allclose(model.apply(variables, source, target), model.apply(variables, *wide)[:, :3], rtol=1e-5, atol=1e-6)


def test_an_evaluation_leaves_the_running_averages():
    model = ResNet(num_classes=3, width=4, groups=(1, 1))
    images = jax.random.normal(jax.random.key(1), (2, 8, 8, 1))
    variables = model.init(jax.random.key(0), images)
    _, new = model.apply(variables, images, train=False, mutable=["batch_stats"])
    compare("batch_stats", new["batch_stats"], variables["batch_stats"])
