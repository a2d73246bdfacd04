"""Pipe x data x model: it equals the plain loop, the bytes are those that they should be, meshes that do not fit are refused."""

import dataclasses
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from PIL import Image

from experiments.mesh import main as module
from experiments.mesh.figure import Bar, axes_figure
from experiments.mesh.main import MODELS, Config, ConfigError, every_mesh, main, run, table
from experiments.mesh.measure import differs
from experiments.mesh.plain import Trained, furthest
from experiments.plain import plain_step
from jaxpp.errors import JaxppError, VerifyError
from tests.figures import assert_apart, key_words

TINY = Config(
    models=("mlp",),
    meshes=("2x2x2", "2x4x1"),
    shards=("gradients",),
    steps=2,
    microbatches=4,
    batch=8,
    gpt_width=16,
    gpt_depth=2,
    gpt_heads=2,
    gpt_length=8,
    dropout=0.2,
    mlp_width=64,
    mlp_depth=4,
    rounds=1,
    dtype="float64",
    no_figure=True,
)
FLOAT = 8  # bytes


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    return run(dataclasses.replace(TINY, no_figure=False, figure=tmp_path_factory.mktemp("out") / "folder" / "mesh.png"))


@pytest.fixture(scope="module")
def gpt():
    (row,) = run(dataclasses.replace(TINY, models=("gpt",), meshes=("2x2x2",))).rows
    return row


@pytest.mark.slow
def test_every_mesh_computes_what_one_device_computes(result, gpt):
    # In float32 the parameters were compared with 1e-4, and a busy machine, which divides sums otherwise, came to 1.03e-4: the bias
    # of an attention key has a gradient of rounding alone, of which Adam makes steps.
    assert [(row.model, str(row.shape), row.microbatches) for row in result.rows] == [("mlp", "2x2x2", 2), ("mlp", "2x4x1", 1)]
    for row in (*result.rows, gpt):
        assert row.equal, row.reason
        assert len(row.losses) == TINY.steps
        assert row.loss_apart < 1e-12
        assert row.params_apart < 1e-11
    assert result.oracles["mlp"] == pytest.approx(result.rows[0].losses, rel=1e-12)


@pytest.mark.slow
def test_the_bytes_that_cross_and_that_a_device_holds_are_those_that_the_guide_says(result, gpt):
    for row in (*result.rows, gpt):
        assert row.data.times == row.shape.pipe
        in_a_rank = row.shape.data * row.shape.model
        assert row.data.num_bytes == sum(row.params) + FLOAT * in_a_rank
        assert row.beyond == FLOAT * in_a_rank
    (row,), whole = result.divided, result.rows[0]
    assert (
        row.equal and row.losses == pytest.approx(whole.losses, rel=1e-12) and (row.shard, str(row.shape)) == ("gradients", "2x2x2")
    )
    assert row.params == whole.params
    assert all(2 * part <= full + 16 for part, full in zip(row.optimizer, whole.optimizer, strict=True))  # a count stays whole
    assert 0 < row.around - row.around_at_least < 2000  # the loss, and the parts of a norm
    assert whole.around == whole.around_at_least + FLOAT * 4  # the loss, on each device of the last rank
    lines = [line.split() for line in table(result).splitlines()]
    assert [line[2] for line in lines if line[:2] == ["mlp", "2x2x2"]][-2:] == ["-", "gradients"]
    whole, sharded = result.rows[1], result.rows[0]
    pairs = zip(whole.params, sharded.params, strict=True)
    assert all(half < 0.6 * full for full, half in pairs)
    assert sum(sharded.reduces) == TINY.mlp_depth // 2
    assert (whole.model_axis.times, whole.model_axis.num_bytes, whole.reduces) == (0, 0, (0, 0))
    layers = 1 + 2 * TINY.gpt_depth  # the embedding, then the attention and the MLP of each block
    assert layers < sum(gpt.reduces) <= layers + 3  # and the loss over a vocabulary in two halves: its maximum and its sums
    assert sharded.model_axis.num_bytes > 0
    assert all(2 * param <= opt < 2 * param + 9 for param, opt in zip(sharded.params, sharded.optimizer, strict=True))
    for row in result.rows:
        crossing = FLOAT * TINY.batch * TINY.mlp_width * row.shape.model
        assert (row.sent.activations, row.sent.cotangents, row.sent.tied) == (crossing, crossing, 0)
        assert row.by_axis[0] == sum(row.sent) >= 2 * crossing
    assert gpt.sent.activations == gpt.sent.cotangents == FLOAT * TINY.batch * TINY.gpt_length * TINY.gpt_width * 2
    embedding = FLOAT * 256 * TINY.gpt_width
    assert gpt.sent.tied == 2 * embedding + 2 * embedding  # to both replicas, and each one's gradient back


