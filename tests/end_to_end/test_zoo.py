"""Every model of models/ is cut and run as it is: each schedule equals the oracle, loss, gradients and model state."""

import contextlib
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models
from jaxpp.engine.engine import Engine, open_engine
from jaxpp.options import Options
from jaxpp.schedule import SCHEDULES
from jaxpp.verify import GRAD_FLOOR, compare, oracle
from models.resnet import ResNet
from models.seq2seq import Seq2Seq
from tests.models import ZOO as CASES
from tests.models import ZooCase, schedule_for, seq2seq_case

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


def engines(case: ZooCase, start: Any, stages: int, microbatches: int) -> dict[str, Engine]:
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
    named = {"__init__", "llama", "named"}  # named models have tests of their own
    assert set(CASES) == {path.stem for path in pathlib.Path(models.__file__).parent.glob("*.py")} - named


@pytest.mark.parametrize(
    ("model", "dtype", "stages"),
    [
        pytest.param("mlp", "float32", 4, marks=pytest.mark.long),  # gpt: in test_transparency.py
        pytest.param("resnet", "float64", 4, marks=pytest.mark.long),
        pytest.param("unet", "float64", 2, marks=pytest.mark.long),
        pytest.param("seq2seq", "float32", 2, marks=pytest.mark.long),
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


@pytest.mark.long
def test_padding_changes_no_prediction():
    model = Seq2Seq(vocab_size=16, max_length=8, width=8, depth=1, num_heads=2, dropout=0.0)
    source, target = jnp.asarray([[3, 4, 5]]), jnp.asarray([[1, 6, 7]])
    variables = model.init(jax.random.key(0), source, target)
    wide = [jnp.pad(tokens, ((0, 0), (0, 4))) for tokens in (source, target)]
    np.testing.assert_allclose(model.apply(variables, source, target), model.apply(variables, *wide)[:, :3], rtol=1e-5, atol=1e-6)


@pytest.mark.long
def test_an_evaluation_leaves_the_running_averages():
    model = ResNet(num_classes=3, width=4, groups=(1, 1))
    images = jax.random.normal(jax.random.key(1), (2, 8, 8, 1))
    variables = model.init(jax.random.key(0), images)
    _, new = model.apply(variables, images, train=False, mutable=["batch_stats"])
    compare("batch_stats", new["batch_stats"], variables["batch_stats"])
