"""The published experiment: its rows are complete, and the table's arithmetic is that of its rows."""

import json

import pytest

import experiments.published.main as published
from experiments.options import ConfigError
from experiments.published.main import Config, Planned, plan, run, table
from experiments.published.rows import ROWS, Published
from jaxpp.targets import TARGETS
from models.named import MODELS, named

SMALL = {"vocab_size": 512, "width": 64, "depth": 2, "num_heads": 1}
STEP = {"length": 64, "sequences": 2, "microbatches": 3, "by": "somebody (C)", "source": "https://example.org", "where": "table 1"}


def row(layout="fsdp", tokens_per_second=1e6, **others):
    return Published("gpt2-124m", "a100-80gb", 2, layout, tokens_per_second=tokens_per_second, changes=SMALL, **STEP | others)


def test_there_are_enough_rows_and_each_says_what_ran_and_where_it_was_read():
    assert len(ROWS) >= 15
    assert {each.card for each in ROWS} >= {"a100-40gb", "a100-80gb", "h100", "rtx-4090"}
    assert {each.layout for each in ROWS} == {"replicas", "zero-1", "fsdp", "pipeline"}
    cards = {card.name for card in TARGETS}
    for each in ROWS:
        assert each.model in MODELS and each.source.startswith("https://") and each.where and each.by
        assert each.card in cards or not isinstance(each.gpu, str)
        assert 1 <= each.gpus <= 64 and each.gpus % each.hosts == 0 and each.gpus // each.hosts <= 8
        assert named(each.model, attention=each.attention, **each.changes).batch(1, each.length).shape == (1, each.length + 1)
        assert 1e-3 < each.seconds < 1e3
    assert len({(each.name, each.by, each.attention, each.where) for each in ROWS}) == len(ROWS)


def test_rows_have_the_tokens_of_their_tables():
    tokens = {each.name: each.tokens for each in ROWS if each.by.startswith("MosaicML")}  # GlobalBatchSize (T)
    assert tokens["mpt-125m, 8 x a100-80gb, 2048"] == 1_048_576
    assert tokens["mpt-7b, 8 x h100, 2048"] == 98_304
    assert tokens["mpt-30b, 32 x h100, 2048, recomputed"] == 2_752_512
    assert tokens["mpt-70b, 64 x h100, 2048, recomputed"] == tokens["mpt-70b, 64 x a100-80gb, 2048, recomputed"] == 4_194_304
    (pipelined,) = (each for each in ROWS if each.name.startswith("llama-3-8b, 8 x a800, 2048, 1f1b"))
    assert pipelined.tokens == 256 * 2048 and pipelined.replicas == 1


def test_the_table_says_the_error_whether_it_is_in_the_range_and_whether_the_bound_holds(monkeypatch):
    numbers = {1e6: (0.5e-3, 0.8e-3, 0.6e-3, 1.0e-3, 1e9), 4e6: (0.5e-3, 0.8e-3, 0.6e-3, 1.0e-3, 1e9)}
    rows = [row(tokens_per_second=speed, length=length) for speed, length in zip(numbers, (64, 128), strict=True)]
    monkeypatch.setattr(published, "ROWS", rows)
    monkeypatch.setattr(published, "plan", lambda each: Planned(each, each.seconds, *numbers[each.tokens_per_second]))
    result = run(Config(no_figure=True))
    assert result.rows[0].measured == pytest.approx(768e-6) and result.rows[0].error == pytest.approx(0.8 / 0.768 - 1)
    first, second = (line.split() for line in table(result).splitlines()[1:3])
    assert first[-3:] == ["+4%", "yes", "yes"] and second[-3:] == ["+108%", "NO", "NO"]
    assert "median error of the prediction is 56%, the largest 108%" in table(result)
    assert "1 lie within the range that is printed; the bound holds for 1" in table(result)
    assert len(json.loads(result.to_json())["rows"]) == 2


def test_rows_of_one_step_have_one_plan(monkeypatch):
    rows, plans = [row(), row(tokens_per_second=2e6, by="somebody else"), row("zero-1")], []
    monkeypatch.setattr(published, "ROWS", rows)
    monkeypatch.setattr(published, "plan", lambda each: plans.append(each) or Planned(each, each.seconds, 1.0, 2.0, 1.5, 3.0, 1e9))
    first, second, third = run(Config(no_figure=True)).rows
    assert plans == [rows[0], rows[2]]
    assert second.row == rows[1] and second.measured == first.measured / 2 and second.predicted == first.predicted
    assert third.row == rows[2]


def test_words_choose_rows_and_those_that_choose_none_are_refused():
    assert {each.model for each in Config(rows=("llama",)).chosen} == {"llama-3-8b"}
    assert Config().chosen == list(ROWS)
    with pytest.raises(ConfigError, match="--rows bert: no row has such a name"):
        Config(rows=("bert",))


@pytest.mark.targets
@pytest.mark.parametrize("layout", [pytest.param("replicas", marks=pytest.mark.slow), "zero-1", "fsdp", "pipeline"])
def test_a_small_step_is_planned_in_every_layout(layout):
    pytest.importorskip("jax_plugins.xla_cuda12")
    found = plan(row(layout))
    assert found.bound <= found.low <= found.predicted <= found.high
    hidden = 12 * SMALL["width"] ** 2 * SMALL["depth"] + SMALL["width"] * SMALL["vocab_size"]
    products = 6 * found.row.tokens * hidden  # without those of attention
    assert products <= found.products < 1.35 * products


@pytest.mark.targets
def test_recomputing_runs_all_of_a_layer_again_but_its_last_product():
    pytest.importorskip("jax_plugins.xla_cuda12")
    kept, again = plan(row("replicas")), plan(row("replicas", recompute=True))
    width, tokens = SMALL["width"], kept.row.tokens
    layer = 2 * tokens * (12 - 4) * width**2  # the product that makes the result of a layer is the largest, and nothing reads it
    attention = 2 * tokens * kept.row.length * width  # causal
    assert again.products - kept.products == pytest.approx(SMALL["depth"] * (layer + attention), rel=0.05)
