"""Pipelined equals plain: loss, aux and every gradient leaf, for every schedule, number of stages, microbatches and dtype."""

import contextlib
from collections.abc import Sequence

import chex
import jax
import pytest

import jaxpp
from jaxpp.engine.engine import Engine, open_engine
from jaxpp.options import Options
from jaxpp.schedule import SCHEDULES
from jaxpp.verify import GRAD_FLOOR, compare, oracle
from tests.models import gpt_case, mlp_case, schedule_for

CASES = {"mlp": mlp_case, "gpt": gpt_case}
STAGES = (1, 2, 3, 4, 8)
SAME_BITS = (  # at the same cuts; the docstrings of the others say why not
    ("naive", "gpipe", "1f1b", "interleaved"),
    ("zb-h1", "zb-h2", "zb-v", "v-half", "v-min"),
)


def check(model: str, dtype: str, stages: int, microbatches: int, names: Sequence[str] = tuple(SCHEDULES), **options: int) -> None:
    """Compare every schedule of these names with the oracle, and those that add in the same order bit by bit."""
    with jax.enable_x64(True) if dtype == "float64" else contextlib.nullcontext():
        case = CASES[model](dtype, **options)
        loss, aux, grads = oracle(
            case.loss_fn, case.params, case.batch, case.key, microbatches, has_aux=True, reducers=case.reducers
        )
        found = {}
        for name, engine in engines(case, stages, microbatches, names).items():
            leaves = engine.bring(case.params)
            outcome = engine.run("grads", leaves, case.batch, case.key)
            found[name] = outcome
            compare(f"{name} loss", outcome.loss, loss)
            compare(f"{name} aux", outcome.aux, aux)
            compare(f"{name} grads", jax.tree.structure(case.params).unflatten(outcome.grads), grads, floor=GRAD_FLOOR)
        for same in SAME_BITS:
            outcomes = [found[name] for name in same if name in found]
            chex.assert_trees_all_equal(*outcomes, *outcomes[:1])


def engines(case, stages: int, microbatches: int, names: Sequence[str]) -> dict[str, Engine]:
    """One engine a schedule, all with the same cuts and compiled programs."""
    options = {"has_aux": True, "weight": None, "cuts": None, "devices": None}
    first = open_engine(
        Options.of(case.loss_fn, num_stages=stages, num_microbatches=microbatches, schedule="naive", **options),
        None,
        (case.params,),
        case.batch,
        case.key,
    )
    made = {name: schedule_for(name, stages, microbatches) for name in names}
    return {name: first.with_schedule(schedule) for name, schedule in made.items() if schedule}


SMALL_GPT = {"batch_size": 5, "depth": 1, "width": 8}


@pytest.mark.parametrize(
    ("model", "dtype", "stages", "microbatches", "sizes"),
    [
        ("mlp", "float64", 1, 1, {}),
        ("mlp", "float64", 2, 3, {}),
        pytest.param("mlp", "float32", 3, 5, {}, marks=pytest.mark.slow),
        ("mlp", "float64", 4, 2, {}),
        pytest.param("mlp", "float32", 8, 9, {}, marks=pytest.mark.long),
        pytest.param("mlp", "float64", 8, 2, {}, marks=pytest.mark.slow),
        ("gpt", "float64", 2, 2, SMALL_GPT),
        pytest.param("gpt", "float64", 3, 4, {}, marks=pytest.mark.long),
        pytest.param("gpt", "float32", 4, 4, {}, marks=pytest.mark.slow),
    ],
)
def test_pipelined_equals_plain(model, dtype, stages, microbatches, sizes):
    check(model, dtype, stages, microbatches, **sizes)


@pytest.mark.slow
@pytest.mark.parametrize("microbatches", range(1, 10))
@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("model", CASES)
def test_the_full_grid_equals_plain(model, dtype, stages, microbatches):
    check(model, dtype, stages, microbatches)


def test_the_result_does_not_depend_on_the_cuts():
    case = gpt_case("float32", **SMALL_GPT)
    found = [
        jaxpp.value_and_grad(case.loss_fn, num_stages=2, num_microbatches=1, has_aux=True, cuts=cuts)(
            case.params, case.batch, case.key
        )
        for cuts in (None, ["h_0/attn/out"])
    ]
    (loss, grads), (other_loss, other_grads) = found
    compare("loss", other_loss, loss)
    compare("grads", other_grads, grads, floor=GRAD_FLOOR)