@pytest.mark.slow
def test_the_tables_the_figure_and_the_line_of_json_show_every_mesh(monkeypatch, capsys, tmp_path, result):
    text = table(result)
    lines = text.splitlines()
    assert lines[0].startswith("mlp, 2 steps on one device: loss ")
    rows = [line.split() for line in lines if line.startswith("mlp ")]
    assert [row[:2] for row in rows[:4]] == [["mlp", "2x2x2"], ["mlp", "2x4x1"]] * 2
    assert [row[4] for row in rows[:2]] == ["yes", "yes"]
    assert rows[2][-2:] == list(map(str, result.rows[0].reduces))
    assert text.endswith(result.rows[0].table)
    assert "mlp on 2x2x2: the collectives of a step" in text
    with Image.open(result.figure) as image:
        image.verify()
    bars = [Bar(str(shape), (0, 2**20 * k, 2**21)) for k, shape in enumerate(every_mesh(8))]
    figure = axes_figure([(model, bars) for model in MODELS], "a heading")
    assert_apart(figure)
    assert sum(len(axes.texts) for axes in figure.axes) == len(MODELS) * len(bars) and len(key_words(figure)) == 3
    path = tmp_path / "results.jsonl"
    monkeypatch.setattr(module, "run", lambda config: dataclasses.replace(result, config=config))
    monkeypatch.setattr(sys, "argv", f"mesh --models mlp --no-figure --json {path}".split())
    main()
    assert capsys.readouterr().out == f"{table(result)}\nfigures: {result.figure}\nall numbers: {path}\n"
    found = json.loads(path.read_text())
    first = found["rows"][0]
    assert (first["shape"], first["beyond"], first["data"]["times"]) == ("2x2x2", result.rows[0].beyond, 2)
    assert first["sent"]["activations"] == result.rows[0].sent.activations
    assert "table" not in first and {"axes", "kind", "count", "num_bytes"} == set(first["sums"][0])
    assert found["versions"]["jax"] == jax.__version__


@pytest.mark.slow
def test_a_step_that_is_not_the_oracles_is_a_no_and_the_command_fails_after_its_tables(monkeypatch, capsys, result):
    class Wrong:
        def verify(self, *args):
            raise VerifyError("verify", "it differs", "1", "look")

    assert differs(Wrong(), None, None, None).startswith("verify: it differs.")
    row = dataclasses.replace(result.rows[0], equal=False, reason="verify: it differs.")
    monkeypatch.setattr(module, "run", lambda config: dataclasses.replace(result, rows=(row,)))
    monkeypatch.setattr(sys, "argv", ["mesh"])
    with pytest.raises(SystemExit, match=r"^mesh: mlp 2x2x2 does not equal the oracle\. verify: it differs"):
        main()
    assert next(line for line in capsys.readouterr().out.splitlines() if line.startswith("mlp ")).split()[4] == "no"


@pytest.mark.long
def test_the_plain_step_is_the_mean_over_microbatches_each_with_its_key():
    def loss_fn(params, batch, key):
        return jnp.mean((batch @ params) ** 2) + jax.random.normal(key) * params.sum()

    params, batch, key = jnp.arange(3.0), jnp.asarray(np.random.default_rng(0).normal(size=(6, 3)), "float32"), jax.random.key(1)
    found = [jax.value_and_grad(loss_fn)(params, batch[2 * i : 2 * i + 2], jax.random.fold_in(key, i)) for i in range(3)]
    loss, grad = (sum(part) / 3 for part in zip(*found, strict=True))
    optimizer = optax.sgd(0.1)
    for scan in (True, False):
        start = jnp.arange(3.0), optimizer.init(params)
        (after, _), (got, norm) = plain_step(loss_fn, optimizer, 3, scan=scan)(start, batch, key)
        np.testing.assert_allclose(after, params - 0.1 * grad, rtol=1e-5)
        np.testing.assert_allclose(got, loss, rtol=1e-5)
        np.testing.assert_allclose(norm, jnp.linalg.norm(grad), rtol=1e-5)


def test_differences_are_relative_to_each_leaf_but_not_to_one_that_is_nearly_nothing():
    wanted = {"large": np.array([100.0, 2.0]), "small": np.array([1e-9])}
    assert furthest(wanted, wanted) == 0
    assert furthest(wanted | {"large": np.array([100.0, 4.0])}, wanted) == pytest.approx(0.02)
    assert furthest(wanted | {"small": np.array([2e-9])}, wanted) == pytest.approx(1e-9)


def test_every_mesh_of_eight_devices_is_there_once():
    shapes = every_mesh(8)
    assert len(set(shapes)) == len(shapes) == 10
    assert {"8x1x1", "4x2x1", "2x4x1", "4x1x2", "2x2x2", "1x4x2", "2x1x4", "1x8x1"} < set(map(str, shapes))
    assert Config(every=True).shapes == shapes
    assert every_mesh(6) == ()


def test_more_devices_than_there_are_are_refused_before_anything_is_compiled(monkeypatch):
    monkeypatch.setattr(module, "train_plainly", None)
    with pytest.raises(ConfigError, match=r"--devices 16: a mesh has no device twice, and there are 8 \(cpu\)\. Fix: "):
        run(dataclasses.replace(TINY, devices=16, meshes=("2x4x2",)))


def test_what_jaxpp_refuses_names_the_model_and_the_mesh(monkeypatch):
    def refuses(*args):
        raise JaxppError("cuts", "it cannot be cut", "1", "look")

    monkeypatch.setattr(module, "train_plainly", lambda *args: Trained((1.0,), {}))
    monkeypatch.setattr(module, "measure", refuses)
    with pytest.raises(JaxppError) as caught:
        run(TINY)
    assert caught.value.__notes__ == ["This was mlp on 2x2x2."]
