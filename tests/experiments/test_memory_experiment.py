"""The comparison of forecast and measurement: they agree, the table and the figure say so, wrong sizes are refused."""

import dataclasses
import json

import jax
import pytest
from PIL import Image

from experiments.memory.figure import Bars, bars_figure
from experiments.memory.main import Config, main, run, table
from experiments.memory.measure import PARTS
from experiments.memory.pairs import PAIRS, gpt, mlp
from jaxpp.errors import JaxppError
from jaxpp.schedule import SCHEDULES
from tests.figures import assert_apart, key_words

TINY = Config(
    pairs=("mlp-1f1b", "mlp-zb-v-recompute"),
    ranks=2,
    microbatches=3,
    mlp_width=16,
    mlp_depth=3,
    mlp_batch=18,
    no_figure=True,
)


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    return run(dataclasses.replace(TINY, no_figure=False, figure=tmp_path_factory.mktemp("out") / "folder" / "memory.png"))


@pytest.mark.long
def test_what_is_measured_at_any_moment_is_within_a_tenth_of_the_forecast(result):
    assert [row.pair.name for row in result.rows] == list(TINY.pairs)
    for row in result.rows:
        assert len(row.holdings) == 2
        for holding in row.holdings:
            assert holding.ratio == pytest.approx(1, rel=0.1), (row.pair.name, holding)
            assert holding.forecast == holding.found
            assert holding.found[PARTS.index("optimizer")] >= 2 * holding.found[PARTS.index("parameters")]
    held = {row.pair.name: [holding.microbatches for holding in row.holdings] for row in result.rows}
    assert held["mlp-1f1b"] == [2, 1]
    assert all(0 < count <= 2 for counts in held.values() for count in counts)
    assert [row.stages for row in result.rows] == [2, 4]


@pytest.mark.long
def test_arrays_that_were_there_before_are_not_counted(result):
    mine = jax.device_put(jax.numpy.ones(100_000), jax.devices()[0])
    again = run(dataclasses.replace(TINY, pairs=("mlp-1f1b",)))
    assert again.rows[0].worst.ratio == pytest.approx(1, rel=0.1)
    assert again.rows[0].worst.forecast == result.rows[0].worst.forecast
    assert mine.nbytes > 2 * again.rows[0].worst.measured


@pytest.mark.long
def test_the_table_has_a_row_a_pair_and_no_labels_of_the_figure_overlap(result):
    head, *lines = table(result).splitlines()
    assert head.split()[:6] == ["pair", "stages", "device", "forecast", "measured", "ratio"]
    assert [line.split()[:2] for line in lines[:2]] == [[row.pair.name, str(row.stages)] for row in result.rows]
    assert lines[4].startswith("forecast / measured, all devices: from ")
    assert [line.split()[0] for line in lines[-2:]] == list(TINY.pairs)
    with Image.open(result.figure) as image:
        image.verify()
    sizes = tuple(range(2**20, 2**20 * (len(PARTS) + 1), 2**20))
    figure = bars_figure([Bars(name, "cuda:0", sizes, sizes, sum(sizes), 4.5) for name in PAIRS], "a heading")
    assert_apart(figure)
    assert len(figure.axes[0].texts) == 4 * len(PAIRS) and len(key_words(figure)) == len(PARTS)


@pytest.mark.long
def test_without_matplotlib_there_is_a_message_and_no_figure(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("experiments.options.has_matplotlib", lambda: False)
    config = dataclasses.replace(TINY, pairs=("mlp-1f1b",), no_figure=False, figure=tmp_path / "memory.png")
    assert run(config).figure is None
    assert (
        'no figure, as matplotlib is not installed. Fix: pip install -e ".[figures]" in the checkout of jaxpp'
        in capsys.readouterr().err
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_the_command_prints_the_table_and_writes_the_line_of_json(monkeypatch, capsys, tmp_path):
    path = tmp_path / "results.jsonl"
    sizes = "--ranks 2 --microbatches 3 --mlp-width 16 --mlp-depth 3 --mlp-batch 18"
    monkeypatch.setattr("sys.argv", f"memory --pairs mlp-1f1b {sizes} --no-figure --json {path}".split())
    main()
    rows = capsys.readouterr().out.splitlines()
    assert rows[1].split()[0] == "mlp-1f1b"
    assert rows[-1] == f"all numbers: {path}"
    found = json.loads(path.read_text())
    assert found["versions"]["jax"] == jax.__version__
    assert found["config"]["mlp_batch"] == 18
    assert found["rows"][0]["holdings"][0]["measured"] > 0
    assert len(found["devices"]) == len(jax.devices())


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
@pytest.mark.long
def test_the_problems_compute_in_their_type_and_end_in_a_float32_loss(compute):
    key = jax.random.key(0)
    for problem in (mlp(8, 2, 4, compute), gpt(8, 2, 2, 4, 3, 0.5, compute)):
        params = jax.eval_shape(problem.init, key)
        assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {"float32"}
        traced = jax.make_jaxpr(problem.loss_fn)(params, problem.batch, key)
        assert ("bf16" in str(traced)) == (compute == "bfloat16")
        assert [(aval.shape, aval.dtype.name) for aval in traced.out_avals] == [((), "float32")]


def test_the_pairs_are_of_all_the_kinds_that_are_promised():
    assert len(PAIRS) >= 8
    assert {pair.model for pair in PAIRS.values()} == {"mlp", "gpt"}
    assert (
        {"gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "v-min"} <= {pair.schedule for pair in PAIRS.values()} <= set(SCHEDULES)
    )
    assert {"keep", "least", "recompute", "dots_with_no_batch_dims_saveable"} == {pair.remat for pair in PAIRS.values()}
    assert all(callable(pair.policy) or pair.policy == pair.remat for pair in PAIRS.values())


@pytest.mark.long
def test_sizes_that_jaxpp_refuses_name_the_pair():
    with pytest.raises(JaxppError, match="each microbatch needs at least one example") as caught:
        run(dataclasses.replace(TINY, mlp_batch=2))
    assert caught.value.__notes__ == ["This was the pair mlp-1f1b."]
