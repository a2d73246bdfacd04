"""The zoo: its table and line of JSON, its data, and what it refuses."""

import dataclasses
import json
import pathlib
import sys

import jax
import numpy as np
import pytest

import models
from experiments.zoo import main as module
from experiments.zoo.data import LENGTH, PAD, START, digits, held_out_batches, lines, sampler
from experiments.zoo.main import CASES, Config, main, run, table
from experiments.zoo.train import crossings
from jaxpp.errors import JaxppError, VerifyError

TINY = Config(models=("mlp", "resnet"), stages=2, microbatches=2, batch=16, steps=12)


@pytest.fixture(scope="module")
def result():
    return run(TINY)


@pytest.mark.slow
def test_each_model_learns_something_and_has_a_row_in_the_table_and_the_line_of_json(monkeypatch, capsys, tmp_path, result):
    assert [(row.model, row.num_stages) for row in result.rows] == [("mlp", 2), ("resnet", 2)]
    for row in result.rows:
        assert row.after < row.before
        assert row.num_params > 1000
        assert 0 < row.kept <= row.keepable
    head, *rows = table(result).splitlines()
    assert head.split("  ")[0] == "model"
    for line, row in zip(rows, result.rows, strict=True):
        assert line.split()[0] == row.model
        assert f"{row.before:.3f} -> {row.after:.3f}" in line
        assert line.endswith(row.crossings)
    found = json.loads(result.to_json())
    assert found["config"]["steps"] == TINY.steps
    assert found["versions"]["jax"] == jax.__version__
    assert found["rows"][0]["after"] == result.rows[0].after
    assert found["rows"][0]["stages"] == result.rows[0].stages
    path = tmp_path / "results.jsonl"
    monkeypatch.setattr(module, "run", lambda config: dataclasses.replace(result, config=config))
    monkeypatch.setattr(sys, "argv", f"zoo --models mlp --json {path}".split())
    main()
    assert capsys.readouterr().out == f"{table(result)}\nall numbers: {path}\n"
    assert json.loads(path.read_text())["rows"][0]["after"] == result.rows[0].after


def test_there_is_a_task_for_every_model():
    elsewhere = {"__init__", "adapters", "llama", "named"}  # trained by experiments/tasks, and by tests of named models
    assert set(CASES) == {path.stem for path in pathlib.Path(models.__file__).parent.glob("*.py")} - elsewhere


@pytest.mark.long
def test_every_case_is_a_loss_of_the_form_it_says():
    for name, make in CASES.items():
        case = make(4, 0)
        start = jax.eval_shape(case.init, jax.random.key(0))
        leading = start if case.has_state else (start,)
        keys = [jax.random.key(0)] if case.takes_key else []
        for found in (
            jax.eval_shape(case.loss_fn, *leading, case.batch(0), *keys),
            jax.eval_shape(case.eval_loss, *leading, case.held_out[0]),
        ):
            loss, (state, _) = found if case.has_state else (found, (None, {}))
            assert (loss.shape, loss.dtype) == ((), "float32"), name
            assert state is None or jax.tree.structure(state) == jax.tree.structure(leading[1])


def test_digits_are_images_from_0_to_1_and_no_image_is_in_both_parts():
    train, held_out = digits()
    assert train["image"].shape[1:] == (8, 8, 1) == held_out["image"].shape[1:]
    assert len(train["image"]) + len(held_out["image"]) == 1797
    assert train["image"].min() == 0 and train["image"].max() == 1
    assert set(held_out["label"]) == set(range(10))


@pytest.mark.long
def test_a_source_is_its_target_in_small_letters():
    for part in lines():
        source, target = part["source"][:50], part["target"][:50]
        assert source.shape == (50, LENGTH) and target.shape == (50, LENGTH + 1)
        assert (target[:, 0] == START).all()
        for small, line in zip(source, target[:, 1:], strict=True):
            written = bytes(line[line != PAD].astype("uint8"))
            assert bytes(small[small != PAD].astype("uint8")) == written.lower() != written


def test_batches_depend_on_the_seed_and_the_step_alone():
    batch, same, other = (sampler(np.arange(100), 8, seed) for seed in (0, 0, 1))
    np.testing.assert_array_equal(batch(3), same(3))
    assert (batch(3) != batch(4)).any() and (batch(3) != other(3)).any()
    held_out = held_out_batches(np.arange(100), 8)
    assert held_out[0][0] == 0 and held_out[-1][-1] == 99


def test_what_crosses_is_listed_shape_by_shape():
    sends = [("f32[8,64] to 1", "i32[8] to 1, 2"), ("f32[8,64] to 2",), ()]
    assert crossings(sends) == "f32[8,64] 0>1 1>2, i32[8] 0>1 0>2"
    assert crossings([()]) == "nothing"


def test_too_many_stages_name_the_model():
    with pytest.raises(JaxppError, match="a loss that can be cut into") as caught:
        run(dataclasses.replace(TINY, models=("mlp",), stages=200))
    assert caught.value.__notes__ == ["This was the model mlp."]


@pytest.mark.long
def test_a_step_that_does_not_equal_the_oracle_ends_the_run(monkeypatch):
    def differs(*args):
        raise VerifyError("verify", "it differs", "1", "look")

    monkeypatch.setattr("jaxpp.Pipeline.verify", differs)
    with pytest.raises(VerifyError) as caught:
        run(dataclasses.replace(TINY, models=("mlp",), steps=1))
    assert caught.value.__notes__ == ["This was the model mlp."]
